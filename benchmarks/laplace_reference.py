"""Numbers of laplace-torch on a small problem, for tests/methods/test_laplace.py.

    pip install laplace-torch
    python benchmarks/laplace_reference.py > tests/methods/laplace_torch.json

laplace-torch treats a bias as a Kronecker factor of its own, this library as one more feature: the Kronecker case has none.
"""

import json
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

PRECISIONS = (0.5, 3.0)


def problem() -> dict[str, Tensor]:
    """Inputs, targets and weights: 40 points of 4 features, 3 classes or 2 real targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (40, 4), "weight": (3, 4), "bias": (3,), "test": (5, 4), "noise": (40, 2)}
    made = {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64).round(decimals=6)
        for name, shape in shapes.items()
    }
    logits = made["x"] @ made["weight"].T + made["bias"]
    return {
        **made,
        "classes": (logits + made["noise"].repeat(1, 2)[:, :3]).argmax(1),
        "real": logits[:, :2] + made["noise"],
    }


def measured(problem: dict[str, Tensor]) -> dict[str, Any]:
    """Case -> what laplace-torch says: the matrix, evidence at two precisions, variances of outputs, probit predictions."""
    from laplace import Laplace

    found = {}
    for case, structure, bias, kind in (
        ("classification", "full", True, "classification"),
        ("classification kron", "kron", False, "classification"),
        ("regression", "full", True, "regression"),
    ):
        targets, outputs = (problem["classes"], 3) if kind == "classification" else (problem["real"], 2)
        layer = nn.Linear(4, outputs, bias=bias).double()
        layer.weight.data = problem["weight"][:outputs].clone()
        if bias:
            layer.bias.data = problem["bias"][:outputs].clone()
        network = nn.Sequential(nn.Identity(), layer)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(problem["x"], targets), batch_size=40)
        noise = {} if kind == "classification" else {"sigma_noise": 0.3}
        laplace = Laplace(network, kind, subset_of_weights="last_layer", hessian_structure=structure, **noise)
        laplace.fit(loader)
        entry: dict[str, Any] = {"evidence": {}, "variances": {}, "probabilities": {}}
        for precision in PRECISIONS:
            key = str(precision)
            entry["evidence"][key] = float(
                laplace.log_marginal_likelihood(torch.tensor([precision], dtype=torch.float64))
            )
            variance = laplace._glm_predictive_distribution(problem["test"])[1]  # (5, C, C)
            entry["variances"][key] = variance.detach().tolist()
            if kind == "classification":
                entry["probabilities"][key] = laplace(problem["test"], link_approx="probit").detach().tolist()
        found[case] = entry
    return found


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # parts of laplace-torch follow the default, not the network
    at_hand = problem()
    versions = {name: version(name) for name in ("laplace-torch", "torch")}
    tensors = {name: tensor.tolist() for name, tensor in at_hand.items()}
    print(json.dumps({"versions": versions, "problem": tensors, "found": measured(at_hand)}, indent=1))

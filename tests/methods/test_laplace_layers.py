"""Laplace over any layers and outputs: against the Gauss–Newton matrix by automatic differentiation of the whole network."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
import tiny
from refusals import refuses

B, T, C = 5, 3, 4
GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(B, 6, dtype=torch.float64, generator=GENERATOR)
TOKENS = torch.randn(B, T, 6, dtype=torch.float64, generator=GENERATOR)
IMAGES = torch.randn(B, 2, 3, 3, dtype=torch.float64, generator=GENERATOR)


def adapted():
    """A layer with an adapter of rank two, as peft writes them, before a tanh and a head."""
    layers = {"base": nn.Linear(6, 5), "lora_A": nn.Linear(6, 2, bias=False), "lora_B": nn.Linear(2, 5, bias=False)}
    return tiny.Network(
        lambda net, x: net.head(torch.tanh(net.base(x) + 2.0 * net.lora_B(net.lora_A(x))).mean(1)),
        **layers,
        head=nn.Linear(5, C),
    )


def decoder():
    """A decoder classifier: the outputs of its last layer at one token of each row."""
    pick = torch.tensor([2, 0, 1, 2, 1])
    score = nn.Linear(6, C, bias=False)
    return tiny.Network(lambda net, x: net.score(x)[torch.arange(len(x)), pick[: len(x)]], score=score)


def resized():
    """A segmentation network that resizes its maps and calls an auxiliary head last."""

    def run(net, x):
        hidden = torch.tanh(net.body(x))
        out = F.interpolate(net.head(hidden), size=(5, 5), mode="bilinear", align_corners=False)
        return {"out": out, "aux": net.aux(hidden)}

    return tiny.Network(run, body=nn.Conv2d(2, 3, 3, padding=1), head=nn.Conv2d(3, C, 1), aux=nn.Conv2d(3, C, 1))


def tokens(transposed):
    axes = (-1, 1) if transposed else (0, 0)
    return tiny.Network(lambda net, x: net.head(torch.tanh(x)).movedim(*axes), head=nn.Linear(6, C))


CASES = {
    "adapters": (adapted, "*lora*", TOKENS, (B,), ds.Classification()),
    "adapters, regression": (adapted, ["lora_*", "head"], TOKENS, (B, C), ds.Regression(0.6)),
    "adapters, own likelihood": (adapted, "*lora*", TOKENS, (B,), tiny.Sharper()),
    "decoder": (decoder, None, TOKENS, (B,), ds.Classification()),
    "resized": (resized, None, IMAGES, (B, 5, 5), ds.Classification(ignore_index=1)),
    "tokens (B, C, T)": (lambda: tokens(True), None, TOKENS, (B, T), ds.Classification(ignore_index=0)),
    "tokens (B, T, C)": (lambda: tokens(False), None, TOKENS, (B, T), ds.Tokens(ignore_index=0)),
    "positions as classes": (lambda: nn.Linear(6, C), None, TOKENS, (B, C), ds.Classification()),
    "scaled, all layers": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, C), nn.Hardtanh()),
        "*",
        ROWS,
        (B,),
        ds.Classification(),
    ),
}


def build(case):
    make, layers, x, shape, likelihood = CASES[case]
    torch.manual_seed(1)
    network = make().double().eval()
    classes = T if case == "positions as classes" else C
    y = (
        torch.randn(shape, dtype=torch.float64)
        if isinstance(likelihood, ds.Regression)
        else torch.randint(classes, shape)
    )
    return network, layers, x, y, likelihood


def exact_curvature(network, names, x, y, likelihood, weight):
    """(P, P) Gauss–Newton matrix in these parameters, weights and bias of an output side by side as Laplace orders them."""
    parameters = {name: network.get_parameter(name).detach() for name in names}

    def outputs(given):
        found = torch.func.functional_call(network, given, (x,))
        return found["out"] if isinstance(found, dict) else found

    counted = likelihood.target_mask(y)
    w = weight.reshape(-1, *[1] * (y.ndim - 1)) * (1.0 if counted is None else counted)
    f = outputs(parameters).detach()

    def nll(f):
        log_prob = likelihood.log_prob(f, y)
        return (
            -(w.reshape(*w.shape[: log_prob.ndim]) * log_prob).sum()
            if log_prob.ndim == w.ndim
            else -(weight * log_prob).sum()
        )

    hessian = torch.func.jacrev(torch.func.jacrev(nll))(f).reshape(f.numel(), f.numel())
    jacobian = torch.func.jacrev(outputs)(parameters)
    layers = {}
    for name in names:
        part = jacobian[name].reshape(f.numel(), parameters[name].shape[0], -1)
        layers.setdefault(name.rpartition(".")[0], []).append(part)
    j = torch.cat([torch.cat(parts, 2).flatten(1) for parts in layers.values()], 1)
    return j.T @ hessian @ j


@pytest.mark.parametrize("case", CASES)
def test_the_full_curvature_is_the_gauss_newton_matrix(case):
    network, layers, x, y, likelihood = build(case)
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0])
    keywords = {"structure": "full", "layers": layers, "likelihood": likelihood, "prior_precision": 0.7, "samples": 2}
    posterior = ds.Laplace(network, **keywords).fit_posthoc([(x[:2], y[:2], weight[:2]), (x[2:], y[2:], weight[2:])])
    names = posterior.sampled_names()
    halves = (slice(2), slice(2, None))
    parts = [exact_curvature(network, names, x[s], y[s], likelihood, weight[s].double()) for s in halves]
    exact = exact_curvature(network, names, x, y, likelihood, weight.double()) if case != "decoder" else sum(parts)
    start = 0
    for found in posterior.curvature:  # a block of the matrix for each layer
        at = slice(start, start := start + found.mean.numel())
        vectors = found.get_buffer("vectors")
        torch.testing.assert_close(vectors * found.eigenvalues @ vectors.T, exact[at, at], rtol=0, atol=1e-10)
    assert start == len(exact)


def kron_by_hand(network, name, x, y):
    """(Σ g gᵀ ⊗ Σ φ φᵀ) / n over the positions of a layer that outputs depend on, g from a loop over examples and outputs."""
    left = right = count = 0.0
    for row in range(len(x)):
        seen = []
        layer = network.get_submodule(name)
        handle = layer.register_forward_hook(lambda _, given, made, seen=seen: seen.append((given[0], made)))
        logits = network(x[row : row + 1])
        handle.remove()
        p = logits.detach().softmax(1)[0]
        root = torch.linalg.cholesky(torch.diag(p) - torch.outer(p, p) + 1e-14 * torch.eye(len(p), dtype=p.dtype))
        ((phi, made),) = seen
        for direction in root.T:
            (g,) = torch.autograd.grad(logits, made, direction[None], retain_graph=True)
            left = left + g.flatten(0, -2).T @ g.flatten(0, -2)
        phi = phi.detach().flatten(0, -2)
        right, count = right + phi.T @ phi, count + len(phi)
    return torch.kron(left, right) / count


def test_kronecker_factors_are_sums_over_positions_and_layers_share_a_precision(tmp_path):
    network, _, x, y, _ = build("adapters")
    posterior = ds.Laplace(network, layers="*lora*", structure="kron", samples=3)
    posterior.fit_posthoc([(x[:2], y[:2]), (x[2:], y[2:])])
    for name, found in zip(["lora_A", "lora_B"], posterior.curvature, strict=True):
        vectors = torch.kron(found.get_buffer("outputs"), found.get_buffer("features"))
        exact = kron_by_hand(network, name, x, y)
        torch.testing.assert_close(vectors * found.eigenvalues.flatten() @ vectors.T, exact, rtol=0, atol=1e-6)
    assert len({float(found.precision) for found in posterior.curvature}) == 1
    near = [float(posterior.log_marginal_likelihood(posterior.precision * factor)) for factor in (0.9, 1.0, 1.1)]
    assert max(near) == near[1]
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, adapted())
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)
    network_state, member = network.state_dict(), posterior.member(1).state_dict()
    moved = {name for name, t in member.items() if not torch.equal(t, network_state[name])}
    assert moved == set(posterior.sampled_names())


def test_the_kronecker_product_of_a_selected_token_is_that_of_its_features():
    network, _, x, y, _ = build("decoder")
    found = ds.Laplace(network, structure="kron", samples=2).fit_posthoc([(x, y)]).curvature[0]
    features = x[torch.arange(B), torch.tensor([2, 0, 1, 2, 1])]
    plain = ds.Laplace(network.score, structure="kron", samples=2).fit_posthoc([(features, y)]).curvature[0]
    torch.testing.assert_close(found.eigenvalues, plain.eigenvalues, rtol=0, atol=1e-10)


def test_an_adapter_that_starts_at_zero_has_the_priors_variance():
    network, _, x, y, _ = build("adapters")
    network.lora_B.weight.data.zero_()  # as peft does: outputs do not depend on lora_A yet
    posterior = ds.Laplace(network, layers="*lora*", structure="kron", prior_precision=4.0, samples=2)
    posterior.fit_posthoc([(x, y)])
    torch.testing.assert_close(posterior.variance["lora_A.weight"], torch.full((2, 6), 0.25, dtype=torch.float64))
    assert float(posterior.variance["lora_B.weight"].max()) < 0.25


def test_many_outputs_are_estimated_without_bias(monkeypatch):
    network, _, x, y, likelihood = build("resized")
    exact = ds.Laplace(network, likelihood=likelihood, samples=2).fit_posthoc([(x, y)]).curvature[0]
    monkeypatch.setattr("dissensus.methods.parts.last_layer.MOST_OUTPUTS", 10)
    found = ds.Laplace(network, likelihood=likelihood, samples=2).fit_posthoc([(x, y)] * 8, data_size=B).curvature[0]
    a, b = ((each.get_buffer("vectors") * each.eigenvalues) @ each.get_buffer("vectors").T for each in (exact, found))
    assert float((a - b).norm() / a.norm()) < 0.2  # 8 times 64 directions, over five examples
    assert float((a - b).norm() / a.norm()) > 1e-6


def test_layers_that_cannot_be_chosen_are_clear_errors():
    x, y = TOKENS.movedim(0, 1), torch.arange(T) % C
    cases = [
        ("fc", "expected names of layers, got fc, which match no layer; the network has base, lora_A, lora_B, head"),
        ([], "expected a list of names of layers"),
    ]
    for layers, words in cases:
        refuses(
            lambda layers=layers: ds.Laplace(adapted().double(), layers=layers).fit_posthoc(
                [(TOKENS, torch.arange(B) % C)]
            ),
            words,
        )
    twisted = tiny.Network(
        lambda net, x: net.head(torch.tanh(net.body(x.movedim(0, 1))).sum(0)),
        body=nn.Linear(6, 5),
        head=nn.Linear(5, C),
    ).double()
    words = "expected layers with examples on the first axis, got 'body'"
    refuses(lambda: ds.Laplace(twisted, layers="body", structure="full").fit_posthoc([(x, y)]), words)
    ds.Laplace(twisted, layers="body", structure="kron", samples=2).fit_posthoc([(x, y)])
    softmax = nn.Sequential(nn.Linear(6, C), nn.Softmax(1)).double()
    refuses(lambda: ds.Laplace(softmax).fit_posthoc([(ROWS, torch.arange(B) % C)]), "ends? in a softmax")


def test_each_network_of_a_list_has_its_own_curvatures():
    torch.manual_seed(0)
    networks, y = [adapted().double() for _ in range(2)], torch.arange(B) % C
    keywords = {"layers": ["lora_A", "head"], "samples": 3}
    posterior = ds.Laplace(networks, **keywords).fit_posthoc([(TOKENS, y)])
    alone = [ds.Laplace(network, **keywords).fit_posthoc([(TOKENS, y)]) for network in networks]
    for name in ("lora_A.weight", "head.weight", "head.bias"):
        torch.testing.assert_close(posterior.variance[name], torch.stack([each.variance[name] for each in alone]))
    expected = torch.stack([each.log_marginal_likelihood() for each in alone])
    torch.testing.assert_close(posterior.log_marginal_likelihood(), expected)
    assert posterior.predict(TOKENS).member_means.shape == (6, B, C)

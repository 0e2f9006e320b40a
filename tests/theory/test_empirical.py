"""Empirical tangent kernels: three ways to one answer, the budget, and the wide limit."""

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus import theory
from dissensus.nets import Residual


class Cut(nn.Module):
    """Layers with a skip, an activation in place and an output without an axis."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 1)

    def forward(self, x):
        h = torch.nn.functional.relu_(self.a(x))
        return self.c(torch.tanh(self.b(h)) + h)[:, 0]


def ntk_mlp():
    return theory.random_network(ds.nets.MLP(4, 3, hidden=(9, 7)), weight_variance=2.0, bias_variance=0.3)


def frozen():
    network = ds.nets.MLP(4, 3, hidden=(9, 7))
    network.layers[0].weight.requires_grad_(False)
    return network


DENSE = {
    "mlp": lambda: ds.nets.MLP(4, 3, hidden=(9, 7), activation="gelu"),
    "ntk form": ntk_mlp,
    "skip": Cut,
    "frozen": frozen,
    "residual": lambda: nn.Sequential(
        nn.Linear(4, 6), Residual(nn.Sequential(nn.ReLU(), nn.Linear(6, 6))), nn.Linear(6, 2)
    ),
}


def reference(module: nn.Module, x1, x2):
    """Gradients one after the other, by plain autograd."""

    def gradients(x):
        trained = [p for p in module.parameters() if p.requires_grad]
        each = []
        for row in x:
            out = module(row[None]).flatten()
            each.append(
                torch.stack(
                    [torch.cat([g.flatten() for g in torch.autograd.grad(o, trained, retain_graph=True)]) for o in out]
                )
            )
        return torch.stack(each)

    return torch.einsum("nap,mbp->nmab", gradients(x1), gradients(x2))


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("method", ["structured", "jacobian", "products"])
def test_all_ways_give_the_kernel_by_hand(name, method):
    module = DENSE[name]().double()
    x1, x2 = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    both = theory.empirical_ntk(module, x1, x2, method=method)
    assert torch.allclose(both, reference(module, x1, x2), atol=1e-10)
    alone = theory.empirical_ntk(module, x1, method=method)
    assert torch.allclose(alone, reference(module, x1, x1), atol=1e-10)


@pytest.mark.parametrize("method", ["auto", "jacobian", "products"])
def test_any_module_in_eval_mode(method):
    module = ds.nets.ResNet(20, 3).double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert torch.allclose(theory.empirical_ntk(module, x, method=method), reference(module, x, x), rtol=1e-9)


def test_blocks_within_a_budget_give_the_same_and_too_little_is_refused_with_the_size():
    module = ds.nets.MLP(4, 3, hidden=(20,)).double()
    x = torch.randn(30, 4, dtype=torch.float64)
    whole = theory.empirical_ntk(module, x)
    result = 30 * 30 * 9 * 8
    for method, room in (("structured", 2 * 30 * 3 * 23 * 8), ("jacobian", 40_000), ("products", 40_000)):
        assert torch.allclose(theory.empirical_ntk(module, x, method=method, memory=result + room), whole, atol=1e-10)
        with pytest.raises(ValueError, match=r"expected .* beside the kernel within 100 bytes, got \d.*KiB"):
            theory.empirical_ntk(module, x, method=method, memory=result + 100)
    with pytest.raises(ValueError, match=r"expected a kernel of all inputs and outputs within 1 KiB, got 63.3 KiB"):
        theory.empirical_ntk(module, x, memory=1024)


def test_networks_that_are_not_dense_are_known():
    x = torch.randn(3, 4)
    tied = ds.nets.MLP(4, 4, hidden=(4,))
    tied.layers[2].weight = tied.layers[0].weight

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(self.a(x))

    class Mixing(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    for module, why in (
        (tied, "layers share weights"),
        (Twice(), "a layer is called twice"),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "other layers have parameters"),
        (nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3)), "more than one vector"),
    ):
        with pytest.raises(ValueError, match=why):
            theory.empirical_ntk(module, x, method="structured")
        module.double()
        assert torch.allclose(
            theory.empirical_ntk(module, x.double()), reference(module, x.double(), x.double()), atol=1e-10
        )
    with pytest.raises(ValueError, match=r"is not a multiple of a Linear|see one another"):
        theory.empirical_ntk(nn.Sequential(nn.Linear(4, 4), Mixing(4, 4)), x, method="structured")


def test_what_has_no_tangent_kernel_is_refused():
    x = torch.randn(3, 4)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="expected batch norm and dropout in eval mode"):
        theory.empirical_ntk(module, x)
    with pytest.raises(ValueError, match=r"expected examples of one shape, got \(4,\) and \(5,\)"):
        theory.empirical_ntk(module.eval(), x, torch.randn(3, 5))
    with pytest.raises(ValueError, match="expected parameters that require gradients, got none"):
        theory.empirical_ntk(nn.ReLU(), x)
    with pytest.raises(ValueError, match="expected a method of auto, structured"):
        theory.empirical_ntk(module, x, method="fast")


def test_the_cheaper_way_is_taken_by_count():
    """Many outputs and few operations per parameter: products; convolutions use each weight often: gradients."""
    from dissensus.theory.empirical import cheapest

    dense, conv = nn.Sequential(nn.Linear(50, 100)), ds.nets.ResNet(20, 10).eval()
    for module, x, expected in (
        (dense, torch.randn(20, 50), "products"),
        (conv, torch.randn(20, 3, 32, 32), "jacobian"),
    ):
        assert cheapest(module, dict(module.named_parameters()), x, len(x), module(x[:1]).numel()) == expected


@pytest.mark.parametrize("form", ["ntk", "standard"])
def test_a_wide_random_network_has_the_analytic_kernel(form):
    """Relative errors fall as 1/√width: at 1024 units 5 % is more than four of their deviations."""
    x = torch.randn(4, 5, dtype=torch.float64)
    layers = nn.Sequential(nn.Linear(5, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)).double()
    law = {"weight_variance": 2.0, "bias_variance": 0.1, "parameterization": form}
    network = theory.random_network(layers, **law, generator=torch.Generator().manual_seed(0))
    found, expected = theory.empirical_ntk(network, x)[..., 0, 0], theory.kernel(layers, x, **law).ntk
    assert float((found - expected).norm() / expected.norm()) < 0.05


def test_products_keep_to_their_budget_where_activations_outweigh_the_weights():
    """A convolution of few weights over a large image: one column's activations decide how many run at once."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    x = torch.randn(6, 1, 64, 64)
    with pytest.raises(ValueError, match=r"one gradient and what moves along it .* got .* KiB; give it more"):
        theory.empirical_ntk(network, x, method="products", memory=2**18)
    whole = theory.empirical_ntk(network, x, method="jacobian")
    for memory in (2**21, 2**30):  # some columns at a time, all at once
        found = theory.empirical_ntk(network, x, method="products", memory=memory)
        assert torch.allclose(found, whole, rtol=1e-4, atol=1e-5)


def test_precision_is_put_back_as_it_was_found():
    before = torch.backends.cudnn.allow_tf32
    seen = []

    class Looking(nn.Linear):
        def forward(self, x):
            seen.append(torch.backends.cudnn.allow_tf32)
            return super().forward(x) ** 2

    theory.empirical_ntk(Looking(3, 2), torch.randn(4, 3), method="jacobian")
    assert not seen[-1]
    assert torch.backends.cudnn.allow_tf32 == before


@pytest.mark.parametrize("method", ["jacobian", "products"])
def test_a_layer_under_two_names_counts_once_and_keeps_its_tensors(method):
    kernels = []
    for twice in (False, True):
        torch.manual_seed(0)
        network = tiny.Named(twice=twice).double().eval()
        held = dict(network.named_parameters())
        kernels.append(theory.empirical_ntk(network, tiny.points(5)[0], method=method))
        assert all(parameter is held[name] for name, parameter in network.named_parameters())
    torch.testing.assert_close(kernels[1], kernels[0], rtol=0, atol=1e-12)

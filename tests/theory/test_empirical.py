"""Empirical tangent kernels: three ways to one answer, the budget, and the wide limit."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
import tiny
from dissensus import theory
from dissensus.nets import Residual
from refusals import refuses
from thinning import often, thinned


def cut():
    """Layers with a skip, an activation in place and an output without an axis."""

    def forward(self, x):
        h = F.relu_(self.a(x))
        return self.c(torch.tanh(self.b(h)) + h)[:, 0]

    return tiny.Network(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 6, bias=False), c=nn.Linear(6, 1))


def ntk_mlp():
    return theory.random_network(ds.nets.MLP(4, 3, hidden=(9, 7)), weight_variance=2.0, bias_variance=0.3)


def after_relu():
    return nn.Sequential(nn.ReLU(), nn.Linear(6, 6))


def frozen():
    network = ds.nets.MLP(4, 3, hidden=(9, 7))
    network.layers[0].weight.requires_grad_(False)
    return network


DENSE = {
    "mlp": lambda: ds.nets.MLP(4, 3, hidden=(9, 7), activation="gelu"),
    "ntk form": ntk_mlp,
    "skip": cut,
    "frozen": frozen,
    "residual": lambda: nn.Sequential(nn.Linear(4, 6), Residual(after_relu()), nn.Linear(6, 2)),
}


def reference(module: nn.Module, x1, x2):
    """Gradients one after the other, by plain autograd."""

    trained = [p for p in module.parameters() if p.requires_grad]

    def gradient(output):
        return torch.cat([g.flatten() for g in torch.autograd.grad(output, trained, retain_graph=True)])

    def gradients(x):
        return torch.stack([torch.stack([gradient(o) for o in module(row[None]).flatten()]) for row in x])

    return torch.einsum("nap,mbp->nmab", gradients(x1), gradients(x2))


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("method", ["structured", "jacobian", "products"])
def test_all_ways_give_the_kernel_by_hand(name, method):
    module = DENSE[name]().double()
    x1, x2 = torch.randn(3, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    both = theory.empirical_ntk(module, x1, x2, method=method)
    assert torch.allclose(both, reference(module, x1, x2), atol=1e-10)
    alone = theory.empirical_ntk(module, x1, method=method)
    assert torch.allclose(alone, reference(module, x1, x1), atol=1e-10)


@pytest.mark.parametrize("method", often(["auto"], ["jacobian", "products"]))
def test_any_module_in_eval_mode(method):
    module = ds.nets.ResNet(20, 3).double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert torch.allclose(theory.empirical_ntk(module, x, method=method), reference(module, x, x), rtol=1e-9)


def test_blocks_within_a_budget_give_the_same_and_too_little_is_refused_with_the_size():
    module = ds.nets.MLP(4, 3, hidden=(20,)).double()
    x = torch.randn(12, 4, dtype=torch.float64)
    whole = theory.empirical_ntk(module, x)
    result = 12 * 12 * 9 * 8
    for method, room in (("structured", 2 * 12 * 3 * 23 * 8), ("jacobian", 40_000), ("products", 40_000)):
        assert torch.allclose(theory.empirical_ntk(module, x, method=method, memory=result + room), whole, atol=1e-10)
        little = partial(theory.empirical_ntk, module, x, method=method, memory=result + 100)
        refuses(little, r"expected a kernel and .* within 10.2 KiB, got \d.*KiB")
    little = partial(theory.empirical_ntk, module, x, memory=1024)
    refuses(little, r"expected a kernel and .* within 1 KiB, got 23.1 KiB")


@pytest.mark.parametrize(
    ("method", "memory"),
    thinned(["auto", "structured", "jacobian", "products"], [1, 3 * 3 * 4 * 8, 3 * 3 * 4 * 8 + 100], every=2),
)
def test_the_memory_that_a_refusal_names_is_enough_and_more_than_was_refused(method, memory):
    network = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)).double()
    if method != "structured":
        network.append(nn.LayerNorm(2)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"memory=\d+$") as refused:
        theory.empirical_ntk(network, x, method=method, memory=memory)
    named = int(str(refused.value).rpartition("=")[2])
    assert named > memory
    found = theory.empirical_ntk(network, x, method=method, memory=named)
    assert torch.allclose(found, reference(network, x, x), atol=1e-10)


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def tied():
    network = ds.nets.MLP(4, 4, hidden=(4,))
    network.layers[2].weight = network.layers[0].weight
    return network


def hooked(layer, hook, before=False):
    network = small()
    (network[layer].register_forward_pre_hook if before else network[layer].register_forward_hook)(hook)
    return network


def a_weight_used_by_a_hook():
    network = small()
    network[1].register_forward_hook(lambda layer, given, out: out @ network[0].weight)
    return network


def a_weight_used_again():
    def forward(self, x):
        return self.b(torch.tanh(F.linear(torch.tanh(self.a(x)), self.a.weight)))

    return tiny.Network(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2))


def transformer():
    layer = nn.TransformerEncoderLayer(2, 1, 3, batch_first=True)
    return sequence(nn.TransformerEncoder(layer, 1), lambda layer, x: layer(x)[:, 0])


def attention():
    return sequence(nn.MultiheadAttention(2, 1, batch_first=True), lambda layer, x: layer(x, x, x)[0].mean(1))


def off_unit(norm):
    """A layer with a norm of its weight, at a size that it does not start with."""
    layer = norm(nn.Linear(4, 4))
    size = layer.weight_g if hasattr(layer, "weight_g") else layer.parametrizations.weight.original0
    size.data.mul_(1.5)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 2))


def sequence(layer, run):
    layers = {"layer": layer, "last": nn.Linear(2, 2)}
    return tiny.Network(lambda self, x: self.last(run(self.layer, x.view(len(x), 2, 2))), **layers)


def layer_under_two_names():
    layer = nn.Linear(4, 4)
    return tiny.Network(lambda self, x: self.again(torch.tanh(self.layer(x))), layer=layer, again=layer)


UNSEEN = {
    "layers that share weights": tied,
    "a layer called twice": lambda: tiny.Network(lambda self, x: self.a(torch.tanh(self.a(x))), a=nn.Linear(4, 4)),
    "a layer under two names": layer_under_two_names,
    "a weight used again": a_weight_used_again,
    "a weight used by a hook": a_weight_used_by_a_hook,
    "forward hook": lambda: hooked(0, lambda layer, given, out: out**2),
    "forward hook for large values": lambda: hooked(0, lambda layer, given, out: out.clamp(max=1.0)),
    "forward hook before": lambda: hooked(2, lambda layer, given: (given[0] ** 2,), before=True),
    "other parameters": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
    "more than one vector": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3)),
    "weight norm": lambda: off_unit(nn.utils.parametrizations.weight_norm),
    "weight norm by hooks": lambda: off_unit(nn.utils.weight_norm),
    "attention": attention,
    "transformer": transformer,
    "lstm": lambda: sequence(nn.LSTM(2, 2, batch_first=True), lambda layer, x: layer(x)[0][:, -1]),
    "bilinear": lambda: tiny.Network(lambda self, x: self.layer(x, x), layer=nn.Bilinear(4, 4, 2)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", UNSEEN)
def test_what_layers_do_not_show_is_computed_by_autograd(name):
    torch.manual_seed(0)
    module = UNSEEN[name]().double().eval()
    before = dict(module.named_parameters())
    x1, x2 = torch.randn(3, 4, dtype=torch.float64), 3 * torch.randn(2, 4, dtype=torch.float64)
    expected = reference(module, x1, x2)
    for method in ("auto", "jacobian"):
        assert torch.allclose(theory.empirical_ntk(module, x1, x2, method=method), expected, atol=1e-10)
    assert all(p is before[name] for name, p in module.named_parameters())
    structured = partial(theory.empirical_ntk, module, x1, x2, method="structured")
    refuses(structured, r"expected a network for which method='structured' works, got .*auto")


def test_layers_called_by_keyword_and_logits_by_name_are_taken():
    def forward(self, x):
        return {"logits": self.b(input=torch.tanh(self.a(input=x)))}

    named = tiny.Network(forward, a=nn.Linear(4, 3), b=nn.Linear(3, 2)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    expected = reference(tiny.Network(lambda self, x: self.of(x)["logits"], of=named), x, x)
    for method in ("structured", "jacobian", "products"):
        assert torch.allclose(theory.empirical_ntk(named, x, method=method), expected, atol=1e-10)


@pytest.mark.parametrize("method", ["auto", "structured", "jacobian", "products"])
@pytest.mark.parametrize("run", [
    lambda self, x: self.a(x - x.mean(0)),
    lambda self, x: self.a(torch.softmax(x @ x.T, 1) @ x),
    lambda self, x: self.a(x).cumsum(0),
    lambda self, x: self.a(F.batch_norm(x, None, None, training=True) if len(x) > 1 else x),
    lambda self, x: self.a(F.dropout(x, 0.5)),
    lambda self, x: self.a(x).mean(),
], ids=["mean", "attention", "cumulative", "batch statistics", "random", "one output for all"])  # fmt: skip
def test_inputs_that_see_one_another_have_no_kernel(run, method):
    module = tiny.Network(run, a=nn.Linear(4, 2))
    given = partial(theory.empirical_ntk, module, torch.randn(5, 4), torch.randn(3, 4), method=method)
    refuses(given, "expected the same outputs for an input alone and in a batch")


def test_what_has_no_tangent_kernel_is_refused():
    x = torch.randn(3, 4)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    refuses(lambda: theory.empirical_ntk(module, x), "expected batch norm and dropout in eval mode")
    longer, nan = torch.randn(3, 5), torch.tensor([[0.0] * 4, [float("nan")] * 4])
    module.eval()
    refuses(lambda: theory.empirical_ntk(module, x, longer), r"expected examples of one shape, got \(4,\) and \(5,\)")
    refuses(lambda: theory.empirical_ntk(nn.ReLU(), x), "expected parameters that require gradients, got none")
    refuses(lambda: theory.empirical_ntk(module, x, method="fast"), "expected method of auto, structured")
    untracked = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    refuses(lambda: theory.empirical_ntk(untracked, x), "with running statistics")
    twice = tiny.Network(lambda self, x: (self.layer(x), self.layer(x)), layer=nn.Linear(4, 2))
    refuses(lambda: theory.empirical_ntk(twice, x), "expected a network that returns one tensor", TypeError)
    refuses(lambda: theory.empirical_ntk(module, x[:0]), "expected at least one input, got none")
    refuses(lambda: theory.empirical_ntk(module, x, nan), "got NaN or infinity in row 1")


def test_the_cheaper_way_is_taken_by_count():
    """Many outputs and few operations per parameter: products; convolutions use each weight often: gradients."""
    from dissensus.theory.empirical_kernels import methods_by_cost

    dense, conv = nn.Sequential(nn.Linear(50, 100)), ds.nets.ResNet(20, 10).eval()
    for module, shape, expected in ((dense, (20, 50), "products"), (conv, (20, 3, 32, 32), "jacobian")):
        x = torch.randn(shape)
        assert methods_by_cost(module, x, len(x), module(x[:1]).numel())[0] == expected


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
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    network = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), *pooled, nn.Linear(8, 2))
    x = torch.randn(6, 1, 64, 64)
    products = partial(theory.empirical_ntk, network, x, method="products")
    refuses(lambda: products(memory=2**18), r"derivatives along a gradient within 256 KiB, got 578 KiB")
    whole = theory.empirical_ntk(network, x, method="jacobian")
    for memory in (2**21, 2**30):  # some columns at a time, all at once
        assert torch.allclose(products(memory=memory), whole, rtol=1e-4, atol=1e-5)


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

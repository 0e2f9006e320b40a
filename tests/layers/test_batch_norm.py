"""Batch norm: statistics are estimated anew with everything else left as it was, and which activations a kernel may have."""

import copy

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.core.particles import Particles
from dissensus.kernels import channel_launch as kernels
from dissensus.layers import batch_norm
from dissensus.layers.batch_norm import refresh_statistics
from dissensus.layers.conversion import convert_layer
from dissensus.utils.batch_norm_names import statistics_names
from refusals import refuses

SIZES = (5, 8, 3)


def batches(shape=(4,), sizes=SIZES):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, *shape, dtype=torch.float64, generator=generator), torch.zeros(n).long()) for n in sizes]


def exact(network, layer, loader, dims):
    """(mean, variance): batch statistics of what reaches the layer, averaged over batches by size."""
    means, variances = 0.0, 0.0
    for x, _ in loader:
        seen = []
        handle = layer.register_forward_hook(lambda _, inputs, __, seen=seen: seen.append(inputs[0].detach()))
        network.eval()(x)
        handle.remove()
        means = means + len(x) * seen[0].mean(dims)
        variances = variances + len(x) * seen[0].var(dims, correction=1)
    total = sum(len(x) for x, _ in loader)
    return means / total, variances / total


def stack(*networks, how="vectorised"):
    particles = Particles.stack(networks, ds.Classification())
    particles.how = how
    return particles


def refresh(particles, loader=None):
    refresh_statistics(particles, batches() if loader is None else loader, torch.device("cpu"))


def check(particles, layer, mean, variance, member=0):
    for name, expected in (("running_mean", mean), ("running_var", variance)):
        found = particles.own_buffers()[f"network.{layer}.{name}"][member]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", ["loop", "vectorised"])
def test_statistics_are_the_mean_of_batch_statistics_by_size(how):
    nets = [tiny.mlp(dropout=0.5).double() for _ in range(3)]
    particles, loader = stack(*nets, how=how), batches()
    before = tiny.state(particles)
    refresh(particles, loader)
    assert particles.how == how
    for i, network in enumerate(nets):
        check(particles, 1, *exact(network, network[1], loader, 0), member=i)
    weights = {name for name in before if "running" not in name and "tracked" not in name}
    state = tiny.state(particles)
    assert all(torch.equal(before[name], state[name]) for name in weights)


def test_statistics_of_a_second_layer_are_those_under_the_first_ones_batch_statistics():
    """As in training: every layer normalises by the batch while statistics are gathered."""
    network = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    particles, loader = stack(network), batches()
    refresh(particles, loader)
    means = 0.0
    for x, _ in loader:
        normalised = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
        means = means + len(x) * network[1](normalised).mean(0)
    found = particles.own_buffers()["network.2.running_mean"][0]
    torch.testing.assert_close(found, (means / sum(SIZES)).detach(), rtol=0, atol=1e-12)


def home_made():
    """A norm layer that is none of torch's and puts new tensors into its buffers' place."""

    def forward(self, x):
        if self.training:
            self.running_mean = (1 - self.momentum) * self.running_mean + self.momentum * x.mean(0)
            self.running_var = (1 - self.momentum) * self.running_var + self.momentum * x.var(0)
        return (x - self.running_mean) / self.running_var.sqrt()

    return tiny.Network(forward, momentum=0.3, running_mean=torch.zeros(4), running_var=torch.ones(4))


@pytest.mark.parametrize(("layer", "shape", "dims"), [
    (nn.SyncBatchNorm(2), (2, 3, 3), (0, 2, 3)),  # one process: as batch norm
    (tiny.Doubled(2), (2, 3, 3), (0, 2, 3)),
    (nn.BatchNorm2d(2), (2, 3, 3), (0, 2, 3)),
    (nn.BatchNorm3d(2), (2, 3, 3, 2), (0, 2, 3, 4)),
    (nn.BatchNorm1d(2, momentum=None), (2, 5), (0, 2)),
    (home_made(), (4,), 0),
])  # fmt: skip
def test_every_batch_norm_is_refreshed(layer, shape, dims):
    network = nn.Sequential(layer).double()
    particles, loader = stack(network), batches(shape)
    refresh(particles, loader)
    check(particles, 0, *exact(network, layer, loader, dims))
    assert particles.template.network[0].momentum == layer.momentum


@pytest.mark.parametrize(("layer", "shape"), [(nn.InstanceNorm1d, (2, 7)), (nn.InstanceNorm3d, (2, 3, 2, 2))])
def test_instance_norm_with_running_statistics_is_refreshed(layer, shape):
    particles, loader = stack(nn.Sequential(layer(2, track_running_stats=True)).double()), batches(shape)
    refresh(particles, loader)
    x = torch.cat([x for x, _ in loader]).flatten(2)
    check(particles, 0, x.mean(2).mean(0), x.var(2, correction=1).mean(0))  # of instances, then their mean


@pytest.mark.parametrize("how", ["loop", "vectorised"])
def test_a_layer_that_runs_twice_averages_over_both_runs(how):
    """As torch's own `update_bn` does, for batches of one size."""

    def twice():
        layers = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)}
        forward = lambda self, x: self.norm(self.second(torch.relu(self.norm(self.first(x)))))  # noqa: E731
        return tiny.Network(forward, **layers).double()

    networks, loader = [twice() for _ in range(2)], batches(sizes=(6, 6, 6))
    particles = stack(*networks, how=how)
    refresh(particles, loader)
    for i, network in enumerate(networks):
        torch.optim.swa_utils.update_bn([x for x, _ in loader], network)
        check(particles, "norm", network.norm.running_mean, network.norm.running_var, i)
    assert not any(part._forward_pre_hooks for part in particles.template.modules())


def test_a_graph_which_runs_no_python_counts_the_calls_of_its_shape():
    """A layer runs as often as a sequence has steps."""

    def forward(self, x):
        for step in x.unbind(1):
            found = self.norm(self.layer(step))
        return found

    def replayed(function):
        seen = {}

        def run(x):
            calls = function.args[3]
            after = function(x)
            if x.shape in seen:
                calls.clear()  # as a replay leaves them
            seen[x.shape] = True
            return after

        return run

    network = tiny.Network(forward, layer=nn.Linear(4, 3), norm=nn.BatchNorm1d(3)).double()
    loader = [(torch.randn(6, steps, 4, dtype=torch.float64), torch.zeros(6).long()) for steps in (2, 5, 2, 5, 5, 2)]
    plain, graph = stack(copy.deepcopy(network)), stack(network)
    refresh_statistics(plain, loader, torch.device("cpu"))
    refresh_statistics(graph, loader, torch.device("cpu"), replayed)
    assert tiny.largest_difference(tiny.state(plain), tiny.state(graph)) == 0


def test_momentum_modes_and_gradients_are_left_as_found():
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=0.2), nn.Dropout(), nn.BatchNorm1d(3)).double()
    particles = stack(network)
    particles.train()
    particles.template.network[3].momentum = None
    graphs = []  # whether torch would record one, for every layer that runs
    particles.template.network[0].register_forward_hook(lambda *_: graphs.append(torch.is_grad_enabled()))
    modes = [part.training for part in particles.template.modules()]
    refresh(particles)
    layers = particles.template.network
    assert (layers[1].momentum, layers[3].momentum) == (0.2, None)
    assert [part.training for part in particles.template.modules()] == modes
    assert len(graphs) >= len(SIZES)
    assert not any(graphs)
    assert torch.is_grad_enabled()
    with pytest.raises(RuntimeError, match=r"shape|size"):
        refresh(particles, [(torch.zeros(3, 9, dtype=torch.float64), torch.zeros(3))])
    assert (layers[1].momentum, layers[3].momentum) == (0.2, None)
    assert [part.training for part in particles.template.modules()] == modes


def test_a_layer_that_the_caller_froze_keeps_its_statistics():
    network = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3), nn.BatchNorm1d(3)).double().train()
    network[0].eval()
    particles = stack(network)
    refresh(particles)
    after = particles.own_buffers()
    assert float(after["network.0.running_mean"].abs().max()) == 0
    assert float(after["network.2.running_mean"].abs().max()) > 0


def test_dropout_is_off():
    network = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(4)).double()
    particles, loader = stack(network), batches()
    stream = torch.get_rng_state()
    refresh(particles, loader)
    assert torch.equal(torch.get_rng_state(), stream)
    check(particles, 1, *exact(network, network[1], loader, 0))


def test_a_loader_without_data_is_refused():
    for loader in ([], [(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0).long())]):
        with pytest.raises(ValueError, match="expected at least one batch to estimate batch statistics from, got none"):
            refresh(stack(tiny.mlp().double()), loader)


def test_batches_without_examples_do_not_count():
    with_empty, without = stack(network := tiny.mlp().double()), stack(network)
    empty = [(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0).long())]
    refresh(with_empty, empty + batches() + empty)
    refresh(without, batches())
    assert tiny.largest_difference(tiny.state(with_empty), tiny.state(without)) == 0


def test_a_network_without_statistics_does_not_read_the_loader():
    def loader():
        raise AssertionError("read")
        yield

    network = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.BatchNorm1d(3, track_running_stats=False))
    assert statistics_names(network) == []
    refresh(stack(network), loader())


def test_inputs_that_are_not_finite_are_refused():
    x = torch.full((4, 4), torch.nan, dtype=torch.float64)
    refuses(lambda: refresh(stack(tiny.mlp().double()), [(x, torch.zeros(4))]), "expected finite inputs, got NaN")


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.fixture
def layer(monkeypatch):
    """A frozen norm of 3 channels whose kernel says that it was called."""

    def called(*_):
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(batch_norm._NormaliseFunction, "apply", called)
    monkeypatch.setattr(kernels, "find_triton", lambda: kernels)
    return convert_layer(nn.BatchNorm2d(3).eval(), batch_norm.FrozenNorm)


def test_activations_that_torch_refuses_do_not_reach_the_kernel(layer):
    refuses(lambda: layer(torch.randn(64, 3, 2, 2).as_subclass(OnGPU)), "the kernel was called", AssertionError)
    with pytest.raises(RuntimeError, match="running_mean should contain 4 elements"):
        layer(torch.randn(64, 4, 2, 2).as_subclass(OnGPU))
    refuses(lambda: layer(torch.randn(64, 3, 2).as_subclass(OnGPU)), "expected 4D input")


def test_a_norm_without_a_shift_is_torchs_own(layer):
    layer.register_parameter("bias", None)
    x = torch.randn(64, 3, 2, 2)
    torch.testing.assert_close(torch.Tensor(layer(x.as_subclass(OnGPU))), x / (1 + layer.eps) ** 0.5)

"""Layers with second derivatives written out: the same numbers as torch's own, in fewer operations."""

import collections
import logging
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dissensus as ds
import tiny
from dissensus.core import gradients
from dissensus.core.batch import Batch
from dissensus.core.gradients import Gradients
from dissensus.engine.cuda_graphs import Graph
from dissensus.engine.strategies import make_strategy
from dissensus.kernels import double_backward
from dissensus.kernels.double_backward import fast_second_derivatives
from dissensus.nets import ENet

IN_A_LOOP = ("cumulative", "third derivatives")  # torch has no vmap for them
STRATEGIES = [gradients.vectorised_gradients, gradients.looped_gradients, gradients.looped_keeping_graphs]


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(double_backward, "SMALL", 0)


def flat(axes: int, *layers: nn.Module) -> tuple[nn.Module, tuple[int, ...]]:
    """(the layers behind a convolution of two channels and before a linear layer, the shape of an input)."""
    head = [nn.Flatten(), nn.LazyLinear(3)]
    shape = (2, *[5, 6, 4][:axes])
    network = nn.Sequential(*layers, nn.Tanh(), *head)
    network(torch.randn(2, *shape))
    return network, shape


def force(self: nn.Module, x: Tensor) -> Tensor:
    """Gives a derivative of its own, so that input gradients are second derivatives already."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0][:, :3]


def energy(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 4, 2), *more, nn.Tanh(), nn.Flatten(), nn.Linear(4, 3))


def own_kernels(self: nn.Module, x: Tensor) -> Tensor:
    """A convolution whose kernel, and another whose bias, the network makes of its inputs."""
    kernel = self.made(x.mean((0, 2))).reshape(2, 2, 2)
    found = torch.conv1d(x, self.plain.weight, kernel.sum((1, 2))) + self.plain(x)
    return self.head(torch.conv1d(found, kernel).tanh().flatten(1))


NETWORKS = {
    "kernels made of inputs": lambda: (
        tiny.Network(own_kernels, made=nn.Linear(2, 8), plain=nn.Conv1d(2, 2, 1), head=nn.Linear(8, 3)),
        (2, 5),
    ),
    "dense": lambda: (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.PReLU(6), nn.Linear(6, 3)), (4,)),
    "1d": lambda: flat(1, nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.BatchNorm1d(4), nn.PReLU()),
    "2d": lambda: flat(2, nn.Conv2d(2, 4, (3, 2), dilation=2, groups=2, bias=False), nn.BatchNorm2d(4), nn.PReLU(4)),
    "3d": lambda: flat(3, nn.Conv3d(2, 2, 2), nn.BatchNorm3d(2, track_running_stats=False), nn.ReLU()),
    "transposed": lambda: flat(2, nn.ConvTranspose2d(2, 4, 3, 2, 1, output_padding=1, groups=2), nn.BatchNorm2d(4)),
    "torch's own": lambda: flat(2, nn.Conv2d(2, 3, 3, padding="same"), nn.BatchNorm2d(3, affine=False), nn.ReLU()),
    "cumulative": lambda: flat(2, nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, momentum=None), nn.ReLU(inplace=True)),
    "third derivatives": lambda: (tiny.Network(force, energy=energy()), (4,)),
    "frozen": lambda: frozen(*flat(2, nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.PReLU(), nn.Conv2d(3, 3, 2))),
    "dropout": lambda: flat(2, nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4), nn.Dropout2d(0.4)),
}


def frozen(network: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, tuple[int, ...]]:
    """With a first convolution and batch norm that do not train: the latter is then in eval mode."""
    network[0].requires_grad_(False), network[1].requires_grad_(False)
    return network, shape


def compared(build, strategy, dtype=torch.float64, precision=None) -> tuple[Gradients, Gradients]:
    """(found with written-out forms, found with torch's own)."""
    torch.manual_seed(0)
    made = [build() for _ in range(2)]
    x, y = torch.randn(6, *made[0][1], dtype=dtype), torch.arange(6) % 3
    posterior = ds.FoRDE([network.to(dtype) for network, _ in made], repulsion=1.0)
    found = []
    for forms in (fast_second_derivatives, nullcontext):
        posterior._forms = forms
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
            found.append(strategy(posterior, Batch(x, y)))
    return tuple(found)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, each, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, name in enumerate(NETWORKS)
        for j, each in enumerate(STRATEGIES[name in IN_A_LOOP :])
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_all_results_are_those_of_torchs_own_derivatives(name, strategy):
    ours, torchs = compared(NETWORKS[name], strategy)
    torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-10)
    assert all(gradient.abs().max() > 1e-6 for gradient in ours.gradients.values() if gradient.ndim > 2)


def test_the_repulsion_is_not_small_beside_the_loss():
    """The comparison above would pass without second derivatives, were they small."""
    torch.manual_seed(0)
    networks = [NETWORKS["2d"]()[0].double() for _ in range(2)]
    x, y = torch.randn(6, 2, 5, 6, dtype=torch.float64), torch.arange(6) % 3
    both = [
        gradients.looped_gradients(made, Batch(x, y))
        for made in (ds.FoRDE(networks, repulsion=1.0), ds.DeepEnsemble(networks))
    ]
    for name, gradient in both[0].gradients.items():
        if name.endswith("0.weight"):
            assert (gradient - both[1].gradients[name]).norm() > 0.1 * gradient.norm()


@pytest.mark.slow  # of many layers like those above
def test_segmentation_with_unpooling_gives_the_same():
    torch.manual_seed(0)
    posterior = ds.FoRDE([ENet(3).double() for _ in range(2)], repulsion=1.0)
    x, y = torch.randn(2, 3, 13, 16, dtype=torch.float64), torch.randint(3, (2, 13, 16))
    found = []
    for forms in (fast_second_derivatives, nullcontext):
        posterior._forms = forms
        torch.manual_seed(1)
        found.append(gradients.looped_keeping_graphs(posterior, Batch(x, y)))
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["2d", "transposed", "dropout"])
def test_mixed_precision_is_as_exact_as_torchs_own(name):
    (exact, _), (ours, torchs) = (
        compared(NETWORKS[name], gradients.looped_gradients, torch.float32, precision)
        for precision in (None, torch.bfloat16)
    )
    for key, gradient in exact.gradients.items():
        near, other = ((each.gradients[key] - gradient).norm() for each in (ours, torchs))
        assert near <= 1.5 * other + 0.01 * gradient.norm(), key
        assert ours.gradients[key].dtype == torch.float32


def test_batch_norm_in_float32_is_as_exact_as_torchs_own_far_from_zero():
    torch.manual_seed(0)
    x, t, u = torch.randn(3, 8, 3, 5, 5)  # float32, which the float64 below starts from
    x, w = x + 300 * torch.tensor([1.0, -1.0, 0.1]).reshape(3, 1, 1), torch.rand(3) + 0.5

    def slopes(forms, dtype):
        leaves = [each.to(dtype).requires_grad_() for each in (x, w, t)]
        with forms():
            y = nn.functional.batch_norm(leaves[0], None, None, leaves[1], torch.zeros_like(leaves[1]), training=True)
            g = torch.autograd.grad(y, leaves[0], leaves[2], create_graph=True)[0]
        return torch.autograd.grad(g, leaves, u.to(dtype))

    exact = slopes(nullcontext, torch.float64)
    torch.testing.assert_close(slopes(fast_second_derivatives, torch.float64), exact, rtol=1e-10, atol=1e-10)
    for truth, ours, torchs in zip(
        exact, *(slopes(f, torch.float32) for f in (fast_second_derivatives, nullcontext)), strict=True
    ):
        assert (ours - truth).norm() <= 1.5 * (torchs - truth).norm() + 1e-7 * truth.norm()


class Counting(TorchDispatchMode):
    """Counts operations by name, views aside, and keeps the largest kernel of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += not func.is_view
        if func is torch.ops.aten.convolution.default:
            self.largest = max(self.largest, *args[1].shape[2:])
        return func(*args, **(kwargs or {}))


def test_there_are_fewer_operations_and_no_kernels_as_large_as_images():
    torch.manual_seed(0)
    layers = lambda: [nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.PReLU(2)]  # noqa: E731
    networks = [flat(2, *layers(), *layers())[0] for _ in range(2)]
    posterior, batch = ds.FoRDE(networks), Batch(torch.randn(4, 2, 5, 6), torch.arange(4) % 3)
    seen = {}
    for forms in (fast_second_derivatives, nullcontext):
        posterior._forms = forms
        with Counting() as seen[forms]:
            gradients.looped_keeping_graphs(posterior, batch)
    ours, torchs = seen[fast_second_derivatives], seen[nullcontext]
    assert (ours.largest, torchs.largest) == (3, 6)
    assert sum(ours.counts.values()) < 0.6 * sum(torchs.counts.values())
    arithmetic = [each.counts["convolution"] + each.counts["convolution_backward"] for each in (ours, torchs)]
    assert arithmetic[0] == arithmetic[1]


def scaled_by_inputs() -> nn.Module:
    """A batch norm whose weight the network makes of its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.made(x)
        weight, bias = made.mean(0).exp(), made.new_zeros(4)
        return self.head(nn.functional.batch_norm(made, None, None, weight, bias, training=True))

    return tiny.Network(forward, made=nn.Linear(4, 4), head=nn.Linear(4, 3))


def has_third_derivative() -> bool:
    """Whether torch's own batch norm can be differentiated three times; newer versions refuse to."""
    leaves = torch.randn(5, 3).requires_grad_(), torch.rand(3).requires_grad_(), torch.zeros(3)
    found = nn.functional.batch_norm(leaves[0], None, None, *leaves[1:], training=True).tanh().sum()
    try:
        for _ in range(3):
            found = torch.autograd.grad(found, leaves[0], create_graph=True)[0].tanh().sum()
    except RuntimeError:
        return False
    return True


def normed_force() -> nn.Module:
    return tiny.Network(force, energy=energy(nn.BatchNorm1d(4)))


@pytest.mark.parametrize("make", [normed_force, scaled_by_inputs], ids=["force", "scaled"])
def test_what_has_no_written_form_takes_torchs_own_and_says_so(make, caplog, monkeypatch):
    if make is not scaled_by_inputs and not has_third_derivative():
        pytest.skip("torch itself has no third derivative of batch norm")
    monkeypatch.setattr(
        double_backward, "SMALL", 20
    )  # layers have 24 numbers, and 8 for the two examples it is tried on
    torch.manual_seed(0)
    posterior = ds.FoRDE([make().double() for _ in range(2)])
    posterior.particles.how = "loop"
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    with caplog.at_level(logging.INFO, "dissensus"):
        posterior.backward(x, y)
        posterior.backward(x, y)
    assert [record.message for record in caplog.records if "second derivatives" in record.message] == [
        "using torch's slow second derivatives: the library's fast ones fail for this network "
        "(batch norm has no third derivative)"
    ]
    assert posterior._forms is nullcontext


def test_small_layers_on_a_processor_are_torchs_own(monkeypatch):
    monkeypatch.setattr(double_backward, "SMALL", 6 * 4 + 1)
    torch.manual_seed(0)
    network, x = NETWORKS["dense"]()[0], torch.randn(7, 4)
    kinds = []
    for rows in (4, 7):  # batch norm's inputs are (rows, 6): 24 numbers and 42
        with fast_second_derivatives():
            kinds.append(type(network[:2](x[:rows]).grad_fn).__name__)
    assert kinds == ["NativeBatchNormBackward0", "_BatchNormBackward"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
@pytest.mark.parametrize("kind", ["loop", "vectorised", "streamed"])
def test_a_graph_on_a_gpu_holds_them_and_gives_the_same(kind):
    torch.manual_seed(0)
    made = [NETWORKS["transposed"]() for _ in range(3)]
    x, y = torch.randn(6, *made[0][1], dtype=torch.float64), torch.arange(6) % 3
    posterior, batch = ds.FoRDE([each.double() for each, _ in made], repulsion=1.0).cuda(), Batch(x.cuda(), y.cuda())
    graphs = []
    for forms in (fast_second_derivatives, nullcontext):
        posterior._forms = forms
        run = make_strategy(kind)
        with posterior.particles.lock_network(), posterior.particles.runner.run_context():
            with torch.cuda.stream(torch.cuda.Stream()):  # libraries set themselves up
                run(posterior, batch)
            graphs.append(Graph(partial(run, posterior, batch)))
        assert run.name == kind
    torch.testing.assert_close(graphs[0].replay(), graphs[1].replay(), rtol=1e-9, atol=1e-10)

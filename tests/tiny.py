"""Small networks, small data and comparisons that many tests need."""

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import dissensus as ds
from dissensus.core import batch as batches
from dissensus.core.drawn_functions import MemberFunctions
from dissensus.engine import break_even
from dissensus.numerics import rbf_kernels


def points(n: int = 12, inputs: int = 4, classes: int = 3, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(x (n, inputs) in float64, class indices (n,)), every class present."""
    x = torch.randn(n, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(n) % classes


def point_batches(n: int = 24, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    """The points in batches of this size."""
    x, y = points(n)
    return list(zip(x.split(size), y.split(size), strict=True))


def mlp(dropout: float = 0.0, *, outputs: int = 3) -> nn.Module:
    """4 inputs, one hidden layer of 6 with batch norm."""
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), *drop, nn.Linear(6, outputs))


class Network(nn.Module):
    """One network with these layers, parameters, buffers and attributes by name; its outputs are forward(self, *inputs)."""

    def __init__(self, forward: Callable[..., Tensor], **parts: object) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            tensor = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
            self.register_buffer(name, part) if tensor else setattr(self, name, part)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self.function(self, *inputs, **named)


class Scaled(nn.Module):
    """Outputs are k x in float64: what the network says is what the test chose."""

    def __init__(self, k: float = 1.0) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.tensor(k, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.k * x


class Doubled(nn.BatchNorm2d):
    """Somebody's own kind of batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Unsized:
    """Batches that may be read again, without a length."""

    def __init__(self, make: Callable[[], Iterable[object]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[object]:
        return iter(self.make())


class Stream(Unsized, IterableDataset):
    """The same as a set that torch's loaders take."""


def equal_gradients() -> nn.Module:
    """Two parameters of one gradient: autograd hands out the same tensor for both."""
    parts = {"layer": nn.Linear(4, 3), "a": nn.Parameter(torch.randn(3)), "b": nn.Parameter(torch.randn(3))}
    return Network(lambda self, x: self.layer(x) + (self.a + self.b), **parts)


class Pair(nn.Module):
    """Two inputs of 4 features: called with a tuple or with the names a and b."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(4, 6)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(6, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.left(a) + self.right(b))))


class Named(nn.Module):
    """One hidden layer with batch norm; `twice`: the encoder is registered under two names and run by the second."""

    def __init__(self, dropout: float = 0.0, *, twice: bool = True) -> None:
        super().__init__()
        drop = [nn.Dropout(dropout)] if dropout else []
        encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), *drop)
        self.parts = nn.ModuleList([encoder])
        self.encoder = encoder if twice else None
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.encoder or self.parts[0])(x))


def segmenter(dropout: float = 0.0) -> nn.Module:
    """(B, 2, H, W) -> (B, 3, H, W)."""
    drop = [nn.Dropout2d(dropout)] if dropout else []
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), *drop, nn.Conv2d(4, 3, 1))


def tied_layers(tied: bool = True) -> nn.Module:
    """4 inputs and outputs, two linear layers that may have one weight."""
    network = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    if tied:
        network[2].weight = network[0].weight
    return network


class Killed(Exception):
    """What a test ends a run with."""


def same(a: object, b: object) -> bool:
    """Whether two nested dicts and lists hold the same tensors, of the same dtypes, and equal other things."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest absolute difference over two dicts of tensors with the same keys."""
    assert a.keys() == b.keys()
    assert a
    return max(float((a[name].double() - b[name].double()).abs().max()) if a[name].numel() else 0.0 for name in a)


def minimise(parameters: Iterable[Tensor], loss: Callable[[], Tensor], *, calls: int = 1, **settings: float) -> None:
    """To the minimum of loss() in the parameters, by L-BFGS."""
    optimizer = torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe", **settings)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(calls):
        optimizer.step(closure)


def state(module: nn.Module) -> dict[str, Tensor]:
    """Tensors by name, without the description that a posterior's state also holds."""
    state = module.state_dict().items()
    return {name: tensor.detach().clone() for name, tensor in state if not name.endswith("_extra_state")}


def strides(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """How every tensor lies in memory: where two differ in it, products may differ in the last bit on some processors."""
    return {name: tensor.stride() for name, tensor in module.state_dict().items()}


def spread_out(dropout: float = 0.0) -> nn.Module:
    """(B, 2, H, W) -> (B, 3): convolutions in channels_last, a transposed weight, one with holes in memory."""
    layers = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 3)
    network = nn.Sequential(*segmenter(dropout), *layers)
    network.to(torch.float64).to(memory_format=torch.channels_last)
    network[-2].weight.data = network[-2].weight.data.T.contiguous().T
    network[-1].weight.data = network[-1].weight.data.repeat_interleave(2, 1)[:, ::2]
    return network


def ensemble(make, members: int = 3, *, how: str | None = None, dtype: torch.dtype = torch.float64, **keywords):
    """A deep ensemble of make() in float64, run as `how` says."""
    posterior = ds.DeepEnsemble([make() for _ in range(members)], **keywords).to(dtype)
    if how is not None:
        posterior.particles.how = how
    return posterior


class Repelling(ds.StackedPosterior):
    """A toy coupling: outputs are pushed away from the members' mean."""

    name = "repelling"

    def member_loss(self, params, buffers, batch):
        def both(member):
            outputs = batches.call_network(member.network, batch.x)
            return member.likelihood.nll(outputs, batch.y, batch.weight), outputs

        (value, outputs), buffers = self.particles.call(both, params, buffers)
        return value, outputs, buffers

    def couple(self, z):
        return -1e-3 * torch.tanh(z - z.mean(0))


class Given(ds.Posterior):
    """A posterior of whatever particles it is given; it is not saved."""

    name = "given"

    def draw(self):
        return MemberFunctions(self.particles)

    def config(self):
        return {}

    @classmethod
    def skeleton(cls, network, config, likelihood):
        raise TypeError("expected a method that is saved, got one of the tests; build it anew")


TINY_STD = -40.0  # softplus of it is 4e-18


def still(posterior):
    """The NodeBNN with all latents at 1."""
    with torch.no_grad():
        posterior.mean.fill_(1.0)
        posterior.particles.shared_parameters()["latents.raw_std"].fill_(TINY_STD)
    return posterior


def sampled(posterior: ds.Posterior) -> dict[str, Tensor]:
    """Name -> (S, ...) samples around the one network of a posterior."""
    return {name: rows[0] for name, rows in posterior.sample(posterior.samples).items()}


class Poisson(ds.Likelihood):
    """Counts with mean exp(f): outputs and targets (B, D). The curvature in f is exp(f), whatever the targets."""

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (y * outputs - outputs.exp() - torch.lgamma(y + 1)).sum(1)

    def describe(self, outputs: Tensor) -> tuple[Tensor, ...]:
        return outputs.exp(), outputs.exp()

    def predictive(self, *described: Tensor) -> ds.Predictive:
        return ds.RegressionPredictive(*described)


class Sharper(ds.Classification):
    """Softmax of three times the logits: nine times the curvature of those."""

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(3 * outputs, y)


def estimate_score(name: str, z: Tensor, *, bandwidth: float | None = None) -> Tensor:
    """(M, P) ∇ log q of particles (M, P): "kde", "stein" or "spectral_stein"; by default the median bandwidth."""
    matrix = rbf_kernels.score_matrix(name, rbf_kernels.squared_distances(z), bandwidth)
    return rbf_kernels.apply_matrix(matrix, z - z.mean(0))  # rows of the matrix sum to zero


def svgd_direction(z: Tensor, score: Tensor, *, bandwidth: float | None = None) -> Tensor:
    """(M, P) (1/M) [Σ_j K_ij ∇ log π(z_j) − G_i] of particles (M, P) and scores ∇ log π (M, P) (Liu & Wang 2016)."""
    kernel, h = rbf_kernels.kernel_and_bandwidth(rbf_kernels.squared_distances(z), bandwidth)
    slopes = rbf_kernels.slopes(kernel, h) / len(z)
    return rbf_kernels.apply_matrix(kernel / len(z), score) - rbf_kernels.apply_matrix(slopes, z - z.mean(0))


def check_latents_around(make, x, folder):
    """NodeBNN's latents at 1 reproduce the network that `make` gives, of 3 classes; it trains, and loads around a plain one."""
    network, y = make().eval(), torch.tensor([0, 2])
    posterior = still(ds.NodeBNN(network, data_size=2, components=1, samples=1, batch_norm="frozen")).eval()
    with torch.no_grad():
        expected = batches.call_network(network, x)
        torch.testing.assert_close(posterior(x)[0], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(batches.call_network(posterior.collapse(), x), expected, rtol=1e-5, atol=1e-6)

    posterior = ds.NodeBNN(network, data_size=2, components=2, samples=2, init_std=0.1, batch_norm="frozen")
    before = posterior.mean.detach().clone()
    groups = posterior.parameter_groups(lr=1e-4)
    ds.fit(posterior, [(x, y)], epochs=2, optimizer=torch.optim.SGD(groups), progress=False)
    assert not torch.equal(posterior.mean, before)
    with torch.no_grad():
        passed = batches.call_network(posterior.member(1).eval(), x).log_softmax(-1)
    predictive = posterior.predict(x)
    torch.testing.assert_close(predictive.log_probs[1], passed, rtol=1e-4, atol=1e-5)
    ds.save(posterior, folder / "saved")
    assert torch.equal(ds.load(folder / "saved", make()).predict(x).mean, predictive.mean)


class FakeClock:
    """In place of the time that `break_even` reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(break_even, "perf_counter", lambda: self.now)

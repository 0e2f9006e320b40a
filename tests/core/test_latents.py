"""Latents and losses with random numbers: the same gradients however members run."""

import copy
import functools

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.core import gradients
from dissensus.core.batch import Batch
from dissensus.core.particles import Particles
from dissensus.engine.strategies import make_strategy
from dissensus.utils.tensor_tree import TensorTree
from small_methods import NodeNoise, Rank1Ensemble
from thinning import thinned


class Counted(tiny.Given):
    """Members that each draw a random number in their loss."""

    name = "counted"

    def __init__(self, networks, *, shared=False):
        latents = [TensorTree() for _ in networks]
        for i, tree in enumerate(latents):
            tree.add_tensor("shift", nn.Parameter(torch.full((3,), float(i))))
        own = (lambda name: name.startswith("latents.") or name == "network.3.weight") if shared else None
        super().__init__(Particles.stack(networks, ds.Classification(), latents=latents, own=own))

    def member_loss(self, params, buffers, batch):
        noise = torch.rand((), dtype=batch.x.dtype)

        def nll(member):
            outputs = member.network(batch.x * (1 + noise)) + noise * member.latents.shift
            return member.likelihood.nll(outputs, batch.y, batch.weight)

        value, buffers = self.particles.call(nll, params, buffers)
        return value, (), buffers


def fixed_noise(monkeypatch):
    """The members' random numbers are 0.1, 0.2, ... in their order, in a loop and under vmap alike."""
    rand, count = torch.rand, iter(range(1, 1000))

    def known(*size, **keywords):
        drawn = rand(*size, **keywords)
        if torch._C._functorch.is_batchedtensor(drawn):
            level = torch._C._functorch.maybe_get_level(drawn)
            inner = torch._C._functorch.get_unwrapped(drawn)
            return torch._C._functorch._add_batch_dim(torch.arange(1, len(inner) + 1).to(inner) / 10, 0, level)
        return torch.full_like(drawn, next(count) / 10)

    monkeypatch.setattr(torch, "rand", known)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("way", ["looped_gradients", "vectorised_gradients", "loss"])
def test_gradients_reach_latents_and_weights(way, shared, monkeypatch):
    torch.manual_seed(0)
    networks, (x, y) = [tiny.mlp().double() for _ in range(3)], tiny.points()
    if shared:
        for network in networks[1:]:
            network.load_state_dict({**networks[0].state_dict(), "3.weight": network[3].weight})
    posterior = Counted(networks, shared=shared).double()
    fixed_noise(monkeypatch)
    if way == "loss":
        posterior.particles.how = "loop"
        posterior.loss(x, y).backward()
    else:
        losses = gradients.backward(posterior, Batch(x, y), getattr(gradients, way))
        assert losses.shape == (3,)
    own, common = posterior.particles.own_parameters(), posterior.particles.shared_parameters()
    summed, statistics = {}, []
    for m, network in enumerate(networks):
        shift = torch.full((3,), float(m), dtype=torch.float64, requires_grad=True)
        noise, alone = (1 + m) / 10, copy.deepcopy(network)
        outputs = torch.func.functional_call(alone, dict(network.named_parameters()), (x * (1 + noise),))
        statistics.append(alone[1].running_mean)
        nn.functional.cross_entropy(outputs + noise * shift, y).backward()
        torch.testing.assert_close(own["latents.shift"].grad[m], shift.grad, rtol=0, atol=1e-12)
        torch.testing.assert_close(own["network.3.weight"].grad[m], network[3].weight.grad, rtol=0, atol=1e-12)
        summed[m] = network[0].weight.grad
    found = common["network.0.weight"].grad if shared else own["network.0.weight"].grad
    expected = sum(summed.values()) if shared else torch.stack(list(summed.values()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    means = torch.stack(statistics)
    if shared:
        found = posterior.particles.shared_buffers()["network.1.running_mean"]
        assert int(posterior.particles.shared_buffers()["network.1.num_batches_tracked"]) == 1
    else:
        found = posterior.particles.own_buffers()["network.1.running_mean"]
    torch.testing.assert_close(found, means.mean(0) if shared else means, rtol=0, atol=1e-12)


def test_latents_are_found_by_state_and_dtype_and_have_no_prior():
    posterior = NodeNoise(tiny.mlp(), samples=2, weight_prior_std=1.0, data_size=10).double()
    names = {name for name, _ in posterior.named_parameters() if "latents" in name}
    assert names == {"particles.shared.latents.0.log_std", "particles.shared.latents.3.log_std"}
    assert names <= posterior.state_dict().keys()
    assert all(p.dtype == torch.float64 for p in posterior.parameters())
    params = posterior.particles.shared_parameters()
    latents = [params[name.removeprefix("particles.shared.")] for name in sorted(names)]
    assert torch.autograd.grad(posterior.penalty(params), latents, allow_unused=True) == (None, None)


METHODS = {
    "rank1": lambda: Rank1Ensemble(tiny.mlp(), members=3),
    "node_noise": lambda: NodeNoise(tiny.mlp(), samples=4),
    "node_noise_conv": lambda: NodeNoise(
        nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(6, 3)), samples=2
    ),
}


@pytest.mark.parametrize(("name", "engine"), thinned(list(METHODS), ["loop", "vectorised", "auto"], every=2))
def test_small_methods_train_under_every_engine(name, engine):
    torch.manual_seed(0)
    posterior, (x, y) = METHODS[name]().double(), tiny.points(30)
    x = x + 2 * nn.functional.one_hot(y, 4)
    optimizer = torch.optim.Adam(posterior.parameter_groups(lr=0.05))
    history = ds.fit(
        posterior, [(x[:15], y[:15]), (x[15:], y[15:])], epochs=10, optimizer=optimizer, progress=False, engine=engine,
        accumulate=2, clip=5.0,
    )  # fmt: skip
    assert history[-1].loss < 0.8 * history[0].loss
    assert posterior.particles.members == 1 or posterior.particles.how == "vectorised"


@pytest.fixture
def traced(monkeypatch):
    """The compiler's tracing and autograd without its code generation, which takes most of the time."""
    compiler = functools.partial(torch.compile, dynamic=False, backend="aot_eager")
    monkeypatch.setattr("dissensus.engine.strategies._compile", compiler)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loop", "vectorised"])
def test_compiled_and_plain_gradients_agree_for_own_modulations(kind, traced):
    posterior, (x, y) = METHODS["rank1"]().double(), tiny.points()
    plain = make_strategy(kind)(posterior, Batch(x, y))
    compiled = make_strategy(kind, compiled=True)
    found = compiled(posterior, Batch(x, y))
    assert compiled.name == f"{kind}+compiled"  # did not fall back
    assert tiny.largest_difference(plain.gradients, found.gradients) < 1e-10


def test_losses_with_random_numbers_run_compiled(traced):
    posterior, (x, y) = NodeNoise(nn.Sequential(nn.Linear(4, 3)), samples=4).double(), tiny.points()
    compiled = make_strategy("loop", compiled=True)
    found = [compiled(posterior, Batch(x, y)) for _ in range(2)]
    assert compiled.name == "loop+compiled"  # did not fall back
    assert float(found[0].losses) != float(found[1].losses)
    assert found[0].gradients.keys() == posterior.particles.shared_parameters().keys()

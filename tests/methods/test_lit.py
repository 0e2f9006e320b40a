"""LIT: its penalty written out with plain modules, and members whose gradients become orthogonal."""

import copy

import pytest
import torch
from test_rde import flat_gradients, networks
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.core import gradients
from dissensus.core.batch import Batch
from dissensus.methods import LIT
from dissensus.methods.forde import squared_cosines
from refusals import refuses


def input_gradients(nets: list[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    """(M, B, D) of the true-class logit, with a graph to the weights."""
    x = x.clone().requires_grad_()
    return torch.stack(
        [torch.autograd.grad(net(x).gather(1, y[:, None]).sum(), x, create_graph=True)[0] for net in nets]
    )


def penalty(g: Tensor) -> Tensor:
    """() Σ_{i<j} mean_b cos²(g_ib, g_jb)."""
    total = torch.zeros((), dtype=g.dtype)
    for i in range(len(g)):
        for j in range(i):
            total = total + nn.functional.cosine_similarity(g[i], g[j], dim=1).square().mean()
    return total


@pytest.mark.parametrize(
    "strategy",
    [gradients.vectorised_gradients, gradients.looped_gradients, gradients.looped_keeping_graphs],
    ids=lambda s: s.__name__,
)
def test_gradients_are_those_of_loss_and_penalty(strategy):
    nets, (x, y) = networks(), tiny.points()
    posterior = LIT(nets, strength=0.7)
    found = strategy(posterior, Batch(x, y))
    total = 0.7 * penalty(input_gradients(nets, x, y)) + sum(nn.functional.cross_entropy(net(x), y) for net in nets)
    parameters = [parameter for net in nets for parameter in net.parameters()]
    expected = torch.autograd.grad(total, parameters, allow_unused=True)
    expected = torch.cat([g.flatten() for g in expected]).reshape(4, -1)
    got = torch.cat([g.reshape(4, -1) for g in found.gradients.values()], dim=1)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_each_pair_counts_once_for_each_of_its_members():
    g = torch.randn(3, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(squared_cosines(g).sum(), 2 * penalty(g), rtol=0, atol=1e-12)
    weight = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    repeated = squared_cosines(g[:, [0, 1, 1, 2, 3]])
    torch.testing.assert_close(squared_cosines(g, weight), repeated, rtol=0, atol=1e-12)


def test_training_makes_gradients_orthogonal():
    nets, (x, y) = networks(3), tiny.points(30)
    cosines = {}
    for strength in (0.0, 3.0):
        posterior = LIT(copy.deepcopy(nets), strength=strength)
        optimizer = torch.optim.Adam(posterior.parameters(), lr=0.02)
        ds.fit(posterior, [(x, y)] * 100, epochs=1, optimizer=optimizer, progress=False)
        g = input_gradients([posterior.member(i) for i in range(3)], x, y)
        cosines[strength] = float(penalty(g).detach())
    assert cosines[3.0] < 0.3 * cosines[0.0]


def test_without_strength_it_is_a_deep_ensemble_and_alone_it_is_map():
    nets, (x, y) = networks(3), tiny.points()
    posterior, ensemble = LIT(nets, strength=0.0), ds.DeepEnsemble(nets)
    posterior.backward(x, y)
    ensemble.backward(x, y)
    torch.testing.assert_close(flat_gradients(posterior), flat_gradients(ensemble), rtol=0, atol=1e-12)
    alone, single = LIT(nets[:1], strength=1.0), ds.MAP(copy.deepcopy(nets[0]))
    alone.backward(x, y)
    single.backward(x, y)
    expected = torch.cat([p.grad.flatten() for p in single.parameters()])
    assert torch.equal(flat_gradients(alone)[0], expected)


def test_rows_with_void_labels_are_as_if_they_were_not_there():
    nets, (x, y), (noise, _) = networks(), tiny.points(), tiny.points(seed=5)
    likelihood = ds.Classification(ignore_index=7)
    half, alone = (LIT(nets, strength=0.7, likelihood=likelihood) for _ in range(2))
    half.backward(torch.cat([x, noise]), torch.cat([y, torch.full_like(y, 7)]))
    alone.backward(x, y)
    torch.testing.assert_close(flat_gradients(half), flat_gradients(alone), rtol=0, atol=1e-10)


def test_bad_input_is_a_clear_error():
    nets = networks(2)
    refuses(lambda: LIT(nets, strength=-1), "expected strength of at least 0, got -1")
    refuses(lambda: LIT(nets, strength=1, gradient="loss"), "expected gradient of logit, log_prob")
    refuses(lambda: LIT([], strength=1), "expected at least one module, got none")
    with pytest.raises(TypeError, match=r"expected examples as a whole number, got 2\.5; pass an int"):
        LIT(nets, strength=1, examples=2.5)
    one = LIT([nn.Linear(1, 3), nn.Linear(1, 3)], strength=1)
    with pytest.raises(ValueError, match="expected inputs of at least two floating-point features, got only one"):
        one.backward(torch.randn(5, 1), torch.zeros(5, dtype=torch.int64))


@pytest.mark.parametrize("members", [2, 5, 16])
def test_the_pairs_of_a_member_add_up(members):
    """Of M − 1 others that all point one way each pushes in full: the exact factor that its page names."""
    generator = torch.Generator().manual_seed(0)
    mine, other = torch.randn(2, 1, 5, 3, dtype=torch.float64, generator=generator)

    def force(count: int) -> Tensor:
        g = torch.cat([mine, other.expand(count, -1, -1)])
        return LIT(networks(2), strength=0.3).couple({"gradients": g})["gradients"][0]

    torch.testing.assert_close(force(members - 1), (members - 1) * force(1), rtol=1e-12, atol=1e-15)

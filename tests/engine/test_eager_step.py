"""Steps of several batches, and clipping member by member: the same as one large batch and each member alone."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.core.particles import Member, Particles
from dissensus.engine.training_step import clip_members
from dissensus.utils.tensor_tree import TensorTree
from thinning import thinned

X, Y = tiny.points(40)
WEIGHT = 3 * torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
IGNORED = torch.where(torch.arange(40) % 40 < 17, 9, Y)  # two of the equal batches have few labels that count
CASES = {
    "plain": (None, Y, ds.Classification),
    "weighted": (WEIGHT, Y, ds.Classification),
    "whole weights": (WEIGHT.round(), Y, ds.Classification),
    "half without weight": (torch.where(torch.arange(40) < 20, 0.0, WEIGHT), Y, ds.Classification),
    "nothing counts": (0 * WEIGHT, Y, ds.Classification),
    "ignored": (None, IGNORED, lambda: ds.Classification(ignore_index=9)),
    "ignored, weighted": (WEIGHT, IGNORED, lambda: ds.Classification(ignore_index=9)),
    "regression": (WEIGHT, X[:, :3], ds.Regression),
}
PRIOR = {"weight_prior_std": 0.5, "data_size": 40}
METHODS = {
    "map": lambda nets, likelihood: ds.MAP(nets[0], likelihood=likelihood, **PRIOR),
    "deep_ensemble": lambda nets, likelihood: ds.DeepEnsemble(nets, likelihood=likelihood, **PRIOR),
    "weight_rde": lambda nets, likelihood: ds.WeightRDE(nets, likelihood=likelihood, **PRIOR),
    "svgd": lambda nets, likelihood: ds.SVGD(nets, likelihood=likelihood, **PRIOR),
    "forde": lambda nets, likelihood: ds.FoRDE(nets, likelihood=likelihood, repulsion="1/N", **PRIOR),
}


def trained(method, case, cuts, *, networks=lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))):
    weight, y, likelihood = CASES[case]
    torch.manual_seed(0)
    posterior = METHODS[method]([networks() for _ in range(2)], likelihood()).double()
    given = [X, y] if weight is None else [X, y, weight]
    batches = [tuple(each[i:j] for each in given) for i, j in pairwise(cuts)]
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.3)
    settings = {"epochs": 2, "accumulate": len(batches), "clip": 1.0, "optimizer": optimizer, "progress": False}
    ds.fit(posterior, batches, **settings)
    return tiny.state(posterior)


MIXED = ("svgd", "weighted")
ALIKE = [(method, case) for method in ("map", "weight_rde", "svgd") for case in CASES if (method, case) != MIXED]


@pytest.mark.parametrize(("method", "case"), [
    *thinned(["deep_ensemble", "forde"], list(CASES), every=2),
    MIXED,
    *(pytest.param(*each, marks=pytest.mark.slow) for each in ALIKE),
])  # fmt: skip
def test_a_step_of_several_batches_is_that_of_one_large_batch(method, case):
    expected = trained(method, case, [0, 40])
    for cuts in ([0, 10, 20, 30, 40], [0, 3, 20, 39, 40]):
        assert tiny.largest_difference(trained(method, case, cuts), expected) < 1e-10


def test_a_step_of_fewer_batches_at_the_end_of_an_epoch_is_that_of_one_large_batch():
    def run(batches, accumulate):
        torch.manual_seed(0)
        posterior = ds.MAP(nn.Linear(4, 3).double())
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.3)
        ds.fit(posterior, batches, epochs=1, accumulate=accumulate, optimizer=optimizer, progress=False)
        return tiny.state(posterior)

    cut = [(X[i:j], Y[i:j], WEIGHT[i:j]) for i, j in pairwise([0, 5, 17, 20, 31, 40])]
    large = [(X[:20], Y[:20], WEIGHT[:20]), (X[20:], Y[20:], WEIGHT[20:])]
    assert tiny.largest_difference(run(cut, 3), run(large, 1)) < 1e-10


@pytest.mark.parametrize("class_weights", [None, [1.0, 5.0, 30.0]])
def test_void_pixels_count_for_nothing_in_a_step_of_several_batches(class_weights):
    x = torch.randn(6, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6 * 16).reshape(6, 4, 4) % 3
    y[:2, 1:] = 255
    weight = 1.0 + torch.arange(6, dtype=torch.float64)

    def run(cuts):
        torch.manual_seed(0)
        likelihood = ds.Classification(ignore_index=255, class_weights=class_weights)
        posterior = ds.MAP(tiny.segmenter().double(), likelihood=likelihood)
        batches = [(x[i:j], y[i:j], weight[i:j]) for i, j in pairwise(cuts)]
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.3)
        ds.fit(posterior, batches, epochs=1, accumulate=len(batches), optimizer=optimizer, progress=False)
        return tiny.state(posterior)

    assert tiny.largest_difference(run([0, 2, 5, 6]), run([0, 6])) < 1e-10


@pytest.mark.parametrize("largest", [1e-3, 0.5, 1e3])
def test_each_member_is_clipped_by_its_own_norm(largest):
    networks = [tiny.mlp().double() for _ in range(3)]
    with torch.no_grad():
        networks[2][0].weight.mul_(50)  # a member with large gradients does not slow the others down
    posterior, (x, y) = ds.DeepEnsemble(networks), tiny.points()
    posterior.backward(x, y)
    norms = clip_members(posterior.particles, largest)
    for i, net in enumerate(networks):
        nn.functional.cross_entropy(net(x), y).backward()
        norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
        assert float(norms[i]) == pytest.approx(float(norm), rel=1e-12)
        for name, parameter in net.named_parameters():
            mine = posterior.particles.own_parameters()[f"network.{name}"].grad[i]
            torch.testing.assert_close(mine, parameter.grad * min(1.0, largest / float(norm)), rtol=1e-12, atol=1e-15)
        # torch's own function divides by norm + 1e-6
        nn.utils.clip_grad_norm_(net.parameters(), largest)
        after = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
        ours = torch.cat([p.grad[i].flatten() for p in posterior.particles.own_parameters().values()]).norm()
        assert float(ours) == pytest.approx(float(after), rel=1e-4)


def test_a_held_network_is_clipped_as_one():
    posterior, (x, y) = ds.MAP(tiny.mlp().double()), tiny.points()
    posterior.backward(x, y)
    before = torch.cat([g.flatten() for g in tiny.gradients(posterior).values()])
    norms = clip_members(posterior.particles, 0.01)
    after = torch.cat([g.flatten() for g in tiny.gradients(posterior).values()])
    assert norms.shape == (1,)
    torch.testing.assert_close(after, before * (0.01 / before.norm()), rtol=1e-12, atol=0)


def test_own_and_shared_tensors_are_clipped_apart():
    own, shared = TensorTree(), TensorTree()
    own.add_tensor("network.bias", nn.Parameter(torch.zeros(2, 3)))
    shared.add_tensor("network.weight", nn.Parameter(torch.zeros(3, 4)))
    particles = Particles(Member(nn.Linear(4, 3), ds.Classification()), own=own, shared=shared, members=2)
    bias, weight = particles.own_parameters()["network.bias"], particles.shared_parameters()["network.weight"]
    bias.grad = torch.tensor([[3.0, 4.0, 0.0], [0.3, 0.4, 0.0]])
    weight.grad = torch.full((3, 4), 1.0)
    torch.testing.assert_close(clip_members(particles, 1.0), torch.tensor([5.0, 0.5]))
    torch.testing.assert_close(bias.grad, torch.tensor([[0.6, 0.8, 0.0], [0.3, 0.4, 0.0]]))
    torch.testing.assert_close(weight.grad, torch.full((3, 4), 1 / 12**0.5))


def test_no_gradient_and_zero_gradients_are_left_alone():
    for posterior in (ds.MAP(tiny.mlp()), tiny.ensemble(tiny.mlp, members=2)):
        zeros = [0.0] * posterior.particles.members
        assert clip_members(posterior.particles, 1.0).tolist() == zeros
        assert not tiny.gradients(posterior)
        for parameter in posterior.parameters():
            parameter.grad = torch.zeros_like(parameter)
        assert clip_members(posterior.particles, 1.0).tolist() == zeros
        assert all(float(p.grad.abs().max()) == 0 for p in posterior.parameters())


@pytest.mark.parametrize("scale", [1e-4, 300.0])
def test_gradients_in_half_precision_are_clipped_and_not_wiped_out(scale):
    """Norms whose square leaves float16, above and below."""
    posterior = ds.DeepEnsemble([nn.Linear(4, 3).half() for _ in range(2)])
    for parameter in posterior.parameters():
        parameter.grad = (scale * torch.randn(parameter.shape)).half()
    exact = sum(p.grad.double().flatten(1).square().sum(1) for p in posterior.parameters()).sqrt()
    before = [p.grad.clone() for p in posterior.parameters()]
    norms = clip_members(posterior.particles, float(exact.min()) / 2)
    torch.testing.assert_close(norms.double(), exact, rtol=1e-5, atol=0)
    factor = exact.min() / 2 / exact  # (M,)
    for parameter, old in zip(posterior.parameters(), before, strict=True):
        expected = old.double() * factor.reshape(-1, *[1] * (old.ndim - 1))
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=2e-3, atol=1e-7)


def test_gathered_gradients_that_the_optimizer_does_not_hold_count_once_in_the_norm():
    x, y = tiny.points()
    heads = []
    for batches, gathered in (
        ([(x, y)], 1),
        ([(x, y)] * 3, 3),
    ):  # three times the same batch is one step with its gradient
        torch.manual_seed(0)
        network = tiny.mlp().double()
        head = list(network.children())[-1]
        posterior, optimizer = ds.MAP(network), torch.optim.SGD(head.parameters(), lr=1.0)
        ds.fit(posterior, batches, epochs=1, optimizer=optimizer, clip=0.01, accumulate=gathered, progress=False)
        heads.append(head.weight.detach())
    torch.testing.assert_close(heads[1], heads[0], rtol=0, atol=1e-15)

"""Hamiltonian Monte Carlo on densities that are known."""

import math

import pytest
import torch

import tiny
from dissensus.core.weights import Weights
from dissensus.metrics import effective_sample_size, split_rhat
from dissensus.numerics.flat_weights import Block, state_dtype
from dissensus.numerics.hamiltonian import Point, leapfrogs, sample_chains
from dissensus.numerics.randomness import chain_generators
from refusals import refuses
from thinning import often

CPU = torch.device("cpu")


def gaussian(precision, mean=0.0):
    """The energy of N(mean, precision⁻¹)."""

    def energy(q):
        gradient = (q - mean) @ precision
        return ((q - mean) * gradient).sum(1) / 2, gradient

    return energy


def run(energy, start, *, numbers=None, seed=0, samples=500, warmup=300, leapfrog=10, target=0.8):
    numbers = range(len(start)) if numbers is None else numbers
    return sample_chains(
        energy, start, samples=samples, warmup=warmup, leapfrog=leapfrog, target_acceptance=target,
        generators=chain_generators(seed, numbers, CPU),
    )  # fmt: skip


def correlated(dimension):
    torch.manual_seed(1)
    root = torch.randn(dimension, 2 * dimension, dtype=torch.float64)
    return root @ root.T / dimension


@pytest.mark.parametrize("dimension", often([3], [20]))
def test_chains_sample_a_gaussian(dimension):
    precision, mean = correlated(dimension), torch.linspace(-2, 2, dimension, dtype=torch.float64)
    covariance = torch.linalg.inv(precision)
    chains = run(gaussian(precision, mean), torch.zeros(4, dimension, dtype=torch.float64), samples=400, warmup=200)
    whitened = (chains.draws - mean) @ torch.linalg.cholesky(precision)  # (4, 400, P), independent under the target
    assert bool((split_rhat(whitened) < 1.02).all())
    n = effective_sample_size(whitened)  # (P,), of means
    assert bool((n > 250).all())
    flat = whitened.flatten(0, 1)
    assert bool((flat.mean(0).abs() < 4.5 / n.sqrt()).all())
    # Entries of the covariance, of products of two coordinates: their draws' own effective number.
    products = whitened.unsqueeze(-1) * whitened.unsqueeze(-2)
    error = (flat.T @ flat / len(flat) - torch.eye(dimension)) / (products.flatten(0, 1).std(0))
    assert bool((error.abs() < 4.5 / effective_sample_size(products).sqrt()).all())
    assert covariance.diagonal().min() < 0.5 * covariance.diagonal().max()  # scales differ


@pytest.mark.parametrize("target", [0.8, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.6, 0.9))])
def test_dual_averaging_finds_the_step_size_of_the_target(target):
    precision = torch.diag(torch.linspace(0.5, 4, 100, dtype=torch.float64))
    start = torch.randn(4, 100, dtype=torch.float64)
    chains = run(gaussian(precision), start, target=target, leapfrog=6, warmup=700, samples=250)
    # Sizes are averaged in the logarithm, and the acceptance falls the faster the larger they are: it ends a little above.
    assert float((chains.acceptance - target).abs().max()) < 0.06
    assert bool((chains.step_size < 2 / math.sqrt(4)).all())  # the leapfrog step is stable below 2 / ω


def test_the_leapfrog_step_is_reversible_and_of_second_order():
    torch.manual_seed(0)

    def energy(q):
        return (q**4 / 4).sum(1) + (1 - q.cos()).sum(1), q**3 + q.sin()

    q, p = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    start = Point(q, *energy(q))

    def error(steps):
        end, momentum = leapfrogs(energy, start, p, torch.full((2,), 1.0 / steps, dtype=torch.float64), steps)
        back, returned = leapfrogs(energy, end, -momentum, torch.full((2,), 1.0 / steps, dtype=torch.float64), steps)
        torch.testing.assert_close(back.position, q, rtol=0, atol=1e-12)
        torch.testing.assert_close(returned, -p, rtol=0, atol=1e-12)
        return float((end.energy + momentum.square().sum(1) / 2 - start.energy - p.square().sum(1) / 2).abs().max())

    assert error(40) / error(80) == pytest.approx(4, rel=0.1)


def test_chains_together_are_chains_alone():
    start, energy = torch.randn(3, 5, dtype=torch.float64), gaussian(correlated(5))
    together = run(energy, start, samples=20, warmup=20)
    for number in range(3):
        alone = run(energy, start[number : number + 1], numbers=[number], samples=20, warmup=20)
        torch.testing.assert_close(alone.draws[0], together.draws[number], rtol=0, atol=1e-8)
    assert not torch.allclose(together.draws[0], together.draws[1])


def test_every_other_sample_is_what_is_kept_of_a_longer_chain():
    start, energy = torch.zeros(2, 3, dtype=torch.float64), gaussian(correlated(3))
    every = {"warmup": 5, "leapfrog": 3, "target_acceptance": 0.8}
    long, thin = (
        sample_chains(energy, start, samples=n, every=e, generators=chain_generators(0, range(2), CPU), **every)
        for n, e in ((12, 1), (4, 3))
    )
    assert torch.equal(thin.draws, long.draws[:, 2::3])
    torch.testing.assert_close(thin.acceptance, long.acceptance)


def test_a_chain_never_enters_where_the_energy_is_not_finite():
    """A half-normal: energy is NaN below 0. Its mean is √(2/π); the other chain is not disturbed."""

    def energy(q):
        inside = q[:, 0] >= 0
        return torch.where(inside, q[:, 0] ** 2 / 2, math.nan), torch.where(inside[:, None], q, math.nan)

    chains = run(energy, torch.ones(2, 1, dtype=torch.float64), samples=500, leapfrog=3, warmup=150)
    assert bool((chains.draws >= 0).all())
    n = effective_sample_size(chains.draws)
    std = math.sqrt(1 - 2 / math.pi)
    assert abs(float(chains.draws.mean()) - math.sqrt(2 / math.pi)) < 4 * std / float(n) ** 0.5


def test_two_modes_far_apart_keep_their_chains():
    """exp(−energy) = N(−6, 1) + N(6, 1): chains that began in different modes stay, and R̂ says so."""

    def energy(q):
        parts = torch.stack([-((q[:, 0] - 6) ** 2) / 2, -((q[:, 0] + 6) ** 2) / 2])
        share = parts.softmax(0)
        return -parts.logsumexp(0), (share[0] * (q[:, 0] - 6) + share[1] * (q[:, 0] + 6))[:, None]

    start = torch.tensor([[-6.0], [-6.0], [6.0], [6.0]], dtype=torch.float64)
    stuck = run(energy, start, samples=200, warmup=100, leapfrog=4)
    assert float(split_rhat(stuck.draws)) > 3
    assert float(effective_sample_size(stuck.draws)) < 10
    assert float(split_rhat(stuck.draws[:2])) < 1.05


# --------------------------------------------------------------------------------------------------------- flat weights
def unflatten(flat, tensors):
    stored = {name: tensor[None] for name, tensor in tensors.items()}
    return Weights(stored, frozenset(stored), 1).unflatten(flat)


def test_a_vector_is_taken_apart_into_tensors_like_those_given():
    parameters = dict(tiny.mlp().double().named_parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters.values()])
    back = unflatten(flat, parameters)
    assert all(torch.equal(back[name], parameters[name]) for name in parameters)
    stacked = unflatten(torch.stack([flat, 2 * flat]), parameters)
    assert all(torch.equal(stacked[name][1], 2 * parameters[name]) for name in parameters)


def test_half_precision_is_summed_in_float32_and_comes_back_in_half():
    weights = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4, dtype=torch.bfloat16)}
    assert state_dtype(list(weights.values())) == torch.float32
    assert unflatten(torch.ones(10), weights)["a"].dtype == torch.bfloat16
    assert state_dtype([torch.zeros(1, dtype=torch.float64), weights["a"]]) == torch.float64


def test_a_vector_of_another_length_is_refused():
    refuses(lambda: unflatten(torch.zeros(5), {"a": torch.zeros(2, 3)}), "split_sizes", RuntimeError)


def test_a_block_lies_as_its_tensors_do():
    rows, channels = torch.randn(3, 4), torch.randn(5, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    block = Block([rows, channels], torch.float64)
    assert [view.stride() for view in block.views] == [rows.stride(), channels.stride()]
    torch._foreach_copy_(block.views, [rows, channels])
    assert torch.equal(block.views[1], channels.double())
    assert block.flat.sum().item() == pytest.approx(float(rows.double().sum() + channels.double().sum()), abs=1e-12)
    block.flat.zero_()
    assert float(block.views[0].abs().max()) == 0
    assert block.has_layout_of([rows, channels])
    assert not block.has_layout_of([rows, channels.contiguous()])


def test_a_tensor_with_holes_in_memory_gets_a_dense_view():
    holes = torch.randn(4, 6)[:, ::2]
    block = Block([holes], torch.float32)
    block.views[0].copy_(holes)
    assert torch.equal(block.views[0], holes)
    assert block.flat.shape == (12,)
    assert block.has_layout_of([holes])

"""Steps of several batches: the same as the step of one large batch."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
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


ALIKE = [(method, case) for method in ("map", "weight_rde", "svgd") for case in CASES]


@pytest.mark.parametrize(
    ("method", "case"),
    [
        *thinned(["deep_ensemble", "forde"], list(CASES), every=2),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ALIKE),
    ],
)
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

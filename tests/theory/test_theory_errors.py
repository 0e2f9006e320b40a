"""What the theory cannot take is refused in one grammar, and nothing that has no meaning is computed."""

from functools import partial

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import Modulation, theory

X = torch.randn(5, 4)
LAW = {"depth": 2, "activation": "relu", "weight_variance": 2.0}
ONE = Modulation.constant(1.0)


def small(*layers):
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: theory.optimal_members(-5, time=1.0), ValueError, "width of at least 1, got -5"),
        (lambda: theory.optimal_members(5, time=float("inf")), ValueError, "time above 0, got inf"),
        (lambda: theory.transition(-1, 10), ValueError, "members of at least 1, got -1"),
        (lambda: theory.transition(0, 0), ValueError, "members of at least 1, got 0"),
        (lambda: theory.transition(1.5, 10), TypeError, "members as a whole number, got 1.5"),
        (lambda: theory.largest_eigenvalue(100, 1000, p=2.0), ValueError, "p of at least -1 and of at most 1, got 2.0"),
        (lambda: theory.largest_eigenvalue(100, 0, p=0.2), ValueError, "width of at least 1, got 0"),
        (lambda: theory.toy_spectrum(4, 10, p=0.1, draws=0), ValueError, "draws of at least 1, got 0"),
        (lambda: theory.random_network(small(), weight_variance="2"), TypeError, "weight_variance as a number, got '2'"),
        (
            lambda: theory.random_network(small(), weight_variance=2.0, parameterization="mup"),
            ValueError,
            "parameterization of ntk, standard, got 'mup'",
        ),
        (lambda: theory.kernel(small(nn.BatchNorm1d(8)), X, weight_variance=2.0), ValueError, "got BatchNorm1d; leave it out"),
        (lambda: theory.kernel(small(nn.LayerNorm(8)), X, weight_variance=2.0), ValueError, "got LayerNorm; leave it out"),
        (lambda: theory.kernel(small(nn.Dropout()), X, weight_variance=2.0), ValueError, "got Dropout; leave it out"),
        (lambda: theory.kernel(ds.nets.ResNet(20), X, weight_variance=2.0), ValueError, "an nn.Sequential or .*, got ResNet"),
        (lambda: theory.kernel(ds.nets.MLP, X, weight_variance=2.0), TypeError, "got the class MLP; pass an nn.Sequential of"),
        (lambda: theory.kernel(None, X, weight_variance=2.0), TypeError, "a network, got None"),
        (lambda: theory.embedded_kernels(X, u="sign", v=ONE, **LAW), ValueError, "2 for u, got 'sign'"),
        (lambda: theory.embedded_kernels(X, u=ONE, v=[ONE], **LAW), ValueError, "2 for v, got"),
        (lambda: theory.EmbeddedNetwork.draw(4, width=8, members=2, u="sign", v=ONE, **LAW), ValueError, "2 for u, got 'sign'"),
        (lambda: theory.EmbeddedNetwork.draw(4, width=8, members=0, u=ONE, v=ONE, **LAW), ValueError, "members of at least 1"),
        (lambda: theory.EmbeddedNetwork.draw(4, width=[8], members=2, u=ONE, v=ONE, **LAW), ValueError, "one width or 2"),
        (
            lambda: theory.gp_predict(
                partial(theory.kernel, small(), weight_variance=2.0), X, torch.zeros(3), X, noise=0.1
            ),
            ValueError,
            r"got \(3,\)",
        ),
        (
            lambda: theory.ensemble_dynamics(X, torch.zeros(5), kernels=theory.embedded_kernels, members=0, gamma=1.0),
            ValueError,
            "members of at least 1, got 0",
        ),
    ],
)  # fmt: skip
def test_errors_say_what_was_expected_what_came_and_what_to_do(call, kind, says):
    with pytest.raises(kind, match=says) as error:
        call()
    assert str(error.value).startswith("expected ")
    assert "; " in str(error.value)


def test_numbers_of_other_libraries_are_numbers():
    import numpy as np

    assert theory.transition(np.int64(100), 1000) == theory.transition(100, 1000)
    drawn = theory.random_network(small(), weight_variance=np.float32(2.0), generator=torch.Generator().manual_seed(0))
    assert drawn(X).shape == (5, 1)


def test_factors_of_zero_are_no_division_by_zero():
    net = ds.nets.MLP(4, 2, hidden=(8,))
    posterior = ds.BatchEnsemble(net, members=3, modulation=Modulation.sign())
    for factors in posterior.modulations.values():
        factors.data.zero_()
    assert "regime unknown" in str(theory.regime(posterior))
    assert theory.regime(posterior, X).rate > 0

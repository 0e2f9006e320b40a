"""How strongly members repel: one over the data, over a batch, or a number; with weights, partial and gathered batches."""

import copy
import math

import pytest
import torch

import dissensus as ds
import tiny
from dissensus.core.batch import Batch
from dissensus.methods import FeatureRDE, FoRDE, FunctionRDE, WeightRDE
from dissensus.methods.parts.repulsion import Strength
from dissensus.training.validation import validation_nll
from refusals import refuses


def test_the_three_kinds():
    assert Strength("1/N", 400)() == 1 / 400
    assert Strength(0.3, None)() == 0.3
    assert Strength("1/B", None, 50)(7) == 1 / 50
    assert Strength("1/B", None)(7) == 1 / 7


def test_a_batch_is_the_largest_seen_in_training_times_those_gathered():
    strength = Strength("1/B", None)
    for size in (12, 5):
        strength.note_batch_size(size, training=True)
    strength.note_batch_size(100, training=False)  # an evaluation is no training batch
    assert strength() == 1 / 12
    assert strength(gathered=4) == 1 / 48
    assert Strength("1/B", None, 48)(gathered=4) == 1 / 48  # told, it is the whole step's


def test_a_weight_of_two_is_two_examples_and_a_weight_of_zero_none():
    strength = Strength("1/B", None)
    strength.note_batch_size(4, training=True)
    assert float(strength(4, torch.tensor([2.0, 2.0, 2.0, 2.0]))) == 1 / 8
    assert float(strength(4, torch.tensor([1.0, 1.0, 0.0, 0.0]))) == 1 / 4  # a partial batch
    assert float(strength(4, torch.zeros(4))) == 0
    for told in (Strength("1/B", None, 4), Strength(0.25, None), Strength("1/N", 4)):
        assert float(told(4, torch.full((4,), 1e-3))) == 1 / 4
        assert float(told(4, torch.zeros(4))) == 0


def test_a_batch_without_weight_moves_nobody():
    nets, (x, y) = [tiny.mlp().double() for _ in range(3)], tiny.points()
    posterior = FoRDE(nets)
    posterior.backward(x, y, torch.zeros(len(y), dtype=torch.float64))
    assert all(float(parameter.grad.abs().max()) == 0 for parameter in posterior.parameters())


REPELLED = {
    "weight_rde": lambda nets: WeightRDE(nets, data_size=12, repulsion="1/B"),
    "function_rde": lambda nets: FunctionRDE(nets, data_size=12, repulsion="1/B"),
    "feature_rde": lambda nets: FeatureRDE(nets, layer="2", head="3"),
    "forde": lambda nets: FoRDE(nets, every=2),
}


@pytest.mark.parametrize("method", REPELLED)
def test_evaluation_is_not_taken_for_a_batch_of_training(method):
    posterior, (x, y) = REPELLED[method]([tiny.mlp().double() for _ in range(3)]), tiny.points()
    posterior.backward(x[:5], y[:5])
    posterior.steps += 1
    ds.member_distances(posterior, x, y)
    ds.temperature_scale(posterior, [(x, y)])
    validation_nll(posterior, [(x, y)])
    posterior.check_batch(Batch(x, y))
    assert (posterior.strength.last, posterior.strength.largest) == (5, 5)
    acting = posterior.interaction
    assert acting is not None  # as the step before left it
    posterior.eval().loss(x, y)
    assert (posterior.strength.last, posterior.strength.largest) == (12, 5)
    assert posterior.interaction == (None if method == "forde" else acting)


@pytest.mark.parametrize("method", [WeightRDE, FunctionRDE])
def test_a_loaded_posterior_in_eval_mode_repels_by_its_batch(method, tmp_path):
    nets, (x, y) = [tiny.mlp().double() for _ in range(3)], tiny.points()
    for net in nets:
        net.eval()  # no batch statistics: both modes compute the same
    training = method(copy.deepcopy(nets), data_size=500, repulsion="1/B")
    ds.save(training, tmp_path / "saved")
    loaded = ds.load(tmp_path / "saved", tiny.mlp().double())
    assert not loaded.training
    for posterior in (training.eval(), loaded):
        posterior.backward(x, y)
    for one, other in zip(training.parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    told = method(copy.deepcopy(nets), data_size=500, repulsion=1 / len(y)).eval()
    told.backward(x, y)
    for one, other in zip(told.parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("repulsion", [None, True, -1.0, math.inf, math.nan, "1/M"])
def test_what_is_no_strength_is_an_error(repulsion):
    with pytest.raises((TypeError, ValueError), match=r"expected repulsion (as a number|of at least 0|of 1/B, 1/N)"):
        Strength(repulsion, 10)


def test_other_bad_input_is_an_error():
    refuses(lambda: Strength("1/N", None), r"expected data_size with repulsion \"1/N\", got none")
    refuses(lambda: Strength("1/B", None, 0), "expected batch_size of at least 1, got 0")
    refuses(lambda: Strength("1/B", None, 2.5), r"expected batch_size as a whole number, got 2\.5", TypeError)


def test_weights_in_half_precision_are_summed_in_full():
    strength = Strength("1/B", None)
    strength.note_batch_size(4096, training=True)
    assert float(strength(4096, torch.full((4096,), 20.0).half())) == pytest.approx(1 / (20 * 4096), rel=1e-6)

"""Schedules know how long the run is and where in it they are: in a second run, after a resume, without len()."""

import pytest
import torch

import dissensus as ds
import tiny
from dissensus.core.trainable import annealing_weight
from dissensus.numerics.annealing import Annealing

STEPS = 3


def batches():
    x, y = tiny.points(12)
    return [(x[i : i + 4], y[i : i + 4]) for i in range(0, 12, 4)]


class Unsized:
    def __iter__(self):
        return iter(batches())


def repelling(annealing, method=ds.WeightRDE):
    torch.manual_seed(0)
    return method([tiny.mlp() for _ in range(2)], data_size=12, annealing=annealing).double()


def weights(posterior, loader=None, **keywords) -> list[float]:
    """a_t after each epoch of a run."""
    found = []
    ds.fit(
        posterior,
        loader or batches(),
        epochs=4,
        progress=False,
        callback=lambda _: found.append(float(annealing_weight(posterior, posterior.annealing))) and None,
        **keywords,
    )
    return found


@pytest.mark.parametrize("method", [ds.WeightRDE, ds.FunctionRDE, ds.SVGD])
def test_a_second_run_is_annealed_from_its_own_beginning(method):
    posterior = repelling(Annealing("linear"), method)
    assert weights(posterior) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert weights(posterior) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_an_annealing_with_a_length_of_its_own_goes_on_over_runs():
    posterior = repelling(Annealing("linear", steps=8 * STEPS))
    assert weights(posterior) + weights(posterior) == pytest.approx([i / 8 for i in range(1, 9)])


def test_a_resumed_second_run_is_annealed_as_if_it_had_not_been_interrupted(tmp_path):
    whole, stopped, resumed = (repelling(Annealing("linear")) for _ in range(3))
    weights(whole)
    expected = weights(whole)
    weights(stopped)
    settings = {"epochs": 4, "progress": False, "checkpoint": tmp_path / "c.pt"}
    ds.fit(stopped, batches(), callback=lambda epoch: epoch.epoch == 1, **settings)
    assert weights(resumed, checkpoint=tmp_path / "c.pt") == pytest.approx(expected[2:])
    assert tiny.largest_difference(tiny.state(whole), tiny.state(resumed)) == 0


def test_a_run_of_unknown_length_does_not_take_the_length_of_the_one_before():
    posterior = repelling(Annealing("linear"))
    weights(posterior)
    with pytest.raises(ValueError, match="expected the length of the run for annealing, got none"):
        weights(posterior, Unsized())
    posterior.begin(STEPS, 4)  # the caller may know
    assert weights(posterior, Unsized()) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_the_default_schedule_of_a_run_that_is_made_longer_is_that_of_the_longer_run(tmp_path):
    def rates(epochs, checkpoint=None):
        torch.manual_seed(0)
        history = ds.fit(ds.MAP(tiny.mlp().double()), batches(), epochs=epochs, progress=False, checkpoint=checkpoint)
        return [epoch.lr for epoch in history.epochs]

    short = rates(4, tmp_path / "c.pt")
    longer = rates(8, tmp_path / "c.pt")
    assert longer == short + rates(8)[4:]


def test_a_step_after_several_batches_counts_once():
    posterior = repelling(Annealing("linear"))
    assert weights(posterior, accumulate=2) == pytest.approx([0.25, 0.5, 0.75, 1.0])  # 3 batches are 2 steps
    assert (posterior.steps_per_epoch, int(posterior.steps)) == (2, 8)

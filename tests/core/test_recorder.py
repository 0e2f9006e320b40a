"""Recorders: a posterior finds its own by their kind, and they watch its weights."""

import copy
import pickle

import pytest
import torch
from torch.optim import SGD

import dissensus as ds
import tiny
from dissensus.core.weights import Recorder, network_parameters


class Steps(Recorder):
    """Counts what it is shown."""

    def __init__(self, source):
        super().__init__(source)
        self.seen, self.lengths = 0, []

    def begin(self, steps, *, done=0):
        self.lengths.append((steps, done))

    def observe(self, optimizer):
        self.seen += 1

    @property
    def ready(self):
        return self.seen > 0

    def sample(self, samples, generator=None):
        return {name: rows[:, None].expand(-1, samples, *rows.shape[1:]) for name, rows in self.weights.rows().items()}


class Recorded(ds.MAP):
    """A method whose only word about recording is an attribute."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.steps_seen = Steps(self.watched)

    def watched(self):
        return network_parameters(self.particles)


def test_a_recorder_is_found_as_an_attribute_and_told_of_the_run():
    posterior = Recorded(tiny.mlp().double())
    assert posterior.recorders == [posterior.steps_seen]
    assert not posterior.ready
    ds.fit(posterior, [tiny.points()] * 3, epochs=2, progress=False)
    assert posterior.ready
    assert (posterior.steps_seen.seen, posterior.steps_seen.lengths) == (6, [(6, 0)])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda posterior: pickle.loads(pickle.dumps(posterior))])
@pytest.mark.parametrize("method", [ds.SWA, ds.TRADI, ds.SnapshotEnsemble])
def test_a_copy_records_its_own_weights(method, again):
    posterior = method(tiny.mlp().double())
    other = again(posterior)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(2.0)
            parameter.grad = torch.zeros_like(parameter)
    optimizer = SGD(other.parameters(), lr=0.1)
    optimizer.step()
    other.observe(optimizer)
    assert bool((other.recorder.weights.rows()["0.weight"] == 2).all())
    assert other.ready
    assert not posterior.ready

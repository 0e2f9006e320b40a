"""An optimiser over other tensors is seen by a loop of one's own as by fit."""

import copy
import gc
import pickle

import pytest
import torch
from torch.optim import SGD

import dissensus as ds
import tiny
from dissensus.core import optimisation

MESSAGE = (
    "expected an optimizer over the posterior's parameters, got one over other tensors; ensembles copy the networks"
)


def step(posterior, optimizer):
    posterior.zero_grad()
    posterior.backward(*tiny.points())
    optimizer.step()
    posterior.observe(optimizer)


def test_a_loop_that_would_train_nothing_is_refused_at_its_first_step():
    networks = [tiny.mlp().double() for _ in range(2)]
    ensemble = ds.DeepEnsemble(networks)
    optimizer = SGD([p for network in networks for p in network.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=MESSAGE):
        step(ensemble, optimizer)
    assert int(ensemble.steps) == 0
    step(ensemble, SGD(ensemble.parameters(), lr=0.1))
    assert int(ensemble.steps) == 1


@pytest.mark.parametrize("method", [ds.MAP, ds.SWAG, ds.TRADI, lambda m: ds.track(m, [ds.SWAG])])
def test_methods_that_hold_the_callers_network_take_an_optimizer_over_it(method):
    network = tiny.mlp().double()
    posterior = method(network)
    step(posterior, SGD(network.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="expected"):
        step(posterior, SGD(tiny.mlp().parameters(), lr=0.1))


def test_an_optimizer_is_looked_at_once_not_at_every_step(monkeypatch):
    looked = []
    real = optimisation.check_optimizer
    monkeypatch.setattr(optimisation, "check_optimizer", lambda *a: looked.append(1) or real(*a))
    posterior = tiny.ensemble(tiny.mlp)
    optimizer = SGD(posterior.parameters(), lr=0.1)
    for _ in range(4):
        step(posterior, optimizer)
    assert len(looked) == 1
    step(posterior, SGD(posterior.parameters(), lr=0.1))
    assert len(looked) == 2
    other, its = copy.deepcopy((posterior, optimizer))
    step(other, its)
    assert len(looked) == 3


def test_what_was_looked_at_keeps_nothing_alive_and_is_not_pickled():
    posterior = ds.MAP(tiny.mlp().double())
    step(posterior, SGD(posterior.parameters(), lr=0.1))
    count = len(optimisation._checked)
    pickle.loads(pickle.dumps(posterior))
    del posterior
    gc.collect()
    assert len(optimisation._checked) < count


def test_a_compiled_step_may_observe():
    posterior = ds.MAP(tiny.mlp().double())
    optimizer = SGD(posterior.parameters(), lr=0.1)

    @torch.compile(backend="eager", fullgraph=True)
    def observe():
        posterior.observe(optimizer)

    observe()
    observe()
    assert int(posterior.steps) == 2

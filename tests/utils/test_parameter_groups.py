"""An optimiser over other tensors is seen by a loop of one's own as by fit."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import dissensus as ds
import tiny
from dissensus.bench.run import build
from dissensus.utils import parameter_groups
from dissensus.utils.parameter_groups import Group
from refusals import refuses
from thinning import thinned

MESSAGE = (
    "expected an optimizer over the posterior's parameters, got one over other tensors; ensembles copy their networks"
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
    refuses(lambda: step(ensemble, optimizer), MESSAGE)
    assert int(ensemble.steps) == 0
    step(ensemble, SGD(ensemble.parameters(), lr=0.1))
    assert int(ensemble.steps) == 1


@pytest.mark.parametrize("method", [ds.MAP, ds.SWAG, ds.TRADI, lambda m: ds.track(m, [ds.SWAG])])
def test_methods_that_hold_the_callers_network_take_an_optimizer_over_it(method):
    network = tiny.mlp().double()
    posterior = method(network)
    step(posterior, SGD(network.parameters(), lr=0.1))
    refuses(lambda: step(posterior, SGD(tiny.mlp().parameters(), lr=0.1)), "expected")


def test_an_optimizer_is_looked_at_once_not_at_every_step(monkeypatch):
    looked = []
    real = parameter_groups.check_optimizer
    monkeypatch.setattr(parameter_groups, "check_optimizer", lambda *a: looked.append(1) or real(*a))
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


class Wrapped(SGD):
    """As Accelerate wraps an optimiser: it steps where gradients are complete, and is no optimiser beneath."""

    def __init__(self, optimizer, every):
        self.optimizer, self.every, self.calls = optimizer, every, 0

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure=None):
        self.calls += 1
        if self.calls % self.every == 0:
            self.optimizer.step()

    def zero_grad(self, set_to_none=True):
        if self.calls % self.every == 0:
            self.optimizer.zero_grad(set_to_none)


WATCHERS = {
    "swag": lambda network: ds.SWAG(network, start=0, every=1),
    "tradi": lambda network: ds.TRADI(network),
    "tracked": lambda network: ds.track(network, [ds.SWAG, ds.TRADI]),
}


@pytest.mark.parametrize(("name", "fused"), thinned(list(WATCHERS), [None, True], every=2))
def test_batches_that_gather_gradients_are_not_counted_as_steps(name, fused):
    """Eight steps of four batches each, observed after every batch, are those observed after every step."""
    found = []
    for every_batch in (True, False):
        torch.manual_seed(0)
        posterior = WATCHERS[name](tiny.mlp().double())
        optimizer = Wrapped(torch.optim.Adam(posterior.parameters(), lr=0.01, fused=fused), every=4)
        posterior.begin(4, 2)
        for batch in range(32):
            optimizer.zero_grad()
            posterior.backward(*tiny.points(seed=batch))
            optimizer.step()
            if every_batch or batch % 4 == 3:
                assert posterior.observe(optimizer) is (batch % 4 == 3)
        assert int(posterior.steps) == 8
        found.append(tiny.state(posterior))
    assert tiny.largest_difference(*found) == 0


def test_a_step_that_a_scaler_skips_is_not_counted():
    posterior = ds.SWAG(tiny.mlp().double(), start=0, every=1)
    optimizer = SGD(posterior.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(4):
        optimizer.zero_grad()
        scaler.scale(posterior.loss(*tiny.points())).backward()
        if number == 1:
            next(posterior.parameters()).grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert posterior.observe(optimizer) is (number != 1)
    assert int(posterior.steps) == int(posterior.recorder.snapshots.taken) == 3


def test_weights_that_are_set_by_hand_are_observed():
    """Snapshots from a folder of checkpoints: no optimiser steps."""
    posterior = ds.SWA(tiny.mlp().double(), start=0, every=1)
    optimizer = SGD(posterior.parameters(), lr=0.1)
    network = posterior.network
    for value in (1.0, 2.0, 6.0):
        network.load_state_dict({name: torch.full_like(t, value) for name, t in network.state_dict().items()})
        assert posterior.observe(optimizer)
    assert all(torch.allclose(p, torch.full_like(p, 3.0)) for p in posterior.member(0).parameters())


def test_what_was_looked_at_keeps_nothing_alive_and_is_not_pickled():
    posterior = ds.MAP(tiny.mlp().double())
    step(posterior, SGD(posterior.parameters(), lr=0.1))
    count = len(parameter_groups._shown)
    pickle.loads(pickle.dumps(posterior))
    del posterior
    gc.collect()
    assert len(parameter_groups._shown) < count


def test_a_compiled_step_may_observe():
    posterior = ds.MAP(tiny.mlp().double())
    optimizer = SGD(posterior.parameters(), lr=0.1)

    @torch.compile(backend="eager", fullgraph=True)
    def observe():
        posterior.observe(optimizer)

    observe()
    observe()
    assert int(posterior.steps) == 2


class Scaled(ds.NetworksPosterior):
    """A method that learns one tensor more and lets its last layer train slower, without decay and prior."""

    name = "scaled"

    def __init__(self, module, **keywords):
        super().__init__(module, **keywords)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def groups(self):
        head = {name: p for name, p in self.particles.shared_parameters().items() if name.startswith("network.3.")}
        slow = Group("head", head, factor=0.1, decay=False, prior=False)
        return [*super().groups(), slow, Group("scales", {"scale": self.scale}, rate=0.5, decay=False)]


def test_a_method_adds_groups_with_rates_and_decay_of_their_own():
    posterior = Scaled(tiny.mlp().double())
    head = [posterior.particles.template.network[3].weight, posterior.particles.template.network[3].bias]
    network, slow, scales = posterior.parameter_groups(lr=0.2, weight_decay=0.03)
    assert [id(p) for p in slow["params"]] == [id(p) for p in head]
    assert (network["lr"], slow["lr"], scales["lr"]) == (0.2, 0.2 * 0.1, 0.5)
    assert (network["weight_decay"], slow["weight_decay"], scales["weight_decay"]) == (0.03, 0.0, 0.0)
    assert [group["lr"] for group in posterior.default_optimizer().param_groups] == [1e-3, 1e-3 * 0.1, 0.5]
    held = [id(p) for group in (network, slow, scales) for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in posterior.parameters())


def test_the_weight_prior_follows_the_groups():
    network = tiny.mlp().double()
    posterior = Scaled(network, weight_prior_std=0.5, data_size=12)
    expected = sum(p.square().sum() for p in network[0].parameters()) / (2 * 12 * 0.25)  # neither norm layer nor head
    torch.testing.assert_close(posterior.penalty(posterior.particles.shared_parameters()), expected, rtol=0, atol=1e-12)


def test_a_trained_parameter_in_no_group_is_an_error():
    posterior = Scaled(tiny.mlp().double())
    posterior.groups = lambda: [Group("scales", {"scale": posterior.scale})]
    with pytest.raises(ValueError, match=r"expected a group for every parameter, got particles.shared.network.0"):
        posterior.parameter_groups(lr=0.1)


class Stepper(ds.NetworksPosterior):
    """A method that only SGD may train."""

    name = "stepper"
    optimizers = (SGD,)

    def default_optimizer(self):
        return SGD(self.parameter_groups(0.25))


REFUSED = "expected an optimizer of kind SGD for Stepper, got Adam"


@pytest.mark.parametrize("method", [Stepper, lambda m: ds.track(m, [ds.SWAG, Stepper])])
def test_an_optimizer_that_a_method_does_not_accept_is_refused(method):
    posterior, (x, y) = method(tiny.mlp().double()), tiny.points()
    refuses(lambda: step(posterior, Adam(posterior.parameters())), REFUSED, TypeError)
    with pytest.raises(TypeError, match=REFUSED):
        ds.fit(posterior, [(x, y)], epochs=1, optimizer=Adam(posterior.parameters()), progress=False)
    assert int(posterior.steps) == 0
    step(posterior, SGD(posterior.parameters(), lr=0.1))
    assert ds.fit(posterior, [(x, y)], epochs=1, progress=False)[0].lr == 0.25  # its own


@pytest.mark.parametrize("method", [Stepper, lambda m: ds.track(m, [Stepper])])
def test_the_bench_takes_the_methods_own_optimizer_where_adamw_is_not_accepted(method):
    posterior = method(tiny.mlp().double())
    assert build.optimizer(posterior, {"epochs": 2}) == (None, None)
    assert isinstance(build.optimizer(posterior, {"epochs": 2, "optimizer": "sgd"})[0], SGD)
    with pytest.raises(ValueError, match=f'{REFUSED}; write optimizer = "default"'):
        build.optimizer(posterior, {"epochs": 2, "optimizer": "adam"})
    assert isinstance(build.optimizer(ds.MAP(tiny.mlp()), {"epochs": 2})[0], AdamW)


def factored(parameters):
    return torch.optim.Adafactor(parameters, lr=0.01)


def test_an_optimizer_that_mixes_stacked_members_is_said_to(caplog):
    ensemble, data = ds.DeepEnsemble([tiny.mlp().double() for _ in range(2)]), [tiny.points()]
    with caplog.at_level("WARNING", logger="dissensus"):
        ds.fit(ensemble, data, epochs=1, optimizer=factored(ensemble.parameters()), progress=False)
    assert "Adafactor mixes the entries of each tensor" in caplog.text


@pytest.mark.parametrize("make", [lambda: ds.MAP(tiny.mlp().double()), lambda: ds.DeepEnsemble([tiny.mlp().double()])])
def test_one_member_may_be_trained_by_any_optimizer(make, caplog):
    posterior = make()
    with caplog.at_level("WARNING", logger="dissensus"):
        ds.fit(posterior, [tiny.points()], epochs=1, optimizer=factored(posterior.parameters()), progress=False)
    assert "mixes" not in caplog.text


def test_fit_refuses_an_optimizer_that_wants_a_closure_and_a_loop_of_ones_own_does_not():
    posterior = ds.MAP(tiny.mlp().double())
    optimizer = torch.optim.LBFGS(posterior.parameters())
    with pytest.raises(TypeError, match="expected an optimizer with one gradient per step, got LBFGS"):
        ds.fit(posterior, [tiny.points()], epochs=1, optimizer=optimizer, progress=False)
    posterior.observe(optimizer)
    assert int(posterior.steps) == 1

"""Steps by an optimiser's kernel alone beside the optimiser's own steps."""

import copy
import functools
import types

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook

import dissensus as ds
import tiny
from dissensus.engine import fast_optimisers
from dissensus.engine.fast_optimisers import FusedStep

KINDS = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (AdamW, {"lr": 0.01, "betas": (0.8, 0.95)}),
    (AdamW, {"lr": 0.01, "amsgrad": True}),
]


@pytest.fixture
def kernels(monkeypatch):
    """How many steps were made by kernels alone."""
    steps, step = [], fast_optimisers._FusedGroup.step
    monkeypatch.setattr(
        fast_optimisers._FusedGroup, "step", lambda self, *given: (steps.append(self), step(self, *given))[1]
    )
    return steps


def pair(kind, settings):
    """Two equal networks with optimisers of two groups, of which the second has a rate of its own."""
    torch.manual_seed(0)
    first = tiny.mlp().double()
    networks = first, copy.deepcopy(first)
    groups = (
        [{"params": list(n.parameters())[:2]}, {"params": list(n.parameters())[2:], "lr": 0.02}] for n in networks
    )
    return networks, [kind(each, fused=True, **settings) for each in groups]


def run(networks, step, optimizers, *, without=()):
    """The same gradients for both networks, and a step of each optimiser: by `step`, and torch's."""
    for i, weights in enumerate(zip(*(n.parameters() for n in networks), strict=True)):
        gradient = None if i in without else torch.randn_like(weights[0])
        for each in weights:
            each.grad = gradient
    step()
    optimizers[1].step()
    for one, other in zip(*(n.parameters() for n in networks), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(*[each.state_dict()["state"] for each in optimizers], rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_steps_are_those_of_torch(kind, settings, kernels):
    networks, optimizers = pair(kind, settings)
    step = FusedStep(optimizers[0])
    for _ in range(4):
        run(networks, step, optimizers)
    assert len(kernels) == 6  # the first step is torch's, which makes the states
    for each in optimizers:
        each.param_groups[0].update(lr=0.03, weight_decay=0.2)
    run(networks, step, optimizers)
    assert len(kernels) == 8
    for without in ((1,), (1,), (), ()):  # a weight without a gradient for two steps
        run(networks, step, optimizers, without=without)
    assert len(kernels) == 12
    for each in optimizers:
        each.load_state_dict(copy.deepcopy(each.state_dict()))
    run(networks, step, optimizers)
    run(networks, step, optimizers)
    assert len(kernels) == 14


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_a_flag_that_is_set_changes_nothing(kind, settings, kernels):
    networks, optimizers = pair(kind, settings)
    step = FusedStep(optimizers[0])
    for flag in (0.0, 1.0, 0.0):
        for each in optimizers:
            each.found_inf = torch.tensor(flag)
        run(networks, step, optimizers)
    assert len(kernels) == 4


def test_what_takes_part_in_a_step_is_called(kernels):
    networks, optimizers = pair(Adam, {"lr": 0.01})
    step, seen = FusedStep(optimizers[0]), []
    run(networks, step, optimizers)
    handle = optimizers[0].register_step_pre_hook(lambda *_: seen.append("own"))
    run(networks, step, optimizers)
    handle.remove()
    handle = register_optimizer_step_post_hook(lambda which, *_: seen.append(which))
    run(networks, step, optimizers)
    handle.remove()
    assert seen == ["own", *optimizers]
    with torch.profiler.profile() as profile:
        run(networks, step, optimizers)
    assert any("Adam.step" in event.name for event in profile.events())
    torch.optim.lr_scheduler.StepLR(optimizers[0], 5)  # wraps `step`, only to see that it was called
    run(networks, step, optimizers)  # as another `step` is there, once more
    assert kernels == []
    run(networks, step, optimizers)
    assert len(kernels) == 2
    optimizers[0].step = lambda: seen.append("instead")
    step()
    assert seen[-1] == "instead"


class Proxy:
    """A callable object that passes on every attribute of what it calls."""

    def __init__(self, inner, seen):
        self.inner, self.seen = inner, seen

    def __call__(self, *given):
        self.seen.append(self.inner)
        return self.inner(*given)

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize("place", ["before the schedule", "after the schedule", "class", "object", "object as method"])
def test_a_step_that_the_user_replaced_is_theirs(place, kernels, monkeypatch):
    """Whether a schedule's wrapper is around it or within it, and also where it copies the wrapper's attributes."""
    networks, optimizers = pair(Adam, {"lr": 0.01})
    seen, optimizer = [], optimizers[0]

    def counting(inner):
        @functools.wraps(inner)
        def counted(*given):
            seen.append(inner)
            return inner(*given)

        return counted

    if place == "class":
        monkeypatch.setattr(Adam, "step", counting(Adam.step))
    elif place == "after the schedule":
        torch.optim.lr_scheduler.StepLR(optimizer, 5)
        optimizer.step = counting(optimizer.step)
    elif place == "object":
        optimizer.step = Proxy(optimizer.step, seen)
    elif place == "object as method":
        optimizer.step = types.MethodType(Proxy(Adam.step, seen), optimizer)
    else:
        optimizer.step = types.MethodType(counting(Adam.step), optimizer)
        torch.optim.lr_scheduler.StepLR(optimizer, 5)
    step = FusedStep(optimizer)
    for _ in range(3):
        run(networks, step, optimizers)
    assert len(seen) == (6 if place == "class" else 3)
    assert kernels == []


@pytest.mark.parametrize(("kind", "settings", "names"), [
    (SGD, {"lr": 0.1, "momentum": 0.9}, ["momentum_buffer"]),
    (AdamW, {"lr": 0.01, "amsgrad": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"]),
])  # fmt: skip
def test_states_that_the_user_replaces_count(kind, settings, names, kernels):
    networks, optimizers = pair(kind, settings)
    step = FusedStep(optimizers[0])
    run(networks, step, optimizers)
    run(networks, step, optimizers)
    for name in names:  # another tensor in the place of each
        for each in optimizers:
            for state in each.state.values():
                state[name] = torch.zeros_like(state[name])
        run(networks, step, optimizers)
    assert len(kernels) == 2 + 2 * len(names)
    for each in optimizers:  # none at all for one weight
        each.state[each.param_groups[0]["params"][0]] = {}
    if kind is SGD:  # torch's own kernel takes all or none
        for each in optimizers:
            each.state.clear()
    run(networks, step, optimizers)
    assert len(kernels) == 2 + 2 * len(names)


class Halved(SGD):
    """A class of its own, whose step may do anything."""

    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.mul_(0.5)
        super().step(closure)


@pytest.mark.parametrize("make", [
    lambda weights: Halved(weights, lr=0.1, fused=True),
    lambda weights: SGD(weights, lr=0.1, foreach=True),
    lambda weights: Adam(weights, lr=torch.tensor(0.1), fused=True),
    lambda weights: torch.optim.RMSprop(weights, lr=0.1),
])  # fmt: skip
def test_steps_of_others_are_their_own(make, kernels):
    torch.manual_seed(0)
    network = tiny.mlp()
    networks = network, copy.deepcopy(network)
    optimizers = [make(each.parameters()) for each in networks]
    step = FusedStep(optimizers[0])
    for _ in range(3):
        for weights in zip(*(n.parameters() for n in networks), strict=True):
            gradient = torch.randn_like(weights[0])
            for each in weights:
                each.grad = gradient.clone()
        step()
        optimizers[1].step()
    torch.testing.assert_close(*[nn.utils.parameters_to_vector(each.parameters()) for each in networks], rtol=0, atol=0)
    assert kernels == []


def test_fit_trains_as_a_loop_does_and_counts_its_steps(kernels):
    x, y = tiny.points(32)
    torch.manual_seed(0)
    network = tiny.mlp().double()
    by_hand = copy.deepcopy(network)
    posterior = ds.MAP(network)
    batches = [(x[i : i + 8].double(), y[i : i + 8]) for i in range(0, 32, 8)]
    optimizer, other = (
        AdamW(each.parameters(), lr=0.01, weight_decay=0.1, fused=True) for each in (posterior, by_hand)
    )
    ds.fit(posterior, batches, epochs=3, optimizer=optimizer, progress=False)
    for given, targets in batches * 3:
        other.zero_grad()
        nn.functional.cross_entropy(by_hand(given), targets).backward()
        other.step()
    assert int(posterior.steps) == 12
    assert len(kernels) == 11
    torch.testing.assert_close(
        *[nn.utils.parameters_to_vector(each.parameters()) for each in (network, by_hand)], rtol=1e-12, atol=1e-12
    )


def test_another_list_of_parameters_counts(kernels):
    networks, optimizers = pair(SGD, {"lr": 0.1, "momentum": 0.9})
    step = FusedStep(optimizers[0])
    for _ in range(2):
        run(networks, step, optimizers)
    for network, each in zip(networks, optimizers, strict=True):  # as many in the same list, but others
        each.param_groups[0]["params"][:] = list(network.parameters())[2:]
        each.param_groups[1]["params"][:] = list(network.parameters())[:2]
    run(networks, step, optimizers)
    assert len(kernels) == 2

"""What a prediction leaves as it was, and what it remembers."""

import gc
import weakref

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.core.posterior import inference_context


def test_a_submodule_added_between_predictions_is_in_eval_mode_and_put_back() -> None:
    """The parts of a network are remembered from one prediction to the next, but not where there are others since."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return x

    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2))).eval()
    posterior, x = ds.MAP(network).eval(), torch.randn(5, 3)
    before = posterior.predict(x).mean
    added = nn.Dropout(0.9).train(), Counted().train()
    network[2].extend(added)
    assert torch.equal(posterior.predict(x).mean, before)
    assert all(each.training for each in added)
    assert added[1].calls == 0
    network[2][1] = later = nn.Dropout(0.9).train()  # as many as before, and another one
    assert torch.equal(posterior.predict(x).mean, before)
    assert later.training


def test_a_posterior_that_has_predicted_is_deleted_at_once() -> None:
    posterior = ds.MAP(nn.Sequential(nn.Linear(3, 2)))
    posterior.predict(torch.randn(1, 3))
    seen = weakref.ref(posterior.particles)
    gc.disable()
    try:
        del posterior
        assert seen() is None
    finally:
        gc.enable()


class Strict(nn.Module):
    """Its mode is more than an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.modes = nn.Linear(3, 2), []

    def train(self, mode: bool = True) -> "Strict":
        self.modes.append(mode)
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def watched_by_its_object() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.train = lambda mode=True: setattr(layer, "called", True) or nn.Linear.train(layer, mode)
    return layer


def test_networks_that_do_something_when_modes_change_are_asked_to_change_them() -> None:
    strict, layer = Strict(), watched_by_its_object()
    for network in (strict, layer):
        posterior = ds.MAP(network).train()
        strict.modes.clear()
        layer.called = False
        posterior.predict(torch.randn(4, 3))
        assert network.training
        assert posterior.training
        assert {*strict.modes} == ({False} if network is strict else set())
        assert layer.called == (network is layer)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ds.MAP(normed()),
        lambda: ds.DeepEnsemble([normed(), normed()]),
        lambda: ds.MCDropout(normed()),
        lambda: ds.NodeBNN(normed(), data_size=10),
        lambda: ds.SWAG(normed()),
    ],
)
def test_modes_inside_are_those_of_eval_and_afterwards_those_of_before(make) -> None:
    posterior = make().train()
    frozen = posterior.particles.templates[0].network[1]
    frozen.training = False
    parts = [*posterior.modules(), *posterior.particles.templates[0].modules()]
    before = [part.training for part in parts]
    with inference_context(posterior):
        inside = [part.training for part in parts]
    assert [part.training for part in parts] == before
    posterior.eval()
    assert inside == [part.training for part in parts]

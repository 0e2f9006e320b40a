"""What a prediction leaves as it was, and what it remembers."""

import gc
import weakref

import torch
from torch import nn

import dissensus as ds


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

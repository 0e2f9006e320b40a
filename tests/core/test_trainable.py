"""The clock of a run: a new one begins without the temperature that was fitted to the last."""

import logging

import pytest
import torch

import dissensus as ds
import tiny


@pytest.mark.parametrize(
    "begin", [lambda p: p.begin(3, 2), lambda p: p.begin(3, 2, done=2), lambda p: p.begin(None, 2)]
)
def test_a_run_begins_without_a_temperature(begin, caplog):
    posterior = tiny.ensemble(tiny.mlp)
    begin(posterior)
    assert not caplog.messages  # there was none
    posterior.temperature.fill_(2.5)
    with caplog.at_level(logging.WARNING, "dissensus"):
        begin(posterior)
    assert float(posterior.temperature) == 1
    assert caplog.messages == ["training sets the temperature back from 2.5 to 1; call ds.temperature_scale afterwards"]


@pytest.mark.parametrize("loader", [list, iter])  # of known length, and of one that the first epoch tells
def test_a_second_fit_judges_and_ends_at_temperature_one(loader):
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    posterior.temperature.fill_(3.0)
    history = ds.fit(posterior, loader([(x, y)]), epochs=1, validation=[(x, y)], progress=False)
    assert float(posterior.temperature) == 1
    logits = torch.stack([posterior.member(i).eval()(x) for i in range(3)])
    mixture = logits.softmax(2).mean(0)
    nll = torch.nn.functional.nll_loss(mixture.log(), y)
    assert history[0].validation == pytest.approx(float(nll.detach()), abs=1e-10)


def test_a_resumed_run_has_no_temperature_yet(tmp_path):
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()
    ds.fit(posterior, [(x, y)], epochs=1, progress=False, checkpoint=tmp_path / "run.pt")
    posterior.temperature.fill_(3.0)
    ds.fit(posterior, [(x, y)], epochs=2, progress=False, checkpoint=tmp_path / "run.pt")
    assert float(posterior.temperature) == 1

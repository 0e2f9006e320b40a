"""What stands on a posterior: seen in every prediction, saved and copied with it, dropped by what changes predictions."""

import copy

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.core.calibrated import KINDS, Calibration, Guarantee
from dissensus.core.predictive import ClassificationSummary
from refusals import refuses

x, y = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
LOADER = [(x[:8], y[:8]), (x[8:], y[8:])]


class Uniform(Calibration):
    """Members' log-probabilities halved, then their mean mixed with the uniform: something for both steps."""

    kind = "uniform"

    def calibrate_members(self, predictive):
        return predictive.apply_temperature(2.0)

    def calibrate_mixture(self, predictive):
        mean = (1 - self.share) * predictive.mean + self.share / predictive.mean.shape[1]
        nothing = torch.zeros_like(predictive.total)
        return ClassificationSummary(mean.log()[None], predictive.total[None], nothing[None])

    def calibrate_logits(self, logits):
        return logits / 2


class Threshold(Guarantee):
    kind = "threshold"


def ensemble():
    return ds.DeepEnsemble([ds.nets.MLP(2, 3, hidden=(4,)) for _ in range(2)])


def build(share=0.25):
    torch.manual_seed(0)
    posterior = ensemble()
    posterior.recalibrate(1.0, Uniform({"why": "a test"}, {"share": torch.tensor(share)}))
    posterior.add_guarantee("sets", Threshold({"level": 0.9}, {"at": torch.tensor([0.1, 0.2])}))
    return posterior


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setitem(KINDS, "uniform", Uniform)
    monkeypatch.setitem(KINDS, "threshold", Threshold)


def wanted(posterior):
    return 0.75 * (posterior.eval()(x).detach() / 2).softmax(2).mean(0) + 0.25 / 3


def test_every_way_to_predict_sees_the_calibration(tmp_path):
    posterior = build()
    means = {
        "predict": posterior.predict(x).mean, "loader": ds.predict(posterior, LOADER).mean,
        "summary": ds.summarise(posterior, LOADER).mean, "predictor": posterior.predictor()(x)["mean"],
        "copy": copy.deepcopy(posterior).predict(x).mean,
    }  # fmt: skip
    posterior.particles.how = "loop"
    means["members one by one"] = ds.summarise(posterior, LOADER).mean
    ds.save(posterior, tmp_path)
    means["members from a folder"] = ds.summarise(tmp_path, LOADER).mean
    for way, mean in means.items():
        torch.testing.assert_close(mean, wanted(posterior), rtol=0, atol=1e-6, msg=way)


def test_what_stands_is_saved_copied_and_moved(tmp_path):
    posterior = build()
    ds.save(posterior, tmp_path)
    for other in (ds.load(tmp_path), copy.deepcopy(posterior)):
        assert other.calibration.facts == {"why": "a test"}
        assert other.promises["sets"].facts == {"level": 0.9, "fitted_to": posterior.fingerprint()}
        assert torch.equal(other.promises["sets"].at, torch.tensor([0.1, 0.2]))
        assert other.promises["sets"].posterior is other
        assert torch.equal(other.predict(x).mean, posterior.predict(x).mean)
    assert posterior.double().promises["sets"].at.dtype == torch.float64


def observed(posterior):
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
    posterior.backward(x, y)
    optimizer.step()
    posterior.observe(optimizer)


@pytest.mark.parametrize(("change", "calibrated"), [
    (lambda p: ds.fit(p, LOADER, epochs=1, progress=False), False),
    (observed, False),
    (lambda p: p.load_state_dict(ensemble().state_dict()), False),
    (lambda p: p.recalibrate(1.5, p.calibration), True),
], ids=["fit", "a loop of one's own", "another state", "another calibration"])  # fmt: skip
def test_what_stood_on_other_predictions_is_dropped_with_a_warning(change, calibrated, caplog):
    posterior = build()
    promise = posterior.promises["sets"]
    change(posterior)
    assert not posterior.promises
    assert (posterior.calibration is not None) == calibrated
    assert "since sets was fitted" in caplog.text or "has no uniform, sets, which is dropped" in caplog.text
    assert calibrated or "drops the uniform calibration" in caplog.text or "has no uniform" in caplog.text
    refuses(lambda: promise.posterior, "expected a threshold fitted to the posterior's present predictions")


def test_a_new_draw_drops_promises_and_a_draw_of_stored_members_does_not(caplog):
    stored, sampled = build(), ds.MCDropout(nn.Sequential(nn.Linear(2, 8), nn.Dropout(), nn.Linear(8, 3)), samples=3)
    sampled.add_guarantee("sets", Threshold({}, {}))
    for posterior in (stored, sampled):
        ds.refresh(posterior, LOADER)
    assert stored.promises
    assert not sampled.promises


def test_a_checkpoint_and_the_best_epoch_leave_it_out(tmp_path):
    """A callback may calibrate in the middle of a run: its next step drops that, and the file fits a fresh posterior."""
    posterior, path = ensemble(), tmp_path / "c.pt"

    def calibrate(epoch):
        posterior.recalibrate(1.0, Uniform({}, {"share": torch.tensor(0.1)}))

    settings = {"progress": False, "validation": LOADER, "checkpoint": path}
    ds.fit(posterior, LOADER, epochs=2, callback=calibrate, **settings)
    assert posterior.calibration is None  # the best epoch's state has none
    assert len(ds.fit(ensemble(), LOADER, epochs=3, **settings)) == 3


def test_an_unknown_kind_in_a_file_is_named(tmp_path, monkeypatch):
    ds.save(build(), tmp_path)
    monkeypatch.delitem(KINDS, "uniform")
    refuses(lambda: ds.load(tmp_path), "uniform")

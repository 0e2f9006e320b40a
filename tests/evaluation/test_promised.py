"""Promises put to the test by `evaluate`: coverage, size, risk and acceptance; by class, difficulty and corruption."""

import math

import pytest
import torch
from torch import nn

import dissensus as ds


def posterior_and_rows(n=400):
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([ds.nets.MLP(4, 3, hidden=(8,)) for _ in range(2)])
    x = 100 * torch.randn(n, 4)
    return posterior, x, torch.multinomial(posterior.predict(x).mean, 1)[:, 0]


def test_coverage_and_size_by_class_and_difficulty():
    posterior, x, y = posterior_and_rows()
    conformal = ds.conformal(posterior, [(x[:200], y[:200])], level=0.8)
    found = ds.evaluate(posterior, [(x[200:300], y[200:300]), (x[300:], y[300:])])
    sets, labels = conformal.set(x[200:]), y[200:]
    hit, size = sets.gather(1, labels[:, None])[:, 0].double(), sets.sum(1).double()
    assert found.metrics["conformal/coverage"] == pytest.approx(float(hit.mean()))
    assert found.metrics["conformal/size"] == pytest.approx(float(size.mean()))
    assert found.metrics["conformal/level"] == 0.8
    by_class = torch.stack([hit[labels == c].mean() for c in range(3)])
    torch.testing.assert_close(found.arrays["conformal/class/coverage"], by_class)
    assert found.metrics["conformal/worst_class/coverage"] == pytest.approx(float(by_class.min()))
    order = posterior.predict(x[200:]).total.argsort()
    hard = order[134:]  # the last of three parts of 200 rows: 67, 67 and 66
    assert found.metrics["conformal/hard/size"] == pytest.approx(float(size[hard].mean()), abs=0.02)
    assert found.metrics["conformal/hard/size"] > found.metrics["conformal/easy/size"]
    assert torch.equal(found.arrays["test/conformal/covered"], hit)
    assert "conformal/coverage" in found.table()


def test_foreign_inputs_without_targets_are_taken_and_sets_are_not_asked_to_cover_them(caplog):
    posterior, x, y = posterior_and_rows()
    promises = [ds.conformal(posterior, [(x[:200], y[:200])], level=0.8)]
    promises += [ds.selective(posterior, [(x[:200], y[:200])], risk=0.3)]
    flat = torch.linspace(0.01, 1, 100)[:, None] * x[:100]  # the first are flatter: half of them would be seen
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(flat), batch_size=30)
    sets = {
        "labelled": [(flat, y[:100])],
        "data": [flat, y[:100]],
        "tensor": flat,
        "array": flat.numpy(),
        "loader": [flat[:50], flat[50:]],
        "lists": loader,
    }
    caplog.clear()
    found = ds.evaluate(posterior, [(x[200:], y[200:])], ood=sets).metrics
    assert not caplog.records
    for name in sets:
        assert found[f"ood/{name}/selective/accepted"] == found["ood/labelled/selective/accepted"]
        assert found[f"ood/{name}/auroc"] == pytest.approx(
            found["ood/labelled/auroc"], abs=2e-3
        )  # rounding breaks ties
    assert repr(promises[0]) == f"Conformal({promises[0].describe()})"
    assert repr(promises[1]) == f"Gate({promises[1].score} below {promises[1].threshold:.4g}: {promises[1].describe()})"


def test_risk_and_acceptance_here_and_elsewhere():
    posterior, x, y = posterior_and_rows()
    gate = ds.selective(posterior, [(x[:200], y[:200])], risk=0.3)
    alarm = ds.ood_gate(posterior, [(x[:200], y[:200])], false_alarm=0.1)
    found = ds.evaluate(
        posterior, [(x[200:], y[200:])], ood={"flat": [(0.01 * x, y)]}, shift={"same": [(x[200:], y[200:])]}
    ).metrics
    accept = gate(x[200:]).accept
    wrong = posterior.predict(x[200:]).mean.argmax(1) != y[200:]
    assert found["selective/accepted"] == pytest.approx(float(accept.double().mean()))
    assert found["selective/risk"] == pytest.approx(float(wrong[accept].double().mean()))
    assert found["selective/promised"] == 0.3
    assert found["ood_gate/refused"] == pytest.approx(1 - float(alarm(x[200:]).accept.double().mean()))
    assert found["ood/flat/ood_gate/refused"] == pytest.approx(1 - float(alarm(0.01 * x).accept.double().mean()))
    assert found["shift/same/selective/risk"] == found["selective/risk"]


def test_regressions_have_widths_and_infinite_ones_are_counted_apart():
    posterior = ds.MAP(nn.Linear(1, 1), likelihood=ds.Regression(noise=0.5))
    x = torch.randn(60, 1)
    y = posterior.predict(x).mean + torch.randn(60, 1)
    ds.conformal(posterior, [(x, y)], by=lambda x: (x[:, 0] > 2).long())  # of the second group 9 rows are not there
    found = ds.evaluate(posterior, [(x, y)]).metrics
    assert found["conformal/infinite"] == pytest.approx(float((x > 2).double().mean()))
    assert 0 < found["conformal/size"] < 10
    assert 0.8 < found["conformal/coverage"] <= 1


def test_weights_of_the_rows_are_used_and_missing_ones_are_said(caplog):
    posterior = ds.MAP(nn.Linear(1, 1), likelihood=ds.Regression(noise=0.5))
    x = torch.randn(60, 1)
    y, weight = posterior.predict(x).mean + torch.randn(60, 1), torch.rand(60) + 0.1
    conformal = ds.conformal(posterior, [(x, y, weight)])
    lower, upper = conformal.interval(x, weight=weight)
    found = ds.evaluate(posterior, [(x, y, weight)]).metrics
    assert found["conformal/coverage"] == pytest.approx(float(((lower <= y) & (y <= upper)).double().mean()))
    with caplog.at_level("WARNING", "dissensus"):
        assert "conformal/coverage" not in ds.evaluate(posterior, [(x, y)]).metrics
    assert "not known" in caplog.text


def test_corrupted_inputs_have_coverage_and_risk_by_type_and_severity():
    torch.manual_seed(0)
    posterior = ds.MAP(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 3)))
    x = torch.rand(40, 3, 32, 32)
    y = posterior.predict(x).mean.argmax(1)
    conformal = ds.conformal(posterior, [(x, y)], score="aps")
    gate = ds.selective(posterior, [(x, y)], risk=0.2)
    spec = ds.Corruptions(["gaussian_noise", "contrast"], severities=(1, 5))
    found = ds.evaluate(posterior, [(x[:25], y[:25]), (x[25:], y[25:])], corrupt=spec).metrics
    damaged = spec.apply(x, "contrast", 5, torch.arange(40))
    sets = conformal.set(damaged)
    coverage = {s: found[f"corrupt/severity{s}/conformal/coverage"] for s in (1, 5)}
    assert found["corrupt/conformal/coverage"] == pytest.approx(sum(coverage.values()) / 2)
    at = [found[f"corrupt/{kind}/conformal/size"] for kind in ("gaussian_noise", "contrast")]
    assert found["corrupt/conformal/size"] == pytest.approx(sum(at) / 2)
    mild = conformal.set(spec.apply(x, "contrast", 1, torch.arange(40)))
    assert at[1] == pytest.approx(float(sets.sum(1).double().mean() + mild.sum(1).double().mean()) / 2)
    assert gate(damaged).accept.shape == (40,)
    assert 0 <= found["corrupt/selective/accepted"] <= 1


def test_a_gate_that_accepts_nothing_has_no_risk(caplog):
    posterior, x, y = posterior_and_rows()
    ds.selective(posterior, [(x, (y + 1) % 3)], risk=0.1)
    found = ds.evaluate(posterior, [(x, y)]).metrics
    assert found["selective/accepted"] == 0
    assert "selective/risk" not in found
    assert all(math.isfinite(value) for value in found.values())


def test_two_arrays_of_one_shape_may_be_a_regressions_data():
    x = torch.linspace(-1, 1, 40)[:, None]
    posterior = ds.MAP(torch.nn.Linear(1, 1), likelihood=ds.Regression())
    sets = {"data": (x + 9, x), "alone": x + 9, "batches": [x[:25] + 9, x[25:] + 9]}
    found = ds.evaluate(posterior, (x, x), ood=sets, progress=False).arrays
    assert {len(found[f"ood/{name}/score/variance"]) for name in sets} == {40}
    with pytest.raises(ValueError, match="got 2 arrays of one shape"):
        ds.evaluate(posterior, (x, x), ood={"far": [x + 9, x]}, progress=False)

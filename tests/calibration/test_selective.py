"""Gates: the risk of accepted inputs, false alarms, files, bad input, and what is said where nothing can be promised."""

import math

import pytest
import torch
from torch import nn

import dissensus as ds
from refusals import refuses
from thinning import often


class Told(nn.Module):
    """Logits, or a mean, that are the inputs themselves."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return x * self.scale


def classified(n, *, sharp=3.0):
    """(logits (n, 4), labels that follow their probabilities)."""
    x = sharp * torch.randn(n, 4, dtype=torch.float64)
    return x, torch.multinomial(x.softmax(1), 1)[:, 0]


@pytest.mark.parametrize("score", often(["entropy"], ["max_probability"]))
def test_accepted_inputs_keep_the_risk(score):
    posterior, wrong = ds.MAP(Told()), 0
    x, y = classified(20_000)
    for _ in range(20):
        gate = ds.selective(posterior, [classified(1000)], risk=0.1, confidence=0.9, score=score)
        accept, scores, predictive = gate(x)
        error = (predictive.mean.argmax(1) != y)[accept].double().mean()
        wrong += float(error) > 0.1
        assert 0.3 < float(accept.double().mean()) < 1
        assert torch.equal(accept, scores < gate.threshold)
    assert wrong <= 6  # 2 expected: more than 6 of 20 have a chance of 0.2 %


def test_a_gate_counts_what_its_rows_showed():
    posterior, (x, y) = ds.MAP(Told()), classified(500)
    gate = ds.selective(posterior, [(x[:200], y[:200]), (x[200:], y[200:])], risk=0.2)
    found = gate(x)
    assert gate.facts["accepted"] == int(found.accept.sum())
    assert gate.facts["errors"] == int((x.argmax(1) != y)[found.accept].sum())
    assert gate(posterior.predict(x)).accept.equal(found.accept)
    assert "at most 20 % are wrong, with confidence 0.95" in gate.describe()


def test_disagreement_can_be_the_score():
    members = [ds.nets.MLP(4, 3, hidden=(8,)) for _ in range(3)]
    posterior, x = ds.DeepEnsemble(members), torch.randn(300, 4)
    y = posterior.predict(x).mean.argmax(1)
    gate = ds.selective(posterior, [(x, y)], score="mutual_information")
    assert gate.threshold == math.inf  # 300 rows without an error: everything
    assert gate(100 * x).accept.all()


def test_where_no_threshold_keeps_the_risk_that_is_said(caplog):
    x, y = classified(400, sharp=1.5)
    with caplog.at_level("WARNING", "dissensus"):
        gate = ds.selective(ds.MAP(Told()), [(x, y)])
    assert not gate(x).accept.any()
    assert "needs 299 accepted rows" in caplog.text
    assert "could be promised" in caplog.text
    assert "nothing is accepted" in gate.describe()


def test_a_score_that_says_nothing_is_named(caplog):
    """One member does not disagree with itself."""
    with caplog.at_level("WARNING", "dissensus"):
        ds.ood_gate(ds.MAP(Told()), [classified(50)], score="mutual_information")
    assert "all 50 rows have the same mutual_information" in caplog.text


def test_a_regression_is_wrong_beyond_its_tolerance():
    def data(n):
        x = torch.randn(n, 1, dtype=torch.float64)
        return x, x + torch.where(torch.rand_like(x) < 0.02, 3.0, 0.1) * torch.randn_like(x).sign()

    posterior = ds.MAP(Told(), likelihood=ds.Regression(noise=0.5))
    gate = ds.selective(posterior, [data(600)], risk=0.05, tolerance=1.0)
    assert gate.threshold == math.inf  # all variances are alike, and 2 % are wrong
    assert gate.facts["errors"] < 30
    refuses(lambda: ds.selective(posterior, [data(600)]), "tolerance")


def test_false_alarms_are_as_rare_as_asked():
    posterior, found = ds.MAP(Told()), []
    for _ in range(40):
        gate = ds.ood_gate(posterior, [classified(200)], false_alarm=0.1)
        found.append(float((~gate(classified(400)[0]).accept).double().mean()))
    mean = 1 - math.ceil(201 * 0.9 - 1e-9) / 201
    error = math.sqrt(mean * (1 - mean) * (1 / 200 + 1 / 400) / 40)
    assert abs(sum(found) / 40 - mean) < 3 * error
    assert float(gate(0.01 * classified(400)[0]).accept.double().mean()) < 0.1  # flat logits are foreign


def test_the_rule_of_false_alarms_is_an_order_statistic_and_labels_are_not_read():
    posterior, (x, _) = ds.MAP(Told()), classified(99)
    gate = ds.ood_gate(posterior, [(x, torch.full((99,), 77))], false_alarm=0.05)
    assert int(gate(x).accept.sum()) == 95
    refuses(lambda: ds.ood_gate(posterior, [(x[:18], x[:18, 0])]), "at least 19 rows")
    assert int(ds.ood_gate(posterior, [(x[:19], x[:19, 0])])(x[:19]).accept.sum()) == 19


@pytest.mark.parametrize("nudge", [-3e-7, 3e-7])
def test_equal_inputs_are_accepted_alike_in_a_batch_of_one(nudge):
    """Kernels for one row have other last digits, and where inputs repeat many rows have the score at the threshold."""

    class Rounded(Told):
        def forward(self, x):
            return super().forward(x) * (1 + nudge * (len(x) == 1))

    posterior = ds.MAP(Rounded().float())
    x = torch.tensor([[4.0, 0.0], [2.0, 0.0], [1.0, 0.0]]).repeat(200, 1)
    y = (x[:, 0] == 1.0).long()  # the least sure third is wrong
    gates = [ds.selective(posterior, [(x, y)], risk=0.05), ds.ood_gate(posterior, [(x, y)], false_alarm=0.5)]
    for gate in gates:
        assert torch.cat([gate(x[at : at + 1]).accept for at in range(3)]).tolist() == [True, True, False]


def test_gates_are_saved_with_the_posterior(tmp_path):
    posterior = ds.MAP(ds.nets.MLP(4, 3, hidden=(5,)))
    x = torch.randn(60, 4)
    y = posterior.predict(x).mean.argmax(1)
    gate = ds.selective(posterior, [(x, y)], risk=0.1)
    nothing = ds.selective(posterior, [(x, (y + 1) % 3)], risk=0.1, name="nothing")
    alarm = ds.ood_gate(posterior, [(x, y)])
    ds.save(posterior, tmp_path)
    again = ds.load(tmp_path)
    for name, one in (("selective", gate), ("nothing", nothing), ("ood_gate", alarm)):
        same = again.promises[name]
        assert isinstance(same, ds.Gate)
        assert (same.threshold, same.facts) == (one.threshold, one.facts)
        assert same(x).accept.equal(one(x).accept)
    assert not nothing(x).accept.any()


def test_a_gate_does_not_pass_to_a_state_that_has_none(caplog):
    """What else stands on both posteriors is in the state, and stays."""
    posteriors = [ds.MAP(ds.nets.MLP(4, 3, hidden=(5,))) for _ in range(2)]
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    for posterior in posteriors:
        ds.conformal(posterior, [(x, y)])
    gate = ds.ood_gate(posteriors[0], [(x, y)])
    posteriors[0].load_state_dict(posteriors[1].state_dict())
    sets = [posterior.promises["conformal"].set(x) for posterior in posteriors]
    assert torch.equal(*sets)
    assert "the loaded state has no ood_gate, which is dropped" in caplog.text
    refuses(lambda: gate(x), "present predictions")


def test_bad_input_is_refused():
    posterior, (x, y) = ds.MAP(Told()), classified(298)
    refuses(lambda: ds.selective(posterior, [(x, y)]), "at least 299 rows for a risk of 0")
    refuses(lambda: ds.selective(posterior, [(x, y)], risk=0.1, score="variance"), "a classification has these")
    refuses(lambda: ds.selective(posterior, [(x, y, torch.rand(298))], risk=0.1), "rows of equal weight")
    refuses(lambda: ds.selective(posterior, [(x, y)], risk=0.1, tolerance=1.0), "no tolerance")
    for name in ("risk", "confidence"):
        with pytest.raises(ValueError, match=name):
            ds.selective(posterior, [(x, y)], **{name: 1.0})
    refuses(lambda: ds.ood_gate(posterior, [(x, y)], false_alarm=0), "false_alarm")

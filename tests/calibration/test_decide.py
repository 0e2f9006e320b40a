"""decide: prediction, sets and gates from one forward pass equal each promise asked alone; sets that are never empty."""

import json

import pytest
import torch
from test_conformal import classified, measured
from torch import nn

import dissensus as ds
import tiny
from refusals import refuses


class Counted(tiny.Scaled):
    """Counts its forward passes."""

    calls = 0

    def forward(self, x):
        Counted.calls += 1
        return super().forward(x)


def promised(**settings):
    torch.manual_seed(0)
    posterior = ds.MAP(Counted())
    ds.conformal(posterior, [classified(400)], level=0.6, **settings)
    ds.selective(posterior, [classified(400)], risk=0.3)
    ds.ood_gate(posterior, [classified(400)], score="entropy")
    return posterior


def test_one_forward_pass_gives_what_each_promise_gives_alone():
    posterior, (x, _) = promised(), classified(50)
    before = Counted.calls
    found = ds.decide(posterior, x)
    assert Counted.calls == before + 1
    assert torch.equal(found.predictive.mean, posterior.predict(x).mean)
    assert torch.equal(found.sets["conformal"], posterior.promises["conformal"].set(x))
    gates = {name: posterior.promises[name](x).accept for name in ("selective", "ood_gate")}
    assert found.gates.keys() == gates.keys()
    assert all(torch.equal(found.gates[name], gate) for name, gate in gates.items())
    assert torch.equal(found.accept, gates["selective"] & gates["ood_gate"])
    assert 0 < int(found.accept.sum()) < 50


def test_rows_are_json_values_with_the_names_of_classes():
    posterior, (x, _) = promised(), classified(20)
    found = ds.decide(posterior, x)
    assert [row["prediction"] for row in found.to_dicts()] == x.argmax(1).tolist()
    posterior.classes = ["ant", "bee", "cat", "dog", "eel"]
    for row, classes, accept in zip(
        json.loads(json.dumps(ds.decide(posterior, x).to_dicts())), found.sets["conformal"], found.accept, strict=True
    ):
        assert row["conformal"] == [name for name, inside in zip(posterior.classes, classes, strict=True) if inside]
        assert row["accept"] == bool(accept) == (row["selective"] and row["ood_gate"])
        assert row["prediction"] in posterior.classes


def test_a_regression_has_intervals_and_groups_are_found_or_passed():
    torch.manual_seed(0)
    posterior = ds.MAP(tiny.Scaled(), likelihood=ds.Regression(noise=0.7))
    conformal = ds.conformal(posterior, [measured(300)], by=lambda x: (x[:, 0] > 0).long())
    x, _ = measured(9)
    found = ds.decide(posterior, x)
    assert found.gates == {}
    assert bool(found.accept.all())
    for mine, alone in zip(found.sets["conformal"], conformal.interval(x), strict=True):
        assert torch.equal(mine, alone)
    assert found.to_dicts()[0]["conformal"] == [end[0].tolist() for end in conformal.interval(x)]
    conformal.group_of = None  # as after loading
    refuses(lambda: ds.decide(posterior, x), "expected a group for each of 9 rows")
    again = ds.decide(posterior, x, group=(x[:, 0] > 0).long())
    assert torch.equal(again.sets["conformal"][0], found.sets["conformal"][0])


def test_without_promises_there_is_nothing_to_decide():
    refuses(lambda: ds.decide(ds.MAP(tiny.Scaled()), classified(3)[0]), "expected a posterior with promises, got none")


@pytest.mark.parametrize("by", [None, "class"])
def test_a_set_that_would_be_empty_is_the_likeliest_class_and_size_grows_by_their_share(by, tmp_path):
    some, none = promised(by=by), promised(by=by, never_empty=True)
    x, y = classified(500)
    sets, full = (each.promises["conformal"].set(x) for each in (some, none))
    empty = ~sets.any(1)
    assert 0 < int(empty.sum()) < 500
    assert torch.equal(full[~empty], sets[~empty])
    assert torch.equal(full[empty], nn.functional.one_hot(x.argmax(1), 5).bool()[empty])
    before, after = (ds.evaluate(each, [(x, y)]).metrics for each in (some, none))
    assert before["conformal/empty"] == pytest.approx(float(empty.double().mean()))
    assert "conformal/empty" not in after
    assert after["conformal/size"] == pytest.approx(before["conformal/size"] + before["conformal/empty"])
    assert after["conformal/coverage"] > before["conformal/coverage"]
    ds.save(none, tmp_path / "kept")
    assert torch.equal(ds.load(tmp_path / "kept", Counted()).promises["conformal"].set(x), full)
    ds.export(none, tmp_path / "kept.pt2", example=x[:8])
    assert torch.equal(torch.export.load(tmp_path / "kept.pt2").module()(x)["conformal"], full)


def test_intervals_have_no_likeliest_class():
    posterior = ds.MAP(tiny.Scaled(), likelihood=ds.Regression(noise=0.7))
    refuses(lambda: ds.conformal(posterior, [measured(50)], never_empty=True), "never_empty for sets of classes")

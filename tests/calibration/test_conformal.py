"""Conformal sets and intervals on posteriors: coverage, sizes against MAPIE's, groups, shifts, files and bad input."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.calibration.conformal import CLASS_SCORES, Conformal, measure_coverage
from refusals import refuses
from thinning import often, thinned

CLASSES = 5

MAPIE = "mapie is not installed: pip install -e .[test]"


class Rounded(tiny.Scaled):
    """As it is in float32, but in batches of one row the last digits are other ones: as kernels for one row have them."""

    def __init__(self, nudge):
        super().__init__()
        self.float()
        self.nudge = nudge

    def forward(self, x):
        return super().forward(x) * (1 + self.nudge * (len(x) == 1))


def classified(n, *, shift=0.0):
    """(logits (n, K), labels): the labels follow sharper probabilities than the logits say."""
    x = 1.5 * torch.randn(n, CLASSES, dtype=torch.float64) + shift
    return x, torch.multinomial((1.3 * x).softmax(1), 1)[:, 0]


def measured(n):
    """(means (n, 1), values): the deviation grows with the mean."""
    x = torch.randn(n, 1, dtype=torch.float64)
    return x, x + (0.3 + x.abs()) * torch.randn_like(x)


def rows(x, y, weight=None):
    return [(x, y) if weight is None else (x, y, weight)]


def classifier():
    return ds.MAP(tiny.Scaled())


def disagreeing():
    """Three members whose logits are 0.5, 1 and 2 times the inputs."""
    return ds.DeepEnsemble([tiny.Scaled(0.5), tiny.Scaled(1.0), tiny.Scaled(2.0)])


def regressor():
    return ds.MAP(tiny.Scaled(), likelihood=ds.Regression(noise=0.7))


def mean_coverage(posterior, data, n, *, splits=15, tests=400, **settings):
    """Mean coverage over splits, the expected one, and its standard error."""
    found, generator = [], torch.Generator().manual_seed(1)
    for split in range(splits):
        conformal = ds.conformal(posterior, rows(*data(n)), level=0.9, seed=split, **settings)
        x, y = data(tests)
        found.append(float(measure_coverage(conformal, posterior.predict(x), y, generator)["covered"].mean()))
    mean = math.ceil((n + 1) * 0.9 - 1e-9) / (n + 1)
    variance = mean * (1 - mean) / (n + 2)
    return np.mean(found), mean, math.sqrt((variance + (mean * (1 - mean) - variance) / tests) / splits)


SPLITS = {"splits": 200, "tests": 1000}
CASES = [
    ("lac", {}, classifier, classified),
    ("aps", {"randomised": True}, classifier, classified),
    ("raps", {"randomised": True, "penalty": 0.1, "free": 2}, classifier, classified),
    ("disagreement", {}, disagreeing, classified),
    ("cqr", {}, regressor, measured),
    ("residual", {}, regressor, measured),
]


@pytest.mark.parametrize("case", often([(100, {}, 0.03)], [(n, SPLITS, e) for n, e in ((100, 0.0075), (1000, 0.0031))]))
@pytest.mark.parametrize(("score", "settings", "make", "data"), CASES, ids=[case[0] for case in CASES])
def test_coverage_is_the_level(score, settings, make, data, case):
    n, splits, least = case
    found, mean, error = mean_coverage(make(), data, n, **splits, score=score, **settings)
    assert abs(found - mean) < 3 * error < least


@pytest.mark.parametrize("settings", often([{"score": "raps", "penalty": 0.1, "free": 2}], [{"score": "aps"}]))
def test_sets_that_are_not_randomised_cover_the_level_and_are_never_empty(settings):
    """50 splits of 400 rows: an error of 0.003. Scores that are random on calibration rows alone cover 0.95 and 0.93."""
    posterior = classifier()
    found, mean, error = mean_coverage(posterior, classified, 400, splits=50, **settings)
    assert abs(found - mean) < 3 * error < 0.01
    conformal = ds.conformal(posterior, rows(*classified(100)), level=0.2, **settings)
    assert conformal.set(classified(200)[0]).any(1).all()


def test_promises_whose_calibration_scores_were_random_have_larger_sets_that_still_cover():
    """As in files of earlier versions: with u = 0 a score is smallest, so the threshold of random scores is no lower."""
    posterior, (x, y), (new, truth) = classifier(), classified(1000), classified(4000)
    now = ds.conformal(posterior, rows(x, y), score="aps")
    mass = CLASS_SCORES["aps"](posterior.predict(x), torch.rand(1000), {}).gather(1, y[:, None])
    earlier = Conformal(now.facts, {**dict(now.named_buffers()), "scores": mass.sort(0).values})
    posterior.add_guarantee("earlier", earlier)
    small, large = now.set(new), earlier.set(new)
    assert (small <= large).all()
    assert int(large.sum()) > 1.03 * int(small.sum())
    error = (0.9 * 0.1 * (1 / 1000 + 1 / 4000)) ** 0.5  # of the coverage, over calibration and test rows
    assert float(large.gather(1, truth[:, None]).double().mean()) > 0.9 - 3 * error


def test_without_members_that_disagree_the_score_is_lac():
    predictive = classifier().predict(classified(20)[0])
    same = CLASS_SCORES["disagreement"](predictive, torch.zeros(20), {"penalty": 1.0})
    torch.testing.assert_close(same, CLASS_SCORES["lac"](predictive, torch.zeros(20), {}))


def test_disagreement_lets_a_class_in_that_some_members_believe():
    members = torch.tensor([[[0.98, 0.01, 0.01]], [[0.6, 0.39, 0.01]]], dtype=torch.float64).log()
    predictive = ds.ClassificationPredictive(members)
    lac = CLASS_SCORES["lac"](predictive, torch.zeros(1), {})[0]
    found = CLASS_SCORES["disagreement"](predictive, torch.zeros(1), {"penalty": 1.0})[0]
    torch.testing.assert_close(found.exp().reciprocal()[1], torch.tensor(0.2 + 0.19, dtype=torch.float64))
    assert (lac - found)[1] > 0.5
    assert float((lac - found)[2]) == pytest.approx(0, abs=1e-12)


def test_confident_rows_do_not_tie():
    """In float32 these probabilities are 1."""
    logits = torch.tensor([[30.0, 0.0], [31.0, 0.0], [32.0, 0.0]])
    found = CLASS_SCORES["lac"](ds.ClassificationPredictive(logits.log_softmax(1)[None]), torch.zeros(3), {})[:, 0]
    torch.testing.assert_close(found, torch.exp(-torch.arange(30.0, 33.0, dtype=torch.float64)), rtol=1e-6, atol=0)


class Probabilities:
    """What MAPIE takes for a classifier: its inputs are the probabilities."""

    def __init__(self):
        self.classes_ = np.arange(CLASSES)

    def __sklearn_is_fitted__(self):
        return True

    def fit(self, x, y):
        return self

    def predict(self, x):
        return x.argmax(1)

    def predict_proba(self, x):
        return x


class Ones(np.random.RandomState):
    """Uniforms that are 1: MAPIE takes 1 − u of these for its calibration scores."""

    def uniform(self, *args, size=None, **keywords):
        return np.ones(size)


@pytest.mark.parametrize("score", ["lac", "aps"])
def test_sets_are_mapies_on_the_same_scores(score):
    SplitConformalClassifier = pytest.importorskip("mapie.classification", reason=MAPIE).SplitConformalClassifier

    (x, y), (new, _) = classified(150), classified(400)
    p, q = x.softmax(1).numpy(), new.softmax(1).numpy()
    theirs = SplitConformalClassifier(Probabilities(), conformity_score=score, prefit=True, random_state=Ones())
    theirs.conformalize(p, y.numpy())
    mass = {"conformity_score_params": {"include_last_label": True}} if score == "aps" else {}
    _, sets = theirs.predict_set(q, **mass)
    ours = ds.conformal(classifier(), rows(x, y), level=0.9, score=score).set(new)
    assert torch.equal(ours, torch.from_numpy(sets[:, :, 0]))
    assert 1.2 < float(ours.sum(1).double().mean()) < 4


def test_randomised_sets_are_mapies_on_the_same_scores(monkeypatch):
    SplitConformalClassifier = pytest.importorskip("mapie.classification", reason=MAPIE).SplitConformalClassifier

    (x, y), (new, _) = classified(150), classified(400)
    theirs = SplitConformalClassifier(Probabilities(), conformity_score="aps", prefit=True, random_state=3)
    theirs.conformalize(x.softmax(1).numpy(), y.numpy())
    _, sets = theirs.predict_set(new.softmax(1).numpy(), conformity_score_params={"include_last_label": "randomized"})
    # Their uniforms; they take 1 − u.
    drawn = lambda n, **settings: torch.from_numpy(1 - np.random.RandomState(3).uniform(size=n))  # noqa: E731
    monkeypatch.setattr("dissensus.calibration.conformal.torch.rand", drawn)
    ours = ds.conformal(classifier(), rows(x, y), level=0.9, score="aps", randomised=True).set(new)
    assert torch.equal(ours, torch.from_numpy(sets[:, :, 0]))


class Moved:
    """What MAPIE takes for a regressor: its input, moved."""

    fitted_ = True

    def __init__(self, by=0.0):
        self.by = by

    def fit(self, x, y):
        return self

    def predict(self, x):
        return x[:, 0] + self.by


def test_intervals_are_mapies_on_the_same_scores():
    mapie = pytest.importorskip("mapie.regression", reason=MAPIE)
    posterior, (x, y), (new, _) = regressor(), measured(150), measured(50)
    lower, upper = posterior.predict(x).interval(0.9)
    reach = float((upper - lower)[0, 0]) / 2
    given = x.numpy(), y[:, 0].numpy()
    residual = mapie.SplitConformalRegressor(Moved(), prefit=True).conformalize(*given).predict_interval(new.numpy())[1]
    moved = [Moved(-reach), Moved(reach), Moved()]
    quantiles = mapie.ConformalizedQuantileRegressor(moved, prefit=True).conformalize(*given)
    cqr = quantiles.predict_interval(new.numpy(), symmetric_correction=True)[1]
    for score, theirs in (("residual", residual), ("cqr", cqr)):
        ours = torch.cat(ds.conformal(posterior, rows(x, y), score=score).interval(new), 1)
        torch.testing.assert_close(ours, torch.from_numpy(theirs[:, :, 0]), rtol=0, atol=1e-8)


@pytest.mark.parametrize("score", ["cqr", "residual"])
def test_intervals_are_what_the_score_says(score):
    posterior, (x, y) = regressor(), measured(99)
    conformal = ds.conformal(posterior, rows(x, y), level=0.9, score=score)
    new = measured(7)[0]
    half = (y - x).abs().sort(0).values[89]  # the 90th of 99, and the deviation is the same everywhere
    lower, upper = conformal.interval(new)
    assert lower.shape == new.shape
    torch.testing.assert_close(lower, new - half, rtol=0, atol=1e-9)
    torch.testing.assert_close(upper, new + half, rtol=0, atol=1e-9)


def test_an_interval_that_would_be_empty_is_a_point():
    posterior, x = regressor(), torch.randn(50, 1, dtype=torch.float64)
    conformal = ds.conformal(posterior, rows(x, x), level=0.5)  # all values right: quantiles are drawn together
    lower, upper = conformal.interval(x)
    torch.testing.assert_close(lower, x, rtol=0, atol=1e-9)
    torch.testing.assert_close(upper, x, rtol=0, atol=1e-9)
    assert (lower <= upper).all()


def test_outputs_are_covered_each_by_itself():
    def data(n):
        x = torch.randn(n, 2, dtype=torch.float64)
        return x, x + torch.tensor([0.1, 10.0], dtype=torch.float64) * torch.randn_like(x)

    posterior, inside = regressor(), []
    for _ in range(10):
        conformal = ds.conformal(posterior, rows(*data(500)))
        x, y = data(500)
        lower, upper = conformal.interval(x)
        inside.append(((lower <= y) & (y <= upper)).double().mean(0))
    assert (torch.stack(inside).mean(0) - 0.9).abs().max() < 3 * math.sqrt(0.09 * (2 / 500) / 10)
    assert float((upper - lower)[0, 1] / (upper - lower)[0, 0]) > 50


@pytest.mark.parametrize(("score", "nudge"), thinned(["lac", "aps", "cqr", "residual"], [-3e-7, 3e-7], every=2))
def test_equal_inputs_are_covered_alike_in_a_batch_of_one(score, nudge):
    """Three kinds of inputs with three targets each: a third of the rows, or more, has the score at the threshold."""
    kinds, y = torch.randn(3, 3).repeat(60, 1), torch.arange(3).repeat_interleave(3).repeat(20)
    x = kinds if score in CLASS_SCORES else 5 * kinds[:, :1]
    targets, likelihood = (y, None) if score in CLASS_SCORES else (y[:, None].float(), ds.Regression(noise=0.5))
    posterior = ds.MAP(Rounded(nudge), likelihood=likelihood)
    for level in (0.5, 0.7):
        conformal, held = ds.conformal(posterior, rows(x, targets), level=level, score=score), torch.Generator()
        together = measure_coverage(conformal, posterior.predict(x[:9]), targets[:9], held)["covered"]
        for at in range(9):
            one = slice(at, at + 1)
            assert measure_coverage(conformal, posterior.predict(x[one]), targets[one], held)["covered"] == together[at]


def test_every_class_is_covered_by_itself():
    def data(n):  # a rare class that the network does not believe in
        y = torch.where(torch.rand(n) < 0.15, 1, 0)
        x = torch.randn(n, CLASSES, dtype=torch.float64)
        x[:, 0] += 3
        return x, y

    posterior = classifier()
    x, y = data(4000)
    for by, least in (("class", 0.86), (None, 0.0)):
        conformal = ds.conformal(posterior, rows(*data(2000)), by=by)
        assert by is None or conformal.set(x)[:, 2:].all()  # three of five classes have no rows: they are in every set
        hit = conformal.set(x).gather(1, y[:, None])[:, 0].double()
        of_rare = float(hit[y == 1].mean())
        assert of_rare > least
        assert (of_rare > 0.8) == (by == "class")


def test_a_class_with_too_few_rows_is_named(caplog):
    x, y = classified(100)
    y = torch.where(y == 3, 0, y)
    with caplog.at_level("WARNING", "dissensus"):
        ds.conformal(classifier(), rows(x, y), by="class")
    assert "needs 9 rows of each class" in caplog.text
    assert "here 3" in caplog.text
    few = rows(x[:40], torch.arange(40) % CLASSES)
    refuses(lambda: ds.conformal(classifier(), few, by="class"), "needs 9 rows of each class, got at most 8")


def test_groups_are_covered_each_by_itself_and_unknown_ones_have_infinite_intervals():
    def data(n):
        x = torch.randn(n, 1, dtype=torch.float64)
        return x, x + torch.where(x > 0, 5.0, 0.1) * torch.randn_like(x)

    def side(x):
        return (x[:, 0] > 0).long() + 7

    posterior = regressor()
    conformal = ds.conformal(posterior, rows(*data(1000)), by=side)
    x, y = data(4000)
    lower, upper = conformal.interval(x)
    inside = ((lower <= y) & (y <= upper))[:, 0].double()
    for right in (True, False):
        group = (x[:, 0] > 0) == right
        assert float(inside[group].mean()) == pytest.approx(0.9, abs=3 * math.sqrt(0.09 * (1 / 500 + 1 / 2000)))
    told = conformal.interval(posterior.predict(x[:3]), group=torch.tensor([7, 8, 9]))
    assert told[1].isinf()[:, 0].tolist() == [False, False, True]
    refuses(lambda: conformal.interval(posterior.predict(x[:3])), "expected a group for each of 3 rows")


def test_a_known_shift_is_covered_by_weights():
    """Values off by x² / 4; calibration x ~ N(0, 1), new x ~ N(1, 1): density ratio exp(x − 1/2)."""

    def data(n, mean):
        x = mean + torch.randn(n, 1, dtype=torch.float64)
        return x, x + 0.25 * x**2 * torch.randn_like(x)

    def ratio(x):
        return (x[:, 0] - 0.5).exp()

    posterior, inside, plain = regressor(), [], []
    for _ in range(12):
        calibration, (x, y) = data(500, 0), data(500, 1)
        for found, weight in ((inside, ratio), (plain, None)):
            lower, upper = ds.conformal(posterior, rows(*calibration), weight=weight, score="residual").interval(x)
            found.append(float(((lower <= y) & (y <= upper)).double().mean()))
    assert np.mean(inside) > 0.9 - 3 * np.std(inside) / math.sqrt(12)
    assert np.mean(plain) < 0.85
    by_function = ds.conformal(posterior, rows(*calibration), weight=ratio, name="by function")
    by_rows = ds.conformal(posterior, rows(*calibration, ratio(calibration[0])))
    torch.testing.assert_close(by_rows.interval(x, weight=ratio(x)), by_function.interval(x))
    assert by_rows.interval(x[:1], weight=torch.tensor([math.inf]))[1].isinf().all()
    refuses(lambda: by_rows.interval(x), "expected a weight for each of 500 rows")


def test_rows_that_do_not_count_do_not_count():
    posterior = ds.MAP(tiny.Scaled(), likelihood=ds.Classification(ignore_index=-1))
    x, y = classified(60)
    plain = ds.conformal(posterior, rows(x[:50], y[:50]))
    y = torch.where(torch.arange(60) < 50, y, -1)
    ignored = ds.conformal(posterior, rows(x, y))
    masked = ds.conformal(posterior, rows(x, y.clamp(min=0), (torch.arange(60) < 50).double()))
    alike = ds.conformal(posterior, rows(x, y, torch.full((60,), 2.5)))
    for each in (ignored, masked, alike):
        assert each.rows == 50
        assert torch.equal(each.scores, plain.scores)
        assert not each.facts["weighted"]
    posterior.float()  # another precision leaves scores as they are
    assert torch.equal(alike.scores, plain.scores)


def test_it_is_saved_with_the_posterior_and_dropped_by_training(tmp_path, caplog):
    posterior = ds.DeepEnsemble([ds.nets.MLP(4, 3, hidden=(5,)) for _ in range(2)])
    x, y = torch.randn(80, 4), torch.arange(80) % 3
    conformal = ds.conformal(posterior, rows(x, y), score="raps", by="class", penalty=0.2, free=1)
    ds.save(posterior, tmp_path)
    again = ds.load(tmp_path).promises["conformal"]
    assert isinstance(again, ds.Conformal)
    assert again.facts == conformal.facts
    assert torch.equal(again.set(x), conformal.set(x))
    assert again.scores.dtype == torch.float64

    assert copy.deepcopy(posterior).promises["conformal"].set(x).equal(conformal.set(x))
    with caplog.at_level("WARNING", "dissensus"):
        ds.fit(posterior, rows(x, y), epochs=1, progress=False)
        refuses(lambda: conformal.set(x), "expected a conformal fitted to the posterior's present predictions")
    assert "since conformal was fitted" in caplog.text


def test_bad_input_is_refused():
    posterior, (x, y) = classifier(), classified(50)
    refuses(lambda: ds.conformal(posterior, rows(x[:8], y[:8])), r"at least 9 rows for a level of 0\.9, got 8")
    assert ds.conformal(posterior, rows(x[:9], y[:9])).rows == 9
    refuses(lambda: ds.conformal(posterior, []), "at least 9 rows")
    for level in (0.0, 1.0, 1.2):
        with pytest.raises(ValueError, match="level"):
            ds.conformal(posterior, rows(x, y), level=level)
    refuses(lambda: ds.conformal(posterior, rows(x, y), score="cqr"), "a classification has these")
    refuses(lambda: ds.conformal(regressor(), rows(*measured(50)), score="lac"), "a regression has these")
    refuses(lambda: ds.conformal(posterior, rows(x, y + 3)), "labels in 0…4")
    refuses(lambda: ds.conformal(posterior, rows(x, x.softmax(1))), "soft labels")
    refuses(lambda: ds.conformal(posterior, rows(x, y), randomised=True), "can be randomised")
    refuses(lambda: ds.conformal(posterior, rows(x, y), penalty=1.0), "setting")
    refuses(lambda: ds.conformal(regressor(), rows(*measured(50)), by="class"), 'by="class"')
    conformal = ds.conformal(posterior, rows(x, y))
    three = ds.ClassificationPredictive(torch.zeros(1, 2, 3).log_softmax(2))
    refuses(lambda: conformal.set(three), "expected 5 classes")
    scenes = [(torch.randn(4, 2, 5, 6), torch.zeros(4, 5, 6, dtype=torch.int64))]
    refuses(lambda: ds.conformal(ds.MAP(nn.Conv2d(2, 3, 1)), scenes), "not exchangeable")
    refuses(lambda: conformal.interval(x), r"call .set\(x\)", TypeError)
    refuses(lambda: ds.conformal(regressor(), rows(*measured(50))).set(x), r"call .interval\(x\)", TypeError)


@pytest.mark.parametrize("name", ["a.b", "", "keys"])
@pytest.mark.parametrize("promise", [ds.conformal, ds.selective, ds.ood_gate])
def test_a_name_that_torch_refuses_is_one_clear_error_before_rows_are_read(promise, name):
    refuses(lambda: promise(classifier(), None, name=name), f"expected a name without dots .*, got '{name}'")


def test_functions_that_are_drawn_anew_are_refused():
    posterior = ds.MCDropout(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), samples=4)
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    refuses(lambda: ds.conformal(posterior, rows(x, y)), r"ds\.refresh")
    ds.refresh(posterior, rows(x, y))
    assert ds.conformal(posterior, rows(x, y)).rows == 40


# ------------------------------------------------------------------------------------------------- all promises at once
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
    ds.ood_gate(posterior, [classified(400)], score="total")
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

"""Tables in scikit-learn's manner: what a newcomer would try, and the traps of tables."""

import math
import pickle

import numpy as np
import pytest
import torch

import dissensus as ds

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from sklearn.base import clone  # noqa: E402
from sklearn.compose import TransformedTargetRegressor  # noqa: E402
from sklearn.model_selection import GridSearchCV, GroupKFold, PredefinedSplit, cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import FunctionTransformer  # noqa: E402
from sklearn.utils.estimator_checks import estimator_checks_generator  # noqa: E402

from dissensus.sklearn import Classifier, Regressor, load  # noqa: E402
from dissensus.sklearn.estimators import EarlyStopping  # noqa: E402
from dissensus.sklearn.table_rows import sort_rows, split_rows  # noqa: E402
from refusals import refuses  # noqa: E402
from thinning import often  # noqa: E402

SMALL = {"hidden": (16,), "members": 2, "epochs": 30, "lr": 2e-2, "random_state": 0}


def houses(rows=120, seed=0):
    """(table, price in hundreds of thousands): numbers, a year, a date, categories and missing values."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(20, 200, rows)
    city = rng.choice(["Oslo", "Rome", "Bern"], rows)
    columns = {"size": size, "city": pd.Categorical(city), "year": rng.integers(1950, 2020, rows)}
    columns["seen"] = pd.Timestamp("2024-05-01") + pd.to_timedelta(rng.integers(0, 60, rows), unit="D")
    columns["rooms"] = np.where(rng.random(rows) < 0.2, np.nan, size // 30)
    frame = pd.DataFrame(columns, index=rng.permutation(10 * rows)[:rows])
    price = 5e5 + 3e3 * size + 1e5 * (city == "Oslo") + rng.normal(0, 1e4, rows)
    return frame, pd.Series(price, index=frame.index, name="price")


@pytest.fixture(scope="module")
def regressor():
    return Regressor(**SMALL).fit(*houses())


def test_a_table_is_predicted_in_its_own_units(regressor):
    x, y = houses(200, seed=1)
    mean, lower, upper = regressor.predict(x, interval=0.9)
    assert regressor.score(x, y) > 0.9
    assert mean.dtype == np.float64
    assert np.array_equal(mean, regressor.predict(x))
    assert ((lower < mean) & (mean < upper)).all()
    assert 0.8 < ((lower <= y) & (y <= upper)).mean() <= 1  # ± 0.02 of one standard error, and a small ensemble
    predictive = regressor.predictive(x)
    assert np.allclose(predictive.total[:, 0].sqrt().numpy(), (upper - lower) / 3.29, rtol=0.2)
    assert torch.allclose(predictive.total, predictive.aleatoric + predictive.epistemic)


def test_rows_are_predicted_alone_as_among_others(regressor):
    x, _ = houses(20, seed=1)
    alone = np.concatenate([regressor.predict(x.iloc[[i]]) for i in range(len(x))])
    assert np.allclose(alone, regressor.predict(x), rtol=1e-12)


def test_columns_in_another_order_are_refused(regressor):
    x, _ = houses(3)
    refuses(lambda: regressor.predict(x[x.columns[::-1]]), "must be in the same order as they were in fit")
    refuses(lambda: regressor.predict(x.drop(columns="city")), "yet now missing:\n- city")


def test_one_artefact_predicts_the_same(regressor, tmp_path):
    x, _ = houses(20, seed=1)
    regressor.save(tmp_path)
    loaded = load(tmp_path)
    for other in (loaded, pickle.loads(pickle.dumps(regressor))):
        assert np.array_equal(other.predict(x), regressor.predict(x))
        assert other.get_params() == regressor.get_params()
    refuses(lambda: loaded.predict(x[x.columns[::-1]]), "order")
    (tmp_path / "table.json").write_text('{"estimator": "Regressor"}')
    refuses(lambda: load(tmp_path), "save the estimator again")


def test_the_posterior_takes_tables_and_answers_in_units_without_the_estimator(regressor, tmp_path):
    """Where it is taken out, loaded by `ds.load`, or exported: standardised numbers would look like any others."""
    x, y = noisy(200, 0)
    frame = pd.DataFrame(x, columns=["a", "b"])
    fitted = Regressor(**SMALL | {"epochs": 2, "conformal": 0.3}).fit(frame, 1e6 + 1e4 * np.stack([y, -y], 1))
    labelled = Classifier(**SMALL | {"epochs": 2}).fit(frame, np.where(y > 3, "dear", "cheap"))
    labelled.save(tmp_path / "labels")
    fitted.save(tmp_path / "values")
    for posterior in (fitted.posterior_, ds.load(tmp_path / "values")):
        mean, lower, upper = fitted.predict(frame, interval=0.9)
        assert np.allclose(posterior.predict(frame).mean.numpy(), mean, rtol=1e-12)
        for end, found in zip((lower, upper), posterior.promises["conformal"].interval(frame), strict=True):
            assert np.allclose(found.numpy(), end, rtol=1e-12)
    assert ds.load(tmp_path / "labels").classes == ("cheap", "dear")


def test_the_posterior_is_evaluated_on_a_column_of_targets(regressor):
    x, y = houses(40, seed=1)
    found = [ds.evaluate(regressor.posterior_, (x, each)).metrics["rmse"] for each in (y, y.to_numpy()[:, None])]
    assert found[0] == found[1] == pytest.approx(np.sqrt(np.mean((regressor.predict(x) - y) ** 2)), rel=1e-5)


def test_labels_may_be_text_or_any_numbers(tmp_path):
    x, y = houses()
    for low, high in (("cheap", "dear"), (7, 3)):
        labels = pd.Series(np.where(y > y.median(), high, low), index=y.index)
        classifier = Classifier(**SMALL).fit(x, labels)
        assert classifier.classes_.tolist() == sorted([low, high])
        assert classifier.score(x, labels) > 0.9
        probabilities = classifier.predict_proba(x)
        assert np.allclose(probabilities.sum(1), 1)
        assert (classifier.predict(x) == classifier.classes_[probabilities.argmax(1)]).all()
        classifier.save(tmp_path)
        assert (load(tmp_path).predict(x) == classifier.predict(x)).all()
    sets = classifier.predict_set(x, 0.9)
    assert (sets.sum(1) >= 1).all()
    assert ((probabilities * sets).sum(1) >= 0.9).all()


def test_the_order_of_rows_does_not_matter_and_whole_weights_repeat_them():
    x, y = houses(40)
    settings = SMALL | {"epochs": 4}
    order = np.random.default_rng(0).permutation(len(x))
    weights = np.arange(len(x)) % 3
    expected = Regressor(**settings).fit(x, y).predict(x)
    assert np.array_equal(Regressor(**settings).fit(x.iloc[order], y.iloc[order]).predict(x), expected)
    repeated = np.repeat(np.arange(len(x)), weights)
    twice = Regressor(**settings).fit(x.iloc[repeated], y.iloc[repeated]).predict(x)
    assert np.array_equal(Regressor(**settings).fit(x, y, sample_weight=weights).predict(x), twice)
    assert not np.array_equal(Regressor(**settings).fit(x, y, sample_weight=0.5 + weights).predict(x), expected)


def test_the_order_of_rows_does_not_matter_where_levels_are_many():
    """More than have an input of their own, and all as frequent: which of them have one must not depend on the order."""
    rng = np.random.default_rng(0)
    x, y = pd.DataFrame({"word": [f"w{i % 150}" for i in range(300)]}), rng.integers(0, 2, 300)
    order = rng.permutation(300)
    settings = SMALL | {"epochs": 2}
    expected = Classifier(**settings).fit(x, y).predict_proba(x)
    assert np.array_equal(Classifier(**settings).fit(x.iloc[order], y[order]).predict_proba(x), expected)


def test_held_out_rows_do_not_leak():
    """Neither into the scaling, nor as copies of rows that are trained on."""
    groups = np.repeat(np.arange(100), [1, 2, 1, 1] * 25)
    train, held = split_rows(groups, (0.2,), seed=0, labels=None, least=10)
    assert not set(groups[train]) & set(groups[held])
    assert sorted([*train, *held]) == list(range(125))
    assert len(set(groups[held])) == 20
    thrice = np.repeat(np.arange(100), 3)
    train, held = split_rows(thrice, (0.2,), seed=0, labels=None, least=10)
    assert not set(thrice[train]) & set(thrice[held])
    few = np.repeat(np.arange(4), 50)  # a table of four different rows
    train, held = split_rows(few, (0.2,), seed=0, labels=few, least=10)
    assert np.bincount(few[held]).tolist() == [10] * 4
    train, held, last = split_rows(np.arange(100), (0.2, 0.3), seed=0, labels=None, least=10)
    assert (len(train), len(held), len(last)) == (50, 20, 30)
    assert sorted([*train, *held, *last]) == list(range(100))
    x, y = houses(400)
    fitted = Regressor(**SMALL | {"epochs": 2, "validation": 0.5}).fit(x, y)
    assert fitted.encoder_.columns[0].mean != pytest.approx(float(x["size"].mean()), rel=1e-6)
    assert float(fitted.scale_.mean) != pytest.approx(float(y.mean()), rel=1e-6)


def test_small_tables_are_trained_again_on_all_rows():
    """Up to the epoch that held-out rows have chosen, in as many epochs; not if the share is given."""
    x, y = houses(150)
    settings = SMALL | {"epochs": 8, "patience": None}
    fitted = Regressor(**settings).fit(x, y)
    assert fitted.encoder_.columns[0].mean == pytest.approx(float(x["size"].mean()))
    assert float(fitted.scale_.mean) == pytest.approx(float(y.mean()))
    best = fitted.history_.best.epoch - 1
    assert len(fitted.scores_) == 8
    assert best == int(np.argmin(fitted.scores_))
    assert int(fitted.posterior_.steps) == (best + 1) * math.ceil(150 / 32)
    assert float(fitted.posterior_.temperature) != 1
    held = Regressor(**settings | {"validation": 0.3}).fit(x, y)
    assert held.scores_ == fitted.scores_
    assert float(held.posterior_.temperature) == float(fitted.posterior_.temperature)
    assert float(held.scale_.mean) != pytest.approx(float(y.mean()), rel=1e-6)


def test_the_error_of_an_epoch_is_the_mean_of_the_last_ones(monkeypatch):
    errors = iter([3.0, 1.0, 2.0, 2.0, 1.6, 1.0])
    stopping = EarlyStopping(ds.MAP(torch.nn.Linear(1, 1)), [], None, window=2)
    monkeypatch.setattr(stopping, "_error", lambda: next(errors))
    for epoch in range(6):
        stopping(epoch)
    assert stopping.scores == [3.0, 2.0, 1.5, 2.0, 1.8, 1.3]
    assert stopping.best == 5


@pytest.mark.slow
def test_early_stopping_keeps_the_best_epoch():
    x, y = houses(300)
    fitted = Regressor(**SMALL | {"epochs": 200, "patience": 3, "lr": 0.03}).fit(x, y)
    best = fitted.history_.best.epoch - 1
    assert len(fitted.scores_) == len(fitted.history_.epochs) == best + 5
    assert best == int(np.argmin(fitted.scores_))
    labels = Classifier(**SMALL | {"epochs": 200, "patience": 3, "lr": 0.03}).fit(x, y > y.median())
    assert len(labels.scores_) < 200
    assert labels.history_.best.epoch - 1 == int(np.argmin(labels.scores_))
    # the state kept is that of the best epoch, and the spread that of the held-out rows
    again = Regressor(**SMALL | {"epochs": 200, "lr": 0.03}).set_params(patience=None, epochs=best + 1)
    assert again.fit(x, y).scores_ != fitted.scores_  # another schedule
    assert float(fitted.posterior_.temperature) != 1


def noisy(rows, seed):
    """Rows, and targets whose noise differs from row to row."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 2))
    return x, 3 + x[:, 0] + rng.normal(size=rows) * np.exp(x[:, 1] / 2)


def test_conformal_intervals_hold_what_they_promise():
    """Also of untrained networks. 40 calibration rows at 0.8: one calibration covers Beta(33, 8), mean 0.805, sd 0.061."""
    covered = []
    for seed in range(16):
        (x, y), (new, truth) = noisy(80, seed), noisy(500, seed + 1000)
        quick = Regressor("map", hidden=(4,), epochs=1, validation=0.0, conformal=0.5, random_state=seed).fit(x, y)
        _, lower, upper = quick.predict(new, interval=0.8)
        covered.append(((lower <= truth) & (truth <= upper)).mean())
    assert abs(np.mean(covered) - 33 / 41) < 4 * 0.065 / 4
    scores = quick.posterior_.promises["conformal"].scores
    assert scores.shape == (40, 1)
    deviation = quick.predictive(new).total.sqrt()[:, 0].numpy()
    assert np.allclose((upper - lower) / deviation / 2, float(scores[32]))  # the ⌈41 · 0.8⌉-th smallest
    refuses(lambda: quick.predict(new, interval=0.99), r"40 calibration rows can promise, got 0.99, which needs 99")


@pytest.mark.parametrize("copied", often([True], [False]))
def test_copies_of_a_row_are_not_both_trained_on_and_calibrated_on(copied):
    """30 calibration rows at 0.9: one calibration covers Beta(28, 3), mean 28/31, sd 0.052; of 500 rows, 0.054."""
    covered = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x, noise = rng.normal(size=(600, 20)), rng.normal(size=600)
        y, rows = x[:, 0] + noise, np.arange(100).repeat(3 if copied else 1)
        network = {"method": "map", "hidden": 64, "epochs": 30, "lr": 2e-2, "batch_size": 100}  # memorises its rows
        weight = None if copied else np.full(100, 3)
        fitted = Regressor(**network, conformal=0.3, random_state=seed).fit(x[rows], y[rows], sample_weight=weight)
        _, lower, upper = fitted.predict(x[100:], interval=0.9)
        covered.append(((lower <= y[100:]) & (y[100:] <= upper)).mean())
    assert abs(np.mean(covered) - 28 / 31) < 4 * 0.054 / 3**0.5


def test_weights_count_in_calibration_without_making_rows():
    """Twenty of 40 calibration rows, each with a weight of one or three; equal weights change nothing."""
    x, y = noisy(80, 0)
    settings = {"method": "map", "hidden": (4,), "epochs": 1, "validation": 0.0, "conformal": 0.5, "random_state": 0}
    weights = np.arange(80) % 2 * 2 + 1
    plain, equal, some = (
        Regressor(**settings).fit(x, y, sample_weight=each).posterior_.promises["conformal"]
        for each in (None, np.full(80, 7), weights)
    )
    assert plain.rows == equal.rows == some.rows == 40
    assert not plain.facts["weighted"]
    assert not equal.facts["weighted"]
    assert torch.equal(plain.mass, equal.mass)
    steps = torch.diff(some.mass[:, 0], prepend=torch.zeros(1, dtype=torch.float64))
    assert set(steps.round(decimals=3).tolist()) == {0.5, 1.5}  # the mean weight of all rows is 2


CROSS = {"method": "map", "network": torch.nn.Linear, "epochs": 3, "lr": 0.1, "batch_size": 64, "validation": 0.0}
CROSS |= {"conformal": "cv+", "folds": 4, "random_state": 0}


def test_cross_conformal_intervals_and_sets_hold_what_they_promise():
    """10 calibrations of 40 rows at 0.8: the standard error of their mean coverage is about √(.8 · .2 / 40 / 10) = 0.02."""
    covered, contained = [], []
    for seed in range(10):
        (x, y), (new, truth) = noisy(40, seed), noisy(500, seed + 1000)
        _, lower, upper = Regressor(**CROSS).fit(x, y).predict(new, interval=0.8)
        covered.append(((lower <= truth) & (truth <= upper)).mean())
        sets = Classifier(**CROSS).fit(x, np.digitize(y, [2, 4])).predict_set(new, 0.8)
        contained.append(sets[np.arange(500), np.digitize(truth, [2, 4])].mean())
    for found in (covered, contained):
        assert abs(np.mean(found) - 0.8) < 4 * 0.02, np.mean(found)
        assert np.std(found) < 2 * 0.063  # each one: √(.8 · .2 / 40)


def fold_numbers(x, y, folds):
    """The folds of `Regressor(random_state=0)`: of rows sorted by their contents."""
    order, groups = sort_rows(x, y, np.arange(len(x)))
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    number = np.empty(len(x), dtype=int)
    for at, (_, fold) in enumerate(GroupKFold(folds, shuffle=True, random_state=seed).split(groups, groups=groups)):
        number[order[fold]] = at
    return number


def test_cross_conformal_intervals_are_mapies():
    """With one noise for all rows the scores are residuals. MAPIE clones and fits the estimator by itself."""
    regression = pytest.importorskip("mapie.regression", reason="mapie is not installed: pip install -e .[test]")
    (x, y), (new, _) = noisy(40, 0), noisy(30, 1)
    plain = Regressor(**CROSS | {"likelihood": ds.Regression(noise=1.0), "conformal": 0.0})
    settings = {"confidence_level": [0.5, 0.9], "method": "plus", "cv": PredefinedSplit(fold_numbers(x, y, 4))}
    theirs = regression.CrossConformalRegressor(plain, **settings).fit_conformalize(x, y)
    _, ends = theirs.predict_interval(new)
    ours = clone(plain).set_params(conformal="cv+").fit(x, y).predict(new, interval=[0.5, 0.9])
    assert np.array_equal(ours.mean, clone(plain).fit(x, y).predict(new))
    assert np.allclose(ours.lower, ends[:, 0].T, rtol=1e-6)
    assert np.allclose(ours.upper, ends[:, 1].T, rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_cross_conformal_ends_are_those_of_a_loop_over_rows(weighted):
    """Two targets, deviations of each row, equal rows in one fold, weights of rows."""
    (x, y), (new, _) = noisy(40, 0), noisy(5, 1)
    x[5], y[5] = x[4], y[4]
    both, weight = np.stack([y, 7 - 2 * y], 1), np.arange(40) % 3 + 0.5 if weighted else np.ones(40)
    fitted = Regressor(**CROSS).fit(x, both, sample_weight=weight if weighted else None)
    folds = fold_numbers(x, both, 4)
    assert folds[4] == folds[5]
    _, lower, upper = fitted.predict(new, interval=0.8)
    seen, asked = ([fold.predict(z, return_std=True) for fold in fitted.folds_] for z in (x, new))
    for row, output in np.ndindex(5, 2):
        ends = []
        for i, fold in enumerate(folds):
            (centre, spread), (at, std) = seen[fold], asked[fold]
            reach = abs(both[i] - centre[i]) / spread[i] * std[row]
            ends.append((at[row] - reach, at[row] + reach))
        share = weight / weight.mean()
        for side, found in ((0, lower), (1, upper)):
            sign = 2 * side - 1
            values = sign * np.array(ends)[:, side, output]
            order = np.argsort(values)
            enough = np.cumsum(share[order]) >= 0.8 * (share.sum() + 1) - 1e-9
            assert found[row, output] == pytest.approx(sign * values[order][enough.argmax()], rel=1e-4)


def test_cross_conformal_estimators_are_kept(tmp_path):
    (x, y), (new, _) = noisy(40, 0), noisy(20, 1)
    fitted = Regressor(**CROSS).fit(x, y, sample_weight=np.arange(40) + 0.5)
    again = clone(fitted)
    assert (again.conformal, again.folds) == ("cv+", 4)
    again.fit(x[::-1], y[::-1], sample_weight=np.arange(40)[::-1] + 0.5)
    assert np.array_equal(again.predict(new), fitted.predict(new))
    expected = fitted.predict(new, interval=[0.8, 0.5])
    for other in (load(saved(fitted, tmp_path), torch.nn.Linear(2, 2)), pickle.loads(pickle.dumps(fitted))):
        for mine, theirs in zip(other.predict(new, interval=[0.8, 0.5]), expected, strict=True):
            assert np.array_equal(mine, theirs)
    labels = Classifier(**CROSS).fit(x, np.digitize(y, [2, 4]))
    loaded = load(saved(labels, tmp_path), torch.nn.Linear(2, 3))
    assert np.array_equal(loaded.predict_set(new, 0.7), labels.predict_set(new, 0.7))
    assert (labels.predict_set(new, 0.7) <= labels.predict_set(new, 0.95)).all()
    assert not fitted.posterior_.promises  # the posterior alone has no folds
    told = "expected a level that 40 calibration rows can promise, got 0.99"
    refuses(lambda: fitted.predict(new, interval=0.99), told)
    assert not Regressor(**CROSS | {"conformal": 0.0}).fit(x, y).folds_


def saved(estimator, folder):
    estimator.save(folder)
    return folder


def test_levels_quantiles_and_deviations(regressor):
    x, y = houses(20, seed=1)
    mean, lower, upper = regressor.predict(x, interval=[0.5, 0.9])
    assert mean.shape == (20,)
    assert lower.shape == upper.shape == (2, 20)
    for at, level in enumerate((0.5, 0.9)):
        assert np.array_equal(regressor.predict(x, interval=level).lower, lower[at])
    assert np.allclose(regressor.predict(x, quantiles=[0.05, 0.95]), [lower[1], upper[1]], rtol=1e-12)
    again, std = regressor.predict(x, return_std=True)
    assert np.array_equal(again, mean)
    assert np.allclose(std**2, regressor.predictive(x).total[:, 0].numpy())
    each = regressor.predictive(x).log_prob(y)
    assert torch.equal(each, regressor.predictive(x).log_prob(y.to_numpy()[:, None]))
    refuses(lambda: regressor.predict(x, interval=0.9, return_std=True), "got several; call predict for each")


def test_a_dict_of_columns_is_a_table(regressor):
    x, y = houses()
    columns = {name: x[name].to_numpy() for name in x}
    fitted = Regressor(**SMALL).fit(columns, y)
    expected = regressor.predict(x[:5])
    assert np.allclose(fitted.predict({name: list(columns[name][:5]) for name in reversed(columns)}), expected)
    refuses(lambda: fitted.predict({"size": [1.0]}), "yet now missing")
    refuses(lambda: Regressor(**SMALL).fit({"a": [1, 2], "b": [1]}, [1, 2]), "expected columns of one length")


def test_targets_may_have_several_columns_or_be_transformed():
    x, y = houses()
    both = np.stack([y, -2 * y + 7], 1)
    fitted = Regressor(**SMALL).fit(x, both)
    assert fitted.predict(x).shape == fitted.predict(x, interval=0.5).upper.shape == (120, 2)
    assert fitted.score(x, both) > 0.9
    x, y = houses(60)
    quick = Regressor(**SMALL | {"epochs": 2})
    logarithms = TransformedTargetRegressor(quick, func=np.log, inverse_func=np.exp).fit(x, y)
    assert logarithms.predict(x).shape == (60,)
    assert 5e5 < logarithms.predict(x).mean() < 1.5e6


def test_nothing_is_logged_of_a_temperature_that_nobody_asked_for(caplog):
    """Networks that are far too uncertain, after one epoch."""
    x, y = houses(200)
    fitted = Regressor("map", hidden=(4,), epochs=1, lr=1e-4, likelihood=ds.HeteroscedasticRegression()).fit(x, y)
    assert float(fitted.posterior_.temperature) != 1
    assert not caplog.records


def test_conformal_sets_and_intervals_are_saved(tmp_path):
    x, y = noisy(200, 0)
    settings = SMALL | {"epochs": 2, "conformal": 0.3}
    regressor, classifier = Regressor(**settings).fit(x, y), Classifier(**settings).fit(x, np.digitize(y, [2, 4]))
    regressor.save(tmp_path)
    assert np.array_equal(load(tmp_path).predict(x, interval=0.9).upper, regressor.predict(x, interval=0.9).upper)
    classifier.save(tmp_path)
    loaded = load(tmp_path)
    assert np.array_equal(loaded.predict_set(x, 0.7), classifier.predict_set(x, 0.7))
    assert (classifier.predict_set(x, 0.7) <= classifier.predict_set(x, 0.95)).all()
    scores, threshold = -np.log(classifier.predict_proba(x)), loaded.posterior_.promises["conformal"].scores[42]
    wanted = scores <= 1.00001 * float(threshold)  # ⌈61 · 0.7⌉ = 43; the tolerance of `Conformal.set`
    assert np.array_equal(classifier.predict_set(x, 0.7), wanted)
    refuses(lambda: Regressor(conformal=0.1).fit(x[:60], y[:60]), r"at least 20 rows to calibrate on, got 0.1 of 60")


def test_pipelines_searches_and_clones_take_them():
    x, y = houses(60)
    search = GridSearchCV(Regressor(**SMALL | {"epochs": 2}), {"hidden": [(4,), (8,)]}, cv=2).fit(x, y)
    assert search.best_params_["hidden"] in ((4,), (8,))
    pipeline = make_pipeline(FunctionTransformer(lambda frame: frame.drop(columns="year")), search.best_estimator_)
    assert len(cross_val_score(pipeline, x, y, cv=2)) == 2
    copy = clone(search.best_estimator_).set_params(members=3)
    assert not hasattr(copy, "posterior_")
    assert copy.get_params()["members"] == 3


@pytest.mark.parametrize("method", ["map", "swag", "batch_ensemble", "laplace"])
def test_methods_go_by_their_names(method, tmp_path):
    x, y = houses(60)
    fitted = Regressor(method, hidden=(8,), epochs=3, random_state=0).fit(x, y)
    assert fitted.posterior_.name == method
    assert 5e5 < fitted.predict(x).mean() < 1.5e6  # in units, also of a draw that is stored
    assert np.array_equal(fitted.predict(x), fitted.predict(x))


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(ds.METHODS))
@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_every_method_goes_by_its_name(kind, method, tmp_path):
    x, y = houses(60)
    settings = {"samples": 4, "warmup": 4, "leapfrog": 2} if method == "hmc" else {}
    fitted = kind(method, hidden=(8,), epochs=3, settings=settings, random_state=0).fit(x, y > y.median())
    fitted.save(tmp_path)
    for other in (load(tmp_path), pickle.loads(pickle.dumps(fitted))):
        assert torch.equal(other.predictive(x).mean, fitted.predictive(x).mean)


def test_a_network_a_method_and_a_likelihood_of_ones_own():
    x, y = houses(60)
    own = Regressor(ds.MAP, network=torch.nn.Linear, likelihood=ds.Regression(noise=2e4), epochs=5, random_state=0).fit(
        x, y
    )
    assert isinstance(own.posterior_.member(0), torch.nn.Linear)
    assert np.allclose(own.predictive(x).aleatoric.sqrt().numpy(), 2e4)  # in the units of y, as everywhere
    told = "expected a likelihood of real targets, got Classification"
    refuses(lambda: Regressor(likelihood=ds.Classification()).fit(x, y), told, TypeError)


def test_objects_among_the_arguments_are_not_saved(tmp_path):
    x, y = houses(60)
    settings = {"settings": {"modulation": ds.Modulation.sign()}, "members": np.int64(3), "hidden": (8,)}
    fitted = Regressor("batch_ensemble", **settings, epochs=1, random_state=0).fit(x, y)
    fitted.save(tmp_path)
    loaded = load(tmp_path)
    assert np.array_equal(loaded.predict(x), fitted.predict(x))
    assert (loaded.method, loaded.members, loaded.settings) == ("batch_ensemble", 3, None)


def test_the_callers_random_numbers_are_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    Classifier(**SMALL | {"epochs": 1}).fit(*houses(30)[:1], np.arange(30) % 2)
    assert torch.equal(torch.rand(2), expected)


def fit_column(values):
    x, y = houses()
    return Regressor(**SMALL).fit(x.assign(more=values), y)


@pytest.mark.parametrize(("fit", "error"), [
    (lambda: Classifier(**SMALL).fit(houses()[0], np.ones(120)), "at least two classes, got one class"),
    (lambda: Regressor("deep_ensmble").fit(*houses()), "did you mean 'deep_ensemble'"),
    (lambda: Regressor(**SMALL).fit(houses()[0], houses()[1].reset_index(drop=True)), r"pass y.loc\[x.index\]"),
    (lambda: Regressor(validation=1.0).fit(*houses()), "expected validation of at least 0 and below 1"),
    (lambda: Regressor(conformal="cv").fit(*houses()), r'expected conformal of cv\+, got .cv.; pass "cv\+" or a share'),
    (lambda: Regressor(conformal="cv+", folds=1).fit(*houses()), "expected folds of at least 2"),
    (lambda: Regressor("mc_dropout", settings={"sample": 3}).fit(*houses()), r"of rate, .*did you mean 'samples'\?"),
    (lambda: Regressor(settings={"members": 3}).fit(*houses()), "pass members= to the estimator"),
    (lambda: Regressor(device="gpu").fit(*houses()), "expected a device that torch has here .*, got 'gpu'"),
    (lambda: Regressor(hidden=0).fit(*houses()), "expected hidden of at least 1"),
    (lambda: fit_column([[1, 2]] * 120), "expected one number or text per row in column 'more', got a list"),
    (lambda: fit_column([f"a remark of the {i}th guest" for i in range(120)]), "in column 'more', got free text such as"),
    (lambda: Regressor(validation=0.5, conformal=0.5).fit(*houses()), r"expected validation \+ conformal below 1"),
    (lambda: Regressor(epochs=0).fit(*houses()), "expected epochs of at least 1"),
    (lambda: Regressor(batch_size=0).fit(*houses()), "expected batch_size of at least 1"),
    (lambda: Regressor(**SMALL).fit(houses()[0], ["dear"] * 120), "could not convert string"),
    (lambda: Regressor(**SMALL).fit(*houses(), sample_weight=np.zeros(120)), "at least one non-zero"),
])  # fmt: skip
def test_mistakes_are_named(fit, error):
    refuses(lambda: fit(), error)


QUICK = (  # checks that fit once or twice; all of them wait for the slow suite
    "check_sample_weight_equivalence_on_dense_data", "check_methods_subset_invariance",
    "check_methods_sample_order_invariance", "check_dataframe_column_names_consistency",
    "check_estimator_sparse_array",
)  # fmt: skip


def checks(kind, names=None):
    small = kind(hidden=(8,), epochs=4, members=2, lr=1e-2)
    for estimator, check in estimator_checks_generator(small):
        name = check.func.__name__
        if names is None or name in names:
            yield pytest.param(estimator, check, id=f"{kind.__name__}-{name}")


@pytest.mark.parametrize(("estimator", "check"), [*checks(Classifier, QUICK), *checks(Regressor, QUICK)])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_quick_checks_pass(estimator, check):
    check(estimator)


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "check"), [
    *(pytest.param(each, check, id="Classifier") for each, check in estimator_checks_generator(Classifier())),
    *(pytest.param(each, check, id="Regressor") for each, check in estimator_checks_generator(Regressor())),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks_pass(estimator, check):
    """As they come, without settings; the one of other array libraries skips itself."""
    check(estimator)

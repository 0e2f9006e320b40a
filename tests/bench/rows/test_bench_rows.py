"""Data of the user's own in a task; grids and regions are where they say."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dissensus as ds
from dissensus.bench.report.html_report import write_report
from dissensus.bench.report.measures import as_square, plane_limits, region_keys, region_words
from dissensus.bench.rows.named_sets import GEOMETRIES, SETS, line_geometry
from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.rows.user_data import read_table
from dissensus.bench.run import jobs
from dissensus.bench.run.evaluate_run import with_grid
from dissensus.bench.run.jobs import bench
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task, run_config
from dissensus.core.predictive import ClassificationPredictive, RegressionPredictive
from dissensus.evaluation.evaluation import Evaluation
from refusals import refuses

pytestmark = pytest.mark.usefixtures("unreported")

OWN = """
methods = ["map"]
{likelihood}
[data]
{data}
[network]
name = "MLP"
hidden = [6]
[training]
epochs = 1
batch_size = 16
"""


def own_task(folder: Path, data: str, likelihood: str = "") -> str:
    (folder / "own.toml").write_text(OWN.format(data=data, likelihood=likelihood))
    return str(folder / "own.toml")


def rows_of(path: str, **load):
    return Run(Path("unused"), run_config(load_task(path, **load), "map", 0)).data


def write_images(folder: Path, count: int = 6, size=(8, 8), colour=(200, 30, 30), mode: str = "RGB") -> None:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(len(str(folder)))
    for i in range(count):
        noise = generator.integers(0, 50, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(noise + np.array(colour, dtype=np.uint8)).convert(mode).save(folder / f"{i}.png")


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        write_images(tmp_path / "animals" / split / "cat", 12)
        write_images(tmp_path / "animals" / split / "dog", 12, colour=(30, 200, 30))
    return tmp_path / "animals"


def test_a_folder_of_images_is_a_task(animals, tmp_path):
    write_images(animals / "ood" / "birds", colour=(0, 0, 200))
    write_images(animals / "shift" / "night" / "dog", colour=(10, 100, 10))
    path = own_task(tmp_path, 'name = "folder"\npath = "animals"\nvalidation = 4')
    data = rows_of(path)
    assert data.classes == ("cat", "dog")
    assert (data.train.x.shape, data.train.x.dtype) == ((20, 3, 8, 8), torch.uint8)
    assert data.train.y.bincount().tolist() == [10, 10]
    assert (data.train.y.diff() != 0).sum() > 3
    assert (data.train.x[data.train.y == 1, 1] >= 200).all()  # labels stayed with their images
    assert data.shift["night"].y.tolist() == [1] * 6
    results, _ = bench(load_task(path, overrides=["training.epochs=5"]), out=tmp_path / "runs")
    metrics = results.methods["map"][0].metrics
    assert metrics["accuracy"] > 0.9
    assert {"ood/birds/auroc", "shift/night/accuracy"} <= metrics.keys()


def test_images_of_different_sizes_are_resized_where_asked(animals, tmp_path, caplog):
    write_images(animals / "train" / "horse", 3, size=(12, 10))
    path = own_task(tmp_path, 'name = "folder"\npath = "animals"\nsize = 6\nchannels = 1')
    with caplog.at_level("INFO", "dissensus"):
        assert rows_of(path).train.x.shape[1:] == (1, 6, 6)
    assert "27 of 27 images in" in caplog.text
    assert "resized to 6×6" in caplog.text
    told = r"images of one size, got 8×8 in .* and 10×12 in .*horse.*; resize them by size = 8"
    refuses(lambda: rows_of(own_task(tmp_path, 'name = "folder"\npath = "animals"')), told)


@pytest.mark.parametrize(("change", "message"), [
    (lambda root: write_images(root / "test" / "horse"), "expected the classes cat, dog in .*test, got 'horse' too; add"),
    (lambda root: (root / "train" / "eel").mkdir(), "expected images .* in .*eel, got none"),
    (lambda root: write_images(root / "train" / "cat" / "deep", mode="I;16"), "expected 8 bits per channel in .*I;16"),
    (lambda root: (root / "train" / "cat" / "0.png").write_bytes(b"no"), "expected an image .*0.png"),
    (lambda root: (root / "test").rename(root / "tests"), "expected a folder for each class in .*test, got none"),
])  # fmt: skip
def test_folders_that_do_not_fit_are_one_error(animals, tmp_path, change, message):
    change(animals)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        rows_of(own_task(tmp_path, 'name = "folder"\npath = "animals"'))


def test_arrays_of_numbers_in_files_are_classes_or_values(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(3.0, 2.0, (50, 4)).astype(np.float32)
    np.savez(tmp_path / "train.npz", x=x, y=np.sort(rng.integers(0, 3, 50)))
    np.savez(tmp_path / "test.npz", x=x[:20], y=rng.integers(0, 3, 20))
    np.savez(tmp_path / "far.npz", x=x + 100)
    files = 'name = "npz"\ntrain_file = "train.npz"\ntest_file = "test.npz"\n'
    data = rows_of(own_task(tmp_path, files + 'ood = ["far.npz"]'))
    assert (data.kind, data.classes) == ("classification", ("0", "1", "2"))
    assert torch.allclose(data.standardiser(data.train.x).std(0, correction=0), torch.ones(4), atol=1e-6)
    assert data.ood["far"].x.mean() > 50
    values = rows_of(own_task(tmp_path, files, 'likelihood = "regression"'))  # whole numbers may be values
    assert (values.kind, values.train.y.dtype, values.train.y.shape[1:]) == ("regression", torch.float64, (1,))
    assert torch.allclose(values.targets(values.train.y).mean(), torch.zeros((), dtype=torch.float64), atol=1e-12)
    np.savez(tmp_path / "train.npz", x=rng.normal(size=(30, 2, 6, 6)), y=rng.integers(0, 3, 30))
    np.savez(tmp_path / "test.npz", x=rng.normal(size=(30, 2, 6, 6)), y=rng.integers(0, 3, 30))
    images = rows_of(own_task(tmp_path, files))
    seen = images.standardiser(images.train.x)
    assert torch.allclose(seen.mean((0, 2, 3)), torch.zeros(2, dtype=seen.dtype), atol=1e-9)
    assert torch.allclose(seen.std((0, 2, 3), correction=0), torch.ones(2, dtype=seen.dtype))
    np.savez(tmp_path / "test.npz", x=rng.integers(0, 256, (5, 3, 6, 6), dtype=np.uint8), y=[0] * 5)
    np.savez(tmp_path / "train.npz", x=rng.normal(size=(30, 3, 6, 6)), y=rng.integers(0, 3, 30))
    told = r"of the training set's dtype, torch.float64, in 'test.npz', got torch.uint8"
    refuses(lambda: rows_of(own_task(tmp_path, files)), told)  # they would be divided by 255


def test_a_regression_on_own_arrays_is_measured_in_its_own_units(tmp_path):
    x = np.random.default_rng(0).uniform(-1, 1, (200, 1))
    for name, rows in (("train", slice(0, 150)), ("test", slice(150, 200))):
        np.savez(tmp_path / f"{name}.npz", x=x[rows], y=1e5 + 2e4 * x[rows, 0])
    files = 'name = "npz"\ntrain_file = "train.npz"\ntest_file = "test.npz"\n'
    path = own_task(tmp_path, files, 'likelihood = "regression"')
    task = load_task(path, overrides=["training.epochs=60", "training.lr=0.02"])
    results, _ = bench(task, out=tmp_path / "runs")
    metrics = results.methods["map"][0].metrics
    assert metrics["rmse"] < 2000  # the targets' deviation is 12,000
    assert metrics["coverage90"] > 0.7


def test_any_folder_in_the_layout_of_the_uci_sets_is_read(tmp_path):
    folder = tmp_path / "mine" / "data"
    folder.mkdir(parents=True)
    rows = np.random.default_rng(0).normal(size=(20, 3))
    texts = {"data": rows, "index_features": [0, 2], "index_target": [1], "n_splits": [1]}
    texts |= {"index_train_0": range(15), "index_test_0": range(15, 20)}
    for name, values in texts.items():
        np.savetxt(folder / f"{name}.txt", np.array(values), fmt="%.18g")
    lines = 'name = "uci_regression"\nset = "mine"\nvalidation = 3'
    data = rows_of(own_task(tmp_path, lines, 'likelihood = "regression"'))
    assert (len(data.train.y), len(data.test.y)) == (12, 5)
    assert torch.allclose(data.test.x, torch.from_numpy(rows[15:, [0, 2]]), atol=1e-9)
    unknown = {"name": "uci_regression", "set": "bostonHosing"}
    told = r"data.set \(or a folder with data.txt.* of bostonHousing.*got 'bostonHosing'; did you"
    refuses(lambda: task_data(unknown, str(tmp_path)), told)


# ------------------------------------------------------------------------------------------- tables


def houses(rows: int = 120, seed: int = 0):
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(seed)
    area, town = rng.uniform(40, 200, rows), rng.choice(["Bath", "York"], rows)
    price = 1000 * area + 50_000 * (town == "Bath") + rng.normal(0, 2000, rows)
    area[::10] = np.nan
    kind = np.where(price > np.median(price), "dear", "cheap")
    return pandas.DataFrame({"area": area, "town": town, "price": price, "kind": kind})


def test_a_table_is_a_task_in_its_own_units(tmp_path):
    houses().to_csv(tmp_path / "houses.csv")  # with pandas' index as a first column
    houses(30, seed=1).to_parquet(tmp_path / "later.parquet")
    lines = 'name = "table"\nfile = "houses.csv"\ntarget = "price"\ndrop = ["kind"]\nshift = ["later.parquet"]'
    path = own_task(tmp_path, lines, 'likelihood = "regression"')
    data = rows_of(path)
    assert data.kind == "regression"
    assert data.train.x.shape[1] == 4  # area, whether it is missing, and two towns; no index
    assert data.train.y.mean() > 50_000
    sets = ["training.epochs=60", "training.lr=0.02"]
    results, _ = bench(load_task(path, overrides=sets), out=tmp_path / "runs")
    metrics = results.methods["map"][0].metrics
    assert metrics["rmse"] < 35_000  # the price's deviation is 50,000, and a tenth of the areas is missing
    assert "shift/later/rmse" in metrics


def test_nothing_of_the_test_rows_of_a_table_is_measured(tmp_path):
    frame = houses()
    lines = 'name = "table"\nfile = "houses.csv"\ntarget = "price"\ndrop = ["kind"]\nvalidation = 0'
    path = own_task(tmp_path, lines, 'likelihood = "regression"')

    frame.to_csv(tmp_path / "houses.csv", index=False)
    data = rows_of(path, overrides=["training.keep_best=false"])
    assert (len(data.train.y), len(data.test.y)) == (96, 24)
    # Standardised by the training rows: their mean is 0, that of all rows is not.
    assert abs(data.train.x[:, 0].mean()) < 1e-9
    assert abs(data.test.x[:, 0].mean()) > 1e-3
    assert torch.allclose(data.targets.mean, data.train.y.mean(0))
    # The rows held out may be anything: what is trained on stays as it is.
    frame.head(96).to_csv(tmp_path / "first.csv", index=False)
    files = lines.replace("houses.csv", "first.csv") + '\ntest_file = "last.csv"'

    def scaled(factor):
        last = frame.tail(24).assign(area=frame["area"].tail(24) * factor, town="Ely")
        last.to_csv(tmp_path / "last.csv", index=False)
        path = own_task(tmp_path, files, 'likelihood = "regression"')
        return rows_of(path, overrides=["training.keep_best=false"])

    first, second = scaled(1), scaled(1000)
    assert torch.equal(first.train.x, second.train.x)
    assert second.test.x[:, 0].max() > 100
    assert (second.test.x[:, 2:] == 0).all()  # a town that no training row has


def test_classes_of_a_table_are_its_words_or_numbers(tmp_path):
    frame = houses()
    frame.to_parquet(tmp_path / "houses.parquet")
    lines = 'name = "table"\nfile = "houses.parquet"\ntarget = "kind"\ndrop = ["price"]'
    data = rows_of(own_task(tmp_path, lines))
    assert (data.kind, data.classes) == ("classification", ("cheap", "dear"))
    assert data.train.y.dtype == torch.int64
    frame.assign(kind=np.where(frame["kind"] == "dear", 7, 3)).to_parquet(tmp_path / "houses.parquet")
    assert rows_of(own_task(tmp_path, lines)).classes == ("3", "7")


@pytest.mark.parametrize(("change", "lines", "message"), [
    ({}, 'target = "prise"', r"the target, a column of houses.csv of area, town, price, kind, got 'prise'; did you"),
    ({}, 'target = "price"', 'classes in price of houses.csv, got float64 numbers; write likelihood = "regression"'),
    ({"kind": [None, *"ab" * 59, "a"]}, 'target = "kind"', "expected kind in every row of houses.csv, got 1 without"),
    ({"kind": [*"ab" * 59, *"cd"]}, 'target = "kind"\ntest_file = "test.csv"', r"the training classes \(a, b, c, d\)"),
    ({}, 'target = "kind"\ndrop = ["prices"]', "expected a column to drop of .*got 'prices'; did you mean 'price'"),
    ({}, 'target = "kind"\ntest_file = "none.csv"', "expected 'none.csv' at"),
    ({}, 'target = "kind"\ntest_file = "own.toml"', "expected a table's file, by its suffix, of .csv, .parquet"),
])  # fmt: skip
def test_tables_that_do_not_fit_are_one_error(tmp_path, change, lines, message):
    houses().assign(**change).to_csv(tmp_path / "houses.csv", index=False)
    houses().to_csv(tmp_path / "test.csv", index=False)  # classes cheap and dear
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        rows_of(own_task(tmp_path, f'name = "table"\nfile = "houses.csv"\n{lines}'))


def test_only_columns_that_number_rows_are_left_out_of_a_csv(tmp_path):
    def read(text):
        (tmp_path / "t.csv").write_text(text)
        return read_table(tmp_path / "t.csv")

    assert list(read(",,a,b\n7,0,1,2\n9,1,3,4\n")) == ["a", "b"]
    assert list(read("a,b,\n1,2,3\n4,5,6\n")) == ["a", "b", "Unnamed: 2"]
    assert list(read(",a\n1.5,2\n2.5,3\n")) == ["Unnamed: 0", "a"]
    assert list(read(",a\n1,2\n1,3\n")) == ["Unnamed: 0", "a"]
    for shifted in ("y,a,b\n1,2,3,\n4,5,6,\n", "y,a\nr1,2,3\nr2,4,5\n"):  # y would be what a is
        refuses(lambda text=shifted: read(text), r"a name for each column of .*t.csv, got one too few")


def test_without_pandas_a_table_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    monkeypatch.setitem(sys.modules, "pandas", None)
    path = own_task(tmp_path, 'name = "table"\nfile = "t.csv"\ntarget = "b"')
    refuses(lambda: rows_of(path), r'^a DataFrame needs pandas: pip install "dissensus\[tables\]"$', ImportError)


# --------------------------------------------------------------------------------------------------- grids and regions
NOTHING = Evaluation("regression", {}, {}, "total")


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_geometry_is_of_a_known_set_and_its_data_lie_in_the_region_at_the_data(name):
    data = task_data({"name": name, "validation": 0})
    found = GEOMETRIES[name](data.train.x)
    assert found.inputs.shape[1] == data.train.x.shape[1]
    assert SETS[name].kind == data.kind
    regions = torch.stack(list(found.regions.values()))
    assert regions.sum(0).max() == 1, "regions overlap"
    assert regions.any(1).all(), "an empty region"
    # the grid point nearest to a training row is in no region of absence
    nearest = torch.cdist(found.training_positions.double(), found.positions.double()).argmin(1)
    absent = [where for region, where in found.regions.items() if region != "at_data"]
    assert all((~where[nearest]).double().mean() > 0.95 for where in absent), "training rows off the data"


def test_regions_of_a_line_are_the_intervals_and_what_is_left_of_it():
    x = torch.zeros(3, 1)
    found = line_geometry(x, window=(-2.0, 2.0), intervals=((-1.0, -0.5), (0.5, 1.0)), points=401)
    for i, z in enumerate(found.positions[:, 0].tolist()):
        at = -1.0 <= z <= -0.5 or 0.5 <= z <= 1.0
        outside = z < -1.0 or z > 1.0
        assert bool(found.regions["at_data"][i]) == at
        assert bool(found.regions["outside"][i]) == outside
        assert bool(found.regions["between"][i]) == (not at and not outside)
    assert "between" not in line_geometry(x, window=(-2.0, 2.0), intervals=((-1.0, 1.0),)).regions


def test_off_the_data_is_far_from_every_training_input():
    x, _ = ds.data.five_blobs(5, scale=0.4)
    found = GEOMETRIES["five_blobs"](x)
    for row in range(0, len(found.positions), 97):
        distance = min(math.dist(found.positions[row].tolist(), point) for point in x.tolist())
        assert bool(found.regions["off_data"][row]) == (distance > 1.0)
        assert bool(found.regions["at_data"][row]) == (distance < 0.5)


def test_a_grid_over_features_is_asked_at_the_features_of_its_positions():
    x, _ = ds.data.three_clusters()
    found = GEOMETRIES["three_clusters"](x)
    torch.testing.assert_close(found.inputs, ds.data.quadratic_features(found.positions))
    torch.testing.assert_close(ds.data.quadratic_features(found.training_positions), x)
    assert "digits" not in GEOMETRIES


def test_numbers_of_a_region_are_means_over_it():
    found = line_geometry(torch.zeros(1, 1), window=(0.0, 3.0), intervals=((0.0, 1.0), (2.0, 3.0)), points=31)
    means = torch.randn(4, 31, 1, dtype=torch.float64)
    evaluation = with_grid(NOTHING, RegressionPredictive(means, torch.ones_like(means)), found, torch.zeros(1, 1))
    between = [i for i in range(31) if 1.0 < float(found.positions[i]) < 2.0]
    expected = sum(float(means[:, i, 0].std(correction=0)) for i in between) / len(between)
    assert evaluation.metrics["region/between/sd"] == pytest.approx(expected, abs=1e-12)
    assert set(region_keys(evaluation)) == {"region/between/sd", "region/at_data/sd"}
    assert evaluation.arrays["grid/members"].shape == (4, 31)

    x, y = ds.data.five_blobs(4, scale=0.4)
    squares = GEOMETRIES["five_blobs"](x)
    logits = torch.randn(3, len(squares.positions), 5, dtype=torch.float64).log_softmax(2)
    evaluation = with_grid(NOTHING, ClassificationPredictive(logits), squares, y)
    mean = logits.exp().mean(0)
    entropy = -(mean * mean.log()).sum(1)
    expected = float(entropy[squares.regions["off_data"]].mean())
    assert evaluation.metrics["region/off_data/total"] == pytest.approx(expected, abs=1e-12)
    assert region_words("region/off_data/total") == ("off the data", "total uncertainty")


@pytest.mark.parametrize("shape", [(4, 30, 1), (4, 31)], ids=["fewer points", "no outputs"])
def test_predictions_of_another_grid_are_one_error(shape):
    found = line_geometry(torch.zeros(1, 1), window=(0.0, 3.0), intervals=((0.0, 1.0), (2.0, 3.0)), points=31)
    means = torch.randn(*shape)
    elsewhere = RegressionPredictive(means, torch.ones_like(means))
    told = r"expected predictions at all grid points, got Regression.*--again"
    refuses(lambda: with_grid(NOTHING, elsewhere, found, torch.zeros(1, 1)), told)


def test_a_square_is_drawn_with_the_first_input_to_the_right():
    x, _ = ds.data.five_blobs(4)
    found = GEOMETRIES["five_blobs"](x)
    first, second = as_square(found.positions[:, 0]), as_square(found.positions[:, 1])
    assert torch.equal(first[0], first[-1])  # the same in every row, growing to the right
    assert (first[0].diff() > 0).all()
    assert (second[:, 0].diff() > 0).all()
    assert plane_limits(found.positions) == (-7.0, 7.0, -7.0, 7.0)


def test_a_run_measures_its_members_on_the_grid(undrawn, tmp_path):
    task = load_task("toy-regression-1d", size="smoke", overrides=["data.standardise=training"])
    results, _ = jobs.bench(task, methods=["deep_ensemble"], out=tmp_path)
    run = Run.open(tmp_path / "deep_ensemble-seed0")
    stored, found = run.measure(), GEOMETRIES["x_sin_x"](run.data.train.x)
    predictive = ds.load(run.folder / "posterior").predict(run.data.standardiser(found.inputs))
    sd = predictive.epistemic[:, 0].sqrt()
    for name, where in found.regions.items():
        assert stored.metrics[f"region/{name}/sd"] == pytest.approx(float(sd[where].mean()), rel=1e-5)
    torch.testing.assert_close(stored.arrays["grid/mean"], predictive.mean[:, 0], rtol=1e-5, atol=1e-6)
    write_report(results, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Where is it certain?" in page
    assert "Standard deviation between the data" in page

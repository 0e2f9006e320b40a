"""Arguments named in a task and made from its training rows: lengthscales, also after saving and loading."""

import json

import pytest
import torch

import dissensus as ds
from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.run import jobs
from dissensus.bench.run.build import optimizer, posterior
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task, run_config
from dissensus.bench.task.objects import build_objects
from dissensus.numerics.lengthscales import Lengthscales
from small_runs import trained

pytestmark = pytest.mark.usefixtures("unreported")


def scales(method: str, *overrides: str) -> Lengthscales | None:
    config = run_config(load_task("toy-classification", size="smoke", overrides=overrides), method, 0)
    return posterior(config, task_data(config.data)).lengthscales


def test_lengthscales_are_those_of_the_standardised_training_rows():
    overrides = ["method.forde.lengthscales=pca", "method.forde.lengthscales.alpha=0.4", "data.standardise=training"]
    config = run_config(load_task("toy-classification", size="smoke", overrides=overrides), "forde", 0)
    data = task_data(config.data)
    x = data.standardiser(data.train.x)
    for form in ("poster", "paper"):
        found = scales("forde", *overrides, f"method.forde.lengthscales.form={form}")
        expected = ds.pca_lengthscales(x, 0.4, form=form)
        torch.testing.assert_close(found.precision, expected.precision)
        torch.testing.assert_close(found.eigenvectors.abs(), expected.eigenvectors.abs())
    covariance = torch.cov(x.T.double())
    eigenvalues = torch.linalg.eigvalsh(covariance).flip(0)
    poster = scales("forde", *overrides)
    torch.testing.assert_close(poster.precision.double(), 0.6 + 0.4 * eigenvalues, rtol=1e-5, atol=0)


def test_alpha_zero_and_identity_are_no_lengthscales():
    assert scales("forde") is None
    assert scales("forde", "method.forde.lengthscales=identity") is None
    assert scales("forde", "method.forde.lengthscales=pca", "method.forde.lengthscales.alpha=0.0") is None


def test_other_methods_and_wrong_values_are_errors():
    with pytest.raises(ValueError, match=r"a key of \[method.deep_ensemble\]"):
        load_task("toy-classification", size="smoke", overrides=["method.deep_ensemble.alpha=0.1"])
    with pytest.raises(ValueError, match="expected lengthscales of identity, pca, got 'pcs'; did you mean 'pca'"):
        build_objects({"lengthscales": "pcs"})
    with pytest.raises(ValueError, match=r"expected settings that need no data .inputs. here, got lengthscales pca"):
        build_objects({"lengthscales": "pca"})
    assert build_objects({"members": 3}) == {"members": 3}


@pytest.mark.parametrize(
    "written", ["{pca = [0.4]}", "{pca = 0.4}", "{pca = {alpha = 0.4}}", '{name = "pca", alpha = 0.4}']
)
def test_every_way_to_write_lengthscales_gives_the_same(written):
    found = scales("forde", f"method.forde.lengthscales={written}")
    expected = scales("forde", "method.forde.lengthscales=pca", "method.forde.lengthscales.alpha=0.4")
    assert torch.equal(found.precision, expected.precision)
    assert torch.equal(found.eigenvectors, expected.eigenvectors)


def test_lengthscales_of_a_run_survive_saving_and_loading(tmp_path):
    task = load_task("lengthscales", size="smoke")
    run = trained(Run(tmp_path / "run", run_config(task, "forde-alpha40", 0)))
    x = run.data.standardiser(run.data.train.x)
    expected, found = ds.pca_lengthscales(x, 0.4), run.posterior().lengthscales
    torch.testing.assert_close(found.precision, expected.precision, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        found.eigenvectors @ torch.diag(found.precision) @ found.eigenvectors.T,
        expected.eigenvectors @ torch.diag(expected.precision) @ expected.eigenvectors.T,
        rtol=1e-3,
        atol=1e-4,
    )
    again = ds.load(run.folder / "posterior")
    ds.save(again, tmp_path / "copy")
    assert torch.equal(ds.load(tmp_path / "copy").lengthscales.eigenvectors, again.lengthscales.eigenvectors)


def test_a_first_layer_prior_is_made_from_the_training_rows_and_replaces_weight_decay():
    config = run_config(load_task("lengthscales", size="smoke"), "deep_ensemble-empcov", 0)
    data = task_data(config.data)
    made = posterior(config, data)
    x = data.standardiser(data.train.x).flatten(1).double()
    covariance = torch.cov(x.T)
    expected = torch.linalg.inv(covariance + 1e-4 * torch.eye(len(covariance), dtype=torch.float64))
    root = made.prior.root.double()
    torch.testing.assert_close((root @ root.T) * 1e-4, expected * 1e-4, rtol=1e-3, atol=1e-3)
    assert made.data_size == len(data.train.y)
    used, _ = optimizer(made, config.training)
    first = made.particles.own_parameters()["network.layers.0.weight"]
    decays = {id(p): group["weight_decay"] for group in used.param_groups for p in group["params"]}
    assert decays.pop(id(first)) == 0
    assert set(decays.values()) == {config.training["weight_decay"]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "{alpha = 1.0}",
            r"expected values that prior empcov\(layer, .* takes, got .*missing a required argument: 'layer'",
        ),
        ('{layer = "layers.0", alfa = 1}', r"empcov\(layer, \*, alpha.*unexpected keyword argument 'alfa'"),
        ('{layer = "layers.0", data_size = 1}', "unexpected keyword argument 'data_size'"),
    ],
)
def test_a_first_layer_prior_that_is_written_wrongly_is_an_error(value, message):
    with pytest.raises(ValueError, match=message):
        run_config(
            load_task("lengthscales", size="smoke", overrides=[f"method.map.prior={{empcov = {value}}}"]), "map", 0
        )


def test_repulsion_by_the_number_of_data_is_told_it():
    config = run_config(load_task("forde-variants", size="smoke"), "forde-1_N", 0)
    made = posterior(config, task_data(config.data))
    assert made.strength() == 1 / 120


def test_repulsion_per_batch_is_told_the_size_of_a_batch():
    config = run_config(load_task("forde-variants", size="smoke"), "forde", 0)
    made = posterior(config, task_data(config.data))
    assert made.strength() == 1 / min(config.training["batch_size"], 120)


def test_methods_that_train_together_have_one_prior(tmp_path):
    prior = 'prior={empcov = {layer = "layers.0", rest = 2.0}}'
    task = load_task(
        "cubic", size="smoke", overrides=[f"method.swag.{prior}", f"method.swa.{prior}", "training.together=true"]
    )
    jobs.bench(task, methods=["swag", "swa"], out=tmp_path / "runs")
    configs = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/posterior/config.json")]
    assert [config["arguments"]["prior"]["rest"]["std"] for config in configs] == [2.0, 2.0]


@pytest.mark.parametrize(("repulsion", "strength"), [("1/B", 1 / 40), ("1/N", 1 / 200), ("0.25", 0.25)])
def test_a_task_sets_the_repulsion_by_features(repulsion, strength):
    overrides = [f"method.feature_rde.repulsion={repulsion}", "training.batch_size=40"]
    config = run_config(load_task("toy-classification", size="smoke", overrides=overrides), "feature_rde", 0)
    data = task_data(config.data)
    assert len(data.train.y) == 200
    assert posterior(config, data).strength() == strength

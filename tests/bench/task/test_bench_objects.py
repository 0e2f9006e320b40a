"""Objects and arguments that a task names: every form of writing, the nearest name in errors, lengthscales of training rows."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import dissensus as ds
from dissensus.bench.rows.task_rows import task_data
from dissensus.bench.run import jobs
from dissensus.bench.run.build import likelihood, network, optimizer, posterior
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task, merge_settings, run_config
from dissensus.bench.task.objects import OBJECTS, build_objects, parse_object, setting_value
from dissensus.methods import METHODS
from dissensus.numerics.lengthscales import Lengthscales
from refusals import refuses
from small_runs import trained

pytestmark = pytest.mark.usefixtures("unreported")

TASK = """
methods = ["svgd"]
{top}
[data]
name = "{data}"
[network]
name = "MLP"
hidden = [4]
[method.svgd]
members = 2
{method}
[training]
epochs = 1
"""


@pytest.fixture
def config(tmp_path):
    def read(method="", *overrides, top="", data="two_moons", name="svgd"):
        path = tmp_path / "mine.toml"
        path.write_text(TASK.format(method=method, top=top, data=data))
        return run_config(load_task(str(path), overrides=overrides), name, 0)

    return read


def built(config):
    return posterior(config, task_data(config.data))


@pytest.mark.parametrize(("text", "expected"), [
    ('annealing = "cyclic"', ds.Annealing("cyclic")),
    ("annealing = {cyclic = {cycles = 4}}", ds.Annealing("cyclic", cycles=4)),
    ("annealing = {cyclic = 4}", ds.Annealing("cyclic", cycles=4)),
    ("annealing = {cyclic = []}", ds.Annealing("cyclic")),
    ('annealing = {name = "linear", steps = 7}', ds.Annealing("linear", steps=7)),
    ("annealing = {hyper = {weight = 2.0}}", ds.Annealing("hyper", weight=2.0)),
    ("annealing = {constant = 0.5}", ds.Annealing(weight=0.5)),
])  # fmt: skip
def test_annealing_is_written_by_name(config, text, expected):
    assert built(config(text)).annealing == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("{ normal = [1.0, 0.5] }", ds.Modulation.normal(1.0, 0.5)),
    ('"sign"', ds.Modulation.sign()),
    ("{ between = 0.3 }", ds.Modulation.between(0.3)),
    ("{ bernoulli = { keep = 0.8 } }", ds.Modulation.bernoulli(0.8)),
])  # fmt: skip
def test_a_modulation_is_written_by_name(config, tmp_path, text, expected):
    path = tmp_path / "embedded.toml"
    method = f"modulation = {text}\nregime = 1.5"
    path.write_text(TASK.replace("svgd", "batch_ensemble").format(method=method, top="", data="two_moons"))
    made = built(run_config(load_task(str(path)), "batch_ensemble", 0))
    assert (made.modulation, made.gamma, made.particles.members) == (expected, 1.5, 2)


def test_a_forgotten_modulation_says_which_suits_what(tmp_path):
    path = tmp_path / "embedded.toml"
    path.write_text(TASK.replace("svgd", "batch_ensemble").format(method="", top="", data="two_moons"))
    refuses(lambda: built(run_config(load_task(str(path)), "batch_ensemble", 0)), "independent members", TypeError)


def test_an_object_is_named_on_the_command_line(config):
    assert built(config("", "method.svgd.annealing=cyclic")).annealing == ds.Annealing("cyclic")
    assert built(config("", "method.annealing={cyclic = 3}")).annealing == ds.Annealing("cyclic", cycles=3)
    one = config("annealing = {cyclic = 3}", "method.svgd.annealing.weight=2.0")
    assert built(one).annealing == ds.Annealing("cyclic", cycles=3, weight=2.0)
    assert isinstance(likelihood(config("", "likelihood=regression")), ds.Regression)


@pytest.mark.parametrize(("top", "expected", "noise"), [
    ('likelihood = "regression"', ds.Regression, "learned"),
    ("likelihood = {regression = {noise = 0.1}}", ds.Regression, 0.1),
    ("likelihood = {regression = 0.1}", ds.Regression, 0.1),
    ('likelihood = {name = "Regression", noise = 0.1}', ds.Regression, 0.1),
    ('likelihood = "heteroscedastic_regression"', ds.HeteroscedasticRegression, None),
    ('likelihood = {name = "HeteroscedasticRegression"}', ds.HeteroscedasticRegression, None),
])  # fmt: skip
def test_a_likelihood_is_written_by_name_and_says_how_many_outputs_there_are(config, top, expected, noise):
    found = config(top=top, data="cubic")
    made = likelihood(found)
    assert type(made) is expected
    assert getattr(made, "noise", None) == noise
    outputs = network(found, task_data(found.data)).config["outputs"]
    assert outputs == (2 if expected is ds.HeteroscedasticRegression else 1)


def test_one_argument_of_a_likelihood_is_set_whatever_its_form(config):
    for top in ('likelihood = "regression"', "likelihood = {regression = 0.1}", 'likelihood = {name = "Regression"}'):
        found = config("", "likelihood.noise=0.3", top=top, data="cubic")
        assert likelihood(found).noise == 0.3


@pytest.mark.parametrize(
    ("method", "top", "message"),
    [
        ('annealing = "cyclc"', "", "expected annealing of constant, linear, hyper, cyclic, got 'cyclc'; did you mean 'cycl"),
        ("annealing = {cyclc = 4}", "", "did you mean 'cyclic'?"),
        ("annealing = {cyclic = {cycle = 4}}", "", r"annealing cyclic\(cycles=5, .* unexpected keyword argument 'cycle'"),
        ("annealing = {linear = {cycles = 4}}", "", r"annealing linear\(\*, steps=None, .* argument 'cycles'"),
        ("annealing = {linear = 4}", "", r"annealing linear\(\*, steps=None.*too many positional"),
        ("annealing = {cyclic = [1, 2]}", "", "too many positional"),
        ("annealing = {cyclic = 1, linear = 2}", "", "expected annealing by one name, got {'cyclic': 1, 'linear': 2}; write"),
        ("annealing = 3", "", "expected annealing by one name, got 3; write"),
        ("annealing = {cyclic = 0}", "", "expected cycles of at least 1, got 0"),
        ('annealing = {cyclic = "four"}', "", "annealing cyclic.* takes, got {'cycles': 'four'}"),
        ("", 'likelihood = "regresion"', "expected likelihood of .* got 'regresion'; did you mean 'regression'?"),
        ("", "likelihood = {noise = 0.1}", "expected likelihood of .* got 'noise'"),
        ("", "likelihood = {regression = {noise = -1}}", "expected noise above 0"),
        ("", "likelihood = {regression = {nois = 1}}", r"regression\(noise=.*unexpected keyword argument 'nois'"),
        ("", "likelihood = 3", "expected likelihood by one name, got 3"),
    ],
)  # fmt: skip
def test_what_is_written_wrongly_is_one_clear_error(config, method, top, message):
    with pytest.raises(ValueError, match=message) as error:
        config(method, top=top)
    assert "\n" not in str(error.value)


def test_a_method_without_the_keyword_says_so(config):
    refuses(lambda: config("", "method.forde.annealing=cyclic"), re.escape("expected a key of [method.forde]"))


def test_the_config_of_a_run_keeps_what_was_written_and_is_the_same_run_again(config, tmp_path):
    found = config("annealing = {cyclic = {cycles = 4}}", top='likelihood = "classification"')
    assert found.settings["annealing"] == {"cyclic": {"cycles": 4}}
    assert found.likelihood == "classification"
    json.dumps(found.table())
    run = Run(tmp_path / "run", found)
    run.begin()
    assert Run.open(run.folder).config == found
    run.begin()
    other = Run(run.folder, config("annealing = {cyclic = {cycles = 5}}", top='likelihood = "classification"'))
    refuses(lambda: other.begin(), r"settings.annealing.cyclic.cycles = 5, got one with 4")


def test_another_name_takes_the_place_of_an_object_and_the_same_one_is_merged():
    base = {"annealing": {"cyclic": {"cycles": 4}}}
    assert merge_settings(base, {"annealing": {"linear": {}}}) == {"annealing": {"linear": {}}}
    merged = merge_settings(base, {"annealing": {"cyclic": {"weight": 2}}})
    assert merged == {"annealing": {"cyclic": {"cycles": 4, "weight": 2}}}
    named = {"likelihood": {"name": "Regression", "noise": 0.1}}
    assert merge_settings(named, {"likelihood": {"noise": 0.2}}) == {"likelihood": {"name": "Regression", "noise": 0.2}}
    assert merge_settings(named, {"likelihood": {"regression": 1}}) == {"likelihood": {"regression": 1}}


def test_a_variant_may_say_only_what_is_different_in_an_object(config):
    text = 'annealing = {name = "cyclic", cycles = 4}\n[method.svgd-heavy]\nannealing = {weight = 2.0}'
    assert built(config(text, name="svgd-heavy")).annealing == ds.Annealing("cyclic", cycles=4, weight=2.0)


def test_a_sweep_finds_its_setting_inside_an_object():
    assert setting_value({"alpha": 0.1}, "alpha") == 0.1
    assert setting_value({"lengthscales": {"pca": [0.4]}, "members": 2}, "alpha") == 0.4
    assert setting_value({"lengthscales": "pca"}, "alpha") is None


def test_the_page_shows_forms_that_work(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "reference" / "tasks.md").read_text()
    (block,) = [text for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if text.startswith("likelihood")]
    names = re.findall(r"\[method.(\w+)\]", block)
    head = f'methods = {json.dumps(names)}\ndata.name = "cubic"\nnetwork.name = "MLP"\ntraining.epochs = 1\n'
    (tmp_path / "mine.toml").write_text(head + block)
    task = load_task(str(tmp_path / "mine.toml"))
    made = {name: built(run_config(task, name, 0)) for name in names}
    assert made["svgd"].annealing == made["weight_rde"].annealing == ds.Annealing("cyclic", cycles=4)
    assert made["forde"].lengthscales is not None
    assert isinstance(made["deep_ensemble"].prior, ds.EmpCov)
    assert all(isinstance(each.likelihood, ds.Regression) for each in made.values())


@dataclass
class Modulation:
    mean: float
    std: float

    @classmethod
    def normal(cls, mean, std):
        return cls(mean, std)

    @classmethod
    def sign(cls, p=0.5):
        return cls(p, p)


class Modulated(ds.NetworksPosterior):
    """A method with an object that the table does not have yet."""

    name = "modulated"

    def __init__(self, module, *, modulation, likelihood=None):
        super().__init__(module, likelihood=likelihood)
        self.modulation = modulation


def test_a_new_family_joins_by_one_line(config, monkeypatch):
    monkeypatch.setitem(METHODS, "modulated", Modulated)
    monkeypatch.setitem(OBJECTS, "modulation", {"normal": Modulation.normal, "sign": Modulation.sign})
    for text in ("{normal = [1.0, 0.5]}", "{normal = {mean = 1.0, std = 0.5}}"):
        found = config("", f"method.modulated.modulation={text}", name="modulated")
        assert built(found).modulation == Modulation(1.0, 0.5)
    assert built(config("", "method.modulated.modulation=sign", name="modulated")).modulation == Modulation(0.5, 0.5)
    with pytest.raises(ValueError, match=r"expected modulation of normal, sign, got 'signs'; did you mean 'sign'?"):
        config("", "method.modulated.modulation=signs", name="modulated")
    words = r"expected values that modulation normal\(mean, std\) takes, got .*missing a required argument: 'std'"
    refuses(lambda: config("", "method.modulated.modulation={normal = 1.0}", name="modulated"), words)


def test_every_constructor_of_the_table_has_arguments_that_can_be_written():
    for keyword, family in OBJECTS.items():
        for name in family:
            assert parse_object(keyword, {"name": name}).name == name


# ----------------------------------------------------------------------------------- arguments made from training rows


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
    metric, wanted = (s.eigenvectors @ torch.diag(s.precision) @ s.eigenvectors.T for s in (found, expected))
    torch.testing.assert_close(metric, wanted, rtol=1e-3, atol=1e-4)
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


@pytest.mark.parametrize(("value", "message"), [
    (
        "{alpha = 1.0}",
        r"expected values that prior empcov\(layer, .* takes, got .*missing a required argument: 'layer'",
    ),
    ('{layer = "layers.0", alfa = 1}', r"empcov\(layer, \*, alpha.*unexpected keyword argument 'alfa'"),
    ('{layer = "layers.0", data_size = 1}', "unexpected keyword argument 'data_size'"),
])  # fmt: skip
def test_a_first_layer_prior_that_is_written_wrongly_is_an_error(value, message):
    overrides = [f"method.map.prior={{empcov = {value}}}"]
    refuses(lambda: run_config(load_task("lengthscales", size="smoke", overrides=overrides), "map", 0), message)


def test_repulsion_by_the_number_of_data_is_told_it():
    config = run_config(load_task("forde-variants", size="smoke"), "forde-1_N", 0)
    assert posterior(config, task_data(config.data)).strength() == 1 / 120


def test_repulsion_per_batch_is_told_the_size_of_a_batch():
    config = run_config(load_task("forde-variants", size="smoke"), "forde", 0)
    made = posterior(config, task_data(config.data))
    assert made.strength() == 1 / min(config.training["batch_size"], 120)


def test_methods_that_train_together_have_one_prior(tmp_path):
    prior = 'prior={empcov = {layer = "layers.0", rest = 2.0}}'
    overrides = [f"method.swag.{prior}", f"method.swa.{prior}", "training.together=true"]
    task = load_task("cubic", size="smoke", overrides=overrides)
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

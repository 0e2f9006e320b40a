"""Methods, networks and data of the user's own in a task, as somebody new would write them."""

import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.bench.cli import list_command
from dissensus.bench.report.html_report import write_report
from dissensus.bench.run.convert import convert
from dissensus.bench.run.jobs import bench, report_runs
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task, run_config
from dissensus.bench.task.objects import network_maker
from dissensus.bench.user_code import code_digest, import_object
from refusals import refuses

NUMBERS = itertools.count()  # modules of one process have different names; folders of tests may have had the same

pytestmark = pytest.mark.usefixtures("unreported")

MINE = '''
import torch
import dissensus as ds


class DeepEnsemble(ds.StackedPosterior):
    """Members pulled towards zero."""

    name = "deep_ensemble"

    def __init__(self, networks, *, strength=0.1, **keywords):
        super().__init__(networks, **keywords)
        self.strength = strength

    def member_loss(self, params, buffers, batch):
        loss, z, buffers = super().member_loss(params, buffers, batch)
        return loss + self.strength * sum(p.square().sum() for p in params.values()), z, buffers

    def config(self):
        return {**super().config(), "strength": self.strength}


def make_data(rows=60, far=5.0):
    x = torch.randn(2 * rows, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    order = y[:rows].argsort()  # sorted by class
    return {
        "train": (x[:rows][order], y[:rows][order]),
        "test": (x[rows:], y[rows:]),
        "ood": {"far": x[:20] + far},
        "shift": {"moved": (x[rows:] + 0.1, y[rows:])},
    }
'''

TASK = """
methods = ["deep_ensemble", "{0}:DeepEnsemble"]
[data]
name = "{0}:make_data"
far = 4.0
validation = 10
[network]
name = "MLP"
hidden = [6]
[method."{0}:DeepEnsemble"]
members = 2
strength = 0.5
[method.deep_ensemble]
members = 2
[training]
epochs = 1
batch_size = 20
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module beside a task, task.toml; the current folder is another one."""
    name = f"mine_{next(NUMBERS)}"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / f"{name}.py").write_text(MINE)
    (tmp_path / "task.toml").write_text(TASK.format(name))
    return name


def edited(module: str, path: Path, old: str, new: str) -> None:
    """The file with one text in place of another, as a new process would import it."""
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    sys.modules.pop(module)


def test_an_own_method_and_own_data_are_benched_beside_the_librarys(mine, tmp_path):
    results, _ = bench(load_task(str(tmp_path / "task.toml")), out=tmp_path / "runs")
    ours = f"{mine}:DeepEnsemble"  # no column of its own for a name that the library has, too
    assert list(results.methods) == ["deep_ensemble", ours]
    metrics = results.methods[ours][0].metrics
    assert {"accuracy", "ood/far/auroc", "shift/moved/accuracy"} <= metrics.keys()
    assert metrics["nll"] != results.methods["deep_ensemble"][0].metrics["nll"]
    folder = tmp_path / "runs" / f"{mine}.DeepEnsemble-seed0"
    posterior = Run.open(folder).posterior()  # from another folder than the task's
    assert (type(posterior).__name__, posterior.strength, posterior.particles.members) == ("DeepEnsemble", 0.5, 2)
    assert type(posterior) is not ds.DeepEnsemble
    sys.modules.pop(mine)
    again, _ = report_runs([str(tmp_path / "runs")], tmp_path / "page")
    assert again.methods.keys() == results.methods.keys()
    assert mine not in sys.modules  # a report runs nobody's code


def test_own_tasks_in_the_current_folder_are_listed_and_nothing_is_imported(mine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "broken.toml").write_text("methods = [")
    list_command()
    said = capsys.readouterr().out
    assert "task.toml" in said
    assert re.search(rf"{mine}:DeepEnsemble\s+│ your own, named in task.toml", said)
    assert re.search(rf"{mine}:make_data\s+│ your own function", said)
    assert "pyproject" not in said
    assert "broken" not in said
    assert mine not in sys.modules


@pytest.mark.slow
def test_processes_find_own_modules_too(mine, tmp_path):
    task = load_task(str(tmp_path / "task.toml"))
    apart, _ = bench(task, out=tmp_path / "a", jobs=2)
    here, _ = bench(task, out=tmp_path / "b")
    for name, (evaluation,) in here.methods.items():
        assert evaluation.metrics["nll"] == pytest.approx(apart.methods[name][0].metrics["nll"], abs=1e-6)


def test_rows_of_ones_own_are_shuffled_once_and_standardised_by_training_rows(mine, tmp_path):
    config = run_config(load_task(str(tmp_path / "task.toml")), "deep_ensemble", 0)
    data = Run(tmp_path / "run", config).data
    assert (len(data.train.y), len(data.validation.y), len(data.test.y)) == (50, 10, 60)
    assert (data.train.y.diff() != 0).sum() > 15  # in the order of the classes there would be one change
    assert torch.allclose(data.standardiser(data.train.x).mean(0), torch.zeros(2), atol=1e-6)
    assert torch.allclose(data.standardiser.mean, data.train.x.double().mean(0))
    assert data.ood["far"].x.mean() > 3
    assert data.classes == ("0", "1")


@pytest.mark.parametrize(("old", "new", "message"), [
    ('"train":', '"training":', r"a dict with .train. and .test., each \(x, y\), from .*make_data, got .*'training'\]"),
    ('"ood":', '"odd":', r"expected a key of what .*make_data returns of train, .*got 'odd'; did you mean 'ood'"),
    ("(x[rows:], y[rows:])", "(x[rows:], y[rows:] + 5)", "expected labels from 0 to 1 in 'the test rows of .*got"),
    (".long()", ".float()", 'expected class labels .*float32.*; write likelihood = "regression" in the task'),
    ("x[:20] + far", "x[:20, :1]", r"expected inputs of shape \(2,\) in 'far', as in the training set"),
    ("far=5.0", "near=5.0", "expected settings that fit the data of .*unexpected keyword argument 'far'"),
    ("(x[rows:], y[rows:])", "(x[rows:], y[rows + 1:])", "expected 60 targets in test of"),
    ("strength=0.1, **keywords", "strenght=0.1", "expected a keyword of .*DeepEnsemble of .*got 'likelihood'"),
    ("**super().config(), ", "", "expected .*DeepEnsemble to be saved and loaded, got an error .*in its config"),
    ("DeepEnsemble(ds.StackedPosterior):", "DeepEnsemble:", "expected a class derived from dissensus.Posterior"),
    ("import torch\n", "import torch, no_such_thing\n", "can be imported.*No module named 'no_such_thing'"),
])  # fmt: skip
def test_what_does_not_fit_is_one_error_before_anything_is_trained(mine, tmp_path, old, new, message):
    path = tmp_path / f"{mine}.py"
    assert old in MINE
    path.write_text(MINE.replace(old, new))
    refuses(lambda: bench(load_task(str(tmp_path / "task.toml")), out=tmp_path / "runs"), message)
    assert not (tmp_path / "runs").exists()


def test_settings_of_own_methods_are_set_by_name_and_for_all(mine, tmp_path):
    path, ours = str(tmp_path / "task.toml"), f"{mine}:DeepEnsemble"
    sets = ["method.members=3", f"method.{ours}.strength=0.7", f"method.{ours}.training.lr=0.5"]
    task = load_task(path, overrides=sets)
    config = run_config(task, ours, 0)
    assert config.settings == {"members": 3, "strength": 0.7}
    assert config.training["lr"] == 0.5
    assert run_config(task, "deep_ensemble", 0).settings == {"members": 3}
    only = load_task(path, overrides=["method.strength=0.9"])  # what the library's one does not have
    assert run_config(only, ours, 0).settings["strength"] == 0.9
    assert run_config(only, "deep_ensemble", 0).settings == {"members": 2}
    told = r"expected a setting of the methods that run .*got 'strenght'; did you mean 'strength'"
    refuses(lambda: load_task(path, overrides=["method.strenght=1"]), told)
    variant = load_task(path, overrides=[f"method.{ours}-wide.members=4"])
    assert run_config(variant, f"{ours}-wide", 0).settings == {"members": 4, "strength": 0.5}


def test_own_methods_run_in_tasks_of_the_library(mine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sets = ["training.epochs=1", "data.count=40"]
    results, _ = bench(load_task("moons", size="smoke", overrides=sets), methods=[f"{mine}:DeepEnsemble"], out="runs")
    assert list(results.methods) == [f"{mine}:DeepEnsemble"]


def test_a_method_that_is_no_name_of_ours_is_offered_no_far_one():
    refuses(lambda: load_task("moons", overrides=["methods=something_else"]), "got 'something_else'; name one of them")
    told = "got 'deep_ensembel'; did you mean 'deep_ensemble'"
    refuses(lambda: load_task("moons", overrides=["methods=deep_ensembel"]), told)


def test_a_watched_training_is_not_shared_with_an_own_loss(mine, tmp_path):
    from dissensus.bench.run.shared_training import can_share_training

    (tmp_path / f"{mine}.py").write_text(MINE.replace("StackedPosterior", "NetworksPosterior"))
    sets = ["training.together=true", "training.keep_best=false", "training.epochs=2"]
    task = load_task(str(tmp_path / "task.toml"), overrides=sets)
    assert can_share_training(run_config(task, "map", 0))
    assert not can_share_training(run_config(task, f"{mine}:DeepEnsemble", 0))  # its pull would be lost without a word


# ------------------------------------------------------------------------------------------- code that changes


def test_a_run_is_of_the_code_as_it_was(mine, tmp_path, caplog):
    task, ours = load_task(str(tmp_path / "task.toml")), [f"{mine}:DeepEnsemble"]
    path, folder = tmp_path / f"{mine}.py", tmp_path / "runs" / f"{mine}.DeepEnsemble-seed0"
    bench(task, methods=ours, out=tmp_path / "runs")
    # More code in the same file, and comments, change nothing.
    edited(mine, path, "import torch\n", "import torch  # of course\n\n\ndef another():\n    return 3\n\n\n")
    bench(task, methods=ours, out=tmp_path / "runs")
    assert not caplog.records
    edited(mine, path, "self.strength * sum", "2 * self.strength * sum")
    bench(task, methods=ours, out=tmp_path / "runs")  # done already: it is said
    assert "got one before a change of" in caplog.text
    told = r"got one before a change of mine.*DeepEnsemble .*; delete the folder to run it"
    refuses(Run.open(folder).posterior, told)  # what would be computed now is not what was trained
    for name in ("metrics.json", "training.json"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match=r"got one before a change of .*; delete the folder to run it again, or undo"):
        bench(task, methods=ours, out=tmp_path / "runs")  # training would go on with other code


def test_rows_that_are_other_ones_now_are_noticed_and_random_ones_are_the_same_again(mine, tmp_path):
    path = tmp_path / f"{mine}.py"
    path.write_text(MINE.replace(", generator=torch.Generator().manual_seed(0)", ""))  # torch's own stream
    config = run_config(load_task(str(tmp_path / "task.toml")), "deep_ensemble", 0)
    state = torch.get_rng_state()
    first, second = (Run(tmp_path / "run", config).data for _ in range(2))
    assert first.digest == second.digest
    assert torch.equal(torch.get_rng_state(), state)
    bench(load_task(str(tmp_path / "task.toml")), methods=["deep_ensemble"], out=tmp_path / "runs")
    folder = tmp_path / "runs" / "deep_ensemble-seed0"
    (folder / "predictions" / "test.safetensors").unlink()
    edited(mine, path, "> 0)", "> 0.1)")
    refuses(Run.open(folder).evaluate, r"change of .*make_data .*, rows .*; delete")  # they may have been trained on


def test_a_digest_follows_what_is_used_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("dissensus.bench.user_code._added", [])
    name = f"used_{next(NUMBERS)}"
    top, helper = tmp_path / f"{name}.py", tmp_path / f"{name}_helper.py"

    def digest(first: str, second: str) -> str:
        top.write_text(first)
        helper.write_text(second)
        for each in (name, f"{name}_helper"):
            sys.modules.pop(each, None)
        return code_digest(f"{name}:f", str(tmp_path))

    first = f"from {name}_helper import g\nA = 1\nB = 2\n\ndef f():\n    return g() + A\n"
    second = "def g():\n    return h()\n\ndef h():\n    return 1\n\ndef k():\n    return 2\n"
    whole = digest(first, second)
    assert whole == digest(first.replace("B = 2", "B = 3"), second.replace("return 2", "return 3"))
    changes = [(first.replace("A = 1", "A = 3"), second), (first, second.replace("return 1", "return 3"))]
    changes.append((first + "\nprint('once')\n", second))
    assert len({whole, *(digest(*each) for each in changes)}) == 4
    assert code_digest("torch.nn:Linear") == ""  # installed: its version counts


def test_a_module_of_another_task_or_an_older_one_is_never_taken_for_this_ones(mine, tmp_path):
    config = run_config(load_task(str(tmp_path / "task.toml")), "deep_ensemble", 0)
    assert len(Run(tmp_path / "run", config).data.train.y) == 50
    other = tmp_path / "other"
    other.mkdir()
    for name in (f"{mine}.py", "task.toml"):
        (other / name).write_text((tmp_path / name).read_text())
    second = run_config(load_task(str(other / "task.toml")), "deep_ensemble", 0)
    refuses(lambda: Run(tmp_path / "run", second).data, "found first; rename your file")
    path = tmp_path / f"{mine}.py"
    path.write_text(path.read_text().replace("rows=60", "rows=30"))
    refuses(lambda: Run(tmp_path / "run", config).data, "as it was imported, got a file changed since; restart Python")


def test_what_a_module_imports_and_folders_without_init_are_this_tasks_too(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("dissensus.bench.user_code._added", [])
    mark = str(next(NUMBERS))
    for task in "ab":
        (tmp_path / task / f"nets_{mark}").mkdir(parents=True)
        (tmp_path / task / f"help_{mark}.py").write_text(f"value = {task!r}\n")
        (tmp_path / task / f"nets_{mark}" / "net.py").write_text(f"value = {task!r}\n")
        (tmp_path / task / f"mine_{mark}_{task}.py").write_text(f"from help_{mark} import value\n")
    for name, other in ((f"mine_{mark}_a:value", f"mine_{mark}_b:value"), (f"nets_{mark}.net:value",) * 2):
        assert import_object(name, "a value", str(tmp_path / "a")) == "a"
        with pytest.raises(ValueError, match=rf"expected the module .* of {tmp_path}/b/.*, got {tmp_path}/a/"):
            import_object(other, "a value", str(tmp_path / "b"))
    (tmp_path / "a" / f"help_{mark}.py").write_text("value = 3\n")
    with pytest.raises(ValueError, match="changed since; restart Python"):
        import_object(f"mine_{mark}_a:value", "a value", str(tmp_path / "a"))


# ------------------------------------------------------------------------------------------- networks and their settings


def test_another_network_has_none_of_the_settings_of_the_one_before():
    task = load_task("cifar10", overrides=["network.width=32", "network.name=ConvNet"])  # in any order
    assert task.settings["network"] == {"name": "ConvNet", "width": 32}
    found = load_task("cifar10", overrides=["network.name=ResNet"]).settings["network"]
    assert found == {"name": "ResNet", "depth": 20}
    wrong = ["network.name=ConvNet", "network.depth=8"]
    refuses(lambda: load_task("cifar10", overrides=wrong), r"expected a key of \[network\]")
    moons = load_task("moons", overrides=["data.name=five_blobs", "data.ood=[]"]).settings["data"]
    assert moons["name"] == "five_blobs"
    assert "count" not in moons
    assert {"validation"} <= moons.keys()  # which every set has


# ---------------------------------------------------------------------------- networks by the name that Python imports
SOURCE = """
from torch import nn


class Own(nn.Module):
    def __init__(self, inputs, num_classes, hidden=8):
        super().__init__()
        self.hidden, self.head = nn.Linear(inputs, hidden), nn.Linear(hidden, num_classes)

    def forward(self, x):
        return {"logits": self.head(self.hidden(x).tanh())}


class Nets:
    small = Own


def any_keyword(**keywords):
    return Own(2, **{"num_classes": 7, **keywords})


def number():
    return 3


built = nn.Linear(2, 2)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder."""
    name = f"networks_of_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def task(name: str, *overrides: str):
    """Three methods on the moons with the network of that name."""
    Path("own.toml").write_text(f"""
methods = ["map", "node_bnn", "deep_ensemble"]
data.name = "two_moons"
network.name = "{name}"
training.epochs = 1
method.deep_ensemble.members = 2
method.node_bnn = {{ components = 2, samples = 2 }}
""")
    return load_task("own.toml", size="smoke", overrides=list(overrides))


def test_a_task_runs_with_a_network_of_ones_own_and_its_posteriors_load(module, tmp_path):
    results, _ = bench(task(f"{module}:Own", "network.hidden=5"), out=tmp_path / "runs")
    assert set(results.methods) == {"map", "node_bnn", "deep_ensemble"}
    folder = tmp_path / "runs" / "node_bnn-seed0"
    loaded = Run.open(folder).posterior()
    x = torch.randn(3, 2)
    network = sys.modules[module].Own(2, 2, hidden=5)
    assert torch.equal(ds.load(folder / "posterior", network).predict(x).mean, loaded.predict(x).mean)
    assert loaded.latents == 5 + 2
    path = Path(f"{module}.py")
    for written, message in (
        (SOURCE.replace("tanh()", "relu()").replace(", hidden)", ", 2 * hidden)"), "expected a network .*got"),
        ("", "can be imported"),
    ):
        sys.modules.pop(module)
        path.write_text(written)
        with pytest.raises(ValueError, match=message) as raised:
            Run.open(folder).posterior()
        assert "damaged" not in str(raised.value)  # nothing is wrong with the run
    refuses(lambda: ds.load(folder / "posterior"), "expected a network to load into, got none; pass network=")


def test_a_task_goes_on_from_weights_of_ones_own_network(module, tmp_path):
    own = task(f"{module}:Nets.small")  # imports nothing yet
    assert module not in sys.modules
    torch.manual_seed(3)
    network = network_maker(f"{module}:Nets.small")(2, 2)
    torch.save(network.state_dict(), "own.pt")
    whole = tmp_path / "own.pt"
    own = task(f"{module}:Nets.small", f'network.weights="{whole}"', "training.epochs=0")
    bench(own, methods=["map"], out=tmp_path / "runs")
    posterior = Run.open(tmp_path / "runs" / "map-seed0").posterior()
    assert torch.equal(posterior.member(0).head.weight, network.head.weight)


def test_a_report_of_runs_imports_nothing(module, tmp_path):
    bench(task(f"{module}:Own"), methods=["map"], out=tmp_path / "runs")
    sys.modules.pop(module)
    Path(f"{module}.py").write_text("raise SystemExit('imported')")
    write_report(report_runs([str(tmp_path / "runs")], tmp_path)[0], tmp_path / "page.md")
    assert module not in sys.modules


@pytest.mark.parametrize(("name", "overrides", "message"), [
    ("{}:any_keyword", [], r"expected 2 outputs of .*any_keyword.*shape \(2, 7\); set .*num_classes = 2"),
    ("{}:any_keyword", ["network.hiden=3"], r"expected settings that fit the network .*hiden.*correct them"),
    ("{}:number", [], "expected a network from .*number, got int; name a class of nn.Module"),
    ("{}:built", [], "expected a class or function that makes a network, got Linear as .*built'"),
    ("{}:Nope", [], "can be imported, .*AttributeError.*; correct the name, or the file"),
    ("no_such_package_here:Net", [], "package_here:Net' .ModuleNotFoundError.*install it, or put its file beside"),
    ("{}:", [], "as module:name, got"),
    (":Own", [], "as module:name, got ':Own'"),
    ("ResNett", [], r"expected network.name \(or package.module:name\) of MLP, .*ConvNet.*did you mean"),
])  # fmt: skip
def test_a_network_that_cannot_be_had_is_one_error_and_nothing_is_written(module, tmp_path, name, overrides, message):
    refuses(lambda: bench(task(name.format(module), *overrides), methods=["map"], out=tmp_path / "runs"), message)
    assert not (tmp_path / "runs").exists()


def test_weights_of_a_network_of_ones_own_are_converted(module, tmp_path):
    torch.manual_seed(0)
    twin = nn.ModuleDict({"hidden": nn.Linear(4, 8), "head": nn.Linear(8, 3)})
    torch.save(twin.state_dict(), "own.pt")
    sets = ["network.inputs=4", "network.num_classes=3", "method.data_size=50", "method.samples=1"]
    posterior = convert(Path("own.pt"), "node_bnn", tmp_path / "out", overrides=[f"network.name={module}:Own", *sets])
    loaded = ds.load(tmp_path / "out", sys.modules[module].Own(4, 3))
    x = torch.randn(5, 4)
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)
    assert torch.equal(loaded.particles.shared_parameters()["network.head.weight"], twin["head"].weight)
    told, sets = r"settings that fit the network .*:Own, got others .*missing .*'num_classes'", ["network.inputs=4"]
    sets.append(f"network.name={module}:Own")
    refuses(lambda: convert(Path("own.pt"), "map", tmp_path / "no", overrides=sets), told)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(("library", "name", "settings"), [
    ("torchvision.models", "torchvision.models:squeezenet1_1", ["network.num_classes=3"]),
    ("timm", "timm:create_model", ["network.model_name=resnet10t", "network.num_classes=3"]),
])  # fmt: skip
def test_weights_of_a_foreign_model_are_converted(library, name, settings, tmp_path):
    pytest.importorskip(library, reason=f"{library} is not installed")
    given = dict(each.removeprefix("network.").split("=") for each in settings)
    network = network_maker(name)(**given | {"num_classes": 3})
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    sets = [f"network.name={name}", *settings, "method.data_size=50", "method.init_std=0.1", "method.batch_norm=frozen"]
    posterior = convert(tmp_path / "weights.pth", "node_bnn", tmp_path / "out", overrides=sets)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(ds.load(tmp_path / "out", network).predict(x).mean, posterior.predict(x).mean)
    weights = posterior.particles.shared_parameters()
    for key, tensor in network.named_parameters():
        assert torch.equal(weights[f"network.{key}"], tensor)


# ------------------------------------------------------------------------------------------------------------ the page
DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / page).read_text() for page in ("guides/bench.md", "reference/tasks.md"))


def test_the_files_of_the_page_are_tasks_that_run(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    files = dict(re.findall(r"`(\w+\.\w+)`:\n\n```\w+\n(.*?)```", PAGES, re.DOTALL))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    usual = [load_task(str(tmp_path / "usual.toml"), size=size).settings for size in ("short", "smoke")]
    assert [each["training"]["epochs"] for each in usual] == [5, 1]
    results, _ = bench(load_task(str(tmp_path / "task.toml"), overrides=["training.epochs=1"]), out=tmp_path / "a")
    assert list(results.methods) == ["deep_ensemble", "mine:Pulled"]
    assert {"ood/far/auroc", "shift/moved/nll"} <= results.methods["mine:Pulled"][0].metrics.keys()
    mine = sys.modules["mine"]
    loaded = ds.load(tmp_path / "a/mine.Pulled-seed0/posterior", mine.make_network(2, 2, hidden=20), method=mine.Pulled)
    assert (loaded.strength, loaded.particles.members) == (0.5, 3)
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"area": rng.uniform(40, 200, 100), "town": rng.choice(["Bath", "York"], 100)})
    frame.assign(price=1000 * frame["area"]).to_csv(tmp_path / "houses.csv", index=False)
    results, _ = bench(load_task(str(tmp_path / "houses.toml")), methods=["map"], out=tmp_path / "b")
    assert results.methods["map"][0].metrics["rmse"] < 45_000  # the deviation of the prices
    sys.modules.pop("mine")

"""What `pip install dissensus` alone can do: in a process that has torch, NumPy, SciPy, safetensors and what they need."""

import functools
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from dissensus.utils.extras import EXTRAS, NAMES
from test_readme import python_blocks

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRAINERS = ("transformers", "lightning")  # who uses them has them: they are in no other extra, and not tested here
OPTIONAL = {module for extra, (_, modules) in EXTRAS.items() if extra not in TRAINERS for module in modules.split()}

BARE = """
import sys

class Bare:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in REFUSED else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Bare, sys.meta_path)
"""


def distribution(requirement: str) -> str:
    """The name of a requirement such as `typer>=0.12`."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


@functools.cache
def refused() -> set[str]:
    """Modules that the library's own dependencies do not bring, as far as they are installed here."""
    allowed, waiting = {"dissensus"}, {distribution(each) for each in PROJECT["dependencies"]}
    while waiting:
        allowed.add(name := waiting.pop())
        try:
            needed = {distribution(each) for each in requires(name) or () if "extra ==" not in each}
        except ModuleNotFoundError:  # of another platform
            continue
        waiting |= needed - allowed
    homes = packages_distributions()
    return {module for module, names in homes.items() if not allowed & {distribution(each) for each in names}}


def test_four_packages_are_required():
    assert {distribution(each) for each in PROJECT["dependencies"]} == {"torch", "numpy", "scipy", "safetensors"}


def test_what_is_refused_is_what_the_library_does_not_need():
    found = refused()
    assert found >= OPTIONAL - {"jinja2"}  # torch brings jinja2
    assert not found & {"torch", "numpy", "scipy", "safetensors", "sympy", "dissensus"}


def packages_of(extra: str) -> set[str]:
    """The packages that an extra of pyproject.toml brings, also by way of other extras."""
    found: set[str] = set()
    for each in PROJECT["optional-dependencies"][extra]:
        inner = re.fullmatch(r"dissensus\[(.*)\]", each)
        found |= set().union(*map(packages_of, inner[1].split(","))) if inner else {distribution(each)}
    return found


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_what_its_line_asks_for(extra):
    asked = {NAMES.get(module, module) for module in EXTRAS[extra][1].split()}
    assert asked <= packages_of(extra)
    assert packages_of(extra) <= packages_of("all") <= packages_of("test") or extra in TRAINERS


# call -> the extra that it needs
CALLS = {
    "predictive.plot(x)": "plot",
    "history.plot()": "plot",
    "evaluation.plot()": "plot",
    "ds.report({'one': evaluation}, 'page')": "report",
    "ds.data.image_folder('classes')": "images",
    "ds.data.segmentation_folder('classes', 'classes', ['a', 'b'])": "images",
    "history.to_dataframe()": "tables",
    "evaluation.to_dataframe()": "tables",
    "ds.sklearn.Classifier()": "sklearn",
    "ds.export(posterior, 'm.onnx', example=x)": "export",
    "ds.metrics.ECE()": "torchmetrics",
    "importlib.import_module('dissensus.bench.run.jobs')": "bench",
}
VERBS = """
history = ds.fit(ensemble, train, epochs=3)  # shows progress
ds.save(ensemble, "saved")
again = ds.load("saved")
torch.testing.assert_close(again.predict(test.x).mean, ensemble.predict(test.x).mean)
ds.calibrate(again, test)
ds.conformal(again, test, level=0.9)
evaluation = ds.evaluate(again, test, ood={"far": ds.data.Batches(test.x + 9, test.y, batch_size=100)})
assert evaluation.metrics["nll"] > 0
"""
README = python_blocks((ROOT / "README.md").read_text())[0][1]
MODULE, _, FUNCTION = PROJECT["scripts"]["dissensus"].partition(":")
# What is missing is asked for afterwards: (call -> class, text and module of its error; files that cannot be imported and say
# not why; what the command exits with, its stdout and stderr)
MISSING = f"""
import contextlib, importlib, io, json, pathlib, pkgutil
from dissensus.utils.extras import MissingExtra

x, posterior, predictive = test.x, again, again.predict(test.x)
pathlib.Path("classes/one").mkdir(parents=True)
pathlib.Path("classes/one/1.png").write_bytes(b"")
errors, files = {{}}, []
for call in {list(CALLS)!r}:
    try:
        eval(call)
    except Exception as error:
        errors[call] = type(error).__name__, str(error), getattr(error, "name", None)
sys.argv = ["dissensus", "list"]
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
    try:
        importlib.import_module({MODULE!r}).{FUNCTION}()
    except SystemExit as left:
        command = left.code, out.getvalue(), err.getvalue()
for each in pkgutil.walk_packages(ds.__path__, "dissensus.", onerror=lambda name: None):
    try:
        importlib.import_module(each.name)
    except MissingExtra:
        pass
    except ImportError:
        files.append(each.name)
pathlib.Path("found.json").write_text(json.dumps([errors, files, command]))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """(the process, what it found) of one that has nothing but what the library needs."""
    folder = tmp_path_factory.mktemp("bare")
    program = f"REFUSED = {refused()!r}\n{BARE}\n{README.replace('epochs=60', 'epochs=6')}{VERBS}{MISSING}"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done, json.loads((folder / "found.json").read_text())


def test_the_readme_and_the_verbs_run(bare):
    done, _ = bare
    assert "accuracy" in done.stdout
    lines = [line for line in done.stderr.splitlines() if "  epoch " in line]
    assert lines[0].startswith("deep_ensemble  epoch 1/3  ")
    assert lines[-1].startswith("deep_ensemble  epoch 3/3  ")


@pytest.mark.parametrize("call", CALLS)
def test_a_feature_says_what_to_install(bare, call):
    what, modules = EXTRAS[CALLS[call]]
    names = [module for module in modules.split() if module != "jinja2"]
    line = f'{what} needs {", ".join(NAMES.get(each, each) for each in names)}: pip install "dissensus[{CALLS[call]}]"'
    assert bare[1][0].get(call) == ["MissingExtra", line, names[0]]


# imported only where their package is there: Triton's kernels, classes behind `dissensus.metrics`, and what only `main` imports
BEHIND = r"dissensus\.(metrics\.torchmetrics\w+|kernels\.(triton_\w+|norm_launch)|bench\.(cli|theory_\w+))"


def test_every_other_file_can_be_imported_or_says_what_to_install(bare):
    _, (_, files, _) = bare
    assert [name for name in files if not re.fullmatch(BEHIND, name)] == []
    assert "dissensus.metrics.torchmetrics_classes" in files  # such a file would be found


def test_the_command_says_its_line_and_fails(bare):
    packages = "typer, rich, tomli-w, pydantic, matplotlib, pillow"
    line = f'dissensus: the command line needs {packages}: pip install "dissensus[bench]"'
    assert bare[1][2] == [line, "", ""]  # Python writes it to stderr and exits with 1

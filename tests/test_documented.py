"""What the packages offer is written down where a user would look, and not for the tests alone."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import dissensus as ds

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize(
    "name",
    ["dissensus", *(f"dissensus.{room}" for room in ("attacks", "data", "metrics", "nets", "sklearn", "theory"))],
)
def test_every_public_function_is_named_in_the_documentation(name):
    package = importlib.import_module(name)
    words = set(re.findall(r"\w+", "".join(page.read_text() for page in PAGES)))
    functions = [each for each in package.__all__ if inspect.isfunction(getattr(package, each))]
    assert [each for each in functions if each not in words] == []


def test_docstrings_of_verbs_and_methods_open_with_a_sentence_and_name_every_argument():
    """A docstring that says "arguments as in" another one names only those that differ."""
    rooms = (ds, ds.attacks, ds.landscape, ds.distributed)
    offered = [getattr(room, name) for room in rooms for name in room.__all__]
    verbs = [each for each in offered if inspect.isfunction(each)]
    for each in [
        *verbs,
        *ds.METHODS.values(),
        ds.Classification,
        ds.Regression,
        ds.GaussianPrior,
        ds.EmpCov,
        ds.Annealing,
    ]:
        text = inspect.getdoc(each) or ""
        first = text.split("\n\n")[0]
        assert first[0].isupper() or first[0] == "(", each
        assert first.endswith("."), each
        given = set(inspect.signature(each).parameters)
        if "rguments as in" not in text:
            assert sorted(name for name in given if not re.search(rf"\b{name}\b", text)) == [], each


def test_pages_for_developers_name_files_that_are_there():
    """Paths are written from the root, or from the package."""
    for page in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "developing").glob("*.md")]:
        text = page.read_text()
        paths = re.findall(r"`([\w./]+/[\w.]*)`", text) + re.findall(r"\]\(([\w./-]+)\)", text)
        assert paths or page.name in ("index.md", "groups.md")
        roots = (ROOT, ROOT / "src" / "dissensus", page.parent)
        assert [path for path in paths if not any((root / path).exists() for root in roots)] == [], page.name


def test_a_stranger_finds_where_new_things_go():
    rows = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| ")]
    new = {word for row in rows for word in row.split("|")[1].replace(",", " ").split()}
    assert {"method", "kernel", "metric", "figure", "data", "network", "task", "strategy"} <= new

"""What the packages offer is written down where a user would look, and not for the tests alone."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize(
    "name", ["dissensus", "dissensus.data", "dissensus.metrics", "dissensus.nets", "dissensus.theory"]
)
def test_every_public_function_is_named_in_the_documentation(name):
    package = importlib.import_module(name)
    words = set(re.findall(r"\w+", "".join(page.read_text() for page in PAGES)))
    functions = [each for each in package.__all__ if inspect.isfunction(getattr(package, each))]
    assert [each for each in functions if each not in words] == []

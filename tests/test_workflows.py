"""What runs on a server names things that exist, and the versions that the project says it supports.

The files are read as text: no YAML reader is among the packages that tests install.
"""

import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
YAML = [*WORKFLOWS, *sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ROOT / ".pre-commit-config.yaml"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
TESTS = (ROOT / ".github" / "workflows" / "tests.yml").read_text()


def commands(text: str) -> list[str]:
    """What `run:` keys of a workflow and lines of a script execute."""
    return re.findall(r"^ *(?:- )?run: (.+)$", text, re.MULTILINE)


def targets() -> set[str]:
    found = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(found)


def unknown_targets(lines: list[str]) -> list[str]:
    """Targets after `make` that the Makefile does not have; files (with a slash) aside."""
    named = [word for line in lines for match in re.findall(r"\bmake ([^;&|\n]+)", line) for word in match.split()]
    return [word for word in named if "/" not in word and "=" not in word and word not in targets()]


def test_there_are_workflows_for_tests_stacks_site_and_releases():
    assert [path.stem for path in WORKFLOWS] == ["release", "site", "stacks", "tests"]


def test_the_stacks_are_installed_imported_and_pinned():
    """`make test-stacks` would skip a package that is not there, so it imports each one that the extra names."""
    named = {re.match(r"\w+", each)[0] for each in PROJECT["optional-dependencies"]["stacks"]}
    (line,) = re.findall(r'python -c "import ([\w, ]+)"', (ROOT / "Makefile").read_text())
    assert set(line.replace("yaml", "pyyaml").split(", ")) == named
    assert named <= set(re.findall(r"^(\w+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_lines_are_keys_items_or_comments_with_even_indents(path):
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        content = line.lstrip(" ")
        assert "\t" not in line, number
        assert line == line.rstrip(), number
        assert (len(line) - len(content)) % 2 == 0, number
        assert not content or content[0] == "#" or re.match(r"(- )?[\w-]+:( |$)|- ", content), (number, line)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_exists_and_pins_its_actions(path):
    text = path.read_text()
    assert unknown_targets(commands(text)) == []
    for script in re.findall(r"run: (\.\S+)$", text, re.MULTILINE):
        assert os.access(ROOT / script, os.X_OK), script
    used = re.findall(r"uses: (\S+)$", text, re.MULTILINE)
    assert used
    for action in used:
        if action.startswith("./"):
            assert (ROOT / action).is_file(), action
        else:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", action), action


def test_the_script_of_all_checks_calls_targets_that_exist():
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if not line.startswith("#")]
    assert unknown_targets(lines) == []
    assert {"test", "lint", "types", "docs"} <= {word for line in lines for word in re.findall(r"make (\w+)", line)}
    assert commands(TESTS) == [".ci/run"]


def test_a_missing_target_would_be_seen():
    assert unknown_targets(["make docs && make attic TORCH=2.6.0 .venv/installed-docs"]) == ["attic"]


def test_supported_versions_are_the_same_everywhere():
    """The oldest in pyproject.toml, README, start page and workflow; the newest torch in constraints.txt and workflow."""
    (oldest_torch,) = (each.removeprefix("torch>=") for each in PROJECT["dependencies"] if each.startswith("torch>="))
    oldest_python = PROJECT["requires-python"].removeprefix(">=")
    (newest_torch,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (pythons,) = re.findall(r"^ +python: \[(.+)\]$", TESTS, re.MULTILINE)
    pairs = re.findall(r'^ +- python: "([\d.]+)"\n +torch: "([\d.]+)"$', TESTS, re.MULTILINE)
    assert [python for python, _ in pairs] == re.findall(r"[\d.]+", pythons)
    assert pairs[0] == (oldest_python, f"{oldest_torch}.0")
    assert pairs[-1][1] == newest_torch
    assert f"Python {oldest_python} or newer, torch {oldest_torch} or newer" in (ROOT / "README.md").read_text()
    assert f"Python {oldest_python} or newer" in (ROOT / "docs" / "start.md").read_text()
    assert PYPROJECT["tool"]["mypy"]["python_version"] == oldest_python
    assert f"TORCH={oldest_torch}.0" in (ROOT / "Makefile").read_text()

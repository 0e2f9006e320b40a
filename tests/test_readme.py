"""What the README, the pages and the notebook show runs, top to bottom; in the slow suite as long as it says."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

import dissensus
from refusals import refuses
from thinning import often

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHORT = {"epochs": 1, "warmup": 2, "leapfrog": 2}  # where pages do not run as long as they say
LONG = (
    "guides/calibration.md",
    "guides/guarantees.md",
    "reference/evaluation.md",
    "reference/verbs.md",
)  # needs them all
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```\s*$", re.DOTALL | re.MULTILINE)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(first line, code) of every block that says it is Python."""
    blocks = []
    for match in FENCE.finditer(text):
        info = match["info"].strip()
        if re.match(r"(python|py|pycon)\b", info, re.IGNORECASE):
            line = text.count("\n", 0, match.start("code")) + 1
            assert info == "python", (
                f"line {line}: a block is ```python and nothing else: every one is run, got {info!r}"
            )
            indent = len(match["indent"])
            blocks.append((line, "".join(row[indent:] for row in match["code"].splitlines(keepends=True))))
    return blocks


def shortened(code: str) -> str:
    """The code with settings no larger than those of SHORT."""
    return re.sub(rf"\b({'|'.join(SHORT)})=(\d+)", lambda s: f"{s[1]}={min(SHORT[s[1]], int(s[2]))}", code)


def draw_nothing(monkeypatch, request) -> None:
    request.getfixturevalue("undrawn")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **_: Path(path).touch())


@pytest.mark.parametrize("whole", often([False], [True]), ids=["short", "whole"])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page, whole, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if not whole:
        draw_nothing(monkeypatch, request)
    blocks = python_blocks(page.read_text())
    if page.name == "README.md":
        assert blocks, "the README shows no Python"
    names: dict[str, object] = {"__name__": "__main__"}
    for line, code in blocks:
        if not whole and not str(page).endswith(LONG):
            code = shortened(code)
        # Empty lines in front, so that a traceback names the line of the page.
        try:
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
        except ImportError as error:
            if error.name not in ("torchmetrics", "transformers", "lightning"):
                raise
            pytest.skip(f"from line {line} on: {error}")


def test_blocks_are_found_and_marks_are_refused():
    text = "Text\n\n```python\na = 1\n```\n\n```bash\nls\n```\n\n  ```python\n  b = 2\n  ```\n"
    assert python_blocks(text) == [(4, "a = 1\n"), (12, "b = 2\n")]
    refuses(lambda: python_blocks("```python no-run\na = 1\n```\n"), "every one is run", AssertionError)


# -------------------------------------------------------------------------------------------------------- the notebook
NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
CELLS = """
import json, sys
cells = [c for c in json.load(open(sys.argv[1], encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
names = {"__name__": "__main__"}
for number, cell in enumerate(cells):
    *lines, last = "".join(cell["source"]).rstrip().split("\\n")
    exec(compile("\\n".join(lines), f"cell {number}", "exec"), names)
    try:
        shown = eval(compile(last, f"cell {number}", "eval"), names)
    except SyntaxError:
        exec(compile(last, f"cell {number}", "exec"), names)
        shown = None
    if hasattr(shown, "savefig"):
        shown.savefig(f"cell{number}.png")
    elif hasattr(shown, "_repr_html_"):
        assert shown._repr_html_().strip().startswith("<")
print("ran", len(cells))
"""


@pytest.mark.parametrize("whole", often([False], [True]), ids=["short", "whole"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path, whole, tmp_path, monkeypatch, capsys, request):
    pytest.importorskip("pandas", reason="pandas is not installed: pip install pandas")
    monkeypatch.setenv("PYTHONPATH", str(Path(dissensus.__file__).parents[1]))  # the library that is tested
    monkeypatch.setenv("MPLBACKEND", "Agg")
    text = path.read_text(encoding="utf-8")
    if not whole:
        draw_nothing(monkeypatch, request)
        text = shortened(text)
    path = tmp_path / path.name
    path.write_text(text, encoding="utf-8")
    if importlib.util.find_spec("nbclient") and importlib.util.find_spec("ipykernel"):
        import nbformat
        from nbclient import NotebookClient

        settings = {"timeout": 120, "resources": {"metadata": {"path": str(tmp_path)}}}
        cells = NotebookClient(nbformat.read(path, 4), **settings).execute()["cells"]
        assert not [o for c in cells for o in c.get("outputs", []) if o["output_type"] == "error"]
    else:  # the same code in the same order, without a kernel
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["-c", str(path)])
        exec(CELLS, {})
        count = sum(cell["cell_type"] == "code" for cell in json.loads(text)["cells"])
        assert capsys.readouterr().out.splitlines()[-1] == f"ran {count}"
        assert len(list(tmp_path.glob("cell*.png"))) == 5
    assert (tmp_path / "report.html").is_file()


def test_there_is_a_notebook_and_it_holds_no_output():
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), path.name

"""The notebook runs from its first cell to its last, and leaves no output in the repository."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

import dissensus

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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path, tmp_path, monkeypatch, capsys):
    pytest.importorskip("pandas", reason="pandas is not installed: pip install pandas")
    monkeypatch.setenv("PYTHONPATH", str(Path(dissensus.__file__).parents[1]))  # the library that is tested
    monkeypatch.setenv("MPLBACKEND", "Agg")
    if importlib.util.find_spec("nbclient") and importlib.util.find_spec("ipykernel"):
        import nbformat
        from nbclient import NotebookClient

        cells = NotebookClient(
            nbformat.read(path, 4), timeout=120, resources={"metadata": {"path": str(tmp_path)}}
        ).execute()["cells"]
        assert not [o for c in cells for o in c.get("outputs", []) if o["output_type"] == "error"]
    else:  # the same code in the same order, without a kernel
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["-c", str(path)])
        exec(CELLS, {})
        count = sum(cell["cell_type"] == "code" for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])
        assert capsys.readouterr().out.splitlines()[-1] == f"ran {count}"
        assert len(list(tmp_path.glob("cell*.png"))) == 5
    assert (tmp_path / "report.html").is_file()


def test_there_is_a_notebook_and_it_holds_no_output():
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), path.name

"""results.csv: what is written and read back."""

import csv

import torch

from dissensus.bench.report.results import csv_text, results_of_evaluations, table_rows, table_text
from dissensus.evaluation.evaluation import Evaluation


def test_a_spreadsheet_runs_no_cell_and_reading_back_gives_every_text(tmp_path):
    texts = [
        *['=HYPERLINK("http://x","y")', "+1+cmd", "-a", "@x", "a=b"],
        *["'=x", "''-1", "'plain", "-1_0"],
        "\tx",
        "\rx",
        "",
    ]
    numbers = [-1.5, 2.0, float("-inf"), 1e-300, -3]
    rows = [{"=column": text, "n": repr(number)} for text in texts for number in numbers]
    path = tmp_path / "t.csv"
    path.write_text(table_text(["=column", "n"], rows), encoding="utf-8", newline="")
    with path.open(newline="") as file:
        cells = [cell for line in csv.reader(file) for cell in line]
    for cell in cells:
        if cell[:1] in tuple("=+-@\t\r"):
            float(cell)  # a number, or it would be run
    assert table_rows(path) == rows


def test_a_method_called_like_a_formula_is_a_text_in_the_table():
    one = Evaluation("classification", {"nll": -1.0}, {"test/nll": torch.ones(3)}, "max_probability")
    assert csv_text(results_of_evaluations({"=1+1": one}, "t")) == "method,seed,nll\n'=1+1,0,-1.0\n"

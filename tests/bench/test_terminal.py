"""Results on a terminal."""

import torch

from dissensus.bench.cli import print_results
from dissensus.bench.report.results import results_of_evaluations
from dissensus.evaluation.evaluation import Evaluation


def evaluation(seed: int, count: int = 40) -> Evaluation:
    nll = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    metrics = {"nll": float(nll.mean()), "accuracy": 1.0}
    return Evaluation("classification", metrics, {"test/nll": nll}, "max_probability")


def test_titles_and_names_cannot_steer_the_terminal(capsys):
    evaluations = {"a\x1b[31m": evaluation(0), "b\x9b2J\x07": evaluation(1)}
    print_results(results_of_evaluations(evaluations, "t\x1b]0;owned\x07 [bold]x[/bold]\x1b[2J"))
    shown = capsys.readouterr().out
    assert not [char for char in shown if (ord(char) < 32 and char != "\n") or 127 <= ord(char) < 160]
    assert "t]0;owned [bold]x[/bold][2J" in shown


def test_few_examples_are_cautioned_about(capsys):
    print_results(results_of_evaluations({"a": evaluation(0, 12), "b": evaluation(1, 12)}, "t"))
    assert "Few examples (test: 12)" in " ".join(capsys.readouterr().out.split())
    print_results(results_of_evaluations({"a": evaluation(0), "b": evaluation(1)}, "t"))
    assert "Few examples" not in capsys.readouterr().out

"""Published numbers beside ours: what a task may say, the table, and the sentences about orderings."""

import re

import pytest
import torch

from dissensus.bench.report.measures import measures
from dissensus.bench.report.published_numbers import (
    PublishedNumber,
    orderings,
    published_numbers,
    reference_sentences,
    reference_table,
)
from dissensus.bench.report.results import Results
from dissensus.bench.run.jobs import bench, report_runs
from dissensus.bench.task.config import load_task
from dissensus.evaluation.evaluation import Evaluation

REFERENCE = {
    "source": "Somebody 2020",
    "map": {"accuracy": 0.90, "nll": 0.50, "ood/far/auroc": 0.80},
    "deep_ensemble": {"accuracy": [0.95, 0.01], "nll": 0.40, "ood/far/auroc": 0.70},
    "swag": {"accuracy": 0.99},
}


def evaluation(accuracy: float, nll: float, auroc: float) -> Evaluation:
    correct = (torch.arange(100) < 100 * accuracy).double()
    metrics = {"accuracy": accuracy, "nll": nll, "ood/far/auroc": auroc}
    arrays = {"test/correct": correct, "test/nll": nll * torch.linspace(0.9, 1.1, 100, dtype=torch.float64)}
    return Evaluation("classification", metrics, arrays, score="max_probability", ood=("far",))


def results(reference=REFERENCE, **methods: tuple[float, float, float]) -> Results:
    found = {name: [evaluation(*values)] for name, values in methods.items()}
    origins = {name: [{}] for name in found}
    return Results("title", "", found, origins, baseline="map", reference=reference)


def test_numbers_come_with_or_without_an_error():
    found = published_numbers(REFERENCE)
    assert found["deep_ensemble"]["accuracy"] == PublishedNumber(0.95, 0.01)
    assert found["map"]["nll"] == PublishedNumber(0.5, None)
    assert list(found) == ["map", "deep_ensemble", "swag"]


def test_the_table_has_ours_and_theirs_of_the_methods_that_ran():
    given = results(map=(0.91, 0.45, 0.85), deep_ensemble=(0.96, 0.35, 0.9))
    table = reference_table(given, measures(given.methods["map"][0]))
    assert table.columns == ["map", "deep_ensemble"]
    shown = {row.label: [(cell.text, cell.note) for cell in row.cells] for row in table.rows}
    assert shown["Accuracy"] == [("91.00", "published 90.00"), ("96.00", "published 95.00 ± 1.00")]
    assert shown["NLL"][1] == ("0.3500", "published 0.4000")
    assert reference_table(results({}, map=(0.9, 0.5, 0.8)), []) is None
    assert reference_table(results({"swag": {"nll": 1.0}}, map=(0.9, 0.5, 0.8)), []) is None


def test_a_sentence_says_where_an_ordering_is_not_as_published():
    # AUROC: published, the ensemble is behind (70 against 80 %); here ahead. The rest is as published.
    given = results(map=(0.91, 0.45, 0.85), deep_ensemble=(0.96, 0.35, 0.9))
    count, only = reference_sentences(given, measures(given.methods["map"][0]))
    assert count == "1 of 3 orderings of two methods are not as published."
    assert "AUROC" in only
    assert "published, map is ahead of deep_ensemble (80.00 against 70.00 %); here it is behind (85.00 against" in only
    assert "no interval" in only
    # Low is good for NLL: 0.55 is behind 0.45 here, where the published 0.40 is ahead of 0.50.
    given = results(map=(0.91, 0.45, 0.85), deep_ensemble=(0.96, 0.55, 0.7))
    _, only = reference_sentences(given, measures(given.methods["map"][0]))
    assert only.startswith(
        "NLL: published, deep_ensemble is ahead of map (0.4000 against 0.5000 nats); here it is behind (0.5500 against"
    )
    # differences 0.09 … 0.11: a standard error of 0.1 · 0.2 / √(12 · 99) = 0.00058
    assert re.search(
        r"difference \+0.1000, \+0.098\d to \+0.101\d, beyond chance, p < 0.001; counts test examples", only
    )


def test_every_pair_is_looked_at_not_only_pairs_with_the_baseline():
    reference = {"deep_ensemble": {"nll": 0.1}, "swag": {"nll": 0.2}, "tradi": {"nll": 0.3}, "mc_dropout": {"nll": 0.3}}
    # neither has a published number for the baseline; tradi and mc_dropout have no published order
    nll = {"map": 0.1, "deep_ensemble": 0.2, "swag": 0.9, "tradi": 0.5, "mc_dropout": 0.7}
    given = results(reference, **{name: (0.9, value, 0.8) for name, value in nll.items()})
    listed = orderings(given, measures(given.methods["map"][0]))
    assert [(each.ahead, each.behind, each.gap > 0) for each in listed] == [
        ("deep_ensemble", "swag", True),
        ("deep_ensemble", "tradi", True),
        ("deep_ensemble", "mc_dropout", True),
        ("swag", "tradi", False),
        ("swag", "mc_dropout", False),
    ]
    said = reference_sentences(given, measures(given.methods["map"][0]))
    assert said[0] == "2 of 5 orderings of two methods are not as published."
    assert ["swag is ahead of" in each for each in said] == [False, True, True]


def test_without_test_examples_seeds_alone_are_counted_and_that_is_said():
    def several(*values: float) -> list[Evaluation]:
        return [Evaluation("classification", {"nll": value}, {}, "") for value in values]

    reference = {"map": {"nll": 0.1}, "deep_ensemble": {"nll": 0.2}}
    methods = {"map": several(0.5, 0.6, 0.55), "deep_ensemble": several(0.3, 0.42)}
    origins = {name: [{"seed": i} for i in range(len(each))] for name, each in methods.items()}
    given = Results("", "", methods, origins, reference=reference)
    _, only = reference_sentences(given, [])
    # on seeds 0 and 1: differences 0.2 and 0.18, 0.19 ± 12.706 · 0.0141/√2
    assert "(0.5500 against 0.3600; difference +0.1900, +0.0629 to +0.3171, beyond chance, p = 0.033" in only
    assert only.endswith("counts 2 seeds, not test examples).")
    assert reference_table(given, []).headings == ["map (3 seeds)", "deep_ensemble (2 seeds)"]


def test_agreement_is_said_too_and_nothing_without_two_methods():
    given = results(map=(0.91, 0.45, 0.85), deep_ensemble=(0.96, 0.35, 0.7))
    assert reference_sentences(given, []) == ["All 3 orderings of two methods are as published."]
    assert reference_sentences(results({"deep_ensemble": {"nll": 1.0}}, map=(0.9, 0.5, 0.8)), []) == []
    assert reference_sentences(results({"map": {"nll": 1.0}}, map=(0.9, 0.5, 0.8)), []) == []


TASK = """
methods = ["map"]
data = { name = "two_moons", count = 60 }
network = { name = "MLP", hidden = [4] }
training = { epochs = 1 }
[reference]
source = "Somebody 2020"
[reference.map]
accuracy = 0.5
"ood/far_ring/auroc" = [0.7, 0.1]
"""


def test_reports_show_the_published_numbers_also_from_run_folders(undrawn, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TASK)
    bench(load_task(str(path)), out=tmp_path / "runs")
    (tmp_path / "runs" / "report.md").unlink()
    report_runs([tmp_path / "runs"], tmp_path / "runs")
    for name in ("report.md", "report.html"):
        text = (tmp_path / "runs" / name).read_text()
        assert "Beside published numbers" in text
        assert "published 50.00" in text
        assert "Somebody 2020" in text
    assert "published" not in (tmp_path / "runs" / "results.csv").read_text()
    # The run does not depend on them: another number is no other run.
    path.write_text(TASK.replace("accuracy = 0.5", "accuracy = 0.6"))
    bench(load_task(str(path)), out=tmp_path / "runs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[reference]\nsource = 3", "expected a text for reference.source, got 3"),
        ("[reference.mapp]\nnll = 1.0", "did you mean 'map'"),
        ('[reference.map]\nnll = "low"', "expected a number or a list for reference.map.nll, got 'low'"),
        ("[reference.map]\nnll = [1.0, 0.1, 0.1]", "expected a number or a list of at most 2 for reference.map.nll"),
        ("[reference]\nmap = 3", "expected a table"),
    ],
)
def test_a_reference_that_is_wrong_is_one_clear_error(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(TASK.split("[reference]")[0] + text)
    with pytest.raises((ValueError, TypeError), match=message):
        load_task(str(path))

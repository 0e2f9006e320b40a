"""Published numbers beside ours: what a task may say, the table, and the sentences about orderings."""

import pytest
import torch

from dissensus.bench.config import load_task
from dissensus.bench.jobs import bench, report_runs
from dissensus.bench.measures import measures
from dissensus.bench.reference import Published, published, reference_sentences, reference_table
from dissensus.bench.results import Results
from dissensus.evaluate import Evaluation

REFERENCE = {
    "source": "Somebody 2020",
    "map": {"accuracy": 0.90, "nll": 0.50, "ood/far/auroc": 0.80},
    "deep_ensemble": {"accuracy": [0.95, 0.01], "nll": 0.40, "ood/far/auroc": 0.70},
    "swag": {"accuracy": 0.99},
}


def evaluation(accuracy: float, nll: float, auroc: float) -> Evaluation:
    correct = (torch.arange(100) < 100 * accuracy).double()
    metrics = {"accuracy": accuracy, "nll": nll, "ood/far/auroc": auroc}
    arrays = {"test/correct": correct, "test/nll": torch.full((100,), nll)}
    return Evaluation("classification", metrics, arrays, score="max_probability", ood=("far",))


def results(reference=REFERENCE, **methods: tuple[float, float, float]) -> Results:
    found = {name: [evaluation(*values)] for name, values in methods.items()}
    origins = {name: [{}] for name in found}
    return Results("title", "", found, origins, baseline="map", reference=reference)


def test_numbers_come_with_or_without_an_error():
    found = published(REFERENCE)
    assert found["deep_ensemble"]["accuracy"] == Published(0.95, 0.01)
    assert found["map"]["nll"] == Published(0.5, None)
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
    said = reference_sentences(given, measures(given.methods["map"][0]))
    assert len(said) == 1
    assert "AUROC" in said[0]
    assert "published, deep_ensemble is behind map (70.00 against 80.00 %); here it is ahead (90.00 against" in said[0]
    # Low is good for NLL: 0.55 is behind 0.45 here, where the published 0.40 is ahead of 0.50.
    given = results(map=(0.91, 0.45, 0.85), deep_ensemble=(0.96, 0.55, 0.7))
    (only,) = reference_sentences(given, measures(given.methods["map"][0]))
    assert only.startswith(
        "NLL: published, deep_ensemble is ahead of map (0.4000 against 0.5000 nats); here it is not ahead"
    )
    assert "p < 0.001" in only


def test_agreement_is_said_too_and_nothing_without_a_baseline():
    given = results(map=(0.91, 0.45, 0.85), deep_ensemble=(0.96, 0.35, 0.7))
    assert reference_sentences(given, []) == ["All 3 orderings against map are as published."]
    assert reference_sentences(results({"deep_ensemble": {"nll": 1.0}}, map=(0.9, 0.5, 0.8)), []) == []


TASK = """
methods = ["map"]
[data]
name = "two_moons"
count = 60
[network]
name = "MLP"
hidden = [4]
[training]
epochs = 1
[reference]
source = "Somebody 2020"
[reference.map]
accuracy = 0.5
"ood/far_ring/auroc" = [0.7, 0.1]
"""


def test_reports_show_the_published_numbers_also_from_run_folders(tmp_path):
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
        ("[reference]\nsource = 3", "expected str"),
        ("[reference.mapp]\nnll = 1.0", "did you mean 'map'"),
        ('[reference.map]\nnll = "low"', "expected int or float"),
        ("[reference.map]\nnll = [1.0, 0.1, 0.1]", "a number, or one and its error"),
        ("[reference]\nmap = 3", "expected dict"),
    ],
)
def test_a_reference_that_is_wrong_is_one_clear_error(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(TASK.split("[reference]")[0] + text)
    with pytest.raises(ValueError, match=message):
        load_task(str(path))

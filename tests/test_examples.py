"""Every example runs as a user would run it, and what it prints obeys what is known."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from refusals import refuses

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
PNG = b"\x89PNG\r\n\x1a\n"
ROW = re.compile(r"(?P<label>.*?)(?P<numbers>(\s+-?\d+(\.\d+)?)+)$")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """(name, options) -> the lines of its table: (what stands in front, numbers at the end)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")

    def run(name: str, *options: str) -> list[tuple[str, list[float]]]:
        path = next(path for path in EXAMPLES if path.stem == name)
        monkeypatch.setattr(sys, "argv", [path.name, "--quick", *options])
        runpy.run_path(str(path), run_name="__main__")
        rows = [ROW.match(line) for line in capsys.readouterr().out.splitlines()]
        return [(row["label"].strip(), [float(number) for number in row["numbers"].split()]) for row in rows if row]

    yield run
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


def test_there_is_a_test_for_every_example():
    tested = set(re.findall(r'run\("(\w+)"', Path(__file__).read_text()))
    assert tested == {path.stem for path in EXAMPLES}


def test_every_example_is_short_and_says_how_it_is_run():
    for path in EXAMPLES:
        text = path.read_text()
        assert f"python examples/{path.name}" in text.split('"""')[1], path.name
        assert text.count("\n") <= 100, path.name


@pytest.mark.slow
def test_one_network_on_the_moons_has_no_epistemic_part_and_others_have(run, tmp_path):
    table = dict(run("moons", "--out", "figure.png"))
    assert table["MAP"][2:] == [0.0, 0.0]
    for method in ("deep ensemble", "MC dropout"):
        accuracy, _, at_data, everywhere = table[method]
        assert accuracy > 0.8
        assert 0 < at_data < everywhere
    assert (tmp_path / "figure.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_bands_have_one_noise_everywhere_and_widen_away_from_the_data(run, tmp_path):
    table = dict(run("bands", "--out", "figure.png"))
    at_data, gap, outside = (table[place] for place in ("at the data", "in the gap", "outside"))
    assert at_data[0] == gap[0] == outside[0]
    assert at_data[1] < gap[1] < outside[1]
    for aleatoric, epistemic, total, _ in (at_data, gap, outside):
        assert total**2 == pytest.approx(aleatoric**2 + epistemic**2, abs=0.005)  # three digits are printed
    assert (tmp_path / "figure.png").read_bytes().startswith(PNG)


def test_a_temperature_lowers_the_loss_of_a_network_one_has_and_keeps_its_labels(run):
    rows = run("pretrained")
    assert [label for label, _ in rows[1::2]] == 3 * ["at temperature"]
    as_it_is, tempered, *dropped = [
        numbers[-6:] for _, numbers in rows
    ]  # accuracy, nll, ece, auroc, epistemic, clothes
    assert as_it_is[0] == tempered[0] > 0.7
    assert tempered[1] < as_it_is[1]
    assert as_it_is[4:] == tempered[4:] == [0.0, 0.0]
    assert all(min(numbers[4:]) > 0 for numbers in dropped)


@pytest.mark.slow
def test_void_edges_and_stripes_are_doubtful_and_known_pixels_are_not(run, tmp_path):
    table = dict(run("segmentation", "--out", "figure.png"))
    assert table["mIoU of what is known"][0] > 0.7
    auroc, stripes, edges, known = table["aleatoric"]
    assert auroc > 0.8
    assert known < min(stripes, edges)
    assert min(table["epistemic"]) > 0
    assert (tmp_path / "figure.png").read_bytes().startswith(PNG)


def test_a_poisson_likelihood_finds_the_spread_of_counts_and_a_gaussian_does_not(run):
    spreads = [numbers[-5:] for label, numbers in run("counts") if label.startswith("rate")]
    truth, poisson, _, gaussian, _ = zip(*spreads, strict=True)
    assert len(truth) == 3
    assert poisson == pytest.approx(truth, rel=0.15)
    assert max(gaussian) / min(gaussian) < 1.1
    assert max(truth) / min(truth) > 3  # √20 against less than √2


def test_the_mixture_loses_less_than_its_members_by_their_diversity(run):
    first, second = (numbers for _, numbers in run("own_loop"))
    for *_, members, mixture, gain, _ in (first, second):
        assert gain > 0
        assert mixture == pytest.approx(members - gain, abs=2e-4)  # four digits are printed
    before, after = first[-8:-4], second[-8:-4]  # train losses of the four members
    assert all(late < early for early, late in zip(before, after, strict=True))


def test_more_members_from_disk_lower_the_loss_and_not_what_is_read_at_a_time(run, tmp_path):
    few, many = (numbers for _, numbers in run("from_disk", "--out", "kept"))  # members, MiB, at a time, accuracy, nll…
    assert (few[0], many[0]) == (2, 4)
    assert many[1] == pytest.approx(2 * few[1], abs=0.11)  # one digit is printed
    assert many[2] == few[2] == pytest.approx(few[1] / 2, abs=0.06)
    assert many[4] < few[4]
    assert sorted(folder.name for folder in (tmp_path / "kept").iterdir()) == ["group0", "group1"]


def test_signs_make_members_independent_and_training_goes_as_computed(run, tmp_path):
    table = dict(run("wide_limit", "--out", "figure.png"))
    independent, collective = table["independent"], table["collective"]
    assert independent[:2] == [0.0, 0.0]
    assert 0.4 < min(collective[:2]) < 1
    assert max(independent[3], collective[3]) < 25  # per cent, at width 300
    assert (tmp_path / "figure.png").read_bytes().startswith(PNG)


def test_a_server_answers_eight_threads_as_it_answers_one(run, tmp_path):
    pytest.importorskip("fastapi", reason="fastapi is not installed: pip install -e .[test]")
    pytest.importorskip("httpx", reason="httpx is not installed: pip install -e .[test]")
    (known, sure), (foreign, unsure) = run("serve")
    assert {known, foreign} <= {"upper", "lower"}
    assert sure[1] < unsure[1]  # epistemic, far from the data
    from concurrent.futures import ThreadPoolExecutor

    from fastapi.testclient import TestClient

    path = next(path for path in EXAMPLES if path.stem == "serve")
    client = TestClient(runpy.run_path(str(path))["make_app"](tmp_path / "served"))
    rows = [[[1000.0 + 10 * i, 1020.0 - 5 * i]] for i in range(8)]

    def ask(row):
        answer = client.post("/predict", json=row)
        assert answer.status_code == 200
        return answer.json()

    alone = [ask(row) for row in rows]
    (near,), (far,) = alone[0], ask([[1500.0, 500.0]])
    assert near.keys() == {
        *("prediction", "confidence", "total", "aleatoric", "epistemic"),
        "conformal",
        "ood_gate",
        "accept",
    }
    assert (near["accept"], far["accept"]) == (True, False)
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(ask, rows * 4))
    assert together == alone * 4
    assert client.post("/predict", json=[["a", 1]]).status_code == 422


def test_an_image_service_answers_a_digit_and_says_why_it_refuses(run, tmp_path):
    (_, sure), (_, unsure) = run("serve_images")
    assert sure[0] > unsure[0]  # confidence
    assert sure[1] < unsure[1]  # epistemic
    from threading import Thread
    from urllib.error import HTTPError
    from urllib.request import urlopen

    served = runpy.run_path(str(next(path for path in EXAMPLES if path.stem == "serve_images")))
    server = served["make_server"](file=tmp_path / "digits.pt2")
    Thread(target=server.serve_forever, daemon=True).start()
    answer = served["ask"](server, torch.zeros(28, 28, dtype=torch.uint8))
    assert answer["likeliest"] in range(10)
    assert answer["set"]  # never empty
    assert (answer["answer"] is not None) == (answer["selective"] and answer["ood_gate"])
    refuses(lambda: urlopen(f"http://127.0.0.1:{server.server_port}", b"no image"), "400", HTTPError)
    server.shutdown()

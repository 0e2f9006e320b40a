"""Tasks over widths: which ensembles they train, the rows made of them, what is said of those, and the page."""

import csv
import sys
from functools import partial
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from dissensus.bench.report import report_figures
from dissensus.bench.report.comparisons import Claim, student_quantile
from dissensus.bench.report.html_report import write_page
from dissensus.bench.report.results import table_rows
from dissensus.bench.run import jobs
from dissensus.bench.run.jobs import bench, run_all
from dissensus.bench.run.run_folder import command, read_predictions
from dissensus.bench.run_grid import bench_grid
from dissensus.bench.task.config import load_task
from dissensus.bench.width_axis import (
    BEST,
    FALL,
    FOLLOW,
    TEXTS,
    TRANSITION,
    WidthRow,
    width_cells,
    width_claims,
    width_page,
    width_verdicts,
)
from dissensus.core.divergence import Diverged
from dissensus.storage.atomic_files import read_json
from refusals import refuses


def task(*overrides: str):
    return load_task("embedded-width", size="smoke", overrides=overrides)


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    """The smallest bench over widths: one of them, two sizes, one law."""
    folder = tmp_path_factory.mktemp("widths")
    small = task("widths.factors=[1]", "widths.members=[1, 2]", "widths.p=[0.5]", "training.epochs=1")
    said, written = bench_grid(small, out=folder, seeds=1)
    return small, folder, said, written


@pytest.fixture
def undrawn(monkeypatch):
    """A page whose figures are made and not drawn; `benched` has drawn its own before."""
    monkeypatch.setattr(report_figures, "svg", lambda figure, prefix: "")
    monkeypatch.setattr("dissensus.bench.report.report_figures.write_png", lambda figure, path: path.touch())


def test_cells_cover_the_grid_and_the_transition_with_the_network_scaled():
    found = width_cells(task(), [0, 1])
    assert len(found) == 2 * (2 + 2 * 3 + 2 * 2)
    assert len({(cell.config.method, cell.config.seed) for cell in found}) == len(found)
    independent = [cell for cell in found if cell.method == "deep_ensemble"]
    assert {cell.config.settings["members"] for cell in independent} == {4}
    assert {tuple(cell.config.network["hidden"]) for cell in independent} == {(4, 4), (8, 8)}
    swept = {(cell.p, cell.gamma): cell.config.settings for cell in found if cell.p is not None}
    assert swept.keys() == {(0.0, "M"), (0.0, "1"), (1.0, "M"), (1.0, "1")}
    assert swept[1.0, "1"]["modulation"] == {"between": 1.0}
    assert swept[1.0, "1"]["regime"] == "collective"


def test_each_kind_and_each_regime_of_the_transition_has_a_rate_of_its_own():
    given = task("widths.p_rates={collective = [0.7, 0.8]}", "method.deep_ensemble.training.lr=2.0")
    rates = {(c.method, c.p, c.gamma): c.config.training["lr"] for c in width_cells(given, [0])}
    assert (rates["deep_ensemble", None, ""], rates["batch_ensemble", 1.0, "1"]) == (2.0, 0.8)
    assert rates["batch_ensemble", 1.0, "M"] == pytest.approx(0.3 / (1 + 0.5) ** 2)  # M = 2, N = 8


def test_rates_of_embedded_ensembles_fall_with_the_share_of_members_in_the_narrowest_layer():
    given = task("network.hidden=[32, 8]", "widths.factors=[1]", "widths.members=[2, 8]", "widths.p=[]")
    rates = {(c.method, c.members): c.config.training["lr"] for c in width_cells(given, [0])}
    assert rates == {
        ("deep_ensemble", 8): 0.3,
        ("batch_ensemble", 2): pytest.approx(0.3 / 1.5**2),
        ("batch_ensemble", 8): pytest.approx(0.3 / 4),
    }
    given.settings["widths"]["rate"] = "fixed"
    assert {c.config.training["lr"] for c in width_cells(given, [0])} == {0.3}


def test_the_task_that_ships_lowers_rates_by_sharing_where_units_are_counted():
    short, paper = load_task("embedded-width"), load_task("embedded-width", size="paper")
    rates = {(c.method, c.units, c.members): c.config for c in width_cells(short, [0]) if c.p is None}
    assert rates["deep_ensemble", 16, 32].training["lr"] == 3.0
    narrow, wide = rates["batch_ensemble", 16, 16], rates["batch_ensemble", 256, 16]
    assert wide.training["lr"] / narrow.training["lr"] == pytest.approx(4 / 1.25**2)
    assert narrow.settings["modulation_lr"] == wide.settings["modulation_lr"] > 0
    assert {c.config.training["lr"] for c in width_cells(paper, [0])} == {0.1}  # a factor of channels, not units


def test_the_published_size_scales_a_residual_network_on_cifar():
    found = width_cells(load_task("embedded-width", size="paper"), [0])
    assert {cell.config.data["name"] for cell in found} == {"cifar10"}
    assert {cell.config.network["name"] for cell in found} == {"WideResNet"}
    assert {cell.config.network["width"] for cell in found} == {1, 2, 4, 8, 16}


@pytest.mark.parametrize(("override", "message"), [
    ("widths.of=depth", r"expected network.depth, which widths.of names, as a whole number, got None"),
    ("widths.factors=[0.3, 1]", r"expected network.hidden, .* times 0.3 as a whole number, got 2.4"),
    ("widths.factors=[-1, 1]", r"expected widths.factors above 0, got -1"),
    ("widths.members=[0]", r"expected widths.members of at least 1, got 0"),
    ("widths.factors=[]", r"expected widths.factors in the task, got none"),
    ("widths.p_factor=7", r"expected widths.p_factor of 0.5, 1.0, got 7.0"),
    ("methods=map", r"expected a method of a task with \[widths\] of deep_ensemble, batch_ensemble, got 'map'"),
    (
        "method.batch_ensemble.regime=auto",
        r"expected method.batch_ensemble.regime of independent, collective, got 'auto'",
    ),
    ("widths.p_rates={collective = [0.1]}", r"expected the number of rates in widths.p_rates.collective of 2, got 1"),
    ("widths.p_rates={both = [0.1]}", r"expected a regime of widths.p_rates of independent, collective, got 'both'"),
    ("widths.rate=shared", r"expected 'fixed' or 'sharing' for .*widths.rate, got 'shared'"),
    ("widths.depths=[1]", r"expected a key of \[widths\] of of, factors, .*, got 'widths.depths'"),
])  # fmt: skip
def test_a_grid_that_cannot_be_is_one_line(override, message):
    refuses(lambda: width_cells(task(override), [0]), message, (ValueError, TypeError))


def test_a_rule_without_a_rate_to_start_from_is_one_line(tmp_path):
    text = (files("dissensus.bench") / "tasks" / "embedded-width.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("lr = 0.3, ", ""))
    mine = load_task(str(tmp_path / "mine.toml"), size="smoke")
    message = r'expected training.lr, which widths.rate = "sharing" lowers, as a number, got None'
    refuses(lambda: width_cells(mine, [0]), message, TypeError)


def test_a_bench_over_widths_writes_rows_claims_figures_and_a_page(benched):
    _, folder, said, written = benched
    names = ["results.csv", "claims.csv", "widths.png", "transition.png", "report.md", "report.html"]
    assert sorted(path.name for path in written) == sorted(names)
    assert all(path.stat().st_size > 0 for path in written)
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 + 2 + 2
    assert all(row["commit"] and row["torch"] and row["device"] for row in rows)
    page = (folder / "report.html").read_text()
    assert all(sentence.split("?")[0] in page for sentence in said)
    assert "<svg" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "![" in (folder / "report.md").read_text()


def test_independent_rows_are_means_over_disjoint_subsets_of_one_ensemble(benched):
    _, folder, _, _ = benched
    rows = {(row["method"], row["members"], row["p"]): row for row in table_rows(folder / "results.csv", TEXTS)}
    said = read_predictions(folder / "deep_ensemble-N8-seed0" / "predictions" / "test.safetensors")
    members, y = said.predictive.log_probs.double(), said.targets  # (2, n, 10)
    alone = [float((each.argmax(-1) == y).double().mean()) for each in members]
    both = float((members.exp().mean(0).argmax(-1) == y).double().mean())
    assert rows["deep_ensemble", 1, None]["accuracy"] == pytest.approx(sum(alone) / 2, abs=1e-12)
    assert rows["deep_ensemble", 2, None]["accuracy"] == pytest.approx(both, abs=1e-12)
    assert rows["deep_ensemble", 2, None]["member_accuracy"] == pytest.approx(sum(alone) / 2, abs=1e-12)
    assert rows["deep_ensemble", 2, None]["parameters"] == 2 * rows["deep_ensemble", 1, None]["parameters"]
    shared = rows["batch_ensemble", 2, None]
    assert shared["parameters"] < 1.1 * rows["deep_ensemble", 1, None]["parameters"]
    trained = read_predictions(folder / "batch_ensemble-N8-M2-seed0" / "predictions" / "train.safetensors")
    right = (trained.predictive.log_probs.argmax(-1) == trained.targets).double().mean()
    assert shared["train_member_accuracy"] == pytest.approx(float(right), abs=1e-12)


def test_rows_and_claims_read_back_are_those_that_were_written(benched, undrawn, tmp_path):
    small, folder, said, _ = benched
    rows = table_rows(folder / "results.csv", TEXTS)
    again, _ = write_page(width_page(rows, small.title, ""), tmp_path)
    assert [sentence.partition("?")[0] for sentence in again] == [sentence.partition("?")[0] for sentence in said]
    assert (tmp_path / "results.csv").read_text() == (folder / "results.csv").read_text()
    claims = [Claim(*(line[key] for key in Claim._fields)) for line in table_rows(tmp_path / "claims.csv", TEXTS)]
    assert [claim.text for claim in claims] == [claim.text for claim in width_claims(rows)]  # an end may be NaN
    assert width_verdicts(claims) == again


def test_what_is_done_is_not_done_again(benched, undrawn, monkeypatch):
    small, folder, said, _ = benched
    monkeypatch.setattr(jobs, "train_and_evaluate", lambda *_, **__: pytest.fail("a run that is over was run again"))
    assert bench_grid(small, out=folder, seeds=1)[0] == said


def test_a_run_that_diverges_is_noted_and_left_out(benched, undrawn, tmp_path, monkeypatch):
    small, _, _, _ = benched
    train = jobs.train_runs

    def diverging(runs):
        if runs[0].folder.name == "batch_ensemble-N8-M2-p0_5-independent-seed0":
            raise Diverged([1], 7)
        train(runs)

    monkeypatch.setattr(jobs, "train_runs", diverging)
    said, _ = bench_grid(small, out=tmp_path, seeds=1)
    assert said[-1].startswith("1 of 6 ensembles diverged and are left out: method batch_ensemble, factor 1.0, ")
    assert "members 2, p 0.5, gamma M, seed 0" in said[-1]
    assert read_json(tmp_path / "batch_ensemble-N8-M2-p0_5-independent-seed0" / "diverged.json")["step"] == 7
    (lost,) = (row for row in table_rows(tmp_path / "results.csv", TEXTS) if row["diverged"] is not None)
    assert (lost["diverged"], lost["accuracy"]) == (7, None)
    with pytest.raises(Diverged):  # an ordinary bench stops there
        jobs.train_and_evaluate([jobs.Run.open(tmp_path / "batch_ensemble-N8-M2-p0_5-independent-seed0")])


@pytest.mark.slow
def test_processes_side_by_side_give_the_numbers_of_one_after_another(tmp_path):
    moons = load_task("moons", size="smoke", overrides=["training.epochs=1"])
    chosen = {"methods": ["map", "deep_ensemble"], "seeds": [0]}
    _, alone = run_all(moons, out=tmp_path / "one", **chosen)
    told: list[str] = []
    _, together = run_all(moons, out=tmp_path / "two", jobs=2, tell=told.append, **chosen)
    assert [each.metrics["nll"] for each in together] == [each.metrics["nll"] for each in alone]
    assert sum("trained already" in text for text in told) == 2
    refuses(lambda: bench(moons, out=tmp_path / "three", jobs=0), "expected --jobs of at least 1, got 0")


def row(method: str, members: int, seed: int, accuracy: float, **others) -> WidthRow:
    """A row made by hand; embedded ensembles are at γ = M."""
    facts = {
        "factor": 1.0, "units": 8, "p": None, "gamma": "M" if method == "batch_ensemble" else "", "parameters": 100,
    }  # fmt: skip
    alone = {"member_accuracy": accuracy - 0.1, "train_member_accuracy": accuracy, "diverged": None}
    return {"method": method, "members": members, "seed": seed, "accuracy": accuracy, **facts, **alone, **others}


def test_differences_are_of_the_same_examples_and_seeds():
    """Where both kinds are right for the same examples, the difference varies with seeds alone."""
    examples = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    rows = [
        row(
            method, 2, seed, float((examples - less).mean()), examples={"accuracy": examples - less},
            member_accuracy=0.5,
        )
        for seed in (0, 1, 2)
        for method, less in (("batch_ensemble", 0.1 + 0.01 * seed), ("deep_ensemble", 0.0))
    ]  # fmt: skip
    claim = next(each for each in width_claims(rows[:-1]) if each.about == "embedded − independent, M = 2, width 1×")
    assert (claim.value, claim.seeds) == (pytest.approx(-0.105), 2)  # one seed has no independent ensemble
    assert claim.upper - claim.value == pytest.approx(student_quantile(0.95, 1) * 0.005)


def made() -> list[WidthRow]:
    """Two widths, M = 1, 2, 4, three seeds: narrow members fall by 4 points a doubling, wide ones do not, best M 1 and 4."""
    rows = []
    for seed in range(3):
        shift = 1e-4 * seed
        for i, members in enumerate((1, 2, 4)):
            narrow = {
                "factor": 0.5, "parameters": 50 + members, "member_accuracy": 0.8 - (0.04 + 1e-4 * (seed - 1)) * i,
            }  # fmt: skip
            wide = {"factor": 2.0, "parameters": 200 + members, "member_accuracy": 0.9 + shift}
            rows.append(row("batch_ensemble", members, seed, 0.8 - 0.02 * i + shift, **narrow))
            rows.append(row("batch_ensemble", members, seed, 0.9 + 0.01 * i + shift, **wide))
            rows.append(row("deep_ensemble", members, seed, 0.82 + 0.01 * i, factor=0.5, parameters=50 * members))
            rows.append(row("deep_ensemble", members, seed, 0.9 + 0.01 * i, factor=2.0, parameters=200 * members))
        for p, summed, averaged in ((0.0, 0.9, 0.7), (1.0, 0.6, 0.8)):
            rows += [
                row("batch_ensemble", 4, seed, value + shift * (gamma == "M"), p=p, gamma=gamma)
                for gamma, value in (("M", summed), ("1", averaged))
            ]
    return rows


def test_claims_are_the_numbers_that_were_put_in():
    found = {claim.about: claim for claim in width_claims(made())}
    assert found["embedded − independent, M = 4, width 0.5×"].value == pytest.approx(-0.08 + 1e-4)
    assert found["embedded − independent, M = 4, width 2×"].value == pytest.approx(1e-4)
    assert found["the same at 2× minus at 0.5×, M = 4"].value == pytest.approx(0.08)
    assert found["members' test accuracy for every doubling of M, width 0.5×"].value == pytest.approx(-0.04)
    assert found["members' test accuracy for every doubling of M, mean"].value == pytest.approx(-0.02)
    assert found["doublings of the best M for every doubling of the width"].value == pytest.approx(1.0)
    assert found["γ = M − γ = 1 at p = 0"].value == pytest.approx(0.2 + 1e-4)


def test_a_claim_that_rests_on_fewer_seeds_than_were_run_says_so():
    """Two of three seeds diverged in one cell: what is left has no spread over seeds."""
    rows = made()
    for each in rows:
        each["diverged"] = 7 if each["seed"] and each["factor"] == 2.0 and each["members"] == 4 else None
    found = {claim.about: claim for claim in width_claims(rows)}
    left, whole = (found[f"embedded − independent, M = 4, width {factor}×"] for factor in ("2", "0.5"))
    assert (left.seeds, whole.seeds) == (1, 3)
    assert "one seed, whose spread is not counted" in left.text
    assert "one seed" not in whole.text


def test_verdicts_say_what_is_shown_and_what_is_not():
    said = dict(zip((FOLLOW, FALL, BEST, TRANSITION), width_verdicts(width_claims(made())), strict=True))
    assert "embedded − independent, M = 4, width 2×: equal within a point, +0.01" in said[FOLLOW]
    assert "members' test accuracy for every doubling of M, mean: yes, −2.00" in said[FALL]
    assert "inconclusive, +1.00 (no interval: nothing varies) doublings" in said[BEST]  # the same with every seed
    assert "at p = 0: γ = M, +20.01" in said[TRANSITION]
    assert "at p = 1: γ = 1, −19.99" in said[TRANSITION]
    worse = [each for each in width_claims(made()) if each.question == FOLLOW]
    far = [claim._replace(value=-0.2, lower=-0.3, upper=-0.1) for claim in worse]
    assert "below by more than a point" in width_verdicts(far)[0]
    wide = [claim._replace(value=0.0, lower=-0.3, upper=0.3) for claim in worse]
    assert "inconclusive" in width_verdicts(wide)[0]
    # zero is outside of one interval: enough where it was the only one that was looked at, by Holm not among two
    pair = [each for each in width_claims(made()) if each.question == TRANSITION]
    near = [pair[0]._replace(value=0.2, lower=0.01, upper=0.39), pair[1]._replace(value=0.0, lower=-0.1, upper=0.1)]
    assert "γ = M, " in width_verdicts(near[:1])[0]
    assert "γ = M, " not in width_verdicts(near)[0]


def test_claims_in_a_file_name_their_origin_and_seeds(undrawn, tmp_path: Path):
    origin = {"commit": "c0ffee", "torch": "2", "device": "cpu", "command": "x"}
    write_page(width_page([{**each, **origin, "effective": 1.0} for each in made()], "", ""), tmp_path)
    with (tmp_path / "claims.csv").open(newline="") as file:
        assert {(line["commit"], line["seeds"]) for line in csv.DictReader(file)} == {("c0ffee", "3")}


def test_training_rows_are_measured_where_a_task_asks_for_them(benched):
    _, folder, _, _ = benched
    found = read_json(folder / "batch_ensemble-N8-M2-seed0" / "metrics.json")["metrics"]
    (shared,) = (
        r
        for r in table_rows(folder / "results.csv", TEXTS)
        if (r["method"], r["members"], r["p"]) == ("batch_ensemble", 2, None)
    )
    assert found["train/accuracy"] > 0
    assert found["train/members/accuracy"] == pytest.approx(shared["train_member_accuracy"], abs=1e-12)
    assert found["train/nll"] > 0


def test_the_command_of_a_run_is_written_however_it_was_started(monkeypatch):
    for program, shown in (
        ("/x/bin/dissensus", "dissensus bench digits"),
        ("/x/src/dissensus/__main__.py", "dissensus bench digits"),
        ("/x/pytest/__main__.py", "python"),
    ):
        monkeypatch.setattr(sys, "argv", [program, "bench", "digits"])
        assert command() == shown


def test_the_command_line_runs_a_task_over_widths_and_refuses_what_it_has_no_use_for(command_line, tmp_path):
    run = partial(command_line, "bench", "embedded-width", "--size", "smoke")
    code, _, err = run("--methods", "map")
    assert code == 2
    assert "expected no --methods, --baseline or --holm for a task over widths, got one" in err
    small = ("--set", "widths.factors=[1]", "--set", "widths.members=[1]", "--set", "widths.p=[]")
    code, out, _ = run(*small, "--set", "training.epochs=1", "--out", str(tmp_path / "here"), "--quiet")
    assert code == 0
    assert str(tmp_path / "here" / "report.html") in out
    assert not (tmp_path / "here" / "transition.png").exists()


@pytest.mark.slow
def test_the_published_size_trains_on_files_in_the_form_of_cifar(undrawn, tmp_path):
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        images = torch.randint(256, (10, 3073), generator=generator, dtype=torch.uint8)
        images[:, 0] = torch.arange(10)
        (folder / f"{name}.bin").write_bytes(images.numpy().tobytes())
    overrides = [
        "widths.factors=[0.25]", "widths.members=[2]", "widths.p=[]", "widths.p_members=2", "training.epochs=1",
    ]  # fmt: skip
    paper = load_task("embedded-width", size="paper", overrides=[*overrides, "training.batch_size=25"])
    bench_grid(paper, out=tmp_path / "out", source=str(tmp_path))
    found = {row["method"]: row for row in table_rows(tmp_path / "out" / "results.csv", TEXTS)}
    assert all(row["diverged"] is None and 0 <= row["accuracy"] <= 1 for row in found.values())
    assert found["batch_ensemble"]["parameters"] < 1.2 * found["deep_ensemble"]["parameters"] / 2

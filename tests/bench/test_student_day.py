"""A student's day: an own method, a folder of images, three seeds, a kill, a method added, a paper's table and figures."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import dissensus as ds
from dissensus.bench import cli
from dissensus.bench.run.run import Run
from refusals import refuses

MINE = '''
import dissensus as ds


class Pulled(ds.StackedPosterior):
    """Members pulled towards zero."""

    name = "pulled"

    def member_loss(self, params, buffers, batch):
        loss, z, buffers = super().member_loss(params, buffers, batch)
        return loss + 1e-3 * sum(p.square().sum() for p in params.values()), z, buffers
'''
TASK = """
title = "Stripes & bars"
methods = ["student_method:Pulled", "map"]
baseline = "map"
data = { name = "folder", path = "images", size = 8, validation = 6 }
network = { name = "MLP", hidden = [8] }
method."student_method:Pulled" = { members = 2 }
training = { epochs = 2, batch_size = 6, lr = 0.05 }
"""
METHODS = ["student_method:Pulled", "map", "tradi"]
SHOWN = ["--metrics", "accuracy,nll,ece,members/count", "--names", "student_method:Pulled=Ours,map=MAP,tradi=TRADI"]


def draw_images(folder):
    """Twelve training and eight test images of each of three kinds of stripes."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 12), ("test", 8)):
        for kind in range(3):
            place = folder / split / f"kind{kind}"
            place.mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(60, (8, 8), generator=generator)
                pixels[kind::3] += 180
                Image.fromarray(pixels.byte().numpy()).save(place / f"{i}.png")


@pytest.fixture(scope="module")
def day(tmp_path_factory):
    """The folder after the day's commands, and what they said."""
    folder = tmp_path_factory.mktemp("day")
    draw_images(folder / "images")
    (folder / "student_method.py").write_text(MINE)
    (folder / "stripes.toml").write_text(TASK)
    log, said = Run.log, SimpleNamespace(folder=folder, runs=folder / "runs")

    def stop_in_fourth_run(run, epoch):
        log(run, epoch)
        if (run.config.method, run.config.seed, epoch.epoch) == ("map", 1, 1):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr("dissensus.bench.report.report_figures.svg", lambda figure, prefix: "<svg></svg>")

        def run(*arguments):
            patch.setattr(sys, "argv", ["dissensus", *arguments])
            with pytest.raises(SystemExit) as done:
                cli.main()
            return done.value.code

        bench = ("bench", "stripes.toml", "--out", "runs", "--seeds")
        patch.setattr(Run, "log", stop_in_fourth_run)
        said.killed = run(*bench, "3")
        patch.setattr(Run, "log", log)
        said.finished = {path: path.stat().st_mtime_ns for path in said.runs.glob("*/training.json")}
        said.unread = refuses(lambda: ds.bench.read(said.runs), "or finish the bench", FileNotFoundError)
        said.resumed = run(*bench, "3")
        said.added = run(*bench, "2", "--methods", "tradi", "--baseline", "map", "--quiet")
        said.refused = run(*bench, "1", "--methods", "tradi", "--set", "training.epochs=3")
        said.reported = run("report", "runs", "--out", "paper.tex", *SHOWN, "--transpose", "--figures", "figures")
    return said


def test_a_killed_bench_goes_on_and_a_method_is_added_to_its_report(day):
    assert (day.killed, day.resumed, day.added, day.refused, day.reported) == (130, 0, 0, 2, 0)
    assert len(day.finished) == 3
    assert all(path.stat().st_mtime_ns == time for path, time in day.finished.items())  # not trained again
    page = (day.runs / "report.html").read_text()
    assert all(name in page for name in ("student_method:Pulled", "3 seeds", "2 seeds", "TRADI has observed 10 steps"))
    assert "TRADI has observed" in (day.runs / "results.csv").read_text()
    assert "TRADI has observed" in json.loads((day.runs / "tradi-seed0" / "warnings.json").read_text()).popitem()[1]


def test_the_papers_table_and_figures_are_there(day):
    tex = (day.folder / "paper.tex").read_text()
    for text in (
        r"\label{tab:stripes-bars-results}",
        r"\caption{Stripes \& bars: Results.",
        "p = ",
        r"\textsuperscript{1}",
    ):
        assert text in tex
    assert "Differences to MAP" in tex
    lines = [line.split(" ")[0].split("\\")[0] for line in tex.splitlines()]
    assert [line for line in lines if line in ("Ours", "MAP", "TRADI")][:3] == ["Ours", "MAP", "TRADI"]
    drawn = sorted((day.folder / "figures").iterdir())
    assert [path.suffix for path in drawn] == [".pdf", ".svg"] * (len(drawn) // 2)
    assert any("reliability-diagram-of-ours" in path.name for path in drawn)
    assert all(path.read_bytes()[:5] in (b"%PDF-", b"<?xml") for path in drawn)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed: the table is not compiled")
def test_the_table_compiles(day):
    head = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}"
    (day.folder / "page.tex").write_text(head + r"\input{paper.tex}\ref{tab:stripes-bars-results}\end{document}")
    call = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(call, cwd=day.folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (day.folder / "page.pdf").is_file()


def test_results_are_read_back(day):
    results = ds.bench.read(day.runs)
    assert {name: len(each) for name, each in results.methods.items()} == dict(zip(METHODS, (3, 3, 2), strict=True))
    frame = results.to_dataframe()
    assert frame["method"].tolist() == [METHODS[0]] * 3 + [METHODS[1]] * 3 + [METHODS[2]] * 2
    stored = json.loads((day.runs / "map-seed2" / "metrics.json").read_text())["metrics"]
    assert frame[(frame["method"] == "map") & (frame["seed"] == 2)]["nll"].item() == stored["nll"]
    assert any("TRADI has observed" in text for text in results.methods["tradi"][0].cautions.values())
    assert isinstance(results.methods["map"][0], ds.Evaluation)

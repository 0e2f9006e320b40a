"""The page on the user's own code: its files, written as they stand, are tasks that run."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import dissensus as ds
from dissensus.bench.run.jobs import bench
from dissensus.bench.task.config import load_task

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "own.md").read_text()
pytestmark = pytest.mark.usefixtures("undrawn")


def test_the_files_of_the_page_are_tasks_that_run(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (code,) = re.findall(r"`mine.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    first, second = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    for name, text in (("mine.py", code), ("task.toml", first), ("houses.toml", second)):
        (tmp_path / name).write_text(text)
    results, _ = bench(load_task(str(tmp_path / "task.toml"), overrides=["training.epochs=1"]), out=tmp_path / "a")
    assert list(results.methods) == ["deep_ensemble", "mine:Pulled"]
    assert {"ood/far/auroc", "shift/moved/nll"} <= results.methods["mine:Pulled"][0].metrics.keys()
    mine = sys.modules["mine"]
    loaded = ds.load(tmp_path / "a/mine.Pulled-seed0/posterior", mine.Net(2, 2, hidden=20), method=mine.Pulled)
    assert (loaded.strength, loaded.particles.members) == (0.5, 3)
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"area": rng.uniform(40, 200, 100), "town": rng.choice(["Bath", "York"], 100)})
    frame.assign(price=1000 * frame["area"]).to_csv(tmp_path / "houses.csv", index=False)
    results, _ = bench(load_task(str(tmp_path / "houses.toml")), methods=["map"], out=tmp_path / "b")
    assert results.methods["map"][0].metrics["rmse"] < 45_000  # the deviation of the prices
    sys.modules.pop("mine")

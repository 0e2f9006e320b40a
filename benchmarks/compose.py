"""Methods that compose, on the digits of the package: one network or five, samplers around each, samplers over FoRDE; CSV out.

    python benchmarks/compose.py                 # six methods and a temperature, five seeds; started again, it goes on
    python benchmarks/tables.py                  # writes docs/results/composing.md from the CSV

Every method has the same network, data (4,000 digits to learn from), optimiser, rate and number of epochs, and five networks;
MAP and SWAG have one. Rates decay, except for SWAG in all its forms: its tail, the last quarter of a run, is constant. A seed
starts all methods at the same networks and gives them the same batches. Samplers draw 50 functions in all. Multi-Laplace is
fitted to the networks of the deep ensemble, the temperature to validation rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rows import Row, made_by, markdown, paired, read_rows, seeds_of, summary, write_rows
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import dissensus as ds
from dissensus.bench.report.comparisons import SIGNIFICANT, holm_p_values
from dissensus.bench.run.run_folder import provenance
from dissensus.evaluation.robustness_curves import Corruptions
from dissensus.utils.parameter_groups import constant_tail, plateau_linear

NETWORKS = 5
FUNCTIONS = 50
HIDDEN = (64, 64)
BATCH, RATE, DECAY = 128, 2e-3, 1e-2  # as in the task `digits`
DAMAGED = 250  # test digits that are damaged in all ways
FACTS = ("commit", "dissensus", "torch", "device", "threads")
BASELINE = "deep_ensemble"
NAMES = {
    "map": "MAP",
    "swag": "SWAG",
    "deep_ensemble": "deep ensemble",
    "deep_ensemble-temperature": "deep ensemble, temperature",
    "multiswag": "MultiSWAG",
    "swag-forde": "SWAG over FoRDE",
    "multilaplace": "multi-Laplace",
    "multilaplace-joint": "multi-Laplace, joint",
}
HIDDEN = ("accuracy", "ece")  # compared, too; the file alone shows them
MEASURES = {  # metric -> (title, whether more is better, digits)
    "accuracy": ("accuracy", True, 4),
    "nll": ("NLL", False, 4),
    "ece": ("ECE", False, 4),
    "corrupt/nll": ("damaged NLL", False, 3),
    "ood/fashion/auroc": ("clothes AUROC", True, 4),
}


class Data(NamedTuple):
    """Digits as the networks see them."""

    train: Callable[..., ds.data.Batches]  # of a seed
    validation: ds.data.Batches
    test: ds.data.Batches
    damaged: ds.data.Batches  # before they are
    fashion: ds.data.Batches
    corruptions: Corruptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="such small networks gain little from more")
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "compose.csv")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    data, rows = digits(), read_rows(given.csv)
    for seed in range(given.seeds):
        for methods, train in TRAININGS.items():
            done = {row["method"] for row in rows if (row["seed"], row["epochs"]) == (str(seed), str(given.epochs))}
            if done >= {*methods}:
                continue
            torch.manual_seed(seed)
            for method, posterior, seconds in train(data, seed, given.epochs):
                if method not in done:
                    rows.append(measured(posterior, data) | {"seconds": round(seconds, 2)})
                    rows[-1] = {"method": method, "seed": str(seed), "epochs": str(given.epochs)} | rows[-1]
                    write_rows(given.csv, rows)
                    print("  ".join(f"{k}={v}" for k, v in rows[-1].items() if k not in FACTS), flush=True)
    print(table(read_rows(given.csv)))


def digits() -> Data:
    """Digits of the package, standardised: 4,000 to learn from, 1,000 to find temperatures on, and the test set."""
    every, test = ds.data.digits()
    rest, validation = ds.data.train_validation(every, validation=1000, seed=0)
    train, _ = ds.data.train_validation(rest, validation=5000, seed=0)
    standardise = ds.data.Standardiser.of_channels(train.images)

    def batches(images: Any, *, rows: int | None = None, **how: Any) -> ds.data.Batches:
        size = {"batch_size": 250} | how
        return ds.data.Batches(standardise(images.images[:rows]), images.labels[:rows], **size)

    return Data(
        lambda seed: batches(train, batch_size=BATCH, shuffle=True, seed=seed),
        batches(validation),
        batches(test),
        batches(test, rows=DAMAGED),
        batches(ds.data.fashion()),
        Corruptions("all", severities=(1, 3, 5), standardiser=standardise),
    )


def networks(count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Flatten(), ds.nets.MLP(784, 10, hidden=HIDDEN)) for _ in range(count)]


def fitted(posterior: ds.Posterior, data: Data, seed: int, epochs: int, factor: Callable[[float], float]) -> float:
    """Seconds of training; the rate is RATE times factor(share of the run)."""
    optimizer = torch.optim.AdamW(posterior.parameter_groups(RATE, DECAY), fused=True)
    scheduler = LambdaLR(optimizer, lambda epoch: factor(epoch / epochs))
    start = time.perf_counter()
    ds.fit(
        posterior,
        data.train(seed),
        epochs=epochs,
        optimizer=optimizer,
        scheduler=scheduler,
        progress=False,
        device="cpu",
    )
    return time.perf_counter() - start


Trained = Iterable[tuple[str, ds.Posterior, float]]  # method, posterior, seconds


def one_map(data: Data, seed: int, epochs: int) -> Trained:
    posterior = ds.MAP(networks(1)[0])
    yield "map", posterior, fitted(posterior, data, seed, epochs, plateau_linear)


def ensemble(data: Data, seed: int, epochs: int) -> Trained:
    """The deep ensemble, Laplace around its networks, and the ensemble at its best temperature."""
    posterior = ds.DeepEnsemble(networks(NETWORKS))
    seconds = fitted(posterior, data, seed, epochs, plateau_linear)
    yield "deep_ensemble", posterior, seconds
    for name, covariance in (("multilaplace", "rows"), ("multilaplace-joint", "joint")):
        laplace = ds.Laplace(posterior.particles, samples=FUNCTIONS // NETWORKS, covariance=covariance)
        start = time.perf_counter()
        laplace.fit_posthoc(data.train(seed))
        yield name, laplace, seconds + time.perf_counter() - start
    start = time.perf_counter()
    ds.temperature_scale(posterior, data.validation)
    yield "deep_ensemble-temperature", posterior, seconds + time.perf_counter() - start


def swag(name: str, count: int, data: Data, seed: int, epochs: int) -> Trained:
    made = networks(count)
    posterior = ds.SWAG(made[0] if count == 1 else made, samples=FUNCTIONS // count)
    yield name, posterior, fitted(posterior, data, seed, epochs, constant_tail)


def over_forde(data: Data, seed: int, epochs: int) -> Trained:
    run = ds.track(ds.FoRDE(networks(NETWORKS)), [partial(ds.SWAG, samples=FUNCTIONS // NETWORKS)])
    seconds = fitted(run, data, seed, epochs, constant_tail)
    yield "swag-forde", run.watchers["swag"], seconds


TRAININGS: dict[tuple[str, ...], Callable[[Data, int, int], Trained]] = {  # what a training gives -> the training
    ("map",): one_map,
    ("deep_ensemble", "multilaplace", "multilaplace-joint", "deep_ensemble-temperature"): ensemble,
    ("swag",): partial(swag, "swag", 1),
    ("multiswag",): partial(swag, "multiswag", NETWORKS),
    ("swag-forde",): over_forde,
}


def measured(posterior: ds.Posterior, data: Data) -> Row:
    """The numbers of a row, and where they come from."""
    found = ds.evaluate(posterior, data.test, ood={"fashion": data.fashion}).metrics
    damaged = ds.evaluate(posterior, data.damaged, corrupt=data.corruptions).metrics
    found = found | {key: value for key, value in damaged.items() if key.startswith("corrupt/")}
    about = provenance(torch.device("cpu"))
    return {
        "networks": posterior.particles.members,
        "members/count": round(found.get("members/count", 1)),
        **{key: f"{found[key]:.6g}" for key in MEASURES},
        "temperature": f"{float(posterior.temperature):.4g}",
        **{key: about[key] for key in FACTS},
    }


def of(rows: list[Row], method: str) -> list[Row]:
    return [row for row in rows if row["method"] == method]


def table(rows: list[Row]) -> str:
    """Mean ± standard deviation over seeds; bold: differs from the deep ensemble."""
    found, lines = comparisons(rows), []
    shown = {key: measure for key, measure in MEASURES.items() if key not in HIDDEN}
    for method in (name for name in NAMES if of(rows, name)):
        mine = of(rows, method)
        cells = [NAMES[method], mine[0]["networks"], mine[0]["members/count"]]
        for key, (_, _, digits) in shown.items():
            mean, deviation, _ = summary(row[key] for row in mine)
            text = f"{mean:.{digits}f} ± {deviation:.{digits}f}"
            cells.append(f"**{text}**" if found.get((method, key), (None, 1.0))[1] < SIGNIFICANT else text)
        lines.append(cells)
    titles = (title for title, _, _ in shown.values())
    return markdown(["method", "networks", "functions", *titles], lines)


def comparisons(rows: list[Row]) -> dict[tuple[str, str], tuple[Any, float]]:
    """(method, metric) -> the difference to the deep ensemble by seeds, and its p-value by Holm over all of them."""
    pairs = {
        (method, key): paired(of(rows, method), of(rows, BASELINE), key)
        for method in NAMES
        for key in MEASURES
        if method != BASELINE
    }
    known = {pair: found for pair, found in pairs.items() if found is not None and found.p_value == found.p_value}
    adjusted = holm_p_values([found.p_value for found in known.values()])
    return {pair: (found, p) for (pair, found), p in zip(known.items(), adjusted, strict=True)}


def sentences(rows: list[Row]) -> Iterator[str]:
    """What is beyond chance against the deep ensemble, method by method, for better and for worse."""
    found = comparisons(rows)
    for method in (name for name in NAMES if name != BASELINE and of(rows, name)):
        sides: dict[bool, list[str]] = {True: [], False: []}
        for key, (title, more, digits) in MEASURES.items():
            each, p = found.get((method, key), (None, 1.0))
            if each is not None and p < SIGNIFICANT:
                sides[(each.difference > 0) == more].append(f"{title} (by {abs(each.difference):.{digits}f})")
        parts = [
            f"{word} in {', '.join(sides[side])}" for side, word in ((True, "better"), (False, "worse")) if sides[side]
        ]
        said = f"{' and '.join(parts)}, beyond chance; all else" if parts else "all"
        yield f"- {NAMES[method]}: {said} is within chance."


def page(rows: list[Row]) -> str:
    """The table, what is beyond chance, and where all of it comes from."""
    rows = [row for row in rows if row["method"] in NAMES]
    what = f"{seeds_of(rows, NAMES)}, mean ± standard deviation"
    made = made_by("python benchmarks/compose.py", rows, what, "`compose.csv`")
    said = (
        f"Bold: differs from the deep ensemble on the same seeds (p < {SIGNIFICANT} after Holm's adjustment for all "
        f"{len(comparisons(rows))} comparisons):\n\n"
    )
    differ = [each for each in sentences(rows) if "beyond chance" in each]
    rest = f"- The other {len(NAMES) - 1 - len(differ)}: all is within chance."
    return "\n\n".join([table(rows), said + "\n".join([*differ, rest]), made])


if __name__ == "__main__":
    main()

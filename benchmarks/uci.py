"""UCI regression by the usual protocol: fixed splits, RMSE and NLL in original units; CSV and a Markdown table out.

    python benchmarks/uci.py --data FOLDER --csv benchmarks/results/uci.csv

FOLDER holds the sets as `ds.data.uci_regression` reads them. What is in the CSV is not run again.

Network: one hidden layer of 50 ReLU units (100 for the protein set), mean and variance out. 40 epochs of Adam, batch 100, as
Lakshminarayanan et al. 2017 trained their ensembles, but at a rate of 0.01 that falls to 1 % of it over the last quarter,
where theirs was 0.1 throughout. Their numbers, from ensembles with adversarial training, stand beside ours. Inputs and
targets are standardised by the training rows of the split. Two NLLs: of the Gaussian with the mixture's mean and variance,
which that paper reports, and of the mixture itself.

Trainings per split: one network watched by MAP, TRADI and SWAG, which branches at three quarters into a decayed tail (MAP,
TRADI) and a constant one (SWAG); one with dropout; five networks.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from resumable import Row, append_rows, markdown, origin, read_rows, summary

import dissensus as ds
from dissensus.methods import MAP, SWAG, TRADI, DeepEnsemble, MCDropout, branch, track

SPLITS = {name: 5 if name == "protein-tertiary-structure" else 20 for name in ds.data.REGRESSION_SETS}
# Lakshminarayanan et al. 2017, table 1, deep ensembles: RMSE, its error, NLL, its error
PAPER = {
    "bostonHousing": (3.28, 1.00, 2.41, 0.25),
    "concrete": (6.03, 0.58, 3.06, 0.18),
    "naval-propulsion-plant": (0.00, 0.00, -5.63, 0.05),
    "power-plant": (4.11, 0.17, 2.79, 0.04),
    "protein-tertiary-structure": (4.71, 0.06, 2.83, 0.02),
    "wine-quality-red": (0.64, 0.04, 0.94, 0.12),
}
METHODS = ("MAP", "MC dropout", "Deep ensemble", "SWAG", "TRADI", "TRADI (diagonal)")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, default=None, help="folder of the sets; DISSENSUS_DATA by default")
    arguments.add_argument("--sets", default=",".join(SPLITS))
    arguments.add_argument("--splits", type=int, default=20, help="the first so many splits of each set")
    arguments.add_argument("--epochs", type=int, default=40)
    arguments.add_argument("--rate", type=float, default=0.01, help="learning rate of the first three quarters")
    arguments.add_argument("--tail", type=float, default=0.1, help="factor of the rate in SWAG's last quarter")
    arguments.add_argument("--members", type=int, default=5)
    arguments.add_argument("--dropout", type=float, default=0.05)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--threads", type=int, default=1, help="these networks are too small for more")
    arguments.add_argument("--csv", type=Path, default=Path("benchmarks/results/uci.csv"))
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    done = {(row["set"], row["split"]) for row in read_rows(given.csv)}
    for name in given.sets.split(","):
        for split in range(min(given.splits, SPLITS[name])):
            if (name, str(split)) in done:
                continue
            torch.manual_seed(split)
            rows = one_split(name, split, given, device)
            settings = {"set": name, "split": split, "epochs": given.epochs, "rate": given.rate}
            append_rows(given.csv, [{**settings, **row, **origin(device)} for row in rows])
            print(f"{name} {split}: " + "; ".join(f"{r['method']} {r['nll_gaussian']:.3f}" for r in rows), flush=True)
    print(table(read_rows(given.csv)))


def one_split(name: str, split: int, given: argparse.Namespace, device: torch.device) -> list[Row]:
    """A row per method."""
    data = ds.data.uci_regression(name, split, folder=given.data)
    inputs, hidden = data.x_train.shape[1], 100 if name == "protein-tertiary-structure" else 50
    meaning = {"likelihood": ds.HeteroscedasticRegression()}

    def network() -> torch.nn.Module:
        return ds.nets.MLP(inputs, 2, hidden=(hidden,))

    loader = ds.data.Batches(data.x_train.to(device), data.y_train.to(device), batch_size=100, shuffle=True, seed=split)
    # TRADI's memory of 317 steps, or a tenth of the run where that is less: K = √(Q/R) is one over it.
    memory = min(317.0, len(loader) * given.epochs / 10)
    noise = (10.0 / memory**2, 5.0 / memory**2)
    head = int(0.75 * given.epochs)
    tail = (given.epochs - head) * len(loader)
    when = {"start": head * len(loader), "every": max(1, tail // 40)}
    watchers = [MAP, partial(TRADI, state_noise=noise), partial(SWAG, rank=20, **when)]

    def trained(
        posterior: ds.Posterior, optimizer: torch.optim.Optimizer, first: int, last: int, factor: Callable[[int], float]
    ) -> float:
        """Seconds of the epochs from first to last, at factor(epoch) of the rate."""
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: factor(first + epoch))
        history = ds.fit(
            posterior,
            loader,
            epochs=last - first,
            optimizer=optimizer,
            scheduler=scheduler,
            precision="float32",
            device=device,
            progress=False,
        )
        return sum(epoch.seconds for epoch in history.epochs)

    def decay(epoch: int) -> float:
        return 1 - 0.99 * min(max((epoch + 1 - head) / (given.epochs - head), 0.0), 1.0)

    def adam(posterior: ds.Posterior) -> torch.optim.Optimizer:
        return torch.optim.Adam(posterior.to(device).parameters(), lr=given.rate)

    run = track(network(), watchers, **meaning)
    optimizer = adam(run)
    seconds = trained(run, optimizer, 0, head, lambda epoch: 1.0)
    other, its_optimizer = branch(run, optimizer)
    decayed = seconds + trained(run, optimizer, head, given.epochs, decay)
    constant = seconds + trained(other, its_optimizer, head, given.epochs, lambda epoch: given.tail)
    dropout = MCDropout(network(), rate=given.dropout, samples=100, **meaning)
    ensemble = DeepEnsemble([network() for _ in range(given.members)], **meaning)
    named = {
        "MAP": (run["map"], decayed),
        "MC dropout": (dropout, trained(dropout, adam(dropout), 0, given.epochs, decay)),
        "Deep ensemble": (ensemble, trained(ensemble, adam(ensemble), 0, given.epochs, decay)),
        "SWAG": (other["swag"], constant),
        "TRADI": (run["tradi"], decayed),
    }
    rows = [
        {"method": method, **measured(posterior, data, device), "train_seconds": taken}
        for method, (posterior, taken) in named.items()
    ]
    tradi = run["tradi"]
    assert isinstance(tradi, TRADI)
    tradi.covariance = "diagonal"
    ds.refresh(tradi, loader)
    return [*rows, {"method": "TRADI (diagonal)", **measured(tradi, data, device), "train_seconds": decayed}]


def measured(posterior: ds.Posterior, data: ds.data.RegressionSplit, device: torch.device) -> Row:
    """RMSE and both NLLs on the test rows, in original units."""
    predictive = posterior.predict(data.x_test.to(device)).to("cpu")
    assert isinstance(predictive, ds.RegressionPredictive)
    location, scale = data.targets.mean, data.targets.std
    means, variances, _ = ds.metrics.unstandardise(
        predictive.members.double(), predictive.variances.double(), location=location, scale=scale
    )
    y = data.targets.inverse(data.y_test.double())
    matched = ds.metrics.moment_match(means, variances)
    return {
        "rmse": float(ds.metrics.rmse(matched.mean, y)),
        "nll_gaussian": float(ds.metrics.gaussian_nll(*matched, y)),
        "nll_mixture": float(ds.metrics.mixture_nll(means, variances, y)),
    }


def table(rows: list[Row]) -> str:
    """Mean ± standard deviation over splits, as in the paper; its deep ensemble last."""
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        for method in METHODS:
            mine = [row for row in rows if row["set"] == name and row["method"] == method]
            cells = [name, f"{method} ({len(mine)} splits)"]
            for column in ("rmse", "nll_gaussian", "nll_mixture"):
                mean, deviation, _ = summary(row[column] for row in mine)
                digits = 4 if column == "rmse" and mean < 0.1 else 3
                cells.append(f"{mean:.{digits}f} ± {deviation:.{digits}f}")
            lines.append(cells)
        rmse, rmse_error, nll, nll_error = PAPER[name]
        lines.append([name, "deep ensemble, paper", f"{rmse} ± {rmse_error}", f"{nll} ± {nll_error}", ""])
    return markdown(["set", "method", "RMSE", "NLL (Gaussian)", "NLL (mixture)"], lines)


if __name__ == "__main__":
    main()

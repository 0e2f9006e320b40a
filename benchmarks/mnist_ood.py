"""MNIST against notMNIST: the table of the TRADI paper with its network and recipe; CSV and a Markdown table out.

    python benchmarks/mnist_ood.py --data FOLDER --seeds 0,1,2 --csv benchmarks/results/mnist_ood.csv

FOLDER holds MNIST and notMNIST as `ds.data.mnist` and `ds.data.notmnist` read them. What is in the CSV is not run again.

Network: 784-200-200-200-10, batch norm after each hidden layer, dropout 0.1 after the second and third, He-normal weights,
zero biases. Training: Adam, rate 1e-3, L2 1e-2, a tenth of the rate every 10 epochs, 30 epochs, batch 128, inputs in [−1, 1].
No epoch is chosen on test data: the last one counts.

Trainings per seed: one network (MCP, Gaussian perturbation, MC dropout), one watched by TRADI (three covariances), one whose
last quarter runs at a constant rate (SWA, SWAG), fifteen networks (deep ensemble).
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from resumable import Row, append_rows, markdown, origin, read_rows, summary
from torch import Tensor, nn

import dissensus as ds
from dissensus.methods import MAP, SWA, SWAG, TRADI, DeepEnsemble, GaussianPerturbation, MCDropout, track

PREVALENCE = 18_724 / 28_724  # of notMNIST in the paper
# Franchi et al. 2020: AUC, AUPR, FPR95 in %, ECE on the union; accuracy and NLL where given
PAPER = {
    "MCP": {"auroc": 94.0, "aupr_adjusted": 96.0, "fpr95": 24.6, "ece_union": 0.305},
    "Gaussian perturbation": {"auroc": 94.8, "aupr_adjusted": 96.4, "fpr95": 19.2, "ece_union": 0.500},
    "MC dropout": {
        "accuracy": 98.19,
        "nll": 0.065,
        "auroc": 91.8,
        "aupr_adjusted": 94.9,
        "fpr95": 35.6,
        "ece_union": 0.494,
    },
    "Deep ensemble": {
        "accuracy": 98.88,
        "nll": 0.035,
        "auroc": 97.2,
        "aupr_adjusted": 98.0,
        "fpr95": 9.2,
        "ece_union": 0.462,
    },
    "SWAG": {"accuracy": 98.78, "nll": 0.041},
    "TRADI (shared)": {
        "accuracy": 98.63,
        "nll": 0.044,
        "auroc": 96.7,
        "aupr_adjusted": 97.6,
        "fpr95": 11.0,
        "ece_union": 0.407,
    },
}
COLUMNS = ("accuracy", "nll", "auroc", "aupr_adjusted", "fpr95", "fpr95_in", "ece", "ece_union", "train_seconds")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, default=None, help="folder of the sets; DISSENSUS_DATA by default")
    arguments.add_argument("--seeds", default="0,1,2")
    arguments.add_argument("--runs", default=",".join(RUNS), help=f"comma-separated, of {', '.join(RUNS)}")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--precision", default="float32", help="as of ds.fit")
    arguments.add_argument("--epochs", type=int, default=30)
    arguments.add_argument("--members", type=int, default=15)
    arguments.add_argument(
        "--tail-rate", type=float, default=5e-4, help="learning rate of SWA's and SWAG's last quarter"
    )
    arguments.add_argument(
        "--limit", type=int, default=None, help="train on the first N images only, to try the script"
    )
    arguments.add_argument("--csv", type=Path, default=Path("benchmarks/results/mnist_ood.csv"))
    given = arguments.parse_args()
    device = torch.device(given.device)
    data = Data(given.data, device, given.limit)
    done = {(row["seed"], row["run"]) for row in read_rows(given.csv)}
    for seed in given.seeds.split(","):
        for name in given.runs.split(","):
            if (seed, name) in done:
                continue
            torch.manual_seed(int(seed))
            rows = RUNS[name](data, given, int(seed))
            settings = {"run": name, "seed": seed, "epochs": given.epochs, "precision": given.precision}
            append_rows(given.csv, [{**settings, **row, **origin(device)} for row in rows])
            print(f"seed {seed}, {name}: " + "; ".join(f"{r['method']} AUC {r['auroc']:.2f}" for r in rows), flush=True)
    print(table(read_rows(given.csv)))


class Data:
    """Inputs (N, 784) in [−1, 1] on the device."""

    def __init__(self, folder: Path | None, device: torch.device, limit: int | None) -> None:
        train, test = ds.data.mnist("train", folder=folder), ds.data.mnist("test", folder=folder)
        self.device = device
        self.x, self.y = pixels(train.images[:limit], device), train.labels[:limit].to(device)
        self.x_test, self.y_test = pixels(test.images, device), test.labels.to(device)
        self.x_ood = pixels(ds.data.notmnist(folder=folder).images, device)

    def loader(self, seed: int) -> ds.data.Batches:
        return ds.data.Batches(self.x, self.y, batch_size=128, shuffle=True, seed=seed)


def pixels(images: Tensor, device: torch.device) -> Tensor:
    return images.to(device).flatten(1).float() / 127.5 - 1


def network() -> nn.Module:
    """The paper's MLP."""
    layers: list[nn.Module] = []
    for inputs, dropout in ((784, 0.0), (200, 0.1), (200, 0.1)):
        layers += [nn.Linear(inputs, 200), nn.BatchNorm1d(200), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    layers.append(nn.Linear(200, 10))
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


# ------------------------------------------------------------------------------------------- trainings


def train(posterior: ds.Posterior, data: Data, given: argparse.Namespace, seed: int) -> float:
    """Seconds of training by the paper's recipe, refreshing of batch statistics not included."""
    posterior.to(data.device)
    optimizer = torch.optim.Adam(posterior.parameters(), lr=1e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, max(1, given.epochs // 3), 0.1)
    return fit(posterior, data, given, seed, optimizer, scheduler, given.epochs)


def fit(
    posterior: ds.Posterior,
    data: Data,
    given: argparse.Namespace,
    seed: int,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    epochs: int,
) -> float:
    history = ds.fit(
        posterior,
        data.loader(seed),
        epochs=epochs,
        optimizer=optimizer,
        scheduler=scheduler,
        precision=given.precision,
        device=data.device,
        progress=False,
    )
    return sum(epoch.seconds for epoch in history.epochs)


def one_network(data: Data, given: argparse.Namespace, seed: int) -> list[Row]:
    module = network()
    plain = MAP(module)
    seconds = train(plain, data, given, seed)
    rows = [measured("MCP", plain, data, seconds)]
    for method in (GaussianPerturbation(module, noise=0.05, samples=20), MCDropout(module, samples=20)):
        method.to(data.device)
        name = "MC dropout" if isinstance(method, MCDropout) else "Gaussian perturbation"
        rows.append(refreshed(name, method, data, seconds))
    return rows


def tracked(data: Data, given: argparse.Namespace, seed: int) -> list[Row]:
    posterior = TRADI(network(), samples=20)
    seconds = train(posterior, data, given, seed)
    rows = []
    for covariance in ("shared", "diagonal", "released"):
        posterior.covariance = covariance
        rows.append(refreshed(f"TRADI ({covariance})", posterior, data, seconds))
    return rows


def averaged(data: Data, given: argparse.Namespace, seed: int) -> list[Row]:
    """The recipe for three quarters of the epochs, then a constant rate, snapshots spread over it."""
    rank, head = 20, max(1, int(0.75 * given.epochs))
    steps = len(data.loader(seed))
    tail = (given.epochs - head) * steps
    when = {"start": head * steps, "every": max(1, tail // (2 * rank))}
    run = track(network(), [partial(SWAG, rank=rank, samples=30, **when), partial(SWA, **when)]).to(data.device)
    optimizer = torch.optim.Adam(run.parameters(), lr=1e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, max(1, given.epochs // 3), 0.1)
    seconds = fit(run, data, given, seed, optimizer, scheduler, head)
    for group in optimizer.param_groups:
        group["lr"] = given.tail_rate
    seconds += fit(run, data, given, seed + 1000, optimizer, None, given.epochs - head)
    return [measured("SWAG", run["swag"], data, seconds), measured("SWA", run["swa"], data, seconds)]


def ensemble(data: Data, given: argparse.Namespace, seed: int) -> list[Row]:
    posterior = DeepEnsemble([network() for _ in range(given.members)])
    seconds = train(posterior, data, given, seed)
    return [measured("Deep ensemble", posterior, data, seconds)]


RUNS: dict[str, Callable[[Data, argparse.Namespace, int], list[Row]]] = {
    "map": one_network,
    "tradi": tracked,
    "swag": averaged,
    "ensemble": ensemble,
}

# ------------------------------------------------------------------------------------------- measures


def refreshed(name: str, posterior: ds.Posterior, data: Data, train_seconds: float) -> Row:
    """One row of a fresh draw."""
    start = time.perf_counter()
    ds.refresh(posterior, data.loader(0))
    return {**measured(name, posterior, data, train_seconds), "refresh_seconds": time.perf_counter() - start}


def measured(name: str, posterior: ds.Posterior, data: Data, train_seconds: float) -> Row:
    """One row: percentages are in %, scores are −log of the largest probability, OOD positive."""
    log_mean, y = predicted(posterior, data.x_test, data.y_test), data.y_test.cpu()
    ood = predicted(posterior, data.x_ood, torch.zeros(len(data.x_ood), dtype=torch.int64))
    inside, outside = ds.metrics.max_probability_score(log_mean), ds.metrics.max_probability_score(ood)
    probabilities = log_mean.exp()
    # The union's error depends on the share of OOD: rows repeated to the paper's 18,724.
    repeated = ood.exp()[torch.arange(round(len(y) * PREVALENCE / (1 - PREVALENCE))) % len(ood)]
    values = {
        "accuracy": 100 * ds.metrics.accuracy(probabilities, y),
        "nll": ds.metrics.nll(log_mean, y),
        "auroc": 100 * ds.metrics.auroc(inside, outside),
        "aupr": 100 * ds.metrics.aupr(inside, outside),
        "aupr_adjusted": 100 * ds.metrics.aupr_adjusted(inside, outside, prevalence=PREVALENCE),
        "fpr95": 100 * ds.metrics.fpr95(inside, outside),
        "fpr95_nearest": 100 * ds.metrics.fpr95(inside, outside, rule="nearest"),
        "fpr95_in": 100 * ds.metrics.fpr95_in(inside, outside),
        "ece": ds.metrics.ece(probabilities, y),
        "ece_union": ds.metrics.union_ece(probabilities, y, repeated),
    }
    numbers = {key: float(value) for key, value in values.items()}
    return {"method": name, **numbers, "train_seconds": train_seconds, "refresh_seconds": 0.0}


def predicted(posterior: ds.Posterior, x: Tensor, y: Tensor) -> Tensor:
    """(N, C) log-probabilities of the mixture, in float64 on the host."""
    predictive, _ = ds.predict(posterior, ds.data.Batches(x, y, batch_size=2000))
    assert isinstance(predictive, ds.ClassificationPredictive)
    members = predictive.members.double().cpu()
    return torch.logsumexp(members, 0) - torch.tensor(float(len(members))).log()


def table(rows: list[Row]) -> str:
    """Mean ± standard error over seeds, the paper's number in brackets."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        cells = [f"{method} ({len(mine)} seeds)"]
        for column in COLUMNS:
            mean, _, error = summary(row[column] for row in mine)
            digits = 3 if column in ("nll", "ece", "ece_union") else 1 if column == "train_seconds" else 2
            paper = PAPER.get(method, {}).get(column)
            cells.append(f"{mean:.{digits}f} ± {error:.{digits}f}" + (f" [{paper}]" if paper is not None else ""))
        lines.append(cells)
    return markdown(["method", *COLUMNS], lines)


if __name__ == "__main__":
    main()

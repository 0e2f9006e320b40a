"""Errors of predictions in bf16 against those in float32, of networks trained on the digits of the package; CSV out.

    python benchmarks/bf16_predictions.py --csv benchmarks/results/bf16_predictions.csv

A convolutional ensemble, a ResNet-20 ensemble, MC dropout of the former and an MLP ensemble are trained for a few epochs, then
evaluated twice with the same functions: `ds.predict` and `ds.evaluate` in float32 and in bf16, on the test digits and on
clothes, which no network knows.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from rows import made_on, markdown, write_rows
from torch import nn

import dissensus as ds
from dissensus.core.predictive import ClassificationPredictive
from dissensus.data import Batches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def conv() -> nn.Module:
    return ds.nets.ConvNet(1, 10)


CASES: dict[str, tuple[Callable[[], ds.Posterior], int, int]] = {  # posterior, epochs, training rows
    "5 conv nets": (lambda: ds.DeepEnsemble([conv() for _ in range(5)]), 3, 5000),
    "MC dropout, 10 samples": (lambda: ds.MCDropout(conv(), rate=0.2, samples=10), 3, 5000),
    "5 MLPs": (
        lambda: ds.DeepEnsemble([nn.Sequential(nn.Flatten(), ds.nets.MLP(784, 10)) for _ in range(5)]),
        6,
        10_000,
    ),
    "3 ResNet-20": (lambda: ds.DeepEnsemble([ds.nets.ResNet(20, channels=1) for _ in range(3)]), 3, 2000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(name.split(",")[0] for name in CASES))
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    rows = []
    for name, (make, epochs, rows_seen) in CASES.items():
        if name.split(",")[0] in options.cases.split(","):
            rows.append({"networks": name, **measured(make, epochs, rows_seen)})
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if options.csv:
        write_rows(options.csv, rows)


def measured(make: Callable[[], ds.Posterior], epochs: int, seen: int) -> dict[str, object]:
    """Numbers of one posterior."""
    torch.manual_seed(0)
    train, test = ds.data.digits()
    standardise = ds.data.Standardiser.of_channels(train.images)
    x, y = standardise(test.images).to(DEVICE), test.labels.to(DEVICE)
    foreign = standardise(ds.data.fashion().images).to(DEVICE)
    posterior = make().to(DEVICE)
    images, labels = standardise(train.images[:seen]).to(DEVICE), train.labels[:seen].to(DEVICE)
    loader = Batches(images, labels, batch_size=100, shuffle=True)
    optimizer = torch.optim.AdamW(posterior.parameter_groups(lr=1e-3, weight_decay=1e-4))
    ds.fit(posterior, loader, epochs=epochs, optimizer=optimizer, progress=False)
    ds.refresh(posterior, loader)
    predictives: dict[str, list[ClassificationPredictive]] = {"float32": [], "bf16": []}
    numbers = {}
    for precision, found in predictives.items():
        for inputs in (x, foreign):
            torch.manual_seed(1)  # the same masks
            rows = Batches(inputs, y[: len(inputs)], batch_size=250)
            found.append(ds.predict(posterior, rows, precision=precision))  # type: ignore[arg-type]
        torch.manual_seed(1)
        evaluation = ds.evaluate(
            posterior, Batches(x, y, batch_size=250), ood={"clothes": foreign}, precision=precision, progress=False
        )  # type: ignore[arg-type]
        for name in ("accuracy", "nll", "ece", "ood/clothes/auroc"):
            numbers[f"{name.removeprefix('ood/')}_{precision}"] = evaluation.metrics[name]
    pairs = list(zip(*predictives.values(), strict=True))
    means = [(half.mean - exact.mean).abs() for exact, half in pairs]
    members = [(half.member_means - exact.member_means).abs() for exact, half in pairs]
    others = sum(int((half.mean.argmax(1) != exact.mean.argmax(1)).sum()) for exact, half in pairs[:1])
    return {
        "parameters": sum(p.numel() for p in posterior.parameters()),
        "largest_mean": f"{float(means[0].max()):.2g}",
        "largest_member": f"{float(members[0].max()):.2g}",
        "average_member": f"{float(members[0].mean()):.2g}",
        "largest_mean_clothes": f"{float(means[1].max()):.2g}",
        "largest_member_clothes": f"{float(members[1].max()):.2g}",
        "rows": len(x),
        "decisions_changed": others,
        **{key: f"{value:.5f}" for key, value in numbers.items()},
        **made_on(DEVICE),
    }


def half_table(found: list[dict[str, str]]) -> str:
    """One row per posterior and device, for docs/results/speed.md."""
    heads = ["networks", "largest error of a mean", "of a member", "decisions changed"]
    heads += ["NLL, float32", "bf16"]
    lines = []
    for row in found:
        numbers = [f"{float(row[f'{name}_{kind}']):.4f}" for name in ("nll",) for kind in ("float32", "bf16")]
        largest = [row[f"largest_{which}"] for which in ("mean", "member")]
        lines.append([row["networks"], *largest, f"{row['decisions_changed']} of {row['rows']}", *numbers])
    made = "; ".join(dict.fromkeys(f"commit {row['commit']}, torch {row['torch']}, {row['device']}" for row in found))
    return f"{markdown(heads, lines)}\n\n*`python benchmarks/bf16_predictions.py --csv FILE`; {made}.*"


if __name__ == "__main__":
    main()

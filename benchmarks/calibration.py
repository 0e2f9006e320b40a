"""What calibration on 2,000 held-out images does, and how large conformal sets are: CIFAR-10, ResNet-20, four posteriors; CSV.

    python benchmarks/calibration.py --data FOLDER --out runs/calibration

FOLDER holds CIFAR-10 and resnet_cifar10/resnet20.safetensors, as the task `pretrained` reads them. Posteriors, all of the
published ResNet-20:

    map             the network as it came
    deep_ensemble   five copies of it, each fine-tuned by itself for ten epochs with an order and augmentation of its own, at
                    rates from 0.03 on: they share their start, so they differ less than networks trained from scratch
    node_bnn        noise on the output nodes, eight components, fine-tuned with SETTINGS
    swag            the fine-tune at a constant rate of 0.01 for ten epochs, a Gaussian around its second half

Settings were chosen on the task's 2,000 calibration images at the most; every calibration is fitted on those, and all numbers
are of the other 8,000, of which 1,000 calibrate the sets and 7,000 test them. Differences are paired by image, with intervals
by the bootstrap of dissensus.metrics. Runs lie in --out; started again, it goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rows import Row, markdown, origins_of, read_rows, write_rows
from torch import Tensor, nn

import dissensus as ds
from dissensus.bench.run.jobs import run_all
from dissensus.bench.run.run import Run
from dissensus.bench.run.run_folder import provenance, read_predictions
from dissensus.bench.task.config import load_task
from dissensus.calibration.calibrate import OF_CLASSES, HeldOutRows, fit_correction
from dissensus.core.calibrated import Correction
from dissensus.core.predictive import CategoricalPredictive, ClassificationPredictive
from dissensus.metrics import paired_bootstrap, paired_test
from dissensus.metrics.classification import confidence_ece

HERE = Path(__file__).parent
NUMBERS, SETS = "calibration.csv", "calibration_sets.csv"
RUNS = {"map": "map", "deep_ensemble": "map-tuned", "node_bnn": "node_bnn-out8", "swag": "swag"}
NAMES = {"map": "MAP", "deep_ensemble": "Deep ensemble (5 fine-tuned)", "node_bnn": "NodeBNN", "swag": "SWAG"}
MEMBERS = 5  # of the deep ensemble
SCORES = ("lac", "aps", "raps")
PROMISING, LEVEL = 1000, 0.9  # images that calibrate sets, and what those promise
OVERRIDES = (
    *("data.ood=[]", "evaluation.corrupt=none"),
    *("method.swag.rank=20", "method.swag.samples=30", "method.swag.training.schedule=constant"),
    *("method.swag.training.lr=0.01", "method.swag.training.epochs=10"),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "node_bnn-out8": {"init_std": 0.15, "batch_norm": "frozen", "train_samples": 4, "latent_lr": 0.01}
    | {"training.optimizer": "sgd", "training.lr": 0.01},
    "map-tuned": {"training.lr": 0.03},
}
FACTS = ("dissensus", "commit", "torch", "device")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None, help="folder of the sets; DISSENSUS_DATA by default")
    parser.add_argument("--out", type=Path, default=Path("runs/calibration"))
    parser.add_argument("--methods", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--seeds", type=int, default=1, help="of node_bnn and swag; ensembles take five more each")
    parser.add_argument("--size", default="paper")
    parser.add_argument("--set", action="append", default=[], help="as of `dissensus bench`")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    given = parser.parse_args()
    settings = [f"method.{name}.{key}={value}" for name, each in SETTINGS.items() for key, value in each.items()]
    methods = [RUNS[method] for method in given.methods]
    task = load_task(
        "pretrained", size=given.size, overrides=[*settings, *OVERRIDES, *given.set], methods=sorted({*methods})
    )
    for method in given.methods:
        count = given.seeds * (MEMBERS if method == "deep_ensemble" else 1) if method != "map" else 1
        runs, _ = run_all(
            task, methods=[RUNS[method]], seeds=range(count), out=given.out, source=given.data, tell=print
        )
        groups = [runs[i : i + MEMBERS] for i in range(0, count, MEMBERS)] if method == "deep_ensemble" else runs
        for seed, group in enumerate(groups):
            numbers, sets = measured(group if isinstance(group, list) else [group])
            about = {"method": method, "seed": seed}
            facts = {key: value for key, value in provenance(runs[0].device).items() if key in FACTS}
            facts["commit"] = " and ".join(dict.fromkeys([runs[0].provenance["commit"], facts["commit"]]))
            for name, found in ((NUMBERS, numbers), (SETS, sets)):
                kept = [
                    row
                    for row in read_rows(given.results / name)
                    if (row["method"], row["seed"]) != (method, str(seed))
                ]
                write_rows(given.results / name, [*kept, *(about | row | facts for row in found)])
    print(page(read_rows(given.results / NUMBERS), read_rows(given.results / SETS)))


def measured(runs: Sequence[Run]) -> tuple[list[Row], list[Row]]:
    """(numbers before and after each calibration, sizes of sets) of the mixture of these runs' functions."""
    held, test = (said(runs, split) for split in ("calibration", "test"))
    before = test.predictive
    numbers, sets = [], []
    for calibration in ("none", *OF_CLASSES):
        lens = Correction(1.0, None) if calibration == "none" else fit_correction(held, calibration)
        after = seen(test, lens)
        if calibration != "none":
            numbers.append({"calibration": calibration, **compared(before, after, test.y)})
        sets += [{"calibration": calibration, **row} for row in sizes(after, test.y)]
    return numbers, sets


def said(runs: Sequence[Run], split: str) -> HeldOutRows:
    """What all members of the runs say of a split: one mixture."""
    parts = [read_predictions(run.folder / "predictions" / f"{split}.safetensors") for run in runs]
    members = torch.cat([part.predictive.log_probs for part in parts])
    targets = parts[0].targets
    assert all(torch.equal(part.targets, targets) for part in parts)
    return HeldOutRows(ClassificationPredictive(members), targets, torch.ones(len(targets), dtype=torch.float64))


def seen(rows: HeldOutRows, lens: Correction) -> CategoricalPredictive:
    found: Any = lens.correct_mixture(lens.correct_members(rows.predictive))
    return found


def compared(before: Any, after: Any, y: Tensor) -> Row:
    """NLL, ECE and accuracy before and after, with the paired differences, their 95 % intervals and p-values."""
    found: Row = {"rows": len(y)}
    pairs = [[each.mean.max(1) for each in (after, before)], [each.log_mean for each in (after, before)]]
    answers = [(largest.values.double(), (largest.indices == y).double()) for largest in pairs[0]]
    losses = [-log_mean.gather(1, y[:, None])[:, 0].double() for log_mean in pairs[1]]
    for i, name in enumerate(("", "_before")):
        found[f"accuracy{name}"] = float(answers[i][1].mean())
        found[f"nll{name}"] = float(losses[i].mean())
        found[f"ece{name}"] = float(confidence_ece(*answers[i]))
    differences = {"nll": paired_test(*losses), "ece": paired_bootstrap(confidence_ece, *answers)}
    for name, difference in differences.items():
        found |= {f"{name}_{key}": value for key, value in difference._asdict().items()}
    return found


def sizes(predictive: CategoricalPredictive, y: Tensor) -> Iterator[Row]:
    """Coverage and mean size of sets, promised on some of the rows and measured on the others.

    These scores read the mean alone: a network that gives back the logarithm of the mean predicts the same mixture.
    """
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    count = min(PROMISING, len(y) // 2)
    promising, testing = order[:count], order[count:]
    network = ds.MAP(nn.Identity())
    logits = predictive.log_mean
    for score in SCORES:
        promise = ds.conformal(
            network, [(logits[promising], y[promising])], level=LEVEL, score=score, randomised=score != "lac"
        )
        found = promise.set(logits[testing], generator=torch.Generator().manual_seed(0))
        size = found.sum(1).double()
        yield {
            "score": score,
            "level": LEVEL,
            "coverage": float(found.gather(1, y[testing, None]).double().mean()),
            "size": float(size.mean()),
            "size_error": float(size.std() / len(size) ** 0.5),
            "rows": len(testing),
        }


def page(numbers: Sequence[Row], sets: Sequence[Row]) -> str:
    """Both tables, and where they come from."""
    lines = []
    for row in numbers:
        if row["method"] != "map" and row["calibration"] != "temperature":
            continue
        cells = [f"{NAMES[row['method']]}, {row['calibration']}"]
        for name, factor, digits in (("ece", 100, 2), ("nll", 1, 4)):
            low, high = (f"{factor * float(row[f'{name}_{end}']):+.{digits}f}" for end in ("lower", "upper"))
            pair = (f"{factor * float(row[f'{name}{which}']):.{digits}f}" for which in ("_before", ""))
            cells += [*pair, f"{low} to {high}"]
        lines.append([*cells, f"{100 * float(row['accuracy']):.2f}"])
    header = [
        "",
        "ECE %, before",
        "after",
        "difference, 95 %",
        "NLL, before",
        "after",
        "difference, 95 %",
        "accuracy %",
    ]
    first = markdown(header, lines)
    lines = []
    for row in sets:
        if row["calibration"] == "none" or (row["method"], row["calibration"]) == ("map", "temperature"):
            if row["score"] == SCORES[0]:
                about = "" if row["calibration"] == "none" else f", {row['calibration']}"
                lines.append([f"{NAMES[row['method']]}{about}"])
            lines[-1].append(f"{float(row['size']):.3f} ({100 * float(row['coverage']):.1f} %)")
    second = markdown(["classes in a set (coverage)", *(score.upper() for score in SCORES)], lines)
    return "\n\n".join([first, second, made(numbers)])


def made(rows: Sequence[Mapping[str, Any]]) -> str:
    seeds = len({row["seed"] for row in rows})
    return (
        f"*`python benchmarks/calibration.py --data FOLDER`; {seeds} seed{'s' * (seeds > 1)}, {int(float(rows[0]['rows'])):,} "
        f"test images, intervals paired by image; {origins_of(rows)}; all rows in `{NUMBERS}` and `{SETS}`.*"
    )


if __name__ == "__main__":
    main()

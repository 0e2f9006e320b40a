"""Writes the tables of README.md and docs/ from the CSV files in benchmarks/results.

    python benchmarks/tables.py

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`; what is there is replaced.
"""

import csv
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMMAND = "python benchmarks/speed.py --csv FILE"


def rows(name: str) -> list[dict[str, str]]:
    path = RESULTS / name
    return list(csv.DictReader(path.open())) if path.exists() else []


def speed_table(*, short: bool) -> str:
    """The H200 and CPU comparisons; the short one has training at the cases' own sizes only."""
    lines = [
        "| device | network | M | batch | what | loop over members | dissensus | ratio | how it ran |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    commits = set()
    for file in ("speed_h200.csv", "speed_cpu.csv"):
        for row in rows(file):
            training = row["what"] == "training step"
            own_size = (row["case"], row["members"], row["batch"]) in {
                ("mlp", "20", "128"),
                ("mlp16", "20", "16"),
                ("resnet18", "10", "128"),
                ("conv", "5", "128"),
            }
            if short and not (training and own_size):
                continue
            commits.add(f"{row['commit']}, torch {row['torch']}")
            network = {
                "mlp": "MLP 784-200-200-200-10",
                "mlp16": "MLP 784-200-200-200-10",
                "resnet18": "ResNet-18",
                "conv": "small conv net",
            }[row["case"]]
            device = "H200" if "H200" in row["device"] else "2 CPU cores"
            lines.append(
                f"| {device} | {network} | {row['members']} | {row['batch']} | {row['what']} | {float(row['loop_ms']):.4g} ms "
                f"| {float(row['ms']):.3g} ms | {float(row['ratio']):.3g}× | {row['ran']} |"
            )
    return "\n".join([*lines, "", f"*`{COMMAND}`; commit {'; '.join(sorted(commits))}.*"])


def grouped_table(file: str, key: str, columns: dict[str, str], *, where: str, command: str) -> str:
    """Mean ± standard deviation over seeds of each group's columns; `columns`: CSV name -> heading."""
    found = rows(file)
    groups: dict[str, list[dict[str, str]]] = {}
    for row in found:
        groups.setdefault(row[key], []).append(row)
    lines = [f"| {key} | " + " | ".join(columns.values()) + " |", "|" + "---|" * (len(columns) + 1)]
    for name, members in groups.items():
        cells = []
        for column in columns:
            values = [float(row[column]) for row in members]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.4g} ± {spread:.2g}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    seeds = len({row["seed"] for row in found})
    facts = f"{seeds} seeds, mean ± standard deviation; commit {found[0]['commit']}, torch {found[0]['torch']}, {where}"
    return "\n".join([*lines, "", f"*`{command}`; {facts}.*"])


def fill(path: Path, name: str, table: str) -> None:
    text = path.read_text()
    block = f"<!-- {name} -->\n{table}\n<!-- /{name} -->"
    pattern = rf"<!-- {name} -->(.*?<!-- /{name} -->)?"
    path.write_text(re.sub(pattern, lambda _: block, text, count=1, flags=re.DOTALL))


def main() -> None:
    fill(ROOT / "README.md", "speed", speed_table(short=True))
    fill(ROOT / "docs" / "speed.md", "speed", speed_table(short=False))
    ood = {
        "accuracy": "accuracy %",
        "nll": "NLL",
        "auroc": "AUROC %",
        "aupr_adjusted": "AUPR %, adjusted",
        "fpr95": "FPR95 %",
        "fpr95_in": "FPR95 %, ID positive",
        "ece": "ECE",
        "ece_union": "ECE, union",
        "train_seconds": "training, s",
    }
    table = grouped_table(
        "mnist_ood_h200.csv",
        "method",
        ood,
        where="one H200",
        command="python benchmarks/mnist_ood.py --data FOLDER --seeds 0,1,2 --device cuda --csv FILE",
    )
    fill(ROOT / "docs" / "tracking.md", "mnist-ood", table)
    toy = {
        "sd_between": "sd between clusters",
        "sd_outside": "sd outside",
        "sd_at_data": "sd at the data",
        "rmse": "RMSE",
        "gradient_angle": "angle of input gradients",
    }
    table = grouped_table(
        "particles_toy_regression.csv",
        "method",
        toy,
        where="one H200",
        command="python benchmarks/particles_toy.py --tasks regression --seeds 3 --device cuda",
    )
    fill(ROOT / "docs" / "particles.md", "toy-regression", table)


if __name__ == "__main__":
    main()

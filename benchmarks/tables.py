"""Writes the tables of README.md and docs/ from the CSV files in benchmarks/results.

    python benchmarks/tables.py

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`; what is there is replaced.
"""

import csv
import re
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


def fill(path: Path, name: str, table: str) -> None:
    text = path.read_text()
    block = f"<!-- {name} -->\n{table}\n<!-- /{name} -->"
    pattern = rf"<!-- {name} -->(.*?<!-- /{name} -->)?"
    path.write_text(re.sub(pattern, lambda _: block, text, count=1, flags=re.DOTALL))


def main() -> None:
    fill(ROOT / "README.md", "speed", speed_table(short=True))
    fill(ROOT / "docs" / "speed.md", "speed", speed_table(short=False))


if __name__ == "__main__":
    main()

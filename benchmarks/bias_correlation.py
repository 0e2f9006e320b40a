"""The correlation of embedded members' outputs at the start, with and without biases, beside `theory.regime`'s prediction.

    python benchmarks/bias_correlation.py --csv benchmarks/results/bias_correlation.csv

Networks of three linear layers in torch's own initialisation, four members, 64 random inputs, ten outputs; factors on some
layers or on all.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from rows import Row, made_on, markdown, summary, write_rows
from torch import nn

import dissensus as ds

MEMBERS, INPUTS, SEEDS = 4, 32, 40
WIDTHS = (64, 256)
CASES: dict[str, dict[str, Any]] = {
    "signs on the first two of three layers": {"modulation": ds.Modulation.sign(), "layers": ["0", "2"]},
    "signs on the first of three layers": {"modulation": ds.Modulation.sign(), "layers": ["0"]},
    "normal(1, 0.5) on all layers": {"modulation": ds.Modulation.normal(1, 0.5)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    given = parser.parse_args()
    facts = made_on("cpu")
    rows: list[Row] = []
    for case in CASES:
        for width in WIDTHS:
            rows += [
                {"case": case, "width": width, "seed": seed, **trial(case, width, seed), **facts}
                for seed in range(SEEDS)
            ]
            write_rows(given.csv, rows)
    print(page(rows))


def trial(case: str, width: int, seed: int) -> dict[str, float]:
    """What is predicted, and what is measured with torch's biases and with biases of 0."""
    found = {}
    for name in ("biases", "no biases"):
        torch.manual_seed(seed)
        layers = [nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
        network = nn.Sequential(*layers)
        if name == "no biases":
            for layer in layers[::2]:
                nn.init.zeros_(layer.bias)
        x = torch.randn(64, INPUTS)
        posterior = ds.BatchEnsemble(network, members=MEMBERS, likelihood=ds.Regression(1.0), **CASES[case])
        outputs = posterior(x).detach().flatten(1).double()  # (M, B·C)
        own = outputs.square().sum()  # as `regime(posterior, x).measured_correlation` does, without its rate
        between = (outputs.sum(0).square().sum() - own) / ((MEMBERS - 1) * own)
        found |= {"predicted": ds.theory.regime(posterior).correlation, name: float(between)}
    return found


def page(rows: list[Row]) -> str:
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        for width in dict.fromkeys(row["width"] for row in rows):
            mine = [row for row in rows if (row["case"], row["width"]) == (case, width)]
            cells = [f"{summary(row['predicted'] for row in mine)[0]:.2f}"]
            for key in ("no biases", "biases"):
                mean, _, error = summary(row[key] for row in mine)
                cells.append(f"{mean:.2f} ± {error:.2f}")
            lines.append([case, str(width), *cells])
    table = markdown(["factors", "N", "predicted", "measured, biases of 0", "measured, torch's biases"], lines)
    first, seeds = rows[0], len({row["seed"] for row in rows})
    facts = f"{seeds} networks each, mean ± standard error; commit {first['commit']}, torch {first['torch']}, {first['device']}"
    return f"{table}\n\n*`python benchmarks/bias_correlation.py --csv FILE`; {facts}.*"


if __name__ == "__main__":
    main()

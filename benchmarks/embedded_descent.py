"""How many steps of descent M embedded members need for the loss that M independent networks reach.

    python benchmarks/embedded_descent.py --csv benchmarks/results/embedded_descent.csv \\
        --figure docs/figures/embedded-descent.png

Signs as modulations, NTK form, two hidden layers of width N, squared error on 16 examples, whole batches. Both sides descend at
0.9 of the largest stable rate that `ds.theory.regime` finds for them; the independent networks have modulations as well,
and train them. `ratio`: the steps of the embedded members over those (`reference`) after which the independent ones were at the
same mean loss. Some minutes on one core; rows that are there already are kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rows import by_key, read_rows, summary, write_rows
from torch import Tensor

import dissensus as ds
from dissensus.bench.run.run_folder import provenance

MEMBERS, SHARES = (4, 8, 16), (4, 8, 16, 32, 64)  # M, and N/M
EXAMPLES, INPUTS, REFERENCE, LONGEST = 16, 10, 60, 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--widest", type=int, default=512)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    about, rows = provenance(torch.device("cpu")), list(read_rows(arguments.csv))
    done = {(int(row["members"]), int(row["width"]), int(row["seed"])) for row in rows}
    for members in MEMBERS:
        for width in (members * share for share in SHARES if members * share <= arguments.widest):
            for seed in range(arguments.seeds):
                if (members, width, seed) not in done:
                    found = compared(members, width, seed)
                    print(f"M = {members}, N = {width}, seed {seed}: {found['ratio']} times the steps", flush=True)
                    rows.append({"members": members, "width": width, **found, **about})
                    write_rows(arguments.csv, rows)
    if arguments.figure:
        figure(arguments.csv, arguments.figure)


def compared(members: int, width: int, seed: int) -> dict[str, float]:
    """Steps that embedded members need for the loss of independent ones at step REFERENCE."""
    torch.manual_seed(seed)
    x = torch.randn(EXAMPLES, INPUTS)
    y = torch.sin(x @ torch.randn(INPUTS, 1))
    alone = [ensemble(1, width) for _ in range(members)]
    rate = 0.9 * min(found for each in alone if (found := ds.theory.regime(each, x).rate) is not None)
    losses = sum(torch.tensor(descent(each, x, y, rate, steps=REFERENCE)) for each in alone) / members
    wanted = float(losses[-1])
    together = ensemble(members, width)
    found = ds.theory.regime(together, x).rate
    course = descent(together, x, y, 0.9 * (found or 0.0), steps=LONGEST, until=wanted)
    steps = len(course) - 1
    return {
        "seed": seed,
        "reference": REFERENCE,
        "loss": round(wanted, 6),
        "steps": steps,
        "ratio": round(steps / REFERENCE, 3) if course[-1] <= wanted else float("inf"),
        "rate": round(0.9 * (found or 0.0), 5),
        "rate_independent": round(rate, 5),
    }


def ensemble(members: int, width: int) -> ds.BatchEnsemble:
    """Members with signs, for a squared error."""
    net = ds.nets.MLP(INPUTS, 1, hidden=(width, width), parameterization="ntk")
    law = ds.Modulation.sign()
    return ds.BatchEnsemble(net, members=members, modulation=law, form="talk", likelihood=ds.Regression(1.0))


def descent(
    posterior: ds.BatchEnsemble, x: Tensor, y: Tensor, rate: float, *, steps: int, until: float = -1.0
) -> list[float]:
    """Mean squared error of members before each step and after the last; ends where it is below `until`."""
    optimizer = torch.optim.SGD(posterior.parameter_groups(rate), lr=rate)
    course = []
    for _ in range(steps + 1):
        optimizer.zero_grad()
        losses = posterior.backward(x, y)
        course.append(2 * float(losses.mean()) - 1.8378770664093453)  # log 2π of the Gaussian
        if course[-1] <= until:
            break
        optimizer.step()
    return course


def figure(table: Path, path: Path) -> None:
    """The ratio over N/M, one line for each M, mean and range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawn, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    for members, mine in by_key(read_rows(table), "members").items():
        widths = sorted({int(row["width"]) for row in mine})
        each = [[float(row["ratio"]) for row in mine if int(row["width"]) == width] for width in widths]
        shares, means = [width / int(members) for width in widths], [summary(values)[0] for values in each]
        axes.plot(shares, means, marker="o", label=f"M = {members}")
        axes.fill_between(shares, [min(v) for v in each], [max(v) for v in each], alpha=0.2)
    axes.axhline(1.0, color="0.3", linewidth=0.8)
    axes.axhline(1.5, color="0.3", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="width per member, N/M", ylabel="steps, of those of independent networks")
    axes.set_xticks(SHARES, [str(share) for share in SHARES])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=150)


if __name__ == "__main__":
    main()

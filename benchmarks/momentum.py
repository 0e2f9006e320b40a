"""How often SGD diverges at multiples of `theory.regime`'s rate, without momentum and with it; CSV out.

    python benchmarks/momentum.py --csv benchmarks/results/momentum.csv --jobs 8
    python benchmarks/momentum.py --csv benchmarks/results/momentum_trials.csv --trials   # one row each, where any is lost

A trial is an embedded ensemble of NTK MLPs on 16 random inputs with targets sin Σ x, full batches, 400 steps: 48 of them a
cell, over three laws of modulations, four widths and four seeds. It has diverged where the loss is not finite or above that of
the start at the end.
"""

import argparse
import multiprocessing
from itertools import product
from pathlib import Path

import torch
from rows import Row, made_on, markdown, origins_of, write_rows

import dissensus as ds

MOMENTA, FACTORS = (0.0, 0.9, 0.95), (0.5, 0.75, 1.0, 1.3)
LAWS = {"sign": ds.Modulation.sign(), "normal": ds.Modulation.normal(1, 0.5), "between": ds.Modulation.between(0.3)}
BELOW = ((0.9, 0.75), (0.9, 1.0), (0.95, 0.5), (0.95, 0.75), (0.95, 1.0))
WIDTHS, SEEDS, MEMBERS, STEPS = (16, 32, 64, 128), range(4), 4, 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--trials", action="store_true", help="write each trial of the cells below, up to the rate itself"
    )
    given = parser.parse_args()
    rows: list[Row] = []
    facts = made_on("cpu")
    with multiprocessing.get_context("spawn").Pool(given.jobs, torch.set_num_threads, (1,)) as pool:
        for beta, factor in BELOW if given.trials else product(MOMENTA, FACTORS):
            trials = list(product(LAWS, WIDTHS, SEEDS, [beta], [factor]))
            each = pool.starmap(diverges, trials)
            if given.trials:
                named = [
                    dict(zip(("law", "width", "seed", "momentum", "factor"), trial, strict=True)) for trial in trials
                ]
                rows += [{**trial, "diverged": int(one), **facts} for trial, one in zip(named, each, strict=True)]
                continue
            lost = sum(each)
            rows.append({"momentum": beta, "factor": factor, "trials": len(trials), "diverged": lost, **facts})
            print(f"β = {beta:g}, {factor:g} times the rate: {lost} of {len(trials)} diverged", flush=True)
    write_rows(given.csv, rows)


def diverges(law: str, width: int, seed: int, beta: float, factor: float) -> bool:
    torch.manual_seed(seed)
    network = ds.nets.MLP(10, 1, hidden=(width, width), parameterization="ntk").double()
    settings = {"form": "talk", "likelihood": ds.Regression(1.0), "regime": "independent"}
    posterior = ds.BatchEnsemble(network, members=MEMBERS, modulation=LAWS[law], **settings)
    x = torch.randn(16, 10, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True))
    rate = ds.theory.regime(posterior, x).rate
    assert rate is not None
    optimizer = torch.optim.SGD(posterior.parameter_groups(factor * rate), lr=factor * rate, momentum=beta)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(posterior.backward(x, y).sum()))
        if not losses[-1] < 1e6 * losses[0]:
            return True
        optimizer.step()
    return not losses[-1] < losses[0]


def page(rows: list[Row], trials: list[Row]) -> str:
    """Shares of trials that diverged, a row for each momentum; and which of them did at the rate or below."""
    factors = list(dict.fromkeys(row["factor"] for row in rows))
    lines = []
    for beta in dict.fromkeys(row["momentum"] for row in rows):
        mine = {row["factor"]: row for row in rows if row["momentum"] == beta}
        lines.append([beta, *(f"{mine[factor]['diverged']} of {mine[factor]['trials']}" for factor in factors)])
    table = markdown(["momentum", *(f"{factor} × rate" for factor in factors)], lines)
    lost = [int(row["width"]) for row in trials if row["diverged"] == "1"]
    widths = ", ".join(f"{lost.count(width)} of width {width}" for width in sorted(set(lost)))
    said = f"Lost up to the rate itself: {widths}."
    command = "`python benchmarks/momentum.py --csv FILE`, and with `--trials`"
    made = f"*Trials that diverged. {command}; {origins_of([*rows, *trials])}.*"
    return "\n\n".join([table, said, made])


if __name__ == "__main__":
    main()

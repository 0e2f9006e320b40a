"""How entropy off the data grows with steps, members and strength, on the five blobs of `toy-classification`.

    python benchmarks/toy_entropy.py --seeds 3 --jobs 12      # writes results/toy_entropy.csv and a figure in docs/figures
    python benchmarks/tables.py

The poster of FoRDE shows an entropy above 1 nearly everywhere off the data; the task's 16 members reach 0.4 after 12,000 steps.
Here the same recipe goes on to 50,000 steps, with 16 and 50 members, by the gradient of the logit and of the log-probability,
and FoRDE and LIT at equal strengths. The schedule is stretched with the run. Networks, batches and regions are the task's.
Runs lie in --out, many at a time on one device; started again, it goes on where it was, and --seconds says when to stop.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rows import Row, by_key, made_by, made_on, markdown, read_rows, summary, write_rows

from dissensus.bench.run import build
from dissensus.bench.run.prediction_splits import geometry_of
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task, run_config
from dissensus.core.divergence import Diverged
from dissensus.storage.atomic_files import write_text
from dissensus.training.fit import fit
from dissensus.training.history import Epoch

ROOT = Path(__file__).parents[1]
LOOKS = (500, 1000, 2000, 4000, 8000, 12_000, 20_000, 30_000, 40_000, 50_000)  # steps
STEPS_PER_EPOCH = 4


@dataclass(frozen=True)
class Case:
    """A method with its settings; strength: FoRDE's `repulsion` and LIT's `strength`, 1/B = 0.02 in the task."""

    method: str
    members: int = 16
    strength: float | None = None
    gradient: str | None = None

    @property
    def name(self) -> str:
        said = [self.method, f"M = {self.members}"]
        said += [] if self.strength is None else [f"strength {self.strength:g}"]
        return ", ".join(said + ([] if self.gradient in (None, "logit") else ["log-probability"]))

    @property
    def overrides(self) -> list[str]:
        keys = {
            "members": self.members,
            {"forde": "repulsion", "lit": "strength"}.get(self.method, "strength"): self.strength,
            "gradient": self.gradient,
        }
        return [f"method.{self.method}.{key}={value}" for key, value in keys.items() if value is not None]


CASES = [
    Case("deep_ensemble"),
    Case("deep_ensemble", 50),
    *(Case("forde", members, 0.02, gradient) for members in (16, 50) for gradient in ("logit", "log_prob")),
    *(Case(method, 16, strength, "logit") for strength in (0.1, 0.5) for method in ("forde", "lit")),
    Case("lit", 16, 0.02, "logit"),
    Case("lit", 50, 0.02, "logit"),
    *(Case(method, 16, 0.1, "log_prob") for method in ("forde", "lit")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=LOOKS[-1])
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop training after so long; go on later")
    parser.add_argument("--out", type=Path, default=Path("runs/toy-entropy"))
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "toy_entropy.csv")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "figures" / "toy-entropy.png")
    given = parser.parse_args()
    until = time.time() + given.seconds
    asked = [(case, seed) for seed in range(given.seeds) for case in CASES]
    asked.sort(key=lambda each: (each[1], -each[0].members))
    done = 0
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn"), initializer=on_one_core) as pool:
        futures = [pool.submit(train, case, seed, given.steps, given.out, until) for case, seed in asked]
        for future in as_completed(futures):
            name, finished = future.result()
            done += finished
            print(f"[{done}/{len(asked)}] {name}{'' if finished else ': stopped, to go on later'}", flush=True)
    rows = [row for case, seed in asked for row in read_looks(folder_of(given.out, case, seed))]
    if done < len(asked) or not rows:
        raise SystemExit(f"{len(asked) - done} of {len(asked)} runs are not finished; run the same command again")
    write_rows(given.csv, rows)
    given.figure.parent.mkdir(parents=True, exist_ok=True)
    figure(rows).savefig(given.figure, dpi=110, facecolor="white")
    print(table(read_rows(given.csv)))


def on_one_core() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def folder_of(out: Path, case: Case, seed: int) -> Path:
    slug = "-".join(str(part) for part in (case.method, case.members, case.strength, case.gradient) if part is not None)
    return out / f"{slug}-seed{seed}"


def read_looks(folder: Path) -> list[Row]:
    """The looks at a run, one row each, by steps."""
    if not (folder / "looks.jsonl").is_file():
        return []
    rows = [json.loads(line) for line in (folder / "looks.jsonl").read_text().splitlines()]
    return sorted({row["steps"]: row for row in rows}.values(), key=lambda row: row["steps"])


def train(case: Case, seed: int, steps: int, out: Path, until: float) -> tuple[str, bool]:
    """(name, whether it is finished) of a run that is trained until then."""
    folder = folder_of(out, case, seed)
    name, finished = f"{case.name}, seed {seed}", folder / "finished"
    if finished.is_file():
        return f"{name}{finished.read_text()}", True
    if time.time() >= until:
        return name, False
    folder.mkdir(parents=True, exist_ok=True)
    epochs = steps // STEPS_PER_EPOCH
    task = load_task("toy-classification", size="paper", overrides=[f"training.epochs={epochs}", *case.overrides])
    run = Run(folder, run_config(task, case.method, seed))
    training = run.config.training
    with run.seeded_context():
        posterior = build.posterior(run.config, run.data).to(run.device)
        optimizer, scheduler = build.optimizer(posterior, training)
        about = {"case": case.name, "method": case.method, "members": case.members, "strength": case.strength}
        origin = made_on(run.device)

        def after(epoch: Epoch) -> bool:
            now = epoch.epoch * STEPS_PER_EPOCH
            if now in LOOKS or now == steps:
                row = {
                    **about,
                    "gradient": case.gradient,
                    "seed": seed,
                    "steps": now,
                    **measured(run, posterior),
                    **origin,
                }
                with (folder / "looks.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
            return time.time() >= until

        try:
            fit(
                posterior,
                run.loader(run.data.train, shuffle=True),
                epochs=epochs,
                optimizer=optimizer,
                scheduler=scheduler,
                precision=training["precision"],
                callback=after,
                progress=False,
                checkpoint=folder / "checkpoint.pt",
                checkpoint_seconds=20.0,
            )
        except Diverged as error:  # a result, too: said, and its rows end there
            write_text(finished, f": diverged at step {error.step}")
            return f"{name}: diverged at step {error.step}", True
    rows = read_looks(folder)
    if not rows or rows[-1]["steps"] < steps:
        return name, False
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    write_text(finished, "")
    return name, True


def measured(run: Run, posterior: Any) -> dict[str, float]:
    """Mean entropy off and at the data, and what the test rows say."""
    geometry = geometry_of(run.config, run.data)
    training = posterior.training
    entropy = posterior.predict(geometry.inputs).total.cpu().double()  # (n,)
    found = {f"{name}/entropy": float(entropy[where].mean()) for name, where in geometry.regions.items()}
    predictive, y = posterior.predict(run.data.test.x), run.data.test.y.to(posterior.device)
    posterior.train(training)
    accuracy = float((predictive.mean.argmax(1) == y).double().mean())
    return {**found, "accuracy": accuracy, "nll": float(-predictive.log_prob(y).mean())}


# ------------------------------------------------------------------------------------------- table and figure


LEFT_OUT = (
    "deep_ensemble, M = 50",
    "forde, M = 50, strength 0.02, log-probability",
    "forde, M = 16, strength 0.02, log-probability",
    "forde, M = 16, strength 0.5",
)


def table(rows: list[Row]) -> str:
    """Entropy off the data at a few steps, and what else is known at the last one; mean ± deviation over seeds."""
    steps = sorted({int(row["steps"]) for row in rows})
    shown = steps[-1:]
    lines = []
    for case, several in by_key(rows, "case").items():
        if case.startswith("lit") or case in LEFT_OUT:
            continue  # in the figure and the file
        mine = {step: [row for row in several if int(row["steps"]) == step] for step in shown}
        cells = [said(mine[step], "off_data/entropy") for step in shown]
        cells.append(said(mine[shown[-1]], "at_data/entropy"))
        lines.append([case, *cells])
    head = [f"off the data, {step:,} steps" for step in shown] + ["at the data"]
    return markdown(["entropy", *head], lines)


def said(rows: list[Row], key: str) -> str:
    if not rows:
        return "–"
    mean, deviation, _ = summary(row[key] for row in rows)
    return f"{mean:.3g} ± {deviation:.2g}" if len(rows) > 1 else f"{mean:.3g}"


def page(rows: list[Row]) -> str:
    """The table, its figure and where they come from."""
    seeds = len({row["seed"] for row in rows})
    what = f"{seeds} seeds, mean ± standard deviation" if seeds > 1 else "one seed"
    made = made_by(f"python benchmarks/toy_entropy.py --seeds {seeds}", rows, what, "all cases in `toy_entropy.csv`")
    picture = "![Entropy off the data over steps](figures/toy-entropy.png)"
    shown = [picture] if (ROOT / "docs" / "figures" / "toy-entropy.png").exists() else []
    return "\n\n".join([table(rows), made, *shown])


def figure(rows: list[Row]) -> Any:
    """Entropy off the data over steps, one line a case, mean over seeds; above, where the poster is."""
    from matplotlib.figure import Figure

    from dissensus.plots.charts import colours

    cases = by_key(rows, "case")
    palette, drawn = colours(list(cases)), Figure(figsize=(9, 4.6), layout="constrained")
    axes = drawn.subplots()
    for case, mine in cases.items():
        steps = sorted({int(row["steps"]) for row in mine})
        means = [summary(row["off_data/entropy"] for row in mine if int(row["steps"]) == step)[0] for step in steps]
        style = "--" if "log-probability" in case else ":" if case.startswith("lit") else "-"
        axes.plot(steps, means, style, label=case, color=palette[case])
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.text(LOOKS[0], 1.01, "the poster's map is above", fontsize=8, color="grey")
    axes.set(xscale="log", xlabel="steps", ylabel="entropy off the data, nats", ylim=(0, None))
    axes.legend(fontsize=7.5, loc="center left", bbox_to_anchor=(1, 0.5))
    return drawn


if __name__ == "__main__":
    main()

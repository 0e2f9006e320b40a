"""How long a bench will train, from a few timed batches of every method before it starts."""

import logging
from collections.abc import Sequence

import torch

from dissensus.bench.run import build
from dissensus.bench.run.run import Run
from dissensus.training.fit import fit

BATCHES = 3  # timed, after as many that warm up


def expected_time_text(groups: Sequence[Sequence[Run]]) -> str:
    """Minutes of training per method and in all; the runs of a group share one training. "" if nothing is to be trained."""
    waiting = [group for group in groups if not all(run.is_trained for run in group)]
    names = [" + ".join(run.config.method for run in group) for group in waiting]
    seconds = {name: _training_seconds(group[0]) for name, group in dict(zip(names, waiting, strict=True)).items()}
    each = ", ".join(f"{name} {_duration(time)}" for name, time in seconds.items())
    return f"training: {each}; in all {_duration(sum(seconds[name] for name in names))}" if waiting else ""


def _duration(seconds: float) -> str:
    return "under 1 min" if seconds < 60 else f"about {seconds / 60:.0f} min"


def _training_seconds(run: Run) -> float:
    """Seconds of training, scaled up from a few batches of a posterior that is thrown away."""
    training, rows, log = run.config.training, run.data.train, logging.getLogger("dissensus")
    used = rows.select(torch.arange(min(len(rows.y), BATCHES * training.get("batch_size", 64))))
    level = log.level
    log.setLevel(logging.CRITICAL)  # warnings of so short a training say nothing
    try:
        with run.seeded_context():
            posterior = build.posterior(run.config, run.data, folders=run.folders).to(run.device)
            how = {key: training[key] for key in ("clip", "precision", "engine") if key in training}
            optimizer, batches = build.optimizer(posterior, training)[0], run.loader(used, shuffle=True)
            done = fit(posterior, batches, epochs=2, optimizer=optimizer, progress=False, draw=False, **how)
    finally:
        log.setLevel(level)
    return done.epochs[-1].seconds * training["epochs"] * len(rows.y) / len(used.y)

"""Checkpoints of a training run: everything needed to go on as if nothing had happened."""

import os
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dissensus.core.posterior import Posterior
from dissensus.history import Best, Epoch, History


def write_checkpoint(
    path: Path,
    posterior: Posterior,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    history: History,
    best: Best,
) -> None:
    """Everything needed to go on, under a temporary name first."""
    state = {
        "posterior": posterior.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "history": [asdict(epoch) for epoch in history.epochs],
        "engine": history.engine,
        "best": {"score": best.score, "epoch": best.epoch, "state": best.state, "kept": history.best},
        "random": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if posterior.device.type == "cuda" else None,
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writer raises a RuntimeError where a folder is missing
        raise OSError(f"expected a checkpoint that can be written, got {path} ({error}); choose another") from error
    finally:
        temporary.unlink(missing_ok=True)


def resume(
    path: Path, posterior: Posterior, optimizer: Optimizer, scheduler: LRScheduler | None
) -> tuple[History, Best]:
    """What `write_checkpoint` wrote, put back in place; (the history so far, the best state so far)."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not look at the checksums it writes
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"{damaged} is damaged")
        state = torch.load(path, map_location=posterior.device, weights_only=True)
        posterior.load_state_dict(state["posterior"])
        optimizer.load_state_dict(state["optimizer"])
        if scheduler is not None and state["scheduler"] is not None:
            scheduler.load_state_dict(state["scheduler"])
        best, kept = state["best"], state["best"].pop("kept")
        history = History([Epoch(**epoch) for epoch in state["history"]], kept, state["engine"])
    except OSError:
        raise
    except Exception as error:  # whatever the parser underneath raises, a damaged file is a ValueError
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(
            f"expected a checkpoint of this posterior in {path}, got another file ({reason}); remove it"
        ) from error
    torch.set_rng_state(state["random"].cpu())
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu())
    return history, Best(**best)

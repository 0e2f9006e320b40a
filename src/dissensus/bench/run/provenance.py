"""Provenance of numbers: commit, versions, device, command."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

from dissensus.version import __version__

ORIGIN = ("commit", "torch", "device", "command")  # the facts in each row of a table


def provenance(device: torch.device) -> dict[str, Any]:
    """Facts about this program and this machine, for the run's config."""
    return {
        "dissensus": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "command": command(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def command() -> str:
    """The command line as `dissensus …`, however it was started; "python" for other programs."""
    program = Path(sys.argv[0])
    ours = program.stem == "dissensus" or program.parts[-2:] == ("dissensus", "__main__.py")
    return " ".join(["dissensus", *sys.argv[1:]]) if ours else "python"


def commit() -> str:
    """The commit of the running source, with "+ changes" if files differ from it; "none" outside a repository.

    The environment variable DISSENSUS_COMMIT gives the commit if the files came without their history.
    """
    if named := os.environ.get("DISSENSUS_COMMIT"):
        return named
    source = Path(__file__)
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return "none"  # an installed package, perhaps inside another repository
    changed = _git(source.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{_git(source.parent, 'rev-parse', '--short=12', 'HEAD')}{' + changes' if changed else ''}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"{device.type} ({platform.processor() or platform.machine()})"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""A process that measures operations in one library; benchmarks/peers.py starts it, in an environment that has the library.

    python benchmarks/peer_workers LIBRARY

It imports the library once. For each case, a line with a JSON object as `tasks.Case` takes it, it forks, except on a GPU: CUDA
does not survive a fork. The child answers with a line when it is ready (versions, and predictions to compare), one for each
"go" (seconds) and one for "end" (memory).
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print as well

    def say(**what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    failed, module = "", None
    try:
        module = importlib.import_module(f"of_{sys.argv[1].replace('-', '_')}")
    except Exception as error:
        failed = said(error)
    while line := sys.stdin.readline():
        if module is None:
            say(failed=failed)
        elif (case := json.loads(line))["device"] == "cuda":
            serve(module, case, sys.stdin.readline, say)
        elif (child := os.fork()) == 0:
            serve(module, case, sys.stdin.readline, say)
            os._exit(0)
        elif os.waitpid(child, 0)[1]:
            say(failed="the process ended")


def serve(module: ModuleType, case: dict[str, Any], heard: Callable[[], str], say: Callable[..., None]) -> None:
    """Answers until the end of one case."""
    try:
        peak = freed_on_gpu() if case["device"] == "cuda" else peak_resident()
        run, check = module.OPERATIONS[case["operation"]](module.case_of(case))
        run()  # to warm up
        found = check()
        compared = None if found is None else [float(value) for value in found.flatten()]
        installed = {name: version(name) for name in module.VERSIONS}
        say(versions=installed | getattr(module, "OWN", {}), compared=compared)
        while heard().strip() == "go":
            say(seconds=run())
        say(peak_mb=peak() / 2**20)
    except Exception as error:
        say(failed=said(error))


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def peak_resident() -> Callable[[], float]:
    """The most bytes of this process from now on, beyond those of now."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark counts from here
    before = resident("VmRSS")
    return lambda: resident("VmHWM") - before


def resident(key: str) -> float:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def freed_on_gpu() -> Callable[[], float]:
    """Frees what the case before has left on the GPU; the peak stays unknown, since cases share a process there."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    return lambda: math.nan


if __name__ == "__main__":
    main()

"""A process that measures operations in one library; benchmarks/peers.py starts it, in an environment that has the library.

    python benchmarks/peer_workers LIBRARY

It imports the library once. For each case, a line with a JSON object as `tasks.Case` takes it, it forks. The child answers with
a line when it is ready (versions, and predictions to compare), one for each "go" (seconds) and one for "end" (memory).
"""

from __future__ import annotations

import importlib
import json
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
        elif (child := os.fork()) == 0:
            serve(module, json.loads(line), sys.stdin.readline, say)
            os._exit(0)
        elif os.waitpid(child, 0)[1]:
            say(failed="the process ended")


def serve(module: ModuleType, case: dict[str, Any], heard: Callable[[], str], say: Callable[..., None]) -> None:
    """Answers until the end of one case."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark counts from here
        before = resident("VmRSS")
        run, check = module.OPERATIONS[case["operation"]](module.case_of(case))
        run()  # to warm up
        found = check()
        compared = None if found is None else [float(value) for value in found.flatten()]
        installed = {name: version(name) for name in module.VERSIONS}
        say(versions=installed | getattr(module, "OWN", {}), compared=compared)
        while heard().strip() == "go":
            say(seconds=run())
        say(peak_mb=(device_peak() if case["device"] == "cuda" else resident("VmHWM") - before) / 2**20)
    except Exception as error:
        say(failed=said(error))


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def resident(key: str) -> float:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def device_peak() -> float:
    import torch

    return float(torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()

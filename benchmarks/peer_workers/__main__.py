"""A process that measures one operation in one library; benchmarks/peers.py starts it, in an environment that has the library.

    python benchmarks/peer_workers LIBRARY CASE      # CASE: a JSON object, as `tasks.Case` takes it

One JSON line when it is ready (versions, and predictions to compare), one for each line it is sent (seconds), one at the end.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main() -> None:
    library, case = sys.argv[1], json.loads(sys.argv[2])
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print as well

    def say(**what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    try:
        module = importlib.import_module(f"of_{library.replace('-', '_')}")
        start_again()
        before = resident("VmRSS")
        run, check = module.OPERATIONS[case["operation"]](module.case_of(case))
        run()  # to warm up
        found = check()
        compared = None if found is None else [float(value) for value in found.flatten()]
        installed = {name: version(name) for name in module.VERSIONS}
        say(versions=installed | getattr(module, "OWN", {}), compared=compared)
        for line in sys.stdin:
            if line.strip() == "go":
                say(seconds=run())
        say(peak_mb=(device_peak() if case.get("device") == "cuda" else resident("VmHWM") - before) / 2**20)
    except Exception as error:
        say(failed=f"{type(error).__name__}: {error}".splitlines()[0][:200])


def resident(key: str) -> float:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def start_again() -> None:
    """The high-water mark counts from here."""
    Path("/proc/self/clear_refs").write_text("5")


def device_peak() -> float:
    import torch

    return float(torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()

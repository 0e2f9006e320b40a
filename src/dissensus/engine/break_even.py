"""When the fast way pays: one rule for training steps, predictions and compilation.

A run begins plainly. The fast way, a CUDA graph or compiled code, is prepared once

    calls left × seconds of a plain call × share saved  >  seconds of the preparation.

If nobody knows how many calls are left, as many are expected as there have been. What is loaded once per process, as kernels of
fused layers, must pay in this and later runs, of which as many are expected as there have been. Share and preparation are
estimated, then measured and kept by the posterior. Where runs must be equal to the last bit, the number of calls decides.
"""

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from dissensus.kernels.channel_launch import load_later
from dissensus.utils.torch_modes import set_attributes, thread

log = logging.getLogger("dissensus")

# Measured on an H200 with networks from an MLP to ResNet-18, single and in ensembles of ten.
SAVED = 2 / 3  # the share of a plain call that a graph saves where launching kernels takes longer than running them
FUSED, FUSED_PREDICTIONS = 0.1, 0.4  # and where it does not, by fused layers, in training and in predictions
LAUNCHING = 0.8  # the share of a call from which launching is what takes the time
CAPTURE = 3  # launches of a plain call that a graph takes: a warm-up and a capture
FIRST = 0.02  # seconds more for the first graph of a process
MEASURED = 3  # the call that is measured: those before it load libraries and make an optimiser's state
# Seconds for the kernels of fused layers, once per process, and to compile them; else a graph holds the layers one by one.
LOADING, BUILDING = 0.4, 8.0
TIMED, TIMING = 0.08, 1.5  # share saved, and seconds taken, by cuDNN's timing its algorithms
SAVED_BY_COMPILING, COMPILING = 1 / 3, 60.0
FEW, MANY = 5, 500  # calls from which a graph pays, and timing algorithms, where the number of calls decides
SLOWEST = 5.0  # seconds of a plain call: longer ones are not expected


_loaded: set[str] = set()  # what this process has loaded: "graphs", and "fused layers", their kernels


def pays(seconds: float, saved: float, preparation: float) -> bool:
    """Whether saving this share of so many seconds is worth a preparation of so many."""
    return seconds * saved > preparation


@dataclass
class Pace:
    """Seconds of a call on batches of one shape, as far as they have been measured."""

    plain: float | None = None
    launched: float = 0.0  # of a plain call, until the host has launched its kernels
    fast: float | None = None
    preparation: float | None = None  # once kernels are loaded
    compiles: bool = False  # whether the fast way is compiled code, not a graph
    fusing: float = 0.0  # the share of a plain call that fused layers save, if the network has such
    fused: bool = False  # whether those of the graph that was measured were
    calls: int = 0  # of all runs, where their number was known
    process: int = field(default_factory=os.getpid)  # copies in other processes have kernels to load

    @property
    def is_known(self) -> bool:
        """Whether the fast way was measured, which has loaded its kernels."""
        return self.fast is not None and self.preparation is not None and self.process == os.getpid()

    @property
    def saves(self) -> bool:
        """Whether the fast way is known to be faster."""
        return self.plain is not None and self.fast is not None and self.fast < self.plain

    @property
    def is_launching(self) -> bool:
        """Whether launching kernels is what takes the time of a plain call."""
        return self.launched > LAUNCHING * (self.plain or 0.0)

    def estimate(self) -> tuple[float, float]:
        """(share of a plain call that the fast way saves, seconds to prepare it): measured, else estimated."""
        saved = self.fusing or FUSED
        if self.plain is not None and self.fast is not None:
            saved = 1 - self.fast / self.plain
        elif self.compiles:
            saved = SAVED_BY_COMPILING
        elif self.is_launching:
            saved = SAVED
        if self.compiles:  # anew in every run
            return saved, COMPILING
        return saved, CAPTURE * self.launched if self.preparation is None else self.preparation

    def __str__(self) -> str:
        known = {"plain": self.plain, "fast": self.fast}
        found = [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in known.items() if seconds is not None]
        return ", ".join(found + ([] if self.preparation is None else [f"prepared in {self.preparation:.2g} s"]))


def known_pace(plans: dict[Any, Any], key: Any, *, compiles: bool = False, fusing: float = 0.0) -> Pace:
    """The pace of calls of this kind and shape, kept among a runner's plans."""
    return plans.setdefault(("pace", compiles, key), Pace(compiles=compiles, fusing=fusing))


def may_pay(pace: Pace, count: int | None) -> bool:
    """Whether the fast way may pay in a run of so many calls, however slow they are."""
    return count is None or pays(count * SLOWEST, *pace.estimate())


def decide_by_count() -> AbstractContextManager[None]:
    """Inside, the number of calls decides, and no time: equal runs are then equal to the last bit."""
    return set_attributes(thread, by_count=True)


def is_deterministic() -> bool:
    """Whether torch was told to be deterministic: then times decide nothing."""
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


def is_decided_by_count() -> bool:
    """Whether times decide nothing here."""
    return is_deterministic() or thread.by_count


def begin_plainly(engine: str) -> AbstractContextManager[object]:
    """What a run with this engine enters: kernels are loaded once that pays."""
    return load_later() if engine == "auto" and not is_decided_by_count() else nullcontext()


@cache
def seconds_of_loading() -> float:
    """Seconds for the kernels of fused layers, which triton keeps on disk once it has compiled them."""
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.environ.get("TRITON_HOME", "~"), ".triton", "cache")
    return LOADING if any(Path(os.path.expanduser(folder)).glob("*/normalise_rows.json")) else BUILDING


class BreakEven:
    """Follows the calls of a run, measures them, and says when to prepare the fast way.

    Args:
        count: of the calls to come; None if nobody knows.
        first: the first call before which the fast way can be prepared.
    """

    def __init__(self, pace: Pace, device: torch.device, count: int | None, *, first: int = 0) -> None:
        self.pace, self.device, self.count, self.first = pace, device, count, first
        self.by_count = not pace.compiles and is_decided_by_count()
        self.calls = 0  # so far
        pace.calls += count or 0
        never = count is not None and count <= first
        self.stage = "settled" if never else "plain"  # or "preparing", "measuring"
        self.start = 0.0
        self.prepared_at: int | None = None
        self.fused = True  # whether the fast way may fuse layers: not if their kernels do not pay in this run
        self.loads = False  # whether the preparation loads or times what later ones need not

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to decide."""
        return self.stage == "settled"

    def settle(self) -> None:
        """Stays with the way in use."""
        self.stage = "settled"

    def begin_call(self) -> bool:
        """Call it before each call until all is settled; returns whether to prepare the fast way now."""
        self.calls += 1
        prepares = self.stage == "plain" and (self.by_count or self.pace.plain is not None) and self._pays_now()
        if prepares:
            self.stage, self.prepared_at = "preparing", self.calls
            load, fusing, always = self._load_seconds, self.pace.fusing, self.by_count or self.count is None
            self.fused = fusing > 0 and (always or load == 0 or pays(self._seconds_expected, fusing, load))
            self.loads = "graphs" not in _loaded or (load > 0 and self.fused) or self.times_convolutions
        if self.stage in ("preparing", "measuring") or (self.calls == MEASURED and not self.by_count):
            self._wait()
            self.start = perf_counter()
        return prepares

    def end_call(self, *, fast: bool) -> None:
        """Call it after each; `fast`: whether the fast way is ready, so that the next call is one."""
        pace = self.pace
        if self.stage == "plain" and self.calls == MEASURED and pace.plain is None and not self.by_count:
            pace.launched, pace.plain = self._stop()
        elif self.stage == "preparing" and fast:
            # Each of its calls as the last, which captured: the first may have loaded what stays loaded, as the only one may.
            most = CAPTURE * pace.launched if self.loads and pace.launched else float("inf")
            pace.preparation = min(most, (self.calls - (self.prepared_at or 0) + 1) * self._stop()[1])
            pace.fused = self.fused
            _loaded.update(["graphs", *["fused layers"] * pace.fused])
            self.stage = "settled" if self.by_count else "measuring"
        elif self.stage == "measuring":
            pace.fast = self._stop()[1]
            self.settle()
            log.debug("the fast way since call %s: %s", self.prepared_at, pace)

    @property
    def seconds_left(self) -> float:
        """Seconds that the calls to come will take if they are plain ones."""
        done = self.calls - 1
        return (done if self.count is None else self.count - done) * (self.pace.plain or 0.0)

    @property
    def times_convolutions(self) -> bool:
        """Whether cuDNN may time its algorithms for the fast way."""
        if self.by_count:
            return self.count is not None and self.count >= MANY
        return pays((1 - self.pace.estimate()[0]) * self.seconds_left, TIMED, TIMING)

    @property
    def _load_seconds(self) -> float:
        """Seconds to load the kernels of fused layers, with which convolutions have shapes that are new to cuDNN, too."""
        if not self.pace.fusing or (self.pace.fused and self.pace.is_known):
            return 0.0
        return seconds_of_loading() * ("fused layers" not in _loaded) + TIMING * torch.backends.cudnn.benchmark

    @property
    def _seconds_expected(self) -> float:
        """As `seconds_left`, and those of later runs, of which as many are expected as there have been."""
        calls = self.pace.calls - self.calls + 1
        return self.seconds_left if self.count is None else calls * (self.pace.plain or 0.0)

    def _pays_now(self) -> bool:
        if self.by_count:
            return self.calls > 1 and (self.count is None or self.count >= FEW)
        if self.calls <= self.first:
            return False
        saved, preparation = self.pace.estimate()
        once = 0.0 if self.pace.compiles or "graphs" in _loaded else FIRST
        if self.count is None or not (self.pace.is_launching or self.pace.is_known):
            once += self._load_seconds  # unfused, a graph saves nothing but launching
        every_run = pays(self.seconds_left, saved, preparation)
        if every_run and pays(self._seconds_expected, saved, preparation + once):
            log.debug(
                "the fast way pays: %s; calls left: %s", self.pace, "unknown" if self.count is None else self.count
            )
            return True
        if self.count is not None:  # it will not pay later either
            self.settle()
        return False

    def _stop(self) -> tuple[float, float]:
        """Seconds since the start: (until the host came here, until the device was ready, too)."""
        launched = perf_counter() - self.start
        self._wait()
        return launched, perf_counter() - self.start

    def _wait(self) -> None:
        if self.device.type == "cuda":  # only for this stream: another thread may be capturing
            torch.cuda.current_stream(self.device).synchronize()

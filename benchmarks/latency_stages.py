"""Where the time of a small prediction and of a small training step goes on a CPU, by stage; CSV out.

    OMP_NUM_THREADS=1 python benchmarks/latency_stages.py --csv FILE

Functions of the library are wrapped in clocks; each stage has the time of its functions without that of other stages inside
them. The clocks take time, too, so the sums are longer than in latency.py: the table is for shares.
"""

import argparse
import functools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import latency
import torch
from rows import Row, write_rows

import dissensus as ds
from dissensus.core import batch as batches, posterior
from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.posterior import Posterior
from dissensus.data import Batches
from dissensus.engine.training_step import Guard
from dissensus.numerics import randomness
from dissensus.utils import tensor_tree
from dissensus.utils.torch_modes import eval_mode

Owner = tuple[Any, str]  # what has the function, and its name there
PREDICTION: dict[str, Sequence[Owner]] = {
    "modes, random state": (
        (eval_mode, "__enter__"),
        (eval_mode, "__exit__"),
        (randomness, "preserve_random_state"),
    ),
    "checks of inputs": ((batches, "check_finite"), (batches, "move_to_device"), (Posterior, "check_inputs")),
    "a look for NaN": ((posterior, "has_diverged"),),
    "log-probabilities": ((ds.Classification, "describe"),),
    "tensors put into place and back": ((tensor_tree, "assign_tensors"),),
    "calls around the networks": ((DrawnFunctions, "predict"), (posterior, "checked_prediction")),
}
STEP: dict[str, Sequence[Owner]] = {
    "backward pass": ((torch.autograd, "grad"),),
    "a look for NaN": ((Guard, "check_values"),),
    "counting the step": ((Guard, "observe"),),
    "checks of the batch": ((Posterior, "prepare_batch"), (batches, "check_finite")),
}


class Clocks:
    """Seconds of stages since the last `read`, each without those of stages inside it."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._inside = [0.0]  # seconds of stages inside the present one

    def around(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = latency.clock()
            self._inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                whole = latency.clock() - start
                self.found[stage] += whole - self._inside.pop()
                self._inside[-1] += whole

        return timed

    @contextmanager
    def on(self, stages: dict[str, Sequence[Owner]]) -> Iterator[None]:
        """Inside, these functions are timed."""
        patches = [
            mock.patch.object(owner, name, self.around(stage, getattr(owner, name)))
            for stage, owners in stages.items()
            for owner, name in owners
        ]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()

    def read(self) -> Counter[str]:
        found, self.found = self.found, Counter()
        return found


def table(what: str, network: str, stages: dict[str, Sequence[Owner]], found: Sequence[Counter[str]]) -> Iterator[Row]:
    """A row for each stage, with the median over calls; `found` also has the whole as "all"."""
    names = [*stages, "the rest"]
    for each in found:
        each["the rest"] = each["all"] - sum(each[name] for name in stages)
    for name in ("all", *names):
        microseconds = 1e6 * statistics.median(each[name] for each in found)
        yield {"what": what, "network": network, "stage": name, "us": round(microseconds)}


def predictions(calls: int) -> Iterator[Row]:
    for network, (make, shape) in latency.NETWORKS.items():
        for method, pair in list(latency.METHODS.items())[:2]:
            torch.manual_seed(0)
            ours, _ = pair(make, torch.randn(1, *shape))
            clocks, found = Clocks(), []
            stages = {"networks": ((type(make()), "forward"),), **PREDICTION}
            with clocks.on(stages), torch.no_grad():
                for _ in range(20 + calls):
                    clocks.read()
                    start = latency.clock()
                    ours()
                    whole = latency.clock() - start
                    found.append(clocks.read() + Counter(all=whole))
            yield from table(f"prediction of one input, {method}", network, stages, found[20:])


def steps(epochs: int) -> Iterator[Row]:
    for network, (make, inputs, likelihood, size) in latency.TRAINED.items():
        torch.manual_seed(0)
        made = ds.MAP(make(), likelihood=likelihood)
        x = torch.randn(latency.STEPS * size, inputs)
        y = torch.randint(10, (len(x),)) if isinstance(likelihood, ds.Classification) else torch.randn(len(x), 1)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.01, momentum=0.9)
        clocks, found, start = Clocks(), [], [latency.clock()]

        def noted(
            epoch: ds.Epoch, clocks: Clocks = clocks, found: list[Any] = found, start: list[float] = start
        ) -> None:
            each = clocks.read() + Counter(all=latency.clock() - start[0])
            found.append(Counter({name: seconds / latency.STEPS for name, seconds in each.items()}))
            start[0] = latency.clock()

        stages = {"forward pass and loss": ((type(made), "member_loss"),), "optimiser": ((optimizer, "step"),), **STEP}
        with clocks.on(stages):
            loader = Batches(x, y, batch_size=size, shuffle=True)
            ds.fit(made, loader, epochs=epochs, callback=noted, progress=False, device="cpu", optimizer=optimizer)
        yield from table("training step, SGD, MAP", network, stages, found[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    rows = []
    for row in (*predictions(given.calls), *steps(given.epochs)):
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        rows.append(row | latency.provenance())
    if given.csv:
        write_rows(given.csv, rows)


if __name__ == "__main__":
    main()

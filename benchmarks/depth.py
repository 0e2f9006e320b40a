"""How far below `fit` a network runs, and what a training step costs beside a vmap written by hand.

    python benchmarks/depth.py --csv FILE

Frames: of this library, below `fit` and above the network's forward, in a steady step; torch's own lie between them and are not
counted. Cost: a step of a deep ensemble of tiny MLPs by `fit`'s own step against the shortest program that does the same with
`torch.func` (gradients of all members, SGD with momentum), in turns in one process; medians.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rows import write_rows
from torch import Tensor, nn
from turns import in_turns

import dissensus as ds
from dissensus.bench.run.run_folder import provenance
from dissensus.core.batch import Batch
from dissensus.engine import build_step

SOURCE = str(Path(ds.__file__).parent)


class Deep(nn.Module):
    """A small network that notes how many frames of the library lie between `fit` and itself."""

    seen: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        names, frame = [], sys._getframe(1)
        while frame is not None:
            names.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back  # type: ignore[assignment]
        fits = [i for i, (file, name) in enumerate(names) if name == "fit" and file.endswith("training/fit.py")]
        if fits:
            Deep.seen.append(sum(file.startswith(SOURCE) for file, _ in names[: fits[0]]))
        return self.layers(x)


def frames(method: str) -> int:
    """The most frames in the last step of a short run."""
    torch.manual_seed(0)
    networks = [Deep() for _ in range(3)]
    posterior = ds.DeepEnsemble(networks) if method == "deep_ensemble" else ds.FoRDE(networks)
    batches = [(torch.randn(16, 8), torch.randint(3, (16,))) for _ in range(4)]
    Deep.seen.clear()
    ds.fit(posterior, batches, epochs=2, progress=False, engine="vectorised")
    return Deep.seen[-1]


def costs(members: int, batch: int, repeats: int) -> tuple[float, float]:
    """(seconds by hand, seconds by the library) of one training step."""
    torch.manual_seed(0)
    networks = [ds.nets.MLP(8, 3, hidden=(32, 32)) for _ in range(members)]
    x, y = torch.randn(batch, 8), torch.randint(3, (batch,))
    params, _ = torch.func.stack_module_state(networks)  # type: ignore[arg-type]
    template, by_hand = networks[0], torch.optim.SGD(list(params.values()), lr=1e-3, momentum=0.9, fused=True)

    def losses(own: dict[str, Tensor]) -> Tensor:
        def one(mine: dict[str, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(torch.func.functional_call(template, mine, (x,)), y)

        return torch.func.vmap(one)(own).sum()

    def hand() -> None:
        gradients = torch.func.grad(losses)({name: tensor.detach() for name, tensor in params.items()})
        for name, tensor in params.items():
            tensor.grad = gradients[name].contiguous()
        by_hand.step()

    posterior = ds.DeepEnsemble([ds.nets.MLP(8, 3, hidden=(32, 32)) for _ in range(members)])
    ours = torch.optim.SGD(posterior.parameters(), lr=1e-3, momentum=0.9)
    step = build_step("vectorised", posterior, ours, Batch(x, y), count=repeats)
    posterior.train()
    times = in_turns({"hand": hand, "ours": lambda: step(Batch(x, y))}, repeats, uncounted=20)
    step.close()
    return median(times["hand"]), median(times["ours"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    about: dict[str, Any] = provenance(torch.device("cpu"))
    rows = [{"what": f"frames, {name}", "value": frames(name), **about} for name in ("deep_ensemble", "forde")]
    hand, ours = costs(5, 16, given.repeats)
    for what, value in (("by hand, ms", 1e3 * hand), ("library, ms", 1e3 * ours), ("ratio", ours / hand)):
        rows.append({"what": f"step of five tiny MLPs, {what}", "value": round(value, 4), **about})
    for row in rows:
        print(f"{row['what']:<45} {row['value']}")
    if given.csv:
        write_rows(given.csv, rows)


if __name__ == "__main__":
    main()

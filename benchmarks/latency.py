"""What this library adds on a CPU: predictions of one input, by `predict` and by `predictor()`, and training steps; CSV out.

    OMP_NUM_THREADS=1 python benchmarks/latency.py --csv FILE

Both sides alternate in one process, call by call in prediction and epoch by epoch in training, and give the same: mean
probabilities, or weights after a step on the same loss. By hand means: a loop in eval mode without gradients over networks or
dropout masks that averages softmax outputs, and torch's usual five lines of training. With one thread, times are those of
the processor, which other programs on the machine hardly change.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from rows import write_rows
from torch import Tensor, nn

import dissensus as ds
from dissensus.bench.run.run_folder import commit, device_name
from dissensus.data import Batches

MEMBERS = 5  # of an ensemble
SAMPLES = 10  # of MC dropout
STEPS = 50  # of an epoch

Call = Callable[[], object]
Pair = tuple[Call, Call]  # the library's call, and the same by hand
Ask = Callable[[ds.Posterior, Tensor], Call]  # one of the library's ways to predict


def mlp(dropout: float = 0.0) -> nn.Module:
    return ds.nets.MLP(784, 10, hidden=(200, 200, 200), dropout=dropout)


def resnet20(dropout: float = 0.0) -> nn.Module:
    network = ds.nets.ResNet(20)
    weighted = [name for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for name in weighted[1:] if dropout else ():  # as MCDropout(rate=) does
        layer = network.get_submodule(name)
        kind = nn.Dropout2d if isinstance(layer, nn.Conv2d) else nn.Dropout
        network.set_submodule(name, nn.Sequential(kind(dropout), layer))
    return network


def small_mlp() -> nn.Module:
    return ds.nets.MLP(2, 1, hidden=(50, 50))


NETWORKS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "MLP 784-200-200-200-10": (mlp, (784,)),
    "ResNet-20": (resnet20, (3, 32, 32)),
}


def by_predict(posterior: ds.Posterior, x: Tensor) -> Call:
    return lambda: posterior.predict(x).mean


def by_predictor(posterior: ds.Posterior, x: Tensor) -> Call:
    predictor = posterior.predictor()
    return lambda: predictor(x)["mean"]


def of_map(make: Callable[..., nn.Module], x: Tensor, ask: Ask = by_predict) -> Pair:
    network = make().eval()
    return ask(ds.MAP(network).eval(), x), lambda: network(x).softmax(1)


def of_ensemble(make: Callable[..., nn.Module], x: Tensor, ask: Ask = by_predict) -> Pair:
    networks = [make().eval() for _ in range(MEMBERS)]
    ours = ask(ds.DeepEnsemble(networks).eval(), x)
    return ours, lambda: torch.stack([each(x).softmax(1) for each in networks]).mean(0)


def of_dropout(make: Callable[..., nn.Module], x: Tensor, ask: Ask = by_predict) -> Pair:
    network = make(dropout=0.1).eval()
    ours = ask(ds.MCDropout(network, samples=SAMPLES).eval(), x)
    dropped = copy.deepcopy(network)
    for layer in dropped.modules():
        layer.training = isinstance(layer, nn.Dropout | nn.Dropout2d)
    samples = range(SAMPLES)
    return ours, lambda: torch.stack([dropped(x).softmax(1) for _ in samples]).mean(0)


METHODS: dict[str, Callable[..., Pair]] = {
    "MAP": of_map,
    f"DeepEnsemble, M = {MEMBERS}": of_ensemble,
    f"MCDropout, {SAMPLES} samples": of_dropout,
}
ASKED: dict[str, tuple[str, Ask]] = {  # name of the row -> method, and the way to predict
    **{method: (method, by_predict) for method in METHODS},
    **{f"{method}, predictor()": (method, by_predictor) for method in list(METHODS)[:2]},
}
TRAINED: dict[str, tuple[Callable[[], nn.Module], int, ds.Likelihood, int]] = {
    # network, inputs, likelihood, batch
    "MLP 784-200-200-200-10": (mlp, 784, ds.Classification(), 16),
    "MLP 2-50-50-1": (small_mlp, 2, ds.Regression(noise=1.0), 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400, help="predictions of each side")
    parser.add_argument("--epochs", type=int, default=40, help="epochs of each side, of 50 steps")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    rows = []
    for found in chain(predictions(options.calls), training_steps(options.epochs)):
        print("  ".join(f"{key}={value}" for key, value in found.items()), flush=True)
        rows.append(found | provenance())
    if options.csv:
        write_rows(options.csv, rows)


def predictions(calls: int) -> Iterator[dict[str, object]]:
    """A row for each network, method and way to predict."""
    for network, (make, shape) in NETWORKS.items():
        for name, (method, ask) in ASKED.items():
            torch.manual_seed(0)
            ours, by_hand = METHODS[method](make, torch.randn(1, *shape), ask)
            times: tuple[list[float], list[float]] = ([], [])
            with torch.no_grad():
                for _ in range(20 + calls // (1 if method == "MAP" else 4)):
                    for function, into in zip((ours, by_hand), times, strict=True):
                        start = clock()
                        function()
                        into.append(clock() - start)
            yield row("prediction of one input", name, network, 1, times[0][20:], times[1][20:])


def training_steps(epochs: int) -> Iterator[dict[str, object]]:
    """A row for each network and optimiser."""
    for network in TRAINED:
        for kind, settings in ((torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}), (torch.optim.Adam, {"lr": 1e-3})):
            what = f"training step, {kind.__name__}"
            yield row(what, "MAP", network, TRAINED[network][-1], *trained(network, kind, settings, epochs))


def trained(
    network: str, kind: type[torch.optim.Optimizer], settings: dict[str, Any], epochs: int
) -> tuple[list[float], list[float]]:
    """Seconds of a step, by `fit` and by hand, in epochs that alternate; each with what an epoch's end takes."""
    torch.manual_seed(0)
    make, inputs, likelihood, batch = TRAINED[network]
    theirs, posterior = make(), ds.MAP(make(), likelihood=likelihood)
    x = torch.randn(STEPS * batch, inputs)
    y = torch.randint(10, (len(x),)) if isinstance(likelihood, ds.Classification) else torch.randn(len(x), 1)
    loader = Batches(x, y, batch_size=batch, shuffle=True)
    optimizer = kind(theirs.parameters(), **settings)
    times: tuple[list[float], list[float]] = ([], [])

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if isinstance(likelihood, ds.Classification):
            return F.cross_entropy(outputs, targets)
        return F.gaussian_nll_loss(outputs, targets, var=1.0, full=True)

    def by_hand(epoch: ds.Epoch) -> None:
        began = clock()
        times[0].append((began - start[0]) / STEPS)
        for rows, targets in loader:
            optimizer.zero_grad()
            loss(theirs(rows), targets).backward()
            optimizer.step()
        start[0] = clock()
        times[1].append((start[0] - began) / STEPS)

    start = [clock()]
    mine = kind(posterior.parameters(), **settings)
    ds.fit(posterior, loader, epochs=epochs, callback=by_hand, progress=False, device="cpu", optimizer=mine)
    return times[0][3:], times[1][3:]


def clock() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def row(
    what: str, method: str, network: str, batch: int, ours: Sequence[float], by_hand: Sequence[float]
) -> dict[str, object]:
    """Medians and quartiles in ms; the ratio is that of the medians, its quartiles those of neighbouring pairs."""
    ratios = [mine / other for mine, other in zip(ours, by_hand, strict=True)]
    (low, middle, high), (first, by_hand_ms, third) = (quantiles(1e3 * t for t in each) for each in (ours, by_hand))
    lower, ratio, upper = quantiles(ratios)
    return {
        "what": what,
        "method": method,
        "network": network,
        "batch": batch,
        "ms": f"{middle:.4f}",
        "ms_low": f"{low:.4f}",
        "ms_high": f"{high:.4f}",
        "by_hand_ms": f"{by_hand_ms:.4f}",
        "by_hand_low": f"{first:.4f}",
        "by_hand_high": f"{third:.4f}",
        "over_ms": f"{1e3 * median(mine - other for mine, other in zip(ours, by_hand, strict=True)):.4f}",
        "ratio": f"{ratio:.3f}",
        "ratio_low": f"{lower:.3f}",
        "ratio_high": f"{upper:.3f}",
        "pairs": len(ratios),
    }


def provenance() -> dict[str, object]:
    device = torch.device("cpu")
    facts = {"torch": torch.__version__, "device": device_name(device), "threads": torch.get_num_threads()}
    return {"commit": commit()} | facts


if __name__ == "__main__":
    main()

"""Error bars for a network you already have: MC dropout inserted into it, and a temperature from validation data.

The network is trained by a plain loop and knows nothing of uncertainty. `MCDropout(network, rate=)` drops units of it
without changing its code. A network that never met dropout loses a little by it, as the table shows; three more epochs
with it on give that back. `temperature_scale` mends the confidence of any of them on data held back from training.

    python examples/pretrained.py

The rate and the three epochs were picked by looking at these test digits, and nothing here shows what three more epochs without
dropout would give: an illustration, not a comparison.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dissensus as ds


def trained(loader: ds.data.Batches, epochs: int) -> nn.Module:
    """A network (B, 1, 28, 28) -> (B, 10) trained as anyone would; any other would do."""
    first, second = nn.Conv2d(1, 16, 5, stride=2), nn.Conv2d(16, 32, 5, stride=2)
    dense = (nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))
    network = nn.Sequential(first, nn.ReLU(), second, nn.BatchNorm2d(32), nn.ReLU(), *dense)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
    return network.eval()


def row(name: str, posterior: ds.Posterior, test: ds.data.Batches, foreign: Tensor) -> str:
    """One line of the table: scores on the test digits, and how well doubt tells clothes from digits."""
    predictive = ds.predict(posterior, test)
    y = predictive.targets
    unknown = posterior.predict(foreign)
    scores = (
        ds.metrics.accuracy(predictive.mean, y),
        -predictive.log_prob(y).mean(),
        ds.metrics.ece(predictive.mean, y),
        ds.metrics.auroc(predictive.total, unknown.total),
        predictive.epistemic.mean(),
        unknown.epistemic.mean(),
    )
    return f"{name:32}" + "".join(f"{score:10.4f}" for score in scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=0.05, help="share of units dropped before each layer")
    parser.add_argument("--quick", action="store_true", help="a second's worth, to see that it runs")
    options = parser.parse_args()
    rows, epochs, samples = (400, 3, 3) if options.quick else (2000, 6, 30)

    torch.manual_seed(0)
    digits, test_digits = ds.data.digits()
    digits, held = ds.data.train_validation(digits, validation=1000, seed=0)
    standardise = ds.data.Standardiser.of_channels(digits.images)
    x, y = standardise(digits.images[:rows]), digits.labels[:rows]
    train = ds.data.Batches(x, y, batch_size=100, shuffle=True, seed=0)
    validation = ds.data.Batches(standardise(held.images[:rows]), held.labels[:rows], batch_size=500)
    test = ds.data.Batches(standardise(test_digits.images[:rows]), test_digits.labels[:rows], batch_size=500)
    clothes = standardise(ds.data.fashion().images[:rows])

    network = trained(train, epochs)
    inserted = ds.MCDropout(network, rate=options.rate, samples=samples)
    further = ds.MCDropout(copy.deepcopy(network), rate=options.rate, samples=samples)  # fit trains what it is given
    ds.fit(further, train, epochs=3, progress=False)

    names = ("accuracy", "nll", "ece", "auroc", "epistemic", "clothes")
    print(f"{'':32}" + "".join(f"{name:>10}" for name in names))
    for name, posterior in [
        ("the network as it is", ds.MAP(network)),
        ("MC dropout", inserted),
        ("MC dropout, 3 more epochs", further),
    ]:
        print(row(name, posterior, test, clothes))
        temperature = ds.temperature_scale(posterior, validation)
        print(row(f"  at temperature {temperature:.2f}", posterior, test, clothes))


if __name__ == "__main__":
    main()

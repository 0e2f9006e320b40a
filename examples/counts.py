"""Your own likelihood: Poisson counts, next to a Gaussian that thinks all inputs are equally noisy.

A likelihood is written for one member and says three things: `log_prob`, which is trained; `describe`, the tensors that
describe one member's prediction; and `predictive`, what a stack of those means. A Gaussian with the mean and variance of
each member is taken for the last, which is right for the parts of the variance and near for intervals; where exact
quantiles matter, subclass `ds.Predictive` instead.

    python examples/counts.py
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

import dissensus as ds


class Poisson(ds.Likelihood):
    """Outputs are log-rates (B, 1), y counts (B, 1) as floating numbers."""

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        # log p(y | rate) = y log rate − rate − log y!
        return (y * outputs - outputs.exp() - torch.lgamma(y + 1)).sum(1)  # (B,)

    def describe(self, outputs: Tensor) -> tuple[Tensor, ...]:
        rate = outputs.exp()
        return rate, rate  # mean and variance of y

    def predictive(self, *described: Tensor) -> ds.Predictive:
        return ds.RegressionPredictive(*described)  # each (M, B, 1)

    def check(self, output_shape: torch.Size, y: Tensor) -> None:
        if y.shape != output_shape:  # (B, 1) and (B,) would broadcast to (B, B)
            raise ValueError(f"expected counts of shape {tuple(output_shape)}, got {tuple(y.shape)}; reshape them")


def counts(n: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, y, rate), each (n, 1): y is Poisson with a rate between 1 and 20."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, 1, generator=generator) - 2
    rate = (1.5 + 1.5 * (2 * x).sin()).exp()
    return x, torch.poisson(rate, generator=generator), rate


def mixture_nll(rates: Tensor, y: Tensor) -> Tensor:
    """() mean of −log (1/M) Σ_m Poisson(y; rate_m) from rates (M, B, 1): exact, where the Gaussian's is not."""
    each = Poisson().log_prob(rates.log().flatten(0, 1), y.repeat(len(rates), 1)).reshape(len(rates), -1)  # (M, B)
    return math.log(len(rates)) - each.logsumexp(0).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a second's worth, to see that it runs")
    options = parser.parse_args()
    epochs, members = (15, 2) if options.quick else (40, 5)

    torch.manual_seed(0)
    x, y, _ = counts(1000, seed=0)
    x_test, y_test, rate = counts(4000, seed=1)
    predictives = {}
    for name, likelihood in {"Poisson": Poisson(), "Gaussian": ds.Regression("learned")}.items():
        networks = [ds.nets.MLP(1, 1, hidden=(50, 50), activation="tanh") for _ in range(members)]
        ensemble = ds.DeepEnsemble(networks, likelihood=likelihood)
        optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.01)
        loader = ds.data.Batches(x, y, batch_size=100, shuffle=True, seed=0)
        ds.fit(ensemble, loader, epochs=epochs, optimizer=optimizer, progress=False)
        predictives[name] = ensemble.predict(x_test)

    truth = mixture_nll(rate[None], y_test)
    print(
        f"test nll of the Poisson ensemble {mixture_nll(predictives['Poisson'].member_means, y_test):.4f}, true {truth:.4f}"
    )
    print(f"\n{'':16}{'std of y':>10}" + "".join(f"{name:>10}{'covers':>8}" for name in predictives))
    for low, high in [(0, 2), (2, 8), (8, 25)]:
        rows = ((rate >= low) & (rate < high))[:, 0]
        line = f"{f'rate {low} to {high}':16}{rate[rows].mean().sqrt():10.3f}"
        for predictive in predictives.values():
            lower, upper = predictive[rows].interval(0.9)
            coverage = ds.metrics.interval_coverage(lower, upper, y_test[rows])
            line += f"{predictive[rows].total.mean().sqrt():10.3f}{coverage:8.3f}"
        print(line)


if __name__ == "__main__":
    main()

"""TabM (Gorishniy et al. 2025) as a regressor, with the package and the settings its authors recommend as a start.

Depth 3, width 512, 32 members, AdamW with rate 2e-3 and decay 3e-4, clipped gradients, inputs by quantiles, a loss of each
member's own, the epoch with the least held-out error, stopped after 16 worse ones. Batches: a sixteenth of the rows, 32 to 256.
"""

from __future__ import annotations

import copy
import time
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

PATIENCE = 16
TIMED = 4  # steps


class TabMRegressor:
    """Args: categories: positions of columns that are whole numbers from 0; sizes: how many each has."""

    def __init__(self, categories: list[int], sizes: list[int], *, device: str, seed: int) -> None:
        self.categories, self.sizes, self.device, self.seed = categories, sizes, device, seed
        self.steps = 0

    def fit(self, x: np.ndarray, y: np.ndarray) -> Self:
        from sklearn.model_selection import train_test_split
        from sklearn.preprocessing import QuantileTransformer
        from tabm import TabM

        torch.manual_seed(self.seed)
        x, x_held, y, y_held = train_test_split(x, y, test_size=0.1, random_state=self.seed)
        self.mean, self.deviation = y.mean(), y.std()
        self.numbers = [place for place in np.flatnonzero(np.ptp(x, 0)) if place not in self.categories]
        self.quantiles = QuantileTransformer(n_quantiles=min(1000, len(y)), output_distribution="normal")
        self.quantiles.fit(x[:, self.numbers])
        network = TabM.make(n_num_features=len(self.numbers), cat_cardinalities=self.sizes, d_out=1)
        self.network = network.to(self.device)
        targets = torch.from_numpy((y - self.mean) / self.deviation).float().to(self.device)
        self.rows = (*self._inputs(x), targets)
        best, worse, state = np.inf, 0, {}
        optimizer = make_optimizer(self.network)
        while worse <= PATIENCE:
            for batch in torch.randperm(len(y), device=self.device).split(min(256, max(32, len(y) // 16))):
                train_step(self.network, optimizer, *(None if each is None else each[batch] for each in self.rows))
                self.steps += 1
            error, worse = float(np.mean((self.predict(x_held) - y_held) ** 2)), worse + 1
            if error < best:
                best, worse, state = error, 0, copy.deepcopy(self.network.state_dict())
        self.network.load_state_dict(state)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """(N,) means over members."""
        self.network.eval()
        with torch.inference_mode():
            means = self.network(*self._inputs(x)).mean((1, 2))  # of (N, 32, 1)
        found: np.ndarray = means.cpu().double().numpy() * self.deviation + self.mean
        return found

    def core_seconds(self) -> float:
        """Seconds that the steps of `fit` take on one core, by the time of a few."""
        network = copy.deepcopy(self.network).cpu()
        size = min(256, max(32, len(self.rows[-1]) // 16))
        batch = [None if each is None else each[:size].cpu() for each in self.rows]
        optimizer = make_optimizer(network)
        train_step(network, optimizer, *batch)
        start = time.process_time()
        for _ in range(TIMED):
            train_step(network, optimizer, *batch)
        return self.steps * (time.process_time() - start) / TIMED

    def _inputs(self, x: np.ndarray) -> tuple[Tensor, Tensor | None]:
        codes = torch.from_numpy(x[:, self.categories]).long().to(self.device) if self.categories else None
        return torch.from_numpy(self.quantiles.transform(x[:, self.numbers])).float().to(self.device), codes


def make_optimizer(network: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=3e-4)


def train_step(network: Any, optimizer: Any, x: Any, codes: Any, y: Any) -> None:
    network.train()
    loss = (network(x, codes).squeeze(2) - y[:, None]).square().mean()  # (B, 32): each member's own
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()

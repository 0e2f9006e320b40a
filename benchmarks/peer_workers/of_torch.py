"""Plain torch: a loop over members, each with its own optimiser."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tasks import RATE, Case, Prepared
from torch import Tensor

VERSIONS = ("torch",)


def case_of(given: dict[str, object]) -> Case:
    return Case(**given)  # type: ignore[arg-type]


def train(case: Case) -> Prepared:
    networks, watched = case.networks(), case.watched()
    optimizers = [torch.optim.SGD(network.parameters(), **RATE) for network in networks]

    def epoch() -> None:
        for network in networks:
            network.train()
        for x, y in watched:
            for network, optimizer in zip(networks, optimizers, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(network(x), y).backward()
                optimizer.step()

    return lambda: watched.timed(epoch), lambda: mean(networks)(case.looked_at())


def mean(networks: list[torch.nn.Module]):  # type: ignore[no-untyped-def]
    for network in networks:
        network.eval()

    @torch.inference_mode()
    def predict(x: Tensor) -> Tensor:
        return torch.stack([network(x).softmax(1) for network in networks]).mean(0)

    return predict


def predict(case: Case) -> Prepared:
    call = case.over(average := mean(case.networks()))
    return case.seconds(call, "prediction"), lambda: average(case.looked_at())


def one(case: Case) -> Prepared:
    average, x = mean(case.networks()), case.looked_at()
    return case.seconds(lambda: average(x[:1]), "prediction of one"), lambda: average(x)


def dropout(case: Case, rows: int | None = None) -> Prepared:
    """Dropout stays on, `members` passes."""
    network = Case(**{**vars(case), "members": 1}).networks()[0].train()

    @torch.inference_mode()
    def sample(x: Tensor) -> Tensor:
        return torch.stack([network(x).softmax(1) for _ in range(case.members)]).mean(0)

    x = case.looked_at()
    call = case.over(sample) if rows is None else lambda: sample(x[:rows])
    name = "prediction" if rows is None else "prediction of one"
    return case.seconds(call, name), lambda: torch.stack([sample(x) for _ in range(30)]).mean(0)


OPERATIONS = {
    "ensemble": train,
    "ensemble predicts": predict,
    "ensemble, one input": one,
    "single": train,
    "single, one input": one,
    "dropout predicts": dropout,
    "dropout, one input": lambda case: dropout(case, 1),
}

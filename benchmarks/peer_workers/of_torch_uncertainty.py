"""torch-uncertainty, as its tutorials show: `methods` around plain networks, a routine and `TUTrainer`.

Its loss averages over members, so its tutorial multiplies the learning rate by their number; so is it here.
"""

from __future__ import annotations

from functools import partial

import torch
from einops import rearrange
from lightning_parts import barest
from tasks import RATE, Case, Prepared, none
from torch import Tensor, nn
from torch_uncertainty import TUTrainer
from torch_uncertainty.layers import BayesLinear
from torch_uncertainty.losses import ELBOLoss
from torch_uncertainty.methods import batch_ensemble, deep_ensembles, mc_dropout
from torch_uncertainty.routines import ClassificationRoutine
from torch_uncertainty.transforms import RepeatTarget

VERSIONS = ("torch", "torch-uncertainty", "lightning")


def case_of(given: dict[str, object]) -> Case:
    return Case(**given)  # type: ignore[arg-type]


def alone(case: Case) -> nn.Module:
    return Case(**{**vars(case), "members": 1}).networks()[0]


def average(model: nn.Module):  # type: ignore[no-untyped-def]
    """The mean over estimators of what the model gives, (M · B, C), as the routine computes it."""
    model.eval()

    @torch.inference_mode()
    def predict(x: Tensor) -> Tensor:
        return rearrange(model(x), "(m b) c -> b m c", b=len(x)).softmax(-1).mean(1)

    return predict


def trains(case: Case, model: nn.Module, members: int, compared: bool = True) -> Prepared:
    watched = case.watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=members * RATE["lr"], momentum=RATE["momentum"])
    repeated = {"is_ensemble": True, "format_batch_fn": RepeatTarget(members)} if members > 1 else {}
    classes = 3 if case.network.startswith("tiny") else 10
    routine = ClassificationRoutine(model, classes, nn.CrossEntropyLoss(), optim_recipe=optimizer, **repeated)

    def epoch() -> None:
        model.train()
        TUTrainer(**barest(case.device)).fit(routine, train_dataloaders=watched)

    # Lightning leaves the model on the CPU.
    return lambda: watched.timed(epoch), (
        (lambda: average(model.to(case.device))(case.looked_at())) if compared else none
    )


def predicts(case: Case, model: nn.Module, compared: bool = True) -> Prepared:
    mean = average(model.to(case.device))
    return case.seconds(case.over(mean), "prediction"), (lambda: mean(case.looked_at())) if compared else none


def one(case: Case, model: nn.Module) -> Prepared:
    mean, x = average(model.to(case.device)), case.looked_at()
    return case.seconds(lambda: mean(x[:1]), "prediction of one"), lambda: mean(x)


def ensemble(case: Case) -> nn.Module:
    return deep_ensembles(case.networks())


def dropout(case: Case, measured) -> Prepared:  # type: ignore[no-untyped-def]
    model = mc_dropout(alone(case), num_estimators=case.members)  # on_batch, the faster way, is its default
    mean = average(model)
    return measured(case, model)[0], lambda: torch.stack([mean(case.looked_at()) for _ in range(30)]).mean(0)


def batched(case: Case) -> nn.Module:
    made = batch_ensemble(alone(case), case.members, repeat_training_inputs=True, convert_layers=True)
    return made.to(case.device)


def variational(case: Case) -> Prepared:
    layers = [BayesLinear(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m for m in alone(case)]
    model, watched = nn.Sequential(*layers).to(case.device), case.watched()
    loss = ELBOLoss(None, nn.CrossEntropyLoss(), kl_weight=1 / case.rows, num_samples=1)
    classes = 3 if case.network.startswith("tiny") else 10
    recipe = torch.optim.Adam(model.parameters(), lr=1e-3)
    routine = ClassificationRoutine(model, classes, loss, optim_recipe=recipe)
    return lambda: watched.timed(lambda: TUTrainer(**barest(case.device)).fit(routine, watched)), none


OPERATIONS = {
    "ensemble": lambda case: trains(case, ensemble(case), case.members),
    "ensemble predicts": lambda case: predicts(case, ensemble(case)),
    "ensemble, one input": lambda case: one(case, ensemble(case)),
    "single": lambda case: trains(case, alone(case), 1),
    "dropout predicts": partial(dropout, measured=predicts),
    "dropout, one input": partial(dropout, measured=one),
    "batch ensemble": lambda case: trains(case, batched(case), case.members, compared=False),
    "batch ensemble predicts": lambda case: predicts(case, batched(case), compared=False),
    "mean-field VI": variational,
}

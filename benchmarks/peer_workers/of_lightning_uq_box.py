"""lightning-uq-box, as its tutorials show: one Trainer and one checkpoint for each member, then `predict_step`."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import lightning_parts  # first: torchvision, which the others import, can load
import torch
from lightning import LightningDataModule, Trainer
from lightning_uq_box.uq_methods import (
    BNN_VI_ELBO_Classification,
    DeepEnsembleClassification,
    DeterministicClassification,
    MCDropoutClassification,
)
from tasks import RATE, Case, Prepared, Watched, none
from torch import Tensor, nn

VERSIONS = ("torch", "lightning-uq-box", "lightning")


def case_of(given: dict[str, object]) -> Case:
    return Case(**given)  # type: ignore[arg-type]


def watched(case: Case) -> Watched:
    return case.watching([{"input": x, "target": y} for x, y in case.batches()])


def member(network: nn.Module) -> DeterministicClassification:
    return DeterministicClassification(network, nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, **RATE))


def ensemble(case: Case, members, folder: str):  # type: ignore[no-untyped-def]
    """Members' checkpoints in a folder, and the ensemble that reads them."""
    found = []
    for i, each in enumerate(members):
        path = str(Path(folder) / f"{i}.ckpt")
        torch.save({"state_dict": each.state_dict()}, path)
        found.append({"base_model": each, "ckpt_path": path})
    return DeepEnsembleClassification(found, 3 if case.network.startswith("tiny") else 10)


def trains(case: Case) -> Prepared:
    members, batches, folder = [member(n) for n in case.networks()], watched(case), tempfile.mkdtemp()

    def epoch() -> None:
        for i, each in enumerate(members):
            each.train()
            trainer = Trainer(**lightning_parts.barest(case.device))
            trainer.fit(each, batches)
            if len(members) > 1:
                trainer.save_checkpoint(Path(folder) / f"trained-{i}.ckpt")

    return lambda: batches.timed(epoch), lambda: ensemble(case, members, folder).predict_step(case.looked_at())["pred"]


def probabilities(module):  # type: ignore[no-untyped-def]
    def predict(x: Tensor) -> Tensor:
        return module.predict_step(x)["pred"]

    return predict


def predicts(case: Case) -> Prepared:
    predict = probabilities(ensemble(case, [member(n) for n in case.networks()], tempfile.mkdtemp()))
    return case.seconds(case.over(predict), "prediction"), lambda: predict(case.looked_at())


def one(case: Case) -> Prepared:
    predict = probabilities(ensemble(case, [member(n) for n in case.networks()], tempfile.mkdtemp()))
    x = case.looked_at()
    return case.seconds(lambda: predict(x[:1]), "prediction of one"), lambda: predict(x)


def single(case: Case) -> Prepared:
    predict, x = probabilities(member(case.networks()[0]).eval()), case.looked_at()
    return case.seconds(lambda: predict(x[:1]), "prediction of one"), lambda: predict(x)


def dropout(case: Case, rows: int | None = None) -> Prepared:
    network = Case(**{**vars(case), "members": 1}).networks()[0]
    predict = probabilities(MCDropoutClassification(network, case.members, nn.CrossEntropyLoss()).eval())
    x = case.looked_at()
    call = case.over(predict) if rows is None else lambda: predict(x[:rows])
    name = "prediction" if rows is None else "prediction of one"
    return case.seconds(call, name), lambda: torch.stack([predict(x) for _ in range(30)]).mean(0)


def variational(case: Case) -> Prepared:
    law = {"num_mc_samples_train": 1, "beta": 1 / case.rows, "optimizer": partial(torch.optim.Adam, lr=1e-3)}
    module = BNN_VI_ELBO_Classification(case.networks()[0], nn.CrossEntropyLoss(), **law)
    batches, data = watched(case), LightningDataModule()
    batches.dataset = range(case.rows)  # type: ignore[attr-defined]  # it asks for its length
    data.train_dataloader = lambda: batches  # type: ignore[method-assign]
    return lambda: batches.timed(
        lambda: Trainer(**lightning_parts.barest(case.device)).fit(module, datamodule=data)
    ), none


OPERATIONS = {
    "ensemble": trains,
    "ensemble predicts": predicts,
    "ensemble, one input": one,
    "single": trains,
    "single, one input": single,
    "dropout predicts": dropout,
    "dropout, one input": lambda case: dropout(case, 1),
    "mean-field VI": variational,
}

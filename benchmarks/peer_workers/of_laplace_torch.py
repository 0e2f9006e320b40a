"""laplace-torch: last-layer Laplace, the prior precision by the marginal likelihood, probit predictions."""

from __future__ import annotations

import lightning_parts  # noqa: F401  torchvision, which it imports, can load
import torch
from laplace import Laplace
from tasks import Case, Prepared
from torch import Tensor

VERSIONS = ("torch", "laplace-torch")


def case_of(given: dict[str, object]) -> Case:
    return Case(**given)  # type: ignore[arg-type]


def fitted(case: Case, structure: str, network: torch.nn.Module, loader):  # type: ignore[no-untyped-def]
    laplace = Laplace(network, "classification", subset_of_weights="last_layer", hessian_structure=structure)
    laplace.fit(loader)
    laplace.optimize_prior_precision(method="marglik")
    return laplace


def fit(case: Case, structure: str) -> Prepared:
    network, loader = case.trained(), case.loader()
    call = case.seconds(lambda: fitted(case, structure, network, loader), "fit")
    return call, lambda: probabilities(fitted(case, structure, network, loader))(case.looked_at())


def probabilities(laplace):  # type: ignore[no-untyped-def]
    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        return laplace(x, pred_type="glm", link_approx="probit").detach()

    return predict


def predicts(case: Case, structure: str) -> Prepared:
    predict = probabilities(fitted(case, structure, case.trained(), case.loader()))
    return case.seconds(case.over(predict), "prediction"), lambda: predict(case.looked_at())


def one(case: Case, structure: str) -> Prepared:
    predict, x = probabilities(fitted(case, structure, case.trained(), case.loader())), case.looked_at()
    return case.seconds(lambda: predict(x[:1]), "prediction of one"), lambda: predict(x)


OPERATIONS = {
    "Laplace, full": lambda case: fit(case, "full"),
    "Laplace, kron": lambda case: fit(case, "kron"),
    "Laplace, full, predicts": lambda case: predicts(case, "full"),
    "Laplace, kron, predicts": lambda case: predicts(case, "kron"),
    "Laplace, kron, one input": lambda case: one(case, "kron"),
}

"""This library."""

from __future__ import annotations

import torch
from tasks import RATE, Case, Prepared, none

import dissensus as ds

VERSIONS = ("torch",)
OWN = {"dissensus": ds.__version__}
USED = (ds.fit, ds.predict, ds.DeepEnsemble, ds.MAP, ds.MCDropout, ds.BatchEnsemble, ds.Laplace, ds.SGHMC, ds.theory)


def case_of(given: dict[str, object]) -> Case:
    return Case(**given)  # type: ignore[arg-type]


def posterior_of(case: Case):  # type: ignore[no-untyped-def]
    networks = case.networks()
    return ds.MAP(networks[0]) if case.operation.startswith("single") else ds.DeepEnsemble(networks)


def train(case: Case) -> Prepared:
    return fitted(case, posterior := posterior_of(case), torch.optim.SGD(posterior.parameters(), **RATE))


def fitted(case: Case, posterior, optimizer, compared: bool = True) -> Prepared:  # type: ignore[no-untyped-def]
    watched = case.watched()
    keywords = {"epochs": 1, "precision": "float32", "device": case.device, "progress": False, "draw": False}
    return (
        lambda: watched.timed(lambda: ds.fit(posterior, watched, optimizer=optimizer, **keywords)),
        (lambda: posterior.predict(case.looked_at()).mean) if compared else none,
    )


def predict(case: Case, posterior=None) -> Prepared:  # type: ignore[no-untyped-def]
    posterior = (posterior or posterior_of(case)).to(case.device).eval()  # as after training
    batches = case.batches()
    return (
        case.seconds(lambda: ds.predict(posterior, batches).mean, "prediction"),
        lambda: posterior.predict(case.looked_at()).mean,
    )


def one(case: Case, posterior=None) -> Prepared:  # type: ignore[no-untyped-def]
    """Of trained networks as a service calls them; of those that draw functions by `predict`, which draws them anew."""
    known = (posterior or posterior_of(case)).to(case.device).eval()
    predictor, x = known.predictor(), case.looked_at()
    asked = torch.inference_mode()(lambda: predictor.predictive(x[:1]).mean)
    call = asked if posterior is None else (lambda: known.predict(x[:1]).mean)
    return case.seconds(call, "prediction of one"), lambda: known.predict(x).mean


def dropout(case: Case):  # type: ignore[no-untyped-def]
    network = Case(**{**vars(case), "members": 1}).networks()[0]
    return ds.MCDropout(network, samples=case.members).to(case.device)


def dropout_check(case: Case, posterior) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return torch.stack([posterior.predict(case.looked_at()).mean for _ in range(30)]).mean(0)


def dropout_predicts(case: Case) -> Prepared:
    return predict(case, posterior := dropout(case))[0], lambda: dropout_check(case, posterior)


def dropout_one(case: Case) -> Prepared:
    return one(case, posterior := dropout(case))[0], lambda: dropout_check(case, posterior)


def batch_ensemble(case: Case):  # type: ignore[no-untyped-def]
    network = Case(**{**vars(case), "members": 1}).networks()[0]
    modulation = ds.Modulation.normal(1.0, 0.5)
    return ds.BatchEnsemble(network, members=case.members, modulation=modulation).to(case.device)


def batch_ensemble_trains(case: Case) -> Prepared:
    posterior = batch_ensemble(case)
    return fitted(case, posterior, torch.optim.SGD(posterior.parameters(), **RATE), compared=False)


def laplace(case: Case, structure: str):  # type: ignore[no-untyped-def]
    return ds.Laplace(case.trained(), structure=structure).to(case.device).fit_posthoc(case.loader())


def laplace_fit(case: Case, structure: str) -> Prepared:
    network, loader = case.trained(), case.loader()

    def call():  # type: ignore[no-untyped-def]
        return ds.Laplace(network, structure=structure).to(case.device).fit_posthoc(loader)

    return case.seconds(call, "fit"), lambda: call().predict(case.looked_at()).mean


def sghmc(case: Case) -> Prepared:
    law = {"lr": 0.01, "friction": 0.1, "cycles": 0, "members": 1, "weight_prior_std": 1.0, "seed": 0}
    posterior = ds.SGHMC(case.networks()[0], data_size=case.rows, **law)
    return fitted(case, posterior, None, compared=False)


def variational(case: Case) -> Prepared:
    posterior = ds.MeanFieldVI(case.networks()[0], data_size=case.rows)
    return fitted(case, posterior, torch.optim.Adam(posterior.parameters(), lr=1e-3), compared=False)


def empirical(case: Case) -> Prepared:
    network, x = case.networks()[0], case.data()[0]
    compared = x[:4]
    return (
        case.seconds(lambda: ds.theory.empirical_ntk(network, x), "kernel"),
        lambda: ds.theory.empirical_ntk(network, compared),
    )


def analytic(case: Case) -> Prepared:
    """The NNGP and tangent kernel of a wide network, in float64."""
    x = case.data()[0]
    if case.network == "conv":
        conv, relu = torch.nn.Conv2d, torch.nn.ReLU
        pooled = (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 1))
        network = torch.nn.Sequential(conv(1, 8, 3, padding=1), relu(), conv(8, 8, 3, padding=1), relu(), *pooled)
        x = x[..., :12, :12]
    else:
        network = case.networks()[0]

    def call():  # type: ignore[no-untyped-def]
        return ds.theory.kernel(network, x, weight_variance=1.0, bias_variance=1.0).ntk

    return case.seconds(call, "kernel"), lambda: call()[:4, :4]


OPERATIONS = {
    "ensemble": train,
    "ensemble predicts": predict,
    "ensemble, one input": one,
    "single": train,
    "single, one input": one,
    "dropout predicts": dropout_predicts,
    "dropout, one input": dropout_one,
    "batch ensemble": batch_ensemble_trains,
    "batch ensemble predicts": lambda case: (predict(case, batch_ensemble(case))[0], none),
    "Laplace, full": lambda case: laplace_fit(case, "full"),
    "Laplace, kron": lambda case: laplace_fit(case, "kron"),
    "Laplace, full, predicts": lambda case: predict(case, laplace(case, "full")),
    "Laplace, kron, predicts": lambda case: predict(case, laplace(case, "kron")),
    "Laplace, kron, one input": lambda case: one(case, laplace(case, "kron")),
    "SGHMC": sghmc,
    "mean-field VI": variational,
    "empirical kernel": empirical,
    "analytic kernel": analytic,
}

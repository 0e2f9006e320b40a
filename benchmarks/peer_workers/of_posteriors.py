"""posteriors: its functional updates, `inplace=True`, the log posterior of its documentation."""

from __future__ import annotations

import posteriors
import torch
import torch.nn.functional as F
import torchopt
from tasks import Case, Prepared, none

VERSIONS = ("torch", "posteriors")


def case_of(given: dict[str, object]) -> Case:
    return Case(**given)  # type: ignore[arg-type]


def trains(case: Case, build) -> Prepared:  # type: ignore[no-untyped-def]
    network, watched = case.networks()[0], case.watched()
    params = {name: p.detach() for name, p in network.named_parameters()}

    def log_posterior(params, batch):  # type: ignore[no-untyped-def]
        x, y = batch
        output = torch.func.functional_call(network, params, (x,))
        prior = posteriors.diag_normal_log_prob(params, sd_diag=1.0, normalize=False)
        return -F.cross_entropy(output, y) + prior / case.rows, output

    transform = build(log_posterior, 1 / case.rows)
    state = transform.init(params)

    def epoch() -> None:
        nonlocal state
        for batch in watched:
            state, _ = transform.update(state, batch, inplace=INPLACE[build])

    return lambda: watched.timed(epoch), none


def sghmc(log_posterior, temperature):  # type: ignore[no-untyped-def]
    return posteriors.sgmcmc.sghmc.build(log_posterior, lr=0.1, alpha=1.0, temperature=temperature, momenta=0.0)


def variational(log_posterior, temperature):  # type: ignore[no-untyped-def]
    return posteriors.vi.diag.build(log_posterior, torchopt.adam(lr=1e-3), temperature=temperature, init_log_sds=-4.6)


INPLACE = {sghmc: True, variational: True}
OPERATIONS = {"SGHMC": lambda case: trains(case, sghmc), "mean-field VI": lambda case: trains(case, variational)}

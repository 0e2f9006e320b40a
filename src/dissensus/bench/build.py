"""From settings to objects: networks, posteriors, optimisers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dissensus.bench.config import RunConfig
from dissensus.bench.names import unknown
from dissensus.bench.schema import takes_several
from dissensus.bench.sets import TaskData
from dissensus.core.likelihood import HeteroscedasticRegression
from dissensus.core.posterior import Posterior, plateau_linear
from dissensus.methods import METHODS
from dissensus.nets import NETS
from dissensus.storage import LIKELIHOODS

MEMBERS = 5  # of methods that take several networks, unless the task says otherwise


def posterior(config: RunConfig, data: TaskData) -> Posterior:
    """The posterior of a run, freshly initialised from torch's generator.

    A method whose first parameter is called `modules` is given `members` networks, any other one; `data_size` is filled
    in where a method asks for it.
    """
    method = METHODS[config.method]
    settings = dict(config.settings)
    signature = inspect.signature(method).parameters
    likelihood_class = LIKELIHOODS[config.likelihood.get("name", "Classification")]
    likelihood = likelihood_class(**{k: v for k, v in config.likelihood.items() if k != "name"})
    doubled = isinstance(likelihood, HeteroscedasticRegression)
    first = next(iter(signature))
    networks: Any
    if takes_several(method):
        networks = [network(config, data, doubled=doubled) for _ in range(settings.pop("members", MEMBERS))]
    else:
        networks = network(config, data, doubled=doubled)
    size = signature.get("data_size")
    if size is not None and (size.default is inspect.Parameter.empty or settings.get("weight_prior_std") is not None):
        settings.setdefault("data_size", len(data.train.y))
    if unfit := settings.keys() - signature.keys():
        raise unknown(f"a setting of {config.method}", sorted(unfit)[0], signature.keys() - {"likelihood", first})
    for name, parameter in signature.items():
        if name != first and name not in settings and parameter.default is inspect.Parameter.empty:
            raise ValueError(
                f"expected the setting {name} of {config.method}, got none; pass --set method.{config.method}.{name}=…"
            )
    constructor: Callable[..., Posterior] = method
    return constructor(networks, likelihood=likelihood, **settings)


def network(config: RunConfig, data: TaskData, *, doubled: bool) -> nn.Module:
    """One network; what its settings leave open of inputs, outputs, channels and size is taken from the data."""
    settings = dict(config.network)
    make = NETS[settings.pop("name")]
    outputs = len(data.classes) if data.classes else data.train.y.shape[1]
    known = {"inputs": math.prod(data.train.x.shape[1:]), "outputs": outputs * (2 if doubled else 1)}
    if data.images:
        known |= {"channels": data.train.x.shape[1], "size": data.train.x.shape[2]}
    accepted = inspect.signature(make).parameters
    return make(**{key: value for key, value in known.items() if key in accepted} | settings)


def optimizer(posterior: Posterior, training: dict[str, Any]) -> tuple[torch.optim.Optimizer | None, LambdaLR | None]:
    """The optimiser and its schedule, by epochs, of a task's [training] section; None and None for the method's own."""
    name, schedule, epochs = training.get("optimizer", "adamw"), training.get("schedule", "plateau"), training["epochs"]
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
    }
    factors: dict[str, Callable[[float], float]] = {
        "plateau": plateau_linear,
        "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
        "constant": lambda t: 1.0,
    }
    if name == "default":
        return None, None
    if name not in makers:
        raise unknown("an optimizer", name, ["default", *makers])
    if schedule not in factors:
        raise unknown("a schedule", schedule, factors)
    groups = posterior.parameter_groups(lr=training.get("lr", 1e-3), weight_decay=training.get("weight_decay", 0.0))
    extra = {"momentum": training.get("momentum", 0.9), "nesterov": True} if name == "sgd" else {}
    made = makers[name](groups, **extra)
    return made, LambdaLR(made, lambda epoch: factors[schedule](epoch / epochs))

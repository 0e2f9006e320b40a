"""From settings to objects: networks, posteriors, optimisers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dissensus.bench.arguments import EMPCOV, first_layer_prior, resolved
from dissensus.bench.config import RunConfig
from dissensus.bench.fitting import fitting
from dissensus.bench.loaders import StandardisedBatches
from dissensus.bench.names import unknown
from dissensus.bench.schema import takes_several
from dissensus.bench.sets import TaskData
from dissensus.bench.variants import base_name
from dissensus.core.likelihood import HeteroscedasticRegression, Likelihood
from dissensus.core.optimisation import plateau_linear
from dissensus.core.posterior import Posterior
from dissensus.methods import METHODS
from dissensus.nets import NETS
from dissensus.storage import LIKELIHOODS

MEMBERS = 5  # of methods that take several networks, unless the task says otherwise


def posterior(config: RunConfig, data: TaskData) -> Posterior:
    """The posterior of a run, freshly initialised from torch's generator.

    A method whose first parameter is called `modules` is given `members` networks, any other one.
    """
    settings = arguments(config, data)
    first = settings.pop(EMPCOV, None)
    networks: Any
    if takes_several(METHODS[base_name(config.method)]):
        networks = [network(config, data) for _ in range(settings.pop("members", MEMBERS))]
    else:
        networks = network(config, data)
    with fitting(f"the method {config.method}"):
        built = around(config, settings)(networks, likelihood=likelihood(config))
    if first is not None:
        inputs = StandardisedBatches(data.train, data.standardiser, batch_size=1000)
        one = networks[0] if isinstance(networks, list) else networks
        built.use_first_layer_prior(first_layer_prior(first, one, inputs, data_size=len(data.train.y)))
    return built


def around(config: RunConfig, settings: dict[str, Any]) -> Callable[..., Posterior]:
    """The method of a run with its settings, to be called with what it is built around and a likelihood."""
    method = METHODS[base_name(config.method)]
    signature = inspect.signature(method).parameters
    if unfit := settings.keys() - signature.keys():
        known = signature.keys() - {"likelihood", next(iter(signature))}
        raise unknown(f"a setting of {config.method}", sorted(unfit)[0], known)
    check_complete(config, settings)
    return partial(method, **settings)


def check_complete(config: RunConfig, filled_in: Collection[str] = ("data_size",)) -> None:
    """An error where a run's method needs a setting that is neither given nor filled in, or has one it cannot take."""
    for name, parameter in list(inspect.signature(METHODS[base_name(config.method)]).parameters.items())[1:]:
        if parameter.default is inspect.Parameter.empty and name not in (*config.settings, *filled_in):
            raise ValueError(
                f"expected the setting {name} of {config.method}, got none; write {name} = … below [method.{config.method}] "
                f"in the task, or pass --set method.{config.method}.{name}=…"
            )
    if config.training.get("patience") is not None and not METHODS[base_name(config.method)].keeps_best:
        raise ValueError(
            f"expected no training.patience for {config.method}, which collects a trajectory over the whole run, got "
            f"{config.training['patience']}; leave it out, or bench that method in a task of its own"
        )


def arguments(config: RunConfig, data: TaskData) -> dict[str, Any]:
    """The settings of a run's method; `data_size` and `batch_size` are filled in where the method asks for them."""
    settings = resolved(config.settings, StandardisedBatches(data.train, data.standardiser, batch_size=1000))
    parameters = inspect.signature(METHODS[base_name(config.method)]).parameters
    if "batch_size" in parameters and "batch_size" in config.training:
        settings.setdefault("batch_size", min(config.training["batch_size"], len(data.train.y)))
    size = parameters.get("data_size")
    asked = settings.get("weight_prior_std") is not None or settings.get("repulsion") == "1/N"
    if size is not None and (size.default is inspect.Parameter.empty or asked):
        settings.setdefault("data_size", len(data.train.y))
    return settings


def likelihood(config: RunConfig) -> Likelihood:
    """What the outputs of a run's networks mean."""
    made = LIKELIHOODS[config.likelihood.get("name", "Classification")]
    with fitting(f"the likelihood {made.__name__}"):
        return made(**{key: value for key, value in config.likelihood.items() if key != "name"})


def network(config: RunConfig, data: TaskData) -> nn.Module:
    """One network; what its settings leave open of inputs, outputs, channels and size is taken from the data."""
    settings = dict(config.network)
    make = NETS[settings.pop("name")]
    outputs = len(data.classes) if data.classes else data.train.y.shape[1]
    doubled = config.likelihood.get("name") == HeteroscedasticRegression.__name__  # a mean and a variance each
    known = {"inputs": math.prod(data.train.x.shape[1:]), "outputs": outputs * (2 if doubled else 1)}
    if data.images:
        known |= {"channels": data.train.x.shape[1], "size": data.train.x.shape[2]}
    accepted = inspect.signature(make).parameters
    with fitting(f"the network {make.__name__}"):
        return make(**{key: value for key, value in known.items() if key in accepted} | settings)


def optimizer(posterior: Posterior, training: dict[str, Any]) -> tuple[torch.optim.Optimizer | None, LambdaLR | None]:
    """The optimiser and its schedule, by epochs, of a task's [training] section; None and None for the method's own."""
    name, schedule, epochs = training.get("optimizer", "adamw"), training.get("schedule", "plateau"), training["epochs"]
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
    }
    floor = training.get("floor", 0.01)
    factors: dict[str, Callable[[float], float]] = {
        "plateau": lambda t: plateau_linear(t, floor=floor),
        "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
        "thirds": lambda t: 0.1 ** int(3 * t + 1e-9),  # a tenth of the rate after every third of the run
        "late": lambda t: plateau_linear(t, start=0.75, end=1.0, floor=floor),
        "constant": lambda t: 1.0,
        "own": lambda t: posterior.default_schedule(epochs)(round(t * epochs)),
    }
    if name == "default":
        return None, None
    if name not in makers:
        raise unknown("an optimizer", name, ["default", *makers])
    if schedule not in factors:
        raise unknown("a schedule", schedule, factors)
    groups = posterior.parameter_groups(lr=training.get("lr", 1e-3), weight_decay=training.get("weight_decay", 0.0))
    momentum = {"momentum": training.get("momentum", 0.9), "nesterov": training.get("nesterov", True)}
    extra = momentum if name == "sgd" else {}
    made = makers[name](groups, **extra)
    return made, LambdaLR(made, lambda epoch: factors[schedule](epoch / epochs))

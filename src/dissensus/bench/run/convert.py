"""From a file of weights to a saved posterior: a network that somebody trained, in any method that takes one."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from dissensus.bench.fitting import fitting
from dissensus.bench.run import build
from dissensus.bench.run.weights import load_weights
from dissensus.bench.task.arguments import resolved
from dissensus.bench.task.config import RunConfig, Settings, Task, overridden, parsed, run_config
from dissensus.bench.task.hints import check_read
from dissensus.bench.task.networks import maker
from dissensus.bench.task.objects import OBJECTS, written
from dissensus.bench.task.schema import check_task, counted_by
from dissensus.bench.task.variants import base_name
from dissensus.core.posterior import Posterior
from dissensus.methods import METHODS
from dissensus.methods.laplace import Laplace
from dissensus.nets import NETS
from dissensus.numerics.randomness import same_random_state
from dissensus.storage import save
from dissensus.storage.sealed import is_posterior

log = logging.getLogger("dissensus")

SECTIONS = ("network", "method", "likelihood")  # of a task, what a conversion reads
# Sections that a task must have and a conversion does not read.
UNREAD: Settings = {"data": {"name": "two_moons"}, "training": {"epochs": 1}}


def convert(weights: Path, method: str, out: Path, *, overrides: Sequence[str] = (), seed: int = 0) -> Posterior:
    """The posterior of that method, of a network with these weights, saved in the folder `out`, which must be new.

    `overrides`: "section.key=value" as of a task: network.name and the network's arguments, settings of the method, a
    likelihood. `seed`: of what a method draws for its start; torch's own state is put back. All is built and checked before
    anything is written.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"expected a folder that is new or empty, got {out}; choose another, or remove it")
    if weights.is_dir():
        known = f"ds.load({str(weights)!r}) reads it" if is_posterior(weights) else "name the file in it"
        raise IsADirectoryError(f"expected a file of weights, got the folder {weights}; {known}")
    if not weights.is_file():
        raise FileNotFoundError(f"expected a file of weights, got nothing at {weights}; correct the path")
    config = converted_config(method, overrides)
    with same_random_state(torch.device("cpu")):
        torch.default_generator.manual_seed(seed)  # a conversion is done on the host: GPUs are left alone
        made = network(config)
        load_weights(made, weights)
        converted = posterior(config, made)
        save(converted, out)
    if (missing := to_do(converted)) is not None:
        log.info("%s has seen no data yet: %s", method, missing)
    return converted


def to_do(posterior: Posterior) -> str | None:
    """What a posterior waits for before it can predict; None where it can."""
    if isinstance(posterior, Laplace) and posterior.curvature is None:
        return "load it and call fit_posthoc(loader) with the training data of the network"
    return None if posterior.ready else "load it and train it with ds.fit(posterior, loader, ...)"


def converted_config(method: str, overrides: Sequence[str]) -> RunConfig:
    """What a conversion depends on, as a run has it; an error for what is not known, missing or not read."""
    if counted_by(METHODS[base_name(method)]) == "members":
        raise ValueError(
            f"expected a method of one network, got {method}, whose members would all be the same one; choose one of "
            f"{', '.join(name for name, kind in METHODS.items() if counted_by(kind) != 'members')}"
        )
    settings: Settings = {**UNREAD, "methods": [method], "network": {}, "method": {method: {}}}
    # The network's name first: what else its section may hold depends on it.
    for override in sorted(overrides, key=lambda each: each.partition("=")[0].strip() != "network.name"):
        key = override.partition("=")[0].strip()
        if key.partition(".")[0] not in SECTIONS or key == "network.weights":
            raise ValueError(
                f"expected a value of {', '.join(SECTIONS)} for --set, got {override!r}; a conversion reads no others, and "
                "the file of weights is its argument"
            )
        if key == "network.name":
            name = str(parsed(override.partition("=")[2].strip()))
            maker(name)  # an error where there is none
            settings = {**settings, "network": {"name": name}}
        elif "name" not in settings["network"]:
            break
        else:
            settings = overridden(settings, override, sections=SECTIONS)
    if "name" not in settings["network"]:
        raise ValueError(f"expected network.name, got none; pass --set network.name=NAME of {', '.join(NETS)}")
    check_read(overrides, [method])
    check_task(settings, "the command line")
    config = run_config(Task("convert", "short", settings), method, 0)
    build.check_given(config)
    build.check_weights(config)
    return config


def network(config: RunConfig) -> nn.Module:
    """The network of that name and arguments; an error that names those it lacks."""
    name = config.network["name"]
    arguments, make = {key: value for key, value in config.network.items() if key != "name"}, maker(name)
    for key, parameter in inspect.signature(make).parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needed and key not in arguments:
            raise ValueError(
                f"expected network.{key} of {name}, got none; pass --set network.{key}=… as it was trained with"
            )
    return build.built(name, make, arguments, {})


def posterior(config: RunConfig, network: nn.Module) -> Posterior:
    """The posterior of the config's method with this network."""
    parameters = inspect.signature(METHODS[base_name(config.method)]).parameters
    for key in config.settings.keys() & OBJECTS.keys():
        if "inputs" in inspect.signature(written(key, config.settings[key]).make).parameters:
            raise ValueError(
                f"expected settings that need no data, got {key}; convert without it, then train with it in a task"
            )
    settings = resolved(config.settings, parameters, network=network)
    with fitting(f"the method {config.method}"):
        return build.constructor(config, settings)(network, likelihood=build.likelihood(config)).eval()

"""Turns a file of trained weights into a saved posterior of any method that takes one network."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from dissensus.bench.run import build
from dissensus.bench.run.build import load_weights
from dissensus.bench.setting_checks import settings_errors
from dissensus.bench.task.config import RunConfig, Settings, Task, apply_override, run_config
from dissensus.bench.task.objects import build_objects, check_overrides_read, count_setting, method_class, network_maker
from dissensus.bench.task.schema import check_task
from dissensus.core.posterior import Posterior
from dissensus.methods import METHODS
from dissensus.methods.laplace import Laplace
from dissensus.numerics.randomness import preserve_random_state
from dissensus.storage import save
from dissensus.storage.folder import is_posterior

log = logging.getLogger("dissensus")

SECTIONS = ("network", "method", "likelihood")  # the sections of a task that a conversion reads
# Sections that a task must have but a conversion does not read.
UNREAD: Settings = {"data": {"name": "two_moons"}, "training": {"epochs": 1}}


def convert(weights: Path, method: str, out: Path, *, overrides: Sequence[str] = (), seed: int = 0) -> Posterior:
    """Builds the method's posterior from a network with these weights, and saves it in the new folder `out`.

    `overrides`: "section.key=value" as in a task: network.name and the network's arguments, settings of the method, a
    likelihood. `seed`: of the method's random initialisation; torch's state is restored. All is checked before it is written.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"expected a folder that is new or empty, got {out}; choose another, or remove it")
    if not weights.is_file():
        reads = f"a saved posterior: ds.load({str(weights)!r}) reads it"
        known = reads if is_posterior(weights) else "correct the path"
        found = "a folder" if weights.is_dir() else "nothing"
        raise FileNotFoundError(f"expected a file of weights, got {found} at {weights}; {known}")
    config = converted_config(method, overrides)
    with preserve_random_state(torch.device("cpu")):
        torch.default_generator.manual_seed(seed)  # a conversion runs on the CPU: GPU generators stay as they are
        arguments = dict(config.network)
        name = arguments.pop("name")
        network = build.make_network(name, network_maker(name), arguments, {})
        load_weights(network, weights)
        settings = build_objects(config.settings, network=network)
        with settings_errors(f"the method {method}"):
            converted = build.constructor(config, settings)(network, likelihood=build.likelihood(config)).eval()
        save(converted, out)
    if (missing := missing_step(converted)) is not None:
        log.info("%s is not fitted yet: %s", method, missing)
    return converted


def missing_step(posterior: Posterior) -> str | None:
    """The step that a posterior needs before it can predict; None if it can predict."""
    if isinstance(posterior, Laplace) and posterior.curvature is None:
        return "load it and call fit_posthoc(loader) with the training data of the network"
    return None if posterior.ready else "load it and train it with ds.fit(posterior, loader, ...)"


def converted_config(method: str, overrides: Sequence[str]) -> RunConfig:
    """The config of a conversion, as for a run; raises for settings that are unknown, missing or not read."""
    if count_setting(method_class(method)) == "members":
        one = ", ".join(name for name, kind in METHODS.items() if count_setting(kind) != "members")
        raise ValueError(f"expected a method of one network, got {method} with equal members; choose one of {one}")
    settings: Settings = {**UNREAD, "methods": [method], "network": {}, "method": {method: {}}}
    # The network's name first: the other keys of its section depend on it.
    for override in sorted(overrides, key=lambda each: each.partition("=")[0].strip() != "network.name"):
        key = override.partition("=")[0].strip()
        if key.partition(".")[0] not in SECTIONS or key == "network.weights":
            got = f"{override!r}; a conversion reads only these, and the file of weights is an argument"
            raise ValueError(f"expected a value of {', '.join(SECTIONS)} for --set, got {got}")
        settings = apply_override(settings, override, sections=SECTIONS)
    check_overrides_read(overrides, [method])
    check_task(settings, "the command line")
    given = settings["method"][method]
    for_trained = dict(getattr(method_class(method), "of_trained_settings", {}))
    if "latent_lr" in given:  # rates of one's own are not measured
        for_trained.pop("lr", None)
    settings["method"] = {method: {**for_trained, **given}}
    config = run_config(Task("convert", "short", settings), method, 0)
    build.check_complete(config, converted=True)
    return config

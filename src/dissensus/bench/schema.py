"""What may stand in a task file: the keys of each section, and the types of their values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dissensus.bench.names import unknown
from dissensus.bench.sets import SETS
from dissensus.methods import METHODS
from dissensus.nets import NETS
from dissensus.storage import LIKELIHOODS

Types = tuple[type, ...]
TEXT, WHOLE, REAL, TRUTH, TEXTS, WHOLES = (str,), (int,), (int, float), (bool,), (list, str), (list, int)

TOP: dict[str, Types] = {"title": TEXT, "description": TEXT, "methods": TEXTS, "baseline": TEXT}
SECTIONS = ("data", "network", "likelihood", "method", "training", "evaluation", "size")
DATA: dict[str, Types] = {
    "name": TEXT,  # of SETS
    "validation": REAL,  # rows held out of the training set, or their share
    "train": WHOLE,  # at most so many training rows
    "test": WHOLE,  # at most so many test rows
    "ood": TEXTS,  # sets of foreign inputs
    "ood_rows": WHOLE,  # at most so many of each
    "shift": TEXTS,  # labelled sets of another distribution
    "seed": WHOLE,  # of the split; the same for every run, so that runs are compared on the same rows
}
TRAINING: dict[str, Types] = {
    "epochs": WHOLE,
    "batch_size": WHOLE,
    "optimizer": TEXT,  # adamw, adam, sgd or default: what the method itself would take
    "lr": REAL,
    "weight_decay": REAL,
    "momentum": REAL,  # of sgd
    "schedule": TEXT,  # plateau, cosine or constant
    "clip": REAL,
    "patience": WHOLE,
    "keep_best": TRUTH,  # by the validation likelihood
    "augment": TEXT,  # none, crop or flip_crop
    "precision": TEXT,
    "engine": TEXT,
    "threads": WHOLE,  # of the processor; small networks run faster on one
    "temperature": TRUTH,  # fit one on the validation set afterwards
}
EVALUATION: dict[str, Types] = {
    "batch_size": WHOLE,
    "corrupt": TEXTS,  # none, all, benchmark, or names
    "severities": WHOLES,
    "corrupt_rows": WHOLE,  # at most so many test rows
    "score": TEXT,  # what OOD inputs are ranked by
}
FILLED_IN = {"inputs", "outputs", "channels", "size"}  # of networks: taken from the data unless given


def check_task(settings: Mapping[str, Any], where: str) -> None:
    """An error that names the first key of a task that does not belong, or whose value has the wrong type."""
    for key, value in settings.items():
        if key in TOP:
            check_type(value, TOP[key], f"{where}: {key}")
        elif key not in SECTIONS:
            raise unknown(f"a key of the task {where}", key, [*TOP, *SECTIONS])
        elif not isinstance(value, Mapping):
            raise ValueError(f"expected a table [{key}] in {where}, got {value!r}; write the section's keys below it")
    for section, known in known_keys(settings).items():
        table = settings
        for part in section.split("."):
            table = table.get(part, {})
        for key, value in table.items():
            if section.startswith("method.") and key == "training":
                continue  # a table of its own, checked as such
            if key not in known:
                raise unknown(f"a key of [{section}]", key, known)
            if known[key]:
                check_type(value, known[key], f"{where}: {section}.{key}")
    for name in settings.get("method", {}):
        if name not in METHODS:
            raise unknown("a method", name, METHODS)


def known_keys(settings: Mapping[str, Any]) -> dict[str, dict[str, Types]]:
    """Section -> key -> types () where any will do: what a task with this data set, network and methods may hold."""
    data, network = settings.get("data", {}).get("name"), settings.get("network", {}).get("name")
    likelihood = settings.get("likelihood", {}).get("name")
    for what, name, table in (("data set", data, SETS), ("network", network, NETS)):
        if name is None:
            raise ValueError(f"expected a {what} in the task, got none; set {what.split()[0]}.name")
        if name not in table:
            raise unknown(f"a {what}", name, table)
    if likelihood is not None and likelihood not in LIKELIHOODS:
        raise unknown("a likelihood", likelihood, LIKELIHOODS)
    found = {
        "data": DATA | free(keywords(SETS[data].make, "folder")),
        "network": {"name": TEXT} | free(keywords(NETS[network])),
        "likelihood": {"name": TEXT} | (free(keywords(LIKELIHOODS[likelihood])) if likelihood else {}),
        "training": TRAINING,
        "evaluation": EVALUATION,
    }
    for name, method in METHODS.items():
        several = {"members"} if takes_several(method) else set()
        found[f"method.{name}"] = free(several | keywords(method, "likelihood", "module", "modules"))
        found[f"method.{name}.training"] = TRAINING
    return found


def takes_several(method: Callable[..., Any]) -> bool:
    """Whether a method is built from a sequence of networks: its first parameter is then called `modules`."""
    return next(iter(inspect.signature(method).parameters)) == "modules"


def keywords(function: Callable[..., Any], *without: str) -> set[str]:
    """The names of a function's parameters."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {n for n, p in inspect.signature(function).parameters.items() if n not in without and p.kind not in kinds}


def free(names: set[str]) -> dict[str, Types]:
    return dict.fromkeys(names, ())


def check_type(value: Any, types: Types, what: str) -> None:
    """An error where a value has none of the types; booleans are not numbers here."""
    fits = isinstance(value, types) and not (isinstance(value, bool) and bool not in types)
    if not fits:
        names = " or ".join(each.__name__ for each in types)
        raise ValueError(f"expected {names} for {what}, got {value!r} ({type(value).__name__}); correct the value")

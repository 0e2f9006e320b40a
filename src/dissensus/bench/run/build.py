"""Builds networks, posteriors and optimisers from settings."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dissensus import storage
from dissensus.bench.rows.dataset_rows import find_file
from dissensus.bench.rows.named_sets import task_set
from dissensus.bench.rows.task_loaders import standardised_batches
from dissensus.bench.rows.task_rows import TaskData
from dissensus.bench.run.initial_weights import load_weights
from dissensus.bench.task.config import RunConfig
from dissensus.bench.task.method_names import base_name, count_setting, method_class, parameters
from dissensus.bench.task.objects import NetworkMaker, build_objects, network_maker, option_text, parse_object
from dissensus.bench.typecheck import settings_errors
from dissensus.bench.user_code import code_digest, is_import_path
from dissensus.core import batch as batches
from dissensus.core.likelihood import HeteroscedasticRegression, Likelihood
from dissensus.core.posterior import Posterior
from dissensus.core.regression import HeteroscedasticRegression
from dissensus.data.catalogue import sha256
from dissensus.data.find_files import sha256
from dissensus.utils.checks import one_of
from dissensus.utils.parameter_groups import optimizer_refusal, plateau_linear

MEMBERS = 5  # default number of networks for methods that take several


def posterior(config: RunConfig, data: TaskData, *, folders: Sequence[Path] = ()) -> Posterior:
    """The posterior of a run, newly initialised from torch's generator.

    `folders`: folders in which the task's files are searched.
    """
    key, count = setting_and_count(config)
    networks = [network(config, data, folders=folders) for _ in range(count)]
    settings = method_arguments(config, data, networks[0])
    one = key != "members" and count == 1
    with settings_errors(f"the method {config.method}"):
        return constructor(config, settings)(networks[0] if one else networks, likelihood=likelihood(config, data))


def setting_and_count(config: RunConfig) -> tuple[str | None, int]:
    """(the setting for the number of networks of a run's method, that number)."""
    key = count_setting(method_class(config.method, config.folder))
    return key, config.settings.get(key or "", MEMBERS if key == "members" else 1)


def constructor(config: RunConfig, settings: dict[str, Any]) -> Callable[..., Posterior]:
    """The constructor of a run's method with its settings bound; call it with the network or networks and a likelihood."""
    method = method_class(config.method, config.folder)
    return partial(method, **{name: value for name, value in settings.items() if name != count_setting(method)})


def check_complete(config: RunConfig, *, converted: bool = False) -> None:
    """Raises if a required setting of a run's method is missing, or if a setting does not fit it.

    `converted`: it is a conversion of a trained network, whose data are unknown, not a run.
    """
    method, training = method_class(config.method, config.folder), config.training
    for name in required_keywords(method):
        if name not in config.settings and (converted or name != "data_size"):
            options = option_text(f"method.{config.method}", name)
            raise ValueError(f"expected the setting {name} of {config.method}, got none; pass {options}")
    key, count = setting_and_count(config)
    weights = converted or "weights" in config.network
    if weights and count > 1:
        advice = f"leave the weights out, or {'the method' if key == 'members' else key}"
        got = f"{config.method}, whose {count} {key} would all start equal"
        raise ValueError(f"expected one network with weights from a file, got {got}; {advice}")
    if training["epochs"] == 0 and not weights:
        got = "none: the network would stay random; set epochs to 1 or more, or name a file of weights"
        raise ValueError(f"expected network.weights for {config.method} with training.epochs = 0, got {got}")
    if training.get("patience") is not None and method.judged_by is None:
        got = f"{training['patience']}; leave it out, or run that method in a separate task"
        raise ValueError(f"expected no training.patience for {config.method}, which collects a trajectory, got {got}")


def required_keywords(method: type[Posterior]) -> list[str]:
    """The required keywords of a method."""
    named = list(parameters(method).items())[1:]
    return [*(name for name, each in named if each.default is inspect.Parameter.empty), *method.needed]


def method_arguments(config: RunConfig, data: TaskData, network: nn.Module | None) -> dict[str, Any]:
    """The settings of a run's method; `data_size` and `batch_size` are filled in if the method takes them."""
    method = method_class(config.method, config.folder)
    known = parameters(method)
    inputs = standardised_batches(data.train, data.standardiser, batch_size=1000)
    settings = build_objects(config.settings, inputs=inputs, network=network)
    if "batch_size" in known and "batch_size" in config.training:
        settings.setdefault("batch_size", min(config.training["batch_size"], len(data.train.y)))
    asked = bool({"prior", "weight_prior_std"} & settings.keys()) or settings.get("repulsion") == "1/N"
    if "data_size" in required_keywords(method) or ("data_size" in known and asked):
        settings.setdefault("data_size", len(data.train.y))
    return settings


def likelihood(config: RunConfig, data: TaskData | None = None) -> Likelihood:
    """The likelihood of a run."""
    masks = data is not None and data.kind == "segmentation"
    supplied = {"masks": data.train.y, "classes": len(data.classes)} if data is not None and masks else {}
    with settings_errors("the likelihood"):
        named = config.likelihood or ("segmentation" if masks else "classification")
        made: Likelihood = parse_object("likelihood", named).build(**supplied)
    return made


def network(config: RunConfig, data: TaskData, *, folders: Sequence[Path] = ()) -> nn.Module:
    """One network; inputs, outputs, channels and size are taken from the data if its settings leave them open.

    `weights`: a file, in one of the folders, with the initial state.
    """
    settings = dict(config.network)
    make, weights = network_maker(settings.pop("name"), config.folder), settings.pop("weights", None)
    known = {"inputs": math.prod(data.train.x.shape[1:]), "outputs": output_count(config, data)}
    known |= {"num_classes": known["outputs"]} if data.classes else {}  # the usual name elsewhere
    if data.has_images:
        known |= {"channels": data.train.x.shape[1], "size": data.train.x.shape[2]}
    made = make_network(config.network["name"], make, settings, known)
    if weights is not None:
        load_weights(made, find_file(weights, folders, "network.weights = "))
    return made


def make_network(name: str, make: NetworkMaker, settings: Mapping[str, Any], known: Mapping[str, Any]) -> nn.Module:
    """The network from `make`, called with these settings and with those of `known` that it takes."""
    with settings_errors(f"the network {name}"):
        accepted = inspect.signature(make).parameters
        made = make(**{key: value for key, value in known.items() if key in accepted} | dict(settings))
    if not isinstance(made, nn.Module):
        raise ValueError(f"expected a network from {name}, got {type(made).__name__}; name a class of nn.Module")
    return made


def output_count(config: RunConfig, data: TaskData) -> int:
    """The number of outputs of the run's network."""
    count = len(data.classes) if data.classes else data.train.y.shape[1]
    return count * (
        2 if isinstance(likelihood(config, data), HeteroscedasticRegression) else 1
    )  # a mean and a variance each


def try_network(config: RunConfig, load: Callable[[], TaskData], *, folders: Sequence[Path] = ()) -> None:
    """Builds a run's network as a test: raises if that fails, if its weights do not fit, or if its outputs do not."""
    name = config.network["name"]
    if "weights" not in config.network and not is_import_path(name):
        return
    data = load()
    made = network(config, data, folders=folders).eval()
    if is_import_path(name):
        x, *_ = next(iter(standardised_batches(data.train.sample(2, seed=0), data.standardiser, batch_size=2)))
        with torch.no_grad(), settings_errors(f"the network {name}"):
            outputs = batches.call_network(made, x)
        wanted = output_count(config, data)
        if outputs.ndim < 2 or outputs.shape[1] != wanted:
            advice = f"set their number in [network], for example network.num_classes = {wanted}"
            raise ValueError(f"expected {wanted} outputs of {name}, got shape {tuple(outputs.shape)}; {advice}")


def load_saved_posterior(folder: Path, config: RunConfig, load: Callable[[], TaskData]) -> Posterior:
    """The posterior that a run saved in its folder. Data are loaded if the network is the user's."""
    template, method = None, method_class(config.method, config.folder) if is_import_path(config.method) else None
    if is_import_path(config.network["name"]):
        fresh = {key: value for key, value in config.network.items() if key != "weights"}
        template = network(replace(config, network=fresh), load())
    try:
        return storage.load(folder / "posterior", template, method=method)
    except ValueError as error:
        if template is not None or method is not None:  # the imported code may have changed; the run itself may be fine
            raise
        raise ValueError(f"{error} (a damaged run: delete {folder} and run the command again)") from error


def try_method(config: RunConfig, load: Callable[[], TaskData], *, folders: Sequence[Path] = ()) -> None:
    """Builds, saves and loads the posterior of the user's method, so that errors appear before hours of training."""
    if not is_import_path(config.method):
        return
    method = method_class(config.method, config.folder)
    known = [*parameters(method), *filter(None, [count_setting(method)])]
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in inspect.signature(method).parameters.values()):
        for key in ("likelihood", *config.settings):
            one_of(f"a keyword of {config.method}", key, known)
    made = posterior(config, load(), folders=folders)
    with TemporaryDirectory() as folder:
        try:
            storage.save(made, Path(folder) / "posterior")
            load_saved_posterior(Path(folder), config, load)
        except Exception as error:  # whatever its config() and skeleton() raise
            got = f"an error ({error}); let config() hold the arguments that skeleton() passes to its constructor"
            raise ValueError(f"expected {config.method} to be saved and loaded, got {got}") from error


def own_digests(config: RunConfig, load: Callable[[], TaskData] | None) -> dict[str, str]:
    """Name -> digest of the user's code and rows that a run depends on; installed packages are left out."""
    named = (base_name(config.method), config.network["name"], config.data["name"])
    digests = {name: code_digest(name, config.folder) for name in named if is_import_path(name)}
    if load is not None and task_set(config.data["name"]).is_user_data:
        digests["rows"] = load().digest
    return {name: digest for name, digest in digests.items() if digest}


def weights_digest(config: RunConfig, folders: Sequence[Path]) -> dict[str, str]:
    """The checksum of a run's file of initial weights, for its provenance; empty if there is none."""
    weights = config.network.get("weights")
    return {} if weights is None else {"weights_sha256": sha256(find_file(weights, folders, "network.weights = "))}


def optimizer(posterior: Posterior, training: dict[str, Any]) -> tuple[torch.optim.Optimizer | None, LambdaLR | None]:
    """The optimiser and its per-epoch schedule from a task's [training] section; (None, None) means the method's default.

    That is also used if the task names no optimiser and the method does not accept AdamW.
    """
    name, schedule, epochs = training.get("optimizer", "adamw"), training.get("schedule", "plateau"), training["epochs"]
    optim = torch.optim
    makers: dict[str, type[optim.Optimizer]] = {"adamw": optim.AdamW, "adam": optim.Adam, "sgd": optim.SGD}
    floor = training.get("floor", 0.01)
    factors: dict[str, Callable[[float], float]] = {
        "plateau": lambda t: plateau_linear(t, floor=floor),
        "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
        "polynomial": lambda t: (1 - t) ** 0.9,  # as usual for segmentation
        "thirds": lambda t: 0.1 ** int(3 * t + 1e-9),  # a tenth of the rate after every third of the run
        "late": lambda t: plateau_linear(t, start=0.75, end=1.0, floor=floor),
        "constant": lambda t: 1.0,
        "own": lambda t: posterior.default_schedule(epochs)(round(t * epochs)),
    }
    one_of("training.optimizer", name, ["default", *makers])
    one_of("training.schedule", schedule, factors)
    if name == "default":
        return None, None
    if (refused := optimizer_refusal(posterior, makers[name])) is not None:
        if "optimizer" not in training:
            return None, None
        raise ValueError(f'{refused}; write optimizer = "default" below its [method.….training]')
    groups = posterior.parameter_groups(lr=training.get("lr", 1e-3), weight_decay=training.get("weight_decay", 0.0))
    momentum = {"momentum": training.get("momentum", 0.9), "nesterov": training.get("nesterov", True)}
    extra: dict[str, Any] = momentum if name == "sgd" else {}
    made = makers[name](groups, **extra)
    return made, LambdaLR(made, lambda epoch: factors[schedule](epoch / epochs))

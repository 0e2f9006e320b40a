"""Builds networks, posteriors and optimisers from settings.

Initial weights come from a state dict in a .pt, .npz or .safetensors file, which may be untrusted: no code in it is run,
nothing larger than the network needs is read, and every fault is one clear error.
"""

import inspect
import logging
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from dissensus import storage
from dissensus.bench.rows.dataset_rows import find_file, standardised_batches
from dissensus.bench.rows.named_sets import task_set
from dissensus.bench.rows.task_rows import TaskData
from dissensus.bench.setting_checks import settings_errors
from dissensus.bench.task import objects
from dissensus.bench.task.config import RunConfig
from dissensus.bench.user_code import code_digest, is_import_path
from dissensus.core import batch as batches
from dissensus.core.likelihood import HeteroscedasticRegression, Likelihood
from dissensus.core.posterior import Posterior
from dissensus.data.catalogue import sha256
from dissensus.data.file_formats import npz_arrays
from dissensus.training.checkpoint import check_archive
from dissensus.utils.batch_norm_names import statistics_layers
from dissensus.utils.checks import first_names, one_of
from dissensus.utils.file_errors import read_errors
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
    key = objects.count_setting(objects.method_class(config.method, config.folder))
    return key, config.settings.get(key or "", MEMBERS if key == "members" else 1)


def constructor(config: RunConfig, settings: dict[str, Any]) -> Callable[..., Posterior]:
    """The constructor of a run's method with its settings bound; call it with the network or networks and a likelihood."""
    method = objects.method_class(config.method, config.folder)
    return partial(method, **{name: value for name, value in settings.items() if name != objects.count_setting(method)})


def check_complete(config: RunConfig, *, converted: bool = False) -> None:
    """Raises if a required setting of a run's method is missing, or if a setting does not fit it.

    `converted`: it is a conversion of a trained network, whose data are unknown, not a run.
    """
    method, training = objects.method_class(config.method, config.folder), config.training
    for name in required_keywords(method):
        if name not in config.settings and (converted or name != "data_size"):
            options = objects.option_text(f"method.{config.method}", name)
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
    named = list(objects.parameters(method).items())[1:]
    return [*(name for name, each in named if each.default is inspect.Parameter.empty), *method.needed]


def method_arguments(config: RunConfig, data: TaskData, network: nn.Module | None) -> dict[str, Any]:
    """The settings of a run's method; `data_size` and `batch_size` are filled in if the method takes them."""
    method = objects.method_class(config.method, config.folder)
    known = objects.parameters(method)
    inputs = standardised_batches(data.train, data.standardiser, batch_size=1000)
    settings = objects.build_objects(config.settings, inputs=inputs, network=network)
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
        made: Likelihood = objects.parse_object("likelihood", named).build(**supplied)
    return made


def network(config: RunConfig, data: TaskData, *, folders: Sequence[Path] = ()) -> nn.Module:
    """One network; inputs, outputs, channels and size are taken from the data if its settings leave them open.

    `weights`: a file, in one of the folders, with the initial state.
    """
    settings = dict(config.network)
    make, weights = objects.network_maker(settings.pop("name"), config.folder), settings.pop("weights", None)
    known = {"inputs": math.prod(data.train.x.shape[1:]), "outputs": output_count(config, data)}
    known |= {"num_classes": known["outputs"]} if data.classes else {}  # the usual name elsewhere
    if data.has_images:
        known |= {"channels": data.train.x.shape[1], "size": data.train.x.shape[2]}
    made = make_network(config.network["name"], make, settings, known)
    if weights is not None:
        load_weights(made, find_file(weights, folders, "network.weights = "))
    return made


def make_network(
    name: str, make: objects.NetworkMaker, settings: Mapping[str, Any], known: Mapping[str, Any]
) -> nn.Module:
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
    # A mean and a variance each.
    return count * (2 if isinstance(likelihood(config, data), HeteroscedasticRegression) else 1)


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
    method = objects.method_class(config.method, config.folder) if is_import_path(config.method) else None
    template = None
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
    method = objects.method_class(config.method, config.folder)
    known = [*objects.parameters(method), *filter(None, [objects.count_setting(method)])]
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
    named = (objects.base_name(config.method), config.network["name"], config.data["name"])
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
    momentum: dict[str, Any] = {"momentum": training.get("momentum", 0.9), "nesterov": training.get("nesterov", True)}
    made = makers[name](groups, **(momentum if name == "sgd" else {}))
    return made, LambdaLR(made, lambda epoch: factors[schedule](epoch / epochs))


log = logging.getLogger("dissensus")

ENTRIES = ("state_dict", "model")  # keys of the state dict in a checkpoint; the first that exists is read
WRAPPER = "module."  # prefix that nn.DataParallel adds to every name
# A file may be larger than the network: one member of an ensemble is saved with the storage of all members.
ROOM, TIMES = 2**28, 32


def load_weights(network: nn.Module, path: Path) -> None:
    """Loads the file's state dict into the network. Names and shapes must agree; dtypes are converted to the network's."""
    if path.suffix not in READERS:
        raise ValueError(f"expected weights in a file {', '.join(READERS)}, got {path}; save them as one of these")
    expected = network.state_dict()
    limit = ROOM + TIMES * sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    if (size := path.stat().st_size) > limit:
        got = f"{size:,} in {path}; save state_dict()"
        raise ValueError(f"expected at most {limit:,} bytes for this network, got {got}")
    with read_errors(path, "save state_dict() again", kind=f"a whole {path.suffix} file of plain tensors at"):
        state = zero_batch_counts(network) | strip_wrapper_prefix(READERS[path.suffix](path, limit), expected, path)
        check_fits(state, expected, path)
    network.load_state_dict(state)


def check_fits(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Raises if names, shapes or kinds of dtypes differ from the network's, or if a number is not finite."""
    missing, extra = [k for k in expected if k not in state], [k for k in state if k not in expected]
    if missing or extra:
        differences = {"without": missing, "with unexpected": extra}
        parts = [f"{word} {first_names(names)}" for word, names in differences.items() if names]
        fix = "save the state_dict() of a network built with the same arguments"
        raise ValueError(f"expected the tensors of the network in {path}, got a file {' and '.join(parts)}; {fix}")
    for name, tensor in state.items():
        wanted = expected[name]
        like = tensor.is_floating_point() == wanted.is_floating_point() and not tensor.is_complex()
        if tensor.shape != wanted.shape or not like:
            texts = [f"{tuple(each.shape)} and {each.dtype}" for each in (wanted, tensor)]
            fix = "build the network with the sizes and types that it was saved with"
            raise ValueError(f"expected {name} of shape {texts[0]} in {path}, got {texts[1]}; {fix}")
        if not bool(tensor.to(wanted.dtype).isfinite().all()):
            raise ValueError(f"expected finite numbers in {name} of {path}, got NaN or infinity; correct them")


def strip_wrapper_prefix(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The state, with the prefix "module." of nn.DataParallel removed from all names if more names then fit the network."""
    without = {name.removeprefix(WRAPPER): tensor for name, tensor in state.items() if name.startswith(WRAPPER)}
    if len(without) < len(state) or len(without.keys() & expected.keys()) <= len(state.keys() & expected.keys()):
        return dict(state)
    log.info("%r is removed from all names in %s", WRAPPER, path)
    return without


def zero_batch_counts(network: nn.Module) -> dict[str, Tensor]:
    """Name -> 0 for the batch counts of norm layers, which are never read; files of torch 0.4 and before lack them."""
    return {
        f"{name}.{key}" if name else key: torch.zeros_like(buffer)
        for name, layer in statistics_layers(network).items()
        for key, buffer in layer.named_buffers(recurse=False)
        if key == "num_batches_tracked" and layer.momentum is not None
    }


def _read_torch(path: Path, limit: int) -> dict[str, Tensor]:
    with open(path, "rb") as file:
        packed = file.read(4) == b"PK\3\4"  # torch.save's form since 1.6, recognised as torch.load does
    if packed:
        check_archive(path)
    elif b"bytearray" in path.read_bytes():  # as in `check_archive`
        raise ValueError("it asks for a bytearray")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if asked := re.search(r"GLOBAL (\S+)", str(error)):
            got = f"one that asks for {asked[1]}; save network.state_dict() alone"
            raise ValueError(f"expected a state dict of plain tensors in {path}, got {got}") from error
        raise ValueError("its pickle is damaged") from error
    entries = f"the entries {first_names(loaded)}" if isinstance(loaded, Mapping) else type(loaded).__name__
    for key in ENTRIES:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            log.info("of %s in %s %s is read", entries, path, key)
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping) or not all(isinstance(each, Tensor) for each in loaded.values()):
        raise ValueError(f"expected a state dict of tensors in {path}, got {entries}; save network.state_dict() alone")
    return {str(name): tensor for name, tensor in loaded.items()}


def _read_numpy(path: Path, limit: int) -> dict[str, Tensor]:
    arrays = npz_arrays(path, limit)
    return {name: torch.from_numpy(array.astype(array.dtype.newbyteorder("="))) for name, array in arrays.items()}


def _read_safetensors(path: Path, limit: int) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:  # no larger than the file: nothing is compressed
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


READERS: dict[str, Callable[[Path, int], dict[str, Tensor]]] = {
    **dict.fromkeys((".pt", ".pth", ".th"), _read_torch),
    ".npz": _read_numpy,
    ".safetensors": _read_safetensors,
}

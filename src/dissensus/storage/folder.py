"""Saving and loading posteriors: config.json and posterior.safetensors, files no one can hide code in."""

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dissensus.core.attributes import difference, saved_attributes
from dissensus.core.likelihood import Likelihood
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior, expect_posterior
from dissensus.core.regression import RealTargets
from dissensus.core.standing import Fitted
from dissensus.data.inputs import KINDS as INPUT_KINDS
from dissensus.data.inputs import as_input_transform
from dissensus.nets import NETS
from dissensus.numerics.checks import one_of
from dissensus.numerics.damage import reading
from dissensus.numerics.divided import here, joined
from dissensus.numerics.layout import fits, kept_strides, laid_out, rows
from dissensus.numerics.plain import plain
from dissensus.numerics.randomness import same_random_state
from dissensus.standing import KINDS
from dissensus.storage.atomic import write_whole
from dissensus.storage.sealed import CONFIG, FORMAT, SAVE_AGAIN, TENSORS, opened, sealed
from dissensus.storage.skeletons import build, build_parts, class_fields, method_of, structure


def save(
    posterior: Posterior,
    folder: str | os.PathLike[str],
    *,
    inputs: Any = None,
    targets: Any = None,
    classes: Sequence[str] | None = None,
    unit: str | None = None,
) -> None:
    """Writes posterior.safetensors and config.json into the folder, which is made if need be.

    Both are written under temporary names and then renamed. The first holds all that `load` reads, so a folder that is
    saved over is at every moment the old one or the new one; the second is a copy of its config for people to read. No
    file holds code or a pickle. Watchers of a run are saved one by one, each as a posterior of its own. Of processes on a mesh,
    which have the same posterior, the first alone writes.

    Args:
        inputs: what the training inputs went through, a `Standardiser`, a `TableEncoder` or `ds.data.ImageInputs`. The
            loaded posterior then takes raw inputs, and raw ones only. None: the posterior's own `inputs`.
        targets: the `Standardiser` that the training targets of a regression went through: the loaded posterior predicts
            in the units from before. None where they went through none, or `fit(targets="standardised")` did it.
        classes: their names, in the order of the outputs, for reports. None: the posterior's own.
        unit: of a regression's targets, for reports.
    """
    if len(templates := [member.network for member in expect_posterior(posterior).particles.templates]) > 1:
        raise ValueError(
            f"expected members that differ in their registered tensors alone, got '{difference(templates) or 'modes'}' that "
            "differs; a file holds one network for all: register what differs as a buffer"
        )
    with posterior.particles.turn():
        tensors, ties = unique_tensors(posterior, without="watchers.")
        base = posterior.base[0] if posterior.base and posterior.cuts else None  # what has cut the network it watches
        network = posterior.given()  # with its tensors: a layer's description may read them
    config = {
        "format": FORMAT,
        **class_fields(posterior),
        "arguments": posterior.config(),
        **({"base": {**class_fields(base), "arguments": base.config()}} if base else {}),
        "likelihood": {"name": type(posterior.likelihood).__name__, "arguments": _arguments(posterior, targets, unit)},
        "network": {
            "structure": structure(network),
            "attributes": saved_attributes(network),
            "name": type(network).__name__ if type(network) in NETS.values() else None,
            "arguments": network.config if type(network) in NETS.values() else None,
            **({"cut": True} if posterior.cuts else {}),
        },
        "tied": ties,
        "strides": strides_of(tensors),
        "kept": kept_as_is(posterior),
        **standing_on(posterior),
        **transforms_of(posterior, inputs, classes),
    }
    if posterior.others is not None and not posterior.others.is_first:
        return  # all processes have the same, and the first writes it
    data, text = sealed(tensors, plain(config))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole({folder / TENSORS: data, folder / CONFIG: text.encode()})


def load(
    folder: str | os.PathLike[str],
    network: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    method: type[Posterior] | None = None,
) -> Posterior:
    """The posterior saved in the folder, bit for bit, on the CPU and in eval mode.

    What was frozen, and layers put in eval mode by hand, stay so if it is trained further. Loading draws no random
    numbers from torch's stream.

    Args:
        folder: what `save` wrote.
        network: one module of the saved architecture as template, left untouched; not needed for networks of
            `dissensus.nets`.
        likelihood: needed only if the posterior was saved with a likelihood class of your own.
        method: the class, needed only if it is your own.

    Raises:
        ValueError: files are damaged, or do not fit this network.
    """
    if network is not None and not isinstance(network, nn.Module):
        raise TypeError(f"expected an nn.Module as network, got {type(network).__name__}; pass one network, built")
    config, tensors = opened(Path(folder))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    kind = method_of(config, method)
    # building layers draws numbers that are overwritten
    with reading(Path(folder) / TENSORS, SAVE_AGAIN), same_random_state(torch.device("cpu")):
        strides = saved_strides(config, shapes)
        posterior = build(kind, config, shapes, *build_parts(config, shapes, network, likelihood))
        keep_as_was(posterior, config["kept"])
        put_standing(posterior, config, tensors)
        put_transforms(posterior, config)
    if unique_tensors(posterior)[1] != config["tied"]:
        raise other_ties()
    lying = {name: laid_out(tensor, strides[name]) for name, tensor in tensors.items()}
    fill(posterior, lying | {name: lying[source] for name, source in config["tied"].items() if source in lying})
    return posterior.eval()


def unique_tensors(module: nn.Module, *, without: str = "\n") -> tuple[dict[str, Tensor], dict[str, str]]:
    """(name -> tensor, other name -> name) of a module's state: tied tensors are stored once.

    `without`: what names begin with that are left out; what watches a posterior is saved by itself.
    """
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in module.state_dict().items():
        if name.startswith(without):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"expected tensors only in the state, got {type(tensor).__name__} in '{name}'; keep it elsewhere"
            )
        found = joined(tensor.detach())  # by all processes, where they have parts of it
        key = (here(tensor).data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)
        source = first.setdefault(key, name)
        if source == name:
            tensors[name] = found.cpu()
        else:
            ties[name] = source
    return tensors, ties


def strides_of(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Name -> strides of the tensors that do not lie in rows: what a file, where all do, cannot show."""
    kept = {name: kept_strides(tensor) for name, tensor in tensors.items()}
    return {name: list(strides) for name, strides in kept.items() if strides != rows(tensors[name].shape)}


def saved_strides(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Sequence[int]]:
    """Name -> strides of all tensors: those in the config, else those of rows."""
    for name, strides in config["strides"].items():
        whole = all(type(stride) is int and 0 <= stride < 2**62 for stride in strides)
        if not whole or len(strides) != len(shapes[name]) or not fits(shapes[name], strides):
            raise ValueError(f"impossible strides of {name}")
    return {**{name: rows(shape) for name, shape in shapes.items()}, **config["strides"]}


def kept_as_is(posterior: Posterior) -> dict[str, list[str]]:
    """What training leaves alone, {"frozen": names of parameters, "eval": of layers in eval mode by hand}, and "loop":
    particles that run in a loop, since vectorised they would differ in the last bit."""
    frozen = [name for name, parameter in posterior.named_parameters() if not parameter.requires_grad]
    loop = [name for name, part in posterior.named_modules() if isinstance(part, Particles) and part.how == "loop"]
    return {"frozen": frozen, "eval": list(posterior.particles.template.always_eval), "loop": loop}


def keep_as_was(posterior: Posterior, saved: Mapping[str, list[str]]) -> None:
    """Undoes nothing: what the caller's template has frozen stays so, too. Raises on names that are not there."""
    template = posterior.particles.template
    for name in saved["frozen"]:
        posterior.get_parameter(name).requires_grad_(False)
    layers = {name: template.get_submodule(name) for name in saved["eval"]}
    template.always_eval = sorted({*template.always_eval, *layers})
    groups = {name: part for name, part in posterior.named_modules() if isinstance(part, Particles)}
    for name in saved["loop"]:
        groups[name].how = "loop"


def standing_on(posterior: Posterior) -> dict[str, Any]:
    """What a config says of what stands on the posterior; nothing where nothing does."""
    promises = {name: cast(Fitted, promise).config() for name, promise in posterior.promises.items()}
    calibration = posterior.calibration
    return {
        **({} if calibration is None else {"calibration": calibration.config()}),
        **({"promises": promises} if promises else {}),
    }


def put_standing(posterior: Posterior, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Puts on the posterior what stood on the saved one."""

    def revived(saved: Mapping[str, Any], prefix: str) -> Any:
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        return KINDS[one_of("kind", saved["kind"], KINDS)](saved["facts"], own)

    if (saved := config.get("calibration")) is not None:
        posterior.calibration = revived(saved, "calibration.")
    for name, saved in config.get("promises", {}).items():
        posterior.stand(name, revived(saved, f"promises.{name}."))


def transforms_of(posterior: Posterior, inputs: Any, classes: Sequence[str] | None) -> dict[str, Any]:
    """What a config says of inputs and classes: those given, else the posterior's own."""
    found: dict[str, Any] = {}
    if (given := posterior.inputs if inputs is None else inputs) is not None:
        transform = as_input_transform(given)
        found["inputs"] = {"kind": transform.kind, "arguments": transform.config()}
    if (names := posterior.classes if classes is None else classes) is not None:
        found["classes"] = [str(name) for name in names]
    return found


def put_transforms(posterior: Posterior, config: Mapping[str, Any]) -> None:
    """Gives the posterior the inputs and classes that were saved with it."""
    if (saved := config.get("inputs")) is not None:
        kind = INPUT_KINDS[one_of("kind", saved["kind"], INPUT_KINDS)]
        posterior.inputs = kind(**saved["arguments"])
    posterior.classes = None if (names := config.get("classes")) is None else tuple(names)


def _arguments(posterior: Posterior, targets: Any, unit: str | None) -> dict[str, Any]:
    """The likelihood's arguments, of outputs that are standardised targets where `targets` is given."""
    if targets is None and unit is None:
        return posterior.likelihood.config()
    likelihood = copy.deepcopy(posterior.likelihood)
    if not isinstance(likelihood, RealTargets):
        raise TypeError(f"expected a regression for targets and unit, got {type(likelihood).__name__}; leave them out")
    if targets is not None and (posterior.promises or posterior.calibration is not None):
        raise ValueError(
            "expected targets before anything is promised of predictions, got a calibration or promises in the units of "
            "standardised targets; save with targets=, load, and fit them then"
        )
    if targets is not None:
        likelihood.standardise(targets)
    likelihood.unit = unit or likelihood.unit
    return likelihood.config()


def other_ties() -> ValueError:
    return ValueError(
        "expected a network whose tensors are tied as in the saved one, got other ties; pass a network built as the saved "
        "one was"
    )


def fill(posterior: Posterior, tensors: dict[str, Tensor]) -> None:
    """Overwrites the posterior's state with exactly these tensors, dtypes included."""
    expected = posterior.state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        wanted, found = _described(expected.get(name)), _described(tensors.get(name))
        if wanted != found:
            raise ValueError(
                f"expected {wanted} as {name}, got {found} in the file; load it into the network it was saved from"
            )
        if name.endswith(".running_var") and bool((tensors[name] < 0).any()):
            raise ValueError(
                f"expected variances of at least 0, got {name} below in the file; save the posterior again"
            )
    targets = {**dict(posterior.named_parameters()), **dict(posterior.named_buffers())}
    with torch.no_grad():
        for name, target in targets.items():
            if name in tensors:  # tied names share one target
                target.data = tensors[name]


def _described(tensor: Tensor | None) -> str:
    """What a file may not change: precision is the file's, but a floating-point tensor stays one."""
    if tensor is None:
        return "no tensor"
    kind = "floating-point" if tensor.is_floating_point() else str(tensor.dtype)
    return f"a {kind} tensor of shape {tuple(tensor.shape)}"

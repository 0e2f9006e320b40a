"""Saves and loads posteriors, whole or member by member, as files that cannot contain code.

posterior.safetensors has the tensors, with their config and a checksum over both in the metadata. `load` reads only this file,
so that one rename replaces a saved posterior; config.json is a copy for people to read.
"""

import copy
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save as format_tensors
from torch import Tensor, nn

from dissensus.core.calibrated import STATE, describe_fitted, drop_stale_guarantees, restore_fitted, stored_guarantees
from dissensus.core.description import complete_config, describe_network, differences, layer_lines, to_json_values
from dissensus.core.likelihood import Likelihood, RealTargets
from dissensus.core.member import PREFIX, state_names, tensors_by_name
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior, expect_posterior, has_converted_layers
from dissensus.core.trainable import Watchers, connected_mesh
from dissensus.data.input_transforms import KINDS as INPUT_KINDS, as_input_transform
from dissensus.methods import MAP
from dissensus.nets import NETS
from dissensus.numerics.randomness import preserve_random_state
from dissensus.storage import blueprints
from dissensus.storage.atomic_files import write_atomically
from dissensus.utils.checks import one_of
from dissensus.utils.file_errors import read_errors
from dissensus.utils.memory_layout import contiguous_strides, copy_with_strides, is_valid_layout, strides_for_copy
from dissensus.utils.module_state import differing_attribute
from dissensus.utils.sharding import gather_full_tensor
from dissensus.utils.shared_tensors import copy_sharing_tensors, memory_place
from dissensus.utils.torch_private import copy_with

log = logging.getLogger("dissensus")

FORMAT = 2
CONFIG, TENSORS = "config.json", "posterior.safetensors"
FIELDS = {"format": int, "method": str, "arguments": dict, "tied": dict, "strides": dict, "checksum": str} | {
    "likelihood": {"name": str, "arguments": dict},
    "network": {"structure": list, "attributes": dict, "name": str | None, "arguments": dict | None},
    "kept": {"frozen": list, "eval": list, "loop": list},
}
METADATA, CHECKSUM = "dissensus", "checksum"
OWN, SHARED = "particles.own.", "particles.shared."
TIES = "expected a network whose tensors are tied as in the saved one, got other ties; pass a network built like it"


def save(
    posterior: Posterior,
    folder: str | os.PathLike[str],
    *,
    inputs: Any = None,
    targets: Any = None,
    classes: Sequence[str] | None = None,
    unit: str | None = None,
    base: Literal["keep", "omit"] = "keep",
) -> None:
    """Saves a posterior to a folder, as posterior.safetensors and config.json.

    Files are written under temporary names and then renamed; `load` reads only the first, so saving over a folder never leaves
    a mix. Neither contains code or a pickle. Save the watchers of a run one by one. On a mesh, only the first process writes.

    Args:
        posterior: any posterior.
        folder: path of the folder, created if missing.
        inputs: the transform of the training inputs: a `Standardiser`, a `TableEncoder` or `ds.data.ImageInputs`. The
            loaded posterior then takes raw inputs only. None: the posterior's own `inputs`.
        targets: the `Standardiser` of a regression's training targets: the loaded posterior then predicts in the
            original units. None if there was none, or if `fit(targets="standardised")` did it.
        classes: names of the classes, in the order of the outputs, for reports. None: the posterior's own.
        unit: unit of a regression's targets, for reports.
        base: "omit" leaves out the network's frozen tensors that all members share, such as a pretrained model below
            adapters, and writes their checksum instead; `load` takes them from the network it is given.
    """
    one_of("base", base, ("keep", "omit"))
    templates = [member.network for member in expect_posterior(posterior).particles.templates]
    state = state_names(posterior.particles)
    if len(templates) > 1 and ((other := differing_attribute(templates, but=state)) or not state):
        got = f"a difference in '{other or 'modes'}'"
        raise ValueError(f"expected members that differ only in registered tensors, got {got}; register it as a buffer")
    drop_stale_guarantees(posterior)
    posterior = copy_with(posterior, {}, {"watchers": Watchers()})  # these are saved one by one
    with posterior.particles.lock_network():
        tensors, ties = unique_tensors(posterior)
        # The method that has cut the watched network.
        cutter = posterior.base[0] if posterior.base and has_converted_layers(posterior) else None
        network = posterior.plain_network()  # with its tensors, because a layer's description may read them
    strides = {name: strides_for_copy(tensor) for name, tensor in tensors.items()}  # files store tensors as contiguous
    known, meaning = type(network) in NETS.values(), _likelihood_arguments(posterior, targets, unit)
    name, built = (type(network).__name__, network.config) if known else (None, None)
    config = {
        "format": FORMAT,
        **blueprints.class_fields(posterior),
        "arguments": complete_config(posterior),
        **({"base": {**blueprints.class_fields(cutter), "arguments": cutter.config()}} if cutter else {}),
        "likelihood": {"name": type(posterior.likelihood).__name__, "arguments": meaning},
        "network": {"structure": layer_lines(network), **posterior.initial_network, "name": name, "arguments": built}
        | ({"cut": True} if has_converted_layers(posterior) else {}),
        "tied": ties,
        "strides": {
            name: list(each) for name, each in strides.items() if each != contiguous_strides(tensors[name].shape)
        },
        "kept": describe_modes(posterior),
        **describe_fitted(posterior),
        **describe_transforms(posterior, inputs, classes),
    }
    if base == "omit":
        tensors, config["omitted"] = leave_out_base(tensors, posterior, network)
    if (mesh := connected_mesh(posterior)) is not None and not mesh.is_first:
        return  # all processes have the same posterior, and the first one writes it
    data, text = serialise_posterior(tensors, to_json_values(config))
    # What cannot be read back is not written. This network may have attributes that training has changed.
    config = json.loads(text)
    said, config["network"]["attributes"] = config["network"]["attributes"], describe_network(network)["attributes"]
    changed, by_training = differences(said, config["network"]["attributes"]), state_names(posterior.particles)
    if found := [each for each in changed if each.partition(" ")[0] not in by_training]:
        text = "the file holds an attribute as it was when the posterior was built: %s; set it before you build one"
        log.warning(text, found[0])
    own = None if type(posterior.likelihood) in blueprints.LIKELIHOODS.values() else posterior.likelihood
    rebuild(config, add_base(config, tensors, network), network, own, type(posterior), Path(folder))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically({folder / TENSORS: data, folder / CONFIG: text.encode()})


def load(
    folder: str | os.PathLike[str],
    network: nn.Module | Callable[[nn.Module], nn.Module] | None = None,
    *,
    base: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    method: type[Posterior] | None = None,
) -> Posterior:
    """Loads a saved posterior, with exactly the saved tensors, on the CPU and in eval mode.

    Frozen parameters, and layers put in eval mode by hand, stay so in training. Torch's random state does not change.

    Args:
        folder: a folder written by `save`.
        network: a module of the saved architecture, used as a template and not changed; not needed for networks of
            `dissensus.nets`. Files saved with `base="omit"` take its frozen tensors, which are held, not copied.
        base: a network, if `network` is a function that makes one from it, as in `DeepEnsemble`; not changed.
        likelihood: needed only if the posterior was saved with your own likelihood class.
        method: the class of the posterior, needed only if it is your own.

    Raises:
        ValueError: files are damaged, or do not fit this network or this base.
    """
    if base is not None:
        if isinstance(network, nn.Module) or not callable(network):
            got = f"{type(network).__name__}; pass ds.load(folder, lambda base: get_peft_model(base, lora), base=base)"
            raise TypeError(f"expected a function that makes the network from the base, got {got}")
        network = network(copy_sharing_tensors(base))
    if network is not None and not isinstance(network, nn.Module):
        got = f"{type(network).__name__}; pass one network, or base= with a function that makes one of it"
        raise TypeError(f"expected an nn.Module as network, got {got}")
    config, tensors = read_posterior(Path(folder))
    return rebuild(config, add_base(config, tensors, network), network, likelihood, method, Path(folder))


def rebuild(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    network: nn.Module | None,
    likelihood: Likelihood | None,
    method: type[Posterior] | None,
    folder: Path,
) -> Posterior:
    """The posterior that a file's config and tensors describe; other arguments as in `load`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    kind = blueprints.find_method(config, method)
    # building layers draws random numbers that are overwritten
    with read_errors(folder / TENSORS, blueprints.SAVE_AGAIN), preserve_random_state(torch.device("cpu")):
        strides = saved_strides(config, shapes)
        posterior = blueprints.build_posterior(
            kind, config, shapes, *blueprints.build_parts(config, shapes, network, likelihood)
        )
        restore_modes(posterior, config["kept"])
        restore_fitted(posterior, config, tensors)
        restore_transforms(posterior, config)
    # Not the ties of a stored draw: in files of earlier versions it has its own copies of what is frozen.
    if any(not name.startswith("stored.") for name, _ in unique_tensors(posterior)[1].items() ^ config["tied"].items()):
        raise ValueError(TIES)
    held = {f"{SHARED}{PREFIX}{name}" for name in config.get("omitted", {}).get("names", ())}
    lying = {name: t if name in held else copy_with_strides(t, strides[name]) for name, t in tensors.items()}
    fill_tensors(posterior, lying | {name: lying[source] for name, source in config["tied"].items() if source in lying})
    for promise in stored_guarantees(posterior).values():
        promise.facts.setdefault("fitted_to", posterior.fingerprint())  # files of earlier versions do not say it
    return posterior.eval()


def unique_tensors(posterior: Posterior) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(name -> tensor, other name -> name) of a posterior's state: tied tensors are stored once."""
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in posterior.state_dict().items():
        if name == STATE:
            continue  # the config says it
        if not isinstance(tensor, Tensor):
            got = f"{type(tensor).__name__} in '{name}'"
            raise TypeError(f"expected only tensors in the state_dict, got {got}; remove it from the state")
        found = gather_full_tensor(tensor.detach())  # by all processes, where they have parts of it
        source = first.setdefault(memory_place(tensor) if tensor.numel() else (name,), name)
        if source == name:
            tensors[name] = found.cpu()
        else:
            ties[name] = source
    return tensors, ties


def leave_out_base(
    tensors: Mapping[str, Tensor], posterior: Posterior, network: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(the tensors without the network's frozen ones that all members share, names and checksum of these)."""
    particles = posterior.particles
    frozen = {name for name, parameter in particles.shared_parameters().items() if not parameter.requires_grad}
    frozen |= {name for name, is_frozen in particles.stored_once.items() if is_frozen}
    held = {name.removeprefix(SHARED + PREFIX): t for name, t in tensors.items() if name.removeprefix(SHARED) in frozen}
    base = {name: held[name] for name in tensors_by_name(network) if name in held}
    if not base:
        fix = "freeze the network's base with requires_grad_(False) before building the posterior, or save it whole"
        raise ValueError(f"expected frozen tensors that all members share, got none; {fix}")
    kept = {name: tensor for name, tensor in tensors.items() if name.removeprefix(f"{SHARED}{PREFIX}") not in base}
    return kept, {"names": [*base], CHECKSUM: checksum({}, base)}


def add_base(config: Mapping[str, Any], tensors: dict[str, Tensor], network: nn.Module | None) -> dict[str, Tensor]:
    """The tensors with those that `save` left out, from the network; raises if these are not the ones it left out."""
    if (omitted := config.get("omitted")) is None:
        return tensors
    held = {} if network is None else tensors_by_name(network)
    base = {name: held[name].detach() for name in omitted["names"] if name in held}
    found = checksum({}, {name: tensor.cpu() for name, tensor in base.items()}) if base else "none"
    if found != omitted[CHECKSUM]:
        what = f"the base that the file leaves out, with checksum {omitted[CHECKSUM]}"
        raise ValueError(f"expected {what}, got {found}; pass the network or the base that it was saved with")
    return {**tensors, **{f"{SHARED}{PREFIX}{name}": tensor for name, tensor in base.items()}}


def saved_strides(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Sequence[int]]:
    """Name -> strides of all tensors: those in the config, else contiguous ones."""
    for name, strides in config["strides"].items():
        whole = all(type(stride) is int and 0 <= stride < 2**62 for stride in strides)
        if not whole or len(strides) != len(shapes[name]) or not is_valid_layout(shapes[name], strides):
            raise ValueError(f"impossible strides of {name}")
    return {**{name: contiguous_strides(shape) for name, shape in shapes.items()}, **config["strides"]}


def describe_modes(posterior: Posterior) -> dict[str, list[str]]:
    """{"frozen": names of frozen parameters, "eval": names of layers put in eval mode by hand, "loop": names of particles
    that run in a loop}; the last because vectorised results differ in the last bit."""
    frozen = [name for name, parameter in posterior.named_parameters() if not parameter.requires_grad]
    loop = [name for name, part in posterior.named_modules() if isinstance(part, Particles) and part.how == "loop"]
    return {"frozen": frozen, "eval": list(posterior.particles.template.always_eval), "loop": loop}


def restore_modes(posterior: Posterior, saved: Mapping[str, list[str]]) -> None:
    """Restores what `describe_modes` saved; what is frozen in the caller's template stays frozen. Raises on unknown names."""
    template = posterior.particles.template
    for name in saved["frozen"]:
        posterior.get_parameter(name).requires_grad_(False)
    layers = {name: template.get_submodule(name) for name in saved["eval"]}
    template.always_eval = sorted({*template.always_eval, *layers})
    groups = {name: part for name, part in posterior.named_modules() if isinstance(part, Particles)}
    for name in saved["loop"]:
        groups[name].how = "loop"


def describe_transforms(posterior: Posterior, inputs: Any, classes: Sequence[str] | None) -> dict[str, Any]:
    """The config entries of inputs, their largest value and classes: the arguments, else the posterior's own."""
    largest = (posterior.base or (posterior,))[0]._known.largest  # a watcher sees no inputs
    found: dict[str, Any] = {"largest_input": largest} if math.isfinite(largest) else {}
    if (given := posterior.inputs if inputs is None else inputs) is not None:
        transform = as_input_transform(given)
        found["inputs"] = {"kind": transform.kind, "arguments": transform.config()}
    if (names := posterior.classes if classes is None else classes) is not None:
        found["classes"] = [str(name) for name in names]
    return found


def restore_transforms(posterior: Posterior, config: Mapping[str, Any]) -> None:
    """Restores what `describe_transforms` saved."""
    posterior._known.largest = float(config.get("largest_input", -math.inf))
    if (saved := config.get("inputs")) is not None:
        posterior.inputs = INPUT_KINDS[one_of("kind", saved["kind"], INPUT_KINDS)](**saved["arguments"])
    posterior.classes = None if (names := config.get("classes")) is None else tuple(names)


def _likelihood_arguments(posterior: Posterior, targets: Any, unit: str | None) -> dict[str, Any]:
    """The likelihood's arguments, with the scale of the targets if `targets` is given."""
    if targets is None and unit is None:
        return posterior.likelihood.config()
    likelihood = copy.deepcopy(posterior.likelihood)
    if not isinstance(likelihood, RealTargets):
        raise TypeError(f"expected a regression for targets and unit, got {type(likelihood).__name__}; leave them out")
    if targets is not None and (posterior.promises or posterior.calibration is not None):
        got = "some, fitted to standardised targets; save without them and with targets=, load, and fit them again"
        raise ValueError(f"expected targets= for a posterior without calibration and promises, got {got}")
    if targets is not None:
        likelihood.set_target_scale(targets)
    likelihood.unit = unit or likelihood.unit
    return likelihood.config()


def fill_tensors(posterior: Posterior, tensors: dict[str, Tensor]) -> None:
    """Overwrites the posterior's state with exactly these tensors, dtypes included."""
    expected = {name: tensor for name, tensor in posterior.state_dict().items() if name != STATE}
    for name in sorted(expected.keys() | tensors.keys()):
        wanted, found = _describe_tensor(expected.get(name)), _describe_tensor(tensors.get(name))
        if wanted != found:
            raise ValueError(f"expected {wanted} as {name}, got {found} in the file; pass a network built alike")
        if name.endswith(".running_var") and bool((tensors[name] < 0).any()):
            hint = "save the posterior again"
            raise ValueError(f"expected variances of at least 0, got a negative {name} in the file; {hint}")
    targets = {**dict(posterior.named_parameters()), **dict(posterior.named_buffers())}
    with torch.no_grad():
        for name, target in targets.items():
            if name in tensors:  # tied names share one tensor
                target.data = tensors[name]


def _describe_tensor(tensor: Tensor | None) -> str:
    """The properties that a file's tensor must share: shape and kind of dtype; its precision may differ."""
    if tensor is None:
        return "no tensor"
    kind = "floating-point" if tensor.is_floating_point() else str(tensor.dtype)
    return f"a {kind} tensor of shape {tuple(tensor.shape)}"


def read_members(
    folder: Path,
    network: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    method: type[Posterior] | None = None,
) -> Iterator[Posterior]:
    """Yields one posterior per stored member, each read when it is needed; the whole one if members are no plain networks."""
    config, tensors = read_posterior(folder)
    tensors = add_base(config, tensors, network)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if method is not None or not _has_plain_networks(config, shapes):
        yield load(folder, network, likelihood=likelihood, method=method)
        return
    with read_errors(folder / TENSORS, blueprints.SAVE_AGAIN), preserve_random_state(torch.device("cpu")):
        strides = saved_strides(config, shapes)
        template, meaning = blueprints.build_parts(config, shapes, network, likelihood)
    for index in range(config["arguments"]["members"]):
        member = MAP(template, likelihood=meaning)
        with read_errors(folder / TENSORS, blueprints.SAVE_AGAIN):
            restore_fitted(member, {**config, "promises": {}}, tensors)
        restore_transforms(member, config)
        yield _fill_member(member, index, tensors, strides)


def _fill_member(member: MAP, m: int, tensors: Mapping[str, Tensor], strides: Mapping[str, Sequence[int]]) -> Posterior:
    """The posterior filled with one member's rows of own tensors, and with the shared tensors."""
    expected, ties = unique_tensors(member)  # a stack stores tied tensors once
    sources = {SHARED + name.removeprefix(OWN) if name.startswith(OWN) else name: name for name in tensors}
    if {name for name in expected if SHARED in name} != {name for name in sources if SHARED in name}:
        raise ValueError(TIES)
    rows = {
        name: (t[m], strides[name][1:]) if name.startswith(OWN) else (t, strides[name]) for name, t in tensors.items()
    }
    found = {mine: copy_with_strides(*rows[name]) for mine, name in sources.items() if mine in expected}
    with torch.no_grad():
        fill_tensors(member, {**found, **{name: found[source] for name, source in ties.items()}})
    return member.eval()


def _has_plain_networks(config: Mapping[str, Any], shapes: Iterable[str]) -> bool:
    """Whether the file's members are plain networks, each with its own rows."""
    inner = [name.removeprefix(OWN).removeprefix(SHARED) for name in shapes if name.startswith((OWN, SHARED))]
    return (
        isinstance(config["arguments"].get("members"), int)
        and "networks" not in config["arguments"]  # with that argument, members are snapshots
        and any(name.startswith(OWN) for name in shapes)
        and "class" not in config
        and not config["network"].get("cut")
        and all(name.startswith(("network.", "likelihood.")) for name in inner)
    )


def is_posterior(folder: Path) -> bool:
    """Whether a posterior was saved in the folder; its content is not read."""
    return (folder / TENSORS).is_file()


def serialise_posterior(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[bytes, str]:
    """(bytes of posterior.safetensors, text of config.json), with the same config in both."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    signed = {**config, CHECKSUM: checksum(config, whole)}
    return format_tensors(whole, metadata={METADATA: json.dumps(signed)}), json.dumps(signed, indent=1)


def read_posterior(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, name -> tensor) of a saved posterior, after checking the checksum; tensors take memory once copied."""
    path = folder / TENSORS
    if not path.is_file():
        raise FileNotFoundError(f"expected {path}, got no such file; pass a folder that save() wrote")
    while True:
        # `safe_open` opens the path twice, for the header and for the tensors, and another process may save in between.
        # Then header and tensors do not belong together, the checksum differs, and the new file is read. A new file is
        # recognised by its inode number, which no other file can get while this one is open. So an error means damage.
        with path.open("rb") as first:
            try:
                return _read_checked(path)
            except ValueError:
                if os.path.samestat(os.fstat(first.fileno()), os.stat(path)):
                    raise


def _read_checked(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with read_errors(path, blueprints.SAVE_AGAIN), safe_open(path, framework="pt") as file:
        config: dict[str, Any] = json.loads(file.metadata()[METADATA])
        check_fields(config, FIELDS)
        if config["format"] != FORMAT:
            hint = "load it with the version that wrote it"
            raise ValueError(f"expected format {FORMAT}, got {config['format']}; {hint}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if config.pop(CHECKSUM) != checksum(config, tensors):
            hint = "the file is truncated or was changed"
            raise ValueError(f"expected {path} to have the checksum in its header, got another; {hint}")
    return config, tensors


def checksum(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Checksum of the config and of the tensors' names, dtypes, shapes and bytes, independent of their order in the file."""
    described = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    digest = hashlib.sha256(json.dumps([config, described], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_fields(saved: Any, fields: Mapping[str, Any]) -> None:
    """Raises unless `saved` is a dict with these keys and types of values, including nested dicts."""
    for name, kind in fields.items():
        if isinstance(kind, dict):
            check_fields(saved[name], kind)
        elif not isinstance(saved[name], kind):
            raise ValueError(f"{name} of type {type(saved[name]).__name__}")

"""Saving and loading posteriors: config.json and posterior.safetensors, files no one can hide code in."""

import copy
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as format_tensors
from torch import Tensor, nn

from dissensus.core import likelihood as likelihoods
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.core.randomness import same_random_state
from dissensus.methods import METHODS
from dissensus.nets import NETS

FORMAT = 1
CONFIG, TENSORS = "config.json", "posterior.safetensors"
FIELDS = {
    "format": int,
    "method": str,
    "arguments": dict,
    "likelihood": dict,
    "network": dict,
    "tied": dict,
    "sha256": str,
}
NETWORK_FIELDS = {"structure": list, "name": str | None, "arguments": dict | None}
LIKELIHOOD_FIELDS = {"name": str, "arguments": dict}
LIKELIHOODS: dict[str, type[Likelihood]] = {
    each.__name__: each
    for each in (likelihoods.Classification, likelihoods.Regression, likelihoods.HeteroscedasticRegression)
}


def save(posterior: Posterior, folder: str | os.PathLike[str]) -> None:
    """Writes config.json and posterior.safetensors into the folder, which is made if need be.

    Both are written under temporary names and then renamed: a file that exists is whole.
    """
    if not isinstance(posterior, Posterior):
        raise TypeError(f"expected a posterior, got {type(posterior).__name__}; pass what MAP(...) and the like return")
    tensors, ties = unique_tensors(posterior)
    data = format_tensors({name: tensor.contiguous() for name, tensor in tensors.items()})
    network = posterior.particles.member(0)  # with its tensors: a layer's description may read them
    config = {
        "format": FORMAT,
        "method": posterior.name,
        "arguments": posterior.config(),
        "likelihood": {"name": type(posterior.likelihood).__name__, "arguments": posterior.likelihood.config()},
        "network": {
            "structure": structure(network),
            "name": type(network).__name__ if type(network) in NETS.values() else None,
            "arguments": network.config if type(network) in NETS.values() else None,
        },
        "tied": ties,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    text = json.dumps(config, indent=1)
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole({folder / TENSORS: data, folder / CONFIG: text.encode()})
    except OSError as error:
        raise OSError(f"expected a folder that can be written, got {folder} ({error}); choose another") from error


def load(
    folder: str | os.PathLike[str], network: nn.Module | None = None, *, likelihood: Likelihood | None = None
) -> Posterior:
    """The posterior saved in the folder, bit for bit, on the CPU and in eval mode.

    `network`: one module as template, left untouched; not needed for networks of `dissensus.nets`. `likelihood`: needed
    only where the posterior was saved with a likelihood of one's own.
    """
    if network is not None and not isinstance(network, nn.Module):
        raise TypeError(f"expected an nn.Module as network, got {type(network).__name__}; pass one network, built")
    folder = Path(folder)
    config, data = read(folder)
    if (method := METHODS.get(config["method"])) is None:
        raise ValueError(
            f"expected a method of {', '.join(METHODS)}, got {config['method']!r}; is this file of a newer version?"
        )
    try:
        with same_random_state(torch.device("cpu")):  # building layers draws numbers that are overwritten at once
            template = build_network(config["network"], network)
            meaning = likelihood if likelihood is not None else build_likelihood(config["likelihood"])
            posterior = method.skeleton(template, config["arguments"], meaning)
    except (TypeError, KeyError, AttributeError) as error:  # what constructors raise on arguments nobody saved
        raise damaged(folder / CONFIG, error) from error
    try:
        tensors = parse_tensors(data)
    except SafetensorError as error:
        raise damaged(folder / TENSORS, error) from error
    if unique_tensors(posterior)[1] != config["tied"]:
        raise ValueError(
            "expected a network whose tensors are tied as in the saved one, got other ties; pass a network built as the "
            "saved one was"
        )
    fill(
        posterior,
        {**tensors, **{name: tensors[source] for name, source in config["tied"].items() if source in tensors}},
    )
    return posterior.eval()


def unique_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(name -> tensor, other name -> name) of a module's state: tied tensors are stored once."""
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"expected tensors only in the state, got {type(tensor).__name__} in '{name}'; keep it elsewhere"
            )
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)
        source = first.setdefault(key, name)
        if source == name:
            tensors[name] = tensor.detach().cpu()
        else:
            ties[name] = source
    return tensors, ties


def fill(posterior: Posterior, tensors: dict[str, Tensor]) -> None:
    """Overwrites the posterior's state with exactly these tensors, dtypes included."""
    expected = posterior.state_dict()
    later = {
        f"{prefix}.{name}"
        for prefix, module in posterior.named_modules()
        for name in getattr(module, "added_since", ())
    }
    if missing := sorted(expected.keys() - tensors.keys() - later):
        raise ValueError(
            f"expected a tensor {missing[0]}, got a file without it; load it into the network it was saved from"
        )
    if extra := sorted(tensors.keys() - expected.keys()):
        raise ValueError(
            f"expected no tensor {extra[0]}, got one in the file; load it into the network it was saved from"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"expected {name} of shape {tuple(expected[name].shape)}, got {tuple(tensor.shape)} in the file; "
                "load it into the network it was saved from"
            )
    targets = {**dict(posterior.named_parameters()), **dict(posterior.named_buffers())}
    with torch.no_grad():
        for name, target in targets.items():
            if name in tensors:  # tied names share one target
                target.data = tensors[name].clone()


def structure(network: nn.Module) -> list[str]:
    """One line per layer with its settings: what a network must agree in to take the tensors of another."""
    return [f"{name}: {type(module).__name__}({module.extra_repr()})" for name, module in network.named_modules()]


def build_network(saved: dict[str, Any], network: nn.Module | None) -> nn.Module:
    """A module of the saved structure: a copy of the caller's, or one of dissensus.nets."""
    if network is None:
        if saved["name"] not in NETS:
            raise ValueError("expected a network to load into, got none; pass network=, built as the saved one was")
        network = NETS[saved["name"]](**saved["arguments"])
    else:
        network = copy.deepcopy(network)
    ours, theirs = structure(network), saved["structure"]
    if ours != theirs:
        pairs = zip([*ours, *["(nothing)"] * len(theirs)], [*theirs, *["(nothing)"] * len(ours)], strict=False)
        mine, other = next((a, b) for a, b in pairs if a != b)
        raise ValueError(
            f"expected a network with layer {other!r}, got {mine!r}; pass a network built as the saved one was"
        )
    return network


def build_likelihood(saved: dict[str, Any]) -> Likelihood:
    if saved["name"] not in LIKELIHOODS:
        raise ValueError(
            f"expected the likelihood {saved['name']!r} as an argument, got none; pass likelihood={saved['name']}(...)"
        )
    return LIKELIHOODS[saved["name"]](**saved["arguments"])


def read(folder: Path) -> tuple[dict[str, Any], bytes]:
    """(config, bytes of the tensors) of a saved posterior, checked against each other."""
    config = read_config(folder)
    data = (folder / TENSORS).read_bytes()
    check_checksum(folder, config, hashlib.sha256(data).hexdigest())
    return config, data


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a saved posterior, its fields checked."""
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"expected {folder / name}, got no such file; pass a folder that save() wrote")
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        check_fields(config, FIELDS)
        check_fields(config["network"], NETWORK_FIELDS)
        check_fields(config["likelihood"], LIKELIHOOD_FIELDS)
    except (ValueError, RecursionError) as error:
        raise damaged(folder / CONFIG, error) from error
    if config["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {config['format']}; load it with the version that wrote it")
    checked: dict[str, Any] = config
    return checked


def check_checksum(folder: Path, config: dict[str, Any], digest: str) -> None:
    """Raises where the tensors are not those the config was written with."""
    if digest != config["sha256"]:
        raise ValueError(
            f"expected {folder / TENSORS} with the checksum in {CONFIG}, got another; the file is truncated or was changed"
        )


def check_fields(saved: Any, fields: dict[str, Any]) -> None:
    """Raises where saved is not a dict with these keys and types of values."""
    if not isinstance(saved, dict):
        raise ValueError(f"{type(saved).__name__} where named values belong")
    for name, kind in fields.items():
        if name not in saved:
            raise ValueError(f"without {name}")
        if not isinstance(saved[name], kind):
            raise ValueError(f"{name} of type {type(saved[name]).__name__}")


def damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"expected a whole {path}, got a damaged one ({error}); save the posterior again")


def write_whole(files: dict[Path, bytes]) -> None:
    """Writes all files under temporary names, then renames them: none is ever half-written."""
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in files}
    try:
        for path, content in files.items():
            temporary[path].write_bytes(content)
        for path in files:
            os.replace(temporary[path], path)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)

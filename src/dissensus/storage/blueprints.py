"""Builds the posterior that a config describes, after checking that the file's tensors have the sizes in the config."""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dissensus.core.description import describe_network, differences, layer_lines, short_layer_line
from dissensus.core.likelihood import Classification, HeteroscedasticRegression, Likelihood, Regression
from dissensus.core.particles import store_tensors_once
from dissensus.core.posterior import Posterior
from dissensus.likelihoods.multilabel import MultiLabel
from dissensus.likelihoods.tokens import Tokens
from dissensus.methods import METHODS
from dissensus.nets import NETS
from dissensus.utils.checks import one_of
from dissensus.utils.module_state import deepcopy_memo

TensorShapes = Mapping[str, tuple[int, ...]]  # shapes of the tensors in a file
_KNOWN: tuple[type[Likelihood], ...] = (Classification, Regression, HeteroscedasticRegression, MultiLabel, Tokens)
LIKELIHOODS = {each.__name__: each for each in _KNOWN}
# Arguments that determine numbers of rows, and the tensors with these rows: compared before anything of that size is built.
COUNTED = {  # argument -> (prefix of names of tensors, axis with this length)
    "networks": (("particles.own.", 0),),
    "members": (("particles.own.", 0), ("recorder.recorded.", 1)),
    "samples": (("stored.", 0),),
    "rank": (("recorder.deviations", 0),),
    "components": (("particles.shared.latents.", 0), ("particles.own.latents.", 1)),
}
SAVE_AGAIN = "save the posterior again"
LARGER = 64  # a network may have at most this many times the numbers in its file: no method cuts more


def build_parts(
    config: dict[str, Any], shapes: TensorShapes, network: nn.Module | None, likelihood: Likelihood | None
) -> tuple[nn.Module, Likelihood]:
    """(a network of the saved structure, the likelihood): the caller's, or built from the config."""
    if (wrong := next(count_mismatches(config["arguments"], shapes, foreign="class" in config), None)) is not None:
        raise ValueError(f"expected {wrong} in the file; {SAVE_AGAIN}")
    template = build_network(config["network"], network, shapes)
    if likelihood is None:
        name = config["likelihood"]["name"]
        if name not in LIKELIHOODS:
            raise ValueError(f"expected the likelihood {name!r} as an argument, got none; pass likelihood={name}(...)")
        likelihood = LIKELIHOODS[name](**config["likelihood"]["arguments"])
    return template, likelihood


def class_fields(posterior: Posterior) -> dict[str, str]:
    """The config entries of a posterior's class: its method name and, if it is not the library's class, its class name."""
    known = METHODS.get(posterior.name) is type(posterior)
    return {"method": posterior.name} | ({} if known else {"class": type(posterior).__name__})


def find_method(config: dict[str, Any], method: type[Posterior] | None) -> type[Posterior]:
    """The class of the posterior that the config describes: the caller's, or one of the library."""
    name = config["method"]
    if method is None:
        if "class" in config:
            raise ValueError(f"expected method={config['class']} to load into, got none; pass your class of that name")
        return METHODS[one_of("method", name, METHODS, hint="pass method= if it is your own class")]
    if not (isinstance(method, type) and issubclass(method, Posterior)):
        raise TypeError(f"expected a class of posteriors as method, got {method!r}; pass the class itself")
    if method.name != name:
        raise ValueError(f"expected a folder of the method {method.name!r}, got one of {name!r}; pass the saved class")
    return method


def build_posterior(
    method: type[Posterior], config: dict[str, Any], shapes: TensorShapes, network: nn.Module, likelihood: Likelihood
) -> Posterior:
    """The posterior that the config describes, with this network; its tensors are overwritten from the file later."""
    if (base := config.get("base")) is None:
        posterior = method.skeleton(network, config["arguments"], likelihood)
    else:  # it was a watcher of a method that cuts the network
        cut = find_method(base, None).skeleton(network, base["arguments"], likelihood)
        posterior = method.skeleton(cut.particles, config["arguments"], likelihood)
        posterior.base = (cut,)
    shared = "particles.shared."
    store_tensors_once(posterior.particles, (name.removeprefix(shared) for name in shapes if name.startswith(shared)))
    return posterior


def build_network(saved: dict[str, Any], network: nn.Module | None, shapes: TensorShapes) -> nn.Module:
    """A module of the saved structure: a copy of the caller's, or one of dissensus.nets."""
    name, arguments = saved["name"], saved["arguments"]
    if network is None and name not in NETS:
        raise ValueError("expected a network to load into, got none; pass network=, built like the saved one")
    with torch.device("meta"):  # no memory is allocated before sizes are compared with the file
        sketch = NETS[name](**arguments) if network is None else network
    ours, theirs = layer_lines(sketch), [short_layer_line(line) for line in saved["structure"]]
    if ours != theirs:
        pairs = itertools.zip_longest(ours, theirs, fillvalue="(nothing)")
        mine, other = next((a.removeprefix(": "), b.removeprefix(": ")) for a, b in pairs if a != b)
        hint = "pass a network of the same class, built like the saved one"
        raise ValueError(f"expected a network with layer {other!r}, got {mine!r}; {hint}")
    if network is not None:
        present, said = describe_network(network)["attributes"], saved["attributes"]
        if "layers" not in saved:  # files of earlier versions, which described less
            said = {name: each for name, each in said.items() if each != "None"}
            present = {name: each for name, each in present.items() if name in said}
        if found := [*differences(said, present)]:
            raise ValueError(f"expected the saved attributes, got another: {found[0]}; build the network alike")
        return copy.deepcopy(network, deepcopy_memo(network))
    # Names and shapes are checked when tensors are filled in. Here the network must only not be far larger than the file.
    wanted = sum(tensor.numel() for tensor in sketch.state_dict().values())
    there = sum(math.prod(shape) for shape in shapes.values())
    if wanted > LARGER * there:
        most = f"{LARGER} times the {there} numbers in the file"
        raise ValueError(f"expected a network of at most {most}, got {wanted}; pass network=, built like the saved one")
    return NETS[name](**arguments)


def count_mismatches(arguments: Mapping[str, Any], shapes: TensorShapes, *, foreign: bool = False) -> Iterator[str]:
    """Disagreements between arguments and the rows of tensors, as "NAME of …, got …"; `foreign`: of a user's method."""
    several = arguments.get("networks")
    for key, places in COUNTED.items():
        count = arguments.get(key)
        if type(count) is not int or count < 1 or (key == "samples" and not arguments.get("stored")):
            continue  # not a count: the constructor will raise
        if key == "members" and type(several) is int:
            places = places[1:]  # the first counts networks
        held = {name: shape for name, shape in shapes.items() if key != "samples" or ".own." in name}
        counted = {name: (held[name], axis) for start, axis in places for name in held if name.startswith(start)}
        if not counted and not foreign:  # a tensor is missing; those of a user's method may have other names
            counted = {f"{places[0][0]}…": ((), places[0][1])}
        if key == "samples":
            functions = count * (several if type(several) is int else 1)
            wanted = f"a draw of {functions} functions (samples = {count})"
            drawn = _count_drawn_rows(counted, arguments["stored"])
            yield from (f"{wanted}, got {rows}" for rows in drawn.values() if rows != functions)
            continue
        for name, (shape, axis) in counted.items():
            if shape[axis : axis + 1] != (count,):
                yield f"{name} of shape ({'…, ' * axis}{count}, …), because {key} = {count}, got {shape or 'none'}"
    yield from _shape_mismatches(arguments, shapes)


def _shape_mismatches(arguments: Mapping[str, Any], shapes: TensorShapes) -> Iterator[str]:
    points = arguments.get("repel_at")
    described = {"eigenvectors": arguments.get("lengthscales")}
    if isinstance(points, dict) and "tensors" in points:
        described |= {f"repel_at.{i}": each[0] for i, each in enumerate(points["tensors"])}
    for name, said in described.items():
        if said is not None and said != list(shapes.get(name, ())):
            yield f"{name} of shape {said}, got {shapes.get(name)}"


def _count_drawn_rows(counted: Mapping[str, tuple[tuple[int, ...], int]], stored: Any) -> Counter[str]:
    """Name of a tensor of drawn functions -> number of functions that have it, over all parts; `stored`: the parts' sizes."""
    rows: Counter[str] = Counter()
    if isinstance(stored, list):
        rows["stored"] = sum(size for size in stored if type(size) is int and size > 0)
    for name, (shape, _) in counted.items():
        rows[name.partition(".own.")[2]] += shape[0] if shape else 0
    return rows

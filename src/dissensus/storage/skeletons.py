"""The empty posterior that a config describes, made only where the tensors of the file have the sizes it speaks of."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dissensus.core import likelihood as likelihoods
from dissensus.core.attributes import check_attributes, unmade
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.methods import METHODS
from dissensus.nets import NETS
from dissensus.numerics.randomness import same_random_state
from dissensus.storage.sealed import Header, damaged

LIKELIHOODS: dict[str, type[Likelihood]] = {
    each.__name__: each
    for each in (likelihoods.Classification, likelihoods.Regression, likelihoods.HeteroscedasticRegression)
}
# Arguments that say how many rows tensors have, and the tensors: compared before anything of that size is built.
COUNTED = {  # argument -> where its count stands: names of tensors begin so, and the axis
    "networks": (("particles.own.", 0),),
    "members": (("particles.own.", 0), ("recorder.recorded.", 1)),
    "samples": (("stored.", 0),),
    "rank": (("recorder.deviations", 0),),
    "components": (("particles.shared.latents.", 0), ("particles.own.latents.", 1)),
}
LARGER = 64  # than the tensors of a file: no network that a method has cut was that much before


def build_parts(
    config: dict[str, Any], header: Header, path: Path, network: nn.Module | None, likelihood: Likelihood | None
) -> tuple[nn.Module, Likelihood]:
    """(a network of the saved structure, the likelihood): those of the caller, or those that the config describes."""
    check_counts(config["arguments"], header, foreign="class" in config)
    with as_damaged(path), same_random_state(torch.device("cpu")):  # building layers draws numbers that are overwritten
        return (
            build_network(config["network"], network, header, config["tied"]),
            likelihood if likelihood is not None else build_likelihood(config["likelihood"]),
        )


def kind_of(posterior: Posterior) -> dict[str, str]:
    """What a config says of a posterior's class: its name and, where the library has another of that name or none, its own."""
    known = METHODS.get(posterior.name) is type(posterior)
    return {"method": posterior.name} | ({} if known else {"class": type(posterior).__name__})


def method_of(config: dict[str, Any], method: type[Posterior] | None) -> type[Posterior]:
    """The class of the posterior that the config describes: the caller's, or one of the library."""
    name = config["method"]
    if method is not None:
        if not (isinstance(method, type) and issubclass(method, Posterior)):
            raise TypeError(f"expected a class of posteriors as method, got {method!r}; pass the class itself")
        if method.name != name:
            raise ValueError(
                f"expected a folder of the method {method.name!r}, got one of {name!r}; pass the class it was saved from"
            )
        return method
    if "class" in config:
        raise ValueError(
            f"expected method={config['class']} to load into, got none; this was saved by a class of one's own: pass it"
        )
    if name not in METHODS:
        raise ValueError(
            f"expected a method of {', '.join(METHODS)}, got {name!r}; is this file of a newer version? pass method= where "
            "it is of your own"
        )
    return METHODS[name]


def build(
    method: type[Posterior],
    config: dict[str, Any],
    header: Header,
    path: Path,
    network: nn.Module,
    likelihood: Likelihood,
) -> Posterior:
    """The posterior that the config describes, of this network, its tensors to be overwritten by those of the file."""
    with as_damaged(path), same_random_state(torch.device("cpu")):
        if (base := config.get("base")) is None:
            posterior = method.skeleton(network, config["arguments"], likelihood)
        else:  # it watched a method that cuts the network
            cut = method_of(base, None).skeleton(network, base["arguments"], likelihood)
            posterior = method.skeleton(cut.particles, config["arguments"], likelihood)
            posterior.base = (cut,)
        shared = "particles.shared."
        posterior.particles.share(name.removeprefix(shared) for name in header.shapes if name.startswith(shared))
        return posterior


def build_network(
    saved: dict[str, Any], network: nn.Module | None, header: Header, tied: Mapping[str, str]
) -> nn.Module:
    """A module of the saved structure: a copy of the caller's, or one of dissensus.nets."""
    if network is not None:
        check_structure(network, saved["structure"])
        check_attributes(network, saved["attributes"])
        return copy.deepcopy(network, unmade(network))
    if saved["name"] not in NETS:
        raise ValueError("expected a network to load into, got none; pass network=, built as the saved one was")
    most = 16 + 4 * (len(header.shapes) + len(tied))  # no network here has more layers for its tensors
    arguments: dict[str, Any] = saved["arguments"]
    lists = [len(value) for value in arguments.values() if isinstance(value, list)]
    if max([len(saved["structure"]), *lists]) > most:
        raise ValueError(f"expected at most {most} layers for the tensors in the file, got more; save it again")
    with torch.device("meta"):  # no memory is taken before sizes are compared with those of the tensors in the file
        sketch = NETS[saved["name"]](**arguments)
    check_structure(sketch, saved["structure"])
    if saved.get("cut"):  # its tensors have other names and shapes in the file: they are compared by their number
        wanted = sum(tensor.numel() for tensor in sketch.state_dict().values())
        there = sum(math.prod(shape) for shape in header.shapes.values())
        if wanted > LARGER * there:
            raise ValueError(
                f"expected at most {LARGER} times the {there} numbers in the file, got a network of {wanted}; pass network=, "
                "built as the saved one was"
            )
        return NETS[saved["name"]](**arguments)
    for name, tensor in sketch.state_dict().items():
        own, shared = f"particles.own.network.{name}", f"particles.shared.network.{name}"
        shape = tuple(tensor.shape)
        found = header.shapes.get(tied.get(own, own), (0,))[1:]
        if shape not in (found, header.shapes.get(tied.get(shared, shared))):
            raise ValueError(f"expected a tensor of shape {shape} for {name}, got none in the file; save it again")
    return NETS[saved["name"]](**arguments)


def check_structure(network: nn.Module, theirs: list[str]) -> None:
    """Raises where a network has other layers than the saved one."""
    ours, theirs = structure(network), [_in_short(line) for line in theirs]
    if ours != theirs:
        pairs = zip([*ours, *["(nothing)"] * len(theirs)], [*theirs, *["(nothing)"] * len(ours)], strict=False)
        mine, other = next((a, b) for a, b in pairs if a != b)
        if other.startswith(": ") and mine.startswith(": "):  # the network itself, which has no name
            raise ValueError(
                f"expected a network {other[2:]}, as was saved, got {mine[2:]}; pass a network of that class, built as the "
                "saved one was"
            )
        raise ValueError(
            f"expected a network with layer {other!r}, got {mine!r}; pass a network built as the saved one was"
        )


def check_counts(arguments: Mapping[str, Any], header: Header, *, foreign: bool = False) -> None:
    """Raises where arguments count more or fewer rows than the tensors have.

    `foreign`: they are those of a method that the library does not have, whose tensors may be others.
    """
    several = arguments.get("networks")
    for key, places in COUNTED.items():
        count = arguments.get(key)
        if type(count) is not int or count < 1 or (key == "samples" and not arguments.get("stored")):
            continue  # what is no count, a constructor refuses
        if key == "members" and type(several) is int:
            places = places[1:]  # the first count networks
        counted = {
            name: (shape, axis)
            for start, axis in places
            for name, shape in header.shapes.items()
            if name.startswith(start) and (key != "samples" or ".own." in name)
        }
        if not counted and not foreign:
            raise ValueError(
                f"expected tensors {places[0][0]}… for {key} = {count}, got none in the file; save it again"
            )
        most = count * several if key == "samples" and type(several) is int else count
        for name, (shape, axis) in counted.items():
            if shape[axis : axis + 1] not in ((count,), (most,)):
                raise ValueError(
                    f"expected {name} of shape ({'…, ' * axis}{count}, …), as {key} = {count} says, got {shape} in the file; "
                    "save the posterior again"
                )
    shapes = {"eigenvectors": arguments.get("lengthscales")}
    if isinstance(points := arguments.get("repel_at"), dict) and isinstance(points.get("tensors"), list):
        shapes |= {
            f"repel_at.{i}": each[0] for i, each in enumerate(points["tensors"]) if isinstance(each, list) and each
        }
    for name, said in shapes.items():
        if said is not None and said != list(header.shapes.get(name, ())):
            raise ValueError(
                f"expected {name} of shape {said}, got {header.shapes.get(name)} in the file; save the posterior again"
            )


@contextmanager
def as_damaged(path: Path) -> Iterator[None]:
    """What constructors raise on arguments nobody saved becomes the error for a damaged file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("expected"):
            raise
        raise damaged(path, error) from error


def build_likelihood(saved: dict[str, Any]) -> Likelihood:
    if saved["name"] not in LIKELIHOODS:
        raise ValueError(
            f"expected the likelihood {saved['name']!r} as an argument, got none; pass likelihood={saved['name']}(...)"
        )
    return LIKELIHOODS[saved["name"]](**saved["arguments"])


def structure(network: nn.Module) -> list[str]:
    """One line per layer with its settings: what a network must agree in to take the tensors of another."""
    lines = (f"{name}: {type(module).__name__}({module.extra_repr()})" for name, module in network.named_modules())
    return [_in_short(line) for line in lines]


def _in_short(line: str) -> str:
    """A layer's line without what only newer versions of torch say: that a norm layer has its bias, as all had before."""
    return line.replace(", bias=True", "") if "affine=" in line else line

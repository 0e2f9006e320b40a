"""Methods, networks and objects (priors, likelihoods, …) that a task names.

A method is one of METHODS, or the user's class, package.module:Class. NAME-VARIANT is NAME with the settings of
[method.NAME-VARIANT] added. The table OBJECTS lists all objects:

    annealing = "cyclic"                                  the name only
    annealing = { cyclic = { cycles = 4 } }               with keywords
    likelihood = { regression = 0.1 }                     with one value
    lengthscales = { pca = [0.4] }                        with several values in order
    likelihood = { name = "Regression", noise = 0.1 }     the same as a section: [likelihood]
    modulation = { normal = [1.0, 0.5] }
    prior = { empcov = { layer = "layers.0" } }

To add one, add a line: the name of a method's argument, and its constructors by name.
"""

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import nn

from dissensus.bench.rows.dataset_rows import AUGMENTATIONS
from dissensus.bench.setting_checks import name_list
from dissensus.bench.user_code import import_object, is_import_path
from dissensus.core.likelihood import Classification, Likelihood
from dissensus.core.posterior import Posterior
from dissensus.core.prior import GaussianPrior
from dissensus.data.segmentation import VOID, class_weights as enet_weights
from dissensus.layers.modulation import Modulation
from dissensus.methods import METHODS
from dissensus.methods.parts.empcov_prior import EmpCov
from dissensus.nets import NETS
from dissensus.numerics.annealing import Annealing
from dissensus.numerics.lengthscales import Lengthscales, pca_lengthscales
from dissensus.storage.blueprints import LIKELIHOODS
from dissensus.utils.checks import one_of


def base_name(name: str) -> str:
    """The method's name without its variant: "tradi" for "tradi-diagonal", "mine:Own" for "mine:Own-wide"."""
    base, _, variant = name.partition("-")
    if not re.fullmatch(r"[\w.]+:[\w.]+", base):
        one_of("a method (or package.module:Class)", base, METHODS)
    if not re.fullmatch(r"[\w-]+", variant or "none"):
        raise ValueError(f"expected letters, digits, _ and - after the method's name, got {name!r}; rename the variant")
    return base


def method_class(name: str, beside: str = "") -> type[Posterior]:
    """The class of a method or variant. `beside`: the task's folder, for the user's methods."""
    base = base_name(name)
    if not is_import_path(base):
        return METHODS[base]
    found = import_object(base, "a method", beside)
    if not (isinstance(found, type) and issubclass(found, Posterior)):
        raise ValueError(f"expected a class derived from dissensus.Posterior, got {base!r}, which is {found!r}")
    if not hasattr(found, "name"):
        raise ValueError(f'expected a name in the class {base}, got none; write name = "…" in it, for saved files')
    return found


def parameters(method: type[Posterior]) -> dict[str, Parameter]:
    """The parameters of a method's constructor by name; with **keywords also those of its base classes."""
    found: dict[str, Parameter] = {}
    for each in [each for each in method.__mro__ if "__init__" in vars(each)]:
        own = inspect.signature(each).parameters.values()
        for p in own:
            if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) and p.name != "particles":
                found.setdefault(p.name, p)
        if each is Posterior or not any(p.kind is Parameter.VAR_KEYWORD for p in own):
            break
    return found


def count_setting(method: type[Posterior]) -> str | None:
    """The setting for a method's number of networks: `members` if it takes several, `networks` if any number, or None."""
    return {"several": "members", "any": "networks"}.get(method.networks_taken)


def variants_of(settings: Mapping[str, Any]) -> list[str]:
    """The variants and the user's methods in a task's settings, named in `methods` or by a table."""
    named = [*name_list(settings.get("methods", [])), *settings.get("method", {})]
    own = [name for name in dict.fromkeys(named) if is_import_path(name) or name.partition("-")[0] in METHODS]
    return [name for name in own if name not in METHODS]


def setting_path(key: str, methods: Iterable[str]) -> list[str]:
    """A setting's dotted key as ["method", NAME, …] or [section, …]; the names of the user's methods contain dots."""
    plain = key.strip().replace('"', "")
    for name in sorted(filter(is_import_path, methods), key=len, reverse=True):
        if f"{plain}.".startswith(f"method.{name}."):
            return ["method", name, *filter(None, plain.removeprefix(f"method.{name}").split("."))]
    return plain.split(".")


def check_methods(methods: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Raises for an unknown method, and for a variant without a table."""
    tables = settings.get("method", {})
    for name in methods:
        if base_name(name) == name or name in tables:
            continue
        variants = [each for each in tables if "-" in each]
        hint = f"; known variants are {', '.join(variants)}" if variants else ""
        raise ValueError(f"expected a table [method.{name}] for the variant, got none; add it{hint}")


def check_overrides_read(overrides: Sequence[str], running: Collection[str]) -> None:
    """Raises if method.NAME.key=value names a method that does not run, so that the value would be ignored."""
    read = {*running, *map(base_name, running)}
    for override in overrides:
        path = setting_path(override.partition("=")[0], read)
        if path[0] == "method" and len(path) > 2 and path[1].partition("-")[0] in METHODS and path[1] not in read:
            known = f"the methods that run ({', '.join(running)})"
            raise ValueError(f"expected a setting of {known}, got {override!r}; choose {path[1]}, or leave it out")


NetworkMaker = Callable[..., nn.Module]


def network_maker(name: str, beside: str = "") -> NetworkMaker:
    """The class of that name, or a function that returns a network. `beside`: the task's folder."""
    if not is_import_path(name):
        return NETS[one_of("network.name (or package.module:name)", name, NETS)]
    found = import_object(name, "a network", beside)
    if not callable(found) or isinstance(found, nn.Module):
        raise ValueError(f"expected a class or function that makes a network, got {type(found).__name__} as {name!r}")
    return found


SUPPLIED = {"inputs", "network", "masks", "classes"}  # arguments given by the run, never by the task


def cyclic(cycles: int = 5, *, steps: int | None = None, weight: float = 1.0) -> Annealing:
    return Annealing("cyclic", cycles=cycles, steps=steps, weight=weight)


def pca(inputs: Any, alpha: float = 1.0, **options: Any) -> Lengthscales | None:
    """The result of `pca_lengthscales`, computed on a GPU if there is one; None for alpha = 0, exactly the identity."""
    if alpha == 0:
        return None
    rows = copy.copy(inputs)  # `Batches`
    rows.x = inputs.x.to("cuda" if torch.cuda.is_available() else "cpu")
    found = pca_lengthscales(rows, alpha, **options)
    return Lengthscales(found.eigenvectors.cpu(), found.precision.cpu(), torch.as_tensor(found.remainder).cpu())


pca.__signature__ = inspect.signature(pca_lengthscales)  # type: ignore[attr-defined]


def segmentation(masks: Any, classes: int, class_weights: Sequence[float] | str | None = None) -> Likelihood:
    """Likelihood of pixels without void ones; class_weights: one per class, or "enet" for weights by rarity."""
    weights: Any = class_weights
    if isinstance(class_weights, str):
        one_of("class_weights", class_weights, ("enet",), hint="or list a number for each class")
        weights = enet_weights(masks, classes)
    return Classification(ignore_index=VOID, class_weights=weights)


OBJECTS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "annealing": {  # each takes only the arguments of its schedule
        "constant": lambda weight=1.0: Annealing("constant", weight=weight),
        "linear": lambda *, steps=None, weight=1.0: Annealing("linear", steps=steps, weight=weight),
        "hyper": lambda *, steps=None, weight=1.0: Annealing("hyper", steps=steps, weight=weight),
        "cyclic": cyclic,
    },
    "lengthscales": {"identity": lambda: None, "pca": pca},
    "likelihood": {
        "classification": LIKELIHOODS["Classification"],
        "regression": LIKELIHOODS["Regression"],
        "heteroscedastic_regression": LIKELIHOODS["HeteroscedasticRegression"],
        "segmentation": segmentation,
        **LIKELIHOODS,
    },
    "augment": AUGMENTATIONS,
    "prior": {"gaussian": GaussianPrior, "empcov": EmpCov},
    "modulation": {name: getattr(Modulation, name) for name in ("constant", "sign", "normal", "bernoulli", "between")},
}

# Examples for objects that a method requires, with their purpose.
_NEAR = "which keeps what a pretrained network knows"
EXAMPLES = {"modulation": {"sign": "which makes independent members", "{normal=[1,0.1]}": _NEAR}}


def option_text(section: str, key: str) -> str:
    """The form of a setting on the command line, quoted for the shell, with examples if it is an object."""
    if key not in EXAMPLES:
        return f"--set {section}.{key}=…"
    return ", or ".join(f"--set '{section}.{key}={text}', {use}" for text, use in EXAMPLES[key].items())


@dataclass(frozen=True)
class ObjectSpec:
    """One object as a task writes it: the keyword, the constructor's name, and arguments by name."""

    keyword: str
    name: str
    arguments: dict[str, Any]

    @property
    def constructor(self) -> Callable[..., Any]:
        return OBJECTS[self.keyword][self.name]

    @property
    def run_arguments(self) -> set[str]:
        """The arguments given by the run."""
        return inspect.signature(self.constructor).parameters.keys() & SUPPLIED

    def table(self) -> dict[str, Any]:
        """The same object, written as a section with `name`."""
        return {"name": self.name, **self.arguments}

    def check(self) -> None:
        """Raises if an argument is missing, or, if the object can be built without the run, if its values are wrong."""
        _bind_arguments(self.keyword, self.name, self.arguments, whole=True)
        if not self.run_arguments:
            self.build()

    def build(self, **run: Any) -> Any:
        """Builds the object; `run`: the arguments of SUPPLIED, for constructors that take them."""
        if missing := self.run_arguments - run.keys():
            what = f"({', '.join(missing)}) here, got {self.keyword} {self.name}"
            raise ValueError(f"expected settings that need no data {what}; convert without it, then train with it")
        try:
            return self.constructor(**{key: run[key] for key in self.run_arguments}, **self.arguments)
        except TypeError as error:
            raise _arguments_error(self.keyword, self.name, self.arguments, error) from error


def parse_object(keyword: str, value: Any) -> ObjectSpec:
    """Parses a task's value for a keyword of OBJECTS; errors suggest the nearest constructor or argument."""
    name, given = _name_and_arguments(keyword, value)
    return ObjectSpec(keyword, name, _bind_arguments(keyword, name, given))


def build_objects(settings: Mapping[str, Any], **run: Any) -> dict[str, Any]:
    """Settings of a method with objects built; `run`: inputs, batches as the network takes them; network, the architecture."""
    return {key: parse_object(key, value).build(**run) if key in OBJECTS else value for key, value in settings.items()}


def setting_value(settings: Mapping[str, Any], key: str) -> Any:
    """The value of a setting, or of an argument of that name in one of its objects; None if there is neither."""
    if key in settings:
        return settings[key]
    objects = [parse_object(keyword, value) for keyword, value in settings.items() if keyword in OBJECTS]
    return next((each.arguments[key] for each in objects if key in each.arguments), None)


def argument_names(keyword: str, value: Any) -> set[str]:
    """The allowed keys of the table of an object with `name`; empty if there is no object."""
    return set(_writable_signature(keyword, parse_object(keyword, value).name).parameters) if value else set()


def constructor_forms(keyword: str) -> str:
    """Every constructor of a keyword with its arguments: sign(), normal(mean, std), …"""
    return ", ".join(f"{name}{_writable_signature(keyword, name)}" for name in OBJECTS[keyword])


def replaces_object(keyword: str, base: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    """Whether `over` names another object than `base`: it then replaces `base` instead of being merged into it."""
    name = _object_name(keyword, over) if keyword in OBJECTS else None
    return bool(name) and name != _object_name(keyword, base)


def expand_objects(settings: dict[str, Any], path: Sequence[str]) -> None:
    """Rewrites the objects along `path` as tables with `name`, so that single arguments can be set."""
    for part in path:
        if part in OBJECTS and settings.get(part):
            settings[part] = parse_object(part, settings[part]).table()
        if not isinstance(settings.get(part), dict):
            return
        settings = settings[part]


def _object_name(keyword: str, table: Mapping[str, Any]) -> set[str]:
    return {f"name = {table['name']}"} if "name" in table else table.keys() & OBJECTS[keyword].keys()


def _name_and_arguments(keyword: str, value: Any) -> tuple[str, Any]:
    """(name, arguments) of an object written in any of its forms."""
    name, given = value, {}
    if isinstance(value, Mapping) and "name" in value:
        name, given = value["name"], {key: each for key, each in value.items() if key != "name"}
    elif isinstance(value, Mapping) and len(value) == 1:
        ((name, given),) = value.items()
    if not isinstance(name, str):
        advice = f"write {keyword} = NAME or {{ NAME = arguments }}, with a name of {', '.join(OBJECTS[keyword])}"
        raise ValueError(f"expected {keyword} by one name, got {name!r}; {advice}")
    return one_of(keyword, name, OBJECTS[keyword]), given


def _bind_arguments(keyword: str, name: str, given: Any, *, whole: bool = False) -> dict[str, Any]:
    """Arguments by name, from a table, a list or one value; raises if they do not fit, or if not all (`whole`) are there."""
    signature = _writable_signature(keyword, name)
    bind = signature.bind if whole else signature.bind_partial
    try:
        if isinstance(given, Mapping):
            return dict(bind(**given).arguments)
        return dict(bind(*(given if isinstance(given, list) else [given])).arguments)
    except TypeError as error:
        raise _arguments_error(keyword, name, given, error) from error


def _arguments_error(keyword: str, name: str, given: Any, error: TypeError) -> ValueError:
    return ValueError(
        f"expected values that {keyword} {name}{_writable_signature(keyword, name)} takes, got {given} ({error}); correct them"
    )


def _writable_signature(keyword: str, name: str) -> inspect.Signature:
    """The signature of a constructor, without arguments given by the run."""
    empty, kinds = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(OBJECTS[keyword][name]).parameters.values()
    return inspect.Signature(
        [each.replace(annotation=empty) for each in parameters if each.name not in SUPPLIED and each.kind not in kinds]
    )

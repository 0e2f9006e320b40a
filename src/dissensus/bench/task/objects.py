"""Objects in a task: what no TOML value can be is written by name. OBJECTS is the one table of what there is.

    annealing = "cyclic"                                  the name alone
    annealing = { cyclic = { cycles = 4 } }               with keywords,
    likelihood = { regression = 0.1 }                     with one value,
    lengthscales = { pca = [0.4] }                        or with several in order
    likelihood = { name = "Regression", noise = 0.1 }     the same as a section: [likelihood]
    modulation = { normal = [1.0, 0.5] }
    prior = { empcov = { layer = "layers.0" } }

A keyword joins by one line: the name of a method's argument, and its constructors by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dissensus.core.empcov import EmpCov
from dissensus.core.errors import unknown
from dissensus.core.prior import GaussianPrior
from dissensus.numerics.annealing import Annealing
from dissensus.numerics.lengthscales import Lengthscales, pca_lengthscales
from dissensus.storage.skeletons import LIKELIHOODS
from dissensus.surgery.modulation import Modulation

Family = Mapping[str, Callable[..., Any]]
SUPPLIED = ("inputs", "network")  # arguments that are the run's to give, never the task's


def cyclic(cycles: int = 5, *, steps: int | None = None, weight: float = 1.0) -> Annealing:
    return Annealing("cyclic", cycles=cycles, steps=steps, weight=weight)


def pca(inputs: Any, alpha: float = 1.0, **options: Any) -> Lengthscales | None:
    """What `pca_lengthscales` finds; none for alpha = 0, which is the identity exactly: nothing to rotate by."""
    return None if alpha == 0 else pca_lengthscales(inputs, alpha, **options)


pca.__signature__ = inspect.signature(pca_lengthscales)  # type: ignore[attr-defined]

OBJECTS: dict[str, Family] = {
    "annealing": {  # each takes only what its schedule reads
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
        **LIKELIHOODS,
    },
    "prior": {"gaussian": GaussianPrior, "empcov": EmpCov},
    "modulation": {
        "constant": Modulation.constant,
        "sign": Modulation.sign,
        "normal": Modulation.normal,
        "bernoulli": Modulation.bernoulli,
        "between": Modulation.between,
    },
}

# What to write for an object that a method cannot do without, and what it is good for.
EXAMPLES: dict[str, dict[str, str]] = {
    "modulation": {
        "sign": "which makes independent members",
        "{normal=[1,0.1]}": "which keeps what a pretrained network knows",
    },
}


def as_options(section: str, key: str) -> str:
    """How a setting is given on the command line, with examples where it is an object, quoted for the shell."""
    if key not in EXAMPLES:
        return f"--set {section}.{key}=…"
    return ", or ".join(f"--set '{section}.{key}={text}', {use}" for text, use in EXAMPLES[key].items())


@dataclass(frozen=True)
class Written:
    """One object as a task writes it: the keyword, the constructor's name, and arguments by name."""

    keyword: str
    name: str
    arguments: dict[str, Any]

    @property
    def make(self) -> Callable[..., Any]:
        return OBJECTS[self.keyword][self.name]

    @property
    def spoken(self) -> str:
        return f"{self.keyword} {self.name}"

    def table(self) -> dict[str, Any]:
        """The same, written as a section with `name`."""
        return {"name": self.name, **self.arguments}

    def check(self) -> None:
        """Raises where an argument is missing, or where the object can be made already and its values are wrong."""
        asked = [name for name, each in _arguments(self.make).items() if each.default is inspect.Parameter.empty]
        for name in asked:
            if name not in self.arguments:
                values = ", ".join(f"{each} = …" for each in asked)
                raise ValueError(
                    f"expected the argument {name} of {self.spoken}, got none; write {self.keyword} = "
                    f"{{ {self.name} = {{ {values} }} }}"
                )
        if not inspect.signature(self.make).parameters.keys() & set(SUPPLIED):
            self.made()

    def made(self, **supplied: Any) -> Any:
        """The object; `supplied`: what the run gives to constructors that ask for it, of SUPPLIED."""
        asked = {key: supplied[key] for key in inspect.signature(self.make).parameters if key in SUPPLIED}
        try:
            return self.make(**asked, **self.arguments)
        except TypeError as error:
            raise ValueError(
                f"expected values that {self.spoken} takes, got {self.arguments} ({error}); correct them"
            ) from error


def written(keyword: str, value: Any) -> Written:
    """What a task's value for a keyword of OBJECTS says; an error names the nearest constructor or argument there is."""
    name, given = _parted(keyword, value)
    found = Written(keyword, name, {})
    takes = _arguments(found.make)
    if isinstance(given, Mapping):
        for key in given:
            if key not in takes:
                if not takes:
                    raise ValueError(f"expected no arguments for {found.spoken}, got {key}; leave it out")
                raise unknown(f"an argument of {found.spoken}", key, takes)
        return Written(keyword, name, dict(given))
    values = given if isinstance(given, list) else [given]
    in_order = [key for key, each in takes.items() if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    if len(values) > len(in_order):
        raise ValueError(
            f"expected at most {len(in_order)} values in order for {found.spoken}, got {len(values)}; "
            f"it takes {', '.join(takes) or 'none'}: write others by keyword"
        )
    return Written(keyword, name, dict(zip(in_order, values, strict=False)))


def argument_names(keyword: str, value: Any) -> set[str]:
    """The keys that a table with `name` may have for the object that is written there; none where nothing is."""
    return set(_arguments(written(keyword, value).make)) if value else set()


def takes_place(keyword: str, base: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    """Whether `over` names another object than `base`: it is then put in its place and not merged into it."""
    return keyword in OBJECTS and bool(_named(keyword, over)) and _named(keyword, over) != _named(keyword, base)


def open_objects(settings: dict[str, Any], path: Sequence[str]) -> None:
    """Writes objects on the way along `path` as tables with `name`, so that one argument of theirs can be set."""
    for part in path:
        if part in OBJECTS and settings.get(part):
            settings[part] = written(part, settings[part]).table()
        if not isinstance(settings.get(part), dict):
            return
        settings = settings[part]


def _named(keyword: str, table: Mapping[str, Any]) -> set[str]:
    return {f"name = {table['name']}"} if "name" in table else table.keys() & OBJECTS[keyword].keys()


def _parted(keyword: str, value: Any) -> tuple[str, Any]:
    """(name, arguments) of an object in any of the forms it may be written in."""
    family = OBJECTS[keyword]
    if isinstance(value, Mapping) and "name" in value:
        name, given = value["name"], {key: each for key, each in value.items() if key != "name"}
    elif isinstance(value, Mapping):
        if len(value) != 1:
            raise ValueError(
                f"expected one name in {keyword} = {{ NAME = … }}, got {', '.join(map(str, value)) or 'none'}; "
                f"write one of {', '.join(family)} and its arguments behind it"
            )
        ((name, given),) = value.items()
    else:
        name, given = value, {}
    if not isinstance(name, str):
        raise ValueError(
            f"expected {keyword} by name, got {name!r}; write {keyword} = NAME or {{ NAME = arguments }}, with a name "
            f"of {', '.join(family)}"
        )
    if name not in family:
        raise unknown(keyword, name, family)
    return name, given


def _arguments(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The arguments of a constructor that a task may write, by name and in order."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(make).parameters
    return {name: each for name, each in parameters.items() if name not in SUPPLIED and each.kind not in kinds}

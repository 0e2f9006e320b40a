"""Checks of settings: each function returns a valid value, or raises an error "expected …, got …; do …".

`hint`: what to pass instead, at the end of the error about a value out of bounds.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, SupportsFloat, TypeVar

import torch
from torch import nn

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")
# Keywords of other libraries -> what to do instead.
ELSEWHERE = {"batch_size": "set it in the loader", "metrics": "evaluate computes all: see evaluation.metrics"}
ELSEWHERE["ranks"] = 'pass mesh="independent"'  # its former name


def integer(name: str, value: Any, *, least: int = 1, hint: str = "") -> int:
    """The value, an integer of at least `least`; booleans are refused."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"expected {name} as a whole number, got {value!r}; pass an int")
    if value < least:
        raise ValueError(f"expected {name} of at least {least}, got {value}; {hint or 'pass a larger number'}")
    return int(value)


def number(
    name: str,
    value: Value,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    hint: str = "",
) -> Value:
    """The value, unchanged: a finite number with above < value < below and least ≤ value ≤ most."""
    several = getattr(value, "ndim", 0)  # for a tensor, an array or a Series
    if several or not isinstance(value, SupportsFloat) or isinstance(value, (bool, str)):
        got = f"{type(value).__name__} of shape {tuple(value.shape)}" if several else repr(value)  # type: ignore[attr-defined]
        raise TypeError(f"expected {name} as a number, got {got}; pass a float")
    found = float(value)
    if not (math.isfinite(found) and above < found < below and least <= found <= most):
        limits = {"above": above, "of at least": least, "below": below, "of at most": most}
        bounds = " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if math.isfinite(limit))
        wanted = bounds or "as a finite number"
        raise ValueError(f"expected {name} {wanted}, got {value!r}; {hint or 'pass a number within these bounds'}")
    return value


def fraction(name: str, value: Value, *, hint: str = "") -> Value:
    """The value, a number strictly between 0 and 1."""
    return number(name, value, above=0, below=1, hint=hint)


def one_of(
    name: str, value: Value, known: Iterable[Any], *, shown: Iterable[Any] | None = None, hint: str = ""
) -> Value:
    """The value, one of `known`. The error lists these, or only those in `shown`, and suggests the nearest one."""
    names = list(known)
    if not any(value is each or (type(value) is type(each) and value == each) for each in names):
        raise ValueError(unknown_name(name, value, names, shown, hint))
    return value


def unknown_name(
    name: str, value: object, known: Iterable[Any], shown: Iterable[Any] | None = None, hint: str = ""
) -> str:
    """The message about a value that is none of `known`: their list, and the hint or the nearest one."""
    names = list(known)
    lowered = {str(each).lower(): each for each in reversed(names)}
    nearest = difflib.get_close_matches(value.lower() if isinstance(value, str) else "", lowered, n=1, cutoff=0.6)
    advice = hint or (f"did you mean {lowered[nearest[0]]!r}?" if nearest else "name one of them")
    return f"expected {name} of {', '.join(map(str, names if shown is None else shown))}, got {value!r}; {advice}"


def check_keywords(function: str, given: Iterable[str], known: Mapping[str, Any], hint: Callable[[str], str]) -> None:
    """Raises if a keyword is none of `known`, parameters by name, unless one takes any; `hint`: what to do instead, or ""."""
    wrong = next((each for each in given if each not in known), None)
    if wrong is not None and not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        raise TypeError(unknown_name(f"a keyword of {function}, one", wrong, known, hint=hint(wrong)))


def suggest_keywords(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """A decorator: an error about an unknown keyword lists those there are, with the nearest one or what to do instead."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Arguments.args, **keywords: Arguments.kwargs) -> Value:
        check_keywords(f"{function.__name__}()", keywords, known, lambda wrong: ELSEWHERE.get(wrong, ""))
        return function(*args, **keywords)

    return call


class ListedAttributes:
    """Base class: the error about a missing attribute lists those there are, with the nearest one."""

    _attribute_hints: ClassVar[Mapping[str, str]] = {}  # what to use in place of some names

    if not TYPE_CHECKING:  # mypy finds unknown names itself

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)  # a module's tensors and submodules
            except AttributeError:
                if name[0] == "_":  # which torch and copy look for
                    raise AttributeError(f"{type(self).__name__} has no attribute {name!r}") from None
                public = [each for each in dict.fromkeys(dir(self)) if each[0] != "_"]
                ours = [each for each in public if not hasattr(nn.Module, each)]
                metric = difflib.get_close_matches(name, vars(self).get("metrics", ()), n=1)
                hint = f"use .metrics[{metric[0]!r}]" if metric else self._attribute_hints.get(name, "")
                what = f"an attribute of {type(self).__name__}, one"
                raise AttributeError(unknown_name(what, name, public, ours, hint)) from None


def available_device(given: Any) -> torch.device:
    """The device, if torch can use it here."""
    try:
        return torch.empty(0, device=given).device
    except (AssertionError, RuntimeError) as error:
        here = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise ValueError(f"expected a device that torch has here ({here}), got {given!r}; pass one of these") from error


def pixel_warning(largest: float, trained: float) -> str | None:
    """A warning about inputs that look like pixels by their largest value, if that of earlier ones was far less."""
    if not (128 < largest <= 255 and 0 < 20 * trained < largest):
        return None
    return f"inputs look like pixels from 0 to 255, but earlier ones reached {trained:.3g}: scale them alike (x / 255)"


def first_names(names: Iterable[Any], most: int = 8) -> str:
    """The names, separated by commas; if there are more than `most`, the first ones and the number of the others."""
    found = [str(name) for name in names]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")

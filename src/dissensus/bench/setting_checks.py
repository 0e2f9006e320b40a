"""Checks of settings from a file: lists of names, types by the annotations of functions; one error if they do not fit."""

import functools
import operator
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dissensus.utils.extras import MissingExtra


def name_list(names: str | Sequence[str]) -> list[str]:
    """["a", "b"] of "a,b" or of a list."""
    split = names.split(",") if isinstance(names, str) else names
    if wrong := [name for name in split if not isinstance(name, str)]:
        raise ValueError(f'expected a list of names, got {wrong[0]!r} in it; write ["a", "b"]')
    return [name.strip() for name in split if name.strip()]


LISTS = (list, tuple, Sequence)


@functools.cache
def annotated_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Parameter -> the annotation of its TOML value; Any if the parameter's own annotation does not say."""
    function = function.func if isinstance(function, functools.partial) else function
    try:
        called = vars(function).get("__init__", function) if isinstance(function, type) else function
        hints = typing.get_type_hints(called)
    except (NameError, TypeError):  # an annotation that only a type checker can resolve
        return {}
    for hint in [each for each in hints.values() if typing.get_origin(each) is typing.Unpack]:  # **keywords by name
        hints |= typing.get_type_hints(typing.get_args(hint)[0])
    return {name: _toml_annotation(hint) for name, hint in hints.items()}


def _toml_annotation(hint: Any) -> Any:
    """The kind of TOML value of an annotation; Any if it has none: the function then checks the value."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return functools.reduce(operator.or_, map(type, arguments))
    if origin in (typing.Union, types.UnionType):
        parts = [_toml_annotation(argument) for argument in arguments]
        return Any if Any in parts else functools.reduce(operator.or_, parts)
    if (origin or hint) in LISTS:
        return list
    return hint if hint in (int, float, str, bool, type(None)) else Any


@contextmanager
def settings_errors(
    what: str, *, wanted: str = "settings that fit", remedy: str = "correct them in the task or in --set"
) -> Iterator[None]:
    """Turns every exception of a constructor or function into one error about its settings or files."""
    try:
        yield
    except (OSError, torch.OutOfMemoryError, MissingExtra):
        raise
    except Exception as error:
        if isinstance(error, ValueError | TypeError) and str(error).startswith("expected"):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"expected {wanted} {what}, got others ({reason}); {remedy}") from error

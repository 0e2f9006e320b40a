"""Hooks: what a method may override is one short list; the rest of a posterior is final."""

import inspect
import re
from pathlib import Path

import dissensus as ds
from dissensus.core.posterior import Posterior
from dissensus.core.trainable import TrainableModule

PAGE = Path(__file__).parents[2] / "docs" / "developing" / "adding-a-method.md"
HOOKS = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
BASES = (TrainableModule, Posterior)


def names() -> set[str]:
    """Names that the base classes define or ask for, dunders aside."""
    asked = {name for each in BASES for name, kind in each.__annotations__.items() if "ClassVar" in str(kind)}
    defined = {name for each in BASES for name in vars(each)} | asked
    return {name for name in defined if not name.startswith(("__", "_abc"))}


def is_final(name: str) -> bool:
    found = inspect.getattr_static(Posterior, name, None)
    return getattr(getattr(found, "fget", found), "__final__", False)


def methods() -> set[type]:
    """Every class of the library between a method and the contract."""
    return {each for method in ds.METHODS.values() for each in method.__mro__ if issubclass(each, Posterior)} - {
        Posterior
    }


def test_every_public_name_is_final_or_in_the_documented_list():
    public = {name for name in names() if not name.startswith("_")}
    assert {name for name in public if not is_final(name)} == set(HOOKS)
    assert len(HOOKS) == len(set(HOOKS)) <= 21


def test_methods_override_nothing_else():
    assert len(methods()) > 15
    others = names() - set(HOOKS)
    assert {(each.__name__, name) for each in methods() for name in others & vars(each).keys()} == set()

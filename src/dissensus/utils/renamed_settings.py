"""Former names of methods' settings: constructors name the new one, and files saved with them still load."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class NewSetting(NamedTuple):
    """A setting's name now, and its value from the former one."""

    name: str
    value: Callable[[Any], Any] = lambda former: former
    formula: str = ""  # the value as text, where it is not the former one


# Method -> former name -> the setting now. γ is NodeBNN's; that of ensembles with shared weights is another quantity.
RENAMED: dict[str, dict[str, NewSetting]] = {
    "dropout_ensemble": {"keep": NewSetting("rate", lambda keep: round(1 - keep, 12), "1 - keep")},
    "node_bnn": {
        "gamma": NewSetting("posterior_temperature", lambda gamma: 1 + gamma, "1 + gamma"),
        "rate": NewSetting("lr"),
    },
    "swag": {"scale": NewSetting("posterior_temperature")},
}


def translate_settings(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A method's settings from a file, former names replaced; values that are no numbers are left to the constructor."""
    found = dict(settings)
    for former, now in RENAMED.get(method, {}).items():
        if former in found and now.name not in found:
            value = found.pop(former)
            found[now.name] = now.value(value) if isinstance(value, (int, float)) else value
    return found


def rename_hint(method: str, keyword: str) -> str:
    """The advice "pass …" for a former name of a setting, or nothing."""
    now = RENAMED.get(method, {}).get(keyword)
    return "" if now is None else f"pass {now.name}={now.formula or keyword}"

"""Packages that one feature needs and the library does not: the one place that says what to install."""

import sys
from importlib.util import find_spec

# extra of pyproject.toml -> what needs it, and the modules it must bring
EXTRAS = {
    "bench": ("the command line", "typer rich tomli_w pydantic jinja2 matplotlib PIL"),
    "report": ("a report", "jinja2 matplotlib"),
    "plot": ("drawing", "matplotlib"),
    "images": ("reading images", "PIL"),
    "tables": ("a DataFrame", "pandas"),
    "sklearn": ("dissensus.sklearn", "sklearn"),
    "export": ("an ONNX file", "onnx onnxscript"),
    "torchmetrics": ("a metric class", "torchmetrics"),
    "transformers": ("dissensus.integrations.hf", "transformers accelerate"),
    "lightning": ("dissensus.integrations.lightning", "lightning"),
}
NAMES = {"PIL": "pillow", "sklearn": "scikit-learn", "tomli_w": "tomli-w"}  # on package indexes, where they differ


class MissingExtra(ModuleNotFoundError):
    """Packages of an extra are not installed; the message says what to install."""


def is_installed(module: str) -> bool:
    """Whether a module can be imported; does not import it."""
    return sys.modules.get(module) is not None or find_spec(module) is not None


def require_extra(extra: str) -> None:
    """Raises `MissingExtra` if a package of this extra is missing; called before its packages are imported."""
    what, modules = EXTRAS[extra]
    if missing := [module for module in modules.split() if not is_installed(module)]:
        names = ", ".join(NAMES.get(module, module) for module in missing)
        raise MissingExtra(f'{what} needs {names}: pip install "dissensus[{extra}]"', name=missing[0])

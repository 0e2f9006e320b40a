"""What mkdocs does beside reading pages: blocks marked `math` (LaTeX) become MathML, which browsers draw without any script."""

from typing import Any

from latex2mathml.converter import convert


def equation(source: str, *_: Any, **__: Any) -> str:
    """One line of MathML for every line of the block."""
    lines = "".join(convert(line, display="block") for line in source.strip().splitlines())
    return f'<div class="equation">{lines}</div>'


def on_config(config: Any) -> Any:
    fences = config["mdx_configs"].setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "equation", "format": equation})
    return config

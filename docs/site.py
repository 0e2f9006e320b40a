"""Hooks of mkdocs: blocks marked `math` (LaTeX) become MathML, and numbers with an interval stay in one line.

Browsers draw MathML without any script.
"""

import re
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


def on_page_content(html: str, **_: Any) -> str:
    """Cells such as "0.12 (0.10 to 0.14)" and "0.12 ± 0.01" get the class number."""
    return re.sub(
        r"<td>(?=(?:<strong>)?[+−-]?[\d.,]+ (?:\(|±|to )[^<]{1,40}(?:</strong>)?</td>)", '<td class="number">', html
    )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page that is alone in its section has no list of pages beside it."""
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])
    return markdown

"""Hooks of mkdocs: blocks marked `math` (LaTeX) become MathML, numbers with an interval stay in one line, search words.

Browsers draw MathML without any script.
"""

import re
from typing import Any

KEYWORDS = {  # what people type who look for a page; the search puts it first, before titles
    "distributed.md": "ddp multi-gpu slurm torchrun",
    "sharding.md": "fsdp",
    "guides/adapters.md": "lora peft",
    "guides/calibration.md": "calibration ece temperature",
    "guides/deploy.md": "docker fastapi onnx serve",
    "guides/guarantees.md": "conformal coverage",
    "guides/likelihoods.md": "loss",
    "guides/logging.md": "mlflow optuna tensorboard wandb",
    "guides/saving.md": "load safetensors save",
    "guides/speed.md": "gpu",
    "guides/tables.md": "dataframe pandas scikit-learn sklearn",
    "guides/text.md": "bert gpt huggingface llm transformers",
    "guides/training.md": "checkpoint early-stopping learning-rate resume",
    "guides/your-own-loop.md": "accelerate lightning trainer",
}


def keywords(path: str, title: str) -> list[str]:
    """Words that find a page first; a method's page is found by the method's name."""
    return [*KEYWORDS.get(path, "").split(), *([title] if path.startswith("methods/") else [])]


def equation(source: str, *_: Any, **__: Any) -> str:
    """One line of MathML for every line of the block."""
    from latex2mathml.converter import convert

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
    """The page's words for the search; a page that is alone in its section has no list of pages beside it."""
    page.meta["tags"] = keywords(page.file.src_uri, page.title)
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])
    return markdown

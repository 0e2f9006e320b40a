"""Hooks of mkdocs: LaTeX to MathML, which browsers draw without a script; words for the search; figures for phones.

`site.css` makes figures dark on dark pages.
"""

import re
from pathlib import Path
from typing import Any

KEYWORDS = {  # what people type who look for a page; the search puts it first, before titles
    "distributed.md": "ddp fsdp multi-gpu slurm torchrun",
    "guides/adapters.md": "lora peft",
    "guides/bench.md": "benchmark toml",
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
# Photographs and maps: figures that keep their colours on a dark page.
TRUE_COLOURS = r"camvid-ood|corruptions|landscape|node-corruptions-node_bnn.*|toy-classification(-small)?"


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


def figure(image: str, source: str, folder: Path) -> str:
    """The image as a link to itself; phones get NAME-narrow.png if it is there, or scroll an image that is too wide."""
    path = folder / source
    kind = "figure true-colours" if re.fullmatch(TRUE_COLOURS, path.stem) else "figure"
    if path.with_stem(f"{path.stem}-narrow").exists():
        narrow = source.replace(".png", "-narrow.png")
        image = f'<picture><source media="(max-width: 45em)" srcset="{narrow}">{image}</picture>'
    elif path.parent.name != "methods":  # these have no letters: they may become small
        width = int.from_bytes(path.read_bytes()[16:20])  # of a PNG
        image = image.replace("<img", f'<img style="--width: {width}px"')
    return f'<a class="{kind}" href="{source}">{image}</a>'


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Figures; and cells such as "0.12 (0.10 to 0.14)" and "0.12 ± 0.01" get the class number."""
    folder = Path(page.file.abs_src_path).parent
    html = re.sub(r'<img [^>]*src="([^"]*figures/[^"]*)"[^>]*>', lambda found: figure(*found.group(0, 1), folder), html)
    return re.sub(
        r"<td>(?=(?:<strong>)?[+−-]?[\d.,]+ (?:\(|±|to )[^<]{1,40}(?:</strong>)?</td>)", '<td class="number">', html
    )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's words for the search; a page that is alone in its section has no list of pages beside it."""
    page.meta["tags"] = keywords(page.file.src_uri, page.title)
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])
    return markdown

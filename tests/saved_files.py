"""Saved folders changed by hand, with checksums that fit again."""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file

from dissensus.storage.folder import CHECKSUM, CONFIG, METADATA, TENSORS, serialise_posterior


def config_of(folder: Path) -> dict[str, Any]:
    """The config that `load` would believe."""
    with safe_open(folder / TENSORS, framework="pt") as file:
        return json.loads(file.metadata()[METADATA])


def reseal(folder: Path, config: dict[str, Any]) -> None:
    """Writes another config with the same tensors, sealed as `save` does: what a stranger can do."""
    config = {key: value for key, value in config.items() if key != CHECKSUM}
    data, text = serialise_posterior(load_file(folder / TENSORS), config)
    (folder / TENSORS).write_bytes(data)
    (folder / CONFIG).write_text(text)


def tamper(folder: Path, keys: str, value: Any) -> None:
    """Changes one value of the config that `load` believes."""
    config = config_of(folder)
    *above, last = keys.split(".")
    place = config
    for key in above:
        place = place[key]
    place[last] = value
    reseal(folder, config)

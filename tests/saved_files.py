"""Saved folders changed by hand: in the form of today or of earlier versions, with checksums that fit again."""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save

from dissensus.storage.sealed import CHECKSUM, CONFIG, METADATA, TENSORS, sealed


def config_of(folder: Path) -> dict[str, Any]:
    """The config that `load` would believe."""
    with safe_open(folder / TENSORS, framework="pt") as file:
        metadata = file.metadata() or {}
    text = metadata[METADATA] if METADATA in metadata else (folder / CONFIG).read_text()
    return json.loads(text)


def reseal(folder: Path, config: dict[str, Any]) -> None:
    """Writes another config with the same tensors, sealed as `save` does: what a stranger can do."""
    config = {key: value for key, value in config.items() if key not in (CHECKSUM, "sha256")}
    data, text = sealed(load_file(folder / TENSORS), config)
    (folder / TENSORS).write_bytes(data)
    (folder / CONFIG).write_text(text)


def make_earlier(folder: Path) -> None:
    """Brings a folder into the form of earlier versions: nothing in the header, a checksum in config.json."""
    config = config_of(folder)
    config = {key: value for key, value in config.items() if key not in (CHECKSUM, "strides")}
    data = save(load_file(folder / TENSORS))
    (folder / TENSORS).write_bytes(data)
    (folder / CONFIG).write_text(json.dumps(config | {"sha256": hashlib.sha256(data).hexdigest()}, indent=1))


def tamper(folder: Path, keys: str, value: Any) -> None:
    """Changes one value of the config that `load` believes, in a folder of either form."""
    config = config_of(folder)
    *above, last = keys.split(".")
    place = config
    for key in above:
        place = place[key]
    place[last] = value
    if CHECKSUM in config:
        reseal(folder, config)
    else:
        (folder / CONFIG).write_text(json.dumps(config))

"""The public image sets that can be read by name: class names, files, checksums, and where they lie in the user's folder."""

import hashlib
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dissensus.data.file_formats import open_embedded
from dissensus.utils.checks import one_of


@dataclass(frozen=True)
class SourceFile:
    """One published file; bytes and sha256 are None if users make the file themselves."""

    name: str
    bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Variant:
    """One published form of a split: its reader, its usual sub-folders and its files, in order."""

    reader: str
    folders: tuple[str, ...]
    files: tuple[SourceFile, ...]


@dataclass(frozen=True)
class Source:
    """One image set: its class names and, for each split, the variants in order of preference."""

    classes: tuple[str, ...]
    splits: dict[str, tuple[Variant, ...]]


def _source(classes: list[str], splits: dict[str, Any]) -> Source:
    def variant(reader: str, folders: list[str], files: list[Any]) -> Variant:
        return Variant(reader, tuple(folders), tuple(SourceFile(*each) for each in files))

    return Source(tuple(classes), {split: tuple(variant(**each) for each in forms) for split, forms in splits.items()})


CATALOGUE = {name: _source(**table) for name, table in tomllib.load(open_embedded("image_sets.toml")).items()}

Folder = str | Path | None
FOLDER_VARIABLE = "DISSENSUS_DATA"
NO_FOLDER = f"folder=None and no {FOLDER_VARIABLE} in the environment"
SHARED_NAMES = ("idx",)  # readers of several sets whose files have the same names


def locate(name: str, split: str, *, folder: Folder = None, verify: bool = False) -> tuple[Variant, list[Path]]:
    """The first variant of a split whose files exist, and their paths; FileNotFoundError lists the missing files.

    verify: compares every checksum. MNIST, Fashion-MNIST and notMNIST use the same file names: if such files lie directly
    in the folder, their checksums are always compared.
    """
    splits = CATALOGUE[one_of("name", name, CATALOGUE, hint="read other files with dissensus.data.file_formats")].splits
    variants = splits[one_of(f"split of {name}", split, splits)]
    root = data_folder(folder)
    if root is not None:
        for variant in variants:
            for sub in (*variant.folders, "."):
                paths = [root / sub / file.name for file in variant.files]
                if not all(path.is_file() for path in paths):
                    continue
                shared = sub == "." and variant.reader in SHARED_NAMES
                pairs = list(zip(paths, variant.files, strict=True))
                if shared and not all(p.stat().st_size == f.bytes and sha256(p) == f.sha256 for p, f in pairs):
                    continue
                for path, file in pairs if verify else ():
                    if (found := sha256(path)) != file.sha256:
                        wanted = file.sha256 or "as published, but none is published: pass verify=False"
                        raise ValueError(f"expected {path} with sha256 {wanted}, got {found}; download the file again")
                return variant, paths
    raise FileNotFoundError(_missing_message(name, split, root, variants))


def data_folder(folder: Folder) -> Path | None:
    """The folder named by the caller, else by the environment variable DISSENSUS_DATA, else None."""
    chosen = os.environ.get(FOLDER_VARIABLE) if folder is None else folder
    return Path(chosen).expanduser() if chosen else None


def find_place(folder: Folder, places: Sequence[str], what: str) -> Path:
    """The first of these places in the user's folder that exists; `what`: description in the error."""
    root = data_folder(folder)
    for path in () if root is None else [root / place for place in places]:
        if path.exists():
            return path
    got = NO_FOLDER if root is None else f"none of them in {root}"
    raise FileNotFoundError(f"expected {what} as one of {', '.join(places)}, got {got}; put it there, or pass folder=")


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _missing_message(name: str, split: str, root: Path | None, variants: tuple[Variant, ...]) -> str:
    if root is None:
        shown, got = Path("FOLDER"), NO_FOLDER
    else:
        places = [Path(sub) / file.name for variant in variants for sub in variant.folders for file in variant.files]
        present = [str(place) for place in places if (root / place).is_file()]
        shown, got = root, f"only {', '.join(present)}" if present else "none of its files"
    fix = f"put its files there, or name another folder by folder= or {FOLDER_VARIABLE}"
    lines = [f"expected the {split} split of {name} in {shown}, got {got}; {fix}:"]
    for variant in variants:
        lines.append(f"{'either' if len(lines) == 1 else 'or'} in {shown / variant.folders[0]}")
        for file in variant.files:
            known = "" if file.bytes is None else f"  {file.bytes} bytes  sha256 {file.sha256}"
            lines.append(f"  {file.name}{known}")
    if any(variant.reader in SHARED_NAMES for variant in variants):
        lines.append("(files directly in the folder must have these checksums, because other sets use the same names)")
    return "\n".join(lines)

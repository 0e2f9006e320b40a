"""Members read from a saved posterior one at a time: an ensemble that does not fit in memory still predicts."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from dissensus import storage
from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.methods import MAP


def stored_members(
    folder: Path, network: nn.Module | None = None, *, likelihood: Likelihood | None = None
) -> Iterator[Posterior]:
    """One posterior per stored member, each read from the file when its turn comes; the whole one where it stores none."""
    config = storage.read_config(folder)
    with (folder / storage.TENSORS).open("rb") as file:
        storage.check_checksum(folder, config, hashlib.file_digest(file, "sha256").hexdigest())
    members = config["arguments"].get("members")
    with safe_open(folder / storage.TENSORS, framework="pt") as file:
        names = list(file.keys())
        if not isinstance(members, int) or not any(name.startswith("particles.own.") for name in names):
            yield storage.load(folder, network, likelihood=likelihood)
            return
        template = storage.build_network(config["network"], network)
        meaning = likelihood if likelihood is not None else storage.build_likelihood(config["likelihood"])
        sources = {name.replace("particles.own.", "particles.shared.", 1): name for name in names}
        for index in range(members):
            member = MAP(template, likelihood=meaning)
            targets = {**dict(member.named_parameters()), **dict(member.named_buffers())}
            inside = {name for name in sources if name.startswith("particles.")}
            if (targets.keys() & member.state_dict().keys()) - sources.keys() or inside - targets.keys():
                raise ValueError(
                    "expected a network whose tensors are tied as in the saved one, got other ties; pass a network built as "
                    "the saved one was"
                )
            with torch.no_grad():
                for mine, name in sources.items():
                    if mine in targets:
                        stacked = name.startswith("particles.own.")
                        targets[mine].data = (
                            file.get_slice(name)[index : index + 1][0] if stacked else file.get_tensor(name)
                        )
            yield member.eval()

"""Drawn functions of a network with latents on its nodes: each function has its own latents; weights are shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.core.batch import Inputs
from dissensus.core.drawn_functions import DrawnFunctions, describe_outputs
from dissensus.core.member import tensors_by_name
from dissensus.core.particles import Member, Particles, Rows, member_index
from dissensus.core.predictive import Predictive
from dissensus.layers.conversion import DENSE, fold_layers
from dissensus.layers.factored import Factors, Kernel, can_take_kernel, folded_kernel
from dissensus.layers.nodes import Site, split_by_layer, use_latents, use_layer_latents
from dissensus.utils.tensor_tree import Tensors, TensorTree, all_submodules, named_tensors
from dissensus.utils.torch_modes import eval_mode

MOST_KERNELS = 2**28  # bytes; for larger kernels the time to fold them in every call is negligible


class NodeFunctions(DrawnFunctions):
    """S functions in eval mode, given by latents (S, D).

    With convolutions, functions run one after the other, with latents folded into the kernels, so that each costs one plain
    pass. A network of only dense layers runs all functions at once, with shared weights and latents on the activations.
    A call uses the present weights of the particles; `fixed` makes a copy of them.
    """

    def __init__(self, particles: Particles, sites: Sequence[Site], latents: Tensor) -> None:
        super().__init__()
        self.particles = particles
        self.sites = sites
        # "latents" (S, D) and, for folded layers, "weight.NUMBER" and "bias.NUMBER" (S, ...). Numbers, not names: a layer's
        # name is empty if the network is itself the layer, and may be a prefix of another name
        self.drawn = TensorTree()
        self.drawn.add_tensor("latents", latents, persistent=False)
        self.members = len(latents)
        self.training = False
        layers = [particles.template.network.get_submodule(site.layer) for site in sites]
        particles.how = "vectorised" if all(isinstance(layer, DENSE) for layer in layers) else "loop"
        self._overrides: list[dict[str, Factors | Kernel]] | None = None
        self._overrides_source: Tensors = {}  # what it was made from
        self._parts: tuple[Particles, list[nn.Module]] | None = None

    @classmethod
    @torch.no_grad()
    def with_fixed_weights(cls, particles: Particles, sites: Sequence[Site], latents: Tensor) -> NodeFunctions:
        """Functions with a copy of the present weights; kernels are folded once, for all batches."""
        shared = tensors_by_name(particles.shared)
        held = {name: [tensor.detach()] for name, tensor in shared.items() if not name.startswith("latents.")}
        copied = Particles.split(particles.copy_template(), held, own=lambda _: False, kept=(), members=1)
        if copied.template is not particles.template:
            copied.eval()  # permanently, so that calls need not switch modes
        functions = cls(copied, sites, latents.detach().clone())
        if copied.how == "loop":
            with copied.lock_network():
                copied.call(functions._fold_kernels, copied.shared_parameters(), copied.shared_buffers())
        return functions

    def _fold_kernels(self, member: Member) -> None:
        """Stores the folded kernels of all functions, if they take at most MOST_KERNELS."""
        nodes = [split_by_layer(self.sites, latents) for latents in self.latents]
        layers = {name: member.network.get_submodule(name) for name in nodes[0]}
        layers = {name: layer for name, layer in layers.items() if can_take_kernel(layer)}
        if self.members * sum(layer.weight.nbytes for layer in layers.values()) > MOST_KERNELS:  # type: ignore[misc]
            return
        numbers = {name: number for number, name in enumerate(nodes[0])}
        for name, layer in layers.items():
            each = [folded_kernel(layer, mine[name]) for mine in nodes]
            for part, tensors in zip(Kernel._fields, zip(*each, strict=True), strict=True):
                if tensors[0] is not None:
                    self.drawn.add_tensor(f"{part}.{numbers[name]}", torch.stack(tensors), persistent=False)

    @property
    def latents(self) -> Tensor:
        """(S, D)."""
        return tensors_by_name(self.drawn)["latents"]

    @property
    def layer_overrides(self) -> list[dict[str, Factors | Kernel]]:
        """For each function: layer -> its factors or folded kernel."""
        drawn = named_tensors(self.drawn)[1]
        if self._overrides is None or any(drawn[name] is not each for name, each in self._overrides_source.items()):
            kernels = {name: tensor for name, tensor in drawn.items() if name != "latents"}
            self._overrides, self._overrides_source = [], drawn
            for i, latents in enumerate(self.latents):
                found: dict[str, Factors | Kernel] = {**split_by_layer(self.sites, latents)}
                for number, name in enumerate(found):
                    weight, bias = kernels.get(f"weight.{number}"), kernels.get(f"bias.{number}")
                    if weight is not None:
                        found[name] = Kernel(weight[i], None if bias is None else bias[i])
                self._overrides.append(found)
        return self._overrides

    def map_members(self, function: Callable[..., Any], *args: Any) -> Any:
        particles = self.particles
        loop = particles.how == "loop"
        rows: dict[str, Any] = {"index": range(self.members)} if loop else {"latents": self.latents}

        def all_of(member: Member) -> Any:  # weights are put in once for all functions
            layers = [member.network.get_submodule(name) for name in self.layer_overrides[0]]

            def one(row: Rows) -> Any:
                given = row.varying
                nodes = self.layer_overrides[given["index"]] if loop else split_by_layer(self.sites, given["latents"])
                with use_layer_latents(layers, nodes.values()):
                    return function(member, *args)

            return particles.run(one, Rows({}, {}, rows), self.members)

        with particles.lock_network(), self._eval_context():
            return particles.call(all_of, particles.shared_parameters(), particles.shared_buffers())[0]

    def unfold(self) -> None:
        """Makes all functions run at once, with latents on activations, and drops the folded kernels to save memory."""
        latents, self.drawn = self.latents, TensorTree()
        self.drawn.add_tensor("latents", latents, persistent=False)
        self._overrides = None
        self.particles.how = "vectorised"

    def _eval_context(self) -> AbstractContextManager[None]:
        particles = self.particles
        if self._parts is None or self._parts[0] is not particles:
            self._parts = particles, all_submodules(particles, particles.template)
        return eval_mode(particles, particles.template, parts=self._parts[1])

    def predict_parts(self, x: Inputs) -> Iterator[Predictive]:
        def describe_function(i: int) -> tuple[Tensor, ...]:
            def one(member: Member) -> tuple[Tensor, ...]:
                with use_latents(member.network, self.layer_overrides[i]):
                    return describe_outputs(member, x)

            particles = self.particles
            with particles.lock_network(), self._eval_context():
                return particles.call(one, particles.shared_parameters(), particles.shared_buffers())[0]  # type: ignore[no-any-return]

        return self.predict_one_by_one(x, describe_function)

    def build_subset(self, rows: slice) -> DrawnFunctions:
        how = self.particles.how
        mine = NodeFunctions(self.particles, self.sites, self.latents[rows])
        self.particles.how = how
        for name, tensor in tensors_by_name(self.drawn).items():
            if name != "latents":
                mine.drawn.add_tensor(name, tensor[rows], persistent=False)
        return mine

    def member(self, index: int) -> nn.Module:
        return collapse_network(self.particles, self.sites, self.latents[member_index(index, self.members)]).eval()


def collapse_network(particles: Particles, sites: Sequence[Site], latents: Tensor) -> nn.Module:
    """An ordinary network equal to the members' network with these latents (D,) on its nodes."""
    network = particles.member(0)
    for name, nodes in split_by_layer(sites, latents.detach()).items():
        network.get_submodule(name).nodes = nodes  # type: ignore[assignment]
    with torch.no_grad():
        return fold_layers(network)

"""Posteriors over latents on nodes, and the functions drawn from them: what NodeBNN and RankOneBNN share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus.core import batch as batches
from dissensus.core.batch import Batch
from dissensus.core.drawn_functions import DrawnFunctions, join_families
from dissensus.core.likelihood import Likelihood, log_prob_sum
from dissensus.core.member import tensors_by_name
from dissensus.core.networks import NetworksPosterior, StoringPosterior
from dissensus.core.particles import Member, Particles, Rows, member_index, single_member
from dissensus.core.posterior import inference_context
from dissensus.core.trainable import annealing_weight
from dissensus.layers.batch_norm import freeze_norms
from dissensus.layers.conversion import DENSE, fold_layers, restore_plain_layers
from dissensus.layers.factored import Factors, Kernel, can_take_kernel, folded_kernel
from dissensus.layers.modulation import Modulation
from dissensus.layers.nodes import Mode, Site, set_temporarily, split_by_layer, use_latents
from dissensus.methods.parts import node_latents
from dissensus.numerics.annealing import Annealing, annealing_or_constant
from dissensus.numerics.randomness import own_generator
from dissensus.utils.checks import integer, number, one_of
from dissensus.utils.parameter_groups import Group
from dissensus.utils.tensor_tree import Tensors, TensorTree, named_tensors
from dissensus.utils.torch_modes import eval_mode, untimed_convolutions

log = logging.getLogger("dissensus")
MOST_KERNELS = 2**28  # bytes; for larger kernels the time to fold them in every call is negligible


class NodePosterior(StoringPosterior, NetworksPosterior):
    """Base class: a network whose nodes are multiplied by latents z ~ q, a mixture of K components; weights are points.

    The loss is that of `NodeBNN`; subclasses set its KL term, `complexity`.
    """

    needed = ("data_size",)
    draw_attributes = ("stored", "stored_at")
    complexity: node_latents.Complexity
    lr: Literal["curvature"] | None = None  # where the rates of `default_optimizer` come from
    stored: TensorTree | None
    stored_at: Tensor | None

    def __init__(
        self,
        networks: nn.Module | Sequence[nn.Module],
        *,
        components: int,
        std: float,
        start: Modulation,
        train_samples: int,
        samples: int,
        posterior_temperature: float,
        mode: Mode,
        bias_latent: bool = False,
        layers: Sequence[str] | None,
        annealing: Annealing | None,
        batch_norm: Literal["frozen", "trained"],
        latent_lr: float | None,
        latent_momentum: float | None = None,
        likelihood: Likelihood | None = None,
        **prior: Any,
    ) -> None:
        where: dict[str, Any] = {"mode": mode, "bias": bias_latent, "layers": layers}
        particles, made = node_latents.build_with_latents(
            networks, likelihood, components=integer("components", components), std=std, start=start, **where
        )
        super().__init__(particles, **prior)
        self.sites, self.account, self.latents, self.widths = made.sites, made.account, made.latents, made.widths
        self.layers = None if layers is None else list(layers)
        self.components, self.train_samples = components, integer("train_samples", train_samples)
        self.samples = -(-integer("samples", samples) // components) * components
        self.posterior_temperature = posterior_temperature
        self.batch_norm = one_of("batch_norm", batch_norm, ("frozen", "trained"))
        self.latent_lr = latent_lr if latent_lr is None else number("latent_lr", latent_lr, above=0)
        self.latent_momentum = latent_momentum
        if latent_momentum is not None:
            number("latent_momentum", latent_momentum, least=0, below=1, hint="usually 0.9; the paper uses 0")
        self.annealing = annealing_or_constant(annealing)
        self.stored = None
        # μ when the draw was stored, or when training continued after the draw was loaded from a file
        self.register_buffer("stored_at", None, persistent=False)
        self._checked_shapes: set[tuple[torch.Size, ...]] = set()
        self._unbatched_inputs: set[int] = set()  # numbers of the inputs without a row per example
        self._first: tuple[Batch, float] | None = None  # first batch of training, and the network's loss before it
        if batch_norm == "frozen":
            freeze_norms(particles.template)
            self.train(self.training)

    def member_loss(self, params: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensor, Any, Tensors]:
        size, copies, repeated = batches.count_examples(batch.x), self.train_samples, node_latents.repeat_rows
        weight = None if batch.weight is None else repeated(batch.weight, copies)
        x = node_latents.repeat_inputs(batch.x, copies, whole=self._unbatched_inputs)
        several = Batch(x, repeated(batch.y, copies), weight)
        mean, std = params["latents.mean"], F.softplus(params["latents.raw_std"])
        whole, part = self.particles.exchange.batch_rows(size)
        here = slice(part.start * copies, part.stop * copies)
        drawn = node_latents.sample_for_examples(mean, std, whole * copies, self.complexity.noise, here=here)
        nodes = split_by_layer(self.sites, drawn)

        def nll(member: Member) -> Tensor:
            with use_latents(member.network, nodes):
                return member.nll(several)

        value, buffers = self.particles.call(nll, params, buffers)
        assert self.data_size is not None  # checked in the constructor
        cost = self.complexity.kl(mean, std, self.posterior_temperature)
        complexity = annealing_weight(self, self.annealing) * cost / self.data_size
        return value + self.penalty(params) + complexity, (), buffers

    @property
    def mean(self) -> Tensor:
        """(K, D) μ; (M, K, D) for a list of networks."""
        return self._latent_parameters()["latents.mean"]

    @property
    def std(self) -> Tensor:
        """(K, D) σ; (M, K, D) for a list of networks."""
        return F.softplus(self._latent_parameters()["latents.raw_std"])

    def kl(self) -> Tensor:
        """() KL(q ‖ p) in nats, not divided by N: an upper bound, or iBNN's surrogate; (M,) for a list of networks."""
        return self._per_network(self.complexity.kl)

    def entropy(self) -> Tensor:
        """() the bound on H(q) in nats; (M,) for a list of networks."""
        return self._per_network(self.complexity.entropy)

    def _per_network(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        found = torch.stack([function(mean, std) for mean, std in zip(*self._stacked_latents(), strict=True)])
        return found[0] if self.mean.ndim == 2 else found

    def _stacked_latents(self) -> tuple[Tensor, Tensor]:
        """(M, K, D) μ, σ."""
        mean, std = self.mean, self.std
        return (mean[None], std[None]) if mean.ndim == 2 else (mean, std)

    def _latent_parameters(self) -> Tensors:
        stored = self.particles.parameters_by_name()
        return {name: parameter for name, parameter in stored.items() if name.startswith("latents.")}

    def groups(self) -> list[Group]:
        latents = Group(
            "latents",
            self._latent_parameters(),
            factor=1.0 if self.lr is None else self.components,
            rate=None if self.latent_lr is None else self.latent_lr * self.components,
            momentum=self.latent_momentum,
            decay=False,
            decayed="pulls the means of latents towards 0 and their deviations towards log 2 (the prior: 1 and prior_std)",
            prior=False,
        )
        return [*super().groups(), latents]

    def draw(self) -> DrawnFunctions:
        if self.stored is not None and self.stored_at is not None and not torch.equal(self.stored_at, self.mean):
            mixed = "latents from before the last training steps and present weights"
            log.warning("the stored draw mixes %s; call ds.refresh(posterior, loader) after further training", mixed)
        return self._functions(self._sample_latents() if self.stored is None else self.stored.get_buffer("own.latents"))

    def _functions(self, latents: Tensor) -> DrawnFunctions:
        return join_families(
            NodeFunctions.with_fixed_weights(self._network_at(m), self.sites, mine)
            for m, mine in enumerate(latents.chunk(self.particles.members))  # (S, D) of each
        )

    def current(self) -> DrawnFunctions:
        """New samples, even if a draw is stored, with gradients to the weights."""
        each = enumerate(self._sample_latents().chunk(self.particles.members))
        return join_families(NodeFunctions(single_member(self.particles, m), self.sites, mine) for m, mine in each)

    def _network_at(self, m: int) -> Particles:
        return self.particles if self.mean.ndim == 2 else single_member(self.particles, m)

    def store_draw(self, loader: Iterable[Any]) -> None:
        # Batch statistics from training are kept: if they were re-estimated for one z, batch norm would cancel it.
        latents = self._sample_latents()
        self.stored, self.stored_at = self.blank_draw(True, {}), self.mean.detach().clone()
        self.stored.get_buffer("own.latents").copy_(latents)
        if self._first is not None:
            (batch, before), self._first = self._first, None
            few = latents.reshape(self.particles.members, self.samples, -1)[:, : max(4, self.components)].flatten(0, 1)
            with inference_context(self), untimed_convolutions(self.device):
                found = self._functions(few).predict(batch.x)
                total, weight = log_prob_sum(self.likelihood, found, batch.y, batch.weight)
            if not (after := -float(total / weight)) <= before + 0.1:  # nats per row
                advice = "train the network longer first, or pass a lower posterior_temperature"
                text = "%s is worse than its network: loss of the first batch %.3f before training, %.3f now; %s"
                log.warning(text, type(self).__name__, before, after, advice)

    @torch.no_grad()
    def _sample_latents(self) -> Tensor:
        """(M · S, D) latents, network by network."""
        how = (self.samples, own_generator(self.device), self.complexity.noise)
        each = zip(*self._stacked_latents(), strict=True)
        return torch.cat([node_latents.sample_for_functions(mean.detach(), std, *how) for mean, std in each])

    def collapse(self, component: int | None = None, *, network: int = 0) -> nn.Module:
        """An ordinary network with mean latents folded into its weights.

        Args:
            component: 0 to K − 1 for that component's mean; None for the mean over components.
            network: index in a list of networks.
        """
        network = member_index(network, self.particles.members)
        particles, mean = self._network_at(network), self._stacked_latents()[0][network]
        if component is not None:
            integer("component", component, least=-self.components, hint=f"this posterior has {self.components}")
        return collapse_network(particles, self.sites, mean.mean(0) if component is None else mean[component])

    def before_step(self, batch: Batch) -> None:
        super().before_step(batch)
        particles, again = self.particles, bool(self._checked_shapes)
        x, size = batch.x, batches.count_examples(batch.x)
        if not again:
            with inference_context(self):
                loss = self.likelihood.nll(self._run_first_member(x), batch.y, batch.weight)
            self._first = batch, float(loss)
        if self.stored is not None and self.stored_at is None:
            self.stored_at = self.mean.detach().clone()
        shapes = tuple(tensor.shape[1:] for tensor in batches.input_tensors(x))
        if not again and self.batch_norm == "frozen":
            started_at = float(self.std.detach().mean()) if self.stored is None else None
            node_latents.warn_of_start(particles.template.network, started_at)
        each = enumerate(batches.input_tensors(x))
        # not as long as the batch, such as one row for all examples
        self._unbatched_inputs |= {i for i, tensor in each if tensor.ndim and len(tensor) not in (1, size)}
        if shapes not in self._checked_shapes and size:
            with inference_context(self), untimed_convolutions(self.device):
                known = self._unbatched_inputs
                if not self.network_is_random and (tables := node_latents.find_input_tables(particles, x, known)):
                    advice = "keep a table as a buffer, compute pairwise inputs in forward, or use another batch size"
                    got = f"tensors of shapes {tables} with {size} examples, one of them without such rows"
                    raise ValueError(f"expected inputs with a row for each example, got {got}; {advice}")
                node_latents.examine_layers(particles, self.sites, x, whole=known, like=self.mean, again=again)
            self._checked_shapes.add(shapes)

    def plain_network(self) -> nn.Module:
        return restore_plain_layers(self.particles.member(0))

    def config(self) -> dict[str, Any]:
        # Networks are converted again from a file, so nothing need be said of tensors that they share.
        return {key: value for key, value in super().config().items() if key != "once"}

    def draw_sizes(self, state: Tensors | None = None) -> bool:
        return self.stored is not None or state is not None

    def blank_draw(self, sizes: Any, state: Tensors) -> TensorTree:
        tree, rows = TensorTree(), self.particles.members * self.samples
        tree.add_tensor("own.latents", self.mean.detach().new_zeros(rows, self.latents))
        return tree


class NodeFunctions(DrawnFunctions):
    """S functions in eval mode, given by latents (S, D).

    With convolutions, functions run one after the other, with latents folded into the kernels, so that each costs one plain
    pass. A network of only dense layers runs all functions at once, with shared weights and latents on the activations.
    A call uses the present weights of the particles; `fixed` makes a copy of them.
    """

    def __init__(self, particles: Particles, sites: Sequence[Site], latents: Tensor) -> None:
        super().__init__()
        self.particles, self.sites = particles, sites
        # "latents" (S, D) and, for folded layers, "weight.NUMBER" and "bias.NUMBER" (S, ...). Numbers, not names: a layer's
        # name is empty if the network is itself the layer, and may be a prefix of another name
        self.drawn = TensorTree()
        self.drawn.add_tensor("latents", latents, persistent=False)
        self.members, self.training = len(latents), False
        layers = [particles.template.network.get_submodule(site.layer) for site in sites]
        particles.how = "vectorised" if all(isinstance(layer, DENSE) for layer in layers) else "loop"
        self._overrides: list[dict[str, Factors | Kernel]] | None = None
        self._overrides_source: Tensors = {}  # what it was made from

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
                with set_temporarily(layers, "nodes", nodes.values()):
                    return function(member, *args)

            return particles.run(one, Rows({}, {}, rows), self.members)

        with particles.lock_network(), eval_mode(particles, particles.template):
            return particles.call(all_of, particles.shared_parameters(), particles.shared_buffers())[0]

    def unfold(self) -> None:
        """Makes all functions run at once, with latents on activations, and drops the folded kernels to save memory."""
        latents, self.drawn = self.latents, TensorTree()
        self.drawn.add_tensor("latents", latents, persistent=False)
        self._overrides = None
        self.particles.how = "vectorised"

    def call_member(self, index: int, function: Callable[..., Any], *args: Any) -> Any:
        def with_latents(member: Member) -> Any:
            with use_latents(member.network, self.layer_overrides[index]):
                return function(member, *args)

        particles = self.particles
        with particles.lock_network(), eval_mode(particles, particles.template):
            return particles.call(with_latents, particles.shared_parameters(), particles.shared_buffers())[0]

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

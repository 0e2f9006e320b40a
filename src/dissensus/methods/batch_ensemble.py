"""BatchEnsemble: members share weights, and each has its own rank-one factor (Wen, Tran & Ba, ICLR 2020).

    y_α = s_α ∘ (W (r_α ∘ x) + b)

The talk on Embedded Ensembles has x^l = u^l ∘ φ(v^l ∘ z^l): r^{l+1} = u^l and s^l = v^l, with neither the first r nor the
last s (`form="talk"`).
"""

from collections.abc import Sequence
from typing import Literal, Unpack, final

from torch import Tensor, nn

from dissensus.core.likelihood import Likelihood
from dissensus.core.prior import PriorKeywords, norm_parameters
from dissensus.layers.call_order import end_layers, trace_calls
from dissensus.layers.conversion import CONVERTIBLE, convertible_copy, note_direct_reads
from dissensus.layers.conversion_report import ConversionReport
from dissensus.layers.modulated import ModulatedLayer, modulate_layer
from dissensus.layers.modulation import Modulation
from dissensus.methods.parts.embedded_posterior import EmbeddedPosterior, RegimeName, embed, resolve_gamma
from dissensus.utils.batch_norm_names import statistics_names
from dissensus.utils.checks import integer, number, one_of


@final
class BatchEnsemble(EmbeddedPosterior):
    """M members that share the weights of one network and cost little more than it does.

    y_α = s_α ∘ (W (r_α ∘ x) + b) for member α. Each member has its own norm layers (affine parameters and statistics) and
    output bias: a shared output bias adds 1 to all Θ_αβ. A batch norm after s cancels all of s but its sign. The network is
    copied; `.account` lists the layers that were changed.

    Args:
        network: one network.
        members: M.
        modulation: the distribution of r and s, required. `Modulation.sign()` makes independent members;
            `Modulation.normal(1, σ)` with a small σ stays close to a pretrained network, and members stay similar.
        regime: γ, the factor on the shared weights' mean gradient: "independent" (M), "collective" (1), a number, or
            "auto", chosen from the modulation's collectivity and M.
        form: "wen" has r and s at every layer; "talk" leaves out the first r and the last s.
        modulation_lr: learning rate of r and s in `parameter_groups`; None uses that of the weights.
        layers: name patterns of the layers that get factors ("encoder.*"); None is all.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "batch_ensemble"
    needed = ("modulation",)

    def __init__(
        self,
        network: nn.Module,
        *,
        members: int = 4,
        modulation: Modulation | None = None,
        regime: RegimeName | float = "auto",
        form: Literal["wen", "talk"] = "wen",
        modulation_lr: float | None = None,
        layers: Sequence[str] | None = None,
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        integer("members", members)
        if not isinstance(modulation, Modulation):
            near = "or Modulation.normal(1, 0.1) to start close to a pretrained network"
            advice = f"pass Modulation.sign() for independent members, {near}"
            raise TypeError(f"expected a modulation, got {modulation!r}; {advice}")
        one_of("form", form, ("wen", "talk"))
        if modulation_lr is not None:
            number("modulation_lr", modulation_lr, least=0, hint="None takes the weights' rate")
        gamma = resolve_gamma(regime, members, modulation.collectivity)
        network, account, last = modulated_network(network, form=form, layers=layers)
        sizes = {name: factor for name, factor in network.named_parameters() if _is_factor(network, name)}
        factors = {
            name: modulation.sample((members, len(one)), dtype=one.dtype, device=one.device)
            for name, one in sizes.items()
        }
        particles = embed(network, factors, own_tensors(network, account, last), likelihood, members)
        super().__init__(particles, factors=list(factors), account=account, **prior)
        self.modulation, self.regime, self.gamma, self.form = modulation, regime, gamma, form
        self.modulation_lr = modulation_lr
        self.layers = None if layers is None else list(layers)

    @property
    def remedy(self) -> str:
        expect = "ds.theory.regime(posterior) predicts the regime"
        if self.modulation.collectivity == 0 and self.gamma == self.particles.members:
            return f"modulations already have mean 0 and γ = M: try fewer members or wider layers; {expect}"
        return (
            "members differ more with modulations of mean 0, such as Modulation.sign(), wide layers, few members "
            f'and regime="independent"; {expect}'
        )


def modulated_network(
    module: nn.Module, *, form: Literal["wen", "talk"], layers: Sequence[str] | None
) -> tuple[nn.Module, ConversionReport, list[str]]:
    """(a copy of the module with neutral r and s, the account, the output layers).

    form="talk" leaves out the first r and the last s. First and last are counted over all linear and convolutional layers,
    cut or not, except layers whose weight another module reads without calling them.
    """
    network, found, account = convertible_copy(module, layers=layers)
    names = [name for name, part in network.named_modules() if isinstance(part, CONVERTIBLE)]
    names = [name for name in names if "reads its weight" not in account.left.get(name, "")]
    followed = trace_calls(network, names)
    first, last = end_layers(names, followed)
    for name, layer in found.items():
        wen = form == "wen"
        inputs, outputs = wen or name not in first, wen or name not in last
        cut_layer = modulate_layer(layer, inputs=inputs, outputs=outputs, trained=True)
        account.converted[name] = f"{cut_layer.report_entry()}{note_direct_reads(name, cut_layer, followed)}"
    return network, account, last


def own_tensors(network: nn.Module, account: ConversionReport, output_layers: Sequence[str]) -> set[int]:
    """Ids of the tensors besides r and s that each member has for itself: norm layers and the output bias.

    Also adds them to the account.
    """
    norms = norm_parameters(network)
    statistics = set(statistics_names(network))
    tensors = {**dict(network.named_parameters(remove_duplicate=False)), **dict(network.named_buffers())}
    layers = {name.rpartition(".")[0] for name in norms | statistics}
    for layer in (name for name, _ in network.named_modules() if name in layers):
        parts = {"affine": norms, "statistics": statistics}
        held = [part for part, names in parts.items() if any(each.rpartition(".")[0] == layer for each in names)]
        account.converted[layer] = f"own {' and '.join(held)}"
    own = {id(tensors[name]) for name in {*norms, *statistics}}
    for last in output_layers:
        bias = network.get_submodule(last).bias
        if isinstance(bias, Tensor):
            account.converted[last] = "; ".join([*filter(None, [account.converted.get(last)]), "own bias"])
            own.add(id(bias))
    return own


def _is_factor(network: nn.Module, name: str) -> bool:
    layer, _, leaf = name.rpartition(".")
    return leaf in ("r", "s") and isinstance(network.get_submodule(layer), ModulatedLayer)

"""Dropout ensembles: M fixed dropout masks on one network, the weight-sharing counterpart of MC dropout."""

from typing import Unpack, final

from torch import Tensor, nn

from dissensus.core.likelihood import Likelihood
from dissensus.core.prior import PriorKeywords
from dissensus.layers.call_order import call_order, end_layers, trace_calls
from dissensus.layers.conversion import convertible_copy, note_direct_reads
from dissensus.layers.factored import features
from dissensus.layers.modulated import modulate_layer
from dissensus.layers.modulation import Modulation
from dissensus.methods.parts.embedded_posterior import EmbeddedPosterior, RegimeName, embed, resolve_gamma
from dissensus.utils.batch_norm_names import statistics_names
from dissensus.utils.checks import fraction, integer


@final
class DropoutEnsemble(EmbeddedPosterior):
    """One network with M fixed dropout masks, one per member, the same for all inputs and steps.

    Masks are not trained. They act on the inputs of linear and convolutional layers (whole channels before
    convolutions), but not on the network's own inputs and outputs. Kept units are scaled by 1/(1 − rate), as in dropout.
    Each member has its own batch statistics; everything else is shared. The network is copied; `.account` lists the
    layers that were converted.

    Args:
        network: one network.
        members: M.
        rate: probability that a unit is dropped. 1 − rate is the collectivity, so members always learn as a collective.
        regime: γ, the factor on the shared weights' mean gradient: "independent" (M), "collective" (1), a number, or
            "auto", which is 1 here.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "dropout_ensemble"

    def __init__(
        self,
        network: nn.Module,
        *,
        members: int = 4,
        rate: float = 0.1,
        regime: RegimeName | float = "auto",
        likelihood: Likelihood | None = None,
        **prior: Unpack[PriorKeywords],
    ) -> None:
        integer("members", members)
        keep = 1 - fraction("rate", rate, hint="it is the share of units dropped, usually 0.1")
        gamma = 1.0 if regime == "auto" else resolve_gamma(regime, members, keep)
        network, found, account = convertible_copy(network)
        followed = trace_calls(network, list(found))
        stems = end_layers(list(found), followed)[0]
        rest = [name for name in call_order(list(found), followed) if name not in stems]
        if not rest:
            got = ", ".join(stems) or "one"
            raise ValueError(f"expected at least two linear or convolutional layers, got only {got}; pass more")
        for name in stems:
            account.left[name] = "a first layer: network inputs are not dropped"
        law = Modulation.bernoulli(keep, 1 / keep)
        masks = {}
        for name in rest:
            layer = modulate_layer(found[name], inputs=True, outputs=False, trained=False)
            weight: Tensor = layer.weight
            size = features(layer)[0]
            masks[f"{name}.r"] = law.sample((members, size), dtype=weight.dtype, device=weight.device)
            what = f"masks of {size} {'channels' if weight.ndim > 2 else 'units'}"
            account.converted[name] = f"{what}{note_direct_reads(name, layer, followed)}"
        buffers = dict(network.named_buffers())
        own = {id(buffers[name]) for name in statistics_names(network)}
        particles = embed(network, masks, own, likelihood, members)
        super().__init__(particles, factors=list(masks), account=account, **prior)
        self.rate, self.regime, self.gamma = rate, regime, gamma

    @property
    def remedy(self) -> str:
        return (
            "members with masks on shared weights always learn as a collective: a larger rate makes them differ more, "
            "BatchEnsemble with Modulation.sign() makes them independent"
        )

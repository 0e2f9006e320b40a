"""Modulated layers: s ∘ (W (r ∘ x) + b), with a factor per input and output, or per channel of a convolution."""

from torch import Tensor, nn

from dissensus.layers.conversion import convert_layer
from dissensus.layers.factored import FactoredLayer, Factors, features


class ModulatedLayer(FactoredLayer):
    """A layer with factors r on its inputs and s on its outputs, the same for all examples; None is no factor.

    s also multiplies the bias: so Wen et al.'s r, s are the talk's u, v, whose v acts on z = xW + b.
    """

    added = ("r", "s", "members_at_once")
    r: Tensor | None
    s: Tensor | None

    def factors(self) -> Factors:
        return Factors(self.r, None, self.s)

    def report_entry(self) -> str:
        """The layer's entry in the account."""
        kind = "channel" if self.weight.ndim > 2 else "unit"
        factors = [f"{name} ({len(f)})" for name, f in (("r", self.r), ("s", self.s)) if f is not None]
        return f"{' and '.join(factors)}, one for each {kind}" if factors else "nothing"


def modulate_layer(layer: nn.Module, *, inputs: bool, outputs: bool, trained: bool) -> ModulatedLayer:
    """The layer itself, converted, with factors 1 on its inputs and outputs; parameters if trained, else buffers."""
    made = convert_layer(layer, ModulatedLayer)
    for name, wanted, size in zip(("r", "s"), (inputs, outputs), features(layer), strict=True):
        factor = made.weight.detach().new_ones(size) if wanted else None
        if trained:
            made.register_parameter(name, None if factor is None else nn.Parameter(factor))
        else:
            made.register_buffer(name, factor)
    vars(made)["members_at_once"] = False  # the attribute by which vectorising code finds the layer
    return made

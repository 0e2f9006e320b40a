"""Deep ensembles: M networks from M starting points (Lakshminarayanan, Pritzel & Blundell, NeurIPS 2017)."""

from dissensus.methods.parts.stacked import StackedPosterior


class DeepEnsemble(StackedPosterior):
    """M independent members. The loss is the sum over members, so each trains exactly as it would alone.

    `modules`: a sequence of networks, each built by the caller, copied into a stack; the caller's stay usable. Networks
    that differ in attributes, hooks or modes run one after the other, each with its own.
    """

    name = "deep_ensemble"

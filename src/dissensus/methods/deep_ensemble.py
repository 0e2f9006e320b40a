"""Deep ensembles: M networks from M starting points (Lakshminarayanan, Pritzel & Blundell, NeurIPS 2017)."""

from typing import final

from dissensus.core.networks import StackedPosterior


@final
class DeepEnsemble(StackedPosterior):
    """M independently trained networks. The loss is the sum over members, so each trains exactly as it would alone.

    Args:
        networks: M networks of one architecture, each initialised separately; they are copied. Or a function that makes
            one network: `DeepEnsemble(make, members=5)`. Networks that differ in attributes, hooks or modes run in a loop.
        members: M, if `networks` is a function.
        base: a network that all members share, frozen; the function gets a copy of it with the same tensors:
            `DeepEnsemble(lambda base: get_peft_model(base, lora), members=5, base=base)`.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "deep_ensemble"

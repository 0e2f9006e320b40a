"""Deep ensembles: M networks from M starting points (Lakshminarayanan, Pritzel & Blundell, NeurIPS 2017)."""

from dissensus.core.networks import StackedPosterior


class DeepEnsemble(StackedPosterior):
    """M independently trained networks. The loss is the sum over members, so each trains exactly as it would alone.

    Args:
        networks: M networks of one architecture, each initialised separately; they are copied. Or a function that makes
            one network: `DeepEnsemble(make, members=5)`. Networks that differ in attributes, hooks or modes run one
            after the other.
        members: M, if `networks` is a function.
        base: a network, such as a pretrained one, that all members share. The function is called with a copy of it that has
            the same tensors, `DeepEnsemble(lambda base: get_peft_model(base, lora), members=5, base=base)`, and may add
            layers or replace them; M copies of the weights never exist. Tensors of the base that stay must be frozen.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "deep_ensemble"

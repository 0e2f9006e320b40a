"""Convergence of chains of networks, judged by their predictions: weights may be permuted."""

from dataclasses import dataclass

from torch import Tensor

from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.drawn_functions import DrawnFunctions
from dissensus.core.posterior import Posterior, checked_members, inference_context
from dissensus.metrics.chain_diagnostics import effective_sample_size, split_rhat


@dataclass(frozen=True)
class Convergence:
    """Convergence diagnostics of chains: split-R̂ and effective sample sizes of log-probabilities (B, C) or means (B, D)."""

    rhat: Tensor
    effective_samples: Tensor
    draws: int  # of all chains together

    def __str__(self) -> str:
        return (
            f"split-R̂ at most {float(self.rhat.max()):.3f}, median {float(self.rhat.median()):.3f}; of {self.draws} draws "
            f"effective at least {float(self.effective_samples.min()):.0f}, median "
            f"{float(self.effective_samples.median()):.0f}"
        )


def convergence(posterior: Posterior, x: Inputs) -> Convergence:
    """Measures how well the chains of `HMC` or `SGHMC` have mixed, from their predictions at these inputs.

    Args:
        posterior: a trained `HMC` or `SGHMC` with at least four samples per chain.
        x: inputs (B, ...): a tensor, a tuple or a dict of tensors.

    Returns:
        `Convergence`: `.rhat` and `.effective_samples`, each (B, C) or (B, D). R̂ near 1 means that the chains agree.
    """
    batches.count_examples(x := batches.convert_inputs(x))  # raises if x has no tensor
    x = batches.move_to_device(x, posterior.device)
    with inference_context(posterior):
        drawn: DrawnFunctions = posterior.draw()
        posterior.check_inputs(x)
        said = checked_members(posterior, drawn.predict(x), posterior.current_correction()).defining_tensors()[
            0
        ]  # (M · S, B, C)
    chains = said.reshape(drawn.networks, -1, *said.shape[1:])  # (M, S, B, C)
    return Convergence(split_rhat(chains), effective_sample_size(chains), len(said))

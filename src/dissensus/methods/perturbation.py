"""Gaussian perturbation: trained networks with white noise added to their weights."""

from typing import Unpack, final

import torch

from dissensus.core.networks import MethodKeywords, Networks
from dissensus.methods.parts.sampling_posterior import SamplingPosterior, sample_normal, stack_networks
from dissensus.utils.batch_norm_names import norm_parameters
from dissensus.utils.checks import number
from dissensus.utils.sharding import gather_full_tensor, shard_like
from dissensus.utils.tensor_tree import Tensors


@final
class GaussianPerturbation(SamplingPosterior):
    """Trained networks with Gaussian noise added to their weights.

    Samples are w̃ = w + noise · rms(w) · ε, with ε ~ N(0, 1) for every weight and rms over each tensor.
    Relative, because the same noise is harmless in one network and ruins another; norm layers and zero tensors get none.

    Args:
        networks: one module, not copied, or a list of M; each network has its own samples.
        noise: standard deviation relative to each tensor's root mean square.
        samples: functions per network and draw.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """

    name = "gaussian_perturbation"
    can_shard = True
    draw_only_settings = (*SamplingPosterior.draw_only_settings, "noise")

    def __init__(
        self, networks: Networks, *, noise: float = 0.05, samples: int = 20, **prior: Unpack[MethodKeywords]
    ) -> None:
        super().__init__(networks, samples=samples, **prior)
        self.noise = number("noise", noise, least=0, hint="it is relative to each tensor's rms")

    def sampled_names(self) -> list[str]:
        norms = norm_parameters(self.network)
        return [name for name in super().sampled_names() if name not in norms]

    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensors:
        rows = self.trained.rows()

        def around(m: int) -> Tensors:
            found = {}
            for name in self.sampled_names():
                stored = rows[name][m]
                weight = gather_full_tensor(stored)
                # In float16 squares overflow above 256 and are 0 below 2e-4: no noise at all.
                scale = self.noise * weight.to(torch.promote_types(weight.dtype, torch.float32)).square().mean().sqrt()
                epsilon = sample_normal(samples, weight, generator).to(scale.dtype)
                found[name] = shard_like((weight + scale * epsilon).to(weight.dtype), stored, before=1)  # (S, ...)
            return found

        return stack_networks(around, self.particles.members)

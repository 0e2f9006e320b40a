"""Two small methods in their shortest honest form: shared kernels with own modulations, and node noise with a KL."""

import copy

import torch
from torch import nn

import dissensus as ds
from dissensus.core.drawn_functions import MemberFunctions
from dissensus.core.particles import Member, Particles
from dissensus.core.posterior import Posterior
from dissensus.methods.parts.sampling_posterior import SamplingPosterior
from dissensus.utils.tensor_tree import TensorTree


class Rank1Linear(nn.Module):
    """s ∘ W (r ∘ x) + b."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.r, self.s = (nn.Parameter(torch.empty(n)) for n in (layer.in_features, layer.out_features))

    def forward(self, x):
        return nn.functional.linear(x * self.r, self.weight) * self.s + self.bias


def modulated(network):
    """A copy of the network with r and s, drawn around 1, on every linear layer."""
    network = copy.deepcopy(network)
    for name, layer in list(network.named_modules()):
        if type(layer) is nn.Linear:
            parent, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(parent), leaf, Rank1Linear(layer))
    for name, parameter in network.named_parameters():
        if name.endswith((".r", ".s")):
            nn.init.normal_(parameter, 1.0, 0.5)
    return network


class Rank1Ensemble(Posterior):
    """M members with one set of kernels; modulations and batch statistics are own (Wen, Tran & Ba 2020)."""

    name = "rank1_ensemble"

    def __init__(self, network, *, members, likelihood=None, **prior):
        def own(name):
            return name.endswith((".r", ".s")) or name.rpartition(".")[2] in ds.utils.batch_norm_names.STATISTICS

        networks = [modulated(network) for _ in range(members)]
        super().__init__(Particles.stack(networks, likelihood or ds.Classification(), own=own), **prior)

    def draw(self):
        return MemberFunctions(self.particles)

    def plain_network(self):
        network = self.particles.member(0)
        for name, layer in [each for each in network.named_modules() if isinstance(each[1], Rank1Linear)]:
            plain = nn.Linear(len(layer.r), len(layer.s)).to(layer.weight.dtype)
            plain.weight, plain.bias = layer.weight, layer.bias
            parent, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(parent), leaf, plain)
        return network


class NodeNoise(SamplingPosterior):
    """Inputs of linear layers times 1 + σ ε, σ learned: a loss of expected nll + KL(N(1, σ²) ‖ N(1, prior²)) · kl."""

    name = "node_noise"

    def __init__(self, network, *, prior_std=0.1, kl=1e-3, **keywords):
        layers = {name: part for name, part in network.named_modules() if type(part) is nn.Linear}
        deviations = TensorTree()
        for name, layer in layers.items():
            deviations.add_tensor(f"{name}.log_std", nn.Parameter(layer.weight.new_full((layer.in_features,), -4.0)))
        super().__init__(network, latents=deviations, **keywords)
        self.prior_std, self.kl = prior_std, kl
        self.layers = {f"network.{name}.weight": f"latents.{name}.log_std" for name in layers}

    def member_loss(self, params, buffers, batch):
        logs = {name: params[latent] for name, latent in self.layers.items()}
        noisy = {name: params[name] * (1 + log.exp() * torch.randn_like(log)) for name, log in logs.items()}
        nll, buffers = self.particles.call(Member.nll, {**params, **noisy}, buffers, batch)
        kl = sum((log.exp() / self.prior_std).square().sum() / 2 - log.sum() for log in logs.values())
        return nll + self.penalty(params) + self.kl * kl, (), buffers

    @torch.no_grad()
    def sample(self, samples, generator=None):
        found, held = {}, self.particles.shared_parameters()
        for name, latent in self.layers.items():
            log = held[latent]
            ε = torch.randn(samples, 1, len(log), dtype=log.dtype, device=log.device, generator=generator)
            found[name.removeprefix("network.")] = (held[name] * (1 + log.exp() * ε))[None]  # (1, S, ...): one network
        return found

    def sampled_names(self):
        return [name.removeprefix("network.") for name in self.layers]

"""A small method that cuts layers: members share a network and differ by a scale behind each of its linear layers."""

import copy

import torch
from torch import nn

import dissensus as ds
from dissensus.core.drawn_functions import MemberFunctions
from dissensus.core.particles import Particles
from dissensus.utils.tensor_tree import TensorTree


class ScaledLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.scale = nn.Parameter(1 + 0.3 * torch.randn(linear.out_features, dtype=linear.weight.dtype))

    def forward(self, x):
        return self.scale * self.linear(x)


def replaced(network, kind, change):
    """A copy of the network with change(layer) in the place of every layer of this kind."""
    network = copy.deepcopy(network)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, kind):
            network.set_submodule(name, change(layer))
    return network


class ScaledEnsemble(ds.Posterior):
    name = "scaled_ensemble"

    def __init__(self, module, *, members=3, likelihood=None, **prior):
        cut = [replaced(module, nn.Linear, ScaledLinear) for _ in range(members)]
        stacked = Particles.stack(cut, likelihood or ds.Classification())
        own, shared = TensorTree(), TensorTree()
        for name, tensor in stacked.own_parameters().items():
            if name.endswith(".scale"):
                own.add_tensor(name, tensor)
            else:
                shared.add_tensor(name, nn.Parameter(tensor[0].detach().clone(), requires_grad=tensor.requires_grad))
        for name, tensor in stacked.own_buffers().items():
            own.add_tensor(name, tensor)
        particles = Particles(stacked.template, own=own, shared=shared, members=members)
        super().__init__(particles, **prior)

    def plain_network(self):
        return replaced(self.particles.member(0), ScaledLinear, lambda layer: layer.linear)

    def draw(self):
        return MemberFunctions(self.particles)

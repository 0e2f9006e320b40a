"""A small method whose loss draws random numbers in eval mode too, as variational inference does."""

import torch

import dissensus as ds


class NoisyWeights(ds.NetworksPosterior):
    """MAP whose loss is that of weights with noise around them, new at every look."""

    name = "noisy_weights"

    def member_loss(self, params, buffers, batch):
        noisy = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in params.items()}
        return super().member_loss(noisy, buffers, batch)

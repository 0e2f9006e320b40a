"""What a user writes in plain torch in place of a method: networks, optimisers, a loop, and predictions.

Each class has the same four parts: `begin` (networks to the device, an optimiser for each), `step` on a batch, `end` (what
follows training) and `predict`. Optimiser, rates and sizes are the defaults of the library, so that both do the same work.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

RATE, DECAY = 1e-3, 1e-4
Loader = Iterable[tuple[Tensor, Tensor]]


class Ensemble:
    """Networks trained one after the other on each batch; one network is MAP. `steps`: the length of the run."""

    def __init__(self, networks: Sequence[nn.Module], *, device: str, half: bool, examples: int, steps: int) -> None:
        self.networks, self.device, self.half = list(networks), device, half
        self.examples, self.steps = examples, steps

    def begin(self) -> None:
        how = {"memory_format": torch.channels_last} if self.device == "cuda" else {}
        self.networks = [network.to(self.device, **how).train() for network in self.networks]
        self.optimizers = [self.optimizer(network) for network in self.networks]

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def autocast(self) -> Any:
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.half)

    def step(self, x: Tensor, y: Tensor) -> None:
        for network, optimizer in zip(self.networks, self.optimizers, strict=True):
            optimizer.zero_grad()
            with self.autocast():
                loss = F.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()

    def end(self, loader: Loader) -> None:
        for network in self.networks:
            network.eval()

    def predict(self, x: Tensor) -> Tensor:
        """(B, C) mean probabilities."""
        return torch.stack([network(x).softmax(1) for network in self.networks]).mean(0)


class FoRDE(Ensemble):
    """Networks whose input gradients repel each other: one backward pass through all of their gradients."""

    def step(self, x: Tensor, y: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        x = x.detach().requires_grad_()
        losses, gradients = [], []
        for network in self.networks:
            with self.autocast():
                logits = network(x)
                losses.append(F.cross_entropy(logits, y))
                chosen = logits.gather(1, y[:, None]).sum()
            gradients.append(torch.autograd.grad(chosen, x, create_graph=True)[0].flatten(1))
        repulsion = log_densities(torch.stack(gradients)).sum() / len(y)
        (torch.stack(losses).sum() + repulsion).backward()
        for optimizer in self.optimizers:
            optimizer.step()


def log_densities(gradients: Tensor) -> Tensor:
    """(M,) log Σ_j (1/B) Σ_b κ(s_ib, s_jb) of input gradients (M, B, D), with the bandwidth of the authors' code."""
    members, examples = gradients.shape[:2]
    s = gradients / (gradients.square().sum(2, keepdim=True) + 1e-24).sqrt()
    squared = 2 - 2 * torch.einsum("ibd,jbd->bij", s, s.detach())
    squared = squared.masked_fill(torch.eye(members, dtype=torch.bool, device=s.device), 0.0).clamp(min=0.0)
    ordered = squared.detach().sort(1).values
    middle = (ordered[:, (members - 1) // 2] + ordered[:, members // 2]) / 2
    bandwidth = middle / (math.log(members) or 1.0) + 1e-12
    return (-squared / bandwidth[:, None]).transpose(0, 1).flatten(1).logsumexp(1) - math.log(examples)


class SWAG(Ensemble):
    """One network and running moments of its weights over the last quarter of the run; functions are drawn at the end."""

    rank, samples = 20, 30

    def begin(self) -> None:
        super().begin()
        weights = self.weights()
        self.mean, self.squares = torch.zeros_like(weights), torch.zeros_like(weights)
        self.deviations: list[Tensor] = []
        self.done = self.taken = 0
        length = max(1, self.steps - math.floor(0.75 * self.steps))
        self.every = length // min(2 * self.rank, length)
        self.start = self.steps - 1 - self.every * (min(2 * self.rank, length) - 1)

    def weights(self) -> Tensor:
        return torch.cat([each.detach().flatten() for each in self.networks[0].parameters()])

    def step(self, x: Tensor, y: Tensor) -> None:
        super().step(x, y)
        since = self.done - self.start
        self.done += 1
        if since >= 0 and since % self.every == 0:
            self.taken += 1
            weights = self.weights()
            self.mean += (weights - self.mean) / self.taken
            self.squares += (weights.square() - self.squares) / self.taken
            self.deviations = [*self.deviations, weights - self.mean][-self.rank :]

    @torch.no_grad()
    def end(self, loader: Loader) -> None:
        std = (self.squares - self.mean.square()).clamp(min=1e-30).sqrt()
        deviations = torch.stack(self.deviations)
        self.drawn = []
        for _ in range(self.samples):
            low_rank = torch.randn_like(deviations[:, 0]) @ deviations
            noise = std * torch.randn_like(std) + low_rank / max(len(deviations) - 1, 1) ** 0.5
            network = copy.deepcopy(self.networks[0])
            drawn = (self.mean + 0.5**0.5 * noise).split([each.numel() for each in network.parameters()])
            for parameter, values in zip(network.parameters(), drawn, strict=True):
                parameter.copy_(values.view_as(parameter))
            update_bn(loader, network)
            self.drawn.append(network.eval())

    def predict(self, x: Tensor) -> Tensor:
        return torch.stack([network(x).softmax(1) for network in self.drawn]).mean(0)


class NoisyLayer(nn.Module):
    """A layer whose output nodes are multiplied by z ~ (1/K) Σ_k N(mean_k, std_k²)."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, components: int, std: float) -> None:
        super().__init__()
        self.layer, width = layer, len(layer.weight)
        deviation = (std + 0.02 * torch.randn(components, width)).abs()
        self.mean = nn.Parameter(1 + 0.05 * torch.randn(components, width))
        self.raw_std = nn.Parameter(deviation.expm1().log())
        self.z: Tensor | None = None  # (width,) of one function
        self.component: Tensor | None = None  # (B,) of each example

    def draw(self, component: Tensor) -> Tensor:
        std = F.softplus(self.raw_std)[component]
        return self.mean[component] + std * torch.randn_like(std)

    def forward(self, x: Tensor) -> Tensor:
        assert self.component is not None
        z = self.draw(self.component) if self.z is None else self.z
        outputs = self.layer(x)
        return outputs * (z if isinstance(self.layer, nn.Linear) else z[..., None, None]).to(outputs.dtype)


def with_noise(module: nn.Module, components: int, std: float) -> nn.Module:
    """The module with a `NoisyLayer` in the place of every linear and convolutional layer."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear | nn.Conv2d):
            setattr(module, name, NoisyLayer(child, components, std))
        else:
            with_noise(child, components, std)
    return module


class NodeBNN(Ensemble):
    """One network with noise on its output nodes, trained on the evidence bound; functions are drawn at the end."""

    components, prior_std, copies, samples = 4, 0.3, 4, 32

    def __init__(self, networks: Sequence[nn.Module], **how: Any) -> None:
        super().__init__([with_noise(network, self.components, self.prior_std) for network in networks], **how)
        self.layers = [each for each in self.networks[0].modules() if isinstance(each, NoisyLayer)]

    def begin(self) -> None:
        super().begin()
        for layer in self.layers:
            layer.z = None

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        latents = [each for layer in self.layers for each in (layer.mean, layer.raw_std)]
        known = {id(each) for each in latents}
        weights = [each for each in network.parameters() if id(each) not in known]
        groups = [{"params": weights, "weight_decay": DECAY}, {"params": latents, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=RATE, fused=True)

    def step(self, x: Tensor, y: Tensor) -> None:
        (network,), (optimizer,) = self.networks, self.optimizers
        x, y = x.repeat_interleave(self.copies, 0), y.repeat_interleave(self.copies, 0)
        component = torch.arange(len(y), device=y.device) % self.components
        for layer in self.layers:
            layer.component = component
        optimizer.zero_grad()
        with self.autocast():
            loss = F.cross_entropy(network(x), y)
        (loss + self.kl() / self.examples).backward()
        optimizer.step()

    def kl(self) -> Tensor:
        """() KL(q ‖ p) with the bound on the mixture's entropy by Bhattacharyya coefficients."""
        mean = torch.cat([layer.mean for layer in self.layers], 1)
        std = F.softplus(torch.cat([layer.raw_std for layer in self.layers], 1))
        scale = 2 * self.prior_std**2
        cross = 0.5 * math.log(math.pi * scale) + ((mean - 1).square() + std.square()) / scale
        entropy = 0.5 * math.log(2 * math.pi * math.e) + std.log()
        both = std.square()[:, None] + std.square()[None]
        apart = (mean[:, None] - mean[None]).square() / both / 4
        distance = apart + 0.5 * (both / (2 * std[:, None] * std[None])).log()
        overlap = (-distance.sum(2)).logsumexp(1) - math.log(len(mean))
        return cross.sum(1).mean() - entropy.sum(1).mean() + overlap.mean()

    @torch.no_grad()
    def end(self, loader: Loader) -> None:
        super().end(loader)
        component = torch.arange(self.samples, device=self.device) % self.components
        self.drawn = [layer.draw(component) for layer in self.layers]  # (S, width) each

    def predict(self, x: Tensor) -> Tensor:
        found = []
        for s in range(self.samples):
            for layer, z in zip(self.layers, self.drawn, strict=True):
                layer.z = z[s]
            found.append(self.networks[0](x).softmax(1))
        return torch.stack(found).mean(0)


LOOPS: dict[str, type[Ensemble]] = {
    "MAP": Ensemble, "DeepEnsemble": Ensemble, "FoRDE": FoRDE, "SWAG": SWAG, "NodeBNN": NodeBNN,
}  # fmt: skip

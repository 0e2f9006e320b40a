"""Heads on a frozen backbone, such as linear probes: members share one feature extractor, whose features can be cached."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from dissensus.core.batch import call_network, convert_inputs, move_to_device
from dissensus.core.likelihood import Likelihood
from dissensus.core.prior import PriorKeywords
from dissensus.engine.loader import Loader
from dissensus.methods import DeepEnsemble
from dissensus.utils.shared_tensors import copy_sharing_tensors


class BackboneAndHead(nn.Module):
    """head(backbone(x)), with the backbone frozen and always in eval mode; any method can be built on it.

    It holds the backbone's tensors, not copies of them, and leaves the module you pass as it is. Called with `features=`
    instead of x, it runs only the head, so that it trains and predicts on the batches of `cache_features`.

    Args:
        backbone: a network that returns features (B, ...) as one tensor.
        head: a network from these features to the outputs (B, C).
    """

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = copy_sharing_tensors(backbone).requires_grad_(False).eval()
        self.head = head

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, *x: Any, features: Tensor | None = None, **named: Any) -> Any:
        if features is None:
            features = call_network(self.backbone, named or x)
        return self.head(features)


def heads(
    backbone: nn.Module,
    head: Callable[[], nn.Module],
    *,
    members: int = 5,
    likelihood: Likelihood | None = None,
    **prior: Unpack[PriorKeywords],
) -> DeepEnsemble:
    """A deep ensemble of heads on one frozen backbone: M networks `BackboneAndHead`, with the backbone stored once.

    Args:
        backbone: a network that returns features (B, ...) as one tensor; its tensors are held, and it is not changed.
        head: a function that makes a head: `lambda: nn.Linear(512, 10)`.
        members: M.
        likelihood, prior, weight_prior_std, data_size: as in `Posterior`.
    """
    if isinstance(head, nn.Module) or not callable(head):
        fix = "each member starts from a head of its own: pass lambda: nn.Linear(512, 10)"
        raise TypeError(f"expected a function that makes a head, got {type(head).__name__}; {fix}")
    return DeepEnsemble(lambda: BackboneAndHead(backbone, head()), members=members, likelihood=likelihood, **prior)


def cache_features(backbone: nn.Module, loader: Any) -> Any:
    """The loader with the backbone's features as inputs: batches ({"features": (B, ...)}, y), for a `BackboneAndHead`.

    The backbone runs once over the data, in eval mode; features stay in memory. Cache data without random augmentation.

    Args:
        backbone: the frozen network, or a `BackboneAndHead`.
        loader: a DataLoader or `ds.data.Batches`, whose batches keep their order, shuffling and generator; data (x, y) or
            (x, y, weight), which stay data; or any other iterable of batches, which becomes a list of them.
    """
    network = copy_sharing_tensors(backbone.backbone if isinstance(backbone, BackboneAndHead) else backbone).eval()
    data = Loader(loader)
    if not isinstance(loader, Loader) and data.given is not loader:  # data, of which it has made batches
        return _join_batches(network, data)
    cached = data.replace_rows(lambda rows: _join_batches(network, rows))
    return list(_feature_batches(network, data)) if cached is None else cached


@torch.no_grad()
def _feature_batches(network: nn.Module, loader: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """The batches with features in place of the inputs."""
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    for x, *rest in loader:
        y, *weight = map(torch.as_tensor, rest)
        yield {"features": call_network(network, move_to_device(convert_inputs(x), device)).to(y.device)}, y, *weight


def _join_batches(network: nn.Module, loader: Iterable[Any]) -> tuple[Any, ...]:
    """({"features": (N, ...)}, y (N, ...)), with weights (N,) if there are some."""
    x, *rest = zip(*_feature_batches(network, loader), strict=True)
    return {"features": torch.cat([each["features"] for each in x])}, *map(torch.cat, rest)

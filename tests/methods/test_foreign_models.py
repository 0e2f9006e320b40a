"""Networks with outputs by name, as those of transformers and torchvision return them."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.core import batch as batches
from thinning import often


class Outputs(OrderedDict[str, Tensor]):
    """Outputs by name, as transformers' models return them: a dict with attributes."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


class Named(nn.Module):
    def __init__(self, kind: Callable[..., Any] = Outputs) -> None:
        super().__init__()
        self.body, self.head, self.kind = nn.Linear(4, 6), nn.Linear(6, 3), kind

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).tanh()
        return self.kind(logits=self.head(hidden), hidden=hidden)


class Plain(Named):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)["logits"]


def test_latents_at_1_reproduce_a_network_with_outputs_by_name(tmp_path):
    tiny.check_latents_around(Named, torch.randn(2, 4), tmp_path)


METHODS: dict[str, Callable[[Callable[[], nn.Module]], ds.Posterior]] = {
    "map": lambda make: ds.MAP(make()),
    "deep_ensemble": lambda make: ds.DeepEnsemble([make() for _ in range(2)]),
    "forde": lambda make: ds.FoRDE([make() for _ in range(2)], data_size=8),
    "function_rde": lambda make: ds.FunctionRDE([make() for _ in range(2)], data_size=8),
    "feature_rde": lambda make: ds.FeatureRDE([make() for _ in range(2)], data_size=8, layer="body", head="head"),
    "swag": lambda make: ds.SWAG(make()),
    "mc_dropout": lambda make: ds.MCDropout(make(), rate=0.2),
    "batch_ensemble": lambda make: ds.BatchEnsemble(make(), members=2, modulation=ds.Modulation.sign()),
    "node_bnn": lambda make: ds.NodeBNN(make(), data_size=8, components=2, samples=2),
    "mean_field_vi": lambda make: ds.MeanFieldVI(make(), data_size=8, samples=2),
}
OFTEN = ["map", "forde", "feature_rde", "node_bnn", "mean_field_vi"]  # each calls the network in its own way
SPLIT = OFTEN, [name for name in METHODS if name not in OFTEN]


def segmented(logits: Tensor, hidden: Tensor) -> OrderedDict[str, Tensor]:
    """As torchvision's networks for segmentation return them."""
    return OrderedDict(out=logits, aux=hidden)


@pytest.mark.parametrize("method", often(*SPLIT))
def test_outputs_by_name_give_what_their_logits_alone_give_and_an_aux_head_is_not_taken(method):
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    found = []
    for make in (Named, partial(Named, dict), partial(Named, segmented), Plain):
        torch.manual_seed(1)
        posterior = METHODS[method](make)
        optimizer = torch.optim.SGD(posterior.parameter_groups(lr=0.1))
        ds.fit(posterior, [(x, y)] * 3, epochs=1, optimizer=optimizer, progress=False)
        found.append(posterior.predict(x).mean)
    assert all(torch.equal(each, found[-1]) for each in found)
    assert batches.output_tensor({"out": x, "logits": y}) is y


def test_outputs_without_logits_are_refused_in_training_too():
    def unnamed(logits: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        return {"head": logits, "hidden": hidden}

    x, y = torch.randn(8, 4), torch.arange(8) % 3
    for kind, name in ((unnamed, "dict"), (lambda logits, hidden: (logits, logits), "tuple")):
        with pytest.raises(
            TypeError, match=f'expected a network that returns one tensor.*"logits" or "out", got {name}; wrap'
        ):
            ds.fit(ds.MAP(Named(kind)), [(x, y)], epochs=1, progress=False)

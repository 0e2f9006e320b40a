"""Models of torchvision, timm and transformers, where those are installed, and networks with outputs by name as theirs."""

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

BERT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
VIT = {key: value for key, value in BERT.items() if key != "vocab_size"} | {"image_size": 32, "patch_size": 8}


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


def images(side: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, 3, side, side)


def sentences() -> dict[str, Tensor]:
    kept = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    return {"input_ids": torch.randint(1, 40, (2, 6)), "attention_mask": kept}


def vision(name: str, **keywords: Any) -> nn.Module:
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    return getattr(models, name)(weights=None, num_classes=3, **keywords)  # type: ignore[no-any-return]


def timm(name: str, **keywords: Any) -> nn.Module:
    library = pytest.importorskip("timm", reason="timm is not installed")
    return library.create_model(name, pretrained=False, num_classes=3, **keywords)  # type: ignore[no-any-return]


def transformer(name: str, **keywords: Any) -> nn.Module:
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    config = getattr(library, f"{name}Config")(num_labels=3, **keywords)
    kind = "Sequence" if name == "Bert" else "Image"
    return getattr(library, f"{name}For{kind}Classification")(config)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "torchvision resnet18": (partial(vision, "resnet18"), images(32)),
    "torchvision mobilenet_v3_small": (partial(vision, "mobilenet_v3_small"), images(32)),
    "torchvision densenet121": (partial(vision, "densenet121"), images(32)),
    "torchvision convnext_tiny": (partial(vision, "convnext_tiny"), images(32)),
    "timm resnet18": (partial(timm, "resnet18"), images(32)),
    "timm vit_tiny": (partial(timm, "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2), images(32)),
    "timm convnext_atto": (partial(timm, "convnext_atto"), images(32)),
    "transformers BERT": (partial(transformer, "Bert", **BERT), sentences),
    "transformers ViT": (partial(transformer, "ViT", **VIT), images(32)),
    "transformers ResNet": (
        partial(transformer, "ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
        images(32),
    ),
    "named outputs": (Named, lambda: torch.randn(2, 4)),
}
slow_to_build = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@slow_to_build
@pytest.mark.parametrize("name", MODELS)
def test_latents_at_1_reproduce_a_foreign_model_which_trains_and_loads_around_a_plain_one(name, tmp_path):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    network, x, y = make().eval(), inputs(), torch.tensor([0, 2])
    posterior = tiny.still(ds.NodeBNN(network, data_size=2, components=1, samples=1, batch_norm="frozen")).eval()
    with torch.no_grad():
        expected = batches.call_network(network, x)
        torch.testing.assert_close(posterior(x)[0], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(batches.call_network(posterior.collapse(), x), expected, rtol=1e-5, atol=1e-6)

    posterior = ds.NodeBNN(network, data_size=2, components=2, samples=2, init_std=0.1, batch_norm="frozen")
    before = posterior.mean.detach().clone()
    groups = posterior.parameter_groups(lr=1e-4)
    ds.fit(posterior, [(x, y)], epochs=2, optimizer=torch.optim.SGD(groups), progress=False)
    assert not torch.equal(posterior.mean, before)
    with torch.no_grad():
        passed = batches.call_network(posterior.member(1).eval(), x).log_softmax(-1)
    predictive = posterior.predict(x)
    torch.testing.assert_close(predictive.log_probs[1], passed, rtol=1e-4, atol=1e-5)
    ds.save(posterior, tmp_path / "saved")
    assert torch.equal(ds.load(tmp_path / "saved", make()).predict(x).mean, predictive.mean)


@slow_to_build
@pytest.mark.parametrize("name", ["torchvision resnet18", "timm resnet18", "transformers BERT", "transformers ViT"])
def test_laplace_takes_a_foreign_model_as_it_comes(name):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    network, x = make().eval(), inputs()
    posterior = ds.Laplace(network).fit_posthoc([(x, torch.tensor([0, 2]))])
    with torch.no_grad():
        expected = batches.call_network(network, x)
    torch.testing.assert_close(batches.call_network(posterior.network, x).detach(), expected)
    assert float(posterior.predict(x).epistemic.min()) > 0


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


@pytest.mark.parametrize("method", often(*SPLIT))
def test_outputs_by_name_give_what_their_logits_alone_give(method):
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    found = []
    for make in (Named, partial(Named, dict), Plain):
        torch.manual_seed(1)
        posterior = METHODS[method](make)
        optimizer = torch.optim.SGD(posterior.parameter_groups(lr=0.1))
        ds.fit(posterior, [(x, y)] * 3, epochs=1, optimizer=optimizer, progress=False)
        found.append(posterior.predict(x).mean)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("method", often(*SPLIT))
def test_outputs_named_out_are_taken_and_an_aux_head_is_not(method):
    """As torchvision's networks for segmentation return them."""

    def segmented(logits: Tensor, hidden: Tensor) -> OrderedDict[str, Tensor]:
        return OrderedDict(out=logits, aux=hidden)

    x, y = torch.randn(8, 4), torch.arange(8) % 3
    found = []
    for make in (partial(Named, segmented), Plain):
        torch.manual_seed(1)
        posterior = METHODS[method](make)
        optimizer = torch.optim.SGD(posterior.parameter_groups(lr=0.1))
        ds.fit(posterior, [(x, y)] * 3, epochs=1, optimizer=optimizer, progress=False)
        found.append(posterior.predict(x).mean)
    assert torch.equal(found[0], found[1])
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

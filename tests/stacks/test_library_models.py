"""Models of torchvision, timm and transformers, as large as their libraries make them."""

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
}
LARGE = ["torchvision densenet121", "torchvision convnext_tiny"]
slow_to_build = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@slow_to_build
@pytest.mark.parametrize("name", often([name for name in MODELS if name not in LARGE], LARGE))
def test_latents_at_1_reproduce_a_foreign_model_which_trains_and_loads_around_a_plain_one(name, tmp_path):
    make, inputs = MODELS[name]
    tiny.check_latents_around(make, inputs(), tmp_path)


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

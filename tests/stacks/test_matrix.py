"""Other people's networks times methods: every cell trains, predicts and evaluates, or says in one line why it does not.

Networks are built from their libraries' classes, tiny and untrained. `ERRORS` names the cells that raise, with what they say; a
new error, an error in other words and a cell that began to work all fail a test here.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import dissensus as ds

CLASSES, WORDS = 3, 40
WIDTH = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = WIDTH | {"vocab_size": WORDS, "pad_token_id": 0}
Batches = list[Any]


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name.split('.')[0]} is not installed")


def transformer(name: str, task: str = "SequenceClassification", **settings: Any) -> nn.Module:
    transformers = library("transformers")
    config = getattr(transformers, f"{name}Config")(num_labels=CLASSES, **settings)
    network: nn.Module = getattr(transformers, f"{name}For{task}")(config)
    return network


def language_model(**settings: Any) -> nn.Module:
    transformers = library("transformers")
    network: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    return network


def lora() -> nn.Module:
    peft = library("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    network: nn.Module = peft.get_peft_model(transformer("Bert", **TEXT), config)
    return network


def timm(name: str, **settings: Any) -> nn.Module:
    network: nn.Module = library("timm").create_model(name, pretrained=False, num_classes=CLASSES, **settings)
    return network


def timm_tinynet() -> nn.Module:
    """Three of its seven stages; the head stays as wide as it is, 1,280 features."""
    network: Any = timm("tinynet_e")
    network.blocks = network.blocks[:3]
    network.conv_head = nn.Conv2d(network.blocks[-1][-1].conv_pwl.out_channels, network.conv_head.out_channels, 1)
    return network  # type: ignore[no-any-return]


def torchvision_resnet() -> nn.Module:
    """Two of its four stages, with a block each."""
    resnet = library("torchvision.models.resnet")
    network = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1])
    network.layer3, network.layer4, network.fc = nn.Identity(), nn.Identity(), nn.Linear(128, CLASSES)
    return network  # type: ignore[no-any-return]


def torchvision_segmentation() -> nn.Module:
    fcn, layers = library("torchvision.models.segmentation.fcn"), library("torchvision.models._utils")
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
    network: nn.Module = fcn.FCN(layers.IntermediateLayerGetter(backbone, {"3": "out"}), fcn.FCNHead(8, CLASSES))
    return network


def lightning_module() -> nn.Module:
    lightning = library("lightning")

    class Classifier(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(
                nn.Flatten(), nn.Linear(3 * 32 * 32, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, CLASSES)
            )

        def forward(self, x: Tensor) -> Any:
            return self.network(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    network: nn.Module = Classifier()
    return network


def sentences(length: int) -> dict[str, Tensor]:
    """Two sentences, padded to the length of the longer one."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, -2:] = 0
    return {"input_ids": torch.randint(1, WORDS, (2, length)) * mask, "attention_mask": mask}


def texts() -> Batches:
    return [(sentences(length), torch.tensor([0, 2])) for length in (5, 7)]


def texts_with_labels() -> Batches:
    return [{**x, "labels": y} for x, y in texts()]


def tagged_texts() -> Batches:
    found = [sentences(length) for length in (5, 7)]
    return [(x, torch.where(x["attention_mask"] == 1, x["input_ids"] % CLASSES, -100)) for x in found]


def continued_texts() -> Batches:
    found = [sentences(length) for length in (5, 7)]
    return [(x, torch.where(x["attention_mask"] == 1, x["input_ids"], -100)) for x in found]


def images() -> Batches:
    return [(torch.randn(2, 3, 32, 32), torch.tensor([0, 2])) for _ in range(2)]


def masks() -> Batches:
    return [(x, torch.randint(CLASSES, (2, 32, 32))) for x, _ in images()]


class Row(NamedTuple):
    """A network, its batches, and what its outputs mean if not classes."""

    make: Callable[[], nn.Module]
    batches: Callable[[], Batches]
    likelihood: Callable[[], Any] = ds.Classification


GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": WORDS, "pad_token_id": 0, "n_positions": 16}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
ROWS = {
    "BERT": Row(partial(transformer, "Bert", **TEXT), texts),
    "BERT, labels inside": Row(partial(transformer, "Bert", **TEXT), texts_with_labels),
    "DistilBERT": Row(
        partial(transformer, "DistilBert", dim=16, n_layers=1, n_heads=2, hidden_dim=24, vocab_size=WORDS), texts
    ),
    "RoBERTa": Row(partial(transformer, "Roberta", **TEXT), texts),
    "ModernBERT": Row(
        partial(transformer, "ModernBert", **TEXT, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
        texts,
    ),
    "DeBERTa": Row(
        partial(transformer, "DebertaV2", **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]), texts
    ),
    "GPT-2": Row(partial(transformer, "GPT2", **GPT2), texts),
    "Llama": Row(partial(transformer, "Llama", **TEXT), texts),
    "HF ViT": Row(partial(transformer, "ViT", "ImageClassification", **WIDTH, image_size=32, patch_size=8), images),
    "HF tokens": Row(partial(transformer, "Bert", "TokenClassification", **TEXT), tagged_texts, lambda: ds.Tokens()),
    "HF causal LM": Row(partial(language_model, **GPT2), continued_texts, lambda: ds.Tokens(shift=True)),
    "peft LoRA": Row(lora, texts),
    "timm resnet": Row(partial(timm, "test_resnet"), images),
    "timm vit": Row(partial(timm, "test_vit", img_size=32, patch_size=8, depth=1), images),
    "timm convnext": Row(partial(timm, "test_convnext", depths=(1, 1, 1, 1)), images),
    "timm tinynet": Row(timm_tinynet, images),
    "torchvision resnet": Row(torchvision_resnet, images),
    "torchvision segmentation": Row(torchvision_segmentation, masks),
    "LightningModule": Row(lightning_module, images),
}


def two(row: Row) -> list[nn.Module]:
    return [row.make(), row.make()]


METHODS: dict[str, Callable[[Row, Any], ds.Posterior]] = {
    "MAP": lambda row, likelihood: ds.MAP(row.make(), likelihood=likelihood),
    "DeepEnsemble": lambda row, likelihood: ds.DeepEnsemble(two(row), likelihood=likelihood),
    "MCDropout": lambda row, likelihood: ds.MCDropout(row.make(), samples=2, likelihood=likelihood),
    "SWAG": lambda row, likelihood: ds.SWAG(row.make(), samples=2, likelihood=likelihood),
    "TRADI": lambda row, likelihood: ds.TRADI(row.make(), samples=2, likelihood=likelihood),
    "SnapshotEnsemble": lambda row, likelihood: ds.SnapshotEnsemble(row.make(), members=2, likelihood=likelihood),
    "Laplace": lambda row, likelihood: ds.Laplace(row.make(), samples=2, likelihood=likelihood),
    "NodeBNN": lambda row, likelihood: ds.NodeBNN(
        row.make(), data_size=4, components=2, samples=2, likelihood=likelihood
    ),
    "BatchEnsemble": lambda row, likelihood: ds.BatchEnsemble(
        row.make(), members=2, modulation=ds.Modulation.sign(), likelihood=likelihood
    ),
    "DropoutEnsemble": lambda row, likelihood: ds.DropoutEnsemble(row.make(), members=2, likelihood=likelihood),
    "RankOneBNN": lambda row, likelihood: ds.RankOneBNN(
        row.make(), data_size=4, components=2, samples=2, likelihood=likelihood
    ),
    "MeanFieldVI": lambda row, likelihood: ds.MeanFieldVI(row.make(), data_size=4, samples=2, likelihood=likelihood),
    "GaussianPerturbation": lambda row, likelihood: ds.GaussianPerturbation(
        row.make(), samples=2, likelihood=likelihood
    ),
    "SGHMC": lambda row, likelihood: ds.SGHMC(row.make(), members=2, data_size=4, likelihood=likelihood),
    "FoRDE": lambda row, likelihood: ds.FoRDE(two(row), data_size=4, likelihood=likelihood),
}
COLUMNS = [*METHODS, "export"]
SAVED = ("DeepEnsemble", "SWAG", "NodeBNN", "Laplace")  # these are also saved and loaded


def use(row: Row, column: str, folder: Path) -> None:
    """Trains for two batches, predicts and evaluates; what is exported is one network, not trained."""
    batches = row.batches()
    x = batches[0][0] if isinstance(batches[0], tuple) else batches[0]
    posterior = METHODS.get(column, METHODS["MAP"])(row, row.likelihood())
    if column == "export":
        return ds.export(posterior, folder / "network.pt2", example=x)
    if column == "Laplace":
        posterior.fit_posthoc(batches)
    else:
        ds.fit(posterior, batches, epochs=1, progress=False)
    predictive = posterior.predict(x)
    assert bool(predictive.mean.isfinite().all())
    assert ds.evaluate(posterior, batches, progress=False).metrics["nll"] > 0
    if column in SAVED:
        ds.save(posterior, folder / "saved")
        assert torch.equal(ds.load(folder / "saved", row.make()).predict(x).mean, predictive.mean)


TEXTS = [name for name, row in ROWS.items() if row.batches not in (images, masks)]
NO_DROPOUT = "expected a network .* positive rate, got none"
WITHOUT_DROPOUT = ["ModernBERT", "Llama", "HF ViT", "timm resnet", "timm vit", "timm convnext", "timm tinynet"]
POSITIONS = "expected the 2 examples of the batch on the first axis of layer .*, got a tensor of shape"
ERRORS = {
    **{(row, "FoRDE"): "expected inputs of at least two floating-point features, got integers only" for row in TEXTS},
    **{(row, "MCDropout"): NO_DROPOUT for row in [*WITHOUT_DROPOUT, "torchvision resnet"]},
    ("HF causal LM", "Laplace"): "got 'lm_head' tied to",
    **{("DeBERTa", column): POSITIONS for column in ("NodeBNN", "RankOneBNN")},
}


CELLS = [(row, column) for row in ROWS for column in COLUMNS]
EXPORTED_OFTEN = ("BERT", "HF ViT", "timm resnet", "LightningModule")  # others are slow: tracing takes seconds
SLOW = {("timm tinynet", "Laplace"), *((row, "export") for row in ROWS if row not in EXPORTED_OFTEN)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("row", "column"), [pytest.param(*cell, marks=[pytest.mark.slow] * (cell in SLOW)) for cell in CELLS]
)
def test_a_cell_works_or_raises_the_one_clear_error_of_the_table(row, column, tmp_path):
    try:
        use(ROWS[row], column, tmp_path)
    except (ValueError, TypeError) as error:
        message = str(error)
        assert "\n" not in message
        assert re.search("expected .+, got .+", message), message
        assert re.search(ERRORS.get((row, column), "this cell is not in ERRORS"), message), message
    else:
        assert (row, column) not in ERRORS, "works now: take it out of ERRORS"


def test_at_most_a_tenth_of_the_cells_are_errors():
    assert ERRORS.keys() <= set(CELLS)
    assert len(ERRORS) <= len(CELLS) / 10, f"{len(ERRORS)} of {len(CELLS)}"

"""MCDropout on networks of transformers, timm and torchvision: as uncertain as the same network in training mode."""

import pytest
import torch

import dissensus as ds

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
timm = pytest.importorskip("timm", reason="timm is not installed")
torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3,
    "initializer_range": 0.3,
}  # fmt: skip
IDS = torch.randint(1, 50, (4, 7), generator=torch.Generator().manual_seed(0))
TOKENS = {"input_ids": IDS, "attention_mask": (torch.arange(7) < torch.tensor([3, 7, 5, 7])[:, None]).long()}
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def bert(attention="sdpa", **rates):
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **SIZES, **rates)
    return transformers.BertForSequenceClassification._from_config(config, attn_implementation=attention)


def vit(**rates):
    config = transformers.ViTConfig(image_size=16, patch_size=8, **SIZES, **rates)
    return transformers.ViTForImageClassification(config)


def timm_vit(**rates):
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    network = timm.create_model("vit_tiny_patch16_224", **sizes, **rates)
    torch.nn.init.normal_(network.head.weight)
    return network


class Branch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.layer, self.head = torch.nn.Linear(768, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
        self.path = torchvision.ops.StochasticDepth(0.4, "row")

    def forward(self, x):
        x = self.stem(x.flatten(1))
        return self.head(x + self.path(self.layer(x)))


ONLY_ATTENTION = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.3}
CASES = {
    "bert": (bert, TOKENS, 10),  # both rates are 0.1
    "bert attention": (lambda: bert(**ONLY_ATTENTION), TOKENS, 4),
    "bert attention, eager": (lambda: bert("eager", **ONLY_ATTENTION), TOKENS, 4),
    "vit attention": (lambda: vit(**ONLY_ATTENTION), IMAGES, 2),
    "timm attention": (lambda: timm_vit(attn_drop_rate=0.3), IMAGES, 4),
    "timm drop path": (lambda: timm_vit(drop_path_rate=0.4), IMAGES, 2),
    "torchvision": (Branch, IMAGES, 1),
}


def in_training_mode(network, x, samples):
    """Epistemic uncertainty (B,) over passes of the network in training mode."""
    rows = (
        {name: each.repeat(samples, 1) for name, each in x.items()}
        if isinstance(x, dict)
        else x.repeat(samples, 1, 1, 1)
    )
    with torch.no_grad():
        outputs = network.train()(**rows).logits if isinstance(rows, dict) else network.train()(rows)
    outputs = getattr(outputs, "logits", outputs).unflatten(0, (samples, -1)).double()
    each = torch.distributions.Categorical(logits=outputs)
    return torch.distributions.Categorical(probs=each.probs.mean(0)).entropy() - each.entropy().mean(0)


@pytest.mark.parametrize(("build", "x", "sites"), CASES.values(), ids=CASES)
def test_predictions_are_as_uncertain_as_the_network_in_training_mode(build, x, sites):
    torch.manual_seed(0)
    network, samples = build(), 1000
    posterior = ds.MCDropout(network, samples=samples)
    assert len(posterior.sites) == sites
    wanted = in_training_mode(network, x, samples)
    with torch.no_grad():
        found = posterior.eval().predict(x).epistemic.double()
    assert float(wanted.min()) > 0
    torch.testing.assert_close(found.mean(), wanted.mean(), rtol=0.12, atol=0)
    torch.testing.assert_close(found, wanted, rtol=0.3, atol=0)


def test_models_whose_rates_are_zero_need_a_rate():
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=1, pad_token_id=0, **SIZES)
    network = transformers.LlamaForSequenceClassification(config)
    with pytest.raises(
        ValueError, match=r"expected a network that drops at a positive rate, got none; .* or pass rate="
    ):
        ds.MCDropout(network)
    assert float(ds.MCDropout(network, rate=0.1, samples=5).eval().predict({"input_ids": IDS}).epistemic.min()) > 0

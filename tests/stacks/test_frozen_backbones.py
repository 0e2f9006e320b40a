"""Heads on a timm backbone and on a BERT without a head: cached features train as the inputs do."""

import copy

import pytest
import torch
from torch import nn

import dissensus as ds


def timm_case():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    backbone = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_classes=0)
    return backbone, torch.randn(12, 3, 32, 32), 24


class Pooled(nn.Module):
    """The first token's last hidden state."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs).last_hidden_state[:, 0]


def bert_case():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    ids = torch.randint(0, 50, (12, 8))
    return Pooled(transformers.BertModel(config)), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 16


@pytest.mark.parametrize("case", [timm_case, bert_case])
def test_heads_train_on_cached_features_as_on_inputs(case):
    backbone, x, width = case()
    y = torch.arange(12) % 3
    posterior = ds.heads(backbone, lambda: nn.Linear(width, 3), members=3)
    own = posterior.particles.own
    assert {name for name, _ in (*own.named_parameters(), *own.named_buffers())} == {
        "network.head.weight",
        "network.head.bias",
    }
    other = copy.deepcopy(posterior)
    for each, data in ((posterior, (x, y)), (other, ds.cache_features(backbone, (x, y)))):
        torch.manual_seed(0)
        ds.fit(each, data, epochs=3, progress=False)
    expected, found = posterior.predict(x).member_means, other.predict(x).member_means
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)

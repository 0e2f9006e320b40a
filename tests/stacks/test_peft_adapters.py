"""Ensembles of peft's LoRA adapters on one transformers model: equal to loops over copies, with one base."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import dissensus as ds
from adapters import storage_bytes
from refusals import refuses
from test_readme import python_blocks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

WIDE = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 2000}


def small_bert(**sizes):
    torch.manual_seed(0)
    given = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 50, **sizes}
    config = transformers.BertConfig(
        num_hidden_layers=2, num_attention_heads=2, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=32, **given
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def with_lora(base):
    targets = ["query", "value"]
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=targets)
    network = peft.get_peft_model(base, lora)
    network.base_model.model.classifier.modules_to_save["default"].reset_parameters()  # peft's copy of the base's head
    return network


def batch():
    ids = torch.randint(0, 50, (6, 8))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.arange(6) % 3


@pytest.mark.parametrize("clip", [0.05, None])
def test_lora_ensembles_equal_loops_over_copies(clip):
    base, (x, y) = small_bert(), batch()
    torch.manual_seed(1)
    posterior = ds.DeepEnsemble(with_lora, members=3, base=base)
    torch.manual_seed(1)
    alone = [with_lora(copy.deepcopy(base)) for _ in range(3)]
    trained = [p for p in posterior.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=0.01)
    ds.fit(posterior, [(x, y)] * 5, epochs=1, optimizer=optimiser, clip=clip, progress=False)
    for network in alone:
        mine = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=0.01)
        for _ in range(5):
            mine.zero_grad()
            nn.functional.cross_entropy(network.train()(**x).logits, y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(network.parameters(), clip)
            mine.step()
    with torch.no_grad():
        expected = torch.stack([network.eval()(**x).logits.softmax(-1) for network in alone])
    found = posterior.eval().predict(x).member_means
    assert (found[0] - found[1]).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_one_base_in_memory_and_none_in_the_file(tmp_path):
    base, (x, y) = small_bert(**WIDE), batch()
    posterior = ds.DeepEnsemble(with_lora, members=5, base=base)
    assert type(base.bert.encoder.layer[0].attention.self.query) is nn.Linear  # as it was
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    mean = posterior.eval().predict(x).mean
    assert storage_bytes(base, posterior) <= 1.1 * storage_bytes(base)
    ds.save(posterior, tmp_path / "whole")
    ds.save(posterior, tmp_path / "adapters", base="omit")
    whole, adapters = ((tmp_path / name / "posterior.safetensors").stat().st_size for name in ("whole", "adapters"))
    assert whole <= 1.1 * storage_bytes(base)
    assert adapters <= 0.1 * storage_bytes(base)
    loaded = ds.load(tmp_path / "adapters", with_lora, base=base)
    assert torch.equal(loaded.predict(x).mean, mean)
    assert storage_bytes(base, posterior, loaded) <= 1.15 * storage_bytes(base)
    other = small_bert(**WIDE)
    other.bert.embeddings.word_embeddings.weight.data[3] += 1
    refuses(
        lambda: ds.load(tmp_path / "adapters", with_lora, base=other), "with checksum [0-9a-f]{64}, got [0-9a-f]{64};"
    )


def test_a_draw_of_adapters_holds_the_base():
    base, (x, y) = small_bert(**WIDE), batch()
    size = storage_bytes(base)
    posterior = ds.SWAG(with_lora(base), samples=3, rank=3)
    ds.fit(posterior, [(x, y)] * 4, epochs=1, progress=False)
    posterior.eval().predict(x)
    assert storage_bytes(posterior) <= 1.2 * size


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    blocks = python_blocks((Path(__file__).parents[2] / "docs/guides/adapters.md").read_text())
    assert len(blocks) == 3
    for _, code in blocks:
        exec(code, names)

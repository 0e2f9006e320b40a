"""Token models of transformers: training and prediction equal a loop of copies with the models' own losses."""

import copy
import math
import re

import pytest
import torch

import dissensus as ds
from test_readme import ROOT, python_blocks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {"vocab_size": 19, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "vocab_size": 19,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def bert():
    return transformers.BertForTokenClassification(transformers.BertConfig(**SMALL, **NO_DROPOUT, num_labels=5))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


def batches(causal):
    """Batches of several lengths, padded on the right; labels are the input_ids of a language model, or tags."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in (5, 9, 7):
        ids = torch.randint(1, 19, (4, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        labels = torch.where(mask > 0, ids if causal else ids % 5, -100)
        found.append(({"input_ids": ids, "attention_mask": mask}, labels))
    return found


@pytest.mark.parametrize(("network", "causal"), [(bert, False), (gpt2, True)], ids=["bert", "gpt2"])
def test_an_ensemble_equals_a_loop_of_copies(network, causal):
    torch.manual_seed(0)
    networks, loader = [network() for _ in range(3)], batches(causal)
    copies = [copy.deepcopy(each).train() for each in networks]
    posterior = ds.DeepEnsemble(networks, likelihood=ds.Tokens(shift=causal))
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
    ds.fit(posterior, loader, optimizer=optimizer, epochs=2, progress=False)
    sums = torch.zeros(3, 12, dtype=torch.float64)
    for member, each in enumerate(copies):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for x, y in loader * 2:
            optimizer.zero_grad()
            each(**x, labels=y).loss.backward()  # the model's own loss, with its own shift
            optimizer.step()
        each.eval()
        for i, (x, y) in enumerate(loader):
            with torch.no_grad():
                logits, predicted = each(**x).logits, posterior.predict(x)
            kept = x["attention_mask"].bool()
            difference = (predicted.log_probs[member] - logits.log_softmax(-1))[kept].abs().max()
            assert float(difference) < 1e-6
            rows, labels = (logits[:, :-1], y[:, 1:]) if causal else (logits, y)
            log_prob = -torch.nn.functional.cross_entropy(rows.mT.double(), labels, ignore_index=-100, reduction="none")
            sums[member, 4 * i : 4 * i + 4] = log_prob.sum(1)
    found = ds.predict(posterior, loader)
    joint = found.sequence().log_prob(found.targets).double()
    torch.testing.assert_close(joint, sums.logsumexp(0) - math.log(3), rtol=1e-5, atol=1e-5)
    metrics = ds.evaluate(posterior, loader, progress=False).metrics
    counted = found.log_prob(found.targets)[found.log_prob(found.targets) != 0]
    assert metrics["perplexity"] == pytest.approx(math.exp(-float(counted.double().mean())), rel=1e-5)


def test_fit_validates_and_calibrates_on_several_lengths():
    posterior, loader = ds.MCDropout(gpt2_with_dropout(), samples=3, likelihood=ds.Tokens(shift=True)), batches(True)
    ds.fit(posterior, loader, validation=loader, epochs=1, progress=False)
    assert ds.calibrate(posterior, loader).rows == sum(int((y[:, 1:] != -100).sum()) for _, y in loader)
    summary = ds.summarise(posterior, loader)
    assert summary.mean.shape == (12, 9, 19)
    assert summary.targets.shape == (12, 9)


def gpt2_with_dropout():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | {"resid_pdrop": 0.1}))


def test_the_page_on_text_runs_with_transformers():
    page = ROOT / "docs" / "guides" / "text.md"
    names: dict[str, object] = {"__name__": "__main__"}
    for line, code in python_blocks(page.read_text()):
        exec(compile("\n" * (line - 1) + re.sub(r"\bepochs=\d+", "epochs=1", code), str(page), "exec"), names)
    assert type(names["bert"]).__module__.startswith("transformers")

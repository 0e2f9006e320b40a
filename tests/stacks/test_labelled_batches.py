"""Batches of transformers' tokenisers and collators: labels inside, outputs as tuples, several labels, a regression."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dissensus as ds
from refusals import refuses

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import BatchEncoding, BertConfig, BertForSequenceClassification, default_data_collator

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


def bert(seed: int = 0, **settings: Any) -> nn.Module:
    torch.manual_seed(seed)
    config = BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings)
    return BertForSequenceClassification(config)  # type: ignore[no-any-return]


def sentences(y: Tensor, *, lengths: tuple[int, ...] = (5, 7, 4)) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Batches ({input_ids, attention_mask}, y) of as many rows each, padded to their own lengths."""
    torch.manual_seed(1)
    parts = zip(lengths, y.chunk(len(lengths)), strict=True)
    return [({"input_ids": (ids := torch.randint(1, 40, (len(y), n))), "attention_mask": ids > 3}, y) for n, y in parts]


def results(loader: Any, x: Any, targets: Tensor, *, likelihood: ds.Likelihood, **settings: Any) -> list[Tensor]:
    posterior = ds.DeepEnsemble([bert(seed, **settings) for seed in range(2)], likelihood=likelihood)
    history = ds.fit(posterior, loader, epochs=2, progress=False)
    found = [torch.tensor([each.loss for each in history.epochs]), ds.predict(posterior, loader).mean]
    measured = ds.evaluate(posterior, loader, progress=False).metrics
    found.append(torch.tensor([value for key, value in measured.items() if "cost" not in key]))
    found.append(torch.tensor(ds.calibrate(posterior, loader).temperature))
    return [*found, posterior.predict(x).log_prob(targets)]


CLASSES = torch.arange(12) % 3
CASES = {
    "classes": (CLASSES, ds.Classification, {"num_labels": 3}),
    "tuples": (CLASSES, ds.Classification, {"num_labels": 3, "return_dict": False}),
    "hidden states": (
        CLASSES,
        ds.Classification,
        {"num_labels": 3, "return_dict": False, "output_hidden_states": True},
    ),
    "several": (torch.eye(3)[CLASSES], ds.MultiLabel, {"num_labels": 3, "problem_type": "multi_label_classification"}),
    "regression": (torch.linspace(-1, 1, 12), ds.Regression, {"num_labels": 1, "problem_type": "regression"}),
}


@pytest.mark.parametrize("case", CASES)
def test_labels_inside_a_batch_give_what_pairs_give(case):
    y, likelihood, settings = CASES[case]
    pairs = sentences(y)
    inside = [BatchEncoding({**x, "labels": y}) for x, y in pairs]
    expected = results(pairs, *pairs[0], likelihood=likelihood(), **settings)
    found = results(inside, inside[0], pairs[0][1], likelihood=likelihood(), **settings)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert bool(expected[0].isfinite().all())


@pytest.mark.parametrize("case", ["classes", "several", "regression"])
def test_the_loss_is_the_models_own(case):
    """BERT's own loss for one batch: a mean over rows, and over labels for several; a regression's is (y − f)²."""
    y, likelihood, settings = CASES[case]
    made = likelihood(noise=1.0) if case == "regression" else likelihood()
    network = bert(**settings).eval()
    x, y = sentences(y, lengths=(6,))[0]
    theirs = network(**x, labels=y).loss
    ours = ds.MAP(network, likelihood=made).eval().loss(x, y)
    if case == "several":
        ours = ours / 3
    if case == "regression":
        ours = 2 * ours - torch.log(torch.tensor(2 * torch.pi))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_collator_and_other_names():
    rows = [{"input_ids": [1 + i, 2, 3], "label": i % 3} for i in range(6)]
    loader = torch.utils.data.DataLoader(rows, batch_size=3, collate_fn=default_data_collator)
    posterior = ds.MAP(bert(num_labels=3))
    expected = ds.predict(posterior, [({"input_ids": b["input_ids"]}, b["labels"]) for b in loader])
    renamed = [{"input_ids": b["input_ids"], "stars": b["labels"]} for b in loader]
    for given in (loader, ds.Loader(renamed, labels="stars")):
        found = ds.predict(posterior, given)
        assert torch.equal(found.mean, expected.mean)
        assert torch.equal(found.targets, expected.targets)
    refuses(lambda: ds.predict(posterior, renamed), r"got 'input_ids', 'stars'; pass ds.Loader\(", TypeError)

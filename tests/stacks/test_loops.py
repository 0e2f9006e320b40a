"""Loops of Trainer, Lightning and Accelerate train posteriors as loops of copies do, and methods record them."""

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dissensus as ds
from test_readme import python_blocks

M, ROWS, BATCH, STEPS, LR, CLIP = 3, 40, 8, 10, 0.05, 0.2
WATCHED = [functools.partial(ds.SWAG, rank=3, samples=4), functools.partial(ds.TRADI, samples=4)]


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 4, generator=generator)
    return x, (3 * torch.rand(ROWS, generator=generator)).long()


def batches(*tensors):
    return [tuple(each[i : i + BATCH] for each in tensors) for i in range(0, ROWS, BATCH)] * (STEPS * BATCH // ROWS)


def train_copy(network, loss, steps, *, clip=CLIP):
    """The network after plain training, one step per group of `steps`."""
    network = copy.deepcopy(network).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=0.9)
    for group in steps:
        optimizer.zero_grad()
        for batch in group:
            (loss(network, *batch) / len(group)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
    return network


def distance(posterior, copies):
    """Largest difference of a weight between members and copies."""
    pairs = [
        (p, q)
        for i, each in enumerate(copies)
        for p, q in zip(posterior.member(i).parameters(), each.parameters(), strict=True)
    ]
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def plain_loss(network, x, y):
    return cross_entropy(network(x), y)


# ------------------------------------------------------------------------------------------------------ transformers
@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A function that runs transformers' Trainer on a model."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="Accelerate is not installed")

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def run(model, rows, *, accumulate=1, **keywords):
        settings = {"per_device_train_batch_size": BATCH // accumulate, "learning_rate": LR, "report_to": [], "seed": 0}
        args = transformers.TrainingArguments(
            str(tmp_path_factory.mktemp("trainer")), max_steps=STEPS, optim="sgd", optim_args="momentum=0.9",
            lr_scheduler_type="constant", save_strategy="no", use_cpu=True, disable_tqdm=True, max_grad_norm=CLIP,
            gradient_accumulation_steps=accumulate, logging_steps=STEPS, **settings,
        )  # fmt: skip
        made = InOrder(model, args, train_dataset=rows, eval_dataset=rows, **keywords)
        made.train()
        assert args.max_grad_norm == CLIP
        return made

    return run


@pytest.fixture(scope="module")
def bert():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def build(seed):
        torch.manual_seed(seed)
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)

    return build


@pytest.fixture(scope="module")
def rows():
    ids = torch.randint(0, 50, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    every, mask = zip(ids, data()[1], strict=True), torch.ones(6).long()
    # The network does not take "row", and Trainer drops it.
    return [{"input_ids": x, "attention_mask": mask, "labels": int(y), "row": i} for i, (x, y) in enumerate(every)]


def bert_groups(rows, accumulate=1):
    found = [[(row["input_ids"], row["attention_mask"], torch.tensor(row["labels"])) for row in rows]]
    ids, mask, labels = (torch.stack(each) for each in zip(*found[0], strict=True))
    size = BATCH // accumulate
    return [
        [tuple(each[i + j : i + j + size] for each in (ids, mask, labels)) for j in range(0, BATCH, size)]
        for i in range(0, ROWS, BATCH)
    ] * (STEPS * BATCH // ROWS)


def bert_loss(network, ids, mask, labels):
    return network(input_ids=ids, attention_mask=mask, labels=labels).loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_posterior_in_trainer_equals_a_loop_of_copies(trainer, bert, rows, accumulate):
    from dissensus.integrations import hf

    networks = [bert(i) for i in range(M)]
    posterior = ds.DeepEnsemble(networks)
    made = trainer(hf.model(posterior), rows, accumulate=accumulate, callbacks=[hf.Watch()])
    copies = [train_copy(network, bert_loss, bert_groups(rows, accumulate)) for network in networks]
    assert distance(posterior, copies) <= 1e-6
    assert distance(posterior, [train_copy(networks[0], bert_loss, bert_groups(rows), clip=None)]) > 1e-3
    assert int(posterior.steps) == STEPS
    found = made.evaluate()
    ids, mask, _ = bert_groups(rows)[0][0]
    predicted = made.predict(rows).predictions
    mixture = torch.stack([each.eval()(ids, attention_mask=mask).logits.softmax(-1) for each in copies]).mean(0)
    assert predicted.shape == (ROWS, 3)
    torch.testing.assert_close(torch.tensor(predicted[:BATCH]), mixture.log(), atol=1e-5, rtol=0)
    assert 0 < found["eval_loss"] < 3


def test_methods_in_trainer_equal_those_in_a_plain_loop(trainer, bert, rows, tmp_path):
    from dissensus.integrations import hf

    network, by_hand = bert(0), bert(0)
    watch = hf.Watch(WATCHED)
    trainer(network, rows, callbacks=[watch])
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=LR, momentum=0.9)
    by_hand.train()
    with ds.watching(by_hand, optimizer, WATCHED, steps=STEPS) as watched:
        for ((*inputs, labels),) in bert_groups(rows):
            optimizer.zero_grad()
            bert_loss(by_hand, *inputs, labels).backward()
            torch.nn.utils.clip_grad_norm_(by_hand.parameters(), CLIP)
            optimizer.step()
    for theirs, ours in zip(watch.posteriors, watched, strict=True):
        for name, mean in ours.mean.items():
            torch.testing.assert_close(theirs.mean[name], mean, atol=1e-6, rtol=0)
            torch.testing.assert_close(theirs.variance[name], ours.variance[name], atol=1e-6, rtol=0)
    x = {"input_ids": inputs[0], "attention_mask": inputs[1]}
    assert watch.posteriors[0].predict(x).member_means.shape == (4, BATCH, 3)
    ds.save(watch.posteriors[0], tmp_path / "swag")
    again = ds.load(tmp_path / "swag", network=bert(1))  # which no trainer has seen
    assert torch.equal(again.predict(x).mean, watch.posteriors[0].predict(x).mean)


def test_a_posterior_without_the_callback_is_refused(trainer, bert, rows):
    from dissensus.integrations import hf

    with pytest.raises(ValueError, match="expected labels, and a Watch among Trainer's callbacks, got none; pass"):
        trainer(hf.model(ds.DeepEnsemble([bert(0), bert(1)])), rows)


# --------------------------------------------------------------------------------------------------------- Lightning
@pytest.fixture(scope="module")
def lightning():
    return pytest.importorskip("lightning.pytorch", reason="lightning is not installed")


def build_module(lightning, **parts):
    """A LightningModule whose loss is that of its posterior, if it has one, or of its network."""

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.scores = []
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            return self.posterior.loss(*batch) if hasattr(self, "posterior") else plain_loss(self, *batch)

        def validation_step(self, batch, _):
            if hasattr(self, "posterior"):
                self.scores.append(self.posterior.predict(batch[0]).log_prob(batch[1]).mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)

    return Module()


def fit_lightning(lightning, module, watch, tmp_path, **keywords):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=BATCH)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=STEPS * BATCH // ROWS, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path, callbacks=[watch], **keywords,
    )  # fmt: skip
    trainer.fit(module, loader, loader)
    return trainer


@pytest.mark.parametrize("accumulate", [1, 5])
def test_a_posterior_in_a_lightning_module_equals_a_loop_of_copies(lightning, accumulate, tmp_path):
    from dissensus.integrations.lightning import Watch

    networks = [mlp() for _ in range(M)]
    posterior = ds.DeepEnsemble(networks)
    settings = {"gradient_clip_val": CLIP, "accumulate_grad_batches": accumulate}
    trainer = fit_lightning(lightning, build_module(lightning, posterior=posterior), Watch(), tmp_path, **settings)
    every = batches(*data())
    groups = [every[i : i + accumulate] for i in range(0, STEPS, accumulate)]
    assert distance(posterior, [train_copy(each, plain_loss, groups) for each in networks]) <= 1e-6
    assert distance(posterior, [train_copy(networks[0], plain_loss, groups, clip=None)]) > 1e-4
    assert int(posterior.steps) == len(groups)
    assert trainer.gradient_clip_val == CLIP


def record_by_hand(network, forward):
    optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=0.9)
    with ds.watching(network, optimizer, WATCHED, steps=STEPS) as watched:
        for x, y in batches(*data()):
            optimizer.zero_grad()
            forward(network, x, y).backward()
            optimizer.step()
    return watched


@pytest.mark.parametrize("name", ["net", ""])
def test_methods_of_a_lightning_module_equal_those_of_a_plain_loop(lightning, name, tmp_path):
    from dissensus.integrations.lightning import Watch

    network = mlp()
    watched = record_by_hand(copy.deepcopy(network), plain_loss)
    module = build_module(lightning, net=network)
    watch = Watch(WATCHED, network=name)
    fit_lightning(lightning, module, watch, tmp_path)
    for theirs, ours in zip(watch.posteriors, watched, strict=True):
        for key, mean in ours.mean.items():
            found = theirs.mean[key if name else f"net.{key}"]
            torch.testing.assert_close(found, mean, atol=1e-6, rtol=0)
        ds.save(theirs, tmp_path / theirs.name)
        again = ds.load(tmp_path / theirs.name, network=mlp() if name else build_module(lightning, net=mlp()))
        assert torch.equal(again.predict(data()[0]).member_means, theirs.predict(data()[0]).member_means)


def test_a_recorder_in_a_lightning_module_is_validated_before_its_first_snapshot(lightning, tmp_path):
    from dissensus.integrations.lightning import Watch

    posterior = ds.SWAG(mlp(), rank=3, samples=4)
    module = build_module(lightning, posterior=posterior)
    with torch.no_grad():
        before = [-cross_entropy(posterior.network(x), y) for x, y in batches(*data())[:2]]
    fit_lightning(lightning, module, Watch(), tmp_path)
    torch.testing.assert_close(torch.stack(module.scores[:2]), torch.stack(before))  # the sanity check
    assert len(module.scores) == 2 + STEPS
    assert posterior.stored is not None


def test_methods_of_a_lightning_module_train_with_fit(lightning):
    module = build_module(lightning, net=mlp())
    for method in (*WATCHED, ds.MAP):
        posterior = method(copy.deepcopy(module))
        ds.fit(posterior, batches(*data()), epochs=1, progress=False)
        assert posterior.predict(data()[0]).mean.shape == (ROWS, 3)


# -------------------------------------------------------------------------------------------------------- Accelerate
@pytest.mark.parametrize("accumulate", [1, 5])
def test_accelerate_equals_a_loop_of_copies(accumulate):
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    networks = [mlp() for _ in range(M)]
    posterior = ds.DeepEnsemble(networks)
    optimizer = accelerator.prepare(torch.optim.SGD(posterior.parameters(), lr=LR, momentum=0.9))
    every = batches(*data())
    with ds.watching(posterior, optimizer, WATCHED, steps=STEPS // accumulate) as watched:
        for x, y in every:
            with accelerator.accumulate(posterior):
                accelerator.backward(posterior.loss(x, y))
                if accelerator.sync_gradients:
                    posterior.clip_grad_norm_(CLIP)
                optimizer.step()
                optimizer.zero_grad()
    groups = [every[i : i + accumulate] for i in range(0, STEPS, accumulate)]
    assert distance(posterior, [train_copy(each, plain_loss, groups) for each in networks]) <= 1e-6
    assert int(posterior.steps) == int(watched["tradi"].filters.observed) == len(groups)
    assert watched["swag"].predict(data()[0]).member_means.shape == (4 * M, ROWS, 3)


# ---------------------------------------------------------------------------------------------------------- the page
def test_the_page_runs_to_its_end(tmp_path, monkeypatch, lightning):
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    page = Path(__file__).parents[2] / "docs" / "guides" / "your-own-loop.md"
    for _, code in python_blocks(page.read_text()):
        exec(code, names)
    assert [type(each).__name__ for each in (names["swag"], names["tradi"])] == ["SWAG", "TRADI"]
    assert names["module"].posterior.stored is not None

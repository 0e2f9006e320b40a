"""Tokens: logits (B, T, C), ignored labels, shifted labels, several lengths in one loader, and many classes."""

import copy
import itertools
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods.parts.repulsion import selected_output
from dissensus.training.validation import validation_nll
from refusals import refuses

F64, CLASSES = torch.float64, 5


class Tagger(nn.Module):
    """A stand-in for a transformer: words (B, T) to logits (B, T, C), every position with the mean of those before it."""

    def __init__(self, words: int = 5, classes: int = CLASSES, width: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, classes)

    def forward(self, input_ids, attention_mask=None):
        seen = self.embed(input_ids)
        return self.head(torch.tanh(seen.cumsum(1) / torch.arange(1, seen.shape[1] + 1, dtype=seen.dtype)[:, None]))


def sentences(length: int, n: int = 4):
    """(words, labels), of which the last ones of some sentences are padding; T = C = 5 is one of the lengths."""
    steps = torch.randint(1, 3, (n, length), generator=torch.Generator().manual_seed(length))
    words = steps.cumsum(1) % 5
    labels = words.clone()
    labels[: n // 2, -1] = -100
    return words, labels


LOADER = [sentences(length) for length in (5, 3, 7)]


def ensemble(members: int = 3, **settings):
    torch.manual_seed(0)
    return ds.DeepEnsemble([Tagger().double() for _ in range(members)], likelihood=ds.Tokens(**settings))


def aligned(network, x, y, shift):
    """(logits, labels) as Hugging Face's models pair them."""
    return (network(x)[:, :-1], y[:, 1:]) if shift else (network(x), y)


@torch.no_grad()
def rows_by_hand(posterior, shift):
    """Log-probabilities (M, n, C) and labels (n,) of all tokens that count, in the loader's order."""
    pairs = [[aligned(posterior.member(m), *batch, shift) for batch in LOADER] for m in range(3)]
    members = [torch.cat([logits[labels != -100] for logits, labels in each]).log_softmax(-1) for each in pairs]
    return torch.stack(members), torch.cat([labels[labels != -100] for _, labels in pairs[0]])


@pytest.mark.parametrize("shift", [False, True])
def test_training_equals_a_loop_of_copies(shift):
    """The loss as Hugging Face's models compute it."""
    posterior = ensemble(shift=shift)
    copies = [copy.deepcopy(posterior.member(m)) for m in range(3)]
    ds.fit(posterior, LOADER, optimizer=torch.optim.SGD(posterior.parameters(), lr=0.5), epochs=2, progress=False)
    for member, network in enumerate(copies):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        for x, y in LOADER * 2:
            logits, labels = aligned(network, x, y, shift)
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
            optimizer.step()
        for x, _ in LOADER:
            mine = posterior.predict(x).log_probs[member]
            torch.testing.assert_close(mine, network(x).log_softmax(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shift", [False, True])
def test_predictions_of_several_lengths_are_padded(shift):
    posterior = ensemble(shift=shift)
    found = ds.predict(posterior, LOADER)
    assert found.mean.shape == (12, 7, CLASSES)
    assert found.targets.shape == found.total.shape == found.epistemic.shape == (12, 7)
    assert found.targets[4:8, 3:].eq(-100).all()
    assert found[4:8].total[:, 3:].sub(math.log(CLASSES)).abs().max() < 1e-12  # nothing is known of added positions
    log_prob = found.log_prob(found.targets)
    by_hand, labels = rows_by_hand(posterior, shift)
    mixture = (by_hand.logsumexp(0) - math.log(3)).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(log_prob[log_prob != 0], mixture, rtol=0, atol=1e-12)
    summary = ds.summarise(posterior, LOADER)
    assert torch.equal(summary.targets, found.targets)
    for name in ("mean", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(summary, name), getattr(found, name), rtol=0, atol=1e-12)
    torch.testing.assert_close(summary.log_prob(found.targets), log_prob, rtol=0, atol=1e-12)
    assert validation_nll(posterior, LOADER) == pytest.approx(-float(mixture.mean()), abs=1e-12)


@pytest.mark.parametrize("shift", [False, True])
def test_evaluate_gives_the_metrics_of_the_tokens_that_count(shift):
    posterior = ensemble(shift=shift)
    by_hand, y = rows_by_hand(posterior, shift)
    log_mean = by_hand.logsumexp(0) - math.log(3)
    found = ds.evaluate(posterior, LOADER, shift={"same": LOADER}, classes=list("abcde"), progress=False)
    wanted = {
        "nll": ds.metrics.nll(log_mean, y),
        "perplexity": ds.metrics.nll(log_mean, y).exp(),
        "shift/same/perplexity": ds.metrics.nll(log_mean, y).exp(),
        "accuracy": ds.metrics.accuracy(log_mean.exp(), y),
        "ece": ds.metrics.ece(log_mean.exp(), y),
        "brier": ds.metrics.brier(log_mean.exp(), y),
        "miou": ds.metrics.miou(log_mean.exp(), y),
        "members/nll": ds.metrics.ensemble_gain(by_hand, y).member_nll,
        "members/disagreement": ds.metrics.disagreement(by_hand),
    }
    for name, value in wanted.items():
        assert found.metrics[name] == pytest.approx(float(value), abs=1e-12), name
    assert found.kind == "tokens"
    assert found.arrays["test/nll"].shape == (12,)
    refuses(lambda: ds.evaluate(posterior, LOADER, ood={"other": LOADER}, progress=False), "expected no ood=")


def test_many_classes_are_counted_in_pieces(monkeypatch):
    """Without a confusion matrix, and with some tokens at a time, the numbers are the same."""
    posterior = ensemble()
    whole = ds.evaluate(posterior, LOADER, progress=False)
    monkeypatch.setattr("dissensus.evaluation.segmentation.MOST_CLASSES", 4)
    monkeypatch.setattr("dissensus.evaluation.segmentation.NUMBERS", 2 * 3 * CLASSES)
    pieces = ds.evaluate(posterior, LOADER, progress=False)
    assert {*whole.metrics} - {*pieces.metrics} == {"miou", *(f"iou/{c}" for c in range(CLASSES))}
    for name in ("nll", "perplexity", "ece", "accuracy", "brier", "aurc", "members/disagreement"):
        assert pieces.metrics[name] == pytest.approx(whole.metrics[name], abs=1e-12), name
    for name in ("test/nll", "test/correct"):
        torch.testing.assert_close(pieces.arrays[name], whole.arrays[name], rtol=0, atol=1e-12)


MEMORY = """
import resource, torch, dissensus as ds
from test_token_likelihood import Tagger
C = 32_000
posterior = ds.DeepEnsemble([Tagger(C, C) for _ in range(2)], likelihood=ds.Tokens(shift=True))
x = torch.randint(C, (4, 512))
ds.evaluate(posterior, [(x[:1, :4], x[:1, :4])], progress=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = ds.evaluate(posterior, [(x, x)], progress=False)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_a_vocabulary_of_32000_is_evaluated_in_two_gigabytes():
    """2048 tokens, two members: their log-probabilities alone are 0.5 GB, a confusion matrix would be 8 GB."""
    folders = [os.path.dirname(__file__), *sys.path]
    run = subprocess.run(
        [sys.executable, "-c", MEMORY], env={**os.environ, "PYTHONPATH": ":".join(folders)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 2 * 10**9


@pytest.mark.parametrize("shift", [False, True])
def test_a_sequence_has_a_joint_and_a_mean_log_probability(shift):
    x, y = LOADER[0]
    posterior = ensemble(shift=shift)
    found, mask = posterior.predict(x), y != -100
    pairs = [aligned(posterior.member(m), x, y, shift) for m in range(3)]
    each = torch.stack([-F.cross_entropy(f.mT, k, ignore_index=-100, reduction="none") for f, k in pairs])  # (M, B, T)
    counted = (y[:, 1:] if shift else y) != -100
    joint = torch.log(each.sum(2).exp().mean(0))
    sequence = found.sequence(mask)
    torch.testing.assert_close(sequence.log_prob(y), joint, rtol=0, atol=1e-12)
    assert torch.equal(sequence.log_prob(torch.where(mask, y, 3)), sequence.log_prob(y))  # masked labels do not count
    mean = (each.exp().mean(0).log() * counted).sum(1) / counted.sum(1)
    torch.testing.assert_close(sequence.mean_log_prob(y), mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(sequence.epistemic[0], found.epistemic[0, mask[0]].mean(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.sequence().total, found.total.mean(1), rtol=0, atol=1e-12)
    refuses(lambda: found.sequence(mask[:, :2]), r"expected a mask of shape \(4, 5\)")
    refuses(lambda: ds.summarise(posterior, [(x, y)]).sequence().log_prob(y), "got a summary", TypeError)


def test_a_temperature_is_that_of_the_tokens_that_count():
    posterior = ensemble(shift=True)
    ds.fit(posterior, LOADER, optimizer=torch.optim.SGD(posterior.parameters(), lr=0.5), epochs=12, progress=False)
    rows = copy.deepcopy(posterior)
    assert ds.calibrate(posterior, LOADER).rows == sum(int((y[:, 1:] != -100).sum()) for _, y in LOADER)
    by_hand, labels = rows_by_hand(rows, True)

    def nll(temperature):
        return -float((by_hand / temperature).softmax(2).mean(0).log().gather(1, labels[:, None]).mean())

    best = float(posterior.temperature)
    assert nll(best) <= min(nll(best * 1.01), nll(best / 1.01))
    refuses(lambda: ds.calibrate(posterior, LOADER, "vector"), "expected method")
    weighted = [(x, y, torch.full((len(y),), 2.0)) for x, y in LOADER]
    assert ds.temperature_scale(rows, weighted) == pytest.approx(best, rel=1e-4)


def test_weights_and_class_weights_count_as_in_rows_of_tokens():
    x, y = LOADER[2]
    weights, each = [1.0, 2.0, 3.0, 4.0, 5.0], torch.tensor([1.0, 0.0, 2.0, 3.0], dtype=F64)
    likelihood = ds.Tokens(shift=True, class_weights=weights)
    logits = Tagger().double()(x)
    rows, labels = logits[:, :-1].flatten(0, 1), y[:, 1:].flatten()
    loss = F.cross_entropy(rows, labels, weight=torch.tensor(weights, dtype=F64), ignore_index=-100)
    torch.testing.assert_close(likelihood.nll(logits, y), loss, rtol=0, atol=1e-12)
    by_token = ds.Classification(-100, class_weights=weights).nll(rows, labels, each.repeat_interleave(6))
    torch.testing.assert_close(likelihood.nll(logits, y, each), by_token, rtol=0, atol=1e-12)


def test_curvature_is_the_hessian_at_every_position():
    logits, y = torch.randn(2, 3, 4, dtype=F64), torch.tensor([[0, 1, -100], [2, 3, 1]])
    likelihood = ds.Tokens(shift=True)
    hessian = torch.func.hessian(lambda f: -likelihood.log_prob(f, y).sum())(logits)
    a, u = likelihood.curvature(logits, y)
    for b in range(2):
        for t in range(3):
            whole = (torch.diag(a[b, t]) - torch.outer(u[b, t], u[b, t])) * likelihood.target_mask(y)[b, t]
            torch.testing.assert_close(hessian[b, t, :, b, t], whole, rtol=0, atol=1e-12)


def test_a_saved_posterior_of_tokens_predicts_the_same(tmp_path):
    posterior = ensemble(shift=True, ignore_index=0)
    ds.save(posterior, tmp_path / "tagger")
    loaded = ds.load(tmp_path / "tagger", Tagger().double())
    assert (loaded.likelihood.shift, loaded.likelihood.ignore_index) == (True, 0)
    x, _ = sentences(4)
    torch.testing.assert_close(loaded.predict(x).log_prob(x), posterior.predict(x).log_prob(x), rtol=0, atol=0)
    summary = ds.summarise(tmp_path / "tagger", [(a, a) for a, _ in LOADER], network=Tagger().double())
    assert summary.mean.shape == (12, 7, CLASSES)
    assert summary.targets[4, 3:].eq(0).all()


@pytest.mark.parametrize(("shape", "y", "message"), [
    ((2, 3, 5), torch.zeros(2, 4, dtype=torch.long), r"expected logits \(B, T, C\) and integer labels \(B, T\)"),
    ((2, 3, 5), torch.zeros(2, 3), "integer labels"),
    ((2, 5), torch.zeros(2, dtype=torch.long), "integer labels"),
    ((2, 3, 5), torch.full((2, 3), 5), "expected labels in 0…4, got 5"),
])  # fmt: skip
def test_targets_that_do_not_fit_are_refused(shape, y, message):
    refuses(lambda: ds.Tokens().check(torch.Size(shape), y), message)


def test_the_selected_logit_is_that_of_the_label():
    logits, y = torch.randn(2, 3, 4, dtype=F64), torch.tensor([[0, 1, -100], [2, 3, 1]])
    wanted = logits[0, 0, 1] + logits[1, 0, 3] + logits[1, 1, 1]
    torch.testing.assert_close(selected_output(ds.Tokens(shift=True), logits, y, "logit"), wanted, rtol=0, atol=1e-12)


def test_samples_and_credible_sets_are_per_token():
    found = ensemble().predict(LOADER[0][0])
    assert found.sample(2, generator=torch.Generator().manual_seed(0)).shape == (2, 4, 5)
    assert (torch.where(found.credible_set(0.5), found.mean, 0.0).sum(-1) >= 0.5).all()


def test_inputs_without_labels_are_predicted():
    posterior = ensemble()
    unlabelled = [(x, torch.zeros(len(x))) for x, _ in LOADER]
    assert torch.equal(ds.predict(posterior, unlabelled).mean, ds.predict(posterior, LOADER).mean)


# ---------------------------------------------------------------------------------------------- several classes at once
F64 = torch.float64


def labels(rows: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """x (N, 4), and y (N, 3) that depends on it, of both kinds in every column."""
    x = torch.randn(rows, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :3] + 0.3 * x[:, 1:] > 0).long()


def labelled_ensemble(members: int = 3) -> ds.DeepEnsemble:
    torch.manual_seed(0)
    return ds.DeepEnsemble([nn.Linear(4, 3).double() for _ in range(members)], likelihood=ds.MultiLabel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.int64])
def test_labels_are_independent_bernoulli(dtype):
    logits, y = 4 * torch.randn(20, 5, dtype=F64), torch.rand(20, 5) > 0.5
    likelihood = ds.MultiLabel()
    expected = D.Bernoulli(logits=logits).log_prob(y.double()).sum(1)
    torch.testing.assert_close(likelihood.log_prob(logits, y.to(dtype)), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(likelihood.nll(logits, y.to(dtype)), -expected.mean(), rtol=0, atol=1e-12)
    likelihood.check(logits.shape, y.to(dtype))
    closed, u = likelihood.curvature(logits)
    whole, _ = ds.Likelihood.curvature(likelihood, logits, y.to(dtype))  # by automatic differentiation, (B, L, L)
    assert u is None
    torch.testing.assert_close(torch.diag_embed(closed), whole, rtol=0, atol=1e-12)


def test_the_mixture_is_a_distribution_whose_moments_are_those_of_its_members():
    members = 2 * torch.randn(3, 7, 4, dtype=F64)
    predictive = ds.MultiLabel().predictive(members)
    every = torch.tensor([*itertools.product([0.0, 1.0], repeat=4)], dtype=F64)  # (16, L)
    p = torch.stack([predictive.log_prob(row.expand(7, 4)) for row in every]).exp()  # (16, B)
    torch.testing.assert_close(p.sum(0), torch.ones(7, dtype=F64), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.einsum("kb,kl->bl", p, every), predictive.mean, rtol=0, atol=1e-12)
    alone, mean = D.Bernoulli(logits=members), D.Bernoulli(predictive.mean)
    torch.testing.assert_close(predictive.aleatoric, alone.entropy().sum(2).mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(predictive.total, mean.entropy().sum(1), rtol=0, atol=1e-12)
    assert bool((predictive.epistemic > 0).all())
    likelier = torch.maximum(predictive.mean, 1 - predictive.mean)
    torch.testing.assert_close(predictive.confidence, likelier, rtol=0, atol=1e-12)
    drawn = predictive.sample(
        40_000, generator=torch.Generator().manual_seed(0)
    )  # rows keep one member's labels together
    pairs = torch.einsum("nbi,nbj->bij", drawn, drawn) / 40_000
    joint = torch.einsum("kb,ki,kj->bij", p, every, every)
    torch.testing.assert_close(pairs, joint, rtol=0, atol=4 * 0.5 / 200)
    for end, q in zip(predictive.interval(0.5), (0.25, 0.75), strict=True):
        torch.testing.assert_close(end, predictive.member_means.quantile(q, dim=0), rtol=0, atol=1e-12)
    sharp = ds.MultiLabelPredictive(torch.tensor([[[800.0, -800.0]]]))
    assert (float(sharp.log_prob(torch.tensor([[1, 0]]))), float(sharp.total)) == (0.0, 0.0)
    assert float(sharp.log_prob(torch.tensor([[0, 0]]))) == -800
    torch.testing.assert_close(predictive.apply_temperature(2.0).member_means, (members / 2).sigmoid())


def test_metrics_of_labels_are_those_of_their_definitions():
    x, y = labels()
    posterior = labelled_ensemble()
    found = ds.evaluate(posterior, (x, y), ood={"far": 9 * x}, progress=False)
    predictive = posterior.predict(x)
    right = (predictive.mean > 0.5) == (y == 1)
    confidence, correct = predictive.confidence.flatten(), right.flatten().double()
    alone = D.Bernoulli(logits=posterior(x).detach()).log_prob(y.double()).sum(2).mean(1)
    expected = {
        "accuracy": right.double().mean(),
        "exact_match": right.all(1).double().mean(),
        "nll": -predictive.log_prob(y).mean(),
        "brier": 2 * (predictive.mean - y).square().mean(),
        "ece": ds.metrics.classification.confidence_ece(confidence, correct, bins=15),
        "average_precision": sum(_average_precision(predictive.mean[:, i], y[:, i]) for i in range(3)) / 3,
        "members/nll": -alone.mean(),
        "members/nll_best": -alone.max(),
        "members/diversity": -alone.mean() + predictive.log_prob(y).mean(),
        "ood/far/auroc": ds.metrics.auroc(*(-posterior.predict(at).confidence.log().sum(1) for at in (x, 9 * x))),
    }
    assert found.kind == "multilabel"
    for name, value in expected.items():
        assert found.metrics[name] == pytest.approx(float(value), abs=1e-12), name
    each = {"correct": "accuracy", "exact_match": "exact_match", "nll": "nll", "brier": "brier"}
    for name, metric in each.items():
        assert found.arrays[f"test/{name}"].shape == (60,)
        assert float(found.arrays[f"test/{name}"].mean()) == pytest.approx(found.metrics[metric], abs=1e-12)
    assert "nats" in predictive._repr_html_()
    half = ds.evaluate(posterior, (x, 0.2 + 0.6 * y), progress=False).metrics  # as mixup makes them
    assert half["accuracy"] == found.metrics["accuracy"]
    assert half["nll"] == pytest.approx(-float(predictive.log_prob(0.2 + 0.6 * y).mean()), abs=1e-12)


def _average_precision(score: torch.Tensor, y: torch.Tensor) -> float:
    """Mean over present labels of the share of present ones among those that score at least as high."""
    return sum(float(y[score >= at].double().mean()) for at in score[y == 1]) / int(y.sum())


def test_every_function_takes_several_labels(tmp_path):
    x, y = labels()
    posterior = labelled_ensemble()
    before = ds.evaluate(posterior, (x, y), progress=False).metrics["nll"]
    ds.fit(posterior, (x, y), epochs=20, validation=(x, y), progress=False)
    assert ds.evaluate(posterior, (x, y), progress=False).metrics["nll"] < before
    assert ds.calibrate(posterior, (x, y)).temperature != 1
    ds.save(posterior, tmp_path / "labels")
    loaded = ds.load(tmp_path / "labels", network=nn.Linear(4, 3).double())
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)
    laplace = ds.Laplace(posterior.member(0), likelihood=ds.MultiLabel(), prior_precision=1.0).fit_posthoc((x, y))
    assert math.isfinite(float(laplace.log_marginal_likelihood()))
    assert bool((laplace.predict(x).epistemic > 0).all())
    assert posterior.predictor()(x)["mean"].equal(posterior.predict(x).mean)
    refuses(lambda: ds.calibrate(posterior, (x, y), "isotonic"), "expected method of temperature.* a multilabel")
    refuses(lambda: ds.conformal(posterior, (x, y)), "expected one class or real targets per row, got several labels")
    refuses(lambda: ds.summarise(posterior, (x, y)), "expected a classification or regression to summarise", TypeError)
    refuses(lambda: posterior.loss(x, y[:, :2]), r"of one shape \(B, L\), got \(60, 3\) and \(60, 2\)")
    refuses(lambda: posterior.loss(x, 2 * y), "expected targets from 0 to 1")
    refuses(lambda: ds.MAP(tiny.segmenter(), likelihood=ds.MultiLabel()).loss(torch.zeros(1, 2, 4, 4), y), "shape")

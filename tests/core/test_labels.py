"""Batches as loaders of other libraries yield them: labels inside a mapping, targets (B,), soft and ignored labels."""

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.core import batch as batches
from refusals import refuses

KINDS = {"dict": dict, "UserDict": UserDict}


class Conditioned(tiny.Pair):
    """Takes labels as a transformers model does: if it gets them, it returns a tuple (loss, logits)."""

    def forward(self, a: Tensor, b: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(a, b)
        return logits if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


def pair(rows: int = 24) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 4, generator=generator) for _ in range(2))
    return {"a": a, "b": b}, torch.arange(rows) % 3


def parts(x: dict[str, Tensor], y: Tensor, kind: Any = None, label: str = "labels") -> list[Any]:
    """Three batches; of a `kind` of mapping with the labels inside, or None for (x, y)."""
    cut = [({k: v[i::3] for k, v in x.items()}, y[i::3]) for i in range(3)]
    return cut if kind is None else [kind({**x, label: y}) for x, y in cut]


def everything(loader: Any, raw: Any) -> list[Tensor]:
    """What the functions that read a loader make of it, as tensors."""
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([Conditioned() for _ in range(2)])
    history = ds.fit(posterior, loader, epochs=2, validation=loader, progress=False)
    found = [torch.tensor([[each.loss, each.validation] for each in history.epochs])]
    found += [ds.predict(posterior, loader).log_probs, ds.summarise(posterior, loader).mean]
    found += [predictive.mean for predictive, _ in ds.predict_batches(posterior, loader)]
    found.append(torch.tensor(ds.calibrate(posterior, loader).temperature))
    found.append(ds.conformal(posterior, loader, level=0.5).set(raw).float())
    swag = ds.SWAG(posterior.member(0), samples=2, rank=2)
    ds.fit(swag, loader, epochs=2, progress=False)
    ds.refresh(swag, loader)
    laplace = ds.Laplace(posterior.member(0)).fit_posthoc(loader)
    found += [laplace.predict(raw).mean, posterior.predict(raw).mean, posterior(raw)]
    measured = ds.evaluate(posterior, loader, ood={"far": [{k: 9 * v for k, v in raw.items()}]}, progress=False)
    return [*found, torch.tensor([v for k, v in measured.metrics.items() if "cost" not in k])]


def test_labels_in_a_mapping_give_what_pairs_give_in_every_function():
    x, y = pair()
    expected = everything(parts(x, y), x)
    for name, kind in KINDS.items():
        for found, wanted in zip(everything(parts(x, y, kind), kind({**x, "labels": y})), expected, strict=True):
            assert torch.equal(found, wanted), name
    named = everything(ds.Loader(parts(x, y, dict, "target"), labels="target"), x)
    assert all(torch.equal(a, b) for a, b in zip(named, expected, strict=True))


def test_the_data_themselves_may_be_a_mapping():
    x, y = pair()
    posterior = ds.MAP(Conditioned())
    wanted = ds.predict(posterior, (x, y))
    for data in ({**x, "label": y}, ds.Loader({**x, "target": y}, labels="target")):
        found = ds.predict(posterior, data)
        assert torch.equal(found.mean, wanted.mean)
        assert torch.equal(found.targets, y)


def test_names_that_do_not_fit_are_one_error_before_training():
    x, y = pair()
    posterior = ds.MAP(tiny.Pair())
    before = {name: value.clone() for name, value in posterior.state_dict().items()}

    def fit(loader: Any) -> None:
        ds.fit(posterior, loader, epochs=1, progress=False)

    extra = [{**x, "idx": y, "text": ["a"] * len(y), "labels": y}]
    refuses(lambda: fit(extra), r"got 'idx', 'text', which Pair.forward does not take; rename or remove them")
    refuses(lambda: fit([{**x, "target": y}]), r"got 'a', 'b', 'target'; pass ds.Loader\(loader, labels=", TypeError)
    refuses(lambda: fit(ds.Loader([{**x}], labels="target")), "an entry 'target', got 'a', 'b'", TypeError)
    refuses(lambda: fit({**x, "target": y}), "an entry 'labels' or 'label', got", TypeError)
    refuses(lambda: posterior.predict({**x, "idx": y}), "got 'idx', which Pair.forward does not take")
    assert all(torch.equal(before[name], value) for name, value in posterior.state_dict().items())
    fit([{**x, "labels": y}])  # of the same shapes as refused ones
    refuses(lambda: fit([{"a": x["a"], "c": x["b"], "labels": y}]), "got 'c', which Pair.forward does not take")


def test_a_label_that_forward_needs_is_an_input_of_predict():
    class Needs(nn.Linear):
        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            return super().forward(x) + label[:, None]

    x, label = torch.randn(5, 4), torch.arange(5.0)
    posterior = ds.MAP(Needs(4, 3))
    wanted = posterior.particles.template.network(x, label).softmax(1)
    assert torch.allclose(posterior.predict({"x": x, "label": label}).mean, wanted)


def test_the_first_tensor_of_a_tuple_is_the_output():
    logits, hidden = torch.randn(4, 3), torch.randn(4, 6)
    for outputs in ((logits,), (logits, hidden), (logits, (hidden, logits)), (torch.arange(4), logits, None)):
        assert batches.output_tensor(outputs) is logits
    for wrong in ((logits, torch.rand(4, 3)), (torch.arange(4),), ()):
        refuses(lambda wrong=wrong: batches.output_tensor(wrong), "one tensor, .* got tuple", TypeError)


@pytest.mark.parametrize(("make", "outputs"), [(ds.Regression, 1), (ds.HeteroscedasticRegression, 2)])
def test_targets_b_are_a_column(make, outputs):
    x, noise = torch.randn(40, 3), 0.3 * torch.randn(40)
    y = x.sum(1) + noise
    found = []
    for targets in (y, y[:, None]):
        torch.manual_seed(0)
        posterior = ds.DeepEnsemble([nn.Linear(3, outputs) for _ in range(2)], likelihood=make())
        ds.fit(posterior, (x, targets), epochs=2, validation=(x, targets), targets="standardised", progress=False)
        mine = [posterior.predict(x).log_prob(targets), posterior.loss(x, targets)]
        for method in ("temperature", "isotonic"):
            calibrated = ds.calibrate(posterior, (x, targets), method)
            mine += [torch.tensor(calibrated.nll), posterior.predict(x).log_prob(targets)]
        mine += [*ds.conformal(posterior, (x, targets), level=0.8).interval(x)]
        measured = ds.evaluate(posterior, (x, targets), ood={"far": 9 * x}, progress=False).metrics
        mine.append(torch.tensor([v for k, v in measured.items() if "cost" not in k]))
        torch.manual_seed(0)
        laplace = ds.Laplace(nn.Linear(3, 1), likelihood=ds.Regression(0.3)).fit_posthoc((x, targets))
        found.append([*mine, laplace.log_marginal_likelihood()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    two = ds.MAP(nn.Linear(3, 2 * outputs), likelihood=make())
    refuses(lambda: two.loss(x, y), r"targets of shape \(40, 2\), got \(40,\)")


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_ignored_labels_have_log_probability_0(method):
    x, y = tiny.points(30)
    y[::4] = 1  # a class that is ignored, not an impossible label
    posterior = ds.DeepEnsemble([tiny.mlp().double() for _ in range(2)], likelihood=ds.Classification(ignore_index=1))
    for label in (1, -100):
        posterior.likelihood.ignore_index = label
        true = torch.where(y == 1, label, y)
        ds.calibrate(posterior, (x, true), method)
        whole = ds.predict(posterior, (x, true))
        expected = whole.log_mean.gather(1, torch.where(y == 1, 0, y)[:, None])[:, 0].where(y != 1, 0.0)
        for found in (whole, posterior.predict(x), ds.summarise(posterior, (x, true))):
            torch.testing.assert_close(found.log_prob(true), expected, rtol=0, atol=1e-12)
        assert torch.equal(whole[3:9].log_prob(true[3:9]), whole.log_prob(true)[3:9])
        assert torch.equal(whole.to(torch.float32).log_prob(true) == 0, y == 1)


def test_soft_labels_are_evaluated():
    x, y = tiny.points(40)
    posterior = ds.DeepEnsemble([tiny.mlp().double() for _ in range(3)])
    ds.conformal(posterior, (x, y), level=0.8)
    soft = 0.7 * nn.functional.one_hot(y, 3).double() + 0.1
    found, hard = (ds.evaluate(posterior, (x, each), progress=False).metrics for each in (soft, y))
    predictive = posterior.predict(x)
    cross = -(soft * predictive.log_mean).sum(1).mean()
    assert found["nll"] == pytest.approx(float(cross), abs=1e-12)
    assert found["brier"] == pytest.approx(float((predictive.mean - soft).square().sum(1).mean()), abs=1e-12)
    alone = -(soft * predictive.log_probs).sum(2).mean(1)
    assert found["members/nll"] == pytest.approx(float(alone.mean()), abs=1e-12)
    assert found["members/diversity"] == pytest.approx(float(alone.mean() - cross), abs=1e-12)
    same = ("accuracy", "ece", "aurc", "members/accuracy", "members/effective_members", "conformal/coverage")
    assert {key: found[key] for key in same} == {key: hard[key] for key in same}
    one_hot = ds.evaluate(posterior, (x, nn.functional.one_hot(y, 3).double()), progress=False).metrics
    timed = {key for key in hard if "cost" in key}
    assert one_hot == pytest.approx({**hard, **{key: one_hot[key] for key in timed}}, abs=1e-12)

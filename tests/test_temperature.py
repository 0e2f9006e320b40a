"""Temperature scaling against scipy, a closed form, and what it must leave alone."""

import logging
import math

import pytest
import scipy.optimize
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.calibration.calibrate import best_temperature, minimise
from refusals import refuses
from thinning import often

F64 = torch.float64


def calibrated(n: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels drawn from exactly those logits."""
    x = torch.randn(n, 3, dtype=F64)
    return x, torch.distributions.Categorical(logits=x).sample()


@pytest.mark.parametrize("k", [0.5, 1.0, 4.0])
def test_an_overconfidence_of_k_is_undone(k):
    x, y = calibrated()
    posterior = ds.MAP(tiny.Scaled(k)).double()
    temperature = ds.temperature_scale(posterior, [(x[:1000], y[:1000]), (x[1000:], y[1000:])])
    # The maximum-likelihood slope β = k / T on 4,000 points has a standard error 1/√(Σ Var_p[x]).
    p = x.softmax(1)
    information = ((p * x**2).sum(1) - (p * x).sum(1) ** 2).sum()
    assert abs(k / temperature - 1) < 4 / float(information) ** 0.5
    assert float(posterior.temperature) == temperature
    expected = (k * x / temperature).log_softmax(1)
    torch.testing.assert_close(posterior.predict(x).log_probs[0], expected, rtol=0, atol=1e-10)


def test_the_temperature_minimises_the_mixtures_nll():
    posterior, (x, y) = ds.DeepEnsemble([tiny.Scaled(2.0), tiny.Scaled(5.0)]).double(), calibrated(500)
    before = posterior.predict(x)
    found = ds.temperature_scale(posterior, [(x, y)])
    assert 2 < found < 5

    def nll(log_t):
        return -float(before.apply_temperature(math.exp(log_t)).log_prob(y).mean())

    best = scipy.optimize.minimize_scalar(nll, bounds=(math.log(1 / 50), math.log(50)), method="bounded")
    assert nll(math.log(found)) <= best.fun + 1e-10
    assert -float(posterior.predict(x).log_prob(y).mean()) == pytest.approx(nll(math.log(found)), abs=1e-12)
    # Done again it gives the same: it starts from the untempered members, not from the last result.
    assert ds.temperature_scale(posterior, [(x, y)]) == found


def test_regression_scales_the_deviation_in_closed_form():
    """For one Gaussian T² = mean residual² / noise²."""
    posterior = ds.MAP(tiny.Scaled(), likelihood=ds.Regression(noise=0.2)).double()
    x = torch.randn(300, 1, dtype=F64)
    y = x + 0.7 * torch.randn(300, 1, dtype=F64)
    expected = float((y - x).square().mean().sqrt()) / 0.2
    assert ds.temperature_scale(posterior, [(x, y)]) == pytest.approx(expected, rel=1e-4)
    variance = torch.full((300, 1), (0.2 * expected) ** 2, dtype=F64)
    torch.testing.assert_close(posterior.predict(x).aleatoric, variance, rtol=1e-3, atol=0)


@pytest.mark.parametrize("likelihood", [ds.Regression(), ds.HeteroscedasticRegression()])
def test_every_likelihood_can_be_scaled(likelihood):
    posterior = tiny.ensemble(lambda: tiny.mlp(outputs=2), likelihood=likelihood)
    x, _ = tiny.points()
    y = torch.randn(12, 2 if isinstance(likelihood, ds.Regression) else 1, dtype=F64)
    before = float(posterior.predict(x).log_prob(y).mean())
    ds.temperature_scale(posterior, [(x, y)])
    assert float(posterior.predict(x).log_prob(y).mean()) >= before - 1e-12


def test_positions_to_ignore_do_not_count():
    x, y = calibrated(500)
    void = torch.rand(500) < 0.5
    plain, masked = (ds.MAP(tiny.Scaled(2.0), likelihood=ds.Classification(ignore_index=-1)).double() for _ in range(2))
    expected = ds.temperature_scale(plain, [(x[~void], y[~void])])
    assert ds.temperature_scale(masked, [(x, torch.where(void, -1, y))]) == pytest.approx(expected, rel=1e-4)


def unsure(n: int, noise: float, seed: int) -> tuple[ds.ClassificationPredictive, torch.Tensor]:
    """Forty members around the truth, each with noise of its own on every logit, as Laplace by rows has it."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(n, 3, dtype=F64, generator=generator)
    y = torch.multinomial(x.softmax(1), 1, generator=generator)[:, 0]
    logits = x + noise * torch.randn(40, n, 3, dtype=F64, generator=generator)
    return ds.ClassificationPredictive(logits.log_softmax(2)), y


def test_unsure_members_are_not_sharpened_without_end(caplog):
    """The smallest NLL is that of votes, by less than a standard error; a label without a vote costs over a hundred nats."""
    predictive, y = unsure(300, noise=6.0, seed=0)

    def nll(temperature):
        return -predictive.apply_temperature(temperature).log_prob(y)

    lowest = min(float(nll(1.1**-i).mean()) for i in range(42))
    temperature = best_temperature(predictive, y)
    assert temperature == pytest.approx(0.5, abs=1e-4)
    assert lowest < float(nll(temperature).mean()) < lowest + float(nll(temperature).std()) / 300**0.5
    assert float(nll(0.1).mean()) < float(nll(0.5).mean())  # the minimum alone would go below
    assert "are equally good within one standard error" in caplog.text
    assert "trained on these data" not in caplog.text


def test_a_strong_sharpening_that_the_data_ask_for_is_found():
    """Logits x/10 of labels that follow x: nothing is flat about it, T is 0.1 to its standard error."""
    x, y = calibrated(1000)
    predictive = ds.ClassificationPredictive((0.1 * x).log_softmax(1)[None])

    def nll(log_t):
        return -float(predictive.apply_temperature(math.exp(log_t)).log_prob(y).mean())

    best = scipy.optimize.minimize_scalar(nll, bounds=(-4, 0), method="bounded", options={"xatol": 1e-7})
    assert best_temperature(predictive, y) == pytest.approx(math.exp(best.x), abs=1e-5)


@pytest.mark.parametrize("weighted", often([True], [False]))
def test_the_order_of_rows_does_not_move_the_temperature_of_float32_predictions(weighted):
    """A float32 mean of 20,000 losses is rounded by about 1e-7, and a minimum by its root; the tolerance is 1e-5 in log T."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 3, generator=generator)
    y = torch.multinomial(x.softmax(1), 1, generator=generator)[:, 0]
    weight = torch.rand(len(x), generator=generator) if weighted else None
    predictive = ds.ClassificationPredictive(torch.stack([2 * x, 3 * x]).log_softmax(2))
    found = []
    for _ in range(2):
        order = torch.randperm(len(x), generator=generator)
        found.append(best_temperature(predictive[order], y[order], None if weight is None else weight[order]))
    wide = ds.ClassificationPredictive(predictive.log_probs.double())
    assert found == pytest.approx([best_temperature(wide, y, weight)] * 2, rel=1e-5)


def test_predictions_converted_in_parts_have_the_same_temperature(monkeypatch):
    x, y = calibrated(500)
    predictive, weight = ds.ClassificationPredictive((3 * x).log_softmax(1)[None]), torch.rand(500, dtype=F64)
    whole = best_temperature(predictive, y, weight)
    monkeypatch.setattr("dissensus.calibration.calibrate.NUMBERS", 7 * 3)
    assert best_temperature(predictive, y, weight) == pytest.approx(whole, rel=1e-5)


def test_soft_labels_will_do():
    x, _ = calibrated(500)
    posterior = ds.MAP(tiny.Scaled(3.0)).double()
    # Soft labels that are the truth: the minimum of the cross-entropy is at exactly k.
    assert ds.temperature_scale(posterior, [(x, x.softmax(1))]) == pytest.approx(3.0, rel=1e-4)


def test_the_temperature_is_saved_with_the_posterior(tmp_path):
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()
    ds.temperature_scale(posterior, [(x, y)])
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, tiny.mlp())
    assert torch.equal(loaded.temperature, posterior.temperature)
    assert torch.equal(loaded.predict(x).log_probs, posterior.predict(x).log_probs)


IGNORED = "expected an example that counts, got none; pass labels that are not ignored"


@pytest.mark.parametrize(("spoil", "text"), [
    (lambda x, y: [(x, y), (x, y + 1)], "expected labels in 0…2, got 3"),
    (lambda x, y: [], "expected at least one batch"),
    (lambda x, y: [(x * math.nan, y)], "expected finite"),
    (lambda x, y: [(x, y - y - 1)], IGNORED),
    (lambda x, y: [(x, y - y - 1, torch.ones(12))], IGNORED),
    (lambda x, y: [(x, y, torch.zeros(12))], "expected an example that counts, got none"),
    (lambda x, y: [(x, y, torch.ones(12)), (x, y)], "expected weights in every batch or in none"),
])  # fmt: skip
def test_bad_data_leaves_the_temperature_as_it_was(spoil, text):
    posterior = tiny.ensemble(tiny.mlp, likelihood=ds.Classification(ignore_index=-1))
    posterior.temperature.fill_(1.7)
    refuses(lambda: ds.temperature_scale(posterior, spoil(*tiny.points())), text)
    assert float(posterior.temperature) == pytest.approx(1.7)


@pytest.mark.parametrize("at", [-3.0, 0.3, 2.0])
def test_the_minimum_of_a_function_is_found(at):
    assert minimise(lambda t: (t - at) ** 2, -3, 2) == pytest.approx(at, abs=1e-5)
    assert minimise(lambda t: abs(t - at), -3, 2) == pytest.approx(at, abs=1e-5)


def test_data_the_network_has_seen_are_suspected(caplog):
    """Logits 0.4 x are fitted by dividing by 0.4; on labels that are all right no temperature is low enough."""
    x, y = calibrated()
    for network, targets, text in (
        (tiny.Scaled(0.4), y, "makes predictions more than twice as confident; was the network trained on these data"),
        (tiny.Scaled(1.0), x.argmax(1), "if all are predicted right: these make any low temperature look good"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dissensus"):
            ds.temperature_scale(ds.MAP(network).double(), [(x, targets)])
        assert text in caplog.text
        assert "held-out" in caplog.text


def test_a_temperature_of_held_out_data_is_not_suspected(caplog):
    x, y = calibrated()
    with caplog.at_level(logging.WARNING, "dissensus"):
        for k in (0.7, 4.0):
            ds.temperature_scale(ds.MAP(tiny.Scaled(k)).double(), [(x, y)])
        soft = torch.nn.functional.one_hot(y, 3).double()
        ds.temperature_scale(ds.MAP(tiny.Scaled(1.0)).double(), [(x, soft)])
    assert not caplog.messages


def test_a_weight_of_two_is_the_example_twice():
    x, y = calibrated(200)
    weight = torch.randint(0, 3, (200,), generator=torch.Generator().manual_seed(0))
    weighted, repeated = (ds.DeepEnsemble([tiny.Scaled(2.0), tiny.Scaled(5.0)]).double() for _ in range(2))
    batches = [(x[:120], y[:120], weight[:120].double()), (x[120:], y[120:], weight[120:].double())]
    rows = torch.arange(200).repeat_interleave(weight)
    expected = ds.temperature_scale(repeated, [(x[rows], y[rows])])
    assert ds.temperature_scale(weighted, batches) == pytest.approx(expected, rel=1e-4)
    assert ds.temperature_scale(weighted, [batch[:2] for batch in batches]) != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("likelihood", [ds.Classification(), ds.Regression(0.3), ds.HeteroscedasticRegression()])
def test_whoever_predicts_while_a_temperature_is_sought_sees_the_one_before(likelihood):
    torch.manual_seed(0)
    x = torch.randn(40, 4, dtype=F64)
    y = torch.randint(2, (40,)) if isinstance(likelihood, ds.Classification) else torch.randn(40, 1, dtype=F64)
    outputs = 1 if isinstance(likelihood, ds.Regression) else 2
    posterior = tiny.ensemble(lambda: nn.Linear(4, outputs), likelihood=likelihood)
    alone = ds.temperature_scale(posterior, [(x, y)])
    posterior.temperature.fill_(3.0)
    seen = []

    def batches():
        for part in (slice(0, 25), slice(25, 40)):
            seen.append(float(posterior.temperature))
            yield x[part], y[part]
        seen.append(float(posterior.temperature))

    assert ds.temperature_scale(posterior, batches()) == pytest.approx(alone, rel=1e-6)
    assert seen == [3.0, 3.0, 3.0]

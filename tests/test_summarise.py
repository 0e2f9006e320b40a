"""Predictions that do not keep their members equal those that do."""

import logging
import math

import pytest
import torch
from torch import Tensor

import dissensus as ds
from dissensus.core.predictive import RunningSummary
from dissensus.data import Batches
from refusals import refuses


@pytest.fixture
def ensemble() -> ds.DeepEnsemble:
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([ds.nets.MLP(4, 3, hidden=(8,)) for _ in range(5)]).double()
    posterior.temperature.fill_(1.3)
    return posterior


def inputs(rows: int = 50) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (rows,), generator=generator)


def test_a_summary_equals_the_kept_prediction(ensemble: ds.DeepEnsemble) -> None:
    loader = Batches(*inputs(), batch_size=16)
    kept = ds.predict(ensemble, loader)
    y = kept.targets
    summary = ds.summarise(ensemble, loader)
    assert torch.equal(y, summary.targets)
    for name in ("mean", "aleatoric", "epistemic", "total", "confidence"):
        torch.testing.assert_close(getattr(summary, name), getattr(kept, name), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(summary.log_prob(y), kept.log_prob(y), rtol=1e-12, atol=1e-12)
    assert torch.equal(summary.total, summary.aleatoric + summary.epistemic)
    assert torch.equal(summary.credible_set(0.8), kept.credible_set(0.8))
    assert len(summary) == 50


def test_members_from_disk_one_at_a_time_give_the_same(ensemble: ds.DeepEnsemble, tmp_path) -> None:
    loader = Batches(*inputs(), batch_size=16)
    ds.save(ensemble, tmp_path / "posterior")
    expected = ds.predict(ensemble, loader)
    summary = ds.summarise(tmp_path / "posterior", loader)
    torch.testing.assert_close(summary.mean, expected.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(summary.epistemic, expected.epistemic, rtol=1e-10, atol=1e-12)


def test_members_from_disk_include_learned_noise_and_batch_statistics(tmp_path) -> None:
    torch.manual_seed(0)
    x, _ = inputs()
    y = x[:, :1] ** 2
    networks = [ds.nets.MLP(4, 1, hidden=(8,), batch_norm=True) for _ in range(3)]
    posterior = ds.DeepEnsemble(networks, likelihood=ds.Regression("learned")).double()
    loader = Batches(x, y, batch_size=25)
    ds.fit(posterior, loader, epochs=3, progress=False)
    ds.save(posterior, tmp_path)
    kept = ds.predict(posterior, loader)
    for source in (posterior, tmp_path):
        summary = ds.summarise(source, loader)
        torch.testing.assert_close(summary.mean, kept.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(summary.aleatoric, kept.aleatoric, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(summary.epistemic, kept.epistemic, rtol=1e-10, atol=1e-13)
        gaussian = torch.distributions.Normal(kept.mean, kept.total.sqrt())
        torch.testing.assert_close(summary.log_prob(y), gaussian.log_prob(y).sum(1), rtol=1e-10, atol=1e-10)
        lower, upper = summary.interval(0.9)
        torch.testing.assert_close(gaussian.cdf(upper) - gaussian.cdf(lower), torch.full_like(upper, 0.9))


def test_a_posterior_that_stores_no_members_is_summarised_from_disk_too(tmp_path) -> None:
    torch.manual_seed(0)
    posterior = ds.MCDropout(ds.nets.MLP(4, 3), rate=0.2, samples=7).double()
    loader = Batches(*inputs(), batch_size=25)
    ds.refresh(posterior, loader)
    ds.save(posterior, tmp_path)
    expected = ds.predict(posterior, loader)
    summary = ds.summarise(tmp_path, loader)
    torch.testing.assert_close(summary.mean, expected.mean, rtol=1e-12, atol=1e-12)


def test_a_damaged_file_is_one_error_before_any_member_is_read(ensemble: ds.DeepEnsemble, tmp_path) -> None:
    ds.save(ensemble, tmp_path)
    path = tmp_path / "posterior.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refuses(lambda: ds.summarise(tmp_path, Batches(*inputs(), batch_size=16)), "truncated or was changed")


def test_a_loader_that_shuffles_cannot_be_read_member_by_member(ensemble: ds.DeepEnsemble, tmp_path) -> None:
    ds.save(ensemble, tmp_path)
    refuses(lambda: ds.summarise(tmp_path, Batches(*inputs(), batch_size=16, shuffle=True, seed=0)), "does not shuffle")


def test_a_running_summary_does_not_depend_on_how_members_come() -> None:
    torch.manual_seed(0)
    means, variances = torch.randn(7, 20, 2, dtype=torch.float64) + 1e6, torch.rand(7, 20, 2, dtype=torch.float64)
    whole = ds.RegressionPredictive(means, variances)
    running = RunningSummary()
    for part in ((0, 1), (1, 4), (4, 7)):
        running.add(ds.RegressionPredictive(means[slice(*part)], variances[slice(*part)]))
    torch.testing.assert_close(running.summary().mean, whole.mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(running.summary().epistemic, whole.epistemic, rtol=1e-7, atol=0)  # means near 1e6


def test_what_needs_members_says_so(ensemble: ds.DeepEnsemble) -> None:
    summary = ds.summarise(ensemble, Batches(*inputs(), batch_size=16))
    for use in (lambda: summary.member_means, lambda: summary.interval(0.9), lambda: summary.apply_temperature(2.0)):
        with pytest.raises(TypeError, match="got a summary"):
            use()


def test_batches_come_one_at_a_time_and_leave_the_world_as_found(ensemble: ds.DeepEnsemble) -> None:
    ensemble.train()
    state = torch.get_rng_state()
    kept = ds.predict(ensemble, Batches(*inputs(), batch_size=16))
    stream = ds.predict_batches(ensemble, Batches(*inputs(), batch_size=16))
    first, _ = next(stream)
    assert ensemble.training  # also while the stream is only half read
    torch.testing.assert_close(first.mean, kept.mean[:16])
    rest = [predictive.mean for predictive, _ in stream]
    torch.testing.assert_close(torch.cat([first.mean, *rest]), kept.mean)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow  # compiled members are in tests/engine/test_engine.py
def test_compiled_and_half_precision_predictions_agree_with_plain_ones(ensemble: ds.DeepEnsemble) -> None:
    loader = Batches(inputs()[0].float(), inputs()[1], batch_size=25)
    ensemble.float()
    plain = ds.predict(ensemble, loader)
    compiled = ds.predict(ensemble, loader, compiled=True)
    torch.testing.assert_close(compiled.mean, plain.mean, rtol=1e-5, atol=1e-6)
    half = ds.predict(ensemble, loader, precision="bf16")
    assert half.mean.dtype == torch.float32
    torch.testing.assert_close(half.mean, plain.mean, rtol=0, atol=0.02)  # bf16 keeps 8 bits
    refuses(lambda: ds.predict(ensemble, loader, precision="fp8"), "expected precision of float32, bf16")


def test_the_memory_of_a_prediction_is_said_before_it_is_taken(ensemble: ds.DeepEnsemble, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="dissensus"):
        ds.predict(ensemble, Batches(*inputs(48), batch_size=16))
    size = 5 * 48 * 3 * 8 / 1024
    assert any(f"{size:.3g} KiB" in record.message for record in caplog.records)


def test_an_empty_loader_is_refused(ensemble: ds.DeepEnsemble, tmp_path) -> None:
    ds.save(ensemble, tmp_path)
    for source in (ensemble, tmp_path):
        with pytest.raises(ValueError, match="at least one batch"):
            ds.summarise(source, [])
    assert math.isclose(float(ensemble.temperature), 1.3)

"""evaluate: every number against a direct computation on the same functions."""

import math

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus import metrics
from dissensus.bench.report.comparisons import resample_measure
from dissensus.bench.report.measures import measures as of_report
from dissensus.data import Batches, Standardiser
from dissensus.data.corruptions import BENCHMARK, CORRUPTIONS, corrupt
from dissensus.engine.prediction_loop import draw_once
from dissensus.evaluation.evaluate import evaluate
from dissensus.evaluation.evaluation import Evaluation, metric_text
from dissensus.evaluation.robustness_curves import Corruptions, corrupted_counts
from refusals import refuses


def rows(count: int = 60, classes: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return x, torch.randint(classes, (count,), generator=generator)


def ensemble(members: int = 3, *, outputs: int = 3, inputs: int = 4) -> ds.DeepEnsemble:
    torch.manual_seed(1)
    networks = [ds.nets.MLP(inputs, outputs, hidden=(8,)) for _ in range(members)]
    with torch.no_grad():
        for network in networks:
            for parameter in network.parameters():
                parameter.mul_(4)  # confident enough for the numbers to differ
    return ds.DeepEnsemble(networks)


def images(count: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (count, 1, 16, 16), generator=generator).float() / 255
    return x, torch.randint(3, (count,), generator=generator)


def test_test_metrics_are_those_of_the_metric_functions():
    posterior, (x, y) = ensemble(), rows()
    found = evaluate(posterior, Batches(x, y, batch_size=7)).metrics
    predictive = posterior.predict(x)
    log_mean, mean = predictive.log_mean, predictive.mean
    wrong = 1 - metrics.accuracy_values(mean, y)
    expected = {
        "accuracy": metrics.accuracy(mean, y),
        "nll": metrics.nll(log_mean, y),
        "brier": metrics.brier(mean, y),
        "ece": metrics.ece(mean, y),
        "adaptive_ece": metrics.adaptive_ece(mean, y),
        "smooth_ece": metrics.smooth_ece(mean, y),
        "aurc": metrics.aurc(-metrics.max_probability_score(log_mean), wrong),
        "augrc": metrics.augrc(-metrics.max_probability_score(log_mean), wrong),
        "coverage_at_risk5": metrics.coverage_at_risk(-metrics.max_probability_score(log_mean), wrong, risk=0.05),
        "members/nll": metrics.ensemble_gain(predictive.log_probs, y).member_nll,
        "members/diversity": metrics.ensemble_gain(predictive.log_probs, y).diversity,
        "members/disagreement": metrics.disagreement(predictive.log_probs),
        "members/effective_members": metrics.effective_members(predictive.log_probs, y),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), abs=1e-6), name
    assert found["members/nll"] - found["members/diversity"] == pytest.approx(found["nll"], abs=1e-6)
    alone = [float(metrics.nll(member, y)) for member in predictive.log_probs]
    assert found["members/nll_best"] == pytest.approx(min(alone), abs=1e-6)
    assert found["cost/parameters"] == sum(p.numel() for p in posterior.parameters())
    assert found["cost/predict_ms"] > 0


def test_the_flat_keys_are_those_of_the_contract():
    x, y = images()
    posterior = ensemble(inputs=256)
    loader = Batches(x, y, batch_size=5)
    found = evaluate(posterior, loader, ood={"noise": loader}, shift={"moved": loader}, corrupt=["fog"]).metrics
    expected = ["accuracy", "nll", "brier", "ece", "aurc"]
    expected += [f"ood/noise/{k}" for k in ("auroc", "aupr", "aupr_in", "aupr_adjusted", "fpr95", "fpr95_in")]
    expected += [f"corrupt/{k}" for k in ("accuracy", "nll", "ece")] + ["shift/moved/accuracy", "shift/moved/nll"]
    expected += [f"members/{k}" for k in ("nll", "diversity", "disagreement", "effective_members")]
    assert {*expected, "cost/parameters", "cost/predict_ms"} <= found.keys()
    assert all(isinstance(value, float) for value in found.values())


def test_per_example_arrays_average_to_the_metrics():
    posterior, (x, y) = ensemble(), rows()
    result = evaluate(posterior, Batches(x, y, batch_size=7))
    for name in ("nll", "brier"):
        assert float(result.arrays[f"test/{name}"].mean()) == pytest.approx(result.metrics[name], abs=1e-9)
    assert float(result.arrays["test/correct"].mean()) == result.metrics["accuracy"]
    assert float(result.arrays["risk_coverage/risk"].mean()) == pytest.approx(result.metrics["aurc"], abs=1e-12)
    counts, confidence, accuracy = (result.arrays[f"reliability/{n}"] for n in ("counts", "confidence", "accuracy"))
    held = counts > 0
    gap = (counts * (confidence - accuracy).abs())[held].sum() / counts.sum()
    assert float(gap) == pytest.approx(result.metrics["ece"], abs=1e-9)


def test_ood_scores_are_ranked_in_float64_and_by_the_score_asked_for():
    posterior, (x, y) = ensemble(), rows()
    other, _ = rows(seed=5)
    loaders = {"far": Batches(other * 3, y, batch_size=20)}
    predictive, foreign = posterior.predict(x), posterior.predict(other * 3)
    scored = {
        "max_probability": lambda p: metrics.max_probability_score(p.log_mean),
        "total": lambda p: metrics.total_uncertainty(p.log_mean),
        "epistemic": lambda p: metrics.epistemic_uncertainty(p.log_probs),
    }
    for name, score in scored.items():
        result = evaluate(posterior, Batches(x, y, batch_size=60), ood=loaders, score=name)
        assert result.arrays[f"ood/far/score/{name}"].dtype == torch.float64
        assert torch.allclose(result.arrays[f"test/score/{name}"], score(predictive), atol=1e-6)
        auroc = float(metrics.auroc(score(predictive), score(foreign)))
        assert result.metrics["ood/far/auroc"] == pytest.approx(auroc, abs=1e-9)
        if name == "max_probability":
            pairs = zip(predictive.log_probs, foreign.log_probs, strict=True)
            alone = [float(metrics.auroc(*map(metrics.max_probability_score, pair))) for pair in pairs]
            assert result.metrics["members/ood/far/auroc"] == pytest.approx(sum(alone) / 3, abs=1e-9)
    energy = evaluate(posterior, Batches(x, y, batch_size=9), ood=loaders, score="energy")
    direct = -torch.logsumexp(posterior(x).double(), 2).mean(0)
    assert torch.allclose(energy.arrays["test/score/energy"], direct, atol=1e-6)


def test_a_temperature_is_stated_with_the_numbers_it_changed(undrawn, tmp_path):
    posterior = ds.DeepEnsemble([tiny.mlp() for _ in range(2)]).double()
    x, y = tiny.points(24)
    plain = ds.evaluate(posterior, [(x, y)])
    assert "temperature" not in plain.metrics
    posterior.temperature.fill_(2.5)
    scaled = ds.evaluate(posterior, [(x, y)])
    assert scaled.metrics["temperature"] == 2.5
    assert "temperature" in scaled.table()
    ds.report({"plain": plain, "scaled": scaled}, tmp_path)
    row = next(line for line in (tmp_path / "report.md").read_text().splitlines() if "| Temperature" in line)
    assert [cell.strip() for cell in row.split("|")[2:4]] == ["–", "2.500"]
    assert "temperature" in (tmp_path / "results.csv").read_text().splitlines()[0]
    assert "Temperature" in (tmp_path / "report.html").read_text()


def test_temperature_enters_every_number_and_the_energy():
    posterior, (x, y) = ensemble(), rows()
    posterior.temperature.fill_(3.0)
    result = evaluate(posterior, Batches(x, y, batch_size=60))
    assert result.metrics["nll"] == pytest.approx(float(metrics.nll(posterior.predict(x).log_mean, y)), abs=1e-6)
    direct = -torch.logsumexp(posterior(x).double() / 3, 2).mean(0)
    assert torch.allclose(result.arrays["test/score/energy"], direct, atol=1e-6)


def test_all_numbers_come_from_one_draw():
    torch.manual_seed(0)
    posterior = ds.MCDropout(ds.nets.MLP(4, 3, hidden=(32, 32)), rate=0.5, samples=3)
    x, y = rows()
    loader = Batches(x, y, batch_size=13)
    result = evaluate(posterior, loader, ood={"same": loader}, shift={"same": loader})
    assert result.metrics["ood/same/auroc"] == 0.5  # equal scores everywhere: only the same functions give that
    assert result.metrics["shift/same/nll"] == result.metrics["nll"]


def test_the_world_is_left_as_found():
    posterior, (x, y) = ensemble(), rows()
    posterior.train()
    state, weights = torch.get_rng_state(), [p.clone() for p in posterior.parameters()]
    evaluate(posterior, Batches(x, y, batch_size=13))
    assert torch.equal(torch.get_rng_state(), state)
    assert posterior.training
    assert posterior.particles.training
    assert all(torch.equal(a, b) for a, b in zip(weights, posterior.parameters(), strict=True))


def test_a_generator_is_enough_where_the_loader_is_needed_once():
    posterior, (x, y) = ensemble(), rows()
    once = evaluate(posterior, ((x[i : i + 10], y[i : i + 10]) for i in range(0, 60, 10)))
    assert once.metrics["nll"] == pytest.approx(evaluate(posterior, [(x, y)]).metrics["nll"], abs=1e-6)
    pictures, labels = images()
    with pytest.raises(ValueError, match="more than once"):
        evaluate(ensemble(inputs=256), ((pictures, labels) for _ in range(1)), corrupt=["fog"])


@pytest.mark.parametrize("batch_size", [5, 12])
def test_corruption_metrics_pool_types_and_average_severities(batch_size):
    posterior, (x, y) = ensemble(inputs=256), images()
    types, severities = ("fog", "gaussian_noise", "contrast"), (1, 4)
    spec = Corruptions(types, severities, seed=3)
    result = evaluate(posterior, Batches(x, y, batch_size=batch_size), corrupt=spec)
    per_severity: dict[str, list[float]] = {"accuracy": [], "nll": [], "ece": []}
    for severity in severities:
        parts = [posterior.predict(corrupt(x, name, severity, seed=3)) for name in types]
        mean, log_mean = torch.cat([p.mean for p in parts]), torch.cat([p.log_mean for p in parts])
        labels = y.repeat(len(types))
        per_severity["accuracy"].append(float(metrics.accuracy(mean, labels)))
        per_severity["nll"].append(float(metrics.nll(log_mean, labels)))
        per_severity["ece"].append(float(metrics.ece(mean, labels)))
        for t, name in enumerate(types):
            direct = metrics.ece(parts[t].mean, y)
            cell = result.arrays["corrupt/ece"][t, severities.index(severity)]
            assert float(cell) == pytest.approx(float(direct), abs=1e-6), name
    for name, values in per_severity.items():
        assert result.metrics[f"corrupt/{name}"] == pytest.approx(sum(values) / 2, abs=1e-6)
        assert result.arrays[f"corrupt/by_severity/{name}"].tolist() == pytest.approx(values, abs=1e-6)
        assert result.metrics[f"corrupt/severity4/{name}"] == pytest.approx(values[1], abs=1e-6)
        assert float(result.arrays[f"corrupt/clean/{name}"]) == pytest.approx(result.metrics[name], abs=1e-6)
    fog = [float(metrics.nll(posterior.predict(corrupt(x, "fog", s, seed=3)).log_mean, y)) for s in severities]
    assert result.metrics["corrupt/fog/nll"] == pytest.approx(sum(fog) / 2, abs=1e-6)
    for name in ("accuracy", "nll"):
        example = result.arrays[f"corrupt/example_{name}"]
        assert example.shape == (12,)
        assert float(example.mean()) == pytest.approx(result.metrics[f"corrupt/{name}"], abs=1e-9)


def test_corrupted_predictions_are_kept_for_each_example():
    posterior, (x, y) = ensemble(inputs=256), images()
    spec = Corruptions(("fog", "contrast"), (1, 4), seed=3)
    with draw_once(posterior) as functions:
        kept = corrupted_counts(functions, Batches(x, y, batch_size=5), spec).examples
    assert kept.shape == (3, 2, 2, 12)
    for t, s in ((0, 1), (1, 0)):
        p = posterior.predict(corrupt(x, spec.types[t], spec.severities[s], seed=3))
        rows = torch.arange(12)
        expected = [p.mean.max(1).values, (p.mean.argmax(1) == y).float(), -p.log_mean[rows, y]]
        for found, wanted in zip(kept[:, t, s], expected, strict=True):
            torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-10, atol=1e-6)  # half precision


def test_standardised_images_are_corrupted_as_pixels():
    x, y = images()
    standardiser = Standardiser.of_channels((x * 255).round().to(torch.uint8))
    on_pixels = ensemble(inputs=256)

    on_standardised = ds.DeepEnsemble(
        [tiny.Network(lambda self, z: self.inner(standardiser.inverse(z)), inner=on_pixels.member(i)) for i in range(3)]
    )
    plain = evaluate(on_pixels, Batches(x, y, batch_size=6), corrupt=Corruptions(["snow"], [3]))
    moved = evaluate(
        on_standardised,
        Batches(standardiser(x), y, batch_size=6),
        corrupt=Corruptions(["snow"], [3], standardiser=standardiser),
    )
    with pytest.raises(ValueError, match=r"ds\.Corruptions\(\[\.\.\.\], standardiser=\.\.\.\)"):
        evaluate(on_standardised, Batches(standardiser(x), y, batch_size=6), corrupt=["snow"])
    assert moved.metrics["corrupt/nll"] == pytest.approx(plain.metrics["corrupt/nll"], abs=1e-4)
    shown = moved.arrays["examples/least/inputs"]
    assert shown.min() >= -1e-6
    assert shown.max() <= 1 + 1e-6


def test_named_sets_of_corruptions():
    assert Corruptions("all").types == CORRUPTIONS
    assert Corruptions("benchmark").types == BENCHMARK
    refuses(lambda: Corruptions(["fig"]), "'fog'")
    refuses(lambda: Corruptions("fog"), r'expected "all"')
    refuses(lambda: Corruptions(["fog"], [6]), "severity")


def test_extreme_examples_are_those_of_a_full_sort():
    posterior, (x, y) = ensemble(inputs=256), images(40)
    result = evaluate(posterior, Batches(x, y, batch_size=7))
    order = result.arrays["test/score/max_probability"].argsort()
    wrong = [i for i in order.tolist() if not result.arrays["test/correct"][i]]
    assert result.arrays["examples/most/index"].tolist() == order[:8].tolist()
    assert result.arrays["examples/least/index"].tolist() == order.flip(0)[:8].tolist()
    assert result.arrays["examples/mistakes/index"].tolist() == wrong[:8]
    assert torch.equal(result.arrays["examples/most/inputs"], x[order[:8]])


def test_extreme_examples_have_their_place_among_the_rows_that_count():
    posterior, (x, y) = ensemble(inputs=256), images(20)
    posterior.likelihood.ignore_index = 9
    y[::2] = 9
    result = evaluate(posterior, Batches(x, y, batch_size=7))
    least = result.arrays["examples/least/index"]
    assert torch.equal(result.arrays["examples/least/inputs"], x[1::2][least])
    assert least.tolist() == result.arrays["test/score/max_probability"].argsort(descending=True)[:8].tolist()


def test_regression_metrics_are_those_of_the_metric_functions():
    torch.manual_seed(0)
    x, y = ds.data.x_sin_x(20)
    posterior = ds.DeepEnsemble([ds.nets.MLP(1, 1, hidden=(8,)) for _ in range(3)], likelihood=ds.Regression(0.4))
    result = evaluate(posterior, Batches(x, y, batch_size=9), shift={"far": [(x + 3, y)]}, ood={"far": [(x + 9, y)]})
    predictive = posterior.predict(x)
    means, variances = predictive.defining_tensors()
    expected = {
        "rmse": metrics.rmse(predictive.mean, y),
        "nll": metrics.mixture_nll(means, variances, y),
        "gaussian_nll": metrics.gaussian_nll(*metrics.moment_match(means, variances), y),
        "crps": metrics.crps_mixture(means, variances, y),
        "coverage90": metrics.interval_coverage(*predictive.interval(0.9), y),
        "members/effective_members": metrics.effective_members_regression(means, y),
        "ood/far/auroc": metrics.auroc(predictive.total[:, 0], posterior.predict(x + 9).total[:, 0]),
        "shift/far/rmse": metrics.rmse(posterior.predict(x + 3).mean, y),
    }
    for name, value in expected.items():
        assert result.metrics[name] == pytest.approx(float(value), abs=1e-5), name
    inside = (2 * result.arrays["test/cumulative"] - 1).abs() <= 0.9
    assert float(inside.double().mean()) == pytest.approx(result.metrics["coverage90"])


def segmentation() -> tuple[ds.DeepEnsemble, torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    networks = [tiny.Network(lambda self, x: 3 * self.conv(x), conv=nn.Conv2d(3, 4, 3, padding=1)) for _ in range(3)]
    posterior = ds.DeepEnsemble(networks, likelihood=ds.Classification(ignore_index=255))
    x, y = torch.rand(5, 3, 12, 12), torch.randint(4, (5, 12, 12))
    y[:, :3] = 255
    return posterior, x, y


def test_segmentation_metrics_are_those_of_all_pixels_at_once():
    posterior, x, y = segmentation()
    result = evaluate(posterior, [(x[:2], y[:2]), (x[2:], y[2:])], corrupt=["contrast"])
    predictive = posterior.predict(x)
    expected = {
        "accuracy": metrics.accuracy(predictive.mean, y, ignore_index=255),
        "nll": metrics.nll(predictive.log_mean, y, ignore_index=255),
        "brier": metrics.brier(predictive.mean, y, ignore_index=255),
        "ece": metrics.ece(predictive.mean, y, ignore_index=255),
        "miou": metrics.miou(predictive.mean, y, ignore_index=255),
        "members/nll": metrics.ensemble_gain(predictive.log_probs, y, ignore_index=255).member_nll,
        "members/diversity": metrics.ensemble_gain(predictive.log_probs, y, ignore_index=255).diversity,
        "members/disagreement": metrics.disagreement(predictive.log_probs[:, :, :, 3:]),
    }
    for name, value in expected.items():
        assert result.metrics[name] == pytest.approx(float(value), abs=1e-6), name
    errors = (metrics.smooth_ece, metrics.adaptive_ece)
    smooth, adaptive = (float(error(predictive.mean, y, ignore_index=255)) for error in errors)
    assert result.metrics["smooth_ece"] == pytest.approx(smooth, abs=4e-4)  # of binned confidences
    assert result.metrics["adaptive_ece"] == pytest.approx(
        adaptive, abs=4e-4 + 14 / 540
    )  # one pixel at each of 14 ends
    assert result.kind == "segmentation"
    wrong = (predictive.mean.argmax(1) != y).double()[y != 255]
    score = metrics.max_probability_score(predictive.log_mean)[y != 255]
    assert result.metrics["aurc"] == pytest.approx(float(metrics.aurc(-score, wrong)), abs=2e-3)  # binned
    assert result.arrays["risk_coverage/coverage"][-1] == 1
    assert float(result.arrays["risk_coverage/risk"][-1]) == pytest.approx(1 - result.metrics["accuracy"], abs=1e-12)
    damaged = [posterior.predict(corrupt(x, "contrast", s)).mean for s in range(1, 6)]
    direct = sum(float(metrics.accuracy(mean, y, ignore_index=255)) for mean in damaged) / 5
    assert result.metrics["corrupt/accuracy"] == pytest.approx(direct, abs=1e-6)


@pytest.mark.parametrize("score", ["max_probability", "total", "epistemic", "energy"])
def test_segmentation_ranks_ood_pixels_image_by_image(score):
    posterior, x, y = segmentation()
    mask = torch.randint(2, (5, 12, 12))
    mask[:, -1] = 7  # void
    mask[4] = 0  # an image without OOD pixels has no ranking
    result = evaluate(posterior, [(x, y)], ood={"odd": [(x[:2], mask[:2]), (x[2:], mask[2:])]}, score=score)
    predictive = posterior.predict(x)
    value = {
        "max_probability": metrics.max_probability_score(predictive.log_mean),
        "total": metrics.total_uncertainty(predictive.log_mean),
        "epistemic": metrics.epistemic_uncertainty(predictive.log_probs),
        "energy": -torch.logsumexp(posterior(x).double(), 2).mean(0),
    }[score]
    expected = metrics.per_image_ood(value, mask == 1, void=mask == 7)
    assert result.metrics["ood/odd/auroc"] == pytest.approx(float(expected.auroc), abs=1e-6)
    assert result.metrics["ood/odd/aupr"] == pytest.approx(float(expected.aupr), abs=1e-6)
    assert result.metrics["ood/odd/fpr95"] == pytest.approx(float(expected.fpr95), abs=1e-6)
    inside, outside = value[mask == 0], value[mask == 1]
    for name in ("auroc", "aupr", "fpr95", "fpr95_in"):
        pooled = getattr(metrics, name)(inside, outside)
        assert result.metrics[f"ood/odd/pooled_{name}"] == pytest.approx(float(pooled), abs=2e-2)
        alone = [getattr(metrics, name)(value[i][mask[i] == 0], value[i][mask[i] == 1]) for i in range(4)]
        torch.testing.assert_close(result.arrays[f"ood/odd/{name}"], torch.stack(alone), rtol=0, atol=1e-6)
        assert result.metrics[f"ood/odd/{name}"] == pytest.approx(float(torch.stack(alone).mean()), abs=1e-6)
        assert result.metrics[f"ood/odd/{score}/{name}"] == result.metrics[f"ood/odd/{name}"]
    others = {"max_probability", "total", "epistemic"} - {score}
    assert all(len(result.arrays[f"ood/odd/{other}/fpr95_in"]) == 4 for other in others)


def test_ece_union_has_the_known_pixels_of_the_test_set_and_all_ood_pixels_wrong():
    posterior, x, y = segmentation()
    mask = torch.randint(2, (5, 12, 12)).masked_fill(y == 255, 255).to(torch.uint8)
    known = y.masked_fill(mask == 1, 255)
    result = evaluate(posterior, [(x, known)], ood={"odd": [(x[:3], mask[:3]), (x[3:], mask[3:])]})
    mean = posterior.predict(x).mean.movedim(1, -1)
    expected = metrics.union_ece(mean[known != 255], known[known != 255], mean[mask == 1])
    assert result.metrics["ood/odd/ece_union"] == pytest.approx(float(expected), abs=1e-6)


def test_every_class_has_its_intersection_over_union_and_every_image_what_it_is_made_of():
    posterior, x, y = segmentation()
    names = ("sky", "road", "tree", "car")
    result = evaluate(posterior, [(x[:4], y[:4]), (x[4:], y[4:])], classes=names)
    prediction = posterior.predict(x).mean.argmax(1)
    matrix = metrics.confusion_matrix(prediction, y, classes=4, ignore_index=255)
    iou = metrics.intersection_over_union(matrix)
    assert [result.metrics[f"iou/{name}"] for name in names] == pytest.approx(iou.tolist(), abs=1e-12)
    inside, union = result.arrays["test/intersection"], result.arrays["test/union"]
    assert inside.shape == union.shape == (5, 4)
    torch.testing.assert_close(inside.sum(0) / union.sum(0).double(), iou, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.arrays["test/nll"].mean(), torch.tensor(result.metrics["nll"]).double())
    assert result.notes["classes"] == "\n".join(names)
    y = y.clamp(max=2)  # no pixel of the last class, and none predicted
    unseen = evaluate(posterior, [(x, torch.where(prediction == 3, 255, y))])
    assert {key for key in unseen.metrics if key.startswith("iou/")} == {"iou/0", "iou/1", "iou/2"}
    refuses(lambda: evaluate(posterior, [(x, y)], classes=("sky", "road")), "expected 4 class names, got 2")


def test_intervals_of_a_segmentation_are_of_the_numbers_that_are_shown():
    posterior, x, y = segmentation()
    y[0, 4:] = 255  # few pixels of this image count
    first, again, others = (evaluate(posterior, [(x[rows], y[rows])]) for rows in ([0, 1, 2], [0, 1, 2], [0, 3, 4]))
    for measure in of_report(first):
        if measure.key in ("accuracy", "nll", "miou"):
            arrays = [first.arrays[name] for group in measure.samples for name in group]
            value = measure.statistic([torch.ones(1, 3, dtype=torch.float64)], *arrays)
            assert float(value) == pytest.approx(first.metrics[measure.key], abs=1e-6)
            assert resample_measure(measure, [first, again]).seed_overlap == "shared"
            assert resample_measure(measure, [first, others]).seed_overlap == "own"


def test_labels_to_ignore_are_left_out_of_a_classification():
    torch.manual_seed(1)
    posterior = ds.MAP(ds.nets.MLP(4, 3, hidden=(8,)), likelihood=ds.Classification(ignore_index=9))
    x, y = rows()
    marked = y.clone()
    marked[::4] = 9
    kept = marked != 9
    with_ignored = evaluate(posterior, Batches(x, marked, batch_size=7)).metrics
    without = evaluate(posterior, [(x[kept], y[kept])]).metrics
    for name in ("accuracy", "nll", "brier", "ece", "aurc"):
        assert with_ignored[name] == pytest.approx(without[name], abs=1e-6)


def test_one_member_has_no_member_metrics():
    x, y = rows()
    found = evaluate(ds.MAP(ds.nets.MLP(4, 3)), [(x, y)])
    assert not any(name.startswith("members/") for name in found.metrics)
    assert "test/score/epistemic" not in found.arrays


def test_the_table_is_grouped_and_aligned_and_leaves_out_single_corruptions():
    x, y = images()
    posterior = ensemble(inputs=256)
    ds.conformal(posterior, [(x, y)], level=0.5, name="mine")
    result = evaluate(posterior, [(x, y)], corrupt=["fog"], ood={"far": [(x, y)]})
    lines, groups, heading = [], {}, ""
    for line in result.table().splitlines():
        if line.startswith("  "):
            lines.append(line)
            groups[line.split()[0]] = heading
        else:
            heading = line
    names = list(groups)
    expected = {
        "nll": "Accuracy", "smooth_ece": "Calibration", "augrc": "Refusing to answer", "cost/parameters": "Cost",
    }  # fmt: skip
    expected |= {"mine/hard/coverage": "Guarantees", "ood/far/auroc": "Foreign inputs", "corrupt/nll": "Robustness"}
    assert {name: groups[name] for name in expected} == expected
    assert "Other" not in groups.values()
    assert "corrupt/fog/nll" not in names
    assert "corrupt/severity1/nll" not in names
    assert len({line.index(line.split()[1]) for line in lines}) == 1
    assert isinstance(result, Evaluation)


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.1235"), (0.0, "0.0000"), (12.0, "12"), (2e-5, "2e-05"), (math.inf, "inf")]
)
def test_numbers_are_written_short(value, text):
    assert metric_text(value) == text


@pytest.mark.parametrize(("keywords", "message"), [
    ({"ood": {"b": [(torch.zeros(3, 5), torch.zeros(3))]}}, r"shape \(4,\) in 'b', as in the test set, got \(5,\)"),
    ({"ood": {"a/b": []}}, "without '/'"),
    ({"ood": {"b": []}}, "expected batches in 'b'"),
    ({"score": "entropi"}, "expected score of max_probability, total"),
    ({"score": "variance"}, "expected score of max_probability, total, .*, got 'variance'; .*pass 'total'"),
    ({"score": "mutual_information"}, "pass 'epistemic'"),
    ({"corrupt": ["fog"]}, "expected images"),
    ({"corrupt": "everything"}, '"all", "benchmark"'),
    ({"shift": {"b": [(torch.zeros(3, 4), torch.tensor([0, 1, 3]))]}}, "labels in 0…2"),
])  # fmt: skip
def test_bad_arguments_are_one_clear_error(keywords, message):
    x, y = rows()
    refuses(lambda: evaluate(ensemble(), [(x, y)], **keywords), message)


def test_other_bad_input_is_one_clear_error():
    x, y = rows()
    refuses(lambda: evaluate(ensemble(), [(x, torch.ones(60, 3))]), "expected soft labels ≥ 0 that sum to one")
    refuses(lambda: evaluate(ensemble(), [(x, torch.eye(3, dtype=torch.long)[y * 0])]), "not one-hot rows")
    refuses(lambda: evaluate(ensemble(), [(x, torch.full((60,), -1))]), "expected labels in 0…2, got -1")
    refuses(lambda: evaluate(ds.nets.MLP(4, 3), [(x, y)]), "expected a posterior, got MLP", TypeError)
    told = r"expected ood as a dict of loaders, got list; pass ood={'name': loader}"
    refuses(lambda: evaluate(ensemble(), [(x, y)], ood=[(x, y)]), told, TypeError)
    for precision in ("float16", "half", torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=r'expected precision of float32, bf16, got .*half precision is "bf16"'):
            evaluate(ensemble(), [(x, y)], precision=precision)
    refuses(lambda: evaluate(ensemble(), []), "at least one batch")
    refuses(lambda: evaluate(ds.MAP(ds.nets.MLP(4, 3)), [(x, y)], score="epistemic"), "several members")
    refuses(lambda: evaluate(ensemble(), [(x * math.nan, y)]), "NaN")
    posterior, pictures, labels = segmentation()
    with pytest.raises(ValueError, match="expected a mask of shape"):
        evaluate(posterior, [(pictures, labels)], ood={"odd": [(pictures, torch.zeros(5))]})
    with pytest.raises(ValueError, match="both OOD and other pixels"):
        evaluate(posterior, [(pictures, labels)], ood={"odd": [(pictures, torch.zeros(5, 12, 12).long())]})
    for values in ((0, 1, 2), (0, 1, 200, 255)):  # labels of classes
        masks = torch.tensor(values)[torch.randint(len(values), (5, 12, 12))]
        with pytest.raises(ValueError, match=r"expected masks of 0, 1 and one void number in 'odd', got \["):
            evaluate(posterior, [(pictures, labels)], ood={"odd": [(pictures, masks)]})


def test_severities_stand_in_the_order_given():
    x, y = images()
    posterior = ensemble(inputs=256)
    both = evaluate(posterior, [(x, y)], corrupt=Corruptions(["gaussian_noise"], (5, 1)))
    hard = evaluate(posterior, [(x, y)], corrupt=Corruptions(["gaussian_noise"], (5,)))
    assert both.severities == (5, 1)
    assert both.arrays["corrupt/nll"][0, 0] == hard.arrays["corrupt/nll"][0, 0]
    assert both.arrays["corrupt/nll"][0, 0] != both.arrays["corrupt/nll"][0, 1]


def test_weights_that_metrics_leave_out_are_said_to_be(caplog):
    posterior = ensemble()
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    padded = torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 0])
    with caplog.at_level("WARNING", logger="dissensus"):
        evaluate(posterior, [(x, y, torch.ones(8))])
        assert not caplog.records
        evaluate(posterior, [(x, y, torch.ones(8)), (x, y, padded), (x, y, padded)])
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["the weights in 'test' are ignored"]
    caplog.clear()
    model, pictures, labels = segmentation()
    with caplog.at_level("WARNING", logger="dissensus"):
        evaluate(model, [(pictures, labels, torch.zeros(len(labels)))])
    assert "the weights in 'test' are ignored" in caplog.text


def test_batches_padded_to_lengths_of_their_own_are_evaluated():
    pooled = tiny.Network(lambda self, x: self.table(x).mean(1), table=nn.Embedding(7, 3))  # (B, T) -> (B, 3)
    posterior = ds.MAP(pooled.double())
    short, long = torch.randint(7, (6, 4)), torch.randint(7, (5, 9))
    y = torch.arange(11) % 3
    loader = [(short, y[:6]), (long, y[6:])]
    foreign = [(long, long), (short, short)]  # its targets, padded as well, are not read
    result = evaluate(posterior, loader, ood={"odd": foreign}, shift={"moved": loader[::-1]})
    network = posterior.particles.template.network
    outputs = torch.cat([network(short), network(long)])
    assert result.metrics["nll"] == pytest.approx(float(nn.functional.cross_entropy(outputs, y)), rel=1e-12)
    assert result.metrics["shift/moved/nll"] == pytest.approx(result.metrics["nll"], rel=1e-12)
    assert result.metrics["ood/odd/auroc"] == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"expected inputs of shape \(4,\) in 'odd', as in the test set, got \(9,\)"):
        evaluate(posterior, loader[:1], ood={"odd": foreign})


def test_images_of_several_sizes_are_evaluated_and_those_of_the_first_are_shown():
    posterior = ds.MAP(nn.Sequential(nn.Conv2d(1, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    small, large = torch.rand(4, 1, 5, 5), torch.rand(4, 1, 8, 8)
    result = evaluate(posterior, [(small, torch.arange(4) % 3), (large, torch.arange(4) % 3)])
    assert len(result.arrays["test/nll"]) == 8
    assert result.arrays["examples/most/inputs"].shape == (4, 1, 5, 5)


def test_token_labels_padded_to_lengths_of_their_own_are_counted_one_by_one():
    tagger = tiny.Network(lambda self, x: self.table(x).movedim(-1, 1), table=nn.Embedding(7, 3))  # (B, C, T)
    posterior = ds.MAP(tagger.double(), likelihood=ds.Classification(ignore_index=-1))
    short, long = torch.randint(7, (6, 4)), torch.randint(7, (5, 9))
    marked = torch.where(long == 6, -1, long % 3)
    network = posterior.particles.template.network
    flat = torch.cat([network(each).movedim(1, -1).reshape(-1, 3) for each in (short, long)])
    expected = nn.functional.cross_entropy(flat, torch.cat([(short % 3).flatten(), marked.flatten()]), ignore_index=-1)
    result = evaluate(posterior, [(short, short % 3), (long, marked)])
    assert result.metrics["nll"] == pytest.approx(float(expected), rel=1e-12)


# ---------------------------------------------------------------------------------------------------- precision


def test_in_bf16_every_number_is_that_of_predictions_in_bf16():
    posterior, (x, y) = ensemble(inputs=256), images()
    attack = ds.AttackCurves([0.1], names=["fgsm"])
    settings = {"ood": {"far": [(x + 1, y)]}, "shift": {"moved": [(x, y)]}, "corrupt": ["fog"], "attack": attack}
    exact, half = (evaluate(posterior, [(x, y)], **settings, precision=each) for each in ("float32", "bf16"))
    predictive = ds.predict(posterior, [(x, y)], precision="bf16")
    assert half.metrics["nll"] == pytest.approx(float(metrics.nll(predictive.log_mean, y)), abs=1e-9)
    assert half.metrics["shift/moved/nll"] == half.metrics["nll"]
    foggy = [ds.predict(posterior, [(corrupt(x, "fog", s), y)], precision="bf16").log_mean for s in range(1, 6)]
    expected = torch.stack([metrics.nll(each, y) for each in foggy]).mean()
    assert half.metrics["corrupt/nll"] == pytest.approx(float(expected), abs=1e-6)
    for name in ("nll", "brier", "shift/moved/nll", "corrupt/nll", "attack/fgsm/nll", "members/nll"):
        assert half.metrics[name] != exact.metrics[name], name
        assert half.metrics[name] == pytest.approx(exact.metrics[name], rel=0.02), name
    assert not torch.equal(half.arrays["ood/far/score/energy"], exact.arrays["ood/far/score/energy"])
    assert half.notes["precision"] == "bf16"
    assert "in bf16" in repr(half)
    assert "precision" not in exact.notes
    assert not half.cautions


def test_a_segmentation_is_evaluated_in_bf16():
    torch.manual_seed(0)
    posterior, x = ds.DeepEnsemble([tiny.segmenter() for _ in range(2)]), torch.randn(3, 2, 5, 5)
    y = torch.randint(3, (3, 5, 5))
    half = evaluate(posterior, [(x, y)], precision="bf16").metrics["nll"]
    log_mean = ds.predict(posterior, [(x, y)], precision="bf16").log_mean
    assert half == pytest.approx(float(metrics.nll(log_mean, y)), abs=1e-9)
    assert half != evaluate(posterior, [(x, y)]).metrics["nll"]


def test_what_was_fitted_in_float32_is_said_where_predictions_are_in_bf16(caplog):
    posterior, loader = ensemble(), [rows()]
    evaluate(posterior, loader, precision="bf16")
    assert not caplog.records
    posterior.temperature.fill_(2.0)
    ds.conformal(posterior, loader, level=0.8)
    ds.predict(posterior, loader)
    evaluate(posterior, loader)
    assert not caplog.records
    ds.predict(posterior, loader, precision="bf16")
    evaluate(posterior, loader, precision="bf16")
    said = "conformal, a temperature: fitted to predictions in float32, applied to predictions in bf16"
    assert [said in record.message for record in caplog.records] == [True, True]

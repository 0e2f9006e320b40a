"""Example weights: ones are the plain metric, whole numbers are repeated examples, and what is no weight is named."""

import pytest
import torch

from dissensus import metrics
from dissensus.metrics.calibration import confidence_ece
from refusals import refuses

RANKINGS = {
    "auroc": {},
    "aupr": {},
    "aupr_in": {},
    "aupr_adjusted": {"prevalence": 0.3},
    "fpr95": {},
    "fpr95_in": {"rule": "nearest", "recall": 0.8},
}


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Scores with many ties, and four rows of weights for both."""
    generator = torch.Generator().manual_seed(seed)
    inside = torch.randint(30, (70,), generator=generator).double()
    outside = torch.randint(10, 40, (50,), generator=generator).double()
    weights = [torch.randint(4, (4, n), generator=generator) for n in (70, 50)]
    return inside, outside, (weights[0], weights[1])


@pytest.mark.parametrize(("name", "options"), RANKINGS.items())
@pytest.mark.parametrize("seed", range(5))
def test_weighted_rankings_are_the_rankings_of_repeated_inputs(name, options, seed):
    inside, outside, (a, b) = drawn(seed)
    metric = getattr(metrics, name)
    found = metric(inside, outside, weights=(a, b), **options)
    assert found.shape == (4,)
    for r in range(4):
        plain = metric(inside.repeat_interleave(a[r]), outside.repeat_interleave(b[r]), **options)
        assert float(found[r]) == pytest.approx(float(plain), abs=1e-12)
    ones = torch.ones(70), torch.ones(50)
    assert float(metric(inside, outside, weights=ones, **options)) == pytest.approx(
        float(metric(inside, outside, **options)), abs=1e-12
    )


def test_weighted_calibration_and_selection_are_those_of_repeated_examples():
    inside, _, (weights, _) = drawn(0)
    confidence, correct = 0.2 + 0.8 * inside / 30, (torch.arange(70) % 3 > 0).double()
    loss = torch.linspace(0, 2, 70, dtype=torch.float64)
    ece = confidence_ece(confidence, correct, weights=weights)
    area = metrics.aurc(confidence, loss, weights=weights)
    for r, w in enumerate(weights):
        again = [each.repeat_interleave(w) for each in (confidence, correct, loss)]
        assert float(ece[r]) == pytest.approx(float(confidence_ece(again[0], again[1])), abs=1e-12)
        assert float(area[r]) == pytest.approx(float(metrics.aurc(again[0], again[2])), abs=1e-12)
    # the plain area is the mean of the curve it is named after
    torch.testing.assert_close(metrics.aurc(confidence, loss), metrics.risk_coverage(confidence, loss).risk.mean())


def test_what_is_no_weight_is_named():
    inside, outside, (a, b) = drawn(0)
    with pytest.raises(ValueError, match=r"expected the weights of score_ood \(..., 50\), got \(4, 70\)"):
        metrics.auroc(inside, outside, weights=(a, a))
    refuses(lambda: metrics.auroc(inside, outside, weights=(-a, b)), "at least zero with a positive sum")
    with pytest.raises(ValueError, match="at least zero with a positive sum"):
        confidence_ece(inside / 30, inside > 3, weights=torch.zeros(70))
    refuses(lambda: metrics.aurc(inside, inside, weights=torch.full((70), 0.5)), "expected whole numbers as weights")

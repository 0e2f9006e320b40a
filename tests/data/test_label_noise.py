"""Wrong labels on purpose: how many, which, and that nothing else is touched."""

import pytest
import torch

from dissensus.data import noisy_labels, split_indices


def test_exactly_the_share_is_wrong_and_every_other_class_as_likely():
    labels = torch.arange(10).repeat(2000)
    state = torch.get_rng_state()
    noisy = noisy_labels(labels, 0.4, classes=10, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    wrong = noisy != labels
    assert int(wrong.sum()) == 8000
    steps = torch.bincount((noisy - labels)[wrong] % 10, minlength=10)
    assert steps[0] == 0
    expected = 8000 / 9
    assert ((steps[1:] - expected).abs() < 5 * expected**0.5).all()  # five standard errors, nine classes
    assert torch.equal(noisy, noisy_labels(labels, 0.4, classes=10, seed=3))
    assert not torch.equal(noisy, noisy_labels(labels, 0.4, classes=10, seed=4))


def test_less_noise_is_a_part_of_more():
    labels = torch.arange(300) % 3
    some, more = (noisy_labels(labels, share, classes=3) for share in (0.2, 0.5))
    wrong = some != labels
    assert torch.equal(some[wrong], more[wrong])
    assert torch.equal(noisy_labels(labels, 0.0, classes=3), labels)
    assert (noisy_labels(labels, 1.0, classes=3) != labels).all()


def test_wrong_rows_are_not_those_that_are_held_out_with_the_same_seed():
    labels = torch.arange(4000) % 4
    wrong = noisy_labels(labels, 0.25, classes=4, seed=0) != labels
    for known in (None, labels):
        _, held = split_indices(4000, validation=0.25, seed=0, labels=known)
        assert abs(float(wrong[held].double().mean()) - 0.25) < 5 * (0.25 * 0.75 / 1000) ** 0.5


@pytest.mark.parametrize(
    ("labels", "share", "message"),
    [
        (torch.arange(4), 1.5, "expected share of at least 0 and of at most 1, got 1.5"),
        (torch.arange(4), 0.5, "expected labels .N,. from 0 to 2"),
        (torch.ones(4), 0.5, "expected labels .N,. from 0 to 2"),
    ],
)
def test_what_is_no_label_or_no_share_is_an_error(labels, share, message):
    with pytest.raises(ValueError, match=message):
        noisy_labels(labels, share, classes=3)

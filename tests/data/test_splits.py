"""Splits are disjoint, complete, proportional and repeatable."""

import pytest
import torch

from dissensus.data import ImageSet, split_indices, train_validation
from refusals import refuses


@pytest.mark.parametrize("labels", [None, torch.arange(101) % 7])
def test_train_and_validation_rows_are_disjoint_and_complete(labels):
    train, held = split_indices(101, validation=30, labels=labels)
    assert len(held) == 30
    assert torch.equal(torch.cat([train, held]).sort().values, torch.arange(101))
    assert torch.equal(train, train.sort().values)
    assert torch.equal(held, held.sort().values)


def test_stratified_shares_follow_the_largest_remainder():
    """held · n_c / N = 3.6, 2.4, 1.0 for 36, 24 and 10 of 70 rows and 7 held: floors 3, 2, 1 and the one left to class 0."""
    labels = torch.repeat_interleave(torch.tensor([5, 2, 9]), torch.tensor([36, 24, 10]))
    _, held = split_indices(70, validation=7, labels=labels, seed=4)
    assert labels[held].bincount(minlength=10)[[5, 2, 9]].tolist() == [4, 2, 1]


@pytest.mark.parametrize("labels", [None, torch.arange(20) % 2])
def test_every_row_is_held_out_equally_often(labels):
    """Each of 20 rows is held in a share 0.2 of 400 seeds, within 4 standard errors."""
    times = torch.zeros(20)
    for seed in range(400):
        times[split_indices(20, validation=4, seed=seed, labels=labels)[1]] += 1
    assert ((times / 400 - 0.2).abs() < 4 * (0.2 * 0.8 / 400) ** 0.5).all()


def test_the_seed_alone_decides_and_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    first = split_indices(50, validation=0.2, seed=3)
    torch.manual_seed(99)
    again = split_indices(50, validation=0.2, seed=3)
    other = split_indices(50, validation=0.2, seed=4)
    torch.random.set_rng_state(before)
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])
    split_indices(50, validation=10)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_share_is_a_number_of_rows():
    assert len(split_indices(1000, validation=0.1)[1]) == 100


@pytest.mark.parametrize("validation", [0, 10, -1, 0.0, 1.0, 1.5, 11])
def test_a_validation_set_must_leave_both_parts_with_rows(validation):
    refuses(lambda: split_indices(10, validation=validation), "between 1 and 9 validation rows of 10")


def test_wrong_types_and_label_shapes_are_refused():
    refuses(lambda: split_indices(10, validation=True), "expected validation as a number", TypeError)
    refuses(lambda: split_indices(10, validation=2, labels=torch.zeros(9, dtype=torch.int64)), "labels of shape")


def test_image_sets_are_cut_with_their_labels():
    labels = torch.arange(40) % 4
    images = torch.arange(40, dtype=torch.uint8)[:, None, None, None].expand(40, 1, 2, 2)
    train, held = train_validation(ImageSet(images, labels, "forty", tuple("abcd")), validation=8, seed=1)
    assert held.labels.bincount().tolist() == [2] * 4
    for part in (train, held):
        assert torch.equal(part.images[:, 0, 0, 0].long() % 4, part.labels)
    loose = train_validation(ImageSet(images, labels, "forty", tuple("abcd")), validation=8, seed=1, stratified=False)[
        1
    ]
    assert torch.equal(loose.images[:, 0, 0, 0].long(), split_indices(40, validation=8, seed=1)[1])

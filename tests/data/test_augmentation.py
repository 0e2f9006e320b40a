"""Augmentation of whole batches gives what one image at a time would."""

import pytest
import torch
import torch.nn.functional as F

from dissensus.data import Augmentation, Batches


def numbered(batch: int = 64, channels: int = 3, side: int = 8) -> torch.Tensor:
    """Images whose pixels are all different and positive, so that any shift can be read off."""
    return torch.arange(1.0, batch * channels * side * side + 1).reshape(batch, channels, side, side)


def test_every_image_is_a_crop_of_its_padded_copy_or_of_its_mirror_image() -> None:
    images = numbered()
    out = Augmentation(padding=2, flip=True, seed=0)(images)
    assert out.shape == images.shape
    padded = F.pad(images, [2] * 4)
    mirrored = F.pad(images.flip(-1), [2] * 4)
    found = []
    for b in range(len(images)):
        matches = [
            (flipped, i, j)
            for flipped, source in ((0, padded), (1, mirrored))
            for i in range(5)
            for j in range(5)
            if torch.equal(out[b], source[b, :, i : i + 8, j : j + 8])
        ]
        assert len(matches) == 1
        found.append(matches[0])
    assert {f for f, _, _ in found} == {0, 1}
    assert {i for _, i, _ in found} == {j for _, _, j in found} == set(range(5))


def test_crops_and_flips_are_uniform() -> None:
    images = torch.zeros(20_000, 1, 4, 4)
    images[:, :, 1, 1] = 1.0
    out = Augmentation(padding=1, flip=True, seed=1)(images)
    # The marked pixel is at column 1 or (mirrored) 2, shifted by −1, 0 or 1, each with probability 1/6; rows likewise 1/3.
    columns = out.sum((1, 2)).mean(0)
    expected = torch.tensor([1, 2, 2, 1]) / 6
    error = 4 * (expected * (1 - expected) / 20_000).sqrt()
    assert ((columns - expected).abs() < error).all()
    rows = out.sum((1, 3)).mean(0)
    assert ((rows - torch.tensor([1, 1, 1, 0]) / 3).abs() < 4 * (2 / 9 / 20_000) ** 0.5).all()


def test_cutout_blanks_one_square_that_may_reach_over_the_edge() -> None:
    images = torch.ones(500, 2, 10, 10)
    out = Augmentation(padding=0, flip=False, cutout=4, seed=2)(images)
    holes = out[:, 0] == 0
    assert torch.equal(holes, out[:, 1] == 0)
    sizes = holes.sum((1, 2))
    assert sizes.max() == 16
    assert sizes.min() >= 4  # the centre is inside: at least a quarter of the square
    for hole in holes:
        rows, columns = hole.any(1), hole.any(0)
        assert torch.equal(hole, rows[:, None] & columns[None])  # a rectangle


def test_nothing_asked_for_changes_nothing_and_seeds_repeat() -> None:
    images = numbered()
    assert torch.equal(Augmentation(padding=0, flip=False)(images), images)
    first, second = Augmentation(seed=5, cutout=2), Augmentation(seed=5, cutout=2)
    one = first(images)
    assert torch.equal(one, second(images))
    assert not torch.equal(one, first(images))  # its stream goes on
    state = torch.get_rng_state()
    first(images)
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_augment_inputs_only() -> None:
    images, labels = numbered(), torch.arange(64)
    loader = Batches(images, labels, batch_size=16, augment=Augmentation(padding=0, flip=False, cutout=8, seed=0))
    for x, y in loader:
        assert (x == 0).any()
        assert torch.equal(y, labels[y])


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="padding of at least 0"):
        Augmentation(padding=-1)

"""Augmentation of whole batches gives what one image at a time would."""

import pytest
import torch
import torch.nn.functional as F

from dissensus.data import VOID, Augmentation, Batches, SegmentationAugmentation
from refusals import refuses


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
    refuses(lambda: Augmentation(padding=-1), "padding of at least 0")


def scene(batch: int = 40, size: tuple[int, int] = (12, 16)) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose channels are the row and the column of a pixel's centre, masks that number the pixels."""
    rows, columns = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) + 0.5 for n in size), indexing="ij")
    masks = (rows.long() * size[1] + columns.long())[None].expand(batch, *size)
    return torch.stack([rows, columns])[None].expand(batch, 2, *size), masks


@pytest.mark.parametrize("crop", [None, (8, 9), (20, 30)])
def test_image_and_mask_are_changed_alike(crop):
    images, masks = scene()
    seen, labels = SegmentationAugmentation(scale=(0.5, 2.0), crop=crop, seed=0)(images, masks)
    assert labels.shape == (40, *(crop or (12, 16)))
    inside = labels != VOID
    # The image says where in the scene a pixel comes from, the mask which pixel is there: the same one.
    row, column = seen[:, 0], seen[:, 1]
    away = torch.stack([(row - (labels // 16 + 0.5)).abs(), (column - (labels % 16 + 0.5)).abs()])[:, inside]
    assert inside.any()
    assert away.max() <= 0.5 + 1e-5
    assert (seen.movedim(1, -1)[~inside] == 0).all()


def test_scales_flips_and_places_are_those_drawn():
    images, masks = scene(400)
    seen, labels = SegmentationAugmentation(scale=(1.0, 1.6), seed=1)(images, masks)
    assert (labels != VOID).all()  # larger images fill the window
    step = seen[:, 1, 5, 9] - seen[:, 1, 5, 8]  # columns of the scene that a new column covers
    factor = 1 / step.abs()
    assert factor.min() >= 1 - 1e-6
    assert factor.max() <= 1.6 + 1e-6
    assert abs(float(factor.mean()) - 1.3) < 4 * 0.6 / 12**0.5 / 400**0.5
    assert abs(float((step < 0).double().mean()) - 0.5) < 4 * 0.5 / 400**0.5


def test_nothing_is_changed_where_nothing_is_asked_for():
    images, masks = scene(3)
    seen, labels = SegmentationAugmentation(flip=False, scale=(1.0, 1.0), seed=0)(images, masks)
    torch.testing.assert_close(seen, images, rtol=0, atol=1e-5)
    assert torch.equal(labels, masks)


def test_batches_hand_both_to_a_joint_augmentation_whose_stream_goes_on():
    images, masks = scene(6)

    def loader() -> Batches:
        return Batches(images, masks.to(torch.uint8), batch_size=4, augment=SegmentationAugmentation(seed=3))

    first, second = loader(), loader()
    batches = [*first, *first]
    assert batches[0][1].dtype == torch.uint8
    assert [len(y) for _, y in batches] == [4, 2, 4, 2]
    _ = [*second]
    third = loader()
    third.load_state_dict(second.state_dict())
    for (x, y), (x_again, y_again) in zip(batches[2:], third, strict=True):
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)
    assert not torch.equal(batches[0][0], batches[2][0])


def test_scales_that_are_none_are_refused():
    refuses(lambda: SegmentationAugmentation(scale=(1.5, 1.0)), r"expected scale of at least 1.5, got 1")
    refuses(lambda: SegmentationAugmentation(scale=(0.0, 1.0)), "expected scale above 0")

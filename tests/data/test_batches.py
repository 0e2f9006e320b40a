"""Batches hold what a DataLoader's hold; augmentation and input transforms give what one input at a time would."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus.data import VOID, Augmentation, Batches, SegmentationAugmentation
from dissensus.data.input_transforms import RowInputs, TableInputs, as_input_transform
from refusals import refuses

X = torch.arange(46.0).reshape(23, 2)
Y = torch.arange(23)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 23, 50])
def test_unshuffled_batches_equal_those_of_a_data_loader(batch_size, drop_last):
    kept = {"batch_size": batch_size, "drop_last": drop_last}
    ours, theirs = Batches(X, Y, **kept), DataLoader(TensorDataset(X, Y), **kept)
    assert len(ours) == len(theirs)
    for _ in range(2):
        pairs = list(zip(ours, theirs, strict=True))
        assert len(pairs) == len(ours)
        for (x, y), (x_loader, y_loader) in pairs:
            assert torch.equal(x, x_loader)
            assert torch.equal(y, y_loader)


@pytest.mark.parametrize("drop_last", [False, True])
def test_shuffled_batches_hold_every_row_once_with_its_own_target(drop_last):
    ours = Batches(X, Y, batch_size=5, shuffle=True, seed=0, drop_last=drop_last)
    theirs = DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True, drop_last=drop_last)
    ours, theirs = list(ours), list(theirs)
    assert [len(y) for _, y in ours] == [len(y) for _, y in theirs]
    for x, y in ours:
        assert torch.equal(x, X[y])
    rows = torch.cat([y for _, y in ours])
    assert len(rows.unique()) == len(rows)
    if not drop_last:
        assert torch.equal(rows.sort().values, torch.cat([y for _, y in theirs]).sort().values)


def order(batches) -> list[int]:
    return torch.cat([y for _, y in batches]).tolist()


def test_a_seed_repeats_the_run_and_advances_with_every_epoch():
    first, second = (Batches(X, Y, batch_size=4, shuffle=True, seed=7) for _ in range(2))
    epochs = [order(first) for _ in range(3)]
    torch.manual_seed(123)
    assert epochs == [order(second) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != order(Batches(X, Y, batch_size=4, shuffle=True, seed=8))


def test_a_seeded_or_unshuffled_epoch_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    order(Batches(X, Y, batch_size=4, shuffle=True, seed=7))
    order(Batches(X, Y, batch_size=4))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_without_a_seed_the_global_generator_decides_when_the_loop_starts():
    batches = Batches(X, Y, batch_size=4, shuffle=True)
    torch.manual_seed(5)
    first = order(batches)
    second = order(batches)
    torch.manual_seed(5)
    started = iter(batches)
    torch.manual_seed(6)
    assert order(started) == first
    assert second != first


def test_two_loops_over_the_same_batches_do_not_disturb_each_other():
    batches = Batches(X, Y, batch_size=23, shuffle=True, seed=1)
    reference = Batches(X, Y, batch_size=23, shuffle=True, seed=1)
    expected = [order(reference), order(reference)]
    one, two = iter(batches), iter(batches)
    assert order(two) == expected[1]
    assert order(one) == expected[0]


def test_orders_are_uniform():
    """Each of the 6 orders of 3 rows appears in 1/6 of 6,000 epochs, within 4 standard errors."""
    batches = Batches(X[:3], Y[:3], batch_size=3, shuffle=True, seed=0)
    seen = [tuple(order(batches)) for _ in range(6000)]
    assert len(set(seen)) == 6
    for permutation in set(seen):
        assert abs(seen.count(permutation) / 6000 - 1 / 6) < 4 * (5 / 36 / 6000) ** 0.5


def test_wrong_arguments_are_refused():
    refuses(lambda: Batches(X, Y[:-1], batch_size=4), "as many inputs as targets")
    refuses(lambda: Batches(X, Y, batch_size=0), "batch_size of at least 1")
    refuses(lambda: Batches(X, Y, batch_size=4, seed=0), "no seed without shuffle")


def test_tuples_dicts_and_weights_are_cut_alike() -> None:
    a, b, y, weight = torch.arange(10), torch.arange(10) + 100, torch.arange(10) * 2, torch.rand(10)
    for x in ((a, b), {"a": a, "b": b}):
        seen = 0
        for inputs, targets, w in Batches(x, y, batch_size=4, weight=weight, shuffle=True, seed=0):
            first, second = inputs.values() if isinstance(inputs, dict) else inputs
            assert torch.equal(first * 2, targets)
            assert torch.equal(second, first + 100)
            assert torch.equal(w, weight[first])
            seen += len(targets)
        assert seen == 10
    refuses(lambda: Batches((a, b[:3]), y, batch_size=2), "as many inputs as targets")


# -------------------------------------------------------------------------------------------------------- augmentation
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
        places = [(source, i, j) for source in (0, 1) for i in range(5) for j in range(5)]
        sources = padded[b], mirrored[b]
        matches = [(s, i, j) for s, i, j in places if torch.equal(out[b], sources[s][:, i : i + 8, j : j + 8])]
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
    out = Augmentation(padding=0, flip=False, cutout=4, seed=2)(torch.ones(500, 2, 10, 10))
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
    labels, augment = torch.arange(64), Augmentation(padding=0, flip=False, cutout=8, seed=0)
    seen = []
    for x, y in Batches(numbered(), labels, batch_size=16, augment=augment):
        assert (x == 0).any()
        seen.append(y)
    assert torch.equal(torch.cat(seen), labels)
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


# ---------------------------------------------------------------------------------------------------- input transforms
IMAGES = torch.randint(0, 256, (5, 3, 6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SCALE = ds.data.Standardiser.of_channels(IMAGES)


def pil(image):
    return Image.fromarray(image.movedim(0, -1).numpy())


@pytest.mark.parametrize("given", [
    IMAGES, IMAGES.numpy(), IMAGES.movedim(1, -1), IMAGES.movedim(1, -1).numpy(), [pil(image) for image in IMAGES],
    list(IMAGES.numpy()), [pil(image).convert("RGBA") for image in IMAGES],
], ids=["tensor", "array", "channels last", "array channels last", "PIL", "list", "RGBA"])  # fmt: skip
def test_images_in_any_form_become_what_the_network_saw(given):
    assert torch.equal(as_input_transform(SCALE)(given), SCALE(IMAGES))


def test_one_image_gets_its_batch_axis():
    transform = as_input_transform(SCALE)
    for one in (IMAGES[0], IMAGES[0].numpy(), IMAGES[0].movedim(0, -1), pil(IMAGES[0])):
        assert torch.equal(transform(one), SCALE(IMAGES[:1]))
    grey = ds.data.ImageInputs([0.5], [0.25])
    assert ds.data.ImageInputs(0.5, 0.25).config() == grey.config()
    assert ds.data.ImageInputs(np.float32(0.5), torch.tensor(0.25)).config() == grey.config()
    levels = IMAGES[:, 0]  # (5, 6, 8)
    expected = (levels[:, None] / 255 - 0.5) / 0.25
    assert torch.equal(grey(levels), expected)
    for one in (levels[0], levels[0][None], levels[0][..., None], Image.fromarray(levels[0].numpy())):
        assert torch.equal(grey(one), expected[:1])


def test_pixels_that_somebody_has_scaled_are_refused():
    transform = as_input_transform(SCALE)
    for scaled in (IMAGES.float(), IMAGES / 255, SCALE(IMAGES), (IMAGES / 255).numpy(), IMAGES.long()):
        refuses(lambda x=scaled: transform(x), "transforms raw pixels itself", TypeError)
    deep = Image.fromarray(np.full((6, 8), 40000, dtype=np.uint16))  # PIL would make 255 of it
    told = "expected 8 bits per channel in a PIL image, got the mode I;16"
    refuses(lambda: ds.data.ImageInputs([0.5], [0.25])(deep), told)
    refuses(lambda: transform(IMAGES[:, :2]), "3 channels, first or last")
    refuses(lambda: transform(IMAGES[:, :, :3, :3]), "fits both")


def test_images_are_resized_by_their_shorter_side_and_cropped_in_the_middle():
    transform = ds.data.ImageInputs([0.0] * 3, [1.0] * 3, resize=12, crop=(4, 6))
    whole = torch.nn.functional.interpolate(IMAGES.float(), size=(12, 16), mode="bilinear", antialias=True) / 255
    torch.testing.assert_close(transform(IMAGES), whole[:, :, 4:8, 5:11])
    ramp = torch.arange(0, 240, 10, dtype=torch.uint8).expand(3, 6, 24)  # twice the size: values in between
    assert transform([pil(IMAGES[0]), ramp, pil(ramp)]).shape == (3, 3, 4, 6)
    refuses(lambda: ds.data.ImageInputs([0.0] * 3, [1.0] * 3, crop=7)(IMAGES), "images of at least")
    refuses(lambda: as_input_transform(SCALE)([IMAGES[0], ramp]), "images of one size")


def test_rows_are_standardised_in_double_precision():
    rows = torch.tensor([[1e9, 5.0], [1e9 + 4, 7.0], [1e9 + 8, 12.0]], dtype=torch.float64)
    transform = as_input_transform(ds.data.Standardiser.of_rows(rows))
    expected = (rows - rows.mean(0)) / rows.std(0, correction=0)
    for given in (rows, rows.numpy(), rows.tolist()):
        torch.testing.assert_close(transform(given), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(transform(rows[1]), expected[1:2], rtol=0, atol=1e-6)
    refuses(lambda: transform(rows[:, :1]), r"rows \(B, 2\)")


def test_rows_that_were_standardised_before_are_refused():
    rows = 50 + 7 * torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    scale = ds.data.Standardiser.of_rows(rows)
    for transform in (as_input_transform(scale), TableInputs(ds.data.TableEncoder.of(rows.numpy()))):
        refuses(lambda transform=transform: transform(scale(rows)), "standardises rows itself")
        assert transform(rows + 40).shape == (40, 3)  # foreign rows are none of those
        assert transform(rows[0]).shape == (1, 3)


def test_a_table_is_encoded_in_plain_operations_as_the_encoder_does():
    pandas = pytest.importorskip("pandas")
    numbers = pandas.DataFrame({"a": [1.0, None, 3.0, 8.0], "b": [1, 1, 1, 1], "c": [2e9, 2e9 + 1, 2e9 + 2, 2e9 + 5]})
    encoder = ds.data.TableEncoder.of(numbers)
    transform = as_input_transform(encoder)
    assert transform.traceable
    assert torch.equal(transform(numbers).float(), encoder(numbers))
    assert torch.equal(transform({"a": 3.0, "b": 1, "c": 2e9}).float(), encoder(numbers.iloc[[0]].assign(a=3.0)))
    mixed = numbers.assign(city=["x", "y", "x", None])
    encoder = ds.data.TableEncoder.of(mixed)
    transform = as_input_transform(encoder)
    assert not transform.traceable
    assert torch.equal(transform(mixed).float(), encoder(mixed))


@pytest.mark.parametrize(
    "given", [SCALE, ds.data.Standardiser.of_rows(torch.arange(8.0).reshape(4, 2)), ds.data.TableEncoder.of(np.eye(3))]
)
def test_transforms_are_json(given):
    transform = as_input_transform(given)
    again = type(transform)(**transform.config())
    x = IMAGES if transform.kind == "image" else np.eye(3) if transform.kind == "table" else torch.ones(3, 2)
    assert torch.equal(transform(x), again(x))


def test_code_is_no_transform():
    refuses(lambda: as_input_transform(lambda x: x), "files hold no code", TypeError)
    refuses(lambda: ds.data.ImageInputs([0.5], [0.5, 0.5]), "one mean and std per channel")
    assert isinstance(as_input_transform(RowInputs([0.0], [1.0])), RowInputs)

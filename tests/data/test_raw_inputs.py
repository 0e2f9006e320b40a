"""Input transforms: what users have becomes what the network was trained on, and nothing twice."""

import numpy as np
import pytest
import torch
from PIL import Image

import dissensus as ds
from dissensus.data.input_transforms import RowInputs, TableInputs, as_input_transform
from refusals import refuses

IMAGES = torch.randint(0, 256, (5, 3, 6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SCALE = ds.data.Standardiser.of_channels(IMAGES)


def pil(image):
    return Image.fromarray(image.movedim(0, -1).numpy())


@pytest.mark.parametrize(
    "given",
    [
        IMAGES,
        IMAGES.numpy(),
        IMAGES.movedim(1, -1),
        IMAGES.movedim(1, -1).numpy(),
        [pil(image) for image in IMAGES],
        list(IMAGES.numpy()),
        [pil(image).convert("RGBA") for image in IMAGES],
    ],
    ids=["tensor", "array", "channels last", "array channels last", "PIL", "list", "RGBA"],
)
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
        with pytest.raises(TypeError, match="transforms raw pixels itself"):
            transform(scaled)
    deep = Image.fromarray(np.full((6, 8), 40000, dtype=np.uint16))  # PIL would make 255 of it
    with pytest.raises(ValueError, match="expected 8 bits per channel in a PIL image, got the mode I;16"):
        ds.data.ImageInputs([0.5], [0.25])(deep)
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
        with pytest.raises(ValueError, match="standardises rows itself"):
            transform(scale(rows))
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

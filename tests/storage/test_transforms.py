"""Transforms saved with a posterior: every door takes raw inputs, and none of them twice."""

import copy
import re
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

import dissensus as ds
from refusals import refuses

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (24, 3, 8, 8), dtype=torch.uint8, generator=GENERATOR)
LABELS = torch.arange(24) % 3
SCALE = ds.data.Standardiser.of_channels(IMAGES)
RAW, READY = ([(images[:12], LABELS[:12]), (images[12:], LABELS[12:])] for images in (IMAGES, SCALE(IMAGES)))


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(a posterior trained on standardised pixels, the same saved with its transform and loaded)."""
    torch.manual_seed(0)
    posterior, folder = ds.DeepEnsemble([network() for _ in range(2)]), tmp_path_factory.mktemp("saved")
    ds.fit(posterior, READY, epochs=2, progress=False)
    ds.save(posterior, folder, inputs=SCALE, classes=["cat", "dog", "eel"])
    return posterior, ds.load(folder, network())


def test_a_loaded_posterior_takes_pixels(both):
    posterior, loaded = both
    expected = posterior.predict(SCALE(IMAGES)).mean
    assert torch.equal(loaded.predict(IMAGES).mean, expected)
    assert torch.equal(loaded.predict(IMAGES[3].numpy()).mean, posterior.predict(SCALE(IMAGES[3:4])).mean)
    refuses(lambda: loaded.predict(SCALE(IMAGES)), "transforms raw pixels itself", TypeError)
    refuses(lambda: ds.evaluate(loaded, READY), "transforms raw pixels itself", TypeError)


def test_every_door_takes_raw_inputs_and_gives_what_ready_ones_gave(both):
    posterior, loaded = both
    assert torch.equal(ds.predict(loaded, RAW).mean, ds.predict(posterior, READY).mean)
    assert torch.equal(ds.predict(loaded, (IMAGES, LABELS)).mean, ds.predict(posterior, READY).mean)
    assert torch.equal(ds.summarise(loaded, RAW).mean, ds.summarise(posterior, READY).mean)
    pairs = [namedtuple("Pair", "x y")(*batch) for batch in RAW]
    assert torch.equal(ds.predict(loaded, pairs).mean, ds.predict(posterior, READY).mean)
    raw, ready = ds.evaluate(loaded, RAW, ood={"o": RAW}), ds.evaluate(posterior, READY, ood={"o": READY})
    same = [name for name in ready.metrics if not name.startswith("cost/")]
    assert [raw.metrics[name] for name in same] == [ready.metrics[name] for name in same]
    assert raw.notes["classes"] == "cat\ndog\neel"
    assert torch.equal(loaded.loss(IMAGES, LABELS), posterior.loss(SCALE(IMAGES), LABELS))
    assert torch.equal(loaded(IMAGES), posterior(SCALE(IMAGES)))
    spec = ds.Corruptions(["gaussian_noise"], severities=[1])
    by_hand = ds.Corruptions(["gaussian_noise"], severities=[1], standardiser=SCALE)
    found, wanted = (
        ds.evaluate(p, loader, corrupt=c).metrics["corrupt/nll"]
        for p, loader, c in ((loaded, RAW, spec), (posterior, READY, by_hand))
    )
    assert found == pytest.approx(wanted, abs=1e-9)


def test_calibration_and_promises_are_fitted_on_raw_inputs(both, tmp_path):
    posterior, loaded = copy.deepcopy(both[0]), both[1]
    ds.save(loaded, tmp_path)
    again = ds.load(tmp_path, network())  # transforms are saved along, without being named again
    assert ds.temperature_scale(again, RAW) == pytest.approx(ds.temperature_scale(posterior, READY), rel=1e-6)
    sets = ds.conformal(again, RAW, level=0.8)
    assert torch.equal(sets.set(IMAGES), ds.conformal(posterior, READY, level=0.8).set(SCALE(IMAGES)))


def test_training_goes_on_with_raw_inputs(both, tmp_path):
    _, loaded = both
    ds.save(loaded, tmp_path)
    one, other = ds.load(tmp_path, network()), ds.load(tmp_path, network())
    other.inputs = None  # for batches that are ready
    for each, loader in ((one, RAW), (other, READY)):
        ds.fit(each, loader, epochs=1, progress=False, engine="loop")
    assert torch.equal(one.predict(IMAGES).mean, other.predict(SCALE(IMAGES)).mean)


@pytest.mark.parametrize("method", ["swag", "laplace", "hmc"])
def test_methods_that_read_loaders_themselves_read_raw_inputs(method):
    def fitted(inputs, loader):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
        if method == "swag":
            posterior = ds.SWAG(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 3)), rank=2, samples=2)
        else:
            posterior = (
                ds.Laplace(net, samples=2)
                if method == "laplace"
                else ds.HMC(net, samples=2, warmup=1, leapfrog=1, data_size=24)
            )
        posterior.inputs = inputs
        if method == "swag":
            ds.fit(posterior, loader, epochs=4, progress=False)
        else:
            posterior.fit_posthoc(loader)
        return posterior.predict(IMAGES if inputs else SCALE(IMAGES)).mean

    transform = ds.data.ImageInputs.of(SCALE)
    assert torch.equal(fitted(transform, RAW), fitted(None, READY))


def test_members_read_from_a_folder_take_raw_inputs(both, tmp_path):
    _, loaded = both
    ds.save(loaded, tmp_path)
    found = ds.summarise(tmp_path, RAW, network=network()).mean
    torch.testing.assert_close(found, loaded.predict(IMAGES).mean)


def test_frames_stay_frames_up_to_the_transform(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"size": [10.0, 30.0, None, 70.0] * 6, "city": list("abca") * 6})
    y = torch.arange(24).float()[:, None]
    encoder = ds.data.TableEncoder.of(frame)
    posterior = ds.MAP(ds.nets.MLP(len(encoder.features), 1, hidden=(4,)), likelihood=ds.Regression())
    ds.fit(posterior, (encoder(frame), y), epochs=1, progress=False, targets="standardised")
    ds.save(posterior, tmp_path, inputs=encoder)
    loaded = ds.load(tmp_path)
    expected = posterior.predict(encoder(frame)).mean
    assert torch.equal(loaded.predict(frame).mean, expected)
    assert torch.equal(ds.predict(loaded, (frame, y)).mean, expected)
    assert torch.equal(loaded.predict({"size": 30.0, "city": "b"}).mean, expected[1:2])
    ds.fit(loaded, (frame, y), epochs=1, progress=False)
    refuses(lambda: loaded.predict(encoder(frame)), "by name")


def test_names_must_be_as_many_as_outputs(both, tmp_path):
    posterior, _ = both
    ds.save(posterior, tmp_path, classes=["cat", "dog"])
    refuses(lambda: ds.evaluate(ds.load(tmp_path, network()), READY), "expected 3 class names, got 2")


def test_targets_are_not_rescaled_below_a_promise(tmp_path):
    x = torch.randn(40, 2, generator=GENERATOR)
    posterior = ds.MAP(ds.nets.MLP(2, 1), likelihood=ds.Regression(noise=1.0))
    ds.conformal(posterior, [(x, x[:, :1])])
    with pytest.raises(ValueError, match="without calibration and promises"):
        ds.save(posterior, tmp_path, targets={"mean": [0.0], "std": [2.0]})
    refuses(lambda: ds.save(ds.MAP(ds.nets.MLP(2, 2)), tmp_path, unit="m"), "expected a regression", TypeError)


def test_loaders_are_read_through_the_one_door():
    """`Posterior.read` transforms; a file that reads a loader by itself would feed networks raw inputs, without a word."""
    source = Path(ds.__file__).parent
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"Batch\.from_tuple\(", path.read_text())
    }
    # attacks move inputs as the network takes them, theory too; statistics are given what `read` gave
    assert found == {
        "core/posterior.py",
        "attacks/gradient_attacks.py",
        "theory/regime.py",
        "layers/batch_norm.py",
    }

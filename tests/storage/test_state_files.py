"""Saved state: files are whole or not there, what stood still stands still, and transforms are saved with a posterior."""

import copy
import json
import os
import re
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.storage import atomic_files
from dissensus.storage.atomic_files import STRAY_SECONDS, remove_strays, replace_file, temporary_name, write_atomically
from dissensus.storage.folder import CONFIG, TENSORS
from refusals import refuses
from saved_files import config_of, reseal, tamper
from thinning import often

inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def mlp(hidden: int = 6) -> torch.nn.Module:
    return ds.nets.MLP(4, 3, hidden=(hidden,))


def test_the_file_alone_is_enough_and_config_json_is_its_copy(tmp_path):
    posterior = ds.DeepEnsemble([mlp(), mlp()])
    ds.save(posterior, tmp_path)
    assert config_of(tmp_path) == json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text("scribbled over")
    assert torch.equal(ds.load(tmp_path).predict(inputs).member_means, posterior.predict(inputs).member_means)
    (tmp_path / CONFIG).unlink()
    assert torch.equal(ds.load(tmp_path).predict(inputs).member_means, posterior.predict(inputs).member_means)


def test_two_saves_of_one_posterior_are_the_same_bytes(tmp_path):
    posterior = ds.MAP(mlp())
    ds.save(posterior, tmp_path / "a")
    ds.save(posterior, tmp_path / "b")
    for name in (CONFIG, TENSORS):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("at", [1, 2])
def test_a_kill_between_the_renames_leaves_a_folder_that_can_be_read(tmp_path, monkeypatch, at):
    old, new = ds.DeepEnsemble([mlp(), mlp()]), ds.MAP(mlp(7))
    ds.save(old, tmp_path)
    calls, replace = [], os.replace

    def killed(*names):
        calls.append(names)
        if len(calls) == at:
            raise KeyboardInterrupt
        replace(*names)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        ds.save(new, tmp_path)
    expected = old if at == 1 else new
    loaded = ds.load(tmp_path)
    assert type(loaded) is type(expected)
    assert torch.equal(loaded.predict(inputs).member_means, expected.predict(inputs).member_means)


def test_whoever_reads_while_others_save_gets_the_old_or_the_new(tmp_path):
    posteriors = [ds.DeepEnsemble([mlp(width) for _ in range(members)]) for width, members in ((6, 2), (7, 3))]
    loader = [(inputs, torch.zeros(5, dtype=torch.int64))]
    expected = [posterior.predict(inputs).mean for posterior in posteriors]
    ds.save(posteriors[0], tmp_path)
    done, errors = threading.Event(), []

    def save() -> None:
        try:
            while not done.is_set():
                for posterior in posteriors:
                    ds.save(posterior, tmp_path)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            for mean in (ds.load(tmp_path).predict(inputs).mean, ds.summarise(tmp_path, loader).mean):
                assert any(torch.allclose(mean, each) for each in expected)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert sorted(os.listdir(tmp_path)) == [CONFIG, TENSORS]


@pytest.mark.parametrize("members", [1, 4, 10**9])
def test_a_summary_does_not_believe_an_edited_number_of_members(tmp_path, members):
    ds.save(ds.DeepEnsemble([mlp(), mlp()]), tmp_path)
    tamper(tmp_path, "arguments.members", members)
    with pytest.raises(ValueError, match=rf"expected particles.own.* of shape \({members}, .*got \(2"):
        ds.summarise(tmp_path, [(inputs, torch.zeros(5, dtype=torch.int64))])


# ------------------------------------------------------------------------------------------- folders that are replaced
@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def left(folder, name: str, *, seconds: float) -> None:
    """A file that was last written so many seconds ago."""
    (folder / name).write_bytes(b"half")
    then = os.stat(folder / name).st_mtime - seconds
    os.utime(folder / name, (then, then))


def test_files_are_renamed_in_order_and_only_when_all_are_written(tmp_path, monkeypatch):
    renamed = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (renamed.append(new.name), replace(old, new)))
    write_atomically({tmp_path / "a": b"1", tmp_path / "b": b"2"})
    assert renamed == ["a", "b"]
    with pytest.raises(TypeError):
        write_atomically({tmp_path / "a": b"3", tmp_path / "b": "not bytes"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"1", "b": b"2"}


def test_names_are_of_one_process_thread_and_call(tmp_path, monkeypatch):
    names = [temporary_name(tmp_path / "a") for _ in range(5)]
    thread = threading.Thread(target=lambda: names.append(temporary_name(tmp_path / "a")))
    thread.start()
    thread.join()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    names.append(temporary_name(tmp_path / "a"))
    assert len({*names}) == 7


def test_threads_that_write_one_file_do_not_meet(tmp_path):
    errors = []

    def write(value: int) -> None:
        try:
            for _ in range(100):
                write_atomically({tmp_path / "a": bytes([value]) * 1000})
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert os.listdir(tmp_path) == ["a"]
    assert len({*(tmp_path / "a").read_bytes()}) == 1


def test_what_killed_writers_left_is_removed_when_the_file_is_written_again(tmp_path, dead):
    left(tmp_path, f".a.{dead}-7-3.tmp", seconds=2 * STRAY_SECONDS)
    with replace_file(tmp_path / "a") as temporary:
        temporary.write_bytes(b"1")
    assert os.listdir(tmp_path) == ["a"]


def test_what_may_be_written_by_somebody_is_left_alone(tmp_path, dead):
    names = {
        f".a.{os.getpid()}-7-3.tmp": 2 * STRAY_SECONDS,  # a thread of a live process
        f".a.{dead}-7-3.tmp": STRAY_SECONDS / 2,  # perhaps of a process on another machine
        f".ab.{dead}-7-3.tmp": 2 * STRAY_SECONDS,  # of another file
        ".a.notes.tmp": 2 * STRAY_SECONDS,  # nothing of ours
    }
    for name, seconds in names.items():
        left(tmp_path, name, seconds=seconds)
    remove_strays(tmp_path / "a")
    assert {*os.listdir(tmp_path)} == {*names}


def test_a_process_of_somebody_else_is_alive(monkeypatch):
    def refused(process: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    assert atomic_files._is_running(1)


# --------------------------------------------------------------------------- frozen parameters and layers in eval mode
generator = torch.Generator().manual_seed(0)
x = torch.randn(32, 2, dtype=torch.float64, generator=generator)
loader = [(x[i : i + 8], (x[i : i + 8, 0] > 0).long()) for i in range(0, 32, 8)]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()


def with_norm_in_eval() -> nn.Module:
    made = network()
    made[1].eval()
    return made


def with_first_layer_frozen() -> nn.Module:
    made = network()
    made[0].requires_grad_(False)
    return made


METHODS = {
    "map": lambda make: ds.MAP(make()),
    "deep_ensemble": lambda make: ds.DeepEnsemble([make(), make()]),
    "mc_dropout": lambda make: ds.MCDropout(make(), rate=0.1, samples=2),
    "batch_ensemble": lambda make: ds.BatchEnsemble(make(), members=2, modulation=ds.Modulation.normal(1.0, 0.5)),
    "node_bnn": lambda make: ds.NodeBNN(make(), data_size=32, components=2, samples=2),
    "mean_field_vi": lambda make: ds.MeanFieldVI(make(), data_size=32, samples=2),
    "multi_mean_field_vi": lambda make: ds.MeanFieldVI([make(), make()], data_size=32, samples=2),
    "swag": lambda make: ds.SWAG(make(), rank=2, samples=2),
}
OFTEN = [name for name in METHODS if name != "multi_mean_field_vi"]


def trained_on_after_load(posterior, folder):
    """(tensors before, after) training what was saved and loaded into a network that knows nothing."""
    ds.save(posterior, folder)
    loaded = ds.load(folder, network=network())
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in loaded.parameters() if p.requires_grad], lr=0.1)
    ds.fit(loaded, loader, epochs=2, optimizer=optimizer, progress=False)
    return before, loaded.state_dict()


@pytest.mark.parametrize("method", often(OFTEN, ["multi_mean_field_vi"]))
def test_a_norm_layer_in_eval_mode_keeps_its_statistics_after_load(method, tmp_path):
    before, after = trained_on_after_load(METHODS[method](with_norm_in_eval), tmp_path)
    kept = [name for name in before if name.startswith("particles") and "running" in name]
    assert kept
    for name in kept:
        assert torch.equal(before[name], after[name]), name
    last = next(name for name in before if name.endswith("network.3.weight"))
    assert not torch.equal(before[last], after[last])


@pytest.mark.parametrize("method", often(OFTEN, ["multi_mean_field_vi"]))
def test_frozen_parameters_stay_frozen_after_load(method, tmp_path):
    before, after = trained_on_after_load(METHODS[method](with_first_layer_frozen), tmp_path)
    name = next(name for name in before if name.endswith("network.0.weight"))
    assert torch.equal(before[name], after[name])


def test_refreshing_a_loaded_draw_keeps_statistics_that_stood_still(tmp_path):
    posterior = ds.SWAG(with_norm_in_eval(), rank=2, samples=2, start=0, every=1)
    ds.fit(posterior, loader, epochs=1, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, network=network())
    ds.refresh(loaded, loader)
    for name, tensor in posterior.stored.named_buffers():
        if "running" in name:
            assert torch.equal(tensor, loaded.stored.get_buffer(name))


def test_what_the_template_has_frozen_stays_so(tmp_path):
    ds.save(ds.MAP(network()), tmp_path)
    loaded = ds.load(tmp_path, network=with_norm_in_eval())
    assert loaded.particles.template.always_eval == ["network.1"]


def test_a_file_that_freezes_what_is_not_there_is_damaged(tmp_path):
    ds.save(ds.MAP(with_norm_in_eval()), tmp_path)
    wrong = (
        {"eval": ["network.7"]}, {"frozen": ["particles.shared.network.9"]}, {"eval": 3}, {"eval": [3]},
        {"loop": ["a"]},
    )  # fmt: skip
    kept = config_of(tmp_path)["kept"]
    for each in (*(kept | other for other in wrong), [], {}):
        reseal(tmp_path, {**config_of(tmp_path), "kept": each})
        refuses(lambda: ds.load(tmp_path, network=network()), "damaged")


# ------------------------------------------------------------------- transforms: raw inputs everywhere, and none twice
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (24, 3, 8, 8), dtype=torch.uint8, generator=GENERATOR)
LABELS = torch.arange(24) % 3
SCALE = ds.data.Standardiser.of_channels(IMAGES)
RAW, READY = ([(images[:12], LABELS[:12]), (images[12:], LABELS[12:])] for images in (IMAGES, SCALE(IMAGES)))


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(a posterior trained on standardised pixels, the same saved with its transform and loaded)."""
    torch.manual_seed(0)
    posterior, folder = ds.DeepEnsemble([convolutions() for _ in range(2)]), tmp_path_factory.mktemp("saved")
    ds.fit(posterior, READY, epochs=2, progress=False)
    ds.save(posterior, folder, inputs=SCALE, classes=["cat", "dog", "eel"])
    return posterior, ds.load(folder, convolutions())


def test_a_loaded_posterior_takes_pixels(both):
    posterior, loaded = both
    assert torch.equal(loaded.predict(IMAGES).mean, posterior.predict(SCALE(IMAGES)).mean)
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
    again = ds.load(tmp_path, convolutions())  # transforms are saved along, without being named again
    assert ds.temperature_scale(again, RAW) == pytest.approx(ds.temperature_scale(posterior, READY), rel=1e-6)
    sets = ds.conformal(again, RAW, level=0.8)
    assert torch.equal(sets.set(IMAGES), ds.conformal(posterior, READY, level=0.8).set(SCALE(IMAGES)))


def test_training_goes_on_with_raw_inputs(both, tmp_path):
    _, loaded = both
    ds.save(loaded, tmp_path)
    one, other = ds.load(tmp_path, convolutions()), ds.load(tmp_path, convolutions())
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

    assert torch.equal(fitted(ds.data.ImageInputs.of(SCALE), RAW), fitted(None, READY))


def test_members_read_from_a_folder_take_raw_inputs(both, tmp_path):
    _, loaded = both
    ds.save(loaded, tmp_path)
    found = ds.summarise(tmp_path, RAW, network=convolutions()).mean
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
    refuses(lambda: ds.evaluate(ds.load(tmp_path, convolutions()), READY), "expected 3 class names, got 2")


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
    assert found == {"core/posterior.py", "attacks/gradient_attacks.py", "theory/regime.py", "layers/batch_norm.py"}

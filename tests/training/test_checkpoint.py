"""A checkpoint knows whose it is; one's own goes on bit for bit, also from the middle of an epoch."""

import copy
import logging
import os
import shutil
import signal
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import dissensus as ds
import tiny
from dissensus.training.checkpoint import warn_of_overridden
from refusals import refuses
from thinning import thinned

X, Y = tiny.points(24)
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16)]


def nets(count=3, **keywords):
    return [tiny.mlp(**keywords).double() for _ in range(count)]


def ensemble(**keywords):
    return ds.DeepEnsemble(nets(), **keywords)


def fit(posterior, path, *, optimizer=None, scheduler=None, loader=BATCHES, epochs=2, **keywords):
    torch.manual_seed(1)
    optimizer = (optimizer or partial(Adam, lr=0.01))(posterior.parameters())
    schedule = None if scheduler is None else scheduler(optimizer)
    settings = {"optimizer": optimizer, "scheduler": schedule, "checkpoint": path, "progress": False}
    return ds.fit(posterior, loader, epochs=epochs, **settings, **keywords)


def whole(posterior, optimizer, scheduler=None):
    """Everything a refused checkpoint must leave as it is."""
    states = [posterior.state_dict(), optimizer.state_dict(), scheduler and scheduler.state_dict()]
    return copy.deepcopy([*states, torch.get_rng_state(), posterior.steps_before_run, posterior.steps_per_epoch])


def refused(path, posterior, reason, optimizer=None, scheduler=None):
    optimizer = optimizer or Adam(posterior.parameters(), lr=0.01)
    before = whole(posterior, optimizer, scheduler)
    settings = {"optimizer": optimizer, "scheduler": scheduler, "checkpoint": path, "progress": False}
    message = rf"expected a checkpoint of this posterior in .*, got .* \(.*{reason}.*\); remove it"
    refuses(lambda: ds.fit(posterior, BATCHES, epochs=3, **settings), message)
    assert tiny.same(before, whole(posterior, optimizer, scheduler))


OTHERS = {
    "method": (lambda: ds.WeightRDE(nets(), data_size=24), "method deep_ensemble, not weight_rde"),
    "lit": (lambda: ds.LIT(nets(), strength=1.0), "method deep_ensemble, not lit"),
    "class": (
        lambda: type("Same", (tiny.Repelling,), {"name": "deep_ensemble"})(nets()),
        "class DeepEnsemble, not Same",
    ),
    "members": (lambda: ds.DeepEnsemble(nets(2)), "members 3, not 2"),
    "prior": (lambda: ensemble(weight_prior_std=1.0, data_size=24), "weight_prior_std None, not 1.0"),
    "dtype": (lambda: ensemble().float(), r"float64.*, not float32"),
    "likelihood": (
        lambda: ensemble(likelihood=ds.Regression(noise=1.0)),
        "likelihood.name Classification, not Regression",
    ),
    "network": (lambda: ds.DeepEnsemble(nets(outputs=5)), r"network.layers .*out_features=3.*, not .*out_features=5"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The checkpoint of an ensemble that was validated."""
    path = tmp_path_factory.mktemp("written") / "c.pt"
    fit(ensemble(), path, validation=BATCHES)
    return path


@pytest.mark.parametrize(("build", "reason"), OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_of_another_posterior_is_refused_and_changes_nothing(build, reason, written):
    refused(written, build(), reason)


def test_a_checkpoint_of_a_float32_run_is_not_taken_by_float64(tmp_path):
    fit(ensemble().float(), tmp_path / "c.pt", loader=[(x.float(), y) for x, y in BATCHES])
    refused(tmp_path / "c.pt", ensemble(), r"float32.*, not float64")


@pytest.mark.parametrize(("wrote", "reads"), [(AdamW, Adam), (AdamW, SGD), (SGD, Adam)])
def test_another_optimizers_checkpoint_is_refused(wrote, reads, tmp_path):
    fit(ensemble(), tmp_path / "c.pt", optimizer=partial(wrote, lr=0.01))
    reason, posterior = f"optimizer {wrote.__name__}, not {reads.__name__}", ensemble()
    refused(tmp_path / "c.pt", posterior, reason, reads(posterior.parameters(), lr=0.02))


def test_settings_that_are_numpys_numbers_tell_runs_apart_too(tmp_path):
    def build(temperature):
        settings = {"data_size": np.int64(24), "components": np.int64(2), "prior_std": np.float32(0.5)}
        return ds.NodeBNN(nets(1)[0], posterior_temperature=temperature, **settings)

    fit(build(1.0), tmp_path / "c.pt", epochs=1)
    refused(tmp_path / "c.pt", build(6.0), "posterior_temperature 1.0, not 6.0")
    assert len(fit(build(1.0), tmp_path / "c.pt", epochs=2)) == 2


def test_an_optimizer_over_other_parameters_is_refused(written):
    posterior = ensemble()
    parameters = list(posterior.parameters())
    refused(written, posterior, "parameters float64", Adam(parameters[::-1], lr=0.01))
    refused(written, posterior, "parameters", Adam(parameters[:2], lr=0.01))


def test_another_kind_of_schedule_is_refused(tmp_path):
    fit(ensemble(), tmp_path / "c.pt", scheduler=partial(lr_scheduler.StepLR, step_size=1))
    posterior = ensemble()
    optimizer = Adam(posterior.parameters(), lr=0.01)
    refused(tmp_path / "c.pt", posterior, "scheduler StepLR, not None", optimizer)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 3)
    refused(tmp_path / "c.pt", posterior, "scheduler StepLR, not CosineAnnealingLR", optimizer, cosine)


def test_a_run_watched_by_other_methods_is_refused(tmp_path):
    fit(ds.track(nets(1)[0], [ds.MAP, partial(ds.SWAG, rank=2)]), tmp_path / "c.pt")
    for method, reason in ((ds.TRADI, "swag, not tradi"), (partial(ds.SWAG, rank=3), "rank 2, not 3")):
        refused(tmp_path / "c.pt", ds.track(nets(1)[0], [ds.MAP, method]), reason)


@pytest.mark.parametrize("damage", ["tensor", "optimizer", "history", "best", "random", "missing"])
def test_a_damaged_checkpoint_changes_nothing(damage, written, tmp_path):
    path = tmp_path / "c.pt"
    state = torch.load(written, weights_only=True)
    if damage == "tensor":
        state["posterior"]["steps"] = torch.zeros(3)
    elif damage == "optimizer":
        state["optimizer"]["state"][0] = {"exp_avg": "nothing"}
        state["optimizer"]["state"][1] = 5
    elif damage == "history":
        state["history"][0]["other"] = 1
    elif damage == "best":
        state["best"]["state"].pop("temperature")
    elif damage == "random":
        state["random"] = state["random"][:10]
    else:
        del state["scheduler"]
    torch.save(state, path)
    refused(path, ensemble(), "")


def test_what_fails_on_the_way_in_is_taken_back(written, monkeypatch):
    posterior = ensemble()
    optimizer = Adam(posterior.parameters(), lr=0.01)
    load, calls = optimizer.load_state_dict, []

    def breaks_once(state):
        load(state)
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no room")

    monkeypatch.setattr(optimizer, "load_state_dict", breaks_once)
    refused(written, posterior, "no room", optimizer)
    assert len(calls) == 2


def sampled(method, **keywords):
    return lambda **more: method(nets(1)[0], **{**keywords, **more})


FREE = {
    "swag": (sampled(ds.SWAG, rank=2), {"samples": 3, "posterior_temperature": 1.0}),
    "tradi": (sampled(ds.TRADI), {"samples": 3, "covariance": "diagonal", "features": 5, "bandwidth": 2.0}),
    "gaussian_perturbation": (sampled(ds.GaussianPerturbation), {"samples": 3, "noise": 0.1}),
    "mc_dropout": (sampled(ds.MCDropout, rate=0.2), {"samples": 3}),
    "laplace": (
        sampled(ds.Laplace),
        {"samples": 3, "structure": "kron", "covariance": "joint", "prior_precision": 2.0},
    ),
    "node_bnn": (sampled(ds.NodeBNN, data_size=20, components=3), {"samples": 3}),
}


ALIKE = ("gaussian_perturbation", "mc_dropout")  # sampled as the others are


@pytest.mark.parametrize(
    ("build", "changed"),
    [pytest.param(*row, marks=pytest.mark.slow if name in ALIKE else (), id=name) for name, row in FREE.items()],
)
def test_how_it_is_drawn_from_and_how_long_it_trains_may_change(build, changed, tmp_path):
    first = build()
    ds.fit(first, BATCHES, epochs=2, progress=False)  # leaves a stored draw of the first number of samples
    fit(first, tmp_path / "c.pt")
    posterior = build(**changed)
    assert len(fit(posterior, tmp_path / "c.pt", epochs=4)) == 4
    assert posterior.predict(X).member_means.shape[0] == 3


def test_a_setting_that_gives_way_to_the_checkpoints_is_said(tmp_path, caplog):
    def steps(size):
        return partial(lr_scheduler.StepLR, step_size=size)

    fit(ensemble(), tmp_path / "c.pt", optimizer=partial(Adam, lr=0.01), scheduler=steps(1))
    with caplog.at_level(logging.WARNING, "dissensus"):
        fit(ensemble(), tmp_path / "c.pt", optimizer=partial(Adam, lr=0.01), scheduler=steps(1), epochs=3)
    assert not caplog.messages
    with caplog.at_level(logging.WARNING, "dissensus"):
        other = partial(Adam, lr=0.3, weight_decay=0.1)
        fit(ensemble(), tmp_path / "c.pt", optimizer=other, scheduler=steps(5), epochs=4)
    text = " ".join(caplog.messages)
    assert "Adam lr = 0.01 from its checkpoint, not the 0.3 given now" in text
    assert "weight_decay = 0 from its checkpoint, not the 0.1" in text
    assert "StepLR step_size = 1 from its checkpoint, not the 5" in text


def test_a_rate_that_a_captured_step_kept_in_float32_is_the_same_rate(caplog):
    optimizer = Adam(ensemble().parameters(), lr=0.001)
    state = copy.deepcopy({"optimizer": optimizer.state_dict(), "scheduler": None})
    state["optimizer"]["param_groups"][0]["lr"] = torch.tensor(0.001, dtype=torch.float32)
    with caplog.at_level(logging.WARNING, "dissensus"):
        warn_of_overridden(state, optimizer, None)
    assert not caplog.messages


def seeded_loader():
    return DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))


def sampler_with_generator():
    data = TensorDataset(X, Y)
    return DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(3)))


def augmented():
    images = X[:, :, None, None].expand(-1, -1, 6, 6).clone()
    augmentation = ds.data.Augmentation(padding=1, cutout=2, seed=4)
    return ds.data.Batches(images, Y, batch_size=8, shuffle=True, seed=0, augment=augmentation)


LOADERS = {
    "batches": lambda: ds.data.Batches(X, Y, batch_size=8, shuffle=True),
    "batches-seed": lambda: ds.data.Batches(X, Y, batch_size=8, shuffle=True, seed=0),
    "data-loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),
    "data-loader-generator": seeded_loader,
    "sampler-generator": sampler_with_generator,
    "augmented": augmented,
}


@pytest.mark.parametrize(("make", "kill"), thinned(list(LOADERS.values()), [1, 3], every=2))
def test_a_killed_run_goes_on_with_the_batches_it_would_have_had(make, kill, tmp_path):
    def run(checkpoint=None, after=None):
        torch.manual_seed(5)
        image = make is augmented
        posterior = ds.MAP(nn.Sequential(nn.Flatten(), nn.Linear(144, 3)).double() if image else tiny.mlp(0.2).double())

        def kill_it(epoch):
            if epoch.epoch == after:
                raise tiny.Killed

        history = fit(posterior, checkpoint, optimizer=partial(SGD, lr=0.1), loader=make(), epochs=5, callback=kill_it)
        return tiny.state(posterior), [epoch.loss for epoch in history.epochs]

    expected, losses = run()
    with pytest.raises(tiny.Killed):
        run(tmp_path / "c.pt", after=kill)
    found, again = run(tmp_path / "c.pt")
    assert again == losses
    assert tiny.largest_difference(expected, found) == 0


def test_a_loader_that_cannot_go_on_is_said_and_not_refused(tmp_path, caplog):
    fit(ensemble(), tmp_path / "written.pt", loader=LOADERS["batches-seed"]())
    for loader in (BATCHES, LOADERS["batches"](), LOADERS["data-loader"]()):
        caplog.clear()
        shutil.copy(tmp_path / "written.pt", tmp_path / "c.pt")
        with caplog.at_level(logging.WARNING, "dissensus"):
            history = fit(ensemble(), tmp_path / "c.pt", loader=loader, epochs=3)
        assert len(history) == 3
        assert "the resumed run sees other batches" in caplog.text


def test_a_loaders_state_that_a_file_without_code_cannot_hold_is_left_out(tmp_path, caplog):
    class Odd(list):
        def state_dict(self):
            return {"odd": object()}

        def load_state_dict(self, state):
            raise AssertionError("never")

    with caplog.at_level(logging.WARNING, "dissensus"):
        fit(ensemble(), tmp_path / "c.pt", loader=Odd(BATCHES))
    assert "holds more than numbers, text and tensors" in caplog.text
    assert len(fit(ensemble(), tmp_path / "c.pt", loader=Odd(BATCHES), epochs=3)) == 3


@pytest.fixture
def terminated(monkeypatch):
    """A handler of the caller's own, in place of the end of the process."""

    def end(number, frame):
        raise tiny.Killed

    before = signal.signal(signal.SIGTERM, end)
    yield
    assert signal.getsignal(signal.SIGTERM) is end  # put back
    signal.signal(signal.SIGTERM, before)


def run(make, path=None, *, at=None, accumulate=1, epochs=3):
    """(state, losses, seconds); SIGTERM comes when batch `at` (from 1) is read for training."""
    torch.manual_seed(5)
    image = make is augmented
    network = nn.Sequential(nn.Flatten(), nn.Linear(144, 3)).double() if image else tiny.mlp(0.2).double()
    posterior = ds.SWAG(network, rank=2, samples=2)
    seen = 0

    def count(*_):
        nonlocal seen
        if posterior.training:
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGTERM)

    posterior.particles.template.network.register_forward_pre_hook(count)
    optimizer = SGD(posterior.parameters(), lr=0.1, momentum=0.9)
    settings = {"optimizer": optimizer, "checkpoint": path, "progress": False, "accumulate": accumulate}
    history = ds.fit(posterior, make(), epochs=epochs, **settings)
    return tiny.state(posterior), [epoch.loss for epoch in history.epochs]


@pytest.mark.parametrize(("loader", "accumulate"), thinned(list(LOADERS), [1, 2], every=3))
def test_a_run_that_is_told_to_end_goes_on_within_the_epoch(loader, accumulate, terminated, tmp_path):
    make = LOADERS[loader]
    expected, losses = run(make, accumulate=accumulate)
    for at in (2, 3):  # in the first epoch, and in what that run has left
        with pytest.raises(tiny.Killed):
            run(make, tmp_path / "c.pt", at=at, accumulate=accumulate)
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]
    found, again = run(make, tmp_path / "c.pt", accumulate=accumulate)
    assert again == losses
    assert tiny.largest_difference(expected, found) == 0


@pytest.mark.parametrize("path", [None, "c.pt"])
def test_the_signal_is_heard_only_where_there_is_a_checkpoint_to_write(path, terminated, tmp_path):
    before, heard = signal.getsignal(signal.SIGTERM), []
    posterior = ds.MAP(tiny.mlp().double())
    posterior.particles.template.network.register_forward_pre_hook(
        lambda *_: heard.append(signal.getsignal(signal.SIGTERM) is not before)
    )
    checkpoint = None if path is None else tmp_path / path
    ds.fit(posterior, [tiny.points()], epochs=1, progress=False, checkpoint=checkpoint)
    assert any(heard) is (path is not None)


class Unmeasured:
    def __iter__(self):
        return iter(LOADERS["batches"]())


def test_a_loader_that_does_not_know_its_length_is_left_without_a_part(terminated, tmp_path):
    """Of the first epoch: how long the run is, is not known yet."""
    with pytest.raises(tiny.Killed):
        run(Unmeasured, tmp_path / "c.pt", at=2)
    assert not list(tmp_path.iterdir())

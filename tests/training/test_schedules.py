"""Schedules and rates: how long the run is, rates from curvature, and what does not fit is refused."""

import functools
import logging

import pytest
import torch
import torch.distributed as distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, lr_scheduler
from torch.testing._internal.distributed.fake_pg import FakeStore

import dissensus as ds
import tiny
from dissensus.bench.run.convert import convert
from dissensus.core.trainable import annealing_weight
from dissensus.data.input_transforms import as_input_transform
from dissensus.numerics.annealing import Annealing
from dissensus.theory import sharpness
from refusals import refuses

STEPS = 3


batches = functools.partial(tiny.point_batches, 12, 4)


def repelling(annealing, method=ds.WeightRDE):
    torch.manual_seed(0)
    return method([tiny.mlp() for _ in range(2)], data_size=12, annealing=annealing).double()


def weights(posterior, loader=None, **keywords) -> list[float]:
    """a_t after each epoch of a run."""
    found = []

    def note(epoch):
        found.append(float(annealing_weight(posterior, posterior.annealing)))

    ds.fit(posterior, loader or batches(), epochs=4, progress=False, callback=note, **keywords)
    return found


@pytest.mark.parametrize("method", [ds.WeightRDE, ds.FunctionRDE, ds.SVGD])
def test_a_second_run_is_annealed_from_its_own_beginning(method):
    posterior = repelling(Annealing("linear"), method)
    assert weights(posterior) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert weights(posterior) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_an_annealing_with_a_length_of_its_own_goes_on_over_runs():
    posterior = repelling(Annealing("linear", steps=8 * STEPS))
    assert weights(posterior) + weights(posterior) == pytest.approx([i / 8 for i in range(1, 9)])


def test_a_resumed_second_run_is_annealed_as_if_it_had_not_been_interrupted(tmp_path):
    whole, stopped, resumed = (repelling(Annealing("linear")) for _ in range(3))
    weights(whole)
    expected = weights(whole)
    weights(stopped)
    settings = {"epochs": 4, "progress": False, "checkpoint": tmp_path / "c.pt"}
    ds.fit(stopped, batches(), callback=lambda epoch: epoch.epoch == 2, **settings)
    assert weights(resumed, checkpoint=tmp_path / "c.pt") == pytest.approx(expected[2:])
    assert tiny.largest_difference(tiny.state(whole), tiny.state(resumed)) == 0


def test_a_run_of_unknown_length_does_not_take_the_length_of_the_one_before():
    posterior = repelling(Annealing("linear"))
    weights(posterior)
    refuses(lambda: weights(posterior, tiny.Unsized(batches)), "expected the length of the run for annealing, got none")
    posterior.begin(STEPS, 4)  # the caller may know
    assert weights(posterior, tiny.Unsized(batches)) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_the_default_schedule_of_a_run_that_is_made_longer_is_that_of_the_longer_run(tmp_path):
    def rates(epochs, checkpoint=None):
        torch.manual_seed(0)
        history = ds.fit(ds.MAP(tiny.mlp().double()), batches(), epochs=epochs, progress=False, checkpoint=checkpoint)
        return [epoch.lr for epoch in history.epochs]

    assert rates(4, tmp_path / "c.pt") + rates(8)[4:] == rates(8, tmp_path / "c.pt")


def test_a_step_after_several_batches_counts_once():
    posterior = repelling(Annealing("linear"))
    assert weights(posterior, accumulate=2) == pytest.approx([0.25, 0.5, 0.75, 1.0])  # 3 batches are 2 steps
    assert (posterior.steps_per_epoch, int(posterior.steps)) == (2, 8)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def loader(seed=0):
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    return ds.data.Batches(x, (x[:, 0] > 0).long(), batch_size=10, shuffle=True, seed=seed)


def made():
    return ds.NodeBNN.of_trained(network(), data_size=40)


def flat_weights(posterior):
    return torch.cat([p.detach().flatten() for p in posterior.parameters()])


def fitted(posterior, epochs=3, **settings):
    torch.manual_seed(2)
    return ds.fit(posterior, settings.pop("data", loader()), epochs=epochs, progress=False, device="cpu", **settings)


def test_the_sharpness_of_the_first_batch_is_one_less_momentum_and_latents_have_their_share():
    posterior = made()
    optimizer = posterior.default_optimizer()
    x, y = next(iter(loader()))[:2]
    found = sharpness(posterior, optimizer, x, y)
    assert fitted(posterior).epochs[0].lr == pytest.approx(0.1 / found, rel=1e-6)
    assert {group["lr"] for group in optimizer.param_groups} == {1.0, posterior.components}


def test_measuring_changes_no_batch_and_no_random_number():
    measured, told = made(), made()
    rate = fitted(measured).epochs[0].lr
    optimizer = torch.optim.SGD(told.parameter_groups(rate, 1e-4), lr=rate, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, told.default_schedule(3))
    fitted(told, optimizer=optimizer, scheduler=schedule)
    assert torch.equal(flat_weights(measured), flat_weights(told))


def test_a_resumed_run_keeps_its_rate_and_says_nothing_of_another(tmp_path, caplog):
    whole, begun, resumed = made(), made(), made()
    fitted(whole)
    fitted(begun, checkpoint=tmp_path / "run.pt", callback=lambda epoch: epoch.epoch == 1)
    with caplog.at_level(logging.WARNING, logger="dissensus"):
        history = fitted(resumed, checkpoint=tmp_path / "run.pt")
    assert not caplog.records
    assert len({epoch.lr for epoch in history.epochs[:2]}) == 1
    assert torch.equal(flat_weights(whole), flat_weights(resumed))


def test_what_cannot_be_measured_is_an_error_and_nothing_moves():
    posterior = made()
    before = flat_weights(posterior)
    refuses(lambda: fitted(posterior, data=iter(loader())), "read twice")
    broken = made()
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    with pytest.raises((ValueError, ds.Diverged)):
        fitted(broken)
    assert torch.equal(flat_weights(posterior), before)


def test_the_recipe_is_kept_in_a_file_and_its_settings_can_be_others(tmp_path):
    posterior = ds.NodeBNN.of_trained(network(), data_size=40, components=2, samples=4)
    assert (posterior.components, posterior.mode, posterior.lr) == (2, "in", "curvature")
    ds.save(posterior, tmp_path / "saved")
    loaded = ds.load(tmp_path / "saved", network())
    assert loaded.lr == "curvature"
    assert loaded.default_optimizer().param_groups[0]["relative"]
    assert fitted(loaded).epochs[0].lr == fitted(posterior).epochs[0].lr


def test_relative_rates_are_of_no_use_elsewhere_and_a_rate_of_the_latents_is_not_measured_over():
    posterior = made()
    before, optimizer = flat_weights(posterior), posterior.default_optimizer()
    refuses(lambda: fitted(posterior, optimizer=optimizer), "got relative ones")
    assert torch.equal(flat_weights(posterior), before)
    x, y = next(iter(loader()))[:2]
    posterior.backward(x, y)  # a loop of one's own
    optimizer.step()
    refuses(lambda: posterior.observe(optimizer), "got relative ones")
    trained = functools.partial(ds.NodeBNN.of_trained, network(), data_size=40, latent_lr=0.01)
    refuses(trained, "latent_lr=None with lr='curvature'")
    assert trained(lr=None).latent_lr == 0.01


def test_raw_rows_are_transformed_once_and_weights_count():
    x, y = next(iter(loader()))[:2]
    raw, weight = 3 * x + 20, torch.tensor([1.0, 1.0, *[0.0] * 8])
    standardiser = ds.data.Standardiser.of_rows(raw)
    posterior = made()
    posterior.inputs = as_input_transform(standardiser)
    once = fitted(made(), 1, data=[(standardiser(raw), y)]).epochs[0].lr
    assert fitted(posterior, 1, data=[(raw, y)]).epochs[0].lr == pytest.approx(once, rel=1e-4)
    x = torch.cat([30 * x[:2], x[2:]])  # large ones, whose curvature is far above that of the prior
    posterior = ds.NodeBNN.of_trained(nn.Linear(3, 2), data_size=40)
    optimizer = posterior.default_optimizer()
    found = [sharpness(posterior, optimizer, x, y, each) for each in (weight, 5 * weight, None)]
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0] != pytest.approx(found[2], rel=0.1)
    assert fitted(posterior, 1, data=[(x, y, weight)]).epochs[0].lr == pytest.approx(0.1 / found[0], rel=1e-6)


def test_a_conversion_takes_the_recipe_and_rates_of_ones_own(tmp_path):
    flat_weights = tmp_path / "weights.pt"
    torch.save(ds.nets.MLP(3, 2, hidden=(4,)).state_dict(), flat_weights)
    network = ["network.name=MLP", "network.inputs=3", "network.outputs=2", "network.hidden=[4]", "method.data_size=40"]
    made = convert(flat_weights, "node_bnn", tmp_path / "recipe", overrides=network)
    recipe = ds.NodeBNN.of_trained_settings
    assert {key: getattr(made, key) for key in recipe} == recipe
    own = convert(flat_weights, "node_bnn", tmp_path / "own", overrides=[*network, "method.latent_lr=0.01"])
    assert (own.lr, own.latent_lr, own.components) == (None, 0.01, recipe["components"])


def rank(number: int) -> tuple[list[str], int, float, float]:
    """As one process of a group of two: what training says, and the losses of independent runs."""
    distributed.init_process_group("fake", store=FakeStore(), rank=number, world_size=2)
    torch.manual_seed(number)
    posterior, loader = ds.MAP(tiny.mlp().double()), [tiny.points()]
    wrapped = ds.MAP(DistributedDataParallel(tiny.mlp().double()))
    said = []
    for train in (
        lambda: posterior.backward(*loader[0]),
        lambda: wrapped.backward(*loader[0]),
        lambda: wrapped.loss(*loader[0]),
        lambda: DistributedDataParallel(ds.MAP(tiny.mlp().double())).module.backward(*loader[0]),
    ):
        try:
            train()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    steps = int(posterior.steps)
    other = ds.MAP(tiny.mlp().double())
    other.mesh = "independent"
    history = ds.fit(posterior, loader, epochs=1, progress=False, mesh="independent")
    return said, steps, history[0].loss, float(other.backward(*loader[0]))


@pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_ranks_are_refused_outside_fit_unless_they_are_to_be_independent():
    found = []
    for number in range(2):  # one after the other: ranks that are refused or independent exchange nothing
        try:
            found.append(rank(number))
        finally:
            distributed.destroy_process_group()
    for i, (said, steps, *_) in enumerate(found):
        assert len(said) == 4
        for each in said:
            told = f"expected one process, got rank {i} of 2, whose gradients nobody averages; use ds.fit, or"
            assert each.startswith(told)
            assert 'mesh = "independent"' in each
        assert steps == 0
    assert found[0][2] != found[1][2]  # two seeds, two models
    assert found[0][3] != found[1][3]


def test_a_group_of_one_and_no_group_train_as_ever(tmp_path):
    ds.fit(ds.MAP(tiny.mlp().double()), [tiny.points()], epochs=1, progress=False)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        history = ds.fit(ds.MAP(tiny.mlp().double()), [tiny.points()], epochs=1, progress=False)
    finally:
        distributed.destroy_process_group()
    assert len(history) == 1


def test_ranks_have_one_word():
    fit = functools.partial(ds.fit, ds.MAP(tiny.mlp().double()), [tiny.points()], epochs=1, progress=False)
    refuses(lambda: fit(mesh="all"), "expected mesh of None, independent, got 'all'")
    refuses(lambda: fit(ranks="independent"), 'got .ranks.; pass mesh="independent"', TypeError)


@pytest.mark.parametrize(("given", "message"), [
    ({"epochs": "3"}, "expected epochs as a whole number, got '3'; "),
    ({"epochs": 2.5}, r"expected epochs as a whole number, got 2\.5; "),
    ({"accumulate": "2"}, "expected accumulate as a whole number, got '2'; "),
    ({"patience": 1.5, "validation": []}, r"expected patience as a whole number, got 1\.5; "),
    ({"clip": "1"}, "expected clip as a number, got '1'; "),
    ({"optimizer": "adam"}, r"expected an optimizer, got 'adam'; build one on posterior\.parameters\(\)"),
    ({"optimizer": torch.optim.Adam}, r"expected an optimizer, got <class '.*Adam'>; build one"),
    ({"optimizer": SGD, "scheduler": 0.1}, r"expected a scheduler, got 0\.1; build one on the optimizer"),
    ({"optimizer": SGD, "scheduler": lr_scheduler.StepLR}, "expected a scheduler, got <class .*StepLR"),
    ({"checkpoint_seconds": "60"}, "expected checkpoint_seconds as a number, got '60'; "),
])  # fmt: skip
def test_settings_of_another_type_are_refused_in_words(given, message):
    fit = functools.partial(ds.fit, ds.MAP(tiny.mlp().double()), [tiny.points()], epochs=1, progress=False)
    refuses(lambda: fit(**given), f"^{message}", TypeError)


def test_a_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        ds.fit(ds.MAP(tiny.mlp().double()), [tiny.points()], epochs=1, progress=False, checkpoint=tmp_path)


SCHEDULES = {
    "one cycle": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps),
    "cosine": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, steps),
    "in a sequence": lambda optimizer, steps: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, total_iters=1), lr_scheduler.PolynomialLR(optimizer, total_iters=steps)],
        milestones=[1],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_over_batches_is_said_to_be_stepped_each_epoch(name, caplog):
    batches = [tiny.points()] * 3
    for steps, said in ((6, True), (2, False)):  # two epochs of three batches
        posterior = ds.MAP(tiny.mlp().double())
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
        caplog.clear()
        with caplog.at_level("WARNING", logger="dissensus"):
            scheduler = SCHEDULES[name](optimizer, steps)
            ds.fit(posterior, batches, epochs=2, optimizer=optimizer, scheduler=scheduler, progress=False)
        assert ("was built for 6 steps, but fit steps it once per epoch, 2 times" in caplog.text) is said


@pytest.mark.parametrize("resumed", [False, True])
def test_a_cycle_that_ends_before_the_run_is_refused_before_anything_trains(resumed, tmp_path, monkeypatch):
    def run(epochs, steps):
        torch.manual_seed(0)
        posterior = ds.MAP(tiny.mlp().double())
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        settings = {"optimizer": optimizer, "scheduler": scheduler, "progress": False}
        settings |= {"checkpoint": tmp_path / "run.pt"} if resumed else {}
        ds.fit(posterior, [tiny.points()], epochs=epochs, **settings)

    run(3, 3)
    seen = []
    monkeypatch.setattr(ds.MAP, "before_step", lambda *batch: seen.append(batch))
    told = r"^expected a OneCycleLR of at least 4 steps, one per epoch, got 3; set total"
    refuses(lambda: run(4, 3), told)  # resumed: the length is that of the checkpoint
    assert not seen


def test_a_posterior_that_is_frozen_throughout_is_said_to_be():
    posterior = ds.MAP(tiny.mlp().double()).requires_grad_(False)
    with pytest.raises(ValueError, match="expected a posterior with trainable parameters, got only frozen ones"):
        ds.fit(posterior, [tiny.points()], epochs=1, progress=False)

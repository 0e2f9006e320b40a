"""What training refuses or warns of: a loop of one's own on several ranks, schedules that do not fit."""

import pytest
import torch
import torch.distributed as distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, lr_scheduler
from torch.testing._internal.distributed.fake_pg import FakeStore

import dissensus as ds
import tiny


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
    other.ranks = "independent"
    history = ds.fit(posterior, loader, epochs=1, progress=False, ranks="independent")
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
            assert each.startswith(
                f"expected one process, got rank {i} of 2: outside fit, ranks share no gradients and no"
            )
            assert 'ranks="independent"' in each
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
    with pytest.raises(ValueError, match="expected ranks of None, independent, got 'all'"):
        ds.fit(ds.MAP(tiny.mlp().double()), [tiny.points()], epochs=1, progress=False, ranks="all")


@pytest.mark.parametrize(
    ("given", "message"),
    [
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
    ],
)
def test_settings_of_another_type_are_refused_in_words(given, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        ds.fit(ds.MAP(tiny.mlp().double()), [tiny.points()], progress=False, **{"epochs": 1, **given})


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
        settings = {"checkpoint": tmp_path / "run.pt"} if resumed else {}
        ds.fit(
            posterior,
            [tiny.points()],
            epochs=epochs,
            optimizer=optimizer,
            scheduler=scheduler,
            progress=False,
            **settings,
        )

    run(3, 3)
    seen = []
    monkeypatch.setattr(ds.MAP, "before_step", lambda *batch: seen.append(batch))
    with pytest.raises(
        ValueError, match=r"^expected a OneCycleLR of at least 4 steps, one per epoch, got 3; set total"
    ):
        run(4, 3)  # resumed: the length is that of the checkpoint
    assert not seen


def test_a_posterior_that_is_frozen_throughout_is_said_to_be():
    posterior = ds.MAP(tiny.mlp().double()).requires_grad_(False)
    with pytest.raises(ValueError, match="expected a posterior with trainable parameters, got only frozen ones"):
        ds.fit(posterior, [tiny.points()], epochs=1, progress=False)

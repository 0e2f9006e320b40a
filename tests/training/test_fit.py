"""fit: what it keeps, when it stops, that it can go on where it stopped, and what it refuses."""

import ast
import copy
import importlib.util
import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
import tiny
from dissensus.core.weights import Recorder, network_parameters
from dissensus.training.validation import validation_nll
from refusals import refuses

data = tiny.point_batches  # three of them
QUIET = {"progress": False, "engine": "vectorised"}


def noisy_validation():
    """The training data with a quarter of the labels changed: the score falls while it fits, rises when it is too sure."""
    x, y = tiny.points(24)
    return [(x, torch.where(torch.arange(24) % 4 == 0, (y + 1) % 3, y))]


def private_names(source: str) -> list[str]:
    """Private names of the package that a module imports or takes from an object that is not its own."""
    nodes = [*ast.walk(ast.parse(source))]
    imports = [each for each in nodes if isinstance(each, ast.ImportFrom) and str(each.module).startswith("dissensus")]
    named = [word for each in imports for one in each.names for word in (*str(each.module).split("."), one.name)]
    taken = [each for each in nodes if isinstance(each, ast.Attribute) and ast.unparse(each.value) != "self"]
    return [
        name for name in (*named, *(each.attr for each in taken)) if name.startswith("_") and not name.endswith("__")
    ]


def test_a_copy_of_fit_is_a_loop_of_ones_own(tmp_path):
    source = (Path(ds.__file__).parent / "training" / "fit.py").read_text()
    assert private_names(source) == []
    assert private_names("from dissensus.core.batch import Batch, _move\nposterior._known") == ["_move", "_known"]
    (tmp_path / "my_fit.py").write_text(source)
    spec = importlib.util.spec_from_file_location("my_fit", tmp_path / "my_fit.py")
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    found = []
    for fit in (ds.fit, mine.fit):
        torch.manual_seed(1)
        posterior, loader = tiny.ensemble(tiny.mlp), DataLoader(TensorDataset(*tiny.points(24)), 5, shuffle=True)
        history = fit(posterior, loader, epochs=3, validation=noisy_validation(), accumulate=2, clip=1.0, **QUIET)
        found.append((tiny.state(posterior), [epoch.loss for epoch in history.epochs]))
    assert mine.fit is not ds.fit
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    torch.manual_seed(1)
    before = tiny.state(tiny.ensemble(tiny.mlp))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in found[0][0].items()), "it was trained"


def test_the_best_state_by_validation_is_kept():
    posterior, validation = tiny.ensemble(tiny.mlp), noisy_validation()
    states = []
    history = ds.fit(
        posterior, data(), epochs=8, validation=validation, optimizer=SGD(posterior.parameters(), lr=0.5, momentum=0.9),
        callback=lambda epoch: states.append(tiny.state(posterior)), **QUIET,
    )  # fmt: skip
    scores = [epoch.validation for epoch in history.epochs]
    best = min(range(8), key=scores.__getitem__)
    assert 0 < best < 7, "choose data where the best epoch is neither the first nor the last"
    assert history.best is history[best]
    assert tiny.largest_difference(tiny.state(posterior), states[best]) == 0
    assert validation_nll(posterior, validation) == scores[best]
    assert int(posterior.steps) == 3 * (best + 1)


def test_the_score_is_the_mixtures_negative_log_likelihood():
    posterior, ((x, y),) = tiny.ensemble(tiny.mlp), noisy_validation()
    expected = -float(posterior.predict(x).log_prob(y).mean())
    assert validation_nll(posterior, [(x, y)]) == pytest.approx(expected, abs=1e-12)
    assert validation_nll(posterior, [(x[:7], y[:7]), (x[7:], y[7:])]) == pytest.approx(expected, abs=1e-12)
    weight = torch.ones(24)
    weight[10:] = 0
    expected = -float(posterior.predict(x[:10]).log_prob(y[:10]).mean())
    assert validation_nll(posterior, [(x, y, weight)]) == pytest.approx(expected, abs=1e-12)
    posterior.temperature.fill_(3.0)
    nll = -float(posterior.predict(x).log_prob(y).mean())
    assert validation_nll(posterior, [(x, y)]) == pytest.approx(nll, abs=1e-12)


def test_validation_of_pixels_weighs_images_and_skips_void():
    posterior = ds.MAP(tiny.segmenter().double(), likelihood=ds.Classification(ignore_index=255))
    x, y = torch.randn(3, 2, 3, 3, dtype=torch.float64), torch.randint(3, (3, 3, 3))
    void = torch.rand(3, 3, 3) < 0.3
    weight = torch.tensor([0.0, 1.0, 3.0])
    log_prob = posterior.predict(x).log_prob(y)
    w = (weight[:, None, None] * ~void).double()
    expected = -float((w * log_prob).sum() / w.sum())
    assert validation_nll(posterior, [(x, torch.where(void, 255, y), weight)]) == pytest.approx(expected, abs=1e-12)


def test_without_validation_the_last_state_is_kept():
    posterior = tiny.ensemble(tiny.mlp)
    states = []
    history = ds.fit(posterior, data(), epochs=3, callback=lambda e: states.append(tiny.state(posterior)), **QUIET)
    assert history.best is None
    assert tiny.largest_difference(tiny.state(posterior), states[-1]) == 0
    assert (posterior.steps_per_epoch, posterior.epochs) == (3, 3)


def test_history_tells_of_every_epoch():
    posterior = tiny.ensemble(tiny.mlp)
    other = copy.deepcopy(posterior)
    optimizer, same = SGD(posterior.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    history = ds.fit(posterior, data(), epochs=2, optimizer=optimizer, **QUIET)
    assert len(history) == 2
    other.particles.how = "vectorised"
    for epoch in history.epochs:
        losses = []
        for x, y in data():
            other.zero_grad()
            losses.append(other.backward(x, y))
            same.step()
        expected = torch.stack(losses).mean(0)
        assert epoch.members == pytest.approx(expected.tolist(), abs=1e-12)
        assert epoch.loss == pytest.approx(float(expected.mean()), abs=1e-12)
        assert (epoch.lr, epoch.validation) == (0.1, None)
        assert epoch.seconds > 0
    assert [e.epoch for e in history.epochs] == [1, 2]
    assert not posterior.training


def test_patience_stops_training():
    posterior, validation = tiny.ensemble(tiny.mlp), noisy_validation()
    optimizer = SGD(posterior.parameters(), lr=0.5, momentum=0.9)
    history = ds.fit(posterior, data(), epochs=50, validation=validation, patience=3, optimizer=optimizer, **QUIET)
    assert len(history) < 50
    assert len(history) == history.best.epoch + 3
    scores = [epoch.validation for epoch in history.epochs]
    assert min(scores[history.best.epoch :]) >= history.best.validation


def test_a_callback_that_returns_true_stops_training():
    posterior = ds.MAP(tiny.mlp().double())
    history = ds.fit(posterior, data(), epochs=50, callback=lambda epoch: epoch.epoch == 4, **QUIET)
    assert len(history) == 4
    assert int(posterior.steps) == 12


def test_a_scheduler_steps_once_an_epoch():
    posterior = ds.MAP(tiny.mlp().double())
    optimizer = SGD(posterior.parameters(), lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    history = ds.fit(posterior, data(), epochs=4, optimizer=optimizer, scheduler=scheduler, **QUIET)
    assert [epoch.lr for epoch in history.epochs] == [1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("validated", [True, False])
def test_a_plateau_scheduler_sees_the_score_or_the_loss(validated):
    posterior = ds.MAP(tiny.mlp().double())
    optimizer = SGD(posterior.parameters(), lr=0.5, momentum=0.9)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.0)
    validation = noisy_validation() if validated else None
    settings = {"optimizer": optimizer, "scheduler": scheduler, "validation": validation}
    history = ds.fit(posterior, data(), epochs=8, **settings, **QUIET)
    lr, best = 0.5, math.inf
    for epoch in history.epochs:
        assert epoch.lr == pytest.approx(lr)
        seen = epoch.validation if validated else epoch.loss
        lr, best = (lr, seen) if seen < best else (lr * 0.1, best)


def test_progress_off_a_terminal_is_a_line_for_the_first_epoch_and_the_last(capsys):
    ds.fit(ds.MAP(tiny.mlp().double()), data(), epochs=3, validation=noisy_validation())
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert [line.split("  ")[:2] for line in lines] == [["map", f"epoch {i}/3"] for i in (1, 3)]
    assert all("loss " in line and "validation " in line for line in lines)
    ds.fit(ds.MAP(tiny.mlp().double()), data(), epochs=3, progress=False)
    assert capsys.readouterr() == ("", "")


SCHEDULERS = {
    "none": lambda o: None,
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.8**epoch),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "warm-up then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(o, 4)], [2]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}
POSTERIORS = {
    "map": lambda: ds.MAP(tiny.mlp(0.3)),
    "deep_ensemble": lambda: ds.DeepEnsemble([tiny.mlp(0.3) for _ in range(3)]),
    "mc_dropout": lambda: ds.MCDropout(tiny.mlp(), rate=0.3, samples=3),
}


def run(make, schedule, checkpoint=None, *, stop_after=None, epochs=6):
    """(posterior, history) of a run with dropout, shuffling from the global stream, validation and a schedule."""
    torch.manual_seed(11)
    posterior = make()
    x, y = tiny.points(24)
    loader = DataLoader(TensorDataset(x.float(), y), batch_size=8, shuffle=True)
    validation = [(a.float(), b) for a, b in noisy_validation()]
    optimizer = torch.optim.Adam(posterior.parameters(), lr=0.05)

    def callback(epoch):
        if epoch.epoch == stop_after:
            raise tiny.Killed

    history = ds.fit(
        posterior, loader, epochs=epochs, validation=validation, optimizer=optimizer, scheduler=schedule(optimizer),
        checkpoint=checkpoint, callback=callback, **QUIET,
    )  # fmt: skip
    return posterior, history


@pytest.mark.parametrize(
    ("make", "schedule"),
    [(make, SCHEDULERS["lambda"]) for make in POSTERIORS.values()]
    + [(POSTERIORS["map"], schedule) for name, schedule in SCHEDULERS.items() if name != "lambda"],
    ids=[*POSTERIORS, *(name for name in SCHEDULERS if name != "lambda")],
)
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(make, schedule, tmp_path):
    whole, history = run(make, schedule)
    stream = torch.get_rng_state()
    checkpoint = tmp_path / "deep" / "checkpoint.pt"
    for stop_after in (1, 4):
        with pytest.raises(tiny.Killed):
            run(make, schedule, checkpoint, stop_after=stop_after)
    resumed, again = run(make, schedule, checkpoint)
    assert torch.equal(torch.get_rng_state(), stream)
    assert again.best.epoch == history.best.epoch
    for a, b in zip(history.epochs, again.epochs, strict=True):
        assert (a.epoch, a.loss, a.members, a.lr, a.validation) == (b.epoch, b.loss, b.members, b.lr, b.validation)
    assert tiny.largest_difference(tiny.state(whole), tiny.state(resumed)) == 0
    x = tiny.points()[0].float()
    assert torch.equal(whole.predict(x).member_means, resumed.predict(x).member_means)
    assert [p.name for p in checkpoint.parent.iterdir()] == ["checkpoint.pt"]  # nothing temporary is left


def test_a_finished_run_is_not_run_again(tmp_path):
    first, history = run(POSTERIORS["map"], SCHEDULERS["none"], tmp_path / "c.pt")
    second, again = run(POSTERIORS["map"], SCHEDULERS["none"], tmp_path / "c.pt")
    assert tiny.largest_difference(tiny.state(first), tiny.state(second)) == 0
    assert again.epochs == history.epochs


def test_a_run_stopped_by_patience_stays_stopped(tmp_path):
    def go():
        torch.manual_seed(3)
        posterior = ds.MAP(tiny.mlp().double())
        optimizer = SGD(posterior.parameters(), lr=0.5, momentum=0.9)
        settings = {"validation": noisy_validation(), "patience": 2, "checkpoint": tmp_path / "c.pt"}
        return posterior, ds.fit(posterior, data(), epochs=50, optimizer=optimizer, **settings, **QUIET)

    first, history = go()
    second, again = go()
    assert len(again) == len(history) < 50
    assert tiny.largest_difference(tiny.state(first), tiny.state(second)) == 0


def test_an_interrupted_run_can_go_on_for_longer(tmp_path):
    _, short = run(POSTERIORS["map"], SCHEDULERS["none"], tmp_path / "c.pt", epochs=2)
    _, long = run(POSTERIORS["map"], SCHEDULERS["none"], tmp_path / "c.pt", epochs=4)
    assert (len(short), len(long)) == (2, 4)
    assert long.epochs[:2] == short.epochs


@pytest.mark.parametrize(
    "damage", ["empty", "garbage", "half", "last byte", "bit flip", "another posterior", "no dict"]
)
def test_a_damaged_checkpoint_is_a_value_error(damage, tmp_path):
    path = tmp_path / "c.pt"
    run(POSTERIORS["map"], SCHEDULERS["none"], path, epochs=1)
    whole = path.read_bytes()
    weight = run(POSTERIORS["map"], SCHEDULERS["none"], path, epochs=1)[0].state_dict()["temperature"]
    at = whole.index(weight.numpy().tobytes())  # inside a stored tensor
    contents = {"empty": b"", "garbage": os.urandom(500), "half": whole[: len(whole) // 2], "last byte": whole[:-1]}
    contents["bit flip"] = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    if damage in contents:
        path.write_bytes(contents[damage])
    elif damage == "another posterior":
        other = ds.MAP(nn.Linear(4, 3))
        ds.fit(other, [(torch.zeros(3, 4), torch.arange(3))], epochs=1, checkpoint=tmp_path / "o.pt", **QUIET)
        os.replace(tmp_path / "o.pt", path)
    else:
        torch.save([1, 2], path)
    told = r"expected a checkpoint of this posterior in .*c\.pt, got (a damaged one|one of another run).*remove it"
    refuses(lambda: run(POSTERIORS["map"], SCHEDULERS["none"], path, epochs=2), told)


def test_a_checkpoint_holds_no_code_and_one_that_cannot_be_written_is_an_os_error(tmp_path):
    run(POSTERIORS["map"], SCHEDULERS["lambda"], tmp_path / "c.pt", epochs=1)
    torch.load(tmp_path / "c.pt", weights_only=True)
    (tmp_path / "file").write_text("")
    refuses(lambda: run(POSTERIORS["map"], SCHEDULERS["none"], tmp_path / "file" / "c.pt", epochs=1), "file", OSError)
    assert {p.name for p in tmp_path.iterdir()} == {"c.pt", "file"}


def test_a_loader_may_not_know_its_length():
    for loader in (
        DataLoader(tiny.Stream(lambda: zip(*tiny.points(6), strict=True)), batch_size=2),
        tiny.Unsized(data),
    ):
        posterior = ds.MAP(tiny.mlp().double())
        told = []
        posterior.begin = lambda steps, epochs, done=0, told=told: told.append((steps, epochs, done))
        ds.fit(posterior, loader, epochs=2, **QUIET)
        ds.fit(posterior, loader, epochs=2, **QUIET)
        assert int(posterior.steps) == 12
        assert told == [(None, 2, 0), (3, 2, 3)] * 2  # known after the first epoch, whatever was trained before


def test_clipping_counts_a_step_of_several_batches_as_one_where_the_optimiser_holds_a_part_only():
    x, y = tiny.points()
    found = []
    for batches in (1, 2):
        torch.manual_seed(0)
        posterior = ds.MAP(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double())
        optimizer = SGD(posterior.particles.template.network[2].parameters(), lr=0.5)
        ds.fit(posterior, [(x, y)] * batches, epochs=1, accumulate=batches, clip=0.1, optimizer=optimizer, **QUIET)
        assert (posterior.steps_per_epoch, posterior.epochs) == (1, 1)
        found.append({name: tensor for name, tensor in tiny.state(posterior).items() if "steps" not in name})
    assert tiny.largest_difference(*found) < 1e-12


def test_sample_weights_reach_the_loss():
    x, y = tiny.points()
    weight = torch.ones(12)
    weight[4] = 3
    weighted = ds.MAP(nn.Linear(4, 3).double())
    repeated = copy.deepcopy(weighted)
    ds.fit(weighted, [(x, y, weight)], epochs=5, optimizer=SGD(weighted.parameters(), lr=0.5), **QUIET)
    rows = torch.tensor([*range(12), 4, 4])
    ds.fit(repeated, [(x[rows], y[rows])], epochs=5, optimizer=SGD(repeated.parameters(), lr=0.5), **QUIET)
    assert tiny.largest_difference(tiny.state(weighted), tiny.state(repeated)) < 1e-12


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_mixed_precision_comes_close(engine):
    losses = []
    for precision in ("float32", "bf16"):
        torch.manual_seed(0)
        posterior = ds.DeepEnsemble([tiny.mlp() for _ in range(3)])
        loader = [(x.float(), y) for x, y in data()]
        optimizer = SGD(posterior.parameters(), lr=0.1)
        settings = {"precision": precision, "optimizer": optimizer, "engine": engine, "progress": False}
        history = ds.fit(posterior, loader, epochs=5, **settings)
        assert all(p.dtype == torch.float32 for p in posterior.parameters())
        losses.append([epoch.loss for epoch in history.epochs])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)  # bf16 keeps 8 bits: 0.4 %


def test_an_optimizer_over_a_part_trains_that_part_and_gathers_nothing():
    """Gradients of what the optimiser does not hold must not pile up from step to step and enter the clipping."""
    network, (x, y) = tiny.mlp().double().eval(), tiny.points()
    alone = copy.deepcopy(network)
    posterior = ds.MAP(network)
    body = tiny.state(network[0])
    posterior.train(False)
    optimizer, by_hand = SGD(network[3].parameters(), lr=0.1), SGD(alone[3].parameters(), lr=0.1)
    loader = [(x, y)]
    for _ in range(6):
        alone.train()
        alone.zero_grad()
        nn.functional.cross_entropy(alone(x), y).backward()
        norm = torch.cat([p.grad.flatten() for p in alone.parameters()]).norm()
        for parameter in alone.parameters():
            parameter.grad.mul_(min(1.0, 0.05 / float(norm)))
        by_hand.step()
    ds.fit(posterior, loader, epochs=6, clip=0.05, optimizer=optimizer, **QUIET)
    assert tiny.largest_difference(tiny.state(network[3]), tiny.state(alone[3])) < 1e-12
    assert tiny.largest_difference(tiny.state(network[0]), body) == 0


def classes():
    return ds.DeepEnsemble([nn.Linear(4, 3) for _ in range(2)])


def reals():
    return ds.DeepEnsemble([nn.Linear(4, 1) for _ in range(2)], likelihood=ds.Regression())


x32 = torch.zeros(6, 4)
labels = torch.arange(6) % 3
with_nan = torch.zeros(6, 4)
with_nan[4, 2] = math.nan


@pytest.mark.parametrize(("make", "loader", "text"), [
    (classes, [(x32, labels + 1)], "expected labels in 0…2, got 3"),
    (classes, [(x32, labels), (x32, labels - 1)], "expected labels in 0…2, got -1"),
    (classes, [(x32, labels[:5])], r"class indices of shape \(6,\).* got torch.int64 of shape \(5,\)"),
    (classes, [(x32, torch.eye(3, dtype=torch.int64)[labels])], "pass class indices, not one-hot rows"),
    (classes, [(x32, labels.float())], "pass one class index per example, y.long"),
    (classes, [(with_nan, labels)], "expected finite inputs, got NaN or infinity in row 4 of a batch"),
    (classes, [(x32 / 0, labels)], "expected finite inputs"),
    (classes, [], "expected at least one batch from the loader, got none"),
    (reals, [(x32, torch.zeros(5))], r"expected targets of shape \(6, 1\), got \(5,\)"),
    (reals, [(x32, with_nan[:, 2:3])], "expected finite targets, got NaN or infinity"),
    (reals, [(x32, torch.zeros(6, 1, dtype=torch.int64))], "expected real targets, got torch.int64"),
    (classes, [(x32, labels, torch.zeros(6))] * 2, "expected a weight above 0 in an epoch, got none"),
])  # fmt: skip
def test_bad_data_is_one_clear_error_and_no_file(make, loader, text, tmp_path):
    with pytest.raises(ValueError, match=text) as error:
        ds.fit(make(), loader, epochs=2, checkpoint=tmp_path / "c.pt", progress=False)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__ or error.value.__context__ is None
    assert list(tmp_path.iterdir()) == []


def test_a_generator_that_is_used_up_is_an_error_in_the_second_epoch():
    posterior = classes()
    refuses(lambda: ds.fit(posterior, ((x32, labels) for _ in range(3)), epochs=2, **QUIET), "generator")
    assert int(posterior.steps) == 3
    ds.fit(
        posterior, ((x32, labels, torch.full((6,), w)) for w in (0.0, 1.0)), epochs=1, **QUIET
    )  # 0 in one batch only


def test_a_member_that_diverges_is_named():
    networks = [nn.Linear(4, 3) for _ in range(3)]
    with torch.no_grad():
        networks[1].weight.fill_(3e38)
    posterior = ds.DeepEnsemble(networks)
    before = tiny.state(posterior)
    with pytest.raises(ds.Diverged, match=r"not finite in member 1 at step 1; lower the learning rate") as error:
        ds.fit(posterior, [(torch.ones(6, 4), labels)], epochs=2, **QUIET)
    assert isinstance(error.value, ValueError)
    assert (error.value.members, error.value.step) == ([1], 1)
    assert tiny.largest_difference(tiny.state(posterior), before) == 0  # it was seen before anything moved


def test_members_that_diverge_in_training_are_named():
    posterior = ds.DeepEnsemble([nn.Linear(4, 1) for _ in range(2)], likelihood=ds.Regression(noise=1.0))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ds.Diverged) as error:
        ds.fit(posterior, [(x, x[:, :1])], epochs=500, optimizer=SGD(posterior.parameters(), lr=100.0), **QUIET)
    assert error.value.members == [0, 1]
    assert error.value.step > 1


@pytest.mark.parametrize(("settings", "text"), [
    ({"epochs": 0}, "expected epochs of at least 1, got 0"),
    ({"accumulate": 0}, "expected accumulate of at least 1, got 0"),
    ({"clip": 0.0}, "expected clip above 0, got 0.0"),
    ({"clip": -1.0}, "expected clip above 0"),
    ({"patience": 3}, "expected validation data with patience"),
    ({"precision": "fp8"}, "expected precision of auto"),
    ({"engine": "warp"}, "expected engine .*got 'warp'"),
    ({"validation": []}, "expected at least one example to validate on, got none"),
    ({"validation": [(x32, labels + 7)]}, "expected labels in 0…2, got"),
    ({"validation": [(with_nan, labels)]}, "expected finite inputs"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings, text):
    refuses(lambda: ds.fit(classes(), [(x32, labels)], **{"epochs": 1, "progress": False, **settings}), text)


def test_a_scheduler_alone_another_networks_optimizer_and_a_network_are_refused():
    networks = [nn.Linear(4, 3) for _ in range(2)]
    posterior, loader = ds.DeepEnsemble(networks), [(x32, labels)]
    scheduler = lr_scheduler.ExponentialLR(SGD(posterior.parameters(), lr=1.0), 0.5)
    told = "expected an optimizer with the scheduler, got none"
    refuses(lambda: ds.fit(posterior, loader, epochs=1, scheduler=scheduler), told)
    # An ensemble copies the networks: an optimiser over these would train nothing, silently.
    optimizer = SGD([p for net in networks for p in net.parameters()], lr=0.1)
    told = "expected an optimizer over the posterior's parameters, got one over other"
    refuses(lambda: ds.fit(posterior, loader, epochs=1, optimizer=optimizer), told)
    refuses(lambda: ds.fit(networks[0], loader, epochs=1), "a posterior, got Linear; wrap the network", TypeError)


def test_a_posterior_is_kept_only_from_when_there_is_something_to_draw():
    class Late(Recorder):
        seen = 0
        ready = property(lambda self: self.seen >= 12)  # four epochs

        def observe(self, optimizer):
            self.seen += 1

        def sample(self, samples, generator=None):
            return {}

    torch.manual_seed(0)
    posterior = ds.MAP(tiny.mlp().double())
    posterior.recorder = Late(lambda: network_parameters(posterior.particles))
    # Validation gets worse from the first epoch on, since the rate is absurd: the best epoch precedes what is ready.
    optimizer = SGD(posterior.parameters(), lr=3.0)
    history = ds.fit(posterior, data(), epochs=6, validation=noisy_validation(), optimizer=optimizer, **QUIET)
    assert history.best is not None
    assert history.best.epoch >= 4


def test_checkpoints_are_as_far_apart_as_asked_and_the_last_state_is_always_kept(tmp_path: Path) -> None:
    for seconds, expected in ((0.0, [1, 2, 3, 4]), (1e6, [1, 1, 1, 1])):
        path, seen = tmp_path / f"{seconds}.pt", []
        torch.manual_seed(0)
        posterior = ds.MAP(ds.nets.MLP(4, 3, hidden=(4,))).double()

        def look(_: ds.Epoch, path: Path = path, seen: list[int] = seen) -> None:
            seen.append(len(torch.load(path)["history"]))

        ds.fit(posterior, data(), epochs=5, callback=look, checkpoint=path, checkpoint_seconds=seconds, **QUIET)
        assert seen[:4] == expected
        assert len(torch.load(path)["history"]) == 5


def test_a_run_that_is_stopped_early_keeps_its_last_state_and_how_it_ran(tmp_path: Path) -> None:
    path = tmp_path / "stopped.pt"
    settings = {"checkpoint": path, "checkpoint_seconds": 1e6, **QUIET}
    torch.manual_seed(0)
    posterior = ds.MAP(ds.nets.MLP(4, 3, hidden=(4,))).double()
    stopped = ds.fit(posterior, data(), epochs=5, callback=lambda epoch: epoch.epoch == 3, **settings)
    assert len(torch.load(path)["history"]) == 3
    again = ds.fit(posterior, data(), epochs=3, **settings)
    assert (len(again), again.engine) == (3, stopped.engine)


def test_a_learned_noise_is_found_in_a_short_run():
    """400 points y = x with noise 0.1: from 1, the default optimiser finds it in 240 steps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 1, generator=generator)
    y = x + 0.1 * torch.randn(400, 1, generator=generator)
    torch.manual_seed(0)
    networks = [ds.nets.MLP(1, 1, hidden=(32,)) for _ in range(3)]
    posterior = ds.DeepEnsemble(networks, likelihood=ds.Regression("learned"))
    ds.fit(posterior, ds.data.Batches(x, y, batch_size=50, shuffle=True, seed=0), epochs=30, progress=False)
    noise = posterior.particles.own_parameters()["likelihood.log_noise"].detach().exp()
    assert float(noise.max()) < 0.25
    assert float(noise.min()) > 0.09


def test_a_last_batch_of_one_with_batch_norm_is_a_clear_error():
    x, y = torch.randn(9, 4), torch.randint(3, (9,))
    nets = [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(2)]
    message = "expected at least two examples per batch for batch norm, got a batch of 1; pass drop_last=True"
    with pytest.raises(ValueError, match=message):
        ds.fit(ds.DeepEnsemble(nets), ds.data.Batches(x, y, batch_size=4), epochs=1, progress=False)
    swag = ds.SWAG(nets[0])
    ds.fit(swag, [(x, y)], epochs=4, progress=False)
    refuses(lambda: ds.refresh(swag, ds.data.Batches(x, y, batch_size=4)), message)


def test_a_data_size_that_an_epoch_does_not_have_is_warned_of_once(caplog):
    x, y = tiny.points(32)
    for told, warned in ((10, True), (16, False), (32, False), (64, False), (65, True), (None, False)):
        caplog.clear()
        prior = {} if told is None else {"weight_prior_std": 1.0, "data_size": told}
        posterior = ds.MAP(tiny.mlp().double(), **prior)
        for _ in range(2):
            ds.fit(posterior, [(x[:20], y[:20]), (x[20:], y[20:])], epochs=2, progress=False)
        said = [record.message for record in caplog.records if "data_size is" in record.message]
        assert len(said) == warned
        if told == 10:
            assert "data_size is 10, but an epoch has 32 examples: prior and KL weigh 3.2 times as much" in said[0]


def first_ruled_out():
    """Logits of three classes, of which the first never is."""
    layers = {"pad": nn.ConstantPad1d((1, 0), -torch.inf), "layer": nn.Linear(4, 2)}
    return tiny.Network(lambda self, x: self.pad(self.layer(x)), **layers)


def test_validation_is_finite_where_a_class_is_ruled_out_at_examples_that_do_not_count():
    x, y = tiny.points()
    labels = torch.where(torch.arange(len(y)) < 2, 255, y.clamp(min=1))
    posterior = ds.MAP(first_ruled_out().double(), likelihood=ds.Classification(ignore_index=255))
    history = ds.fit(posterior, [(x, labels)], epochs=2, validation=[(x, labels)], **QUIET)
    kept = labels != 255
    expected = -posterior.predict(x[kept]).log_prob(labels[kept]).mean()
    assert history.best.validation == pytest.approx(float(expected), rel=1e-12)


def test_only_what_the_posterior_trains_gets_gradients():
    """Not inputs, nor what made them, nor a module that the network holds without registering it."""
    made, outside, (x, y) = nn.Linear(4, 4).double(), nn.Linear(4, 3).double(), tiny.points(16)
    held = [outside]
    network = tiny.Network(lambda self, x: self.layer(x) + held[0](x), layer=nn.Linear(4, 3).double())
    features = made(x)
    ds.fit(ds.MAP(network), [(features[:8], y[:8]), (features[8:], y[8:])], epochs=2, progress=False)
    leaf = x.clone().requires_grad_()
    ds.fit(ds.MAP(network), [(leaf, y)], epochs=2, progress=False)
    assert [each.grad for each in (*made.parameters(), *outside.parameters(), leaf)] == [None] * 5


def test_a_watcher_that_comes_during_a_run_records_the_rest():
    posterior = ds.MAP(tiny.mlp().double())

    def track(epoch):
        if epoch.epoch == 1:
            ds.track(posterior, [ds.SWAG])

    x, y = tiny.points(24)
    ds.fit(posterior, [(x[:12], y[:12]), (x[12:], y[12:])], epochs=4, callback=track, progress=False)
    assert int(posterior.watchers[0].steps) == 6


def test_after_a_run_a_step_that_was_left_out_is_not_counted():
    posterior = ds.MAP(tiny.mlp().double())
    optimizer = SGD(posterior.parameters(), lr=0.1)
    ds.fit(posterior, [tiny.points(12)], epochs=3, optimizer=optimizer, progress=False)
    assert posterior.observe(optimizer) is False
    optimizer.step()
    assert posterior.observe(optimizer) is True
    assert int(posterior.steps) == 4


def test_a_correction_that_a_callback_fits_ends_with_the_next_step(caplog):
    posterior, (x, y) = ds.MAP(tiny.mlp().double()), tiny.points(24)
    correct = {1: lambda epoch: posterior.recalibrate(3.0, None)}
    ds.fit(posterior, [(x, y)], epochs=3, callback=lambda e: correct.pop(e.epoch, bool)(e) and None, progress=False)
    assert (float(posterior.temperature), posterior.is_corrected) == (1.0, False)
    assert any("sets the temperature back" in line for line in caplog.messages)


def test_steps_that_a_callback_observes_too_or_that_do_nothing_are_counted_as_they_are():
    posterior, batches = ds.MAP(tiny.mlp().double()), [tiny.points(12)] * 4
    optimizer, seen = SGD(posterior.parameters(), lr=0.1), []
    ds.fit(
        posterior, batches, epochs=1, optimizer=optimizer, progress=False,
        on_step=lambda _: seen.append(posterior.observe(optimizer)),
    )  # fmt: skip
    assert seen == [False] * 4
    assert int(posterior.steps) == 4
    optimizer.step = lambda *_: None
    ds.fit(posterior, batches, epochs=1, optimizer=optimizer, progress=False)
    assert int(posterior.steps) == 4


def test_a_first_batch_is_tried_in_the_precision_of_training():
    """Else a GPU would load kernels that training does not use."""
    seen = []

    class Noting(nn.Linear):
        def forward(self, x):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(x)

    batches = [(x.float(), y) for x, y in data()]
    ds.fit(ds.MAP(Noting(4, 3)), batches, epochs=1, precision="bf16", progress=False)
    assert len(seen) > 3
    assert all(seen)

"""Callbacks of fit: each epoch and step arrives once, with the run's numbers, also after a stop."""

import contextlib
import csv
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dissensus as ds
import tiny
from dissensus.integrations import loggers
from refusals import refuses
from thinning import thinned

QUIET = {"progress": False, "engine": "vectorised"}
NAMES = ["loss", "validation", "lr", "seconds", "member0", "member1", "member2"]


def train(posterior=None, *, epochs=2, loader=None, **keywords):
    torch.manual_seed(0)
    posterior = posterior or tiny.ensemble(tiny.mlp)
    loader = loader or tiny.point_batches()
    return ds.fit(posterior, loader, epochs=epochs, validation=loader, **QUIET, **keywords)


class Calls:
    """Any object of another library: remembers what it is called with, by the method's name."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_on_step_is_called_after_every_optimiser_step(accumulate):
    posterior, steps, seen, states = tiny.ensemble(tiny.mlp), [], [], []
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)

    def look(step):
        steps.append(step)
        seen.append(int(posterior.steps))
        states.append(tiny.state(posterior))

    history = train(posterior, accumulate=accumulate, on_step=look, optimizer=optimizer, scheduler=scheduler)
    count = 3 if accumulate == 1 else 2  # the last step of an epoch has what is left
    assert [step.step for step in steps] == seen == list(range(1, 2 * count + 1))
    assert [step.lr for step in steps] == [0.1] * count + [0.05] * count
    for epoch, group in zip(history.epochs, (steps[:count], steps[count:]), strict=True):
        sizes = torch.tensor([1.0, 1.0, 1.0] if accumulate == 1 else [2.0, 1.0], dtype=torch.float64)
        means = torch.stack([step.losses for step in group]).T @ sizes / 3
        assert means.tolist() == pytest.approx(epoch.members, abs=1e-12)
        assert group[0].loss == pytest.approx(float(group[0].losses.mean()))
    assert all(tiny.largest_difference(a, b) > 0 for a, b in itertools.pairwise(states))


class CountedReads(TorchDispatchMode):
    """Counts how often a value is read from a tensor, for which a GPU would be waited for."""

    reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_steps_read_nothing_unless_they_are_asked():
    def reads(on_step):
        torch.manual_seed(0)
        with CountedReads() as counted:
            ds.fit(ds.MAP(tiny.mlp()), batches32(), epochs=2, on_step=on_step, progress=False, engine="loop")
        return counted.reads

    assert reads(lambda step: None) == reads(None)
    assert reads(lambda step: step.loss) == reads(None) + 6


def batches32():
    return [(x.float(), y) for x, y in tiny.point_batches()]


def test_every_callback_is_called_and_one_of_them_stops():
    seen = []
    stops = [lambda epoch: seen.append(epoch.epoch), lambda epoch: epoch.epoch == 2, lambda epoch: seen.append("last")]
    assert len(train(epochs=5, callback=stops)) == 2
    assert seen == [1, "last", 2, "last"]
    assert len(train(epochs=2, callback=[])) == 2
    for wrong in ({"callback": 3}, {"callback": [seen.append, 3]}, {"on_step": 3}):
        refuses(lambda wrong=wrong: train(**wrong), "expected functions as callback and on_step, got 3", TypeError)


def read(path):
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize(("kind", "checkpoint_seconds"), thinned(["epoch", "step"], [0.0, 1e9], every=2))
def test_a_csv_file_of_a_resumed_run_is_that_of_an_uninterrupted_one(kind, checkpoint_seconds, tmp_path):
    def run(folder, stops):
        for stop in stops:

            def end(epoch, stop=stop):
                if epoch.epoch == stop and checkpoint_seconds:
                    raise KeyboardInterrupt  # no checkpoint is written: these epochs are repeated
                return epoch.epoch == stop

            logger = loggers.CSV(tmp_path / folder / f"{kind}s.csv")
            calls = {"callback": [logger, end]} if kind == "epoch" else {"callback": end, "on_step": logger}
            checkpoint = {"checkpoint": tmp_path / f"{folder}.pt", "checkpoint_seconds": checkpoint_seconds}
            with contextlib.suppress(KeyboardInterrupt):
                train(epochs=4, **checkpoint, **calls)
        return read(logger.path)

    whole, resumed = run("whole", [None]), run("resumed", [2, None])
    assert [row[kind] for row in resumed] == list(range(1, 5 if kind == "epoch" else 13))
    for name in {*whole[0]} - {"seconds"}:
        assert [row[name] for row in resumed] == [row[name] for row in whole]
    with (tmp_path / "resumed" / f"{kind}s.csv").open("a") as file:
        file.write("4,0.1")  # a row that was being written when the process ended
    number = len(whole) + (kind == "step")
    loggers.CSV(tmp_path / "resumed" / f"{kind}s.csv")(SimpleNamespace(row=lambda: whole[0] | {kind: number}))
    assert [row[kind] for row in read(tmp_path / "resumed" / f"{kind}s.csv")][-2:] == [number - 1, number]


def test_files_of_something_else_are_refused(tmp_path):
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    told = "with the columns epoch,loss.*, got a,b; use another"
    refuses(lambda: train(callback=loggers.CSV(tmp_path / "notes.csv")), told)
    both = loggers.CSV(tmp_path / "both.csv")
    refuses(lambda: train(callback=both, on_step=both), "with the columns epoch,.*, got step,loss")


def test_tensorboard_mlflow_and_wandb_get_the_numbers_of_the_history(monkeypatch):
    writer, mlflow, run = Calls(), Calls(), Calls()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    ready = [loggers.TensorBoard(writer), loggers.MLflow(), loggers.WandB(run)]
    rows = [epoch.row() for epoch in train(callback=ready, on_step=ready[0]).epochs]
    wanted = [(f"epoch/{name}", row[name], row["epoch"]) for row in rows for name in NAMES]
    assert [call[1:] for call in writer.calls if call[0] == "add_scalar" and call[1].startswith("epoch")] == wanted
    assert [call[3] for call in writer.calls if call[1:2] == ("step/loss",)] == [1, 2, 3, 4, 5, 6]
    assert ("flush",) in writer.calls
    metrics = [{f"epoch/{name}": row[name] for name in NAMES} for row in rows]
    assert mlflow.calls == [("log_metrics", each, number) for number, each in enumerate(metrics, 1)]
    assert run.calls[:2] == [("define_metric", "epoch/*", "epoch"), ("define_metric", "step/*", "step")]
    assert run.calls[2:] == [("log", {"epoch": number, **each}) for number, each in enumerate(metrics, 1)]


def test_tensorboard_writes_to_a_folder(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    train(callback=loggers.TensorBoard(tmp_path / "run"))
    assert list((tmp_path / "run").glob("events*"))


class TrialPruned(Exception):
    pass


def test_optuna_gets_validation_scores_and_ends_a_trial(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(TrialPruned=TrialPruned))
    reported = []
    trial = SimpleNamespace(report=lambda value, step: reported.append((step, value)))
    trial.should_prune = lambda: len(reported) == 2
    epochs, posterior = [], tiny.ensemble(tiny.mlp)
    with pytest.raises(TrialPruned, match="pruned after epoch 2"):
        train(posterior, epochs=5, callback=[epochs.append, loggers.Optuna(trial)])
    assert reported == [(epoch.epoch, epoch.validation) for epoch in epochs]
    assert not posterior.training
    told = "expected validation data for Optuna, got none; pass validation="
    refuses(lambda: ds.fit(posterior, tiny.point_batches(), epochs=1, callback=loggers.Optuna(trial), **QUIET), told)


@pytest.mark.parametrize(("build", "package", "module"), [
    (lambda: loggers.TensorBoard("folder"), "tensorboard", "torch.utils.tensorboard"),
    (loggers.MLflow, "mlflow", "mlflow"),
    (loggers.WandB, "wandb", "wandb"),
    (lambda: loggers.Optuna(None), "optuna", "optuna"),
])  # fmt: skip
def test_a_package_that_is_missing_is_named_in_one_line(build, package, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    refuses(lambda: build(), f"^this logger needs {package}: pip install {package}$", ImportError)


def test_wandb_without_a_run_is_refused(monkeypatch):
    module = ModuleType("wandb")
    module.run = None
    monkeypatch.setitem(sys.modules, "wandb", module)
    refuses(loggers.WandB, "expected a run of Weights & Biases, got none; call wandb.init first")


def test_only_the_first_process_writes(monkeypatch, tmp_path):
    monkeypatch.setattr(loggers, "is_reporting_process", lambda: False)
    train(callback=loggers.CSV(tmp_path / "run.csv"))
    assert not list(tmp_path.iterdir())


def test_the_blocks_of_the_page_that_need_other_packages_run(monkeypatch, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "logging.md").read_text()
    blocks = re.findall(r"^```(python)?\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    values, scores, study = [], [], Calls()
    trial = SimpleNamespace(suggest_float=lambda *_, **__: 1e-2, should_prune=lambda: False)
    trial.report = lambda *told: scores.append(told)
    study.optimize = lambda objective, n_trials: values.append(objective(trial))
    boards = SimpleNamespace(SummaryWriter=lambda folder: Calls())
    optuna = SimpleNamespace(create_study=lambda: study, TrialPruned=TrialPruned)
    wandb = SimpleNamespace(init=lambda project: Calls())
    given = {"torch.utils.tensorboard": boards, "mlflow": Calls(), "wandb": wandb, "optuna": optuna}
    for name, module in given.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, (kind, code) in enumerate(blocks):
        if number == 0 or not kind:
            exec(code, names)
    assert [kind for kind, _ in blocks].count("") == 2
    assert len(given["mlflow"].calls) == len(scores) == 4
    assert values == [min(score for score, _ in scores)]


def test_on_step_takes_one_function_or_a_list_and_refuses_others_before_training():
    x, y = ds.data.two_moons(20, seed=0)
    seen, also = [], []
    posterior = ds.MAP(ds.nets.MLP(2, 2, hidden=(4,)))
    on_step = [lambda step: seen.append(step.step), lambda step: also.append(step.lr)]
    ds.fit(posterior, [(x, y)] * 3, epochs=2, on_step=on_step, progress=False)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert len(also) == 6
    before = [parameter.clone() for parameter in posterior.parameters()]
    with pytest.raises(TypeError, match="expected functions as callback and on_step, got 3; pass one or a list"):
        ds.fit(posterior, [(x, y)], epochs=1, on_step=[seen.append, 3], progress=False)
    assert all(torch.equal(a, b) for a, b in zip(before, posterior.parameters(), strict=True))

"""Mistakes of the first hour: each is answered by one line that says what to do, as an error, a warning or a note."""

import copy
import logging

import pytest
import torch
from torch import nn

import dissensus as ds
from refusals import refuses


def points(rows=64):
    x = torch.rand(rows, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > x[:, 1]).long()


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def fit(posterior, **settings):
    return ds.fit(posterior, points(), **{"epochs": 1, "progress": False, **settings})


@pytest.fixture(scope="module")
def posterior():
    torch.manual_seed(0)
    posterior = ds.MAP(network())
    fit(posterior)
    return posterior


ERRORS = {
    "keyword of fit": (lambda p: fit(p, epoch=3), TypeError, "keyword of fit.*, one of .*clip.*; did you mean 'epochs'"),
    "batch_size": (lambda p: fit(p, batch_size=8), TypeError, "got 'batch_size'; set it in the loader"),
    "keyword of evaluate": (
        lambda p: ds.evaluate(p, points(), metrics=["ece"]), TypeError, "got 'metrics'; .* see evaluation.metrics",
    ),
    "keyword of predict": (lambda p: ds.predict(p, points(), compile=True), TypeError, "did you mean 'compiled'"),
    "keyword of conformal": (lambda p: ds.conformal(p, points(), levels=0.9), TypeError, "did you mean 'level'"),
    "keyword of a method": (lambda p: ds.SWAG(network(), rnak=3), TypeError, "of SWAG, one of .*; did you mean 'rank'"),
    "keyword before networks": (lambda p: ds.DeepEnsemble(network(), member=3), TypeError, "did you mean 'members'"),
    "former keyword": (lambda p: ds.NodeBNN(network(), gamma=1.0), TypeError, "pass posterior_temperature=1 . gamma"),
    "attribute of a posterior": (lambda p: p.predicts, AttributeError, "of MAP, one of .*; did you mean 'predict'"),
    "attribute of a module": (lambda p: p.stat_dict, AttributeError, "did you mean 'state_dict'"),
    "attribute of a prediction": (
        lambda p: p.predict(points()[0]).epistemc, AttributeError, "one of aleatoric, .*; did you mean 'epistemic'",
    ),
    "probs": (lambda p: p.predict(points()[0]).probs, AttributeError, "got 'probs'; use mean"),
    "attribute of a history": (lambda p: fit(p).epoch, AttributeError, "of History, one of best, .*did you mean 'epochs'"),
    "metric as attribute": (
        lambda p: ds.evaluate(p, points()).accurracy, AttributeError, r"got 'accurracy'; use .metrics\['accuracy'\]",
    ),
    "metric": (lambda p: ds.evaluate(p, points()).metrics["ECE"], KeyError, "a metric of accuracy, .*did you mean 'ece'"),
    "figure": (lambda p: ds.evaluate(p, points()).plot("reliabilty"), ValueError, "did you mean 'reliability'"),
    "name in the package": (lambda p: ds.DeepEnsembl, AttributeError, "did you mean 'DeepEnsemble'"),
    "lr and an optimizer": (
        lambda p: fit(p, lr=0.1, optimizer=torch.optim.SGD(p.parameters(), lr=1.0)),
        ValueError, "expected one learning rate, got lr=0.1 and that of SGD; leave lr out",
    ),
    "lr of a sampler": (
        lambda p: fit(ds.SGHMC(network(), data_size=64), lr=0.1), ValueError, "lr=0.1 and that of SGHMC; leave lr out",
    ),
    "negative lr": (lambda p: fit(p, lr=-1.0), ValueError, "expected lr above 0, got -1.0"),
    "device gpu": (lambda p: fit(p, device="gpu"), ValueError, r"that torch has here \(cpu.*\), got 'gpu'; pass one"),
    "no such device": (lambda p: fit(p, device="cuda:99"), ValueError, r"has here \(cpu.*\), got 'cuda:99'; pass one"),
    "list of examples": (
        lambda p: p.predict(list(points()[0])), ValueError, r"64 tensors, but Sequential.forward takes 1; .*torch.stack\(x\)",
    ),
    "list of lists": (lambda p: p.predict([[1.0] * 4] * 3), TypeError, "tuple of list; convert x with torch.as_tensor"),
    "list of images in a loader": (lambda p: ds.predict(p, list(points()[0])), TypeError, "let the loader yield such tuples"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), ERRORS.values(), ids=ERRORS)
def test_a_mistake_is_an_error_that_names_the_remedy(posterior, call, error, words):
    refuses(lambda: call(posterior), words, error)


def test_names_that_only_look_like_mistakes_are_let_through(posterior):
    assert not hasattr(posterior, "_anything")
    assert not hasattr(posterior, "anything")
    assert torch.equal(copy.deepcopy(posterior).predict(points()[0]).mean, posterior.predict(points()[0]).mean)

    class Open(ds.MAP.__mro__[1]):  # takes any keyword, and passes them on
        name = "open"

        def __init__(self, network, **keywords):
            super().__init__(network, **keywords)

        draw = ds.MAP.draw

    refuses(lambda: Open(network(), weight_prior=1.0), "got 'weight_prior'; did you mean 'weight_prior_std'", TypeError)


@pytest.mark.parametrize("look", [
    lambda p, x: p.predict(x), lambda p, x: ds.predict(p, (x, points()[1])), lambda p, x: ds.evaluate(p, (x, points()[1]))
])  # fmt: skip
def test_pixels_up_to_255_are_said_once_where_training_saw_other_values(posterior, look, caplog):
    made, x = copy.deepcopy(posterior), points()[0]
    for scale, warnings in ((1.0, 0), (10.0, 0), (254.0 / x.max(), 1), (254.0 / x.max(), 1)):
        look(made, scale * x)
        assert caplog.text.count("look like pixels from 0 to 255, but earlier ones reached 0.99") == warnings


def test_a_saved_posterior_remembers_how_large_its_inputs_were(posterior, tmp_path, caplog):
    ds.save(posterior, tmp_path)
    loaded, x = ds.load(tmp_path, network()), points()[0]
    loaded.predict(254 * x)
    assert "look like pixels from 0 to 255, but earlier ones reached 0.99" in caplog.text
    assert loaded._known.largest == posterior._known.largest
    ds.save(loaded, tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "config.json").read_text()


def test_training_on_pixels_up_to_255_is_no_mistake(caplog):
    posterior, x = ds.MAP(network()), 255 * points()[0]
    ds.fit(posterior, (x, points()[1]), epochs=1, validation=(x, points()[1]), progress=False)
    posterior.predict(x)
    assert caplog.text == ""


def test_outputs_of_a_called_posterior_are_said_to_be_raw_once_in_eval_mode(caplog):
    posterior, x = ds.MAP(network()), points()[0]
    for train, said in ((True, 0), (False, 1), (False, 1)):
        assert posterior.train(train)(x).shape == (1, 64, 2)
        assert caplog.text.count("raw outputs: use posterior.predict(x)") == said


@pytest.mark.parametrize(("lr", "expected"), [(None, [1e-3, 1e-2]), (0.02, [0.02, 1e-2])])
def test_fit_sets_the_rate_of_the_default_optimizer_and_learned_noise_keeps_its_own(lr, expected, monkeypatch):
    made, default = [], ds.MAP.default_optimizer
    monkeypatch.setattr(ds.MAP, "default_optimizer", lambda self: made.append(default(self)) or made[0])
    posterior, (x, _) = ds.MAP(nn.Linear(4, 1), likelihood=ds.Regression("learned")), points()
    history = ds.fit(posterior, (x, x[:, :1]), epochs=1, lr=lr, progress=False)
    assert [group["initial_lr"] for group in made[0].param_groups] == expected
    assert history[0].lr == expected[0]


@pytest.mark.parametrize(("settings", "said", "advice"), [
    ({}, True, ", or lr=0.003"), ({"lr": 2e-3}, True, ""), ({"lr": 0.1, "epochs": 30}, False, ""), ({"epochs": 2}, False, ""),
])  # fmt: skip
def test_a_loss_that_still_falls_is_said_with_its_numbers_and_a_rate_to_try(settings, said, advice, capsys):
    torch.manual_seed(0)
    posterior, x = ds.MAP(network()), 20 * points()[0]
    history = ds.fit(posterior, (x, points()[1]), **{"epochs": 4, **settings})
    text = capsys.readouterr().err
    words = f"falls, {history[-2].loss:.4g} in epoch 3 and {history[-1].loss:.4g} in 4: try more epochs{advice}\n"
    assert (words in text) == ("the loss still falls" in text) == said


def test_a_resumed_run_says_where_and_epochs_have_one_number_everywhere(tmp_path, capsys):
    numbers, made = [], {"checkpoint": tmp_path / "run.pt", "progress": True, "validation": points()}
    fit(ds.MAP(network()), epochs=3, **made)
    history = fit(ds.MAP(network()), epochs=6, callback=lambda epoch: numbers.append(epoch.epoch), **made)
    lines = capsys.readouterr().err.splitlines()
    assert lines[2] == "map  resumed at epoch 4 of 6"
    assert any(line.startswith("map  epoch 6/6  loss") for line in lines)
    assert numbers == [4, 5, 6]
    assert [epoch.epoch for epoch in history.epochs] == list(history.to_dataframe().index) == [1, 2, 3, 4, 5, 6]
    assert history.best is history[history.best.epoch - 1]
    assert f"kept epoch {history.best.epoch}," in repr(history)
    assert [each["epoch"] for each in torch.load(tmp_path / "run.pt")["history"]] == [1, 2, 3, 4, 5, 6]
    fit(ds.MAP(network()), epochs=6, **made)
    assert "map  resumed after the last epoch of 6" in capsys.readouterr().err


def test_a_checkpoint_with_epochs_from_0_goes_on_from_1(tmp_path):
    path = tmp_path / "run.pt"
    fit(ds.MAP(network()), epochs=3, validation=points(), checkpoint=path)
    state = torch.load(path)
    for each in (*state["history"], state["best"]):
        each["epoch"] -= 1
    torch.save({**state, "best": {**state["best"], "kept": state["best"]["epoch"]}}, path)
    history = fit(ds.MAP(network()), epochs=4, validation=points(), checkpoint=path)
    assert [epoch.epoch for epoch in history.epochs] == [1, 2, 3, 4]
    assert history.best is min(history.epochs, key=lambda epoch: epoch.validation)


@pytest.mark.parametrize("method", [ds.NodeBNN, ds.RankOneBNN])
def test_a_noisy_network_worse_than_the_one_it_came_from_is_said_with_the_numbers(method, caplog):
    torch.manual_seed(0)
    trained = ds.MAP(network())
    fit(trained, epochs=60, lr=0.05)
    assert caplog.text == ""
    fit(method(trained.member(0), data_size=64, init_std=3.0), lr=1e-6)
    assert f"{method.__name__} is worse than its network: loss of the first batch 0." in caplog.text


def test_laplace_says_what_it_fitted(capsys, caplog):
    posterior = ds.Laplace(network(), prior_precision=2.5)
    assert "fitted" not in repr(posterior)
    fit(posterior, progress=True)
    words = "fitted to layer '2' (full, 18 weights), prior precision 2.5"
    assert f"laplace  {words}" in capsys.readouterr().err.splitlines()
    assert words in repr(posterior)
    with caplog.at_level(logging.INFO, logger="dissensus"):
        fit(posterior)
    assert words in caplog.text  # where no progress is shown

"""Rates from the curvature of the first batch: what NodeBNN.of_trained trains with."""

import logging

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.bench.run.convert import convert
from dissensus.data.input_transforms import as_input_transform
from dissensus.theory import sharpness
from refusals import refuses


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def loader(seed=0):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 3, generator=generator)
    return ds.data.Batches(x, (x[:, 0] > 0).long(), batch_size=10, shuffle=True, seed=seed)


def made():
    return ds.NodeBNN.of_trained(network(), data_size=40)


def weights(posterior):
    return torch.cat([p.detach().flatten() for p in posterior.parameters()])


def fitted(posterior, epochs=3, **settings):
    torch.manual_seed(2)
    return ds.fit(posterior, settings.pop("data", loader()), epochs=epochs, progress=False, device="cpu", **settings)


def test_the_sharpness_of_the_first_batch_is_one_less_momentum_and_latents_have_their_share():
    posterior = made()
    optimizer = posterior.default_optimizer()
    x, y = next(iter(loader()))[:2]
    found = sharpness(posterior, optimizer, x, y)
    history = fitted(posterior)
    assert history.epochs[0].lr == pytest.approx(0.1 / found, rel=1e-6)
    assert {group["lr"] for group in optimizer.param_groups} == {1.0, posterior.components}


def test_measuring_changes_no_batch_and_no_random_number():
    measured, told = made(), made()
    rate = fitted(measured).epochs[0].lr
    optimizer = torch.optim.SGD(told.parameter_groups(rate, 1e-4), lr=rate, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, told.default_schedule(3))
    fitted(told, optimizer=optimizer, scheduler=schedule)
    assert torch.equal(weights(measured), weights(told))


def test_a_resumed_run_keeps_its_rate_and_says_nothing_of_another(tmp_path, caplog):
    whole, begun, resumed = made(), made(), made()
    fitted(whole)
    fitted(begun, checkpoint=tmp_path / "run.pt", callback=lambda epoch: epoch.epoch == 0)
    with caplog.at_level(logging.WARNING, logger="dissensus"):
        history = fitted(resumed, checkpoint=tmp_path / "run.pt")
    assert not caplog.records
    assert len({epoch.lr for epoch in history.epochs[:2]}) == 1
    assert torch.equal(weights(whole), weights(resumed))


def test_what_cannot_be_measured_is_an_error_and_nothing_moves():
    posterior = made()
    before = weights(posterior)
    refuses(lambda: fitted(posterior, data=iter(loader())), "read twice")
    broken = made()
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    with pytest.raises((ValueError, ds.Diverged)):
        fitted(broken)
    assert torch.equal(weights(posterior), before)


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
    before, optimizer = weights(posterior), posterior.default_optimizer()
    refuses(lambda: fitted(posterior, optimizer=optimizer), "got relative ones")
    assert torch.equal(weights(posterior), before)
    x, y = next(iter(loader()))[:2]
    posterior.backward(x, y)  # a loop of one's own
    optimizer.step()
    refuses(lambda: posterior.observe(optimizer), "got relative ones")
    with pytest.raises(ValueError, match="latent_lr=None with lr='curvature'"):
        ds.NodeBNN.of_trained(network(), data_size=40, latent_lr=0.01)
    assert ds.NodeBNN.of_trained(network(), data_size=40, latent_lr=0.01, lr=None).latent_lr == 0.01


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
    weights = tmp_path / "weights.pt"
    torch.save(ds.nets.MLP(3, 2, hidden=(4,)).state_dict(), weights)
    network = ["network.name=MLP", "network.inputs=3", "network.outputs=2", "network.hidden=[4]", "method.data_size=40"]
    made = convert(weights, "node_bnn", tmp_path / "recipe", overrides=network)
    recipe = ds.NodeBNN.of_trained_settings
    assert {key: getattr(made, key) for key in recipe} == recipe
    own = convert(weights, "node_bnn", tmp_path / "own", overrides=[*network, "method.latent_lr=0.01"])
    assert (own.lr, own.latent_lr, own.components) == (None, 0.01, recipe["components"])

"""Drawn functions as one module: what a predictor gives, that it is exported, and that nothing changes it."""

import copy

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from thinning import often


def mlp():
    return ds.nets.MLP(4, 3, hidden=(6,)).double()


def swag():
    posterior, (x, y) = ds.SWAG(mlp(), rank=3, samples=4), tiny.points()
    ds.fit(posterior, [(x, y)], epochs=8, progress=False, engine="loop")
    return posterior


EXPORTED = {"map": lambda: ds.MAP(mlp()), "ensemble": lambda: ds.DeepEnsemble([mlp() for _ in range(3)]), "swag": swag}


@pytest.mark.parametrize("method", often(["swag"], ["map", "ensemble"]))
def test_an_exported_predictor_has_the_temperature_inside(method, tmp_path):
    posterior, (x, _) = EXPORTED[method](), tiny.points()
    posterior.temperature.fill_(2.34)
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    program = torch.export.export(posterior.predictor(), (x,), dynamic_shapes=(batch,), strict=False)
    torch.export.save(program, tmp_path / "moons.pt2")
    exported = torch.export.load(tmp_path / "moons.pt2").module()
    found, predictive = exported(x[:7]), posterior.predict(x[:7])
    for name in ("mean", "total", "aleatoric", "epistemic"):
        torch.testing.assert_close(found[name], getattr(predictive, name), rtol=0, atol=1e-12)
    cold = posterior(x[:7]).detach().softmax(2).mean(0)
    assert float((cold - found["mean"]).abs().max()) > 1e-3  # the networks' own outputs know of no temperature


def test_a_predictor_of_a_regression_gives_mean_and_variance():
    posterior = ds.MAP(nn.Linear(4, 1).double(), likelihood=ds.Regression(noise=0.2))
    posterior.temperature.fill_(3.0)
    x, _ = tiny.points()
    found = posterior.predictor()(x)
    torch.testing.assert_close(found["mean"], posterior.member(0)(x).detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found["total"], torch.full((12, 1), 0.36, dtype=torch.float64), rtol=1e-6, atol=0)


def test_nothing_that_happens_afterwards_changes_a_predictor():
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()  # with batch norm
    posterior.temperature.fill_(2.0)
    predictor = posterior.train().predictor()
    before = predictor(x)["mean"]
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    for use in (predictor, predictor.train(), copy.deepcopy(predictor)):
        assert torch.equal(use(x)["mean"], before)
        assert not any(parameter.requires_grad for parameter in use.parameters())
    x.requires_grad_()
    predictor(x)["total"].sum().backward()
    assert float(x.grad.abs().max()) > 0

"""The talk's networks with every posterior: each trains a step, predicts, and comes back from a file bit for bit."""

import pytest
import torch

import dissensus as ds
from dissensus.bench.run.build import required_keywords

# name -> (one network, inputs): as small as these networks take them
NETS = {
    "LeNet": (lambda: ds.nets.LeNet(3, size=16), (1, 16, 16)),
    "AlexNet": (lambda: ds.nets.AlexNet(3, channels=1, hidden=4), (1, 63, 63)),
    "VGG16": (lambda: ds.nets.VGG16(3, head="large", hidden=4, dropout=0.1, batch_norm=False), (3, 32, 32)),
}
ENDS = {"LeNet": "head", "AlexNet": "classifier", "VGG16": "head"}  # the last linear layers, one Sequential
KEYWORDS = {
    "mc_dropout": {"rate": 0.1, "samples": 2},
    "lit": {"strength": 0.1},
    "batch_ensemble": {"members": 2, "modulation": ds.Modulation.normal(1.0, 0.1)},
    "dropout_ensemble": {"members": 2},
    "tradi": {"samples": 2},
    "swag": {"samples": 2, "rank": 2, "start": 0, "every": 1},
    "swa": {"start": 0, "every": 1},
    "snapshot_ensemble": {"members": 2},
    "gaussian_perturbation": {"samples": 2},
    "laplace": {"samples": 2},
    "node_bnn": {"components": 2, "samples": 2, "train_samples": 2},
    "rank_one_bnn": {"components": 2, "samples": 2, "train_samples": 2},
    "mean_field_vi": {"samples": 2},
    "sghmc": {"members": 2},
    "hmc": {"samples": 2, "warmup": 1, "leapfrog": 1, "weight_prior_std": 1.0},
}
OFTEN = {
    ("LeNet", method)
    for method in ("map", "deep_ensemble", "forde", "batch_ensemble", "swag", "laplace", "rank_one_bnn")
}
OFTEN |= {("AlexNet", "node_bnn")}


def pairs():
    for network in NETS:
        for method in ds.METHODS:
            quick = (network, method) in OFTEN
            yield pytest.param(network, method, marks=() if quick else pytest.mark.slow, id=f"{network}-{method}")


@pytest.mark.parametrize(("network", "method"), [*pairs()])
def test_it_trains_predicts_and_comes_back(network, method, tmp_path):
    torch.manual_seed(0)
    (make, shape), kind = NETS[network], ds.METHODS[method]
    keywords = dict(KEYWORDS.get(method, {}))
    if method == "mc_dropout" and network != "LeNet":
        del keywords["rate"]  # they have dropout of their own
    several = kind.networks_taken == "several"
    if "data_size" in (needed := required_keywords(kind)):
        keywords["data_size"] = 4
    if "layer" in needed:
        last = list(dict(make().get_submodule(ENDS[network]).named_children()))
        keywords |= {"layer": f"{ENDS[network]}.{last[-2]}", "head": f"{ENDS[network]}.{last[-1]}"}
    posterior = kind([make(), make()] if several else make(), **keywords)
    x, y = torch.randn(4, *shape), torch.tensor([0, 1, 2, 0])
    if hasattr(posterior, "fit_posthoc"):
        posterior.fit_posthoc([(x, y)])
    else:
        ds.fit(posterior, [(x, y), (x.flip(0), y.flip(0))], epochs=1, progress=False)
    predictive = posterior.predict(x)
    assert predictive.member_means.shape[1:] == (4, 3)
    assert predictive.member_means.isfinite().all()
    ds.save(posterior, tmp_path / "posterior")
    assert torch.equal(ds.load(tmp_path / "posterior").predict(x).member_means, predictive.member_means)

"""The Gaussian prior: on weights and biases, not on norm layers, ‖θ‖² / (2 N σ²) per member."""

import functools
import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.core.prior import make_prior
from dissensus.utils.batch_norm_names import norm_parameters
from refusals import refuses


def test_norm_layers_are_found_wherever_they_are():
    norms = nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True))
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), norms)
    assert norm_parameters(network) == {"1.weight", "1.bias", "2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"}
    assert norm_parameters(nn.LayerNorm(3)) == {"weight", "bias"}
    assert norm_parameters(nn.RMSNorm(3)) == {"weight"}

    home_made = nn.Module()  # none of torch's, but it keeps running statistics
    home_made.gain = nn.Parameter(torch.ones(3))
    home_made.register_buffer("running_mean", torch.zeros(3))
    assert norm_parameters(nn.Sequential(nn.Linear(3, 3), home_made)) == {"1.gain"}


@pytest.mark.parametrize("how", ["loop", "vectorised"])
def test_the_penalty_is_the_sum_of_squares_of_each_member(how):
    networks = [tiny.mlp().double() for _ in range(3)]
    x, y = tiny.points()
    plain = ds.DeepEnsemble(networks)
    prior = ds.DeepEnsemble(networks, weight_prior_std=0.7, data_size=50, likelihood=ds.Classification())
    plain.particles.how = prior.particles.how = how
    difference = prior.eval().backward(x, y) - plain.eval().backward(x, y)
    squares = torch.stack([sum(net.get_parameter(n).square().sum() for n in WEIGHTS) for net in networks])
    torch.testing.assert_close(difference, squares.detach() / (2 * 50 * 0.7**2), rtol=1e-12, atol=0)


WEIGHTS = ("0.weight", "0.bias", "3.weight", "3.bias")  # not "1.*", the batch norm


def test_learned_noise_has_no_weight_prior():
    network = nn.Linear(4, 1).double()
    posterior = ds.MAP(network, likelihood=ds.Regression(initial=5.0), weight_prior_std=1.0, data_size=1).double()
    params = posterior.particles.shared_parameters()
    expected = sum(p.square().sum() for p in network.parameters()) / 2
    torch.testing.assert_close(posterior.penalty(params), expected, rtol=1e-12, atol=0)


def test_frozen_weights_do_not_count():
    network = nn.Linear(4, 3).double()
    network.weight.requires_grad_(False)
    posterior = ds.MAP(network, weight_prior_std=1.0, data_size=1)
    found = posterior.penalty(posterior.particles.shared_parameters())
    torch.testing.assert_close(found, network.bias.square().sum() / 2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_prior_of_weights_in_half_precision_is_that_of_the_same_numbers_in_full(dtype):
    """Σ θ² = 4e6 leaves float16; bfloat16 would have two digits of it."""
    network = nn.Linear(50, 2).to(dtype)
    with torch.no_grad():
        network.weight.normal_(0, 200)
    posterior = ds.MAP(network, weight_prior_std=0.7, data_size=30)
    found = posterior.penalty(posterior.particles.shared_parameters())
    exact = sum(p.double().square().sum() for p in network.parameters()) / (2 * 30 * 0.7**2)
    assert found.dtype == torch.float32
    assert float(found.detach()) == pytest.approx(float(exact.detach()), rel=1e-5)


@pytest.mark.parametrize(("values", "told", "error"), [
    *(((None, n), "data_size as a whole number, got", TypeError) for n in (2.5, 10.0, True, "600", math.nan)),
    *(((1.0, n), "data_size of at least 1, got", ValueError) for n in (0, -3)),
    *(((std, 10), "weight_prior_std as a number, got", TypeError) for std in (True, "1")),
    *(((std, 10), "weight_prior_std above 0, got", ValueError) for std in (math.nan, math.inf, -1.0, 0)),
])  # fmt: skip
def test_deviations_and_numbers_of_examples_that_are_none_are_refused(values, told, error):
    refuses(lambda: make_prior(None, *values), f"expected {told}", error)
    std, size = (1.0 if values[0] is None else values[0]), values[1]
    refuses(lambda: ds.MAP(tiny.mlp(), weight_prior_std=std, data_size=size), f"expected {told}", error)


def test_numbers_of_numpy_are_numbers():
    posterior = ds.MAP(ds.nets.MLP(4, 3, hidden=(6,)), weight_prior_std=np.float64(0.5), data_size=np.int64(12))
    plain = ds.MAP(posterior.particles.member(0), weight_prior_std=0.5, data_size=12)
    x, y = tiny.points()
    assert torch.equal(posterior.float().loss(x.float(), y), plain.float().loss(x.float(), y))


class StudentT(ds.Prior):
    """t-distributed weights, norm layers among them."""

    def __init__(self, freedom=3.0, scale=0.5):
        super().__init__()
        self.freedom, self.scale = freedom, scale
        self.register_buffer("one", torch.ones(()))

    def log_prob(self, params):
        return sum(student(w * self.one, self.freedom, self.scale) for w in params.values())


def student(weight, freedom, scale):
    return -(freedom + 1) / 2 * torch.log1p((weight / scale).square() / freedom).sum()


def slope(tensor):
    """(...) −∇ log p / 12 of torch's own Student-t density."""
    weight = tensor.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.distributions.StudentT(3.0, 0.0, 0.5).log_prob(weight).sum(), weight)
    return -gradient / 12


NORMAL = ds.Modulation.normal(1, 0.5)
BUILD = {
    "map": lambda net, **prior: ds.MAP(net(), **prior),
    "deep_ensemble": lambda net, **prior: ds.DeepEnsemble([net() for _ in range(3)], **prior),
    "batch_ensemble": lambda net, **prior: ds.BatchEnsemble(net(), members=4, modulation=NORMAL, **prior),
    "forde": lambda net, **prior: ds.FoRDE([net() for _ in range(3)], **prior),
    "swag": lambda net, **prior: ds.SWAG(net(), **prior),
    "mc_dropout": lambda net, **prior: ds.MCDropout(net(), rate=0.2, **prior),
    "function_rde": lambda net, **prior: ds.FunctionRDE([net() for _ in range(2)], **prior),
}


def built(name, **prior):
    torch.manual_seed(0)
    return BUILD[name](lambda: tiny.mlp().double(), **prior).train()


def gradients(posterior):
    torch.manual_seed(1)
    posterior.zero_grad()
    posterior.backward(*tiny.points())
    return {name: p.grad for name, p in posterior.named_parameters()}


@pytest.mark.parametrize("name", BUILD)
def test_a_deviation_is_short_for_a_gaussian_prior_bit_for_bit(name):
    ways = {"weight_prior_std": 0.7}, {"prior": ds.GaussianPrior(0.7)}
    short, long = (built(name, **way, data_size=12) for way in ways)
    assert short.config() == long.config()
    first, second = gradients(short), gradients(long)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    decays = [[group["weight_decay"] for group in p.default_optimizer().param_groups] for p in (short, long)]
    assert decays[0] == decays[1]
    assert set(decays[0]) == {0.0}


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
@pytest.mark.parametrize("name", ["map", "deep_ensemble", "batch_ensemble"])
def test_a_users_prior_adds_its_slope_by_hand_and_once_to_shared_tensors(name, engine):
    plain, under = built(name), built(name, prior=StudentT(), data_size=12)
    plain.particles.how = under.particles.how = engine
    before, after = gradients(plain), gradients(under)
    modulations = {id(each) for each in getattr(under, "modulations", {}).values()}
    for key, tensor in under.named_parameters():
        expected = torch.zeros_like(tensor) if id(tensor) in modulations else slope(tensor)
        torch.testing.assert_close(after[key] - before[key], expected, rtol=0, atol=1e-12, msg=key)


def test_a_function_of_tensors_by_name_is_a_prior():
    network = tiny.mlp().double()
    network[3].bias.requires_grad_(False)
    names = []

    def density(params):
        names.extend(params)
        return student(params["0.weight"], 3.0, 0.5)

    posterior = ds.MAP(network, prior=density, data_size=12)
    found = posterior.penalty(posterior.particles.shared_parameters())
    torch.testing.assert_close(found, -student(network[0].weight, 3.0, 0.5) / 12, rtol=1e-14, atol=0)
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight"]  # not the frozen one


def test_weight_decay_acts_where_no_prior_does():
    posterior = ds.MAP(tiny.mlp(), likelihood=ds.Regression("learned"), prior=StudentT(), data_size=12)
    assert {group["weight_decay"] for group in posterior.parameter_groups(0.1, 0.3)} == {0.0}
    posterior.use_prior(None)
    assert [group["weight_decay"] for group in posterior.parameter_groups(0.1, 0.3)] == [0.3, 0.0]


def test_what_is_no_prior_is_a_clear_error():
    network = tiny.mlp()
    given = functools.partial(ds.MAP, network, data_size=12)
    both = {"prior": ds.GaussianPrior(1.0), "weight_prior_std": 1.0}
    refuses(lambda: given(**both), "expected prior or weight_prior_std, got both; pass one")
    refuses(lambda: ds.MAP(network, prior=StudentT()), "expected data_size with a prior, got none")
    for odd in (1.0, "gaussian", StudentT):
        refuses(functools.partial(given, prior=odd), "expected a prior, got", TypeError)
    table = functools.partial(given, weight_prior_std={"head.*": 0.5})
    refuses(table, "expected patterns that match names, got 'head")
    refuses(lambda: given(weight_prior_std={"0.*": 0.0}), r"expected std of '0.\*' above 0, got 0")
    refuses(lambda: ds.GaussianPrior(0), "expected std above 0, got 0")
    rows = ds.MAP(network.double(), prior=lambda params: params["0.bias"], data_size=12)
    refuses(lambda: rows.backward(*tiny.points()), r"expected log_prob as one number, got shape \(6,\); sum it")
    told = r"a keyword of SWAG, one .*'weight_prior'; did you mean 'weight_prior_std'"
    refuses(lambda: ds.SWAG(network, weight_prior=1.0, data_size=12), told, TypeError)
    refuses(lambda: ds.WeightRDE([tiny.mlp() for _ in range(2)]), "expected data_size, got none")


@pytest.mark.parametrize("name", ["map", "batch_ensemble", "swag"])
def test_a_file_notes_a_users_prior_and_training_on_asks_for_it(name, tmp_path):
    posterior, (x, y) = built(name, prior=StudentT(), data_size=12), tiny.points()
    ds.fit(posterior, [(x, y)], epochs=4, progress=False, engine="loop")
    ds.save(posterior, tmp_path / "saved")
    loaded = ds.load(tmp_path / "saved", tiny.mlp().double())
    assert torch.equal(loaded.predict(x).member_means, posterior.eval().predict(x).member_means)
    assert loaded.config()["prior"] == {"name": "StudentT", "freedom": 3.0, "scale": 0.5}
    again = functools.partial(ds.fit, loaded, [(x, y)], epochs=1, progress=False, engine="loop")
    refuses(again, r"expected the prior StudentT of the training.*use_prior\(prior\)")
    ds.save(loaded, tmp_path / "again")
    assert ds.load(tmp_path / "again", tiny.mlp().double()).config() == loaded.config()
    loaded.use_prior(StudentT())
    first, second = gradients(loaded.train()), gradients(posterior.train())
    assert all(torch.equal(first[key], second[key]) for key in first)
    loaded.use_prior(None)
    again()
    assert "prior" not in loaded.config()


def test_a_checkpoint_is_not_resumed_with_another_prior(tmp_path):
    kept = {"epochs": 1, "checkpoint": tmp_path / "run.pt", "progress": False, "engine": "loop"}
    ds.fit(built("map", prior=StudentT(3.0), data_size=12), [tiny.points()], **kept)
    for other in ({"prior": StudentT(5.0), "data_size": 12}, {"weight_prior_std": 1.0, "data_size": 12}, {}):
        resumed = functools.partial(ds.fit, built("map", **other), [tiny.points()], **kept)
        refuses(resumed, "expected a checkpoint of this posterior")
    ds.fit(built("map", prior=StudentT(3.0), data_size=12), [tiny.points()], **{**kept, "epochs": 2})


def test_those_who_watch_a_run_have_its_prior():
    network, prior = tiny.mlp().double(), StudentT()
    tradi = functools.partial(ds.TRADI, weight_prior_std=9.0, data_size=7)
    run = ds.track(network, [ds.SWAG, tradi], prior=prior, data_size=12)
    assert all((each.prior, each.data_size) == (prior, 12) for each in (run, *run.watchers))
    alone = ds.MAP(network, prior=prior, data_size=12)
    x, y = tiny.points()
    assert torch.equal(run.loss(x, y), alone.loss(x, y))


def test_signatures_name_what_a_prior_takes():
    for method in ds.METHODS.values():
        parameters = inspect.signature(method).parameters
        assert [name for name, each in parameters.items() if each.kind is each.VAR_KEYWORD] == []
        assert list(parameters)[-3:] == ["prior", "weight_prior_std", "data_size"]


def test_a_table_of_deviations_is_a_gaussian_of_each_tensors_own():
    prior = ds.GaussianPrior({"head.*": 0.1, "*.weight": 2.0})
    params = {"head.weight": torch.randn(3, 2), "body.weight": torch.randn(4)}
    normals = [torch.distributions.Normal(0.0, std) for std in (0.1, 2.0)]
    logs = [(each.log_prob(t) - each.log_prob(0 * t)).sum() for each, t in zip(normals, params.values(), strict=True)]
    torch.testing.assert_close(prior.log_prob(params), sum(logs), rtol=1e-5, atol=0)
    assert [prior.covers(name) for name in ("head.bias", "body.weight", "body.bias")] == [True, True, False]
    drawn = torch.stack([prior.draw("head.weight", torch.empty(100)) for _ in range(100)])
    assert float(drawn.std()) == pytest.approx(0.1, rel=5 * (2 * drawn.numel()) ** -0.5)


def test_weight_decay_acts_on_what_a_table_leaves_out_and_files_keep_it(tmp_path):
    posterior = ds.MAP(tiny.mlp().double(), weight_prior_std={"0.*": 0.5}, data_size=12)
    assert posterior.names_with_prior() == ["network.0.weight", "network.0.bias"]
    decays = {id(p): group["weight_decay"] for group in posterior.parameter_groups(0.1, 0.3) for p in group["params"]}
    named = posterior.particles.shared_parameters()
    assert (decays[id(named["network.0.weight"])], decays[id(named["network.3.weight"])]) == (0.0, 0.3)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, tiny.mlp())
    assert loaded.config() == posterior.config()
    found = loaded.penalty(loaded.particles.shared_parameters())
    torch.testing.assert_close(found, posterior.penalty(named), rtol=1e-14, atol=0)

"""The contract: one table of methods, one set of tests that every one of them passes."""

import copy
import json
import math
import pickle
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.utils.parameter_groups import count_optimizer_step
from refusals import refuses
from small_methods import NodeNoise, Rank1Ensemble
from small_noise import NoisyWeights
from thinning import often


def of_size(count, keywords):
    """The keywords with data_size=count where neither it nor a prior, which asks for it, is given."""
    return {"data_size": None if "weight_prior_std" in keywords else count, **keywords}


def three(name, net, *, sized=False, **keywords):
    """A method of three networks; `sized`: one that always asks for data_size."""
    return ds.METHODS[name]([net() for _ in range(3)], **(of_size(12, keywords) if sized else keywords))


def feature_rde(net, **keywords):
    *_, layer, head = (name for name, _ in net().named_modules())  # of every small network here
    return three("feature_rde", net, layer=layer, head=head, **keywords)


def observed(name, net, *, networks=None, **keywords):
    """A tracker that has seen one step, its clock at 0: before that it has nothing to draw from."""
    return seen(ds.METHODS[name](one_or_many(net, networks), **keywords))


def one_or_many(net, networks):
    """One network, or a list of so many."""
    return net() if networks is None else [net() for _ in range(networks)]


def seen(posterior):
    for parameter in posterior.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = optimizer_for(posterior, torch.optim.SGD, lr=0.01)
    count_optimizer_step(optimizer)  # one that moves nothing
    posterior.observe(optimizer)
    posterior.zero_grad()
    posterior.steps.zero_()
    return posterior


def fitted(net, *, networks=None, **keywords):
    """A Laplace that has seen a few inputs."""
    posterior = ds.Laplace(one_or_many(net, networks), samples=20, **keywords)
    return posterior.fit_posthoc([answered(posterior)])


def answered(posterior):
    """(x, y): inputs of the kind that the network takes, with targets of its outputs' kind."""
    network = posterior.particles.member(0)
    dtype = next(network.parameters()).dtype
    image = isinstance(next(network.modules()), nn.Sequential) and isinstance(network[0], nn.Conv2d)
    x = torch.randn(8, 2, 5, 6, dtype=dtype) if image else tiny.points(8)[0].to(dtype)
    inputs = (x, x) if isinstance(network, tiny.Pair) else x
    with torch.no_grad():
        outputs = copy.deepcopy(network).eval()(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    y = outputs.argmax(1) if type(posterior.likelihood) is ds.Classification else outputs + 0.1
    return inputs, y


def chain(net, *, networks=None, **keywords):
    """Chains, which have an optimiser of their own; of many data: their noise is small."""
    return seen(ds.SGHMC(one_or_many(net, networks), members=3, **of_size(1200, keywords)))


def with_chains(net, *, networks=None, **keywords):
    """An HMC whose chains have run once."""
    posterior = ds.HMC(one_or_many(net, networks), samples=3, warmup=1, leapfrog=1, **of_size(12, keywords))
    return posterior.fit_posthoc([answered(posterior)])


def node_bnn(net, *, networks=None, kind=ds.NodeBNN, **keywords):
    return kind(one_or_many(net, networks), components=2, samples=4, init_std=0.1, **of_size(1200, keywords))


def mean_field(net, *, networks=None, **keywords):
    return ds.MeanFieldVI(one_or_many(net, networks), samples=3, **of_size(1200, keywords))


def modulated(net, **keywords):
    return ds.BatchEnsemble(net(), **keywords)


def optimizer_for(posterior, kind, *, lr, own_lr=None):
    """An optimiser of this kind, or of the one that the method accepts; `own_lr`: the rate of that."""
    if posterior.optimizers is not None:
        made = posterior.default_optimizer()
        for group in made.param_groups:
            # The rate without momentum, of which a cosine leaves one half on average, and little at the end.
            group["lr"] = (lr if own_lr is None else own_lr) * group["friction"] * (3 if posterior.cycles else 1)
        return made
    return kind(posterior.parameter_groups(lr))


# name -> (net(dropout=0.0) -> nn.Module, **keywords) -> posterior
METHODS = {
    "map": lambda net, **keywords: ds.MAP(net(), **keywords),
    "deep_ensemble": lambda net, **keywords: ds.DeepEnsemble([net() for _ in range(3)], **keywords),
    "mc_dropout": lambda net, **keywords: ds.MCDropout(net(dropout=0.3), samples=5, **keywords),
    "mc_dropout_rate": lambda net, **keywords: ds.MCDropout(net(), rate=0.3, samples=5, **keywords),
    "weight_rde": partial(three, "weight_rde", sized=True),
    "function_rde": partial(three, "function_rde", sized=True),
    "feature_rde": feature_rde,
    "forde": partial(three, "forde"),
    "svgd": partial(three, "svgd", sized=True),
    "svgd_function": partial(three, "svgd", sized=True, space="function"),
    "lit": partial(three, "lit", strength=0.5),
    "batch_ensemble": partial(modulated, members=4, modulation=ds.Modulation.normal(1.0, 0.5)),
    "batch_ensemble_signs": partial(modulated, members=3, modulation=ds.Modulation.sign(), form="talk"),
    "dropout_ensemble": lambda net, **keywords: ds.DropoutEnsemble(net(), members=3, rate=0.3, **keywords),
    "tradi": partial(observed, "tradi", samples=3, state_noise=(1.0, 0.5)),
    "swag": partial(observed, "swag", rank=3, samples=4),
    "swa": partial(observed, "swa"),
    "gaussian_perturbation": lambda net, **keywords: ds.GaussianPerturbation(net(), samples=3, **keywords),
    "snapshot_ensemble": partial(observed, "snapshot_ensemble", members=3),
    "laplace": partial(fitted, structure="full"),
    "laplace_kron": partial(fitted, structure="kron"),
    "node_bnn": node_bnn,
    "node_bnn_in": partial(node_bnn, mode="in", bias_latent=True, divergence="surrogate"),
    "rank_one_bnn": partial(node_bnn, kind=ds.RankOneBNN),
    "mean_field_vi": mean_field,
    "map_of_two": lambda net, **keywords: ds.MAP(one_or_many(net, 2), **keywords),
    "multi_tradi": partial(observed, "tradi", networks=2, samples=3, state_noise=(1.0, 0.5)),
    "multi_swag": partial(observed, "swag", networks=2, rank=3, samples=4),
    "multi_swa": partial(observed, "swa", networks=2),
    "multi_snapshot": partial(observed, "snapshot_ensemble", networks=2, members=3),
    "multi_perturbation": lambda net, **keywords: ds.GaussianPerturbation(one_or_many(net, 2), samples=3, **keywords),
    "multi_mc_dropout": lambda net, **keywords: ds.MCDropout(
        [net(dropout=0.3), net(dropout=0.3)], samples=3, **keywords
    ),
    "multi_node_bnn": partial(node_bnn, networks=2),
    "multi_rank_one_bnn": partial(node_bnn, networks=2, kind=ds.RankOneBNN, posterior_temperature=0.5),
    "multi_mean_field_vi": partial(mean_field, networks=2, posterior_temperature=0.5),
    "multi_laplace": partial(fitted, networks=2),
    "sghmc": partial(chain, lr=1e-3, cycles=1, friction=0.5),
    "sgld": partial(chain, lr=1e-3, friction=1.0, cycles=0),
    "multi_sghmc": partial(chain, networks=2, lr=1e-3, cycles=2, friction=0.5),
    "hmc": with_chains,
    "multi_hmc": partial(with_chains, networks=2),
    "noisy_weights": lambda net, **keywords: NoisyWeights(net(), **keywords),
    "rank1_ensemble": lambda net, **keywords: Rank1Ensemble(net(), members=3, **keywords),
    "node_noise": lambda net, **keywords: NodeNoise(net(), samples=4, **keywords),
}
# Methods whose loss draws random numbers in eval mode too.
NOISY = {"node_bnn", "rank_one_bnn", "mean_field_vi", "noisy_weights", "node_noise"}
# Methods that are not in the library, to show that there is room for their kind: what `ds.load` has to be told.
OURS = {each.name: each for each in (NoisyWeights, Rank1Ensemble, NodeNoise)}


# Rows whose like is in the fast suite: recorders of several networks are there as multi_swag, and one by one.
# And those like node_bnn, sghmc, weight_rde, feature_rde, swag and batch_ensemble.
SLOW = set(
    """mc_dropout_rate svgd_function laplace_kron batch_ensemble_signs node_bnn_in swa lit map_of_two multi_node_bnn
    multi_tradi multi_swa multi_snapshot multi_perturbation multi_mc_dropout multi_sghmc multi_hmc multi_rank_one_bnn
    multi_mean_field_vi multi_laplace sgld svgd function_rde snapshot_ensemble rank_one_bnn
    dropout_ensemble""".split()  # noqa: SIM905
)
# One of each way to hold functions and to train them, for what no method decides.
FEW = ["map", "deep_ensemble", "feature_rde", "batch_ensemble", "swag", "laplace", "node_bnn", "mean_field_vi", "hmc"]
few = pytest.mark.parametrize("build", often(FEW, [name for name in METHODS if name not in FEW]), indirect=True)


@pytest.fixture(params=[pytest.param(m, marks=pytest.mark.slow) if m in SLOW else m for m in METHODS], ids=str)
def build(request):
    """Builds a posterior of the method from small networks, in float64."""
    method = METHODS[request.param]

    def make(net=tiny.mlp, **keywords):
        return method(net, **keywords).to(torch.float64)

    return make


@pytest.fixture
def method(request):
    """What `ds.load` needs to be told of the method at hand."""
    return OURS.get(request.node.callspec.params["build"])


@pytest.fixture
def template(request):
    """One network as `ds.load` needs it for the method at hand."""
    own_dropout = request.node.callspec.params["build"] in ("mc_dropout", "multi_mc_dropout")
    return lambda net=tiny.mlp: net(dropout=0.3) if own_dropout else net()


def test_every_method_is_in_the_table():
    assert {make(tiny.mlp).name for make in METHODS.values()} - set(OURS) == set(ds.METHODS)


@few
def test_a_layer_under_two_names_trains_and_is_saved_as_one_under_one_name(build, template, method, tmp_path):
    x, y = tiny.points()
    found = []
    for twice in (False, True):
        torch.manual_seed(0)
        posterior = build(partial(tiny.Named, twice=twice))
        before = tiny.state(posterior)
        ds.fit(posterior, [(x, y), (x.flip(1), y)], epochs=1, progress=False, engine="loop")
        moved = [name for name, p in posterior.named_parameters() if not torch.equal(p, before[name])]
        found.append((moved, posterior.eval()(x), posterior.member(0)(x), copy.deepcopy(posterior)(x)))
    assert found[0][0] == found[1][0]
    for once, again in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(again, once, rtol=0, atol=1e-12)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, template(tiny.Named).to(torch.float64), method=method)
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)


# ---------------------------------------------------------------------------------------------------- shapes and values


def test_outputs_and_predictions_have_the_shapes_and_values_of_the_design(build):
    posterior, (x, y) = build(), tiny.points()
    drawn = posterior.draw()
    members = drawn.members
    assert posterior(x).shape == drawn(x).shape == (members, 12, 3)
    assert posterior.eval()(x).shape == (members, 12, 3)
    predictive = posterior.train().predict(x)
    assert isinstance(predictive, ds.Predictive)
    assert not predictive.mean.requires_grad
    assert predictive.log_probs.shape == (members, 12, 3)
    assert predictive.mean.shape == (12, 3)
    for each in (predictive.aleatoric, predictive.epistemic, predictive.total, predictive.confidence):
        assert each.shape == (12,)
    assert predictive.log_prob(y).shape == (12,)
    assert predictive.sample(7).shape == (7, 12)
    assert [bound.shape for bound in predictive.interval(0.8)] == [(12, 3), (12, 3)]
    assert len(predictive) == 12
    torch.testing.assert_close(predictive.mean.sum(1), torch.ones(12, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(predictive.total, predictive.aleatoric + predictive.epistemic)
    entropy = torch.distributions.Categorical(probs=predictive.mean).entropy()
    torch.testing.assert_close(predictive.total, entropy, rtol=0, atol=1e-12)
    assert bool((predictive.epistemic >= 0).all())
    assert predictive.mean.dtype == torch.float64
    assert posterior.float().predict(x.float()).mean.dtype == torch.float32


@few
@pytest.mark.parametrize("kind", often([dict], [tuple]))
def test_inputs_may_be_a_tuple_or_a_dict(build, kind):
    a, y = tiny.points()
    b = tiny.points(seed=1)[0]
    x = (a, b) if kind is tuple else {"a": a, "b": b}
    posterior = build(tiny.Pair).eval()
    posterior.backward(x, y)
    gradients = tiny.gradients(posterior)
    assert gradients.keys() == {name for name, parameter in posterior.named_parameters() if parameter.requires_grad}
    assert all(bool(g.isfinite().all()) for g in gradients.values())
    drawn = posterior.draw()
    torch.testing.assert_close(drawn(x)[0], drawn.member(0)(a, b), rtol=0, atol=1e-12)
    assert posterior.predict(x).mean.shape == (12, 3)
    ds.fit(posterior, [(x, y)], epochs=1, progress=False, engine="loop")
    assert ds.predict(posterior, [(x, y), (x, y)]).mean.shape == (24, 3)


@few
def test_segmentation_ignores_void_pixels(build):
    posterior = build(tiny.segmenter, likelihood=ds.Classification(ignore_index=255)).eval()
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    y = torch.randint(3, (2, 5, 6))
    y[:, :2] = 255
    predictive = posterior.predict(x)
    assert predictive.mean.shape == (2, 3, 5, 6)
    assert predictive.total.shape == predictive.confidence.shape == (2, 5, 6)
    losses = posterior.backward(x, y)
    assert bool(losses.isfinite().all())
    # In eval mode no unit is dropped: each member's loss is the mean over the pixels that count.
    nets = [posterior.particles.member(i).eval() for i in range(len(losses))]
    expected = torch.stack([nn.functional.cross_entropy(net(x), y, ignore_index=255) for net in nets])
    if posterior.name not in NOISY:
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    ds.fit(posterior, [(x, y)], epochs=1, validation=[(x, y)], progress=False, engine="loop")


@few
def test_regression_learns_its_noise(build):
    posterior = build(lambda dropout=0.0: tiny.mlp(dropout, outputs=2), likelihood=ds.Regression(initial=3.0))
    x, _ = tiny.points(32)
    y = 0.1 * torch.randn(32, 2, dtype=torch.float64)
    before = posterior.predict(x).aleatoric.mean()
    # A step on log σ is about lr: from 3 to below 1 takes log 3 / 0.2 = 5.5 of them.
    optimizer = optimizer_for(posterior, torch.optim.Adam, lr=0.2, own_lr=0.08)
    ds.fit(posterior, [(x, y)], epochs=8, optimizer=optimizer, progress=False, engine="loop")
    predictive = posterior.predict(x)
    assert predictive.mean.shape == predictive.aleatoric.shape == predictive.total.shape == (32, 2)
    assert posterior.name == "hmc" or before == pytest.approx(9.0, rel=1e-6)  # whose chains have moved it
    assert float(predictive.aleatoric.mean()) < 1.0
    names = [name for name, _ in posterior.named_parameters() if name.endswith("likelihood.log_noise")]
    assert len(names) == 1


# ---------------------------------------------------------------------------------------------------- gradients


def test_backward_leaves_the_gradients_of_loss_finite_and_in_every_trainable_parameter(build):
    posterior, (x, y) = build(), tiny.points()
    other = copy.deepcopy(posterior)
    torch.manual_seed(5)
    losses = posterior.backward(x, y)
    torch.manual_seed(5)
    loss = other.loss(x, y)
    loss.backward()
    assert losses.shape == (posterior.particles.members,)
    assert not losses.requires_grad
    assert loss.shape == ()
    if posterior.interaction != "couple":
        torch.testing.assert_close(losses.sum(), loss.detach(), rtol=0, atol=1e-10)
    assert tiny.largest_difference(tiny.gradients(posterior), tiny.gradients(other)) < 1e-10
    assert tiny.largest_difference(tiny.state(posterior), tiny.state(other)) < 1e-10  # batch statistics
    for name, parameter in posterior.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert parameter.grad.shape == parameter.shape


def test_gradients_accumulate_and_the_loss_in_eval_mode_is_deterministic_but_for_methods_that_draw_in_it(build):
    posterior, (x, y) = build().eval(), tiny.points()
    first, second = posterior.loss(x, y), posterior.loss(x, y)
    assert torch.equal(first, second) == (posterior.name not in NOISY)
    torch.manual_seed(5)
    posterior.backward(x, y)
    once = tiny.gradients(posterior)
    other = once
    if posterior.name in NOISY:  # what the second batch gives alone, from where its random numbers begin
        seed = torch.get_rng_state()
        posterior.zero_grad()
        posterior.backward(x, y)
        other = tiny.gradients(posterior)
        for name, parameter in posterior.named_parameters():
            parameter.grad = once[name].clone()
        torch.set_rng_state(seed)
    posterior.backward(x, y)
    twice = tiny.gradients(posterior)
    assert tiny.largest_difference({k: g + other[k] for k, g in once.items()}, twice) < 1e-10


def test_a_weight_of_two_is_the_example_twice(build):
    posterior, (x, y) = build().eval(), tiny.points()
    twice = copy.deepcopy(posterior)
    weight = torch.ones(12, dtype=torch.float64)
    weight[3] = 2
    torch.manual_seed(5)
    posterior.backward(x, y, weight)
    torch.manual_seed(5)
    twice.backward(torch.cat([x, x[3:4]]), torch.cat([y, y[3:4]]))
    if posterior.name not in NOISY:  # else the second copy has random numbers of its own
        assert tiny.largest_difference(tiny.gradients(posterior), tiny.gradients(twice)) < 1e-10


@few
def test_outputs_can_be_differentiated(build):
    posterior, (x, _) = build().eval(), tiny.points()
    x.requires_grad_()
    posterior(x).square().sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    assert float(x.grad.abs().max()) > 0
    posterior.zero_grad()
    posterior.current()(x).square().sum().backward()  # sampled weights are no function of the trained ones
    assert all(float(p.grad.abs().max()) > 0 for n, p in posterior.named_parameters() if n.endswith("weight"))


@few
def test_attacks_follow_the_gradient_of_the_mixture(build):
    """Central differences along one direction, error O(h²) and rounding; nothing of the posterior moves."""
    posterior, (x, y) = build(), tiny.points()
    before = tiny.state(posterior)
    slope = ds.attacks.gradient(posterior, x, y)
    step = 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    down, clean, up = (-posterior.predict(x + sign * step).log_prob(y) for sign in (-1, 0, 1))
    assert torch.allclose((slope * step).sum(1), (up - down) / 2, atol=1e-11, rtol=1e-4)
    found = ds.attacks.pgd(posterior, x, y, 0.1, steps=2, bounds=None)
    assert bool((found.loss >= clean - 1e-12)[~found.success].all())
    assert tiny.largest_difference(before, tiny.state(posterior)) == 0
    assert all(parameter.grad is None for parameter in posterior.parameters())


@few
def test_training_lowers_the_loss(build):
    posterior, (x, y) = build(), tiny.points(30)
    x = x + 2 * nn.functional.one_hot(y, 4)
    optimizer = optimizer_for(posterior, torch.optim.Adam, lr=0.1, own_lr=0.5)
    history = ds.fit(posterior, [(x, y)], epochs=20, optimizer=optimizer, progress=False, engine="loop")
    assert history[-1].loss < 0.6 * history[0].loss
    accuracy = (posterior.predict(x).mean.argmax(1) == y).double().mean()
    assert accuracy > 0.9


# ---------------------------------------------------------------------------------------------------- draws and members


def test_a_draw_is_fixed_and_its_members_are_its_functions(build):
    posterior, (x, _) = build().eval(), tiny.points()
    drawn = posterior.draw()
    first = drawn(x)
    torch.rand(5)
    posterior.draw()(x)
    assert torch.equal(drawn(x), first)
    torch.testing.assert_close(drawn(x[:3]), first[:, :3], rtol=0, atol=1e-12)  # whatever the batch
    torch.testing.assert_close(drawn(x[3:]), first[:, 3:], rtol=0, atol=1e-12)
    members = drawn.members
    for i in (*range(members), -1):
        member = drawn.member(i)
        assert isinstance(member, nn.Module)
        torch.testing.assert_close(member(x), first[i], rtol=0, atol=1e-12)
    refuses(lambda: posterior.member(members), f"expected a member from 0 to {members - 1}, got {members}")
    refuses(lambda: posterior.member(-members - 1), "expected a member from")


@few
def test_a_member_shares_nothing_with_the_posterior(build):
    posterior, (x, y) = build().eval(), tiny.points()
    ds.refresh(posterior, [(x, y)])
    member = posterior.member(0)
    before, outputs = posterior.predict(x).mean, member(x)
    with torch.no_grad():
        for parameter in member.parameters():
            parameter.add_(1.0)
        for buffer in member.buffers():
            buffer.zero_()
    assert torch.equal(posterior.predict(x).mean, before)
    member = posterior.member(0)
    with torch.no_grad():
        for parameter in posterior.parameters():
            parameter.add_(1.0)
    assert torch.equal(member(x), outputs)


# ---------------------------------------------------------------------------------------------------- the world as found


def test_predict_leaves_modes_and_random_streams_as_found_even_when_it_fails(build):
    posterior, (x, y) = build().train(), tiny.points()
    template = posterior.particles.template
    next(iter(m for m in template.modules() if isinstance(m, nn.BatchNorm1d))).eval()  # a part set aside by the caller
    every = {id(m): m for root in (posterior, template) for m in root.modules()}.values()
    modes, before = [m.training for m in every], tiny.state(posterior)
    streams = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    posterior.predict(x)
    ds.predict(posterior, [(x, y)])
    with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
        posterior.predict(torch.zeros(3, 99, dtype=torch.float64))
    assert [m.training for m in every] == modes
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (np.random.get_state()[1] == streams[1]).all()  # noqa: NPY002
    assert random.getstate() == streams[2]
    assert tiny.largest_difference(before, tiny.state(posterior)) == 0
    assert all(p.grad is None for p in posterior.parameters())


def test_a_draw_takes_from_torchs_stream_only_where_it_is_another_each_time(build):
    posterior, (x, y) = build().eval(), tiny.points()
    if hasattr(getattr(posterior, "recorder", None), "snapshots"):  # of one snapshot there is no variance
        with torch.no_grad():
            next(posterior.parameters()).mul_(2)
        seen(posterior)
    for _ in range(2):
        torch.manual_seed(3)
        before, others = torch.get_rng_state(), (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
        first, second = (posterior.member(0)(x) for _ in range(2))
        moved = not torch.equal(torch.get_rng_state(), before)
        assert moved == (not torch.equal(first, second))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == others  # noqa: NPY002
        ds.refresh(posterior, [(x, y)])  # now the draw is stored
    assert not moved


def test_predict_does_not_depend_on_the_mode_or_on_batching(build):
    posterior, (x, y) = build(), tiny.points()
    ds.refresh(posterior, [(x, y)])
    trained = posterior.train().predict(x).mean
    assert torch.equal(posterior.eval().predict(x).mean, trained)
    whole = ds.predict(posterior, [(x[:5], y[:5]), (x[5:], y[5:])])
    targets = whole.targets
    torch.testing.assert_close(whole.mean, trained, rtol=0, atol=1e-12)
    assert torch.equal(targets, y)


@few
def test_seeds_reproduce_everything(build):
    def run():
        torch.manual_seed(7)
        posterior, (x, y) = build(), tiny.points()
        ds.fit(posterior, [(x, y)], epochs=2, progress=False, engine="vectorised")
        return tiny.state(posterior), posterior.predict(x).log_probs

    (first, members), (second, again) = run(), run()
    assert tiny.largest_difference(first, second) == 0
    assert torch.equal(members, again)


# ---------------------------------------------------------------------------------------------------- state and files


def test_saved_and_loaded_is_the_same_bit_for_bit(build, template, method, tmp_path, monkeypatch):
    posterior, (x, y) = build(), tiny.points()
    ds.fit(posterior, [(x, y)], epochs=2, progress=False, engine="vectorised")
    posterior.temperature.fill_(1.3)
    ds.save(posterior, tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.json", "posterior.safetensors"]

    def refuse(*_, **__):
        raise AssertionError("files are read without pickle")

    for place, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(place, name, refuse)
    network = template()
    before = tiny.state(network)
    loaded = ds.load(tmp_path / "run", network, method=method)
    assert tiny.largest_difference(before, tiny.state(network)) == 0  # the template is left alone
    saved, found = tiny.state(posterior), tiny.state(loaded)
    assert saved.keys() == found.keys()
    for name in saved:
        assert saved[name].dtype == found[name].dtype, name
        assert torch.equal(saved[name], found[name]), name
    assert tiny.strides(loaded) == tiny.strides(posterior)
    assert type(loaded) is type(posterior)
    assert loaded.config() == posterior.config()
    assert torch.equal(loaded.predict(x).log_probs, posterior.predict(x).log_probs)
    assert torch.equal(loaded(x), posterior(x))


def test_a_run_that_was_stopped_goes_on_in_another_object_bit_for_bit(build, tmp_path):
    (x, y), file = tiny.points(24), tmp_path / "run.pt"

    def run(seed, **keywords):
        torch.manual_seed(0)
        posterior = build()
        torch.manual_seed(seed)
        ds.fit(posterior, [(x[:12], y[:12]), (x[12:], y[12:])], epochs=2, progress=False, **keywords)
        return tiny.state(posterior)

    whole = run(1)
    run(1, checkpoint=file, callback=lambda epoch: epoch.epoch == 1, draw=False)
    resumed = run(2, checkpoint=file)  # its random numbers are those of the checkpoint
    assert tiny.largest_difference(whole, resumed) == 0


@few
def test_tensors_lie_in_memory_as_they_did_when_they_were_saved(build, template, method, tmp_path):
    posterior = build(tiny.spread_out)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(6, 2, 5, 6, dtype=torch.float64, generator=generator), torch.arange(6) % 3
    ds.refresh(posterior.eval(), [(x, y)])
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, template(tiny.spread_out), method=method)
    assert tiny.strides(loaded) == tiny.strides(posterior)
    assert torch.equal(loaded.predict(x).log_probs, posterior.predict(x).log_probs)


def test_config_is_json_and_builds_a_skeleton_and_a_stored_draw_has_memory_of_its_own(build, template):
    posterior, (x, y) = build(weight_prior_std=0.5, data_size=12), tiny.points()
    ds.refresh(posterior, [(x, y)])
    for name, tensor in posterior.draw().particles.own.state_dict().items():
        assert tensor.is_contiguous(), name
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name
    config = json.loads(json.dumps(posterior.config()))
    assert config == posterior.config()
    skeleton = type(posterior).skeleton(template(), config, ds.Classification()).to(torch.float64)
    skeleton.load_state_dict(posterior.state_dict())
    assert tiny.strides(skeleton) == tiny.strides(posterior)
    assert torch.equal(skeleton.predict(x).log_probs, posterior.predict(x).log_probs)
    assert (skeleton.prior.std, skeleton.data_size) == (0.5, 12)


@few
def test_a_deep_copy_is_independent(build):
    posterior, (x, y) = build(), tiny.points()
    ds.refresh(posterior, [(x, y)])
    other = copy.deepcopy(posterior)
    before = posterior.predict(x).log_probs
    assert torch.equal(other.predict(x).log_probs, before)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    other.backward(x, y)
    optimizer.step()
    assert torch.equal(posterior.predict(x).log_probs, before)
    assert not torch.equal(other.eval().current()(x), posterior.eval().current()(x))


# ---------------------------------------------------------------------------------------------------- the rest


@few
def test_before_step_comes_once_for_every_batch_that_is_trained_on_and_steps_are_counted(build, monkeypatch):
    posterior, (x, y) = build(), tiny.points()
    seen, real = [], posterior.before_step

    def note(batch):
        seen.append(batch.size)
        real(batch)

    monkeypatch.setattr(posterior, "before_step", note)
    train, validation = [(x[:8], y[:8]), (x[:6], y[:6]), (x[:5], y[:5])], [(x, y)]
    ds.fit(posterior, train, epochs=1, validation=validation, accumulate=2, progress=False, engine="loop")
    assert seen == [8, 6, 5]
    assert int(posterior.steps) == int(copy.deepcopy(posterior).steps) == 2
    ds.temperature_scale(posterior, validation)
    posterior.predict(x)
    assert seen == [8, 6, 5]
    posterior.loss(x[:4], y[:4])
    posterior.backward(x[:3], y[:3])
    assert seen == [8, 6, 5, 4, 3]


def test_parameter_groups_hold_every_trainable_parameter_once(build):
    posterior = build(likelihood=ds.Classification())
    next(posterior.parameters()).requires_grad_(False)
    groups = posterior.parameter_groups(lr=0.3, weight_decay=0.01)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in posterior.parameters() if p.requires_grad)
    assert all({"params", "lr", "weight_decay"} <= group.keys() for group in groups)
    torch.optim.SGD(groups, lr=0.3)


def is_modulation(posterior, parameter):
    return any(parameter is each for each in getattr(posterior, "modulations", {}).values())


def test_the_network_trains_in_one_group_and_a_learned_noise_in_another_without_decay(build):
    posterior = build(likelihood=ds.Regression("learned"))
    groups = posterior.parameter_groups(lr=0.3, weight_decay=0.01, likelihood_lr=3.0)
    by_name = {id(parameter): name for name, parameter in posterior.named_parameters()}
    apart = {name for name, p in posterior.named_parameters() if "latents." in name or is_modulation(posterior, p)}
    latents = [group for group in groups if all(by_name[id(p)] in apart for p in group["params"])]
    assert all(group["weight_decay"] == 0 for group in latents)
    groups = [group for group in groups if group not in latents]
    for group in groups:
        noise = {"log_noise" in by_name[id(parameter)] for parameter in group["params"]}
        assert noise == {group["lr"] == 3.0}
        assert group["weight_decay"] == (0.0 if noise == {True} or posterior.prior else 0.01)
    assert len(groups) == 2
    assert {group["lr"] for group in posterior.parameter_groups(lr=0.3)} == {0.3}
    network, *_, noise = posterior.parameter_groups(lr=0.3, weight_decay=0.01)
    trained = {name: p for name, p in posterior.named_parameters() if name not in apart}
    expected = [id(p) for name, p in trained.items() if "likelihood.log_noise" not in name]
    assert [id(p) for p in network["params"]] == expected  # in their order
    decay = 0.0 if posterior.prior else 0.01  # one method has a prior whether or not it is given one
    assert (network["lr"], network["weight_decay"], noise["lr"], noise["weight_decay"]) == (0.3, decay, 0.3, 0.0)


@few
def test_temperature_one_leaves_predictions_alone_and_a_predictor_gives_what_predict_gives(build):
    posterior, (x, _) = build(), tiny.points()
    before = posterior.predict(x).log_probs
    with torch.random.fork_rng(), torch.no_grad():
        logits = posterior.eval()(x)  # the functions themselves, which know of no temperature
    torch.testing.assert_close(before, logits.log_softmax(2), rtol=0, atol=1e-12)
    posterior.temperature.fill_(2.0)
    expected = (before / 2).log_softmax(2)
    torch.testing.assert_close(posterior.predict(x).log_probs, expected, rtol=0, atol=1e-12)
    for temperature in (2.3, 1.0):
        posterior.temperature.fill_(temperature)
        found, predictive = posterior.predictor()(x), posterior.predict(x)
        for name in ("mean", "total", "aleatoric", "epistemic"):
            torch.testing.assert_close(found[name], getattr(predictive, name), rtol=0, atol=1e-12)
    assert torch.equal(predictive.log_probs, before)


# factors of the rate over ten epochs: constant for the first half, linear to 1 % at 90 %, constant again
PLAIN = [1.0] * 6 + [1 - 0.99 * (t - 0.5) / 0.4 for t in (0.6, 0.7, 0.8)] + [0.01]
# Maddox et al. 2019: before the last quarter constant for half the time, linear to one half at 90 % of it
TAIL = [1.0] * 4 + [1 - 0.5 * (t / 0.75 - 0.5) / 0.4 for t in (0.4, 0.5, 0.6)] + [0.5] * 3
# TRADI's, to one tenth
LIVING = [1.0] * 4 + [1 - 0.9 * (t / 0.75 - 0.5) / 0.4 for t in (0.4, 0.5, 0.6)] + [0.1] * 3
# Huang et al. 2017, eq. (2): a cosine from 1 to 0 in each of three parts
CYCLES = [0.5 + 0.5 * math.cos(math.pi * t) for t in (0, 0.3, 0.6, 0.9, 0.2, 0.5, 0.8, 0.1, 0.4, 0.7)]
SCHEDULES = {"swag": TAIL, "swa": TAIL, "snapshot_ensemble": CYCLES, "tradi": LIVING, "sghmc": [1.0] * 10}


@few
def test_the_default_optimizer_and_schedule_fit(build):
    posterior, (x, y) = build(), tiny.points()
    history = ds.fit(posterior, [(x, y)], epochs=10, progress=False, engine="loop")
    factors = SCHEDULES.get(posterior.name, PLAIN)
    assert [epoch.lr for epoch in history.epochs] == pytest.approx([1e-3 * factor for factor in factors], rel=1e-9)
    assert not any(part.training for part in posterior.modules())  # the functions that are stored at the end, too


@few
def test_a_prior_needs_the_size_of_the_data(build):
    refuses(lambda: build(weight_prior_std=1.0), "expected data_size with a prior")
    refuses(lambda: build(weight_prior_std=0.0, data_size=10), "expected weight_prior_std above 0")
    refuses(lambda: build(weight_prior_std=1.0, data_size=0), "expected data_size of at least 1")


def test_a_posterior_shows_what_it_trains_and_what_is_frozen_apart():
    nets = [tiny.mlp() for _ in range(3)]  # 4·6 + 6, 2·6 and 6·3 + 3 numbers
    assert "Sequential, members=3, parameters=189, likelihood=Classification" in repr(ds.DeepEnsemble(nets))
    for net in nets:
        net[0].requires_grad_(False)
    assert "Sequential, members=3, parameters=99 + 90 frozen, likelihood=" in repr(ds.DeepEnsemble(nets))
    assert "members=1, parameters=33 + 30 frozen, likelihood=" in repr(ds.MAP(nets[0]))
    nets[0].requires_grad_(False)
    assert "parameters=0 + 63 frozen" in repr(ds.MAP(nets[0]))

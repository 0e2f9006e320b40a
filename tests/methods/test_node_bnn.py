"""NodeBNN and RankOneBNN: counts, what fixed latents compute, the objective and its bounds, files and bad input."""

import copy
import math

import pytest
import torch
from torch import distributions, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal, kl_divergence

import dissensus as ds
import tiny
from dissensus.layers.batch_norm import FrozenNorm
from dissensus.methods.parts.node_latents import (
    RELEASED,
    Complexity,
    bhattacharyya,
    cauchy_noise,
    component_entropies,
    cross_entropy,
    entropy_bound,
    inverse_softplus,
    sample_for_examples,
    surrogate_kl,
)
from dissensus.methods.parts.node_posterior import NodeFunctions
from dissensus.utils.batch_norm_names import statistics_layers
from refusals import refuses
from thinning import often, thinned


def conv(dropout=0.0):
    layers = nn.Conv2d(1, 5, 2), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(5, 3)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *layers)


def build(net=tiny.mlp, **keywords):
    return ds.NodeBNN(net(), **{"data_size": 100, **keywords}).to(torch.float64)


def test_latent_counts_of_the_papers_networks():
    with torch.device("meta"):
        vgg, wide = ds.nets.VGG16(batch_norm=False), ds.nets.WideResNet(28, 10)
    assert ds.NodeBNN(vgg.to_empty(device="cpu"), data_size=1, mode="in", components=1).latents == 5251
    assert ds.NodeBNN(wide.to_empty(device="cpu"), data_size=1, mode="in", components=1).latents == 9475


def test_latents_stand_on_input_nodes_output_nodes_or_both_and_on_biases():
    counts = {mode: build(mode=mode).latents for mode in ("in", "out", "both")}
    assert counts == {"in": 4 + 6, "out": 6 + 3, "both": 19}
    assert build(mode="in", bias_latent=True).latents == 12
    assert build(conv, mode="out").latents == 5 + 3


def test_means_start_around_1_and_deviations_around_init_std():
    torch.manual_seed(0)
    posterior = ds.NodeBNN(nn.Linear(4000, 2), data_size=9, mode="in", prior_std=0.4, init_spread=0.1)
    posterior.requires_grad_(False)
    assert float(posterior.mean.mean()) == pytest.approx(1.0, abs=4 * 0.1 / 16000**0.5)
    assert float(posterior.mean.std()) == pytest.approx(0.1, abs=0.003)
    assert float(posterior.std.mean()) == pytest.approx(0.4, abs=4 * 0.02 / 16000**0.5)
    assert float(posterior.std.std()) == pytest.approx(0.02, abs=0.001)
    for init_std, error in ((0.1, 4 * 0.02 / 16000**0.5), (1e-2, 2e-4), (1e-3, 2e-5), (1e-6, 2e-8)):
        narrow = ds.NodeBNN(nn.Linear(4000, 2), data_size=9, mode="in", init_std=init_std).std.detach()
        assert float(narrow.mean()) == pytest.approx(init_std, abs=error)


@pytest.mark.parametrize("divergence", ["mixture", "surrogate"])
def test_the_kl_of_many_latents_in_bfloat16_is_added_up_in_float32(divergence):
    torch.manual_seed(0)
    network = nn.Linear(8000, 2, dtype=torch.bfloat16)
    posterior = ds.NodeBNN(network, data_size=9, mode="in", init_std=0.2, divergence=divergence).requires_grad_(False)
    mean, std = posterior.mean.double(), posterior.std.double()
    exact = posterior.complexity.kl(mean, std)
    assert float(posterior.kl()) == pytest.approx(float(exact), rel=1e-4)
    assert float(posterior.entropy()) == pytest.approx(float(posterior.complexity.entropy(mean, std)), rel=1e-4)


NETS = {
    "MLP": (lambda: ds.nets.MLP(5, 3), (5,)),
    "ConvNet": (lambda: ds.nets.ConvNet(1, 3, size=8, width=4, hidden=8), (1, 8, 8)),
    "ResNet": (lambda: ds.nets.ResNet(20), (3, 8, 8)),
    "ResNet18": (lambda: ds.nets.ResNet(18), (3, 8, 8)),
    "VGG16": (lambda: ds.nets.VGG16(), (3, 32, 32)),
    "WideResNet": (lambda: ds.nets.WideResNet(10, 1), (3, 8, 8)),
}


@pytest.mark.parametrize("mode", often(["both"], ["in"]))
@pytest.mark.parametrize(
    "name", often([name for name in NETS if name not in ("VGG16", "ResNet18")], ["VGG16", "ResNet18"])
)
def test_all_latents_at_1_reproduce_the_network(name, mode):
    torch.manual_seed(0)
    make, shape = NETS[name]
    network = make().eval()
    x = torch.randn(2, *shape)
    posterior = ds.NodeBNN(network, data_size=10**12, components=1, samples=1, mode=mode, bias_latent=True).eval()
    tiny.still(posterior)
    with torch.no_grad():
        expected = network(x)
    torch.testing.assert_close(posterior(x)[0].detach(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(posterior.collapse()(x).detach(), expected, rtol=1e-6, atol=1e-6)
    y = torch.tensor([0, 1])
    nll = nn.functional.cross_entropy(expected, y)  # beside it the KL of some 1e5 is nothing when N is 1e12
    torch.testing.assert_close(posterior.loss(x, y).detach(), nll, rtol=1e-6, atol=1e-6)


def test_components_come_in_turn_and_every_example_meets_each_of_them():
    mean, std = torch.arange(4.0)[:, None], torch.zeros(4, 1)
    seen = sample_for_examples(mean, std, 12).reshape(3, 4)  # three examples, four samples of each
    assert torch.equal(seen.sort(1).values, torch.arange(4.0).expand(3, 4))
    torch.manual_seed(0)
    firsts = [float(sample_for_examples(mean, std, 1)) for _ in range(400)]  # fewer examples than components
    assert {firsts.count(k) > 60 for k in range(4)} == {True}  # 100 ± 4 · 8.7 of each


@pytest.mark.parametrize(
    ("bound", "divergence", "gamma"),
    thinned(["joint", "per_layer", "released"], ["mixture", "surrogate"], [-0.5, 0.0, 2.0], every=3),
)
def test_the_loss_is_the_expected_nll_plus_kl_less_gamma_times_entropy_over_n(bound, divergence, gamma):
    torch.manual_seed(0)
    x, y = tiny.points()
    posterior = build(bound=bound, divergence=divergence, posterior_temperature=1 + gamma, data_size=50).eval()
    torch.manual_seed(5)
    loss = float(posterior.loss(x, y).detach())
    torch.manual_seed(5)
    z = sample_for_examples(posterior.mean, posterior.std, 48)
    drawn = NodeFunctions(posterior.particles.with_separate_template(), posterior.sites, z)
    outputs = torch.stack([drawn(x[i // 4][None])[i, 0] for i in range(48)])
    nll = nn.functional.cross_entropy(outputs, y.repeat_interleave(4))
    mean, std = posterior.mean, posterior.std
    options = {"joint": {}, "per_layer": {"widths": (6, 3)}, "released": {"widths": (6, 3), "factor": 1 / 16}}[bound]
    entropy = entropy_bound(mean, std, **options)
    kl = surrogate_kl(mean, std, 0.3) if divergence == "surrogate" else cross_entropy(mean, std, 0.3) - entropy
    assert loss == pytest.approx(float(nll + (kl - gamma * entropy) / 50), abs=1e-12)
    assert float(posterior.kl()) == pytest.approx(float(kl), abs=1e-12)
    assert float(posterior.entropy()) == pytest.approx(float(entropy), abs=1e-12)


def test_the_kl_is_0_where_the_posterior_is_the_prior():
    posterior = build(components=1)
    with torch.no_grad():
        posterior.mean.fill_(1.0)
        posterior.particles.shared_parameters()["latents.raw_std"].fill_(math.log(math.expm1(0.3)))
    assert float(posterior.kl()) == pytest.approx(0.0, abs=1e-12)


def test_beta_rises_from_0_and_multiplies_kl_and_entropy_alone():
    torch.manual_seed(0)
    x, y = tiny.points()
    posterior = build(annealing=ds.Annealing("linear", steps=4), data_size=10, posterior_temperature=2.0).eval()

    def loss():
        torch.manual_seed(5)
        return float(posterior.loss(x, y).detach())

    whole = float(posterior.kl() - posterior.entropy()) / 10
    start = loss()
    for step in (2, 4, 8):
        posterior.steps.fill_(step)
        assert loss() - start == pytest.approx(min(step / 4, 1) * whole, abs=1e-12)


def test_without_data_latents_are_drawn_to_the_prior():
    torch.manual_seed(0)
    posterior = build(components=1, data_size=1, init_std=0.1, init_spread=0.3)
    optimizer = torch.optim.Adam(posterior.particles.template.latents.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        posterior.kl().backward()
        optimizer.step()
    torch.testing.assert_close(posterior.mean, torch.ones_like(posterior.mean), rtol=0, atol=1e-3)
    torch.testing.assert_close(posterior.std, torch.full_like(posterior.std, 0.3), rtol=0, atol=1e-3)


def test_a_hot_posterior_keeps_wider_latents():
    widths = {}
    for gamma in (0.0, 4.0):
        torch.manual_seed(0)
        posterior, (x, y) = build(posterior_temperature=1 + gamma, data_size=32), tiny.points(32)
        optimizer = torch.optim.Adam(posterior.parameters(), lr=0.04)
        ds.fit(posterior, [(x, y)], epochs=30, optimizer=optimizer, progress=False)
        widths[gamma] = float(posterior.std.mean())
    assert widths[4.0] > 1.2 * widths[0.0]


def test_weights_decay_and_have_momentum_and_latents_have_a_rate_of_their_own():
    posterior = build(latent_lr=0.01, components=8)
    network, latents = posterior.parameter_groups(lr=0.1, weight_decay=5e-4)
    assert (network["lr"], network["weight_decay"]) == (0.1, 5e-4)
    assert "momentum" not in network  # the optimiser's
    assert latents["lr"] == pytest.approx(0.08)  # each component gets 1/K of the gradient
    assert (latents["weight_decay"], latents["momentum"]) == (0.0, 0.0)
    assert [tuple(p.shape) for p in latents["params"]] == [(8, 9), (8, 9)]
    optimizer = torch.optim.SGD([network, latents], lr=0.1, momentum=0.9, nesterov=True)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.0]
    assert "momentum" not in build(latent_momentum=None).parameter_groups(lr=0.1)[1]
    assert build().parameter_groups(lr=0.1)[1]["lr"] == 0.1


def test_weight_decay_on_latents_is_said(caplog):
    x, y = tiny.points()
    posterior = build()
    groups = posterior.parameter_groups(lr=0.1, weight_decay=0.01)
    ds.fit(posterior, [(x, y)], epochs=1, optimizer=torch.optim.AdamW(groups), progress=False)
    assert not any("latents towards 0" in line for line in caplog.messages)
    optimizer = torch.optim.AdamW(posterior.parameters(), weight_decay=0.01)
    ds.fit(posterior, [(x, y)], epochs=1, optimizer=optimizer, progress=False)
    assert any("latents towards 0" in line and "parameter_groups" in line for line in caplog.messages)


@pytest.mark.parametrize("net", [tiny.mlp, conv])
def test_collapse_is_the_forward_pass_with_those_latents_fixed(net):
    torch.manual_seed(0)
    x, _ = tiny.points()
    posterior = build(net, mode="both", bias_latent=True, init_spread=0.3).eval()
    functions = NodeFunctions(posterior.particles.with_separate_template(), posterior.sites, posterior.mean)(x)
    for k in range(4):
        network = posterior.collapse(k)
        assert {type(part) for part in network.modules()} == {type(part) for part in net().modules()}
        assert tiny.state(network).keys() == tiny.state(net()).keys()
        torch.testing.assert_close(network.eval()(x), functions[k], rtol=0, atol=1e-12)
    assert torch.equal(posterior.collapse(-1)(x), posterior.collapse(3)(x))
    with torch.no_grad():
        posterior.mean.copy_(posterior.mean.mean(0).expand(4, -1))
    torch.testing.assert_close(posterior.collapse()(x), posterior.collapse(0)(x), rtol=0, atol=1e-12)


def test_samples_are_rounded_up_to_a_multiple_of_the_components_and_come_from_each_alike():
    posterior = build(components=4, samples=6)
    assert posterior.samples == posterior.draw().members == 8
    with torch.no_grad():
        posterior.particles.shared_parameters()["latents.raw_std"].fill_(tiny.TINY_STD)
    drawn = posterior.draw().latents
    torch.testing.assert_close(drawn, posterior.mean.repeat(2, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("inner", [False, True])
def test_a_convolution_may_be_the_whole_network_or_hold_another_layer(inner):
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    network = nn.Conv2d(2, 3, 3)
    if inner:
        network.after = nn.Conv2d(3, 3, 1)
        network.register_forward_hook(lambda layer, args, outputs: layer.after(outputs))
    posterior = build(lambda: nn.Sequential(network) if inner else network, mode="both", bias_latent=True)
    functions = posterior.draw()
    outputs = functions(x)
    for i in (0, 5):
        torch.testing.assert_close(outputs[i], functions.member(i)(x))


def test_functions_run_one_after_the_other_are_those_run_at_once():
    torch.manual_seed(0)
    posterior, (x, _) = build(mode="both").eval(), tiny.points()
    at_once = posterior.draw()
    one_by_one = copy.copy(at_once)
    one_by_one.particles = at_once.particles.with_separate_template()
    one_by_one.particles.how = "loop"
    torch.testing.assert_close(one_by_one(x), at_once(x), rtol=0, atol=1e-12)
    parts = list(one_by_one.predict_parts(x))
    assert len(parts) == 32
    torch.testing.assert_close(parts[5].member_means[0], at_once.predict(x).member_means[5], rtol=0, atol=1e-12)


@pytest.mark.parametrize("net", [tiny.mlp, conv])
def test_drawn_functions_stay_what_they_are_whatever_becomes_of_the_weights(net, monkeypatch):
    torch.manual_seed(0)
    posterior, (x, _) = build(net, mode="both", bias_latent=True).eval(), tiny.points()
    drawn = posterior.draw()
    live = NodeFunctions(posterior.particles.with_separate_template(), posterior.sites, drawn.latents)
    monkeypatch.setattr("dissensus.methods.parts.node_posterior.MOST_KERNELS", 0)  # no room: folded at every call
    anew = NodeFunctions.with_fixed_weights(posterior.particles, posterior.sites, drawn.latents)
    before = drawn(x)
    assert {name.split(".")[0] for name, _ in drawn.drawn.named_buffers()} == (
        {"latents"} if net is tiny.mlp else {"latents", "weight", "bias"}
    )
    for same in (live, anew):
        torch.testing.assert_close(same(x), before, rtol=0, atol=1e-12)
    parts = [part.member_means[0] for part in drawn.predict_parts(x)]
    found = torch.stack(parts) if net is conv else parts[0][None]
    torch.testing.assert_close(found, drawn.predict(x).member_means[: len(parts)])
    with torch.no_grad():
        for parameter in posterior.parameters():
            parameter.data.mul_(1.5)  # a change that no counter of versions sees, like a replayed step's
    assert torch.equal(drawn(x), before)
    torch.testing.assert_close(anew(x), before, rtol=0, atol=1e-12)
    assert float((live(x) - before).abs().max()) > 0.1
    assert drawn.float()(x.float()).dtype == torch.float32  # what is folded follows


def test_a_stored_draw_keeps_the_statistics_of_training_lest_batch_norm_divides_the_latents_out():
    torch.manual_seed(0)
    posterior, (x, y) = build(conv, mode="out"), tiny.points(24)
    ds.fit(posterior, [(x, y)], epochs=2, progress=False)
    statistics = posterior.particles.shared_buffers()["network.2.running_var"]
    drawn = posterior.draw()
    assert torch.equal(drawn.member(3)[2].running_var, statistics)
    assert torch.equal(drawn.latents, posterior.draw().latents)  # stored
    assert float(drawn(x).std(0).mean()) > 0.01


def test_validation_looks_at_functions_of_now_not_at_a_draw_that_is_stored():
    torch.manual_seed(0)
    posterior, (x, y) = build(conv, mode="out").eval(), tiny.points()
    ds.refresh(posterior, [(x, y)])
    assert torch.equal(posterior.draw().latents, posterior.draw().latents)
    assert posterior.current().members == posterior.samples
    with torch.no_grad():
        posterior.mean.add_(5.0)
    assert float(posterior.current().latents.mean()) > 4.0 > float(posterior.draw().latents.mean())


def test_tied_weights_are_not_folded_along():
    torch.manual_seed(0)
    layers = {"embed": nn.Embedding(3, 4), "conv": nn.Conv1d(4, 4, 1), "head": nn.Linear(4, 3, bias=False)}
    layers["head"].weight = layers["embed"].weight
    network = tiny.Network(lambda self, x: self.head(self.conv(self.embed(x)[:, :, None])[:, :, 0]), **layers).double()
    posterior = ds.NodeBNN(network, data_size=9, mode="in", samples=4, init_spread=0.4).eval()
    x = torch.tensor([0, 1, 2])
    mean = posterior.mean[0]
    outputs = NodeFunctions(posterior.particles.with_separate_template(), posterior.sites, posterior.mean)(x)
    inner = network.conv((network.embed(x) * mean[:4])[:, :, None])[:, :, 0]
    torch.testing.assert_close(outputs[0], (inner * mean[4:]) @ network.embed.weight.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(posterior.collapse(0)(x), outputs[0], rtol=0, atol=1e-12)


def test_the_callers_network_is_copied_and_needs_no_extra_argument():
    network, (x, y) = tiny.mlp().double(), tiny.points()
    before = tiny.state(network)
    posterior = ds.NodeBNN(network, data_size=12)
    ds.fit(posterior, [(x, y)], epochs=2, progress=False)
    assert tiny.largest_difference(before, tiny.state(network)) == 0
    assert posterior.account.converted.keys() == {"0", "3"}
    weights = posterior.particles.shared_parameters()["network.0.weight"]
    assert not torch.equal(weights, network[0].weight)


def test_frozen_batch_norm_keeps_its_statistics_and_trains_its_weights():
    x, y = tiny.points()
    for batch_norm, moved in (("frozen", False), ("trained", True)):
        posterior = build(conv, batch_norm=batch_norm)
        before = tiny.state(posterior)
        ds.fit(posterior, [(x, y)], epochs=2, progress=False)
        after = tiny.state(posterior)
        norm = "particles.shared.network.2"
        assert torch.equal(before[f"{norm}.running_mean"], after[f"{norm}.running_mean"]) != moved
        assert not torch.equal(before[f"{norm}.weight"], after[f"{norm}.weight"])
        layer = statistics_layers(posterior.particles.template)["network.2"]
        posterior.train()
        assert layer.training == moved


def test_frozen_batch_norm_is_cut_for_speed_and_is_an_ordinary_layer_wherever_networks_come_out():
    torch.manual_seed(0)
    network, (x, y) = conv().double(), tiny.points(24)
    network(x)
    posterior = ds.NodeBNN(network, data_size=12, batch_norm="frozen", samples=4)
    assert isinstance(posterior.particles.template.network[2], FrozenNorm)
    assert type(ds.NodeBNN(network, data_size=12).particles.template.network[2]) is nn.BatchNorm2d
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    for out in (posterior.collapse(0), posterior.plain_network(), posterior.draw().member(1)):
        assert type(out[2]) is nn.BatchNorm2d
    torch.testing.assert_close(posterior.draw().member(1)(x), posterior.eval()(x)[1], rtol=0, atol=1e-12)


def test_frozen_batch_norm_that_has_seen_no_data_is_said_once(caplog):
    x, y = tiny.points()
    fresh, seen = build(conv, batch_norm="frozen"), conv().double()
    for _ in range(2):
        fresh.backward(x, y)
    assert [record.message for record in caplog.records if "the initial batch statistics in 2" in record.message] != []
    assert len(caplog.records) == 1
    caplog.clear()
    seen(x)
    ds.NodeBNN(seen, data_size=12, batch_norm="frozen", init_std=0.1).backward(x, y)
    build(conv).backward(x, y)
    assert not caplog.records


def test_a_wide_start_on_a_trained_network_is_said_before_training_and_not_after(caplog):
    x, y = tiny.points()
    trained = conv().double()
    trained(x)
    posterior = ds.NodeBNN(trained, data_size=12, batch_norm="frozen")
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    assert [record.message[:47] for record in caplog.records] == ["latents start with a standard deviation of 0.3;"]
    caplog.clear()
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    assert not caplog.records


def test_latents_train_where_every_weight_is_frozen():
    network, (x, y) = tiny.mlp().double().requires_grad_(False), tiny.points()
    posterior = ds.NodeBNN(network, data_size=12)
    before = posterior.mean.detach().clone()
    ds.fit(posterior, [(x, y)], epochs=2, progress=False)
    assert not torch.equal(posterior.mean, before)
    assert torch.equal(posterior.particles.shared_parameters()["network.0.weight"], network[0].weight)


def test_accumulated_batches_and_clipping_train_latents_too():
    x, y = tiny.points(24)
    torch.manual_seed(0)
    posterior = build()
    before = posterior.mean.detach().clone()
    loader = [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]
    optimizer = torch.optim.SGD(posterior.parameters(), lr=1.0)
    ds.fit(posterior, loader, epochs=2, accumulate=2, clip=1e-3, progress=False, optimizer=optimizer)
    moved = posterior.mean.detach() - before
    assert 0 < float(moved.norm()) <= 4e-3 + 1e-12  # four steps of at most 1e-3


def test_mixed_precision_trains():
    torch.manual_seed(0)
    posterior, (x, y) = ds.NodeBNN(conv(), data_size=24, mode="both"), tiny.points(24)
    history = ds.fit(posterior, [(x.float(), y)], epochs=3, precision="bf16", progress=False)
    assert math.isfinite(history[-1].loss)


def test_saved_and_loaded_around_the_plain_network(tmp_path):
    torch.manual_seed(0)
    posterior, (x, y) = build(conv, mode="both", bias_latent=True, layers=["1"], batch_norm="frozen"), tiny.points(24)
    posterior.particles.template.network[2].bias.requires_grad_(False)
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, conv())
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)
    assert loaded.config() == posterior.config()
    assert str(loaded.account) == str(posterior.account)
    refuses(lambda: ds.load(tmp_path, tiny.mlp()), "expected a network with layer")


@pytest.mark.parametrize(("keywords", "message"), [
    ({"components": 0}, "expected components of at least 1, got 0"),
    ({"train_samples": 0}, "expected train_samples of at least 1, got 0"),
    ({"samples": 0}, "expected samples of at least 1, got 0"),
    ({"data_size": None}, "expected data_size, got none"),
    ({"data_size": 0}, "expected data_size of at least 1, got 0"),
    ({"latent_momentum": 2}, "expected latent_momentum of at least 0 and below 1, got 2"),
    ({"layers": "0"}, r"expected a list of names of layers, got '0'; pass layers=\[...\]"),
    ({"layers": []}, r"expected a list of names of layers, got \[\]"),
    ({"mode": "inside"}, "expected mode of in, out, both, got 'inside'"),
    ({"prior_std": 0.0}, "expected prior_std above 0, got 0.0"),
    ({"init_std": -0.1}, "expected init_std above 0, got -0.1"),
    ({"latent_lr": 0.0}, "expected latent_lr above 0, got 0.0"),
    ({"posterior_temperature": 0.0}, "expected posterior_temperature above 0, got 0.0"),
    ({"posterior_temperature": float("nan")}, "expected posterior_temperature above 0, got nan"),
    ({"bound": "exact"}, "expected bound of joint, per_layer, released, got 'exact'"),
    ({"divergence": "kl"}, "expected divergence of mixture, surrogate, got 'kl'"),
    ({"batch_norm": "eval"}, "expected batch_norm of frozen, trained, got 'eval'"),
    ({"layers": ["head.*"]}, "expected names of layers, got head"),
    ({"data_size": "600"}, "expected data_size as a whole number, got '600'; pass an int"),
    ({"components": 2.5}, r"expected components as a whole number, got 2\.5"),
    ({"components": True}, "expected components as a whole number, got True"),
])  # fmt: skip
def test_bad_settings_are_clear_errors(keywords, message):
    refuses(lambda: build(**keywords), message, TypeError if "whole number" in message else ValueError)


def test_other_bad_input_is_a_clear_error():
    refuses(lambda: ds.NodeBNN(tiny.mlp()), r"expected data_size, got none; pass data_size=len\(training_set\)")
    told = "expected a network with a linear or convolutional layer, got Sequential"
    refuses(lambda: ds.NodeBNN(nn.Sequential(nn.BatchNorm1d(3)), data_size=9), told)
    refuses(lambda: build().collapse(4), "index 4 is out of bounds for dimension 0 with size 4", IndexError)
    refuses(lambda: build().collapse(-5), "expected component of at least -4, got -5; this posterior has 4")

    for odd in ("a", 1.0, True):
        with pytest.raises(TypeError, match=f"expected component as a whole number, got {odd!r}"):
            build().collapse(odd)
    refuses(lambda: build_rank_one(family="student"), "expected family of gaussian, cauchy, got 'student'")
    refuses(lambda: build_rank_one(data_size=None), "expected data_size, got none")


def test_a_layer_that_does_not_see_the_batch_first_is_named_even_where_that_axis_is_as_long():
    layers = {"encode": nn.Linear(4, 4), "head": nn.Linear(4, 3)}  # (B, T, 4) -> (B, 3), time on the first axis inside
    network = tiny.Network(lambda self, x: self.head(self.encode(x.transpose(0, 1)).mean(0)), **layers)
    posterior = ds.NodeBNN(network, data_size=9, train_samples=2)
    x, y = torch.randn(3, 6, 4), torch.tensor([0, 1, 2])  # 2 · 3 rows, as there are times
    refuses(lambda: posterior.backward(x, y), r"layer 'encode', got a tensor of shape \(6, 2, 4\).*exclude this layer")
    refuses(lambda: ds.fit(posterior, [(x, y)], epochs=1, progress=False), "layer 'encode'")
    left_out = ds.NodeBNN(network, data_size=9, train_samples=2, layers=["head"])
    left_out.backward(x, y)
    assert left_out.account.left == {"encode": "not selected by layers="}


MEAN = torch.tensor([[1.0, 0.8], [1.2, 1.1]], dtype=torch.float64)
STD = torch.tensor([[0.3, 0.2], [0.25, 0.4]], dtype=torch.float64)


def mixture(mean, std, law=Normal):
    weights = Categorical(torch.ones(len(mean), dtype=mean.dtype))
    return MixtureSameFamily(weights, Independent(law(mean, std), 1))


def random_mixture(generator, components, latents):
    mean = 1 + 0.3 * torch.randn(components, latents, dtype=torch.float64, generator=generator)
    return mean, 0.05 + 0.5 * torch.rand(components, latents, dtype=torch.float64, generator=generator)


def test_the_golden_values_of_two_components():
    distance = bhattacharyya(MEAN, STD).sum(2)
    assert float(distance[0, 1]) == pytest.approx(0.297910, abs=1e-6)
    assert float(bhattacharyya(MEAN, STD, factor=RELEASED).sum(2)[0, 1]) == pytest.approx(0.164355, abs=1e-6)
    assert float(entropy_bound(MEAN, STD)) == pytest.approx(0.417781, abs=1e-6)
    assert float(entropy_bound(MEAN, STD, factor=RELEASED)) == pytest.approx(0.358684, abs=1e-6)
    torch.testing.assert_close(distance.diagonal(), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(distance, distance.T, rtol=0, atol=1e-15)


def test_the_mixture_entropy_of_the_golden_components_lies_above_both_bounds():
    torch.manual_seed(0)
    q = mixture(MEAN, STD)
    log_q = q.log_prob(q.sample((100_000,)))
    error = float(log_q.std()) / len(log_q) ** 0.5
    assert -float(log_q.mean()) == pytest.approx(0.4969, abs=4 * error + 1e-4)


def test_the_entropy_bound_lies_below_a_monte_carlo_estimate_in_random_mixtures():
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    exact_tighter = 0
    for i in range(60):
        mean, std = random_mixture(generator, components=1 + i % 6, latents=1 + i % 9)
        q = mixture(mean, std)
        log_q = q.log_prob(q.sample((2000,)))
        error = float(log_q.std()) / len(log_q) ** 0.5
        bound, loose = float(entropy_bound(mean, std)), float(entropy_bound(mean, std, factor=RELEASED))
        assert loose <= bound + 1e-12
        assert bound <= -float(log_q.mean()) + 4 * error
        exact_tighter += bound > loose + 1e-9
    assert exact_tighter > 45  # all but the mixtures of one component


def test_components_far_apart_earn_log_k_and_equal_ones_nothing():
    std = torch.full((4, 3), 0.1, dtype=torch.float64)
    alone = component_entropies(std)[0]
    far = entropy_bound(torch.arange(4.0, dtype=torch.float64)[:, None].expand(4, 3) * 100, std)
    assert float(far - alone) == pytest.approx(math.log(4), abs=1e-12)
    assert float(entropy_bound(torch.ones_like(std), std) - alone) == pytest.approx(0.0, abs=1e-12)


def test_bounding_every_layer_alone_counts_log_k_once_for_each_and_is_the_sum_over_layers():
    mean, std = random_mixture(torch.Generator().manual_seed(2), components=3, latents=7)
    layers = zip(mean.split([2, 4, 1], 1), std.split([2, 4, 1], 1), strict=True)
    expected = sum(entropy_bound(m, s) for m, s in layers)
    torch.testing.assert_close(entropy_bound(mean, std, widths=[2, 4, 1]), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy_bound(mean, std, widths=[7]), entropy_bound(mean, std), rtol=0, atol=1e-12)
    far = torch.arange(3.0, dtype=torch.float64)[:, None].expand(3, 7) * 100
    extra = entropy_bound(far, std, widths=[2, 4, 1]) - entropy_bound(far, std)
    assert float(extra) == pytest.approx(2 * math.log(3), abs=1e-9)


def test_the_kl_of_one_component_is_that_of_two_gaussians():
    mean, std = random_mixture(torch.Generator().manual_seed(3), components=1, latents=6)
    expected = kl_divergence(Normal(mean, std), Normal(torch.ones_like(mean), torch.full_like(std, 0.3))).sum()
    found = cross_entropy(mean, std, 0.3) - entropy_bound(mean, std)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(surrogate_kl(mean, std, 0.3), expected, rtol=1e-12, atol=1e-12)


def test_the_surrogate_is_the_kl_of_the_average_of_the_components():
    centre, deviation = MEAN.mean(0), STD.square().sum(0).sqrt() / 2
    prior = Normal(torch.ones(2, dtype=torch.float64), torch.full((2,), 0.1, dtype=torch.float64))
    expected = kl_divergence(Normal(centre, deviation), prior).sum()
    torch.testing.assert_close(surrogate_kl(MEAN, STD, 0.1), expected, rtol=1e-12, atol=0)


def test_the_cross_entropy_is_the_mean_of_the_log_prior_under_the_mixture():
    torch.manual_seed(4)
    log_p = Normal(1.0, 0.3).log_prob(mixture(MEAN, STD).sample((100_000,))).sum(1)
    error = float(log_p.std()) / len(log_p) ** 0.5
    assert float(cross_entropy(MEAN, STD, 0.3)) == pytest.approx(-float(log_p.mean()), abs=4 * error)


def test_raw_std_is_the_inverse_of_softplus_from_small_to_large():
    std = torch.tensor([1e-4, 0.02, 0.3, 5.0, 50.0], dtype=torch.float64)
    torch.testing.assert_close(torch.nn.functional.softplus(inverse_softplus(std)), std, rtol=1e-12, atol=0)


FACTOR_MEAN = torch.tensor([[1.0, 0.8, 1.3], [1.2, 1.1, 0.9]], dtype=torch.float64)
FACTOR_STD = torch.tensor([[0.3, 0.2, 0.1], [0.25, 0.4, 0.2]], dtype=torch.float64)
LAWS = {"gaussian": distributions.Normal, "cauchy": distributions.Cauchy}


def build_rank_one(network=None, **keywords):
    settings = {"components": 2, "samples": 4, "data_size": 50, **keywords}
    return ds.RankOneBNN((network or tiny.mlp()).double(), **settings)


@pytest.mark.parametrize("family", LAWS)
def test_one_component_has_the_kl_of_its_law_exactly(family):
    law = LAWS[family]
    q, p = law(FACTOR_MEAN[0], FACTOR_STD[0]), law(torch.ones(3).double(), torch.full((3,), 0.4, dtype=torch.float64))
    cost = Complexity(0.4, (3,), family=family)
    entropy = q.entropy().sum()
    torch.testing.assert_close(cost.entropy(FACTOR_MEAN[:1], FACTOR_STD[:1]), entropy, rtol=1e-12, atol=0)
    if family == "gaussian":
        kl = distributions.kl_divergence(q, p).sum()
    else:  # torch has no KL of Cauchy laws: a quadrature over quantiles, (i − ½) / n of the distribution of q
        at = q.icdf((torch.arange(200_000, dtype=torch.float64)[:, None] + 0.5) / 200_000)
        kl = (q.log_prob(at) - p.log_prob(at)).mean(0).sum()
    torch.testing.assert_close(cost.kl(FACTOR_MEAN[:1], FACTOR_STD[:1]), kl, rtol=1e-5, atol=0)
    torch.testing.assert_close(cost.kl(FACTOR_MEAN[:1], FACTOR_STD[:1], 0.3), kl + 0.7 * entropy, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", LAWS)
def test_the_cost_of_a_mixture_is_at_least_its_kl(family):
    law, draws = LAWS[family], 100_000
    q = mixture(FACTOR_MEAN, FACTOR_STD, law)
    p = distributions.Independent(law(torch.ones(3, dtype=torch.float64), torch.full((3,), 0.4).double()), 1)
    at = q.sample((draws,))
    ratio = q.log_prob(at) - p.log_prob(at)
    bound = float(Complexity(0.4, (3,), family=family).kl(FACTOR_MEAN, FACTOR_STD))
    error = float(ratio.std()) / draws**0.5
    assert bound > float(ratio.mean()) - 4 * error
    assert bound < float(ratio.mean()) + torch.log(torch.tensor(2.0)) + 4 * error  # it loses log K at most


@pytest.mark.parametrize("family", LAWS)
def test_latents_are_drawn_from_their_law(family):
    posterior = build_rank_one(nn.Linear(2, 2), family=family, components=1, samples=20_000)
    latents = posterior._sample_latents()  # (S, 4)
    law = LAWS[family](posterior.mean[0].detach(), posterior.std[0].detach())
    shares = torch.stack([(latents <= law.icdf(torch.tensor(q))).double().mean(0) for q in (0.1, 0.5, 0.9)])
    expected = torch.tensor([[0.1], [0.5], [0.9]], dtype=torch.float64)
    assert bool(((shares - expected).abs() < 5 * (expected * (1 - expected) / 20_000).sqrt()).all())
    assert bool(cauchy_noise(1_000_000, dtype=torch.float32, device="cpu").isfinite().all())


def test_a_function_is_s_times_w_times_r_x_plus_b():
    layer, x = nn.Linear(3, 2), torch.randn(5, 3, dtype=torch.float64)
    posterior = build_rank_one(layer).eval()
    drawn = posterior.draw()
    for i, latents in enumerate(drawn.latents):
        r, s = latents[:3], latents[3:]
        expected = s * (x * r @ layer.weight.T + layer.bias)
        torch.testing.assert_close(drawn(x)[i], expected.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(drawn.member(i)(x), expected, rtol=0, atol=1e-12)
    assert posterior.latents == 5


def test_means_start_from_the_prior_or_from_a_modulation():
    wide = nn.Linear(2000, 2000)
    mean = build_rank_one(wide).mean.detach()
    assert float(mean.mean()) == pytest.approx(1.0, abs=5 * 0.1 / mean.numel() ** 0.5)
    assert float(mean.std()) == pytest.approx(0.1, rel=5 * (2 * mean.numel()) ** -0.5)
    assert build_rank_one(wide, modulation=ds.Modulation.sign()).mean.detach().unique().tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("gamma", [0.0, 2.5])
def test_gamma_of_a_node_bnn_is_a_posterior_temperature_of_one_plus_gamma(gamma):
    # E −log p(y, z) − T H[q] at T = 1 + γ is E −log p(y | z) + KL − γ H: the same loss of the same latents and noise.
    x, y = tiny.points()
    settings = {"components": 2, "prior_std": 0.2, "data_size": 50}
    node = ds.NodeBNN(tiny.mlp().double(), mode="both", posterior_temperature=1 + gamma, **settings)
    rank = ds.RankOneBNN(tiny.mlp().double(), posterior_temperature=1 + gamma, **settings)
    rank.load_state_dict(node.state_dict())
    losses = []
    for posterior in (node.eval(), rank.eval()):
        torch.manual_seed(0)
        losses.append(float(posterior.loss(x, y).detach()))
    assert node.posterior_temperature == 1 + gamma
    assert losses[0] == pytest.approx(losses[1], rel=1e-14)
    torch.manual_seed(0)
    rank.posterior_temperature = 1.0
    plain = float(rank.loss(x, y).detach())
    assert losses[1] == pytest.approx(plain - gamma * float(rank.entropy().detach()) / 50, rel=1e-12)


def test_what_is_saved_is_loaded_with_its_family_and_start(tmp_path):
    posterior = build_rank_one(family="cauchy", modulation=ds.Modulation.sign(), posterior_temperature=0.5)
    ds.fit(posterior, [tiny.points()], epochs=1, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, tiny.mlp())
    assert (loaded.family, loaded.modulation, loaded.posterior_temperature) == ("cauchy", ds.Modulation.sign(), 0.5)
    assert torch.equal(loaded.kl(), posterior.kl())
    assert torch.equal(loaded.predict(tiny.points()[0]).mean, posterior.predict(tiny.points()[0]).mean)


def test_training_that_ruins_the_network_it_started_from_is_said_with_the_numbers(caplog):
    torch.manual_seed(0)
    network, (x, y) = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), tiny.points(24)
    x = x.float()
    ds.fit(ds.MAP(network), [(x, y)], epochs=20, progress=False)
    before = float(nn.functional.cross_entropy(network.eval()(x), y).detach())
    for rate, ruined in ((1e-4, False), (10.0, True)):
        caplog.clear()
        posterior = ds.NodeBNN.of_trained(network, data_size=24, lr=None, samples=8)
        optimizer = torch.optim.SGD(posterior.parameter_groups(rate), lr=rate)
        ds.fit(posterior, [(x, y)], optimizer=optimizer, epochs=3, progress=False)
        told = f"NodeBNN is worse than its network: loss of the first batch {before:.3f} before"
        assert (told in caplog.text) == ruined
    assert "train the network longer first" in caplog.text

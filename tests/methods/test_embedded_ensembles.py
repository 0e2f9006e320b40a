"""BatchEnsemble and DropoutEnsemble: the talk's updates, members that fold into networks, and unusual forwards."""

import logging
import pickle
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
import tiny
from dissensus import theory
from dissensus.core.batch import Batch
from dissensus.layers.conversion import ConvertedLayer
from dissensus.methods.embedded_ensembles import collapse_note
from refusals import refuses
from thinning import often

SIGN, NEUTRAL, AROUND = ds.Modulation.sign(), ds.Modulation.constant(1.0), ds.Modulation.normal(1.0, 0.5)


def smooth():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def ensemble(net=smooth, modulation=AROUND, **keywords):
    return ds.BatchEnsemble(net(), modulation=modulation, **({"members": 3} | keywords)).double()


def by_hand(posterior, x):
    """(M, B, 3) of `smooth` written out, and the tensors it reads."""
    t = {name: p.detach().clone().requires_grad_() for name, p in posterior.named_parameters()}
    own, shared = "particles.own.network.", "particles.shared.network."
    r1, s1, r2, s2 = (t[f"{own}{name}"][:, None] for name in ("0.r", "0.s", "2.r", "2.s"))
    hidden = torch.tanh(s1 * ((r1 * x) @ t[f"{shared}0.weight"].T + t[f"{shared}0.bias"]))
    return s2 * ((r2 * hidden) @ t[f"{shared}2.weight"].T + t[f"{own}2.bias"][:, None]), t


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
@pytest.mark.parametrize(("regime", "gamma"), [("collective", 1.0), ("independent", 3.0), (2.0, 2.0)])
def test_steps_are_those_of_the_talk_under_sgd_with_decay_and_momentum(regime, gamma, engine):
    """Δu = −μ_u ∂L_α, Δw = −μ_w (γ/M) Σ ∂L_α; decay λw on shared weights whole, none on modulations."""
    lr, mu, decay, momentum = 0.1, 0.03, 0.2, 0.9
    posterior, (x, y) = ensemble(regime=regime, modulation_lr=mu), tiny.points()
    assert posterior.gamma == gamma
    optimizer = torch.optim.SGD(posterior.parameter_groups(lr, decay), lr=lr, momentum=momentum)
    velocity = {}
    for _ in range(3):
        outputs, tensors = by_hand(posterior, x)
        torch.testing.assert_close(posterior(x), outputs, rtol=0, atol=1e-12)
        loss = sum(nn.functional.cross_entropy(each, y) for each in outputs)
        gradients = dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True))
        expected = {}
        for name, w in tensors.items():
            modulation = name.endswith((".r", ".s"))
            decayed = 0.0 if modulation else decay * w.detach()
            g = gradients[name] * (gamma / 3 if ".shared." in name else 1.0) + decayed
            velocity[name] = momentum * velocity[name] + g if name in velocity else g
            expected[name] = w.detach() - (mu if modulation else lr) * velocity[name]
        ds.fit(posterior, [(x, y)], epochs=1, optimizer=optimizer, engine=engine, progress=False)
        found = {name: p.detach() for name, p in posterior.named_parameters()}
        assert tiny.largest_difference(found, expected) < 1e-12


def test_the_weight_prior_counts_once_and_is_not_scaled_by_the_regime():
    """As weight decay of 1/(N σ²) under SGD, whatever γ."""
    x, y = tiny.points()
    for regime in ("collective", "independent"):
        torch.manual_seed(0)
        plain = ensemble(regime=regime)
        torch.manual_seed(0)
        prior = ensemble(regime=regime, weight_prior_std=0.5, data_size=12)
        for each in (plain, prior):
            each.backward(x, y)
        weight = plain.particles.shared_parameters()["network.0.weight"]
        other = prior.particles.shared_parameters()["network.0.weight"]
        torch.testing.assert_close(other.grad - weight.grad, weight.detach() / (12 * 0.25), rtol=0, atol=1e-12)
        torch.testing.assert_close(prior.modulations["0.r"].grad, plain.modulations["0.r"].grad, rtol=0, atol=1e-12)


def test_a_step_of_one_members_loss_moves_the_others_by_the_kernel_with_a_remainder_of_the_square():
    """f_α moves by −η (γ/M) Θ_αβ ∂L_β/∂f_β; halving η quarters what is left."""
    posterior, (x, y) = ensemble(regime="independent", modulation=SIGN), tiny.points()
    particles, (a, b) = posterior.particles, (0, 1)
    shared, own = particles.shared_parameters(), particles.own_parameters()

    def outputs(params, inputs):
        return particles.call(lambda member: member.network(inputs), params, particles.shared_buffers())[0]

    def of_member(m, weights):
        return {**weights, **{name: tensor[m] for name, tensor in own.items()}}

    blocks = ds.theory.ensemble_blocks(outputs, shared, own, x)
    before = outputs(of_member(a, shared), x)
    theirs = outputs(of_member(b, shared), x)
    slope = torch.autograd.functional.jacobian(lambda f: nn.functional.cross_entropy(f, y), theirs)
    moves = torch.einsum("nmop,mp->no", blocks.common[a, b], slope)
    loss = torch.func.grad(lambda weights: posterior.member_loss(of_member(b, weights), {}, Batch(x, y))[0])
    gradient = loss(dict(shared))
    left = []
    for eta in (0.02, 0.01, 0.005):
        moved = {name: w - eta * gradient[name] for name, w in shared.items()}
        predicted = -eta * posterior.gamma / particles.members * moves
        left.append(float((outputs(of_member(a, moved), x) - before - predicted).detach().norm()))
    assert left[0] / left[1] == pytest.approx(4, abs=0.2)
    assert left[1] / left[2] == pytest.approx(4, abs=0.1)
    assert left[0] < 0.05 * float(predicted.norm()) * 4


def overlap(width, seed):
    """(4,) Θ_αβ/Θ_αα of two members with signs at four inputs."""
    torch.manual_seed(seed)
    net = ds.nets.MLP(10, 1, hidden=(width, width), parameterization="ntk")
    posterior = ds.BatchEnsemble(net, members=2, modulation=SIGN, form="talk", likelihood=ds.Regression(1.0))
    particles, x = posterior.particles, torch.randn(4, 10)
    shared, rows = particles.shared_parameters(), particles.rows()
    wanted = list(shared.values())

    def gradients(member, one):
        params = {**shared, **rows.member_rows(member + 1)[member].own}
        f = particles.call(lambda each: each.network(one[None]), params, {})[0]
        return torch.cat([g.flatten() for g in torch.autograd.grad(f.sum(), wanted)])

    pairs = [(gradients(0, one), gradients(1, one)) for one in x]
    return torch.stack([first @ second / (first @ first) for first, second in pairs]).double()


def slope_of_overlap(widths, seeds):
    rms = [float(torch.cat([overlap(w, seed) for seed in range(seeds)]).square().mean().sqrt()) for w in widths]
    logs = torch.tensor([widths, rms], dtype=torch.float64).log()
    centred = logs - logs.mean(1, keepdim=True)
    return float((centred[0] * centred[1]).sum() / centred[0].square().sum())


def test_tangent_kernels_between_members_with_signs_fall_with_the_root_of_the_width():
    """The slope's own error over 12 seeds and 4 inputs is about 0.06."""
    assert slope_of_overlap([32, 256], 12) == pytest.approx(-0.5, abs=0.15)


@pytest.mark.slow
def test_tangent_kernels_between_members_with_signs_fall_with_the_root_of_the_width_over_forty_seeds():
    assert slope_of_overlap([128, 256, 512, 1024, 2048], 40) == pytest.approx(-0.5, abs=0.1)


def encoder(width=16):
    """Tokens (B, L) -> (B, 3) by a small transformer encoder, its output layer tied to nothing."""
    layers = {"embedding": nn.Embedding(11, width)}
    layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True)
    layers |= {"encoder": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "head": nn.Linear(width, 3)}
    return tiny.Network(lambda self, x: self.head(self.encoder(self.embedding(x)).mean(1)), **layers)


IMAGES, TOKENS = torch.randn(2, 3, 32, 32), torch.randint(11, (2, 5))
NETWORKS = {
    "resnet18": (lambda: ds.nets.ResNet(18), IMAGES),  # nested, where another library's conversion crashes
    "vgg16": (lambda: ds.nets.VGG16(), IMAGES),
    "encoder": (encoder, TOKENS),
}


@pytest.mark.parametrize("name", often([name for name in NETWORKS if name != "vgg16"], ["vgg16"]))
def test_neutral_modulations_keep_what_a_network_computes(name):
    """Pretrained weights, however nested: another library draws new ones."""
    make, x = NETWORKS[name]
    network = make().eval()
    posterior = ds.BatchEnsemble(network, members=2, modulation=NEUTRAL).eval()
    with torch.no_grad():
        expected, found = network(x), posterior(x)
        for each in (*found, posterior.member(1).eval()(x)):
            torch.testing.assert_close(each, expected, rtol=1e-6, atol=1e-6)


def test_ten_million_parameters_convert_in_under_a_second():
    network = ds.nets.ResNet(18)
    assert sum(p.numel() for p in network.parameters()) > 1e7
    start = time.process_time()
    ds.BatchEnsemble(network, members=4, modulation=SIGN)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("make", often([lambda: ds.nets.ResNet(20)], [lambda: ds.nets.WideResNet(28, 10)]))
def test_sixteen_members_have_fewer_than_a_fifth_more_parameters(make):
    network = make()
    count = sum(p.numel() for p in network.parameters())
    posterior = ds.BatchEnsemble(network, members=16, modulation=SIGN)
    assert count < sum(p.numel() for p in posterior.parameters()) < 1.2 * count


@pytest.mark.parametrize(("net", "x"), [
    (encoder, torch.randint(11, (6, 5))),
    (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)),
     torch.randn(6, 2, 5, 5)),
], ids=["encoder", "conv"])  # fmt: skip
def test_it_trains_under_accumulate_and_clip_and_goes_on_from_a_checkpoint(net, x, tmp_path):
    y, network = torch.arange(6) % 3, net()
    network(x)  # fills in lazy sizes

    def fit(epochs, checkpoint=None):
        torch.manual_seed(0)
        posterior = ds.BatchEnsemble(network, members=2, modulation=AROUND)
        optimizer = torch.optim.SGD(posterior.parameter_groups(0.05), lr=0.05, momentum=0.9)
        loader, common = [(x[:3], y[:3]), (x[3:], y[3:])], {"optimizer": optimizer, "accumulate": 2, "clip": 0.5}
        history = ds.fit(posterior, loader, epochs=epochs, checkpoint=checkpoint, progress=False, **common)
        return posterior, history

    whole, history = fit(6)
    assert history[-1].loss < history[0].loss
    fit(3, tmp_path / "half")
    resumed, _ = fit(6, tmp_path / "half")
    assert tiny.largest_difference(tiny.state(whole), tiny.state(resumed)) == 0


@pytest.mark.parametrize(("layer", "shape"), [
    (nn.Conv1d(4, 6, 3, groups=2, padding=1, padding_mode="reflect"), (2, 4, 8)),
    (nn.Conv2d(4, 6, 3, groups=2, stride=2), (2, 4, 8, 8)),
    (nn.Conv3d(4, 6, 2, bias=False), (2, 4, 4, 4, 4)),
    (nn.ConvTranspose1d(4, 6, 3, groups=2), (2, 4, 8)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 5, 5)),
    (nn.ConvTranspose3d(4, 6, 2), (2, 4, 3, 3, 3)),
    (nn.Linear(8, 5), (2, 4, 8)),
    (ds.nets.MLP(8, 5, hidden=(3,), parameterization="ntk").layers[0], (2, 8)),
], ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "")  # fmt: skip
def test_factors_of_activations_of_kernels_and_folded_ones_agree(layer, shape):
    posterior = ds.BatchEnsemble(nn.Sequential(layer), members=3, modulation=ds.Modulation.normal(0.3, 1.0)).double()
    x = torch.randn(shape, dtype=torch.float64)
    one_by_one = posterior.particles.map_members(lambda member: member.network(x), how="loop")
    at_once = posterior.particles.map_members(lambda member: member.network(x), how="vectorised")
    torch.testing.assert_close(at_once, one_by_one, rtol=0, atol=1e-12)
    for m in range(3):
        ordinary = posterior.member(m)
        assert type(ordinary[0]) is type(layer)
        assert list(ordinary.state_dict()) == [f"0.{name}" for name in layer.state_dict()]
        torch.testing.assert_close(ordinary(x), one_by_one[m], rtol=0, atol=1e-12)


def test_members_are_ordinary_networks_after_training_and_the_given_one_has_the_shared_weights():
    posterior, (x, y) = ensemble(tiny.mlp), tiny.points()
    ds.fit(posterior, [(x, y)], epochs=3, progress=False)
    outputs = posterior.eval()(x)
    for m in range(3):
        ordinary = posterior.member(m).eval()
        assert not any(isinstance(part, ConvertedLayer) for part in ordinary.modules())
        torch.testing.assert_close(ordinary(x), outputs[m], rtol=0, atol=1e-12)
    weight = posterior.particles.shared_parameters()["network.0.weight"]
    assert torch.equal(posterior.plain_network()[0].weight, weight)


def test_norm_layers_and_the_output_bias_are_own_and_everything_else_is_stored_once():
    posterior = ds.BatchEnsemble(ds.nets.ResNet(20), members=3, modulation=SIGN)
    own, shared = posterior.particles.own_parameters(), posterior.particles.shared_parameters()
    assert "network.linear.bias" in own
    ends = (".r", ".s", "bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias", "linear.bias")
    assert all(name.endswith(ends) for name in own)
    assert all(name.endswith(("conv1.weight", "conv2.weight", "linear.weight")) for name in shared)
    statistics = [name for name in posterior.particles.own_buffers() if name.endswith("running_mean")]
    assert len(statistics) == 19
    assert posterior.account.converted["bn1"] == "own affine and statistics"
    assert posterior.account.converted["linear"] == "r (64) and s (10), one for each unit; own bias"
    assert set(posterior.modulations) == {n.removeprefix("network.") for n in own if n.endswith((".r", ".s"))}


def test_the_account_names_what_is_left_alone(caplog):
    with caplog.at_level(logging.INFO, logger="dissensus"):
        posterior = ds.BatchEnsemble(encoder(), members=2, modulation=SIGN)
    assert set(posterior.account.left) == {
        "embedding", "encoder.layers.0.self_attn", "encoder.layers.0.self_attn.out_proj",
        "encoder.layers.1.self_attn", "encoder.layers.1.self_attn.out_proj",
    }  # fmt: skip
    assert [str(posterior.account) in record.getMessage() for record in caplog.records] == [True]


def test_the_talks_form_lacks_the_first_r_and_the_last_s_in_the_order_of_calls():
    def last_first():  # registers its layers from the last to the first
        layers = {
            "head": nn.Linear(5, 3), "middle": nn.Linear(5, 5), "stem": nn.Linear(4, 5), "norm": nn.BatchNorm1d(5),
        }  # fmt: skip
        return tiny.Network(lambda self, x: self.head(torch.relu(self.middle(self.norm(self.stem(x))))), **layers)

    posterior = ensemble(last_first, form="talk")
    assert set(posterior.modulations) == {"stem.s", "middle.r", "middle.s", "head.r"}
    assert "network.head.bias" in posterior.particles.own_parameters()
    assert set(ensemble(last_first).modulations) == {f"{each}.{f}" for each in ("stem", "middle", "head") for f in "rs"}


def test_a_layer_whose_weight_is_read_past_it_is_said_to_be_unseen():
    def reading():
        layers = {"read": nn.Linear(4, 4), "called": nn.Linear(4, 3)}
        return tiny.Network(lambda self, x: self.called(nn.functional.linear(x, self.read.weight)), **layers)

    assert "not called" not in str(ensemble(lambda: nn.Linear(4, 3)).account)
    account = ensemble(reading).account
    assert "not called" in account.converted["read"]
    assert "not called" not in account.converted["called"]


def test_layers_are_chosen_by_patterns():
    posterior = ensemble(layers=["2"])
    assert set(posterior.modulations) == {"2.r", "2.s"}
    assert "not selected" in posterior.account.left["0"]


def test_a_tied_output_layer_stays_tied_to_its_embedding():
    def language():
        layers = {"embedding": nn.Embedding(7, 4), "body": nn.Linear(4, 4), "head": nn.Linear(4, 7)}
        layers["head"].weight = layers["embedding"].weight
        forward = lambda self, x: self.head(torch.tanh(self.body(self.embedding(x)))).mean(1)  # noqa: E731
        return tiny.Network(forward, **layers)

    posterior, tokens = ensemble(language), torch.randint(7, (5, 3))
    assert "network.head.weight" not in posterior.particles.shared_parameters()  # stored once, as the embedding's
    ordinary, outputs = posterior.member(1), posterior(tokens)
    torch.testing.assert_close(ordinary(tokens), outputs[1], rtol=0, atol=1e-12)
    posterior.backward(tokens, torch.arange(5) % 7)
    assert posterior.particles.shared_parameters()["network.embedding.weight"].grad.abs().sum() > 0


@pytest.mark.parametrize(("keywords", "error", "words"), [
    ({"members": 0}, ValueError, "members of at least 1, got 0"),
    ({"members": 2.0}, TypeError, "members as a whole number"),
    ({"modulation": None}, TypeError, r"got None; pass Modulation.sign\(\) for independent .* pretrained"),
    ({"modulation": "sign"}, TypeError, "expected a modulation, got 'sign'"),
    ({"regime": "both"}, ValueError, r"regime of auto, independent, collective, .* or pass γ as a number"),
    ({"regime": 0.0}, ValueError, "regime above 0"),
    ({"form": "u"}, ValueError, "form of wen, talk"),
    ({"modulation_lr": -1.0}, ValueError, "modulation_lr of at least 0"),
    ({"modulation_lr": "a"}, TypeError, "modulation_lr as a number, got 'a'"),
    ({"net": lambda: nn.Sequential(nn.ReLU())}, ValueError, "with a linear or convolutional layer"),
])  # fmt: skip
def test_bad_input_is_refused_with_what_to_do(keywords, error, words):
    refuses(lambda: ensemble(**keywords), words, error)


@pytest.mark.parametrize(
    ("modulation", "members", "gamma"),
    [(SIGN, 8, 8), (NEUTRAL, 8, 1), (AROUND, 2, 2), (AROUND, 3, 1), (ds.Modulation.between(0.3), 8, 8)],
)
def test_the_regime_follows_from_the_collectivity_and_the_number_of_members(modulation, members, gamma):
    assert ensemble(modulation=modulation, members=members).gamma == gamma


def test_fit_says_once_that_scale_free_optimisers_do_not_see_the_regime(caplog):
    posterior, (x, y) = ensemble(), tiny.points()
    groups = posterior.parameter_groups(1e-3, 1e-2)
    with caplog.at_level(logging.INFO, logger="dissensus"):
        for optimizer in (torch.optim.AdamW(groups), torch.optim.SGD(groups, lr=1e-3)):
            ds.fit(posterior, [(x, y)], epochs=2, optimizer=optimizer, progress=False)
    assert [("AdamW" in line) for line in caplog.messages if "has almost no effect with" in line] == [True]
    assert not any("pulls modulations towards 0" in line for line in caplog.messages)


def test_fit_says_that_an_optimiser_decays_modulations(caplog):
    posterior, (x, y) = ensemble(), tiny.points()
    optimizer = torch.optim.SGD(posterior.parameters(), lr=1e-3, weight_decay=0.1)
    with caplog.at_level(logging.WARNING, logger="dissensus"):  # what is seen without any setting up
        ds.fit(posterior, [(x, y)], epochs=1, optimizer=optimizer, progress=False)
    assert any("pulls modulations towards 0" in line for line in caplog.messages)


def test_evaluate_notes_that_the_members_are_one_model():
    x, y = tiny.points(32)
    for members, modulation, noted in ((4, NEUTRAL, True), (3, NEUTRAL, False), (4, SIGN, False)):
        torch.manual_seed(0)
        found = ds.evaluate(ensemble(modulation=modulation, members=members), [(x, y)])
        assert ("collapse" in found.notes) == noted
        if noted:
            assert "count as 1.00" in found.notes["collapse"]
            assert "Modulation.sign()" in found.notes["collapse"]
            assert found.notes["collapse"] in repr(found)


def test_the_note_on_few_effective_members_does_not_blame_modulations_that_are_as_they_should_be():
    few = {"members/effective_members": 1.2}
    told = collapse_note(ensemble(modulation=SIGN, members=4, regime="independent"), few)["collapse"]
    assert "unless a DeepEnsemble on the same data also counts as few" in told
    assert "γ = M: try fewer members or wider layers" in told
    assert "Modulation.sign()" not in told
    together = ensemble(modulation=SIGN, members=4, regime="collective")
    assert "Modulation.sign()" in collapse_note(together, few)["collapse"]
    dropped = collapse_note(ds.DropoutEnsemble(tiny.mlp(), members=4), few)["collapse"]
    assert "a larger rate" in dropped
    assert collapse_note(ds.DeepEnsemble([tiny.mlp() for _ in range(4)]), few) == {}


def test_a_network_of_the_library_is_loaded_without_being_passed(tmp_path):
    kept = {"form": "talk", "layers": ["layer*"]}
    posterior = ds.BatchEnsemble(ds.nets.ResNet(8), members=3, modulation=SIGN, regime=2, **kept)
    ds.save(posterior, tmp_path)
    loaded, x = ds.load(tmp_path), torch.randn(2, 3, 16, 16)
    assert (loaded.modulation, loaded.gamma, loaded.config()) == (SIGN, 2.0, posterior.config())
    assert loaded.layers == ["layer*"]
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)


def test_members_are_the_network_with_fixed_units_dropped():
    network, (x, _) = tiny.mlp().double(), tiny.points()
    posterior = ds.DropoutEnsemble(network, members=3, rate=0.5).eval()
    assert list(posterior.modulations) == ["3.r"]  # neither inputs nor outputs are dropped
    masks = posterior.modulations["3.r"]
    assert set(masks.flatten().tolist()) <= {0.0, 2.0}
    hidden = network.eval()[:3](x)
    for m in range(3):
        expected = network[3](hidden * masks[m])
        torch.testing.assert_close(posterior(x)[m], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(posterior.member(m).eval()(x), expected, rtol=0, atol=1e-12)


def test_masks_stay_as_they_are_in_training_and_weights_move_by_the_mean_over_members():
    posterior, (x, y) = ds.DropoutEnsemble(tiny.mlp(), members=3, rate=0.5).double(), tiny.points()
    before = posterior.modulations["3.r"].clone()
    assert posterior.gamma == 1
    for regime, gamma in (("independent", 3), (1.5, 1.5)):  # a number is taken as it is
        assert ds.DropoutEnsemble(tiny.mlp(), members=3, regime=regime).gamma == gamma
    assert not any(isinstance(each, nn.Parameter) for each in posterior.modulations.values())
    weight = posterior.particles.shared_parameters()["network.3.weight"]
    alone = torch.zeros_like(weight)
    for m in range(3):
        member = posterior.member(m).train()
        nn.functional.cross_entropy(member(x), y).backward()
        alone += member[3].weight.grad * before[m] / 3  # the folded weight is W times the mask
    posterior.backward(x, y)
    torch.testing.assert_close(weight.grad, alone, rtol=0, atol=1e-12)
    ds.fit(posterior, [(x, y)], epochs=5, progress=False)
    assert torch.equal(posterior.modulations["3.r"], before)


def test_channels_are_dropped_whole_and_the_loop_agrees_with_vmap():
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    posterior = ds.DropoutEnsemble(network, members=3, rate=0.5).double().eval()
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    assert posterior.modulations["3.r"].shape == (3, 4)
    assert posterior.account.converted == {"3": "masks of 4 channels"}
    assert "inputs are not dropped" in posterior.account.left["0"]
    each = [posterior.particles.map_members(lambda m: m.network(x), how=how) for how in ("loop", "vectorised")]
    torch.testing.assert_close(*each, rtol=0, atol=1e-12)
    assert "network.1.running_mean" in posterior.particles.own_buffers()
    assert not posterior.particles.own_parameters()  # all that is trained is shared
    assert posterior.particles.how == "loop"  # masks cost less on kernels than on activations


def test_the_mean_over_many_masks_is_about_the_network():
    """Inverted dropout keeps the size of activations: for a linear network the mean over masks is the network itself."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1)).double()
    posterior = ds.DropoutEnsemble(network, members=400, rate=0.2, likelihood=ds.Regression(1.0))
    x = torch.randn(5, 4, dtype=torch.float64)
    outputs = posterior(x)
    assert bool(((outputs.mean(0) - network(x)).abs() < 4 * (outputs.std(0) / 400**0.5)).all())


@pytest.mark.parametrize(("keywords", "words"), [
    ({"rate": 1.0}, "rate above 0 and below 1"),
    ({"rate": "a"}, "rate as a number, got 'a'"),
    ({"members": 0}, "members of at least 1"),
    ({"regime": "loud"}, "regime of auto"),
    ({"network": nn.Linear(2, 2)}, "at least two linear or convolutional layers"),
    ({"network": nn.ReLU()}, "with a linear or convolutional layer"),
])  # fmt: skip
def test_bad_input_is_refused(keywords, words):
    refuses(lambda: ds.DropoutEnsemble(**({"network": tiny.mlp()} | keywords)), words, (ValueError, TypeError))


def chain(forward, **more):
    return tiny.Network(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 5), c=nn.Linear(5, 3), **more)


def past(self, x):
    """Reads b's tensors, and calls it never."""
    return self.c(torch.tanh(F.linear(torch.tanh(self.a(x)), self.b.weight, self.b.bias)))


def normalised(self, x):
    """Calls c never, and computes something of its weight."""
    return F.linear(torch.tanh(self.b(torch.tanh(self.a(x)))), F.normalize(self.c.weight))


def both(self, x):
    """Calls b, and reads its weight."""
    hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
    return self.c(hidden + hidden @ self.b.weight.T)


def named(self, x):
    """Calls b, and reads its weight by name."""
    hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
    return self.c(hidden * dict(self.named_parameters())["b.weight"].norm())


def dtype(self, x):
    """Asks for a weight's dtype alone, and computes something of a parameter that is no layer's."""
    return self.scale.exp() * self.c(torch.tanh(self.b(torch.tanh(self.a(x.to(self.a.weight.dtype))))))


def heads(self, x):
    """Two heads side by side, and a third whose outputs are dropped."""
    hidden = torch.relu(self.body(x))
    self.aside(hidden)
    return torch.cat([self.mean(hidden), F.softplus(self.variance(hidden))], 1)


def residual(self, x):
    """Every layer reaches the outputs, the last one alone goes nowhere else."""
    hidden = self.a(x)
    hidden = hidden + self.b(torch.tanh(hidden))
    return hidden[:, :3] + self.c(torch.tanh(hidden))


READERS = {
    "Past": lambda: chain(past),
    "Normalised": lambda: chain(normalised),
    "Both": lambda: chain(both),
    "Named": lambda: chain(named),
    "Dtype": lambda: chain(dtype, scale=nn.Parameter(torch.zeros(()))),
    # a layer behind the last one, which is not called
    "Unused": lambda: chain(lambda self, x: self.c(self.b(self.a(x).tanh()).tanh()), spare=nn.Linear(5, 3)),
    "Again": lambda: tiny.Network(  # ends with the layer that it begins with
        lambda self, x: self.ends(self.middle(self.ends(x).tanh()).tanh()), ends=nn.Linear(4, 4), middle=nn.Linear(4, 4)
    ),
    "Heads": lambda: tiny.Network(
        heads, **{name: nn.Linear(4, n) for name, n in {"body": 4, "mean": 1, "variance": 2, "aside": 2}.items()}
    ),
    "Residual": lambda: chain(residual),
}


def embedded(net, kind=ds.BatchEnsemble, **keywords):
    torch.manual_seed(0)
    network = READERS.get(net, net)().double()
    if kind is ds.NodeBNN:
        return ds.NodeBNN(network, data_size=12).eval()
    keywords |= {"modulation": AROUND} if kind is ds.BatchEnsemble else {"rate": 0.5}
    return kind(network, members=3, **keywords).eval()


@pytest.mark.parametrize("kind", [ds.BatchEnsemble, ds.DropoutEnsemble, ds.NodeBNN])
@pytest.mark.parametrize("net", READERS)
def test_members_are_what_the_ensemble_computes_whatever_the_forward_reads(net, kind):
    drawn, (x, _) = embedded(net, kind).draw(), tiny.points()
    outputs = drawn(x)
    for m in range(3):
        torch.testing.assert_close(drawn.member(m)(x), outputs[m], rtol=0, atol=1e-12)


def test_a_layer_stays_cut_only_where_its_weight_is_used_past_it():
    cut = {
        net: [name for name, part in embedded(net).member(0).named_modules() if isinstance(part, ConvertedLayer)]
        for net in ("Past", "Normalised", "Both", "Named", "Dtype", "Unused", "Again")
    }
    assert cut == {
        "Past": ["b"], "Normalised": ["c"], "Both": ["b"], "Named": ["b"], "Dtype": [], "Unused": [], "Again": [],
    }  # fmt: skip
    posterior = embedded("Both")
    assert "its weight is read directly" in posterior.account.converted["b"]
    assert not any(isinstance(part, ConvertedLayer) for part in posterior.plain_network().modules())


@pytest.mark.parametrize(("net", "last", "others"), [
    ("Past", "c", "ab"), ("Unused", "c", ["a", "b", "spare"]), ("Again", "ends", ["middle"]),
    ("Residual", "c", "ab"), ("Heads", ("mean", "variance"), ["body", "aside"]),
])  # fmt: skip
def test_biases_that_are_own_and_the_s_that_the_talk_lacks_are_those_of_output_layers(net, last, others):
    posterior = embedded(net, form="talk")
    own = posterior.particles.own_parameters()
    lasts = [last] if isinstance(last, str) else last
    assert {name for name in own if name.endswith(".bias")} == {f"network.{each}.bias" for each in lasts}
    assert {name for name in posterior.modulations if name.endswith(".s")} == {f"{each}.s" for each in others}


def test_branches_that_take_in_the_inputs_are_all_first_layers():
    x, _ = tiny.points()
    posterior = embedded(tiny.Pair, form="talk")
    assert set(posterior.modulations) == {"left.s", "right.s", "head.r"}
    dropped = embedded(tiny.Pair, ds.DropoutEnsemble)
    assert set(dropped.modulations) == {"head.r"}
    assert all("inputs" in dropped.account.left[name] for name in ("left", "right"))
    assert posterior.predict((x, x)).member_means.shape[0] == 3


def test_first_and_last_are_the_networks_where_only_some_layers_are_cut():
    assert set(embedded("Dtype", form="talk", layers=["b"]).modulations) == {"b.r", "b.s"}
    assert set(embedded("Dtype", form="talk", layers=["a", "b"]).modulations) == {"a.s", "b.r", "b.s"}


def test_a_layer_that_is_not_called_is_no_link_of_the_wide_limits_chain():
    def correlation(net):
        posterior = embedded(net)
        generator = torch.Generator().manual_seed(0)
        for _, factor in sorted(posterior.modulations.items()):
            factor.data = torch.randn(factor.shape, generator=generator, dtype=torch.float64) + 1
        return theory.regime(posterior).correlation

    assert correlation("Unused") == pytest.approx(correlation("Dtype"), abs=1e-12)


def test_heads_side_by_side_are_one_link_of_the_wide_limits_chain():
    found = []
    for net in (
        lambda: chain(lambda self, x: self.b(h := torch.relu(self.a(x)))[:, :3] + self.c(h)),
        lambda: chain(lambda self, x: self.c(torch.relu(self.a(x)))),
    ):
        posterior = embedded(net)
        for i, name in enumerate(("a.r", "a.s", "c.r", "c.s")):
            factor = posterior.modulations[name]
            factor.data = AROUND.sample(factor.shape, torch.Generator().manual_seed(i), dtype=torch.float64)
        found.append(theory.regime(posterior).correlation)
    assert found[0] == pytest.approx(found[1], abs=1e-12)


class Standardised(nn.Conv2d):
    """A convolution whose kernel is standardised on the way, after what conv's own forward passes on."""

    def _conv_forward(self, input, weight, bias):
        centred = weight - weight.mean((1, 2, 3), keepdim=True)
        return super()._conv_forward(input, centred / weight.std((1, 2, 3), keepdim=True), bias)


def test_a_convolution_that_changes_its_kernel_computes_the_same_one_by_one_and_at_once():
    posterior = embedded(lambda: nn.Sequential(Standardised(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3)))
    assert "has its own forward" in posterior.account.left["0"]
    x = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    loop, at_once = (posterior.particles.map_members(lambda m: m.network(x), how=how) for how in ("loop", "vectorised"))
    torch.testing.assert_close(loop, at_once, rtol=0, atol=1e-12)


def test_a_pickled_copy_runs_its_layers_the_same_way_to_the_last_bit():
    torch.manual_seed(0)
    posterior = ds.BatchEnsemble(ds.nets.MLP(8, 2, hidden=(8,)).double(), members=4, modulation=SIGN)
    x = torch.randn(60, 8, dtype=torch.float64)
    ds.fit(posterior, [(x, torch.arange(60) % 2)], epochs=1, progress=False)
    again = pickle.loads(pickle.dumps(posterior))
    assert torch.equal(again.predict(x).log_probs, posterior.predict(x).log_probs)

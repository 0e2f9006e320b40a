"""MC dropout: what is dropped, how often, for whom, and that nothing else changes."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.core.batch import Batch
from refusals import refuses

WIDE = 2000


def masks(module: nn.Module, samples: int = 5, shape: tuple[int, ...] = (3, WIDE)) -> Tensor:
    """(M, B, ...) what the drawn functions make of ones: the masks, scaled."""
    return ds.MCDropout(nn.Sequential(module), samples=samples).draw()(torch.ones(shape))


def test_units_are_dropped_at_the_rate_and_the_rest_scaled_up():
    kept = masks(nn.Dropout(0.4))
    assert kept.unique().tolist() == pytest.approx([0, 1 / 0.6])
    frequency = float((kept[:, 0] == 0).double().mean())
    assert abs(frequency - 0.4) < 4 * math.sqrt(0.4 * 0.6 / (5 * WIDE))


def test_functions_differ_and_rows_of_a_batch_do_not():
    kept = masks(nn.Dropout(0.4))
    assert torch.equal(kept[:, 0], kept[:, 1])
    assert torch.equal(kept[:, 0], kept[:, 2])
    for i in range(5):
        for j in range(i):
            # Independent masks agree in 0.4² + 0.6² = 0.52 of the units.
            agreement = float((kept[i, 0] == kept[j, 0]).double().mean())
            assert abs(agreement - 0.52) < 4 * math.sqrt(0.52 * 0.48 / WIDE)


def test_masks_stay_for_every_batch_and_change_at_the_next_draw():
    posterior = ds.MCDropout(nn.Sequential(nn.Dropout(0.5)), samples=2)
    drawn = posterior.draw()
    first = drawn(torch.ones(1, WIDE))
    assert torch.equal(drawn(torch.ones(7, WIDE))[:, 3:4], first)
    agreement = float((posterior.draw()(torch.ones(1, WIDE)) == first).double().mean())
    assert abs(agreement - 0.5) < 4 * math.sqrt(0.25 / (2 * WIDE))


@pytest.mark.parametrize("network", [
    tiny.Network(lambda self, x: torch.stack([self.drop(x), self.drop(x)], 1), drop=nn.Dropout(0.5)),
    tiny.Network(lambda self, x: torch.stack([self.a(x), self.b(x)], 1), a=nn.Dropout(0.5), b=nn.Dropout(0.5)),
], ids=["one module twice", "two modules"])  # fmt: skip
def test_a_module_used_twice_and_two_modules_drop_different_units(network):
    kept = ds.MCDropout(network, samples=3).draw()(torch.ones(2, WIDE))  # (M, B, 2, D)
    agreement = float((kept[:, 0, 0] == kept[:, 0, 1]).double().mean())
    assert abs(agreement - 0.5) < 4 * math.sqrt(0.25 / (3 * WIDE))


@pytest.mark.parametrize(
    ("layer", "space"), [(nn.Dropout2d, (3, 3)), (nn.FeatureAlphaDropout, (3, 3)), (nn.Dropout1d, (7,))]
)
def test_channelwise_dropout_drops_whole_channels_and_plain_dropout_pixels(layer, space):
    kept = masks(layer(0.5), samples=4, shape=(2, 300, *space)).flatten(3)
    assert torch.equal(kept, kept[..., :1].expand_as(kept))
    frequency = float((kept[:, 0, :, 0] == kept.unique()[0]).double().mean())
    assert abs(frequency - 0.5) < 4 * math.sqrt(0.25 / 1200)
    plain = masks(nn.Dropout(0.5), samples=1, shape=(2, 10, 9, 9))[0, 0]
    assert 0 < int((plain[0] == 0).sum()) < 81


def test_alpha_dropout_does_what_torch_does_and_keeps_the_moments():
    rate, x = 0.3, torch.randn(1, 4 * WIDE, dtype=torch.float64)
    # The two values torch turns a one into are the two of ours.
    theirs = nn.AlphaDropout(rate)(torch.ones(1, 500, dtype=torch.float64)).unique()
    ours = ds.MCDropout(nn.Sequential(nn.AlphaDropout(rate)), samples=3).draw()(torch.ones(1, 500, dtype=torch.float64))
    torch.testing.assert_close(ours.unique(), theirs, rtol=0, atol=1e-6)
    out = ds.MCDropout(nn.Sequential(nn.AlphaDropout(rate)), samples=4).draw()(x)
    n = out.numel()
    assert abs(float(out.mean())) < 4 / math.sqrt(n / 4)  # the four functions share x
    assert abs(float(out.var()) - 1) < 4 * math.sqrt(3 / (n / 4))


def test_the_mean_over_functions_of_a_linear_network_is_its_eval_output():
    network = nn.Sequential(nn.Linear(4, 30), nn.Dropout(0.5), nn.Linear(30, 2)).double()
    posterior, x = ds.MCDropout(network, samples=2000), tiny.points()[0]
    outputs = posterior.draw()(x)  # (M, B, 2)
    error = 4 * outputs.std(0) / 2000**0.5
    assert bool(((outputs.mean(0) - network.eval()(x)).abs() < error).all())


def test_batch_norm_stays_in_eval_mode():
    network = tiny.mlp(dropout=0.5).double()
    posterior, x = ds.MCDropout(network, samples=3), tiny.points()[0]
    before = tiny.state(network)
    posterior.train()
    drawn = posterior.draw()
    outputs = drawn(x)
    posterior.predict(x)
    assert tiny.largest_difference(before, tiny.state(network)) == 0
    torch.testing.assert_close(drawn(x[:1]), outputs[:, :1], rtol=0, atol=1e-12)  # a batch of one works, too
    assert network.training
    assert network[1].training


@pytest.mark.parametrize("rate", [None, 0.3])
def test_the_network_is_left_without_hooks(rate):
    network = tiny.mlp(dropout=0.0 if rate else 0.5).double()
    posterior, (x, y) = ds.MCDropout(network, samples=3, rate=rate), tiny.points()
    posterior.backward(x, y)
    posterior.predict(x)
    posterior.member(1)(x)
    refuses(lambda: posterior.predict(x[:, :2]), "shapes cannot be multiplied")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
    assert set(posterior.sites.values()) == {rate or 0.5}


def test_a_drawn_member_is_the_same_function_in_either_mode():
    posterior, x = ds.MCDropout(tiny.mlp(dropout=0.5).double(), samples=3), tiny.points()[0]
    member = posterior.draw().member(0)
    outputs = member(x)
    assert torch.equal(member.train()(x), outputs)
    assert torch.equal(copy.deepcopy(member)(x), outputs)


def test_training_with_own_modules_is_the_networks_own_training():
    network, (x, y) = tiny.mlp(dropout=0.5).double(), tiny.points()
    other = copy.deepcopy(network)
    posterior = ds.MCDropout(network)
    torch.manual_seed(4)
    posterior.backward(x, y)
    torch.manual_seed(4)
    F.cross_entropy(other(x), y).backward()
    assert tiny.largest_difference(tiny.gradients(network), tiny.gradients(other)) < 1e-12
    assert tiny.largest_difference(tiny.state(network), tiny.state(other)) < 1e-12


def seen_by(layer: nn.Module, run) -> list[Tensor]:
    """What reaches the layer while run() runs."""
    seen: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].detach().clone()))
    run()
    handle.remove()
    return seen


def test_inserted_dropout_drops_fresh_units_for_every_example_in_training():
    network = nn.Sequential(nn.Linear(4, WIDE), nn.Softplus(), nn.Linear(WIDE, 3))
    posterior, (x, y) = ds.MCDropout(network, rate=0.3), tiny.points(4)
    x = x.float()
    posterior.check_batch(Batch(x, y))  # so that its own look at the shapes is not seen below
    (seen,) = seen_by(network[2], lambda: posterior.backward(x, y))
    hidden = network[1](network[0](x)).detach()
    dropped = seen == 0
    torch.testing.assert_close(seen[~dropped], (hidden / 0.7)[~dropped])
    assert abs(float(dropped.double().mean()) - 0.3) < 4 * math.sqrt(0.21 / dropped.numel())
    assert not torch.equal(dropped[0], dropped[1])
    posterior.eval()
    (seen,) = seen_by(network[2], lambda: posterior.backward(x, y))  # in eval mode nothing is dropped
    torch.testing.assert_close(seen, hidden)


def test_inserted_dropout_comes_before_every_weight_layer_but_the_first():
    network = nn.Sequential(nn.Conv2d(2, 50, 3), nn.ReLU(), nn.Conv2d(50, 4, 3), nn.Flatten(), nn.Linear(4, 3))
    posterior = ds.MCDropout(network, rate=0.4, samples=2)
    assert posterior.sites == {"2": 0.4, "4": 0.4}
    x = torch.rand(2, 2, 5, 5)
    drawn = posterior.draw()
    outputs = drawn(x)
    # Before a convolution whole channels go: the function is the network with input channels of its weights removed.
    (seen,) = seen_by((member := drawn.member(1)).network[2], lambda: member(x))
    hidden = network[:2](x)
    gone = (seen == 0).all(dim=(0, 2, 3))
    assert 0 < int(gone.sum()) < 50
    torch.testing.assert_close(seen[:, ~gone], hidden[:, ~gone] / 0.6)
    thin = copy.deepcopy(network)
    with torch.no_grad():
        thin[2].weight.mul_((~gone).float()[:, None, None] / 0.6)
    (after,) = seen_by(member.network[4], lambda: member(x))
    kept = (after != 0).any(0)
    with torch.no_grad():
        thin[4].weight.mul_(kept.float() / 0.6)
    torch.testing.assert_close(thin(x), outputs[1], rtol=1e-5, atol=1e-6)


UNNAMED = tiny.Network(lambda self, x: F.dropout(self.layer(x), 0.5, self.training), layer=nn.Linear(4, 3))


@pytest.mark.parametrize(("network", "keywords", "told"), [
    (tiny.mlp(0.5), {"samples": 0}, "expected samples of at least 1, got 0"),
    (tiny.mlp(0.5), {"rate": 0.1}, "expected a network without dropout if rate is given, got 3; pass rate=None"),
    (nn.Linear(4, 3), {"rate": 0.1}, r"expected at least two linear or convolutional layers .* got 1"),
    (UNNAMED, {}, "hold the rate of F.dropout as a number"),
    (nn.LSTM(4, 5, num_layers=2, dropout=0.5), {}, "expected a network that drops at a positive rate, got none"),
    (nn.Dropout(0.0), {}, "expected a network that drops at a positive rate, got none"),
    *(
        (tiny.mlp(), {"rate": rate}, "expected rate above 0 and below 1")
        for rate in (0.0, 1.0, -0.1, 1.5, math.nan)
    ),
])  # fmt: skip
def test_networks_and_settings_without_dropout_are_refused(network, keywords, told):
    refuses(lambda: ds.MCDropout(nn.Sequential(network) if not keywords else network, **keywords), told)


def test_refresh_stores_the_draw(tmp_path):
    posterior, x = ds.MCDropout(tiny.mlp(0.5).double(), samples=4), tiny.points()[0]
    assert not torch.equal(posterior(x), posterior.eval()(x))
    ds.refresh(posterior, [])
    stored = posterior(x)
    torch.rand(17)
    assert torch.equal(posterior(x), stored)
    assert torch.equal(posterior.draw()(x), stored)
    ds.save(posterior, tmp_path)
    assert torch.equal(ds.load(tmp_path, tiny.mlp(0.5))(x), stored)
    for again in (lambda p: ds.refresh(p, []), lambda p: ds.fit(p, [tiny.points()], epochs=1, progress=False)):
        again(other := copy.deepcopy(posterior))
        assert not torch.equal(other(x), stored)
        assert torch.equal(other(x), other(x))


def encoder_network(rate=0.5, **sizes):
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=rate, batch_first=True, **sizes)
    return tiny.Network(lambda self, x: self.head(self.layer(x)[:, 0]), layer=encoder, head=nn.Linear(4, 3))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_attention_layers_drop_too():
    """In eval mode torch would take a road past the dropout modules; masks must not be lost on it."""
    posterior = ds.MCDropout(encoder_network(), samples=3)
    assert [*posterior.sites] == ["layer.dropout", "layer.dropout1", "layer.dropout2", "layer.self_attn"]
    check_functions(posterior, torch.randn(2, 5, 4))


def check_functions(posterior, x):
    """The drawn functions differ, each is the same one by one and on other rows, and the network is left as it was."""
    network = posterior.particles.template.network
    modes = [part.training for part in network.modules()]
    with torch.no_grad():
        drawn = posterior.draw()
        outputs = drawn(x)
        assert torch.equal(drawn(x), outputs)
        torch.testing.assert_close(drawn(x[:1]), outputs[:, :1])
        for i in range(drawn.members):
            torch.testing.assert_close(drawn.member(i)(x), outputs[i])
    assert float(outputs.std(0).max()) > 0
    assert [part.training for part in network.modules()] == modes


class FusedAttention(nn.Module):
    """Attention as transformers and timm write it: a dropout module that is only asked for its rate."""

    def __init__(self, rate=0.3, groups=1, **asked):
        super().__init__()
        self.qkv, self.dropout, self.groups, self.asked = nn.Linear(4, 24), nn.Dropout(rate), groups, asked

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        k, v = k[:, : 2 // self.groups], v[:, : 2 // self.groups]
        p = self.dropout.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, **self.asked).mean((1, 2))


def functional_rate(rate=0.3):
    def forward(self, x):
        return F.dropout(self.norm(self.layer(x.mean(1))), self.drop_rate, self.training)

    return tiny.Network(forward, layer=nn.Linear(4, 8), norm=nn.BatchNorm1d(8), drop_rate=rate)


def drop_path(self, x):
    if not self.training:
        return x
    return x * x.new_empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(1 - self.drop_prob) / (1 - self.drop_prob)


def multihead(rate=0.3):
    layers = {"attention": nn.MultiheadAttention(4, 2, dropout=rate, batch_first=True)}
    return tiny.Network(lambda self, x: self.attention(x, x, x)[0].mean(1), **layers)


class DropPath(tiny.Network):
    """Known by its name."""


def with_branch(rate=0.3):
    layers = {"layer": nn.Linear(4, 4), "path": DropPath(drop_path, drop_prob=rate)}
    return tiny.Network(lambda self, x: (x + self.path(self.layer(x))).mean(1), **layers)


FUNCTIONAL = {
    "attention": FusedAttention,
    "causal": lambda: FusedAttention(is_causal=True),
    "masked": lambda: FusedAttention(attn_mask=torch.ones(5, 5).tril().bool(), scale=0.7),
    "grouped": lambda: FusedAttention(groups=2, enable_gqa=True),
    "multihead": multihead,
    "encoder": encoder_network,
    "number": functional_rate,
    "drop path": with_branch,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("build", FUNCTIONAL.values(), ids=FUNCTIONAL)
def test_functional_dropout_and_drop_path_drop_as_the_network_does_in_training(build):
    """Mean and deviation over many functions are those over many passes in training mode (batch norm in eval mode)."""
    torch.manual_seed(0)
    network, x, count = build().double(), torch.randn(1, 5, 4, dtype=torch.float64), 3000
    posterior = ds.MCDropout(network, samples=count)
    network.train()
    for part in network.modules():
        part.training = not isinstance(part, nn.BatchNorm1d)
    with torch.no_grad():
        wanted = network(x.expand(count, -1, -1))  # every row has its own masks
        found = posterior.draw()(x)[:, 0]
    torch.testing.assert_close(found.mean(0), wanted.mean(0), rtol=0, atol=float(6 * wanted.std(0).max() / count**0.5))
    torch.testing.assert_close(found.std(0), wanted.std(0), rtol=0.15, atol=1e-12)
    check_functions(ds.MCDropout(network, samples=8), torch.randn(2, 5, 4, dtype=torch.float64))


def test_layers_choose_where_is_dropped(tmp_path):
    network = encoder_network(0.3)
    some = ds.MCDropout(network, layers=["*.dropout1", "*.self_attn"])
    assert [*some.sites] == ["layer.dropout1", "layer.self_attn"]
    ds.save(some, tmp_path)
    assert ds.load(tmp_path, network).sites == some.sites
    assert ds.MCDropout(tiny.mlp(), rate=0.2, layers=["3"]).sites == {"3": 0.2}
    told = "got tail, which match no layer; the network has layer.dropout"
    refuses(lambda: ds.MCDropout(network, layers=["tail"]), told)
    idle = tiny.Network(lambda self, x: self.layer(x), layer=nn.Linear(4, 3), drop=nn.Dropout(0.5))
    told = "calls its dropout modules, got none of drop called"
    refuses(lambda: ds.MCDropout(idle).predict(torch.zeros(2, 4)), told)
    refuses(lambda: ds.MCDropout(network, layers="layer.*"), "expected a list of names of layers")


def test_recurrent_dropout_that_stays_off_is_told(caplog):
    layers = {"lstm": nn.LSTM(4, 5, 2, dropout=0.5), "drop": nn.Dropout(0.5)}
    ds.MCDropout(tiny.Network(lambda self, x: self.drop(self.lstm(x)[0]), **layers))
    assert "dropout inside recurrent layers (lstm) stays off in prediction" in caplog.text


def test_what_vmap_cannot_run_drops_all_the_same():
    layers = {"lstm": nn.LSTM(4, 5, batch_first=True), "drop": nn.Dropout(0.5), "head": nn.Linear(5, 3)}
    network = tiny.Network(lambda self, x: self.head(self.drop(self.lstm(x)[0][:, -1])), **layers)
    posterior = ds.MCDropout(network, samples=3).eval()
    x = torch.randn(2, 6, 4)
    drawn = posterior.draw()
    outputs = drawn(x)
    for i in range(3):
        torch.testing.assert_close(drawn.member(i)(x), outputs[i])
    assert float(outputs.detach().std(0).max()) > 0


def test_inputs_of_another_length_get_masks_of_their_own():
    pooled = tiny.Network(lambda self, x: self.head(self.drop(x).mean(1)), drop=nn.Dropout(0.5), head=nn.Linear(4, 3))
    drawn = ds.MCDropout(pooled, samples=3).draw()
    short, long = torch.randn(2, 5, 4), torch.randn(2, 8, 4)
    first = drawn(short)
    assert drawn(long).shape == (3, 2, 3)
    assert torch.equal(drawn(short), first)


def scaled(factor) -> nn.Module:
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * (self.factor if isinstance(self.factor, float) else self.factor[0])

    network = tiny.Network(forward, layers=nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)))
    network.factor = factor
    return network


@pytest.mark.parametrize(
    "kind", [float, lambda value: [value], lambda value: {0: value}, lambda value: torch.tensor([value])]
)
def test_what_is_changed_in_the_network_after_a_prediction_is_seen_by_the_next(kind):
    """The functions run in a copy of the network, which is kept between predictions."""
    torch.manual_seed(0)
    network, x = scaled(kind(1.0)), torch.randn(2, 4)
    posterior = ds.MCDropout(network, samples=4)
    ds.refresh(posterior, [])
    before, again = posterior.predict(x).member_means, posterior.predict(x).member_means
    assert torch.equal(before, again)
    kept = posterior.draw().particles is posterior.draw().particles
    assert kept == (not isinstance(network.factor, Tensor))  # a tensor could be changed in place, which nobody sees

    def compared() -> None:
        other = ds.MCDropout(copy.deepcopy(network), samples=4)
        other.seed.copy_(posterior.seed)
        torch.testing.assert_close(posterior.predict(x).member_means, other.predict(x).member_means, rtol=0, atol=0)
        assert not torch.equal(posterior.predict(x).member_means, before)

    if kind is float:
        network.factor = 2.0
    else:
        network.factor[0] = 2.0  # in place
    compared()
    network.layers[2] = nn.Linear(6, 3)
    compared()
    handle = network.register_forward_hook(lambda module, inputs, outputs: outputs + 1 + outputs)
    compared()
    handle.remove()
    with torch.no_grad():
        network.layers[0].weight.mul_(2)
    compared()
    torch.testing.assert_close(copy.deepcopy(posterior).predict(x).member_means, posterior.predict(x).member_means)


def test_a_rate_that_was_changed_is_that_of_the_next_draw_and_of_its_file(tmp_path):
    network = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
    posterior, inputs = ds.MCDropout(network, samples=200), torch.randn(5, 4)
    wide = posterior.predict(inputs).member_means.std(0).mean()
    network[2].p = 0.05
    posterior.store_draw([])
    found = posterior.predict(inputs).member_means
    assert found.std(0).mean() < wide / 2
    ds.save(posterior, tmp_path / "run")
    assert torch.equal(ds.load(tmp_path / "run", copy.deepcopy(network)).predict(inputs).member_means, found)


def test_a_promise_ends_when_a_dropout_rate_is_changed(caplog):
    network, x, y = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), torch.randn(40, 4), torch.randint(3, (40,))
    posterior = ds.MCDropout(network, samples=20)
    posterior.store_draw([])
    ds.conformal(posterior, [(x, y)], level=0.8)
    assert posterior.promises
    network[0].p = 0.1
    assert not posterior.promises
    assert "predictions have changed" in caplog.text

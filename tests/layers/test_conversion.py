"""Layer surgery: the order of calls, any nesting converts, what survives it, and what is left alone says why."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
import tiny
from dissensus.layers import conversion
from dissensus.layers.call_order import call_order, trace_calls
from dissensus.layers.factored import modulate_layer
from dissensus.nets.blocks import NTKLinear
from refusals import refuses
from thinning import thinned


class Tripled(conversion.ConvertedLayer):
    """3 times what the plain layer says."""

    added = ("factor",)

    def forward(self, x):
        return super().forward(x) * self.factor

    def fold(self):
        self.weight = nn.Parameter(self.weight.detach() * self.factor)
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.detach() * self.factor)


def tripled(network, layers=None):
    """(a copy of the network with all layers tripled, the account)."""
    copied, found, account = conversion.convertible_copy(network, layers=layers)
    for name, layer in found.items():
        conversion.convert_layer(layer, Tripled).register_buffer("factor", torch.tensor(3.0))
        account.converted[name] = "tripled"
    return copied, account


class Conv1D(nn.Module):
    """GPT-2's linear layer, as transformers writes it: the weight is (inputs, outputs)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


LAYERS = {
    "transformers": (Conv1D(6, 4), (2, 3, 4)),
    "linear": (nn.Linear(4, 6), (2, 4)),
    "ntk": (NTKLinear(4, 6), (2, 4)),
    "conv1d": (nn.Conv1d(4, 6, 3, groups=2, padding="same", padding_mode="circular"), (2, 4, 8)),
    "conv2d": (nn.Conv2d(4, 6, 3, groups=2, stride=2), (2, 4, 8, 8)),
    "conv3d": (nn.Conv3d(4, 6, 3, bias=False), (2, 4, 4, 4, 4)),
    "transposed1d": (nn.ConvTranspose1d(4, 6, 3, groups=2), (2, 4, 8)),
    "transposed2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 5, 5)),
    "transposed3d": (nn.ConvTranspose3d(4, 6, 2), (2, 4, 3, 3, 3)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_every_kind_of_layer_is_cut_folded_and_plain_again(kind):
    layer, shape = LAYERS[kind]
    x, network = torch.randn(shape), nn.Sequential(layer)
    cut_network, account = tripled(network)
    assert list(account.converted) == ["0"]
    assert not account.left
    assert isinstance(cut_network[0], type(layer))
    assert type(network[0]) is type(layer)
    torch.testing.assert_close(cut_network(x), 3 * network(x))
    torch.testing.assert_close(conversion.fold_layers(copy.deepcopy(cut_network))(x), 3 * network(x))
    again = conversion.restore_plain_layers(cut_network)
    assert type(again[0]) is type(layer)
    assert list(again.state_dict()) == list(network.state_dict())
    assert torch.equal(again(x), network(x))


def test_state_dicts_of_the_plain_network_map_one_to_one():
    network = ds.nets.WideResNet(outputs=3, depth=10, width=1)
    cut_network, _ = tripled(network)
    missing, unexpected = cut_network.load_state_dict(network.state_dict(), strict=False)
    assert not unexpected
    assert all(name.endswith(".factor") for name in missing)


def test_the_network_itself_may_be_the_layer():
    layer = nn.Linear(2, 3)
    cut_layer, account = tripled(layer)
    assert isinstance(cut_layer, Tripled)
    assert type(layer) is nn.Linear
    assert "(itself)" in str(account)


def test_a_layer_with_several_names_stays_one():
    shared = nn.Linear(3, 3)
    network = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())})
    cut_network, account = tripled(network)
    assert cut_network["a"] is cut_network["b"][0]
    assert list(account.converted) == ["a"]
    assert type(network["a"]) is nn.Linear


def test_tied_weights_stay_tied_and_folding_leaves_the_embedding_alone():
    layers = {"embedding": nn.Embedding(5, 3), "body": nn.Linear(3, 3), "head": nn.Linear(3, 5)}
    layers["head"].weight = layers["embedding"].weight
    network = tiny.Network(lambda self, x: self.head(torch.tanh(self.body(self.embedding(x)))), **layers)
    tokens = torch.tensor([[0, 4], [1, 2]])
    cut_network, account = tripled(network)
    assert cut_network.head.weight is cut_network.embedding.weight
    assert cut_network.head.weight is not network.head.weight
    assert "lookup" in account.left["embedding"]
    outputs = cut_network(tokens)
    ordinary = conversion.fold_layers(cut_network)
    assert torch.equal(ordinary.embedding.weight, network.embedding.weight)
    torch.testing.assert_close(ordinary(tokens), outputs)


def test_hooks_are_kept():
    network, seen = nn.Sequential(nn.Linear(2, 2)), []
    network[0].register_forward_hook(lambda *_: seen.append(1))
    tripled(network)[0](torch.randn(1, 2))
    assert seen == [1]


class Loud(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class Marked(nn.Linear):
    """A subclass that keeps the forward."""


def test_what_cannot_be_converted_is_listed_with_the_reason():
    layers = {"attention": nn.MultiheadAttention(4, 2), "lstm": nn.LSTM(4, 4), "loud": Loud(4, 4)}
    layers |= {"normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "biased": nn.Linear(4, 4)}
    nn.utils.parametrize.register_parametrization(layers["biased"], "bias", nn.Softplus())
    layers |= {"prelu": nn.PReLU(), "norm": nn.LayerNorm(4), "marked": Marked(4, 4)}
    cut_network, account = tripled(nn.ModuleDict(layers))
    assert list(account.converted) == ["marked"]
    assert isinstance(cut_network["marked"], Marked)
    words = {
        "attention": "inside its own forward",
        "attention.out_proj": "MultiheadAttention reads its weight",
        "lstm": "recurrent",
        "loud": "has its own forward",
        "normed": "computed from others",
        "biased": "its bias is computed from others (a parametrization)",
        "prelu": "PReLU has its own parameters",
    }
    for name, word in words.items():
        assert word in account.left[name], name
    assert "norm" not in account.left
    assert all(name in str(account) for name in [*account.converted, *account.left])


def test_a_transformer_layer_calls_its_cut_layers_in_eval_mode_too():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    x = torch.randn(3, 5, 8)
    cut_layer, _ = tripled(layer)
    with torch.no_grad():
        fast, slow = cut_layer(x), cut_layer(x.clone().requires_grad_())
        torch.testing.assert_close(fast, slow)
        assert not torch.allclose(fast, layer(x), atol=1e-2)
        torch.testing.assert_close(conversion.fold_layers(cut_layer)(x), fast)
    assert conversion.restore_plain_layers(cut_layer).activation_relu_or_gelu == layer.activation_relu_or_gelu == 1


def test_a_transformer_encoder_calls_its_cut_layers_with_padding_in_eval_mode_too():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    encoder, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    cut_encoder, _ = tripled(encoder)
    slow = cut_encoder(x, src_key_padding_mask=padding)
    with torch.no_grad():
        torch.testing.assert_close(cut_encoder(x, src_key_padding_mask=padding), slow)
        again = conversion.fold_layers(cut_encoder)(x, src_key_padding_mask=padding)
    torch.testing.assert_close(again[~padding], slow.detach()[~padding])
    assert vars(cut_encoder).keys() == vars(encoder).keys()
    assert cut_encoder.use_nested_tensor


def test_cut_layers_are_copied_and_pickled():
    cut_network, _ = tripled(nn.Sequential(nn.Linear(2, 3), Marked(3, 1)))
    x = torch.randn(4, 2)
    for again in (copy.deepcopy(cut_network), pickle.loads(pickle.dumps(cut_network))):
        assert isinstance(again[1], Marked)
        assert type(again[0]) is type(cut_network[0])
        assert torch.equal(again(x), cut_network(x))


def test_patterns_choose_layers_and_a_pattern_that_none_has_is_an_error():
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    _, account = tripled(network, layers=["1.*"])
    assert list(account.converted) == ["1.0", "1.1"]
    assert "not selected" in account.left["0"]
    refuses(lambda: tripled(network, layers=["1.*", "head"]), "expected names of layers, got head")


@pytest.mark.parametrize(("network", "words"), [
    (nn.Sequential(nn.ReLU()), "expected a network with a linear or convolutional layer, got Sequential"),
    (nn.Sequential(nn.LazyLinear(3)), "expected initialised tensors, got '0.weight', which is lazy"),
    (nn.Sequential(nn.Embedding(2, 2)), "lookup"),
    (tripled(nn.Sequential(nn.Linear(2, 2)))[0], "already converted"),
])  # fmt: skip
def test_a_network_without_anything_to_convert_is_refused(network, words):
    refuses(lambda: tripled(network), words)


def test_modes_stay_as_they_were():
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[0].eval()
    cut_network, _ = tripled(network)
    assert [part.training for part in cut_network] == [False, True]


def ask_for_a_size(self, x):
    if x.shape[0] > 1000:
        raise ValueError("too many")
    return self.head(self.norm(self.past(self, torch.tanh(self.middle(torch.tanh(self.first(x)))))))


def unfollowed(past):
    """A network whose forward asks for a size; `past`: what it does beside calling its layers."""
    return tiny.Network(ask_for_a_size, **three_layers(), norm=nn.BatchNorm1d(4), past=past)


def three_layers():
    return {"first": nn.Linear(4, 4), "middle": nn.Linear(4, 4), "head": nn.Linear(4, 3)}


def transposed(network, hidden):
    return F.linear(hidden, network.middle.weight.t())


def shifted(network, hidden):
    return hidden + network.middle.bias


def above(network, hidden):
    return hidden * (hidden > network.middle.bias)  # no NaN comes out of a comparison


def listed(network, hidden):
    return hidden * dict(network.named_parameters())["middle.weight"].norm()


def alike(network, hidden):
    return hidden.to(network.middle.weight.dtype)


POSTERIORS = {
    "node": lambda network: ds.NodeBNN(network, data_size=9, batch_norm="frozen", samples=4),
    "batch": lambda network: ds.BatchEnsemble(network, members=4, modulation=ds.Modulation.normal(1, 0.5)),
    "dropout": lambda network: ds.DropoutEnsemble(network, members=4, rate=0.5),
}


@pytest.mark.parametrize(
    ("kind", "past", "trains"), thinned(list(POSTERIORS), [transposed, shifted, above, listed], [False, True], every=2)
)
def test_members_compute_what_the_drawn_functions_do(kind, past, trains):
    torch.manual_seed(0)
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    posterior = POSTERIORS[kind](unfollowed(past)).double().eval()
    posterior.backward(x, y) if trains else posterior.predict(x)
    functions = posterior.draw()
    for i, outputs in enumerate(functions(x)):
        torch.testing.assert_close(outputs, functions.member(i)(x))


@pytest.mark.parametrize(
    ("kind", "past", "loaded"), thinned(list(POSTERIORS), [transposed, shifted, above, alike], [False, True], every=2)
)
def test_members_are_right_before_the_first_batch(kind, past, loaded, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.float64)
    posterior = POSTERIORS[kind](unfollowed(past)).double().eval()
    if loaded:
        ds.refresh(posterior, [(x, torch.arange(5) % 3)])
        ds.save(posterior, tmp_path / "saved")
        posterior = ds.load(tmp_path / "saved", network=unfollowed(past)).eval()
    functions = posterior.draw()
    members = [functions.member(i) for i in range(functions.members)]
    for outputs, member in zip(functions(x), members, strict=True):
        torch.testing.assert_close(member(x), outputs)


def test_networks_are_collapsed_right_before_the_first_batch():
    torch.manual_seed(0)
    x, network = torch.randn(5, 4, dtype=torch.float64), unfollowed(transposed).double()
    posterior = ds.NodeBNN(network, data_size=9, components=1, init_spread=0.5, samples=1).double().eval()
    collapsed = posterior.collapse(0)
    s = dict(zip(("first", "middle", "head"), posterior.mean[0].detach().split([4, 4, 3]), strict=True))
    hidden = torch.tanh(network.middle(torch.tanh(network.first(x) * s["first"])) * s["middle"])
    by_hand = network.head(network.norm.eval()(hidden @ network.middle.weight)) * s["head"]
    torch.testing.assert_close(collapsed(x), by_hand)


def test_a_member_with_weights_apart_is_a_module_like_any_other():
    torch.manual_seed(0)
    x, network = torch.randn(5, 4), unfollowed(transposed)
    network.middle.register_forward_hook(lambda _, args, outputs: 2 * outputs)
    member = POSTERIORS["node"](network).eval().member(0)
    outputs = member(x)
    for copied in (copy.deepcopy(member), pickle.loads(pickle.dumps(POSTERIORS["node"](unfollowed(alike)).member(0)))):
        assert isinstance(copied.middle, nn.Linear)
        assert copied.double()(x.double()).dtype == torch.float64
    assert torch.equal(copy.deepcopy(member)(x), outputs)
    refuses(lambda: unfollowed(transposed).load_state_dict(member.state_dict()), r"middle.own.weight", RuntimeError)
    member(x).sum().backward()
    assert float(member.middle.own.weight.grad.abs().sum()) > 0


def test_torchs_fast_path_does_not_read_past_weights_that_are_apart():
    torch.manual_seed(0)
    layers = {"layer": nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), "head": nn.Linear(4, 3)}
    network = tiny.Network(lambda self, x: self.head(self.layer(x).mean(1)) if x.shape[1] == 2 else None, **layers)
    posterior, x = POSTERIORS["batch"](network).eval(), torch.randn(5, 2, 4)
    member, outputs = posterior.member(1).eval(), posterior(x)[1]
    with torch.no_grad():
        torch.testing.assert_close(member(x), outputs)
        torch.testing.assert_close(posterior.member(1).eval()(x), outputs)


def in_order(network, names):
    return call_order(names, trace_calls(network, names))


def weighted(network):
    return [name for name, part in network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]


def test_layers_stand_in_the_order_of_calls():
    def forward(self, x, scale=1.0):
        x = self.a(x.flatten(1)) * scale
        return self.c(self.norm(torch.relu(self.b(x)) + x)).softmax(-1)

    network = tiny.Network(forward, **{name: nn.Linear(2, 2) for name in "cba"}, norm=nn.BatchNorm1d(2))
    assert in_order(network, weighted(network)) == ["a", "b", "c"]
    assert all("forward" not in vars(part) for part in network.modules())
    network(torch.randn(3, 2))
    assert in_order(nn.Linear(2, 2), [""]) == [""]
    network.function = lambda self, x: self.c(x) if len(x) > 1 else self.a(self.b(x))  # needs to know sizes
    assert in_order(network, weighted(network)) == ["c", "b", "a"]  # in the order of registration
    assert all("forward" not in vars(part) for part in network.modules())


@pytest.mark.parametrize("make", [lambda: ds.nets.ResNet(20), lambda: ds.nets.WideResNet(10, 1), ds.nets.VGG16])
def test_networks_of_the_library_are_run_on_symbols(make):
    network = make()
    names = weighted(network)
    met = in_order(network, list(reversed(names)))
    assert met[0] == names[0]
    assert met[-1] == names[-1]


def test_neither_hooks_nor_the_network_keep_a_symbol():
    def forward(self, x):
        self.count += 1
        self.last = self.a(x)
        return self.b(self.last)

    network, seen = tiny.Network(forward, a=nn.Linear(2, 2), b=nn.Linear(2, 2), last=None, count=0), []
    network.a.register_forward_hook(lambda *_: seen.append(1))
    network.register_forward_pre_hook(lambda *_: seen.append(1))
    assert in_order(network, ["b", "a"]) == ["a", "b"]
    assert (network.last, network.count, seen) == (None, 0, [])


def without_gradients(network, hidden):
    with torch.no_grad():
        doubled = 2 * network.middle.weight
    return F.linear(hidden, doubled)


READS = {
    "called with a symbol": lambda network, hidden: F.linear(hidden, network.middle.weight),
    "multiplied by a symbol": lambda network, hidden: network.middle.weight @ hidden,
    "transposed": lambda network, hidden: hidden @ network.middle.weight.T,
    "detached": lambda network, hidden: F.linear(hidden, network.middle.weight.detach()),
    "data": lambda network, hidden: hidden + network.middle.bias.data,
    "without gradients": without_gradients,
    "a number": lambda network, hidden: hidden * network.middle.weight.detach().norm().item(),
    "a condition": lambda network, hidden: 2 * hidden if network.middle.bias.sum() > 100 else hidden,
    "by name": lambda network, hidden: hidden * dict(network.named_parameters())["middle.weight"].norm(),
}
NO_READS = {
    "none": lambda network, hidden: hidden,
    "dtype": lambda network, hidden: hidden.to(network.middle.weight.dtype),
    "size": lambda network, hidden: hidden * network.middle.weight.shape[0],
    "zeros": lambda network, hidden: (
        hidden + network.middle.weight.new_zeros(4) + torch.zeros_like(network.middle.bias)
    ),
}


def reading(past):
    """A network that does something beside calling its layers."""
    forward = lambda self, x: self.head(past(self, torch.tanh(self.middle(torch.tanh(self.first(x))))))  # noqa: E731
    return tiny.Network(forward, **three_layers())


@pytest.mark.parametrize("past", [*READS, *NO_READS])
def test_a_weight_is_read_where_something_is_computed_with_it_past_its_layer(past):
    followed = trace_calls(reading({**READS, **NO_READS}[past]), ["first", "middle", "head"])
    assert followed.calls == ["first", "middle", "head"]
    assert followed.read_directly == ({"middle"} if past in READS else set())


@pytest.mark.parametrize("past", ["detached", "without gradients", "a number", "data"])
def test_members_compute_what_the_ensemble_does_where_a_weight_is_read_without_a_gradient(past):
    torch.manual_seed(0)
    network = reading(READS[past]).double()
    posterior = ds.BatchEnsemble(network, members=3, modulation=ds.Modulation.normal(1, 0.5)).eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    for m, outputs in enumerate(posterior(x)):
        torch.testing.assert_close(posterior.member(m)(x), outputs, rtol=0, atol=1e-12)


def test_factors_of_a_transposed_linear_layer_are_those_of_the_linear_layer():
    torch.manual_seed(0)
    mine, linear = Conv1D(6, 4), nn.Linear(4, 6)
    linear.weight.data, linear.bias.data = mine.weight.data.T.contiguous(), mine.bias.data.clone()
    x, found = torch.randn(2, 3, 4), {}
    for name, layer in (("mine", mine), ("linear", linear)):
        network = nn.Sequential(modulate_layer(layer, inputs=True, outputs=True, trained=False))
        network[0].r.copy_(torch.arange(1.0, 5.0))
        network[0].s.copy_(torch.arange(6.0, 0.0, -1.0))
        found[name] = network(x)
        torch.testing.assert_close(conversion.fold_layers(network)(x), found[name])
    torch.testing.assert_close(found["mine"], found["linear"])


def test_a_layer_that_has_only_the_name_is_not_taken_for_one():
    wrapper = type("Conv1D", (tiny.Network,), {})(None, conv=nn.Conv1d(4, 6, 1))
    assert list(conversion.convertible_copy(nn.Sequential(wrapper))[1]) == ["0.conv"]

"""The last layer is found by running the network, and what is not linear in its weights is refused."""

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods.parts.last_layer import LastLayer, check_outputs, last_layer, record_calls
from refusals import refuses


class Made(nn.Module):
    """A network of these layers with a forward of its own."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def linear(inputs=4, outputs=3):
    return nn.Linear(inputs, outputs).double()


def test_the_last_linear_layer_that_is_called_is_found_whatever_its_place():
    network = Made(lambda net, x: net.head(torch.tanh(net.body(x))), head=linear(6), body=linear(4, 6), unused=linear())
    found = last_layer(network, tiny.points()[0])
    assert found.name == "head"
    assert list(found.parameters) == ["head.weight", "head.bias"]
    assert last_layer(linear(), tiny.points()[0]).name == ""  # the network itself
    assert list(last_layer(linear(), tiny.points()[0]).parameters) == ["weight", "bias"]


def test_norm_layers_and_activations_behind_it_are_seen():
    x = tiny.points()[0]
    network = nn.Sequential(linear(), nn.Softmax(1))
    found = last_layer(network, x)
    with record_calls(found) as seen:
        outputs = network(x)
    with pytest.raises(ValueError, match=r"expected a network that returns the outputs of its last layer '0'.*softmax"):
        check_outputs(found, seen[-1][1], outputs)


def test_an_axis_of_one_may_be_left_out():
    x = tiny.points()[0]
    network = Made(lambda net, x: net.head(x).squeeze(1), head=linear(4, 1))
    found = last_layer(network, x)
    with record_calls(found) as seen:
        outputs = network(x)
    assert outputs.shape == (12,)
    check_outputs(found, seen[-1][1], outputs)
    with pytest.raises(ValueError, match="expected a network that returns the outputs of its last layer 'head'"):
        check_outputs(found, seen[-1][1], outputs + 1)


class Vision(nn.Module):
    """A vision transformer from outside, as timm writes one: class token and positions are the root's, the head is its last."""

    def __init__(self):
        super().__init__()
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 3, 4))
        self.patch_embed, self.norm, self.head = nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward_features(self, x):  # (B, 4): two patches of two
        tokens = self.patch_embed(x.reshape(len(x), 2, 2))
        return self.norm(torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1) + self.pos_embed)

    def forward_head(self, tokens):
        return self.head(tokens[:, 0])

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


class Scaled(Vision):
    def forward(self, x):
        return super().forward(x) * self.cls_token[0, :, :3]


def test_a_module_with_weights_around_the_last_layer_is_not_taken_for_it():
    torch.manual_seed(0)
    x, y = tiny.points()
    assert last_layer(Vision().double(), x).name == "head"
    assert last_layer(nn.Sequential(Vision()).double(), x).name == "0.head"
    assert ds.Laplace(Vision().double(), samples=3).fit_posthoc([(x, y)]).sampled_names() == [
        "head.weight",
        "head.bias",
    ]
    with pytest.raises(
        ValueError, match="expected a network that returns the outputs of its last layer 'head', got others"
    ):
        ds.Laplace(Scaled().double(), samples=3).fit_posthoc([(x, y)])


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Tanh()), "no layer with weights called"),
        (lambda: Made(lambda net, x: x @ net.head.weight.T, head=linear()), "no layer with weights called"),
        (lambda: nn.Sequential(linear(4, 4), nn.Bilinear(4, 4, 3)), "Bilinear"),
        (lambda: Made(lambda net, x: net.a(net.a(x)), a=linear(4, 4)), "'a' called 2 times"),
    ],
)
def test_a_network_without_a_linear_layer_at_its_end_is_a_clear_error(network, words):
    network = network().double()
    if isinstance(network, nn.Sequential) and isinstance(network[-1], nn.Bilinear):
        network = Made(lambda net, x: net.last(net.first(x), x), first=network[0], last=network[1])
    refuses(lambda: last_layer(network, tiny.points()[0]), rf"expected .*{words}")


def test_a_convolution_is_a_linear_layer_where_it_sees_single_points():
    x = torch.randn(2, 2, 5, 6)
    assert last_layer(tiny.segmenter(), x).name == "2"
    for options in ({"kernel_size": 3}, {"kernel_size": 1, "stride": 2}, {"kernel_size": 1, "padding": 1}):
        with pytest.raises(ValueError, match=r"'0', a Conv2d.*; put an nn.Linear or a 1×1 convolution last"):
            last_layer(nn.Sequential(nn.Conv2d(2, 3, **options)), x)
    refuses(lambda: last_layer(nn.Sequential(nn.Conv2d(2, 4, 1, groups=2)), x), "1×1 convolution")


def test_a_layer_may_be_named_and_a_wrong_name_is_a_clear_error():
    x = tiny.points()[0]
    network = Made(lambda net, x: net.head(torch.tanh(net.body(x))), body=linear(4, 6), head=linear(6), unused=linear())
    assert last_layer(network, x, "head").name == "head"
    refuses(lambda: last_layer(network, x, "fc"), r"expected layer of body, head, unused, got 'fc'")
    refuses(lambda: last_layer(network, x, "unused"), "'unused' never called")


def test_a_layer_that_does_something_else_with_its_weights_is_refused():
    class Cosine(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(nn.functional.normalize(x), nn.functional.normalize(self.weight))

    with pytest.raises(ValueError, match=r"put an nn.Linear or a 1×1 convolution last"):
        last_layer(nn.Sequential(Cosine(4, 3).double()), tiny.points()[0])


def test_weights_that_are_tied_or_parametrised_are_refused():
    x = tiny.points()[0]
    network = nn.Sequential(linear(4, 4), nn.Tanh(), linear(4, 4))
    network[2].weight = network[0].weight
    refuses(lambda: last_layer(network, x), r"'2' tied to 0\.weight; untie them")
    network = nn.Sequential(nn.utils.parametrizations.weight_norm(linear()))
    refuses(lambda: last_layer(network, x), r"'0' with parametrised weights; remove")


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 3), nn.Linear(4, 3, bias=False), nn.Conv2d(4, 3, 1), nn.Conv1d(4, 3, 1)]
)
def test_weights_and_biases_are_one_matrix_and_back(layer):
    last = LastLayer("a.b", layer, {f"a.b.{name}": p for name, p in layer.named_parameters()})
    matrix = last.matrix(last.parameters).detach()
    assert matrix.shape == (3, 4 if layer.bias is None else 5)
    assert matrix.dtype == torch.float64
    back = last.tensors(torch.stack([matrix, 2 * matrix]))
    for name, parameter in last.parameters.items():
        assert torch.equal(back[name], torch.stack([parameter, 2 * parameter]))
        assert back[name].is_contiguous()
        assert back[name].dtype == parameter.dtype
    assert torch.equal(last.matrix(back), torch.stack([matrix, 2 * matrix]))

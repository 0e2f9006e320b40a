"""Embedded ensembles of networks whose forward does more than call each layer once, in the order of registration."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
import tiny
from dissensus import theory
from dissensus.layers.conversion import ConvertedLayer

AROUND = ds.Modulation.normal(1.0, 0.5)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)


class Past(Chain):
    """Reads b's tensors, and calls it never."""

    def forward(self, x):
        return self.c(torch.tanh(F.linear(torch.tanh(self.a(x)), self.b.weight, self.b.bias)))


class Normalised(Chain):
    """Calls c never, and computes something of its weight."""

    def forward(self, x):
        return F.linear(torch.tanh(self.b(torch.tanh(self.a(x)))), F.normalize(self.c.weight))


class Both(Chain):
    """Calls b, and reads its weight."""

    def forward(self, x):
        hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.c(hidden + hidden @ self.b.weight.T)


class Named(Chain):
    """Calls b, and reads its weight by name."""

    def forward(self, x):
        hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.c(hidden * dict(self.named_parameters())["b.weight"].norm())


class Dtype(Chain):
    """Asks for a weight's dtype alone, and computes something of a parameter that is no layer's."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.scale.exp() * self.c(torch.tanh(self.b(torch.tanh(self.a(x.to(self.a.weight.dtype))))))


class Unused(Chain):
    """Has a layer behind the last one, which is not called."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(5, 3)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Again(nn.Module):
    """Ends with the layer that it begins with."""

    def __init__(self):
        super().__init__()
        self.ends, self.middle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.ends(torch.tanh(self.middle(torch.tanh(self.ends(x)))))


class Heads(nn.Module):
    """Two heads side by side, and a third whose outputs are dropped."""

    def __init__(self):
        super().__init__()
        self.body, self.mean, self.variance, self.aside = (nn.Linear(4, n) for n in (4, 1, 2, 2))

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        found = torch.cat([self.mean(hidden), F.softplus(self.variance(hidden))], 1)
        self.aside(hidden)
        return found


class Residual(Chain):
    """Every layer reaches the outputs, the last one alone goes nowhere else."""

    def forward(self, x):
        hidden = self.a(x)
        hidden = hidden + self.b(torch.tanh(hidden))
        return hidden[:, :3] + self.c(torch.tanh(hidden))


def embedded(net, kind=ds.BatchEnsemble, **keywords):
    torch.manual_seed(0)
    keywords |= {"modulation": AROUND} if kind is ds.BatchEnsemble else {"rate": 0.5}
    return kind(net().double(), members=3, **keywords).eval()


@pytest.mark.parametrize("kind", [ds.BatchEnsemble, ds.DropoutEnsemble])
@pytest.mark.parametrize("net", [Past, Normalised, Both, Named, Dtype, Unused, Again, Heads, Residual])
def test_members_are_what_the_ensemble_computes_whatever_the_forward_reads(net, kind):
    posterior, (x, _) = embedded(net, kind), tiny.points()
    outputs = posterior(x)
    for m in range(3):
        torch.testing.assert_close(posterior.member(m)(x), outputs[m], rtol=0, atol=1e-12)


def test_a_layer_stays_cut_only_where_its_weight_is_used_past_it():
    cut = {
        net: [name for name, part in embedded(net).member(0).named_modules() if isinstance(part, ConvertedLayer)]
        for net in (Past, Normalised, Both, Named, Dtype, Unused, Again)
    }
    assert cut == {Past: ["b"], Normalised: ["c"], Both: ["b"], Named: ["b"], Dtype: [], Unused: [], Again: []}
    posterior = embedded(Both)
    assert "its weight is read directly" in posterior.account.converted["b"]
    assert not any(isinstance(part, ConvertedLayer) for part in posterior.plain_network().modules())


@pytest.mark.parametrize(
    ("net", "last", "others"),
    [
        (Past, "c", "ab"),
        (Unused, "c", ["a", "b", "spare"]),
        (Again, "ends", ["middle"]),
        (Residual, "c", "ab"),
        (Heads, ("mean", "variance"), ["body", "aside"]),
    ],
)
def test_biases_that_are_own_and_the_s_that_the_talk_lacks_are_those_of_output_layers(net, last, others):
    posterior = embedded(net, form="talk")
    own = posterior.particles.own_parameters()
    assert {name for name in own if name.endswith(".bias")} == {
        f"network.{each}.bias" for each in ([last] if isinstance(last, str) else last)
    }
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
    assert set(embedded(Dtype, form="talk", layers=["b"]).modulations) == {"b.r", "b.s"}
    assert set(embedded(Dtype, form="talk", layers=["a", "b"]).modulations) == {"a.s", "b.r", "b.s"}


def test_a_layer_that_is_not_called_is_no_link_of_the_wide_limits_chain():
    def correlation(net):
        posterior = embedded(net)
        generator = torch.Generator().manual_seed(0)
        for _, factor in sorted(posterior.modulations.items()):
            factor.data = torch.randn(factor.shape, generator=generator, dtype=torch.float64) + 1
        return theory.regime(posterior).correlation

    assert correlation(Unused) == pytest.approx(correlation(Dtype), abs=1e-12)


def test_heads_side_by_side_are_one_link_of_the_wide_limits_chain():
    class Several(Chain):
        def forward(self, x):
            hidden = torch.relu(self.a(x))
            return self.b(hidden)[:, :3] + self.c(hidden)

    class One(Chain):
        def forward(self, x):
            return self.c(torch.relu(self.a(x)))

    found = []
    for net in (Several, One):
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


@pytest.mark.parametrize("net", [Past, Normalised, Both, Dtype])
def test_draws_of_a_node_bnn_are_networks_that_compute_the_same_whatever_the_forward_reads(net):
    torch.manual_seed(0)
    posterior, (x, _) = ds.NodeBNN(net().double(), data_size=12).eval(), tiny.points()
    drawn = posterior.draw()
    outputs = drawn(x)
    for m in range(2):
        torch.testing.assert_close(drawn.member(m)(x), outputs[m], rtol=0, atol=1e-12)

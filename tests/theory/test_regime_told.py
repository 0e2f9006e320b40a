"""What `theory.regime` says of ensembles cut in part, near the line and of trained weights: told rightly, or not told."""

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import Modulation, theory
from dissensus.layers.call_order import trace_calls
from dissensus.theory.regime import regime_kind, unavoidable_layers
from thinning import often

SIGNS, AROUND = Modulation.sign(), Modulation.normal(1, 0.5)


def unbiased(net):
    for layer in net.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.bias = None
    return net.double()


def mlp(**keywords):
    return unbiased(ds.nets.MLP(20, 10, **{"hidden": (128, 128), **keywords}))


def cnn(*pool):
    width = 48 * (1 if pool else 16)
    first = [nn.Conv2d(3, 48, 3), nn.ReLU(), nn.Conv2d(48, 48, 3), nn.ReLU()]
    return unbiased(nn.Sequential(*first, *pool, nn.Flatten(), nn.Linear(width, 10)))


def images(n=8):
    return torch.randn(n, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def vectors(n=16):
    return torch.randn(n, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def drawn_correlation(net, x, draws, **keywords):
    """(E f_α f_β/E f_α² over networks drawn at random, its standard error)."""
    across, within = torch.zeros(2, draws, dtype=torch.float64)
    for i in range(draws):
        torch.manual_seed(i)
        posterior = ds.BatchEnsemble(net(), members=4, **keywords)
        with torch.no_grad():
            f = posterior.particles.map_members(lambda member: member.network(x)).flatten(1)
        within[i] = f.square().sum()
        across[i] = (f.sum(0).square().sum() - within[i]) / 3
    ratio = float(across.mean() / within.mean())
    return ratio, float((across - ratio * within).std() / within.mean()) / draws**0.5


@pytest.mark.parametrize(
    ("net", "x", "layers", "expected"),
    [
        pytest.param(mlp, vectors(), ["layers.0", "layers.2"], 0.318, marks=pytest.mark.slow),
        pytest.param(mlp, vectors(), ["layers.0"], 0.494, marks=pytest.mark.slow),
        (mlp, vectors(), ["layers.4"], 0.0),
        (cnn, images(), ["0", "2"], 0.318),
    ],
    ids=["not the last", "the first", "the last", "convolutions"],
)
def test_layers_that_are_not_cut_count_with_factors_of_one(net, x, layers, expected):
    torch.manual_seed(0)
    told = theory.regime(ds.BatchEnsemble(net(), members=4, modulation=SIGNS, layers=layers)).correlation
    found, error = drawn_correlation(net, x, 60, modulation=SIGNS, layers=layers)
    assert told == pytest.approx(expected, abs=0.02)
    assert told == pytest.approx(found, abs=4 * error)
    assert error < 0.03


def test_a_chain_that_is_cut_in_part_is_that_of_the_analytic_kernels():
    x = torch.ones(1, 4, dtype=torch.float64)
    exact = theory.embedded_kernels(
        x,
        depth=2,
        activation="relu",
        u=Modulation.constant(1.0),
        v=[Modulation.constant(1.0), SIGNS],
        weight_variance=2.0,
    )
    posterior = ds.BatchEnsemble(mlp(), members=2, modulation=SIGNS, layers=["layers.2"])
    posterior.modulations["layers.2.r"].data.fill_(1.0)
    all_pairs = torch.tensor([[1.0, 1, -1, -1], [1, -1, 1, -1]], dtype=torch.float64)
    posterior.modulations["layers.2.s"].data = all_pairs.repeat(1, 32)
    found = theory.regime(posterior)
    assert found.correlation == pytest.approx(float(exact.gp_cross / exact.gp_same), abs=1e-12)
    assert found.overlap == pytest.approx(float(exact.common_cross / exact.common_same), abs=1e-12)


class Added(nn.Module):
    """x + branch(x) around the last layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x):
        hidden = torch.relu(self.a(x))
        return hidden + self.b(hidden)


class Sized(Added):
    """Asks for values: cannot be followed."""

    def forward(self, x):
        hidden = torch.relu(self.a(x))
        return self.b(hidden) if hidden.sum() > 0 else hidden


@pytest.mark.parametrize(
    ("net", "keywords"),
    [
        (lambda: cnn(nn.AdaptiveAvgPool2d(1)), {"modulation": SIGNS, "layers": ["0", "2"]}),
        (lambda: ds.nets.ConvNet(3, 10, size=8), {"modulation": SIGNS, "layers": ["features.*"]}),
        (lambda: mlp(activation="tanh"), {"modulation": AROUND}),
        (Added, {"modulation": SIGNS}),
        (Sized, {"modulation": SIGNS}),
        (lambda: nn.TransformerEncoderLayer(20, 2, 16), {"modulation": SIGNS}),
    ],
    ids=["pooled", "written forward", "tanh", "residual", "not followed", "attention"],
)
def test_what_no_chain_describes_is_not_told(net, keywords):
    found = theory.regime(ds.BatchEnsemble(net(), members=4, **keywords))
    assert (found.kind, found.correlation, found.overlap, found.effective_members) == (None,) * 4
    assert "of unknown regime" in str(found)
    assert found.advice == ""


def test_pooled_members_with_signs_on_features_are_indeed_nearer_than_a_chain_would_have_it():
    found, error = drawn_correlation(
        lambda: cnn(nn.AdaptiveAvgPool2d(1)), images(), 40, modulation=SIGNS, layers=["0", "2"]
    )
    assert found - 4 * error > 0.318


@pytest.mark.parametrize(
    "net",
    often([lambda: ds.nets.ConvNet(3, 10, width=64), lambda: mlp(activation="tanh")], [lambda: ds.nets.ResNet(18)]),
)
def test_signs_on_the_last_layer_make_any_wide_network_independent(net):
    found = theory.regime(ds.BatchEnsemble(net(), members=4, modulation=SIGNS))
    assert found.kind == "independent"
    assert found.correlation == pytest.approx(0, abs=0.1)


def all_pass(network, layers):
    return unavoidable_layers(network, layers, trace_calls(network, layers))


def test_layers_beside_another_way_are_none_that_all_pass():
    beside = nn.Sequential(nn.Linear(4, 4), ds.nets.Residual(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert all_pass(beside, ["0", "1.branch", "2"]) == {"0", "2"}
    assert all_pass(Added(), ["a", "b"]) == {"a"}
    assert all_pass(nn.Linear(2, 2), [""]) == {""}


@pytest.mark.parametrize(
    ("overlap", "correlation", "bound", "kind"),
    [
        (0.1, 0.1, 0.9, "independent"),
        (0.1, 0.1, 1.1, "between"),
        (0.1, 0.4, 0.0, "between"),
        (0.1, 0.2, 0.0, "between"),
        (0.1, None, 0.0, "independent"),
        (0.3, 0.1, 0.0, "between"),
        (0.7, 0.1, 0.0, "collective"),
        (None, 0.1, 0.0, None),
    ],
)
def test_the_line_is_as_documented(overlap, correlation, bound, kind):
    assert regime_kind(4, overlap, correlation, bound) == kind


@pytest.mark.parametrize("members", often([16], [2, 4, 8]))
@pytest.mark.parametrize(
    "law",
    often([SIGNS, AROUND, Modulation.between(0.3)], [Modulation.between(0.58), Modulation.normal(1, 0.1)]),
)
def test_nothing_is_advised_against_what_auto_took(law, members):
    for seed in range(2):
        torch.manual_seed(seed)
        posterior = ds.BatchEnsemble(mlp(), members=members, modulation=law)
        for x in (None, vectors(4)):
            found = theory.regime(posterior, x)
            assert found.advice.startswith("members crowd") if found.crowded else found.advice == ""
            assert found.crowded <= (law is SIGNS and members == 16)
            assert not (found.kind == "independent" and posterior.gamma == 1)
            assert not (found.kind == "collective" and posterior.gamma > 1)


def test_factors_around_one_are_not_called_independent_though_they_overlap_little():
    torch.manual_seed(0)
    few = ds.BatchEnsemble(mlp(), members=2, modulation=AROUND)
    assert theory.regime(few).kind == "between"
    assert theory.regime(few).correlation > 0.25


@pytest.mark.parametrize("rate", often([0.7], [0.9]))
def test_masks_are_never_called_independent_nor_advised_to_be(rate):
    torch.manual_seed(0)
    for members in (2, 8):
        posterior = ds.DropoutEnsemble(cnn(), members=members, rate=rate)
        for x in (None, images(4)):
            found = theory.regime(posterior, x)
            assert found.kind == "between"
            assert found.advice == ""


def test_advice_is_not_what_is_done_already():
    partly = ds.BatchEnsemble(mlp(), members=16, modulation=SIGNS, layers=["layers.0"])
    narrow = ds.BatchEnsemble(mlp(hidden=(4, 4)), members=64, modulation=SIGNS)
    masks = ds.DropoutEnsemble(mlp(), members=16, rate=0.1, regime="independent")
    around = ds.BatchEnsemble(mlp(), members=16, modulation=Modulation.normal(1, 0.1), regime="independent")
    assert "layers=" in theory.regime(partly).advice
    assert "a larger rate" in theory.regime(masks).advice
    assert "Modulation.sign()" in theory.regime(around).advice
    for posterior in (partly, narrow, masks):
        for x in (None, vectors(4)):
            assert "sign" not in theory.regime(posterior, x).advice


def test_the_correlation_of_the_members_at_hand_stands_beside_that_of_random_weights():
    torch.manual_seed(0)
    net, x = mlp(), vectors()
    for layer in net.layers[::2]:
        layer.weight.data.abs_()  # weights that no draw at random has: all functions are near one direction
    posterior = ds.BatchEnsemble(net, members=4, modulation=AROUND)
    found = theory.regime(posterior, x)
    with torch.no_grad():
        f = torch.stack([posterior.member(m)(x).flatten() for m in range(4)])
    gram = f @ f.T
    expected = (gram.sum() - gram.trace()) / (3 * gram.trace())
    assert found.measured_correlation == pytest.approx(float(expected), abs=1e-10)
    assert found.correlation < 0.5 < found.measured_correlation
    assert f"{found.correlation:.2f} predicted for random weights without biases" in str(found)
    assert f"{found.measured_correlation:.2f} measured for these members" in str(found)
    assert theory.regime(posterior).measured_correlation is None


def test_a_correlation_of_nothing_has_no_sign():
    said = str(theory.Regime(4, 4.0, "independent", -0.001, -0.002, True, None, -0.003))
    assert "-0.00" not in said
    assert "correlation 0.00 predicted" in said


def test_factors_of_zero_have_no_correlation_and_one_member_is_one_network():
    nothing = ds.BatchEnsemble(mlp(), members=4, modulation=SIGNS)
    for factors in nothing.modulations.values():
        factors.data.zero_()
    for found in (theory.regime(nothing), theory.regime(nothing, vectors(3))):
        assert (found.kind, found.correlation, found.measured_correlation) == (None, None, None)
    assert found.rate == float("inf")
    assert (
        str(theory.regime(ds.BatchEnsemble(mlp(), members=1, modulation=SIGNS))) == "1 member with γ = 1 is one network"
    )

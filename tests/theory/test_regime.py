"""The regime of an embedded ensemble: what its modulations foretell, told rightly or not, and the largest stable rate."""

import copy
import math

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus import Modulation, theory
from dissensus.layers.call_order import trace_calls
from dissensus.theory.regime import regime_kind, unavoidable_layers, wide_limit
from refusals import refuses
from thinning import often

LAWS = {"sign": Modulation.sign(), "normal": Modulation.normal(1, 0.5), "p": Modulation.between(0.3)}


def ensemble(
    modulation=LAWS["sign"], *, width=512, members=8, outputs=1, likelihood=None, seed=0, hidden=2, **keywords
):
    torch.manual_seed(seed)
    net = ds.nets.MLP(10, outputs, hidden=(width,) * hidden, parameterization="ntk").double()
    keywords = {"form": "talk", "likelihood": likelihood or ds.Regression(1.0)} | keywords
    return ds.BatchEnsemble(net, members=members, modulation=modulation, **keywords)


def inputs(n=16, seed=1):
    return torch.randn(n, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_kernel(posterior, x):
    """(M·B·O, M·B·O) (γ/M) Θ^com + Θ^ind, and the blocks."""
    particles = posterior.particles
    own = {n: p for n, p in particles.own_parameters().items() if n.startswith("network.")}

    def outputs(params, some):
        return particles.call(lambda member: member.network(some), params, {})[0]

    blocks = theory.ensemble_blocks(outputs, particles.shared_parameters(), own, x)
    return blocks.total(posterior.gamma), blocks


@pytest.mark.parametrize(("regime", "noise"), [("independent", 1.0), ("collective", 0.3)])
def test_the_rate_is_that_of_the_whole_kernels_largest_eigenvalue(regime, noise):
    law, x = ds.Regression(noise), inputs(5)
    posterior = ensemble(LAWS["normal"], width=24, members=3, outputs=2, regime=regime, likelihood=law)
    theta, blocks = whole_kernel(posterior.double(), x)
    found = theory.regime(posterior, x)
    expected = 2 * 5 * noise**2 / float(torch.linalg.eigvalsh(theta)[-1])
    assert found.rate == pytest.approx(expected, rel=1e-3)
    same, cross = (torch.einsum("nnoo->", each) for each in (blocks.same, blocks.cross))
    assert found.overlap == pytest.approx(float(cross / same), abs=0.15)  # eight random probes


def test_the_rate_of_classification_is_safe_for_the_softmax():
    posterior, x = ensemble(width=24, members=3, outputs=3, likelihood=ds.Classification()), inputs(5)
    largest = float(torch.linalg.eigvalsh(whole_kernel(posterior, x)[0])[-1])
    assert theory.regime(posterior, x).rate == pytest.approx(2 * 5 / (largest / 2), rel=1e-3)


def test_a_rate_of_the_modulations_own_is_taken_as_it_is():
    """λ_max((γ/M) lr Θ_w + lr Θ_bias + μ Θ_u) = 2B at the rate found; 0 where μ alone is too much."""
    x, mu = inputs(5), 0.05
    free = ensemble(LAWS["normal"], width=24, members=3, modulation_lr=0.0)
    fixed = ensemble(LAWS["normal"], width=24, members=3, modulation_lr=mu)
    rate, largest = theory.regime(fixed, x).rate, theory.regime(free, x).rate
    assert 0 < rate < largest
    fixed.modulation_lr = None
    theta = whole_kernel(fixed, x)[0] * rate
    for parameter in fixed.modulations.values():
        parameter.requires_grad_(False)
    fixed.modulation_lr = 0.0
    assert theory.regime(fixed, x).rate == pytest.approx(largest, rel=1e-3)
    # the kernel of modulations counts μ/lr times: move it from lr to μ
    own = {n: p for n, p in fixed.particles.own_parameters().items() if n.removeprefix("network.") in fixed.modulations}
    rest = {n: p[0] for n, p in fixed.particles.own_parameters().items() if n not in own and n.startswith("network.")}
    shared = fixed.particles.shared_parameters()

    def outputs(params, some):
        return fixed.particles.call(lambda member: member.network(some), {**rest, **params}, {})[0]

    individual = theory.ensemble_blocks(outputs, shared, own, x).individual  # (M, N, N, 1, 1)
    theta = theta + (mu - rate) * torch.block_diag(*individual[..., 0, 0])
    assert float(torch.linalg.eigvalsh(theta)[-1]) == pytest.approx(2 * 5, rel=5e-3)
    assert theory.regime(ensemble(LAWS["normal"], width=24, members=3, modulation_lr=1e3), x).rate == 0


@pytest.mark.parametrize("law", often(["sign"], ["normal", "p"]))
def test_descent_below_the_rate_never_climbs_and_at_three_times_it_diverges(law):
    posterior, x = ensemble(LAWS[law], width=128, members=4), inputs()
    y = torch.randn(16, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rate, start = theory.regime(posterior, x).rate, copy.deepcopy(posterior.state_dict())

    stable = descent(posterior, x, y, 0.8 * rate, 20)
    posterior.load_state_dict(start)
    unstable = descent(posterior, x, y, 3.0 * rate, 12)  # the steepest direction grows fivefold in a step
    assert max(stable) == stable[0]
    assert not unstable[-1] < 1e3 * unstable[0]


@pytest.mark.slow
def test_members_with_signs_reach_the_loss_of_independent_networks_in_about_their_steps():
    """N = 32 M, both at 0.9 of their rates; benchmarks/embedded_descent.py has more of it."""
    x, members, reference = inputs(), 4, 24
    y = torch.sin(x.sum(1, keepdim=True))
    alone = [ensemble(width=128, members=1, seed=seed) for seed in range(1, 1 + members)]
    rate = 0.9 * min(theory.regime(each, x).rate for each in alone)
    wanted = sum(descent(each, x, y, rate, reference)[-1] for each in alone)
    together = ensemble(width=128, members=members)
    losses = descent(together, x, y, 0.9 * theory.regime(together, x).rate, int(1.5 * reference))
    assert min(losses) <= wanted


def descent(posterior, x, y, rate, steps):
    """Sums of members' losses before each step and after the last."""
    optimizer = torch.optim.SGD(posterior.parameter_groups(rate), lr=rate)
    found = []
    for _ in range(steps + 1):
        optimizer.zero_grad()
        found.append(float(posterior.backward(x, y).sum()))
        optimizer.step()
    return found


@pytest.mark.parametrize(
    ("u", "depth"),
    [(Modulation.normal(0.6, 0.8), 1), (Modulation.normal(0.6, 0.8), 3), (LAWS["normal"], 2), (LAWS["p"], 2)],
)
def test_the_wide_limit_from_drawn_modulations_is_that_of_the_analytic_kernels(u, depth):
    """The moments of 2 × 100,000 factors differ from the law's by some per mille."""
    torch.manual_seed(0)
    posterior = ds.BatchEnsemble(
        nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(2, 2), nn.ReLU())], nn.Linear(2, 1)),
        members=2, modulation=u, form="talk", likelihood=ds.Regression(1.0),
    )  # fmt: skip
    wide = {name: u.sample((2, 100_000), dtype=torch.float64) for name in posterior.modulations}
    x = torch.ones(1, 4, dtype=torch.float64)
    exact = theory.embedded_kernels(x, depth=depth, activation="relu", u=u, v=u, weight_variance=2.0)
    correlation, overlap = wide_limit(posterior, wide)
    assert correlation == pytest.approx(float(exact.gp_cross / exact.gp_same), abs=0.01)
    assert overlap == pytest.approx(float(exact.common_cross / exact.common_same), abs=0.01)


def test_signs_are_independent_and_factors_around_one_are_collective():
    independent, collective = theory.regime(ensemble()), theory.regime(ensemble(LAWS["normal"]))
    assert (independent.kind, collective.kind) == ("independent", "collective")
    assert abs(independent.correlation) < 0.02
    assert collective.correlation > 0.4
    assert independent.effective_members > 7
    assert independent.rate is None
    assert "8 with γ = 8  independent" in str(independent).splitlines()[0]
    assert "wide limit" in str(collective)


def test_a_gamma_that_does_not_suit_the_modulations_is_said():
    assert 'regime="collective"' in str(theory.regime(ensemble(LAWS["normal"], regime="independent", width=64)))
    assert 'regime="independent"' in str(theory.regime(ensemble(regime="collective", width=128)))
    assert theory.regime(ensemble(width=128)).advice == ""
    crowded = theory.regime(ensemble(width=64))
    assert (crowded.kind, crowded.crowding) == ("between", 7 / 64)
    told = "members crowd ((M − 1)/N = 0.11 in the narrowest layer, more than 0.075); pass fewer, or widen it"
    assert told in str(crowded)


def test_equal_members_have_correlation_one_and_one_member_is_no_ensemble():
    equal = theory.regime(ensemble(Modulation.constant(1.0), width=16, members=4), inputs(3))
    assert equal.correlation == pytest.approx(1)
    assert equal.overlap == pytest.approx(1)
    assert equal.effective_members == pytest.approx(1)
    assert theory.regime(ensemble(width=16, members=1), inputs(3)).kind == "independent"


def test_behind_an_own_batch_norm_only_the_sign_of_s_acts():
    def correlation(batch_norm):
        torch.manual_seed(0)
        net = ds.nets.MLP(10, 3, hidden=(256,), batch_norm=batch_norm)
        posterior = ds.BatchEnsemble(net, members=4, modulation=Modulation.normal(1, 0.3), form="talk")
        for name, factor in posterior.modulations.items():
            if name.endswith(".r"):
                factor.data.fill_(1.0)
        return theory.regime(posterior).correlation

    assert correlation(True) == pytest.approx(1, abs=1e-2)
    assert correlation(False) < 0.95


@pytest.mark.parametrize(("net", "x"), [
    (tiny.mlp, torch.randn(12, 4)),
    (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)), torch.randn(6, 2, 5, 5)),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True), torch.randn(4, 3, 8)),
], ids=["batch norm", "conv", "attention"])  # fmt: skip
def test_any_network_is_measured_and_left_as_it_was(net, x):
    posterior = ds.BatchEnsemble(net(), members=4, modulation=Modulation.sign())
    before, modes = tiny.state(posterior), [part.training for part in posterior.particles.template.modules()]
    first, again = theory.regime(posterior, x), theory.regime(posterior, x)
    assert first == again
    assert first.rate > 0
    assert tiny.largest_difference(before, tiny.state(posterior)) == 0
    assert modes == [part.training for part in posterior.particles.template.modules()]


def test_masks_are_always_a_collective():
    posterior = ds.DropoutEnsemble(ds.nets.MLP(10, 3, hidden=(64, 64)), members=8, rate=0.2)
    found = theory.regime(posterior, inputs().float())
    assert found.kind == "collective"
    assert found.advice == ""


def test_a_frozen_batch_norm_is_measured_with_the_statistics_that_it_trains_with():
    def rate(frozen):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).double()
        net[1].running_var.fill_(4.0)
        net[1].weight.data.fill_(2.0)
        net[1].bias.data.fill_(0.3)
        if frozen:
            net[1].requires_grad_(False)
        else:
            net[1] = fixed(net[1])
        posterior = ds.BatchEnsemble(net, members=3, modulation=LAWS["normal"], likelihood=ds.Regression(1.0))
        found = theory.regime(posterior, inputs(5))
        return found.rate, found.correlation

    def fixed(norm):
        """The same in eval mode, written out."""
        scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
        shift = norm.bias.detach() - norm.running_mean * scale
        return tiny.Network(lambda self, x: x * self.scale + self.shift, scale=scale, shift=shift)

    assert rate(frozen=True) == pytest.approx(rate(frozen=False), rel=1e-3)


def test_the_rate_of_outputs_that_give_a_variance_follows_it():
    """Every variance at a tenth: the mean's curvature is ten times as large, beside it that of the raw variances is known."""
    law, x, raw = ds.HeteroscedasticRegression(), inputs(5), -2.2522
    net = ds.nets.MLP(10, 2, hidden=(8,)).double()
    net.layers[-1].weight.data[1], net.layers[-1].bias.data[1] = 0.0, raw
    posterior = ds.BatchEnsemble(net, members=2, modulation=Modulation.constant(1.0), likelihood=law)
    largest = float(torch.linalg.eigvalsh(whole_kernel(posterior, x)[0])[-1])
    outputs = torch.stack([torch.zeros(5), torch.full((5,), raw)], 1).double()
    targets = torch.distributions.Normal(0.0, 0.1**0.5).icdf((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000)

    def mean_loss(one):  # over targets as the outputs predict them
        return -law.log_prob(one.expand(len(targets), 2), targets[:, None]).mean()

    hessian = torch.autograd.functional.hessian(mean_loss, outputs[:1])[0, :, 0]
    expected = 2 * 5 / (float(torch.linalg.eigvalsh(hessian)[-1]) * largest)
    assert theory.regime(posterior, x).rate == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_rate_of_counts_follows_their_largest_rate(outputs):
    """Poisson's Hessian is exp(f)."""
    posterior, x = ensemble(LAWS["normal"], width=8, members=3, outputs=outputs, likelihood=tiny.Poisson()), inputs(5)
    found = theory.regime(posterior, x, torch.ones(5, outputs)).rate
    sharpest = float(posterior(x).detach().exp().max())
    largest = float(torch.linalg.eigvalsh(whole_kernel(posterior, x)[0])[-1])
    assert found == pytest.approx(2 * 5 / (sharpest * largest), rel=1e-3)


def test_the_member_with_the_smallest_noise_bounds_the_rate():
    laws = ds.Regression(0.5), ds.Regression("learned")
    fixed, learned = (ensemble(width=8, members=3, likelihood=law).double() for law in laws)
    learned.particles.own_parameters()["likelihood.log_noise"].data.copy_(torch.tensor([2.0, 0.5, 1.0]).log())
    assert theory.regime(learned, inputs(5)).rate == pytest.approx(theory.regime(fixed, inputs(5)).rate, rel=1e-6)


def test_a_likelihood_without_a_closed_curvature_has_a_rate_with_targets():
    class Doubled(ds.Regression):
        def log_prob(self, outputs, y):
            return 2 * super().log_prob(outputs, y)

    class Closed(tiny.Poisson):
        def curvature(self, outputs, y=None):
            return outputs.exp(), None

    def found(likelihood, *y):
        return theory.regime(ensemble(width=8, members=2, likelihood=likelihood), inputs(5), *y)

    y = torch.ones(5, 1)
    assert found(Doubled(1.0), y).rate == pytest.approx(found(ds.Regression(1.0)).rate / 2, rel=1e-9)
    assert found(Doubled(1.0)).rate is None
    assert found(Doubled(1.0)).measured
    assert found(Closed()).rate == pytest.approx(found(tiny.Poisson(), y).rate, rel=1e-9)
    refuses(lambda: found(Doubled(1.0), y[:, 0]), r"expected targets of shape \(5, 1\), got \(5,\)")


def test_the_rate_at_positions_is_that_of_the_mean_over_them():
    x, y = torch.randn(3, 2, 4, 5, dtype=torch.float64), torch.randint(3, (3, 4, 5))

    def posterior(likelihood):
        torch.manual_seed(0)
        keywords = {"members": 2, "modulation": LAWS["sign"], "likelihood": likelihood}
        return ds.BatchEnsemble(tiny.segmenter().double(), **keywords).double()

    bound, own = posterior(ds.Classification()), posterior(tiny.Sharper())
    p = (3 * own(x).detach()).softmax(2).movedim(2, -1)  # (M, B, H, W, C)
    largest = 9 * float(torch.linalg.eigvalsh(torch.diag_embed(p) - p[..., :, None] * p[..., None, :]).max())
    expected = theory.regime(bound, x).rate * 0.5 / largest
    assert theory.regime(own, x, y).rate == pytest.approx(expected, rel=1e-6)


def test_a_likelihood_that_curves_nowhere_is_stable_at_any_rate():
    class Linear(tiny.Poisson):
        def log_prob(self, outputs, y):
            return (y * outputs).sum(1)

    flat = ensemble(width=8, members=2, likelihood=Linear())
    assert theory.regime(flat, inputs(5), torch.ones(5, 1)).rate == math.inf


@pytest.mark.parametrize("measure", [theory.regime, theory.posterior_blocks])
def test_inputs_that_are_empty_or_not_finite_are_refused(measure):
    refuses(lambda: theory.regime(ds.MAP(tiny.mlp())), "expected an embedded ensemble, got MAP", TypeError)
    posterior = ensemble(width=4, members=2)
    spoiled = inputs(3)
    spoiled[1, 2] = float("nan")
    refuses(lambda: measure(posterior, spoiled), "expected finite inputs, got NaN or infinity in row 1")
    told = r"expected .* at least one .*, got none|expected at least one input, got none"
    refuses(lambda: measure(posterior, inputs(0)), told)


def test_the_stable_rate_leaves_a_layer_under_two_names_as_it_was():
    rates, (x, _) = [], tiny.points(6)
    for twice in (False, True):
        torch.manual_seed(0)
        posterior = ds.BatchEnsemble(tiny.Named(twice=twice).double(), members=3, modulation=LAWS["sign"])
        rates.append(theory.regime(posterior, x).rate)
        posterior.member(0)
    assert rates[1] == pytest.approx(rates[0], rel=1e-9)


SIGNS, AROUND = Modulation.sign(), Modulation.normal(1, 0.5)


def unbiased(net):
    for layer in net.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.bias = None
    return net.double()


def mlp(**keywords):
    return unbiased(ds.nets.MLP(20, 10, **{"hidden": (128, 128), **keywords}))


def cnn(*pool, width=32):
    first = [nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU()]
    return unbiased(nn.Sequential(*first, *pool, nn.Flatten(), nn.Linear(width * (1 if pool else 16), 10)))


def images(n=6):
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


@pytest.mark.parametrize(("net", "x", "layers", "expected"), [
    pytest.param(mlp, vectors(), ["layers.0", "layers.2"], 0.318, marks=pytest.mark.slow),
    pytest.param(mlp, vectors(), ["layers.0"], 0.494, marks=pytest.mark.slow),
    (mlp, vectors(), ["layers.4"], 0.0),
    (cnn, images(), ["0", "2"], 0.318),
], ids=["not the last", "the first", "the last", "convolutions"])  # fmt: skip
def test_layers_that_are_not_cut_count_with_factors_of_one(net, x, layers, expected):
    torch.manual_seed(0)
    told = theory.regime(ds.BatchEnsemble(net(), members=4, modulation=SIGNS, layers=layers)).correlation
    found, error = drawn_correlation(net, x, 40, modulation=SIGNS, layers=layers)
    assert told == pytest.approx(expected, abs=0.02)
    assert told == pytest.approx(found, abs=4 * error)
    assert error < 0.04


def test_a_chain_that_is_cut_in_part_is_that_of_the_analytic_kernels():
    x = torch.ones(1, 4, dtype=torch.float64)
    exact = theory.embedded_kernels(
        x, depth=2, activation="relu", u=Modulation.constant(1.0), v=[Modulation.constant(1.0), SIGNS],
        weight_variance=2.0,
    )  # fmt: skip
    posterior = ds.BatchEnsemble(mlp(), members=2, modulation=SIGNS, layers=["layers.2"])
    posterior.modulations["layers.2.r"].data.fill_(1.0)
    all_pairs = torch.tensor([[1.0, 1, -1, -1], [1, -1, 1, -1]], dtype=torch.float64)
    posterior.modulations["layers.2.s"].data = all_pairs.repeat(1, 32)
    found = theory.regime(posterior)
    assert found.correlation == pytest.approx(float(exact.gp_cross / exact.gp_same), abs=1e-12)
    assert found.overlap == pytest.approx(float(exact.common_cross / exact.common_same), abs=1e-12)


def added(network, x):
    """x + branch(x) around the last layer."""
    hidden = torch.relu(network.a(x))
    return hidden + network.b(hidden)


def sized(network, x):
    """Asks for values: cannot be followed."""
    hidden = torch.relu(network.a(x))
    return network.b(hidden) if hidden.sum() > 0 else hidden


def two_layers(forward):
    return tiny.Network(forward, a=nn.Linear(20, 20), b=nn.Linear(20, 20))


@pytest.mark.parametrize(("net", "keywords"), [
    (lambda: cnn(nn.AdaptiveAvgPool2d(1)), {"modulation": SIGNS, "layers": ["0", "2"]}),
    (lambda: ds.nets.ConvNet(3, 10, size=8), {"modulation": SIGNS, "layers": ["features.*"]}),
    (lambda: mlp(activation="tanh"), {"modulation": AROUND}),
    (lambda: two_layers(added), {"modulation": SIGNS}),
    (lambda: two_layers(sized), {"modulation": SIGNS}),
    (lambda: nn.TransformerEncoderLayer(20, 2, 16), {"modulation": SIGNS}),
], ids=["pooled", "written forward", "tanh", "residual", "not followed", "attention"])  # fmt: skip
def test_what_no_chain_describes_is_not_told(net, keywords):
    found = theory.regime(ds.BatchEnsemble(net(), members=4, **keywords))
    assert (found.kind, found.correlation, found.overlap, found.effective_members) == (None,) * 4
    assert str(found) == f"members  4 with γ = {found.gamma:g}  regime unknown; pass inputs to measure it"
    assert found.advice == ""


@pytest.mark.slow
def test_pooled_members_with_signs_on_features_are_indeed_nearer_than_a_chain_would_have_it():
    some = {"modulation": SIGNS, "layers": ["0", "2"]}
    found, error = drawn_correlation(lambda: cnn(nn.AdaptiveAvgPool2d(1)), images(), 30, **some)
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
    assert all_pass(two_layers(added), ["a", "b"]) == {"a"}
    assert all_pass(nn.Linear(2, 2), [""]) == {""}


@pytest.mark.parametrize(("overlap", "correlation", "bound", "kind"), [
    (0.1, 0.1, 0.9, "independent"), (0.1, 0.1, 1.1, "between"), (0.1, 0.4, 0.0, "between"),
    (0.1, 0.2, 0.0, "between"), (0.1, None, 0.0, "independent"), (0.3, 0.1, 0.0, "between"),
    (0.7, 0.1, 0.0, "collective"), (None, 0.1, 0.0, None),
])  # fmt: skip
def test_the_line_is_as_documented(overlap, correlation, bound, kind):
    assert regime_kind(4, overlap, correlation, bound) == kind


@pytest.mark.parametrize("members", often([16], [2, 4, 8]))
@pytest.mark.parametrize(
    "law", often([SIGNS, AROUND, Modulation.between(0.3)], [Modulation.between(0.58), Modulation.normal(1, 0.1)])
)
def test_nothing_is_advised_against_what_auto_took(law, members):
    torch.manual_seed(0)
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
        for x in (None, images(2)):
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
    assert [line.split("  ")[0] for line in str(found).splitlines()] == [
        "members", "correlation predicted", "correlation measured", "(M − 1) kernel overlap κ", "largest stable rate"
    ]  # fmt: skip
    assert all(f"{value:.2f} " in str(found) for value in (found.correlation, found.measured_correlation))
    assert theory.regime(posterior).measured_correlation is None


def test_a_correlation_of_nothing_has_no_sign():
    said = str(theory.Regime(4, 4.0, "independent", -0.001, -0.001, True, None, -0.003))
    assert "-0.00" not in said
    assert said.count(" 0.00 ") == 3


def test_factors_of_zero_have_no_correlation_and_one_member_is_one_network():
    nothing = ds.BatchEnsemble(mlp(), members=4, modulation=SIGNS)
    for factors in nothing.modulations.values():
        factors.data.zero_()
    for found in (theory.regime(nothing), theory.regime(nothing, vectors(3))):
        assert (found.kind, found.correlation, found.measured_correlation) == (None, None, None)
    assert found.rate == float("inf")
    alone = theory.regime(ds.BatchEnsemble(mlp(), members=1, modulation=SIGNS))
    assert str(alone) == "members  1 with γ = 1  one network"

"""TRADI: the filters against a scalar recomputation in float64, the sampler against its covariance, its schedule."""

import copy
import logging
import math

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods import TRADI
from dissensus.methods.tradi import WeightFilters, kalman_step
from dissensus.training.validation import can_keep_epoch, draw_for_validation, validation_nll
from dissensus.utils.parameter_groups import plateau_linear
from refusals import refuses
from thinning import often, thinned


def gains(steps: int) -> tuple[float, float]:
    p_mean = p_variance = k_mean = k_variance = 0.0
    for _ in range(steps):
        k_mean, p_mean = kalman_step(p_mean, 1e-4, 10.0)
        k_variance, p_variance = kalman_step(p_variance, 5e-5, 10.0)
    return k_mean, k_variance


def test_the_gains_are_those_of_the_paper():
    assert gains(1) == pytest.approx((1.0e-5, 5.0e-6), rel=1e-4)
    assert gains(100) == pytest.approx((9.67e-4, 4.92e-4), rel=1e-3)
    assert gains(20_000) == pytest.approx((3.1573e-3, 2.2336e-3), rel=1e-4)
    # stationary: P⁻ = P⁻R/(P⁻ + R) + Q, so K solves K² R = Q (1 − K)
    for k, q in zip(gains(20_000), (1e-4, 5e-5), strict=True):
        assert k**2 * 10.0 == pytest.approx(q * (1 - k), rel=1e-10)


def test_the_filter_is_bayes_rule_for_a_random_walk():
    """Mean and error variance equal those of the Gaussian conditional on all measurements, by linear algebra."""
    q, r, steps = 0.3, 2.0, 6
    measured = torch.randn(steps, dtype=torch.float64)
    walk = q * torch.minimum(torch.arange(1, steps + 1)[:, None], torch.arange(1, steps + 1)[None]).double()  # x_0 = 0
    gain = torch.linalg.solve(walk + r * torch.eye(steps), walk[:, -1])
    mean, p = 0.0, 0.0
    for z in measured.tolist():
        k, p = kalman_step(p, q, r)
        mean = (1 - k) * mean + k * z
    assert mean == pytest.approx(float(gain @ measured), rel=1e-12)
    assert p == pytest.approx(float(walk[-1, -1] - gain @ walk[:, -1]), rel=1e-12)


def test_named_tensors_are_parts_of_one_block_and_stay_readable():
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    noise = {"state_noise": (0.1, 0.1), "measurement_noise": (1.0, 1.0)}
    filters = WeightFilters(dict(module.named_parameters()), **noise, drift="none")
    filters.start(dict(module.named_parameters()), dict.fromkeys(filters.weights, 0.0))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    filters.step(optimizer)
    with torch.no_grad():
        module[0].bias.add_(1.0)
    before = filters.mean["0.bias"].clone()
    filters.step(optimizer)
    gain = kalman_step(kalman_step(0.0, 0.1, 1.0)[1], 0.1, 1.0)[0]
    torch.testing.assert_close(filters.mean["0.bias"], before + gain)
    assert len({tensor.untyped_storage().data_ptr() for tensor in filters.mean.values()}) == 1
    filters.double()
    filters.step(optimizer)
    assert filters.mean["0.bias"].dtype == torch.float64


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=1e-2),
    "tensor_rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.02)),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def watched(optimizer="adam", *, steps=25, groups=None, schedule=None, accumulate=1, mixed=False, **keywords):
    """(posterior, recomputed means, recomputed variances) after a loop of one's own; recomputed entry by entry.

    In float64; `mixed`: float32 weights under bfloat16 autocast, recomputed in float64 all the same.
    """
    torch.manual_seed(3)
    dtype = torch.float32 if mixed else torch.float64
    module = network().to(dtype)
    posterior, (x, y) = TRADI(module, **keywords), tiny.points(24)
    x = x.to(dtype)
    rates: dict[int, float] = {}
    optimiser = OPTIMIZERS[optimizer](groups(module) if groups else module.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, schedule) if schedule else None
    q_mean, q_variance = keywords.get("state_noise", (1e-4, 5e-5))
    r_mean, r_variance = keywords.get("measurement_noise", (10.0, 10.0))
    tracked = {n: p for n, p in module.named_parameters() if not n.startswith("1.")}
    means = {n: p.detach().flatten().tolist() for n, p in tracked.items()}
    variances = {n: [0.0] * p.numel() for n, p in tracked.items()}
    p_mean = p_variance = 0.0
    for step in range(steps):
        optimiser.zero_grad()
        for part in range(accumulate):
            rows = slice(part, None, accumulate)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
                loss = nn.functional.cross_entropy(module(x[rows]), y[rows]).div(accumulate)
            loss.backward()
        optimiser.step()
        posterior.observe(optimiser)
        k_mean = (p_mean + q_mean) / (p_mean + q_mean + r_mean)
        p_mean = (1 - k_mean) * (p_mean + q_mean)
        k_variance = (p_variance + q_variance) / (p_variance + q_variance + r_variance)
        p_variance = (1 - k_variance) * (p_variance + q_variance)
        for group in optimiser.param_groups:
            sign = -1.0 if group.get("maximize") else 1.0
            rates |= {id(p): sign * float(group["lr"]) for p in group["params"]}
        for name, parameter in tracked.items():
            gradient = parameter.grad.flatten().tolist()
            for k, (w, g) in enumerate(zip(parameter.detach().flatten().tolist(), gradient, strict=True)):
                move = 0.0 if keywords.get("drift") == "none" else rates[id(parameter)] * g
                means[name][k] = (1 - k_mean) * (means[name][k] - move) + k_mean * w
                predicted = variances[name][k] + move**2
                variances[name][k] = (1 - k_variance) * predicted + k_variance * (w - means[name][k]) ** 2
        if scheduler is not None:
            scheduler.step()
        assert int(posterior.steps) == step + 1
    return posterior, means, variances


def assert_equal(posterior, means, variances, *, rtol=1e-12):
    for name in means:
        expected = torch.tensor(means[name], dtype=torch.float64).view_as(posterior.mean[name])
        torch.testing.assert_close(posterior.mean[name].double(), expected, rtol=rtol, atol=0.1 * rtol)
        expected = torch.tensor(variances[name], dtype=torch.float64).view_as(posterior.variance[name])
        # w − μ loses what w and μ have in common, and is squared
        atol = 1e-18 if rtol == 1e-12 else 1e-4 * float(expected.max())
        torch.testing.assert_close(posterior.variance[name].double(), expected, rtol=100 * rtol, atol=atol)
        assert float(expected.max()) > 0


@pytest.mark.parametrize("settings", [
    *({"optimizer": name} for name in OPTIMIZERS),
    {"state_noise": (0.3, 0.05), "measurement_noise": (2.0, 1.0)},
    {"optimizer": "momentum", "drift": "none", "state_noise": (0.1, 0.1)},
    {"accumulate": 3},
], ids=[*OPTIMIZERS, "noises", "without drift", "accumulated"])  # fmt: skip
def test_the_filters_are_the_scalar_recursion(settings):
    assert_equal(*watched(**settings))


def test_groups_and_schedules_are_followed():
    def groups(module):
        return [
            {"params": [*module[3].parameters()], "lr": 0.5},
            {"params": [module[0].weight, *module[1].parameters()], "lr": 0.1},
            {"params": [module[0].bias], "lr": 0.2},
        ]

    assert_equal(*watched("sgd", groups=groups, schedule=lambda step: 0.9**step))
    # A rate that is a tensor is changed in place: it must be read again. (Groups above bring rates that are numbers.)
    assert_equal(*watched("tensor_rate", schedule=lambda step: 0.9**step))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_under_mixed_precision_the_filters_follow_the_float32_weights(optimizer):
    posterior, means, variances = watched(optimizer, mixed=True, state_noise=(0.1, 0.1))
    assert {mean.dtype for mean in posterior.filters.mean.values()} == {torch.float32}
    assert_equal(posterior, means, variances, rtol=2e-5)  # 25 steps of float32 rounding


@pytest.mark.parametrize("accumulate", [1, 3])
def test_fit_observes_every_step_with_the_gradient_it_used(accumulate):
    torch.manual_seed(3)
    module, (x, y) = network().double(), tiny.points(24)
    posterior, other = TRADI(module), copy.deepcopy(module)
    hand = TRADI(other)
    loader = [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    ds.fit(posterior, loader, epochs=2, optimizer=optimizer, accumulate=accumulate, progress=False)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
    other.train()
    for index, (a, b) in enumerate(loader * 2):
        if index % accumulate == 0:
            optimizer.zero_grad()
        nn.functional.cross_entropy(other(a), b).div(accumulate).backward()
        if index % accumulate == accumulate - 1:
            optimizer.step()
            hand.observe(optimizer)
    assert int(posterior.filters.observed) == 6 // accumulate
    # The gradient of a bias before batch norm is rounding, about 1e-17, which Adam divides by its eps, 1e-8.
    assert tiny.largest_difference(posterior.mean, hand.mean) < 1e-9
    assert tiny.largest_difference(posterior.variance, hand.variance) < 1e-15


def test_half_precision_weights_are_tracked_in_float32():
    module = nn.Linear(4, 3).bfloat16()
    posterior, optimizer = TRADI(module), torch.optim.SGD(module.parameters(), lr=0.1)
    start = module.weight.detach().float()
    module.weight.grad = torch.full_like(module.weight, 2.0**-10)
    module.bias.grad = torch.zeros_like(module.bias)
    optimizer.step()
    posterior.observe(optimizer)
    assert posterior.mean["weight"].dtype == torch.float32
    # the step is far below what bfloat16 could hold next to the weight
    torch.testing.assert_close(posterior.mean["weight"], start - 0.1 * 2.0**-10, rtol=0, atol=1e-7)
    assert posterior.draw()(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_step_that_a_gradient_scaler_skipped_moves_nothing():
    posterior = watched(steps=3)[0]
    before = {name: mean.clone() for name, mean in posterior.mean.items()}
    module = posterior.network
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    module[0].weight.grad[0, 0] = math.inf
    module[3].bias.grad[1] = math.nan
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(weights[name], p) for name, p in module.named_parameters())  # it was skipped
    posterior.observe(optimizer)
    for name in ("0.weight", "0.bias", "3.weight", "3.bias"):
        expected = torch.lerp(before[name], weights[name], gains(4)[0])
        torch.testing.assert_close(posterior.mean[name], expected, rtol=0, atol=1e-14)


def test_a_memory_layout_that_changes_on_the_way_changes_nothing():
    def run(change):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3 * 4, 3)).double()
        posterior, optimizer = TRADI(module), torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        x, y = torch.randn(6, 2, 4, 4, dtype=torch.float64), torch.arange(6) % 3
        for step in range(6):
            if change and step == 3:
                state = copy.deepcopy(posterior.state_dict())
                module[0].weight.data = module[0].weight.data.contiguous(memory_format=torch.channels_last)
                posterior.float().double()  # and the filters' tensors are replaced
                posterior.load_state_dict(state)
            optimizer.zero_grad()
            posterior.backward(x, y)
            optimizer.step()
            posterior.observe(optimizer)
        return posterior

    plain, changed = run(False), run(True)
    assert changed.filters.mean["0.weight"].stride() == changed.network[0].weight.stride()
    assert tiny.largest_difference(plain.mean, changed.mean) < 1e-14
    assert tiny.largest_difference(plain.variance, changed.variance) < 1e-15


def test_weights_without_a_gradient_are_followed_without_drift():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    posterior = TRADI(module)
    module[0](torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    before = module[1].weight.detach().clone()
    optimizer.step()
    posterior.observe(optimizer)
    assert torch.equal(posterior.mean["1.weight"], before)
    assert float(posterior.variance["1.weight"].max()) == 0
    assert float(posterior.variance["0.weight"].min()) > 0


def test_under_plain_gradient_descent_the_lag_dies_out_as_the_product_of_the_gains():
    posterior = watched("sgd", steps=60, init="he", state_noise=(0.3, 0.1))[0]
    share, p = 1.0, 0.0
    for _ in range(60):
        k, p = kalman_step(p, 0.3, 10.0)
        share *= 1 - k
    assert posterior.filters.start_influence == pytest.approx(share, rel=1e-12)
    torch.manual_seed(3)
    start = network().double()
    for name, parameter in posterior.network.named_parameters():
        if not name.startswith("1."):
            lag = posterior.mean[name] - parameter.detach()
            torch.testing.assert_close(lag, -share * start.get_parameter(name).detach(), rtol=1e-9, atol=1e-12)


def test_under_adam_the_variance_is_the_running_mean_of_squared_distances():
    posterior, means, variances = watched("adam", steps=40, state_noise=(0.1, 0.1))
    without, _, _ = watched("adam", steps=40, state_noise=(0.1, 0.1), drift="none")
    # s = Σ_t K Π (1 − K) (w_t − μ_t)²: what the gradient term adds is small, since Adam's steps are not η∇L
    assert_equal(posterior, means, variances)
    total = sum(float(v.sum()) for v in posterior.variance.values())
    assert total == pytest.approx(sum(float(v.sum()) for v in without.variance.values()), rel=0.05)


def test_norm_layers_are_untouched_and_biases_sampled():
    posterior = watched()[0]
    module = posterior.network
    assert list(posterior.mean) == list(posterior.variance) == [name for name, _ in module.named_parameters()]
    assert torch.equal(posterior.mean["1.weight"], module[1].weight)
    assert float(posterior.variance["1.weight"].abs().max()) == 0
    members = [posterior.draw().member(i) for i in range(3)]
    for member in members:
        assert torch.equal(member[1].weight, module[1].weight)
        assert torch.equal(member[1].bias, module[1].bias)
    assert not torch.equal(members[0][0].bias, members[1][0].bias)
    assert not torch.equal(members[0][0].weight, members[1][0].weight)


def test_it_starts_at_the_current_weights_even_if_they_were_loaded_later():
    module, other = network(), network()
    posterior = TRADI(module)
    module.load_state_dict(other.state_dict())
    posterior.begin(steps_per_epoch=3, epochs=1)
    assert torch.equal(posterior.mean["0.weight"], other[0].weight)
    assert float(posterior.variance["0.weight"].abs().max()) == 0


def test_the_papers_start_has_the_variance_of_the_initial_weights():
    posterior = TRADI(nn.Sequential(nn.Conv2d(3, 8, 5), nn.Flatten(), nn.Linear(8, 2)), init="he")
    assert float(posterior.mean["0.weight"].abs().max()) == 0
    for name in ("0.weight", "0.bias"):
        assert posterior.variance[name].unique().item() == pytest.approx(2 / 75)
    assert posterior.variance["2.bias"].unique().item() == pytest.approx(2 / 8)


def test_a_young_filter_says_that_it_is(caplog):
    posterior = watched(steps=5)[0]
    with caplog.at_level(logging.WARNING, logger="dissensus"):
        posterior.draw()
    assert "TRADI has observed 5 steps, and 100 % of its mean still come from the initial weights" in caplog.text
    caplog.clear()
    posterior = watched(steps=25, state_noise=(1.0, 1.0))[0]
    posterior.draw()
    assert not caplog.text


def sampled(covariance, *, weights, deviations, samples, **keywords):
    """(S, K) samples of a bias of these weights, with mean 1 and these deviations."""
    module = nn.Linear(1, len(weights)).double()
    posterior = TRADI(module, covariance=covariance, samples=samples, **keywords)
    with torch.no_grad():
        module.bias.copy_(weights)
        posterior.filters.mean["bias"].fill_(1.0)
        posterior.filters.variance["bias"].copy_(deviations**2)
    posterior.filters.observed.add()
    return tiny.sampled(posterior)["bias"]


WEIGHTS = torch.tensor([-1.0, -0.2, 0.0, 0.5, 1.7], dtype=torch.float64)
DEVIATIONS = torch.tensor([0.5, 1.0, 2.0, 0.1, 1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "case", often(["shared 0.4", "released 0.4", "diagonal 1"], ["shared 1", "released 1", "diagonal 0.4"])
)
def test_samples_have_the_covariance_of_the_paper(case):
    n, (covariance, bandwidth) = 1000, case.split()
    bandwidth = float(bandwidth)
    drawn = sampled(covariance, weights=WEIGHTS, deviations=DEVIATIONS, samples=n, bandwidth=bandwidth, features=20)
    standard = (drawn - 1.0) / DEVIATIONS  # (S, K), variance 1
    # E of a product over its standard error; fourth moments of the features are at most 3 (1 + 1/(2D)) < 3.2
    error = 4 * 3.2**0.5 / n**0.5
    assert float(standard.mean(0).abs().max()) < 4 / n**0.5
    found = standard.T @ standard / n
    distance = WEIGHTS[:, None] - WEIGHTS[None]
    kernel = torch.exp(-(bandwidth**2) * distance**2 / 2) if covariance == "shared" else torch.eye(5)
    assert float((found - kernel).abs().max()) < error


def test_released_phases_differ_from_weight_to_weight():
    """One feature, one m for all: given m the values are √2 m cos φ with independent φ, so E x⁴ / (E x²)² = 3/2."""
    ones = torch.ones(60_000, dtype=torch.float64)
    x = (sampled("released", weights=0 * ones, deviations=ones, samples=1, features=1) - 1).flatten()
    assert float((x**4).mean() / (x**2).mean() ** 2) == pytest.approx(1.5, abs=0.05)
    shared = sampled("shared", weights=0 * ones, deviations=ones, samples=1, features=1)
    assert len(shared.unique()) == 1  # equal weights move together


def test_tensors_of_one_sample_are_drawn_apart():
    torch.manual_seed(0)
    module = nn.Linear(1, 1).double()
    n = 1500
    posterior = TRADI(module, samples=n)
    for variance in posterior.filters.variance.values():
        variance.fill_(1.0)
    posterior.filters.observed.add()
    drawn = tiny.sampled(posterior)
    weight = drawn["weight"].flatten() - posterior.mean["weight"].flatten()
    bias = drawn["bias"].flatten() - posterior.mean["bias"]
    assert abs(float((weight * bias).mean())) < 4 / n**0.5
    assert float(weight.var()) == pytest.approx(1.0, abs=4 * (2.2 / n) ** 0.5)


@pytest.mark.parametrize(("correlation", "bandwidth"), thinned(["tensor", "layer"], [1.0, 0.4], every=2))
def test_weight_and_bias_of_a_layer_are_correlated_where_layers_are(correlation, bandwidth):
    n = 1000
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)).double()
    posterior = TRADI(module, samples=n, features=20, bandwidth=bandwidth, correlation=correlation)
    names = [name for name, _ in module.named_parameters()]  # 0.weight, 0.bias, 1.weight, 1.bias: 2, 2, 2 and 1 weights
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(2)
        for k, variance in enumerate(posterior.filters.variance.values()):
            variance.fill_(0.5 + k)
    posterior.filters.observed.add()
    drawn, means = tiny.sampled(posterior), posterior.filters.mean
    found = torch.cat([(drawn[name] - means[name]).flatten(1) for name in names], 1)  # (S, 7)
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    deviations = torch.cat([posterior.variance[name].flatten() for name in names]).sqrt()
    # exp(−bandwidth² (w_k − w_l)² / 2) √(s_k s_l) inside a layer, or inside a tensor, and 0 across
    group = torch.tensor([0, 0, 0, 0, 1, 1, 1] if correlation == "layer" else [0, 0, 1, 1, 2, 2, 3])
    kernel = torch.exp(-(bandwidth**2) * (weights[:, None] - weights[None]) ** 2 / 2)
    expected = kernel * (group[:, None] == group[None])
    error = 4 * 3.2**0.5 / n**0.5  # as above
    standard = found / deviations
    assert float((standard.T @ standard / n - expected).abs().max()) < error


def test_what_torch_parametrizes_is_one_layer(tmp_path):
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)), nn.Linear(3, 1))
    names = TRADI(module, correlation="layer").recorder._correlated_groups()
    assert [len(each) for each in names] == [3, 2]
    assert [len(each) for each in TRADI(nn.Linear(2, 1), correlation="layer").recorder._correlated_groups()] == [2]
    alone = TRADI(nn.utils.parametrizations.weight_norm(nn.Linear(2, 1)), correlation="layer")
    assert [len(each) for each in alone.recorder._correlated_groups()] == [3]
    ds.save(alone, tmp_path)
    assert ds.load(tmp_path, copy.deepcopy(alone.network)).recorder.settings["correlation"] == "layer"


def test_a_stored_draw_has_statistics_of_its_own_and_survives_a_file(tmp_path):
    posterior, (x, y) = watched(state_noise=(1.0, 1.0))[0], tiny.points(24)
    loader = [(x[:10], y[:10]), (x[10:], y[10:])]
    ds.refresh(posterior, loader)
    drawn = posterior.draw()
    for i in range(3):
        member = drawn.member(i)
        hidden = [member[0](a) for a, _ in loader]
        expected = (10 * hidden[0].mean(0) + 14 * hidden[1].mean(0)) / 24
        torch.testing.assert_close(member[1].running_mean, expected.detach(), rtol=0, atol=1e-12)
    outputs = posterior.predict(x).member_means
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, network())
    assert torch.equal(loaded.predict(x).member_means, outputs)
    assert torch.equal(loaded.mean["0.weight"], posterior.mean["0.weight"])
    assert loaded.filters._gains(26) == posterior.filters._gains(26)  # they go on after 25 steps
    # the draw stays while the network trains on, and another one takes its place at the next refresh
    optimizer = torch.optim.SGD(posterior.network.parameters(), lr=1.0)
    posterior.backward(x, y)
    optimizer.step()
    posterior.observe(optimizer)
    assert torch.equal(posterior.predict(x).member_means, outputs)
    ds.refresh(posterior, loader)
    assert not torch.equal(posterior.predict(x).member_means, outputs)


def test_what_cannot_be_observed_or_drawn_from_is_refused():
    posterior, (x, y) = TRADI(network().double()), tiny.points()
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (posterior, network()))
    refuses(lambda: posterior.predict(x), "expected observed steps, got none, or too few for its KalmanRecorder; train")
    refuses(lambda: ds.refresh(posterior, [(x, y)]), "expected observed steps, got none")
    refuses(lambda: posterior.observe(optimizer), r"expected gradients in .grad, got none; call observe after the step")
    assert int(posterior.filters.observed) == 0
    posterior.backward(x, y)
    told = "expected an optimizer over the posterior's parameters, got one over other tensors"
    refuses(lambda: posterior.observe(other), told)
    told = "expected at least one batch to estimate batch statistics from, got none"
    refuses(lambda: ds.refresh(watched()[0], []), told)
    refuses(lambda: TRADI(nn.Sequential(nn.BatchNorm1d(3))), "expected trainable weights outside norm layers")
    told = r"expected state_noise as two variances .* got 0.0001; pass both"
    refuses(lambda: TRADI(network(), state_noise=1e-4), told, TypeError)


def started(**keywords) -> TRADI:
    posterior = TRADI(network().double(), **keywords)
    posterior.filters.observed.add()
    return posterior


def looked_at(epochs: int, posterior: TRADI | None = None) -> list[int]:
    posterior = posterior or started()
    return [epoch for epoch in range(1, epochs + 1) if can_keep_epoch(posterior, epoch, epochs)]


def fitted(posterior: TRADI, *, epochs: int = 16, rate: float = 0.3, validate: bool = True, **keywords):
    """The history of a run whose rate is so large that the last epoch is not the best."""
    x, y = tiny.points(24)
    optimizer = torch.optim.Adam(posterior.parameters(), lr=rate)
    keywords |= {"validation": [tiny.points(15, seed=1)]} if validate else {}
    loader = [(x[:12], y[:12]), (x[12:], y[12:])]
    return ds.fit(posterior, loader, epochs=epochs, optimizer=optimizer, progress=False, **keywords)


def test_at_most_ten_looks_are_spread_over_the_last_quarter_and_the_last_epoch_is_one():
    one = started()
    found = {epochs: looked_at(epochs, one) for epochs in range(1, 200)}
    assert (found[1], found[2]) == ([1], [2])
    assert found[30] == list(range(23, 31))
    assert found[100] == list(range(82, 101, 2))
    assert all(len(each) <= 10 and each[-1] == epochs for epochs, each in found.items())
    assert looked_at(30, TRADI(network().double())) == []  # which has observed nothing


def test_the_filters_of_the_best_look_are_kept_and_validation_is_of_the_network_in_training():
    torch.manual_seed(0)
    posterior, seen, losses = TRADI(network().double(), state_noise=(1.0, 0.5)), [], []
    x, y = tiny.points(15, seed=1)

    def note(epoch):
        seen.append(tiny.state(posterior))
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(posterior.network.eval()(x), y)))

    history = fitted(posterior, callback=note)
    assert [epoch.validation for epoch in history.epochs] == pytest.approx(losses, rel=1e-12)
    assert posterior.current().members == 1
    looked = {epoch.epoch: epoch.look for epoch in history.epochs if epoch.look is not None}
    assert list(looked) == looked_at(16) == [13, 14, 15, 16]
    best = min(looked, key=looked.get)
    assert history.best.epoch == best != 16  # so that keeping the last one would be noticed
    assert best != min(history.epochs, key=lambda epoch: epoch.validation).epoch
    kept = tiny.state(posterior)
    for name, tensor in seen[best - 1].items():
        if name != "stored":
            assert torch.equal(kept[name], tensor), name
    assert int(posterior.filters.observed) == 2 * best
    fresh = TRADI(network().double(), state_noise=(1.0, 0.5)).filters
    assert posterior.filters._gains(2 * best + 1) == fresh._gains(2 * best + 1)


def test_a_look_scores_sampled_networks_with_batch_statistics_of_the_validation_inputs():
    torch.manual_seed(0)
    posterior = TRADI(network().double(), samples=5, state_noise=(1.0, 0.5))
    fitted(posterior, validate=False)
    rows = [tiny.points(15, seed=1), tiny.points(10, seed=2)]
    drawn = draw_for_validation(posterior, 4, 4, rows)
    members = [drawn.member(i) for i in range(5)]
    for member in members:
        assert not torch.equal(member[0].weight, posterior.network[0].weight)
        hidden = [member[0](x) for x, _ in rows]
        expected = (15 * hidden[0].mean(0) + 10 * hidden[1].mean(0)) / 25
        torch.testing.assert_close(member[1].running_mean, expected.detach(), rtol=0, atol=1e-12)
    x, y = torch.cat([rows[0][0], rows[1][0]]), torch.cat([rows[0][1], rows[1][1]])
    mean = torch.stack([member(x).softmax(1) for member in members]).mean(0)
    nll = -mean[torch.arange(25), y].log().mean().detach()
    assert validation_nll(posterior, rows, drawn) == pytest.approx(float(nll), rel=1e-12)
    assert draw_for_validation(posterior, 3, 4, rows) is None  # not an epoch to look at
    assert posterior.training is posterior.network.training is False


def test_looks_change_nothing_about_the_training():
    losses = []
    for validate in (False, True):
        torch.manual_seed(0)
        posterior = TRADI(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double())
        losses.append([epoch.loss for epoch in fitted(posterior, validate=validate).epochs])
    assert losses[0] == losses[1]


def test_a_stopped_run_goes_on_with_its_best_look(tmp_path):
    def run(stop=None):
        torch.manual_seed(0)
        posterior = TRADI(network().double(), state_noise=(1.0, 0.5))
        keywords = {"checkpoint": tmp_path / "run.pt"} if stop is not None else {}
        history = fitted(posterior, callback=lambda epoch: epoch.epoch == stop, **keywords)
        return history, posterior

    whole, expected = run()
    run(stop=14)
    history, posterior = run(stop=99)
    assert [epoch.look for epoch in history.epochs] == [epoch.look for epoch in whole.epochs]
    assert history.best.epoch == whole.best.epoch
    assert tiny.largest_difference(posterior.filters.variance, expected.filters.variance) == 0


def test_patience_waits_for_a_look():
    torch.manual_seed(0)
    posterior = TRADI(network().double(), state_noise=(1.0, 0.5))
    history = fitted(posterior, epochs=40, rate=0.3, patience=1)
    assert len(history) in looked_at(40)
    assert history[-1].look > history.best.look


def test_the_rate_does_not_die_before_sampling():
    tradi, other = started(), ds.MAP(network().double())
    factors = [tradi.default_schedule(100)(epoch) for epoch in range(100)]
    assert factors[0] == 1.0
    assert factors[75:] == [pytest.approx(0.1)] * 25
    assert factors == sorted(factors, reverse=True)
    assert other.default_schedule(100)(99) == plateau_linear(0.99) == pytest.approx(0.01)


def test_the_variance_is_that_of_a_network_that_still_moves():
    x, y = tiny.points(24)

    def deviation(schedule) -> float:
        torch.manual_seed(0)
        posterior = TRADI(network().double(), state_noise=(10.0, 5.0))  # a memory of 1.6 and 2 steps
        optimizer = torch.optim.Adam(posterior.parameters(), lr=0.1)
        schedule = posterior.default_schedule(60) if schedule is None else schedule
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        ds.fit(posterior, [(x, y)], epochs=60, optimizer=optimizer, scheduler=scheduler, progress=False)
        return sum(float(v.sum()) for v in posterior.filters.variance.values()) ** 0.5

    dead = deviation(lambda epoch: plateau_linear(epoch / 60))
    assert deviation(None) > 5 * dead


def test_methods_without_looks_are_judged_as_ever():
    torch.manual_seed(0)
    history = fitted(ds.MAP(network().double()))
    assert all(epoch.look is None for epoch in history.epochs)
    assert history.best is min(history.epochs, key=lambda epoch: epoch.validation)

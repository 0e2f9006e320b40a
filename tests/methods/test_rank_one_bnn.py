"""RankOneBNN: laws of its factors against torch's distributions and Monte Carlo, and T, which NodeBNN has as 1 + γ."""

import pytest
import torch
from torch import distributions, nn

import dissensus as ds
import tiny
from dissensus.methods.parts.node_latents import Complexity, cauchy_noise

MEAN = torch.tensor([[1.0, 0.8, 1.3], [1.2, 1.1, 0.9]], dtype=torch.float64)
STD = torch.tensor([[0.3, 0.2, 0.1], [0.25, 0.4, 0.2]], dtype=torch.float64)
LAWS = {"gaussian": distributions.Normal, "cauchy": distributions.Cauchy}


def build(network=None, **keywords):
    settings = {"components": 2, "samples": 4, "data_size": 50, **keywords}
    return ds.RankOneBNN((network or tiny.mlp()).double(), **settings)


@pytest.mark.parametrize("family", LAWS)
def test_one_component_has_the_kl_of_its_law_exactly(family):
    law = LAWS[family]
    q, p = law(MEAN[0], STD[0]), law(torch.ones(3, dtype=torch.float64), torch.full((3,), 0.4, dtype=torch.float64))
    cost = Complexity(0.4, (3,), family=family)
    entropy = q.entropy().sum()
    torch.testing.assert_close(cost.entropy(MEAN[:1], STD[:1]), entropy, rtol=1e-12, atol=0)
    if family == "gaussian":
        kl = distributions.kl_divergence(q, p).sum()
    else:  # torch has no KL of Cauchy laws: a quadrature over quantiles, (i − ½) / n of the distribution of q
        at = q.icdf((torch.arange(200_000, dtype=torch.float64)[:, None] + 0.5) / 200_000)
        kl = (q.log_prob(at) - p.log_prob(at)).mean(0).sum()
    torch.testing.assert_close(cost.kl(MEAN[:1], STD[:1]), kl, rtol=1e-5, atol=0)
    torch.testing.assert_close(cost.kl(MEAN[:1], STD[:1], 0.3), kl + 0.7 * entropy, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", LAWS)
def test_the_cost_of_a_mixture_is_at_least_its_kl(family):
    law, draws = LAWS[family], 100_000
    q = distributions.MixtureSameFamily(
        distributions.Categorical(torch.ones(2, dtype=torch.float64)), distributions.Independent(law(MEAN, STD), 1)
    )
    p = distributions.Independent(law(torch.ones(3, dtype=torch.float64), torch.full((3,), 0.4).double()), 1)
    at = q.sample((draws,))
    ratio = q.log_prob(at) - p.log_prob(at)
    bound, error = float(Complexity(0.4, (3,), family=family).kl(MEAN, STD)), float(ratio.std()) / draws**0.5
    assert bound > float(ratio.mean()) - 4 * error
    assert bound < float(ratio.mean()) + torch.log(torch.tensor(2.0)) + 4 * error  # it loses log K at most


@pytest.mark.parametrize("family", LAWS)
def test_latents_are_drawn_from_their_law(family):
    posterior = build(nn.Linear(2, 2), family=family, components=1, samples=20_000)
    latents = posterior._sample_latents()  # (S, 4)
    law = LAWS[family](posterior.mean[0].detach(), posterior.std[0].detach())
    shares = torch.stack([(latents <= law.icdf(torch.tensor(q))).double().mean(0) for q in (0.1, 0.5, 0.9)])
    expected = torch.tensor([[0.1], [0.5], [0.9]], dtype=torch.float64)
    error = (expected * (1 - expected) / 20_000).sqrt()
    assert bool(((shares - expected).abs() < 5 * error).all())
    assert bool(cauchy_noise(1_000_000, dtype=torch.float32, device="cpu").isfinite().all())


def test_a_function_is_s_times_w_times_r_x_plus_b():
    layer, x = nn.Linear(3, 2), torch.randn(5, 3, dtype=torch.float64)
    posterior = build(layer).eval()
    drawn = posterior.draw()
    for i, latents in enumerate(drawn.latents):
        r, s = latents[:3], latents[3:]
        expected = s * (x * r @ layer.weight.T + layer.bias)
        torch.testing.assert_close(drawn(x)[i], expected.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(drawn.member(i)(x), expected, rtol=0, atol=1e-12)
    assert posterior.latents == 5


def test_means_start_from_the_prior_or_from_a_modulation():
    wide = nn.Linear(2000, 2000)
    mean = build(wide).mean.detach()
    assert float(mean.mean()) == pytest.approx(1.0, abs=5 * 0.1 / mean.numel() ** 0.5)
    assert float(mean.std()) == pytest.approx(0.1, rel=5 * (2 * mean.numel()) ** -0.5)
    assert build(wide, modulation=ds.Modulation.sign()).mean.detach().unique().tolist() == [-1.0, 1.0]


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


def test_a_cold_posterior_is_narrow_and_a_hot_one_wide():
    x, y = tiny.points(32)
    widths = []
    for temperature in (0.1, 5.0):
        torch.manual_seed(0)
        posterior = build(posterior_temperature=temperature, data_size=32, init_std=0.1)
        ds.fit(posterior, [(x, y)], epochs=60, optimizer=torch.optim.Adam(posterior.parameters(), 0.03), progress=False)
        widths.append(float(posterior.std.detach().mean()))
    assert widths[0] < 0.8 * 0.8 * widths[1]


def test_what_is_saved_is_loaded_with_its_family_and_start(tmp_path):
    posterior = build(family="cauchy", modulation=ds.Modulation.sign(), posterior_temperature=0.5)
    ds.fit(posterior, [tiny.points()], epochs=1, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, tiny.mlp())
    assert (loaded.family, loaded.modulation, loaded.posterior_temperature) == ("cauchy", ds.Modulation.sign(), 0.5)
    assert torch.equal(loaded.kl(), posterior.kl())
    assert torch.equal(loaded.predict(tiny.points()[0]).mean, posterior.predict(tiny.points()[0]).mean)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"family": "student"}, "expected family of gaussian, cauchy, got 'student'"),
        ({"posterior_temperature": 0.0}, "expected posterior_temperature above 0, got 0.0"),
        ({"prior_std": -1.0}, "expected prior_std above 0, got -1.0"),
        ({"init_std": 0.0}, "expected init_std above 0, got 0.0"),
        ({"data_size": None}, "expected data_size, got none"),
    ],
)
def test_settings_that_make_no_sense_are_clear_errors(keywords, message):
    with pytest.raises(ValueError, match=message):
        build(**keywords)

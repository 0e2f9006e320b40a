"""Laplace as a posterior: exact where it should be, beside laplace-torch, files, and what it refuses."""

import copy
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

import dissensus as ds
import tiny
from dissensus.methods.laplace import Laplace
from refusals import refuses
from thinning import often


def data(n=32, outputs=2):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, dtype=torch.float64, generator=generator)
    return x, torch.randn(n, outputs, dtype=torch.float64, generator=generator)


def fitted(structure="full", net=tiny.mlp, **keywords):
    torch.manual_seed(0)
    x, y = tiny.points(24)
    posterior = Laplace(net().double(), structure=structure, **{"samples": 5, **keywords})
    return posterior.fit_posthoc([(x[:10], y[:10]), (x[10:], y[10:])])


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("noise", [0.5, "learned"])
def test_a_linear_network_gets_the_closed_form_of_bayesian_linear_regression(structure, noise):
    x, y = data()
    phi = torch.cat([x, torch.ones(32, 1, dtype=torch.float64)], 1)
    precision, std = 0.7, 0.5
    matrix = phi.T @ phi / std**2 + precision * torch.eye(5, dtype=torch.float64)
    mode = torch.linalg.solve(matrix, phi.T @ y / std**2)  # (5, 2)
    network = nn.Linear(4, 2).double()
    network.weight.data, network.bias.data = mode[:4].T.contiguous(), mode[4].clone()
    likelihood = ds.Regression(noise) if noise != "learned" else ds.Regression(initial=std)
    keywords = {"structure": structure, "prior_precision": precision, "samples": 20_000}
    posterior = Laplace(network, likelihood=likelihood.double(), **keywords)
    if noise == "learned":
        posterior.likelihood.log_noise.data.fill_(math.log(std))
    torch.manual_seed(0)
    posterior.fit_posthoc([(x[:20], y[:20]), (x[20:], y[20:])])

    covariance = std**2 * torch.eye(32, dtype=torch.float64) + phi @ phi.T / precision  # of y, weights integrated out
    evidence = torch.distributions.MultivariateNormal(torch.zeros(32, dtype=torch.float64), covariance).log_prob(y.T)
    torch.testing.assert_close(posterior.log_marginal_likelihood(), evidence.sum(), rtol=0, atol=1e-9)
    variance = torch.linalg.inv(matrix).diagonal()
    torch.testing.assert_close(posterior.variance["weight"], variance[:4].expand(2, 4), rtol=0, atol=1e-12)
    torch.testing.assert_close(posterior.variance["bias"], variance[4].expand(2), rtol=0, atol=1e-12)
    torch.testing.assert_close(posterior.mean["weight"], network.weight.detach(), rtol=0, atol=0)

    new = torch.randn(6, 5, dtype=torch.float64)
    new[:, 4] = 1
    expected = ((new @ torch.linalg.inv(matrix)) * new).sum(1)  # variance of the mean at new inputs
    predictive = posterior.predict(new[:, :4])
    torch.testing.assert_close(predictive.mean, new @ mode, rtol=0, atol=4 * float(expected.max().sqrt()) / 20_000**0.5)
    error = 4 * float(expected.max()) * (2 / 20_000) ** 0.5
    torch.testing.assert_close(predictive.epistemic, expected[:, None].expand(6, 2), rtol=0, atol=error)


def test_a_noise_that_nobody_has_trained_is_said(caplog):
    x, y = data()
    loader = [(x, y)]
    trained = ds.MAP(tiny.mlp(outputs=2).double(), likelihood=ds.Regression())
    ds.fit(trained, loader, epochs=2, progress=False)
    network = trained.particles.template.network
    for likelihood in (trained.likelihood, ds.Regression(noise=0.3)):
        Laplace(network, likelihood=likelihood, samples=2).fit_posthoc(loader)
    fresh = Laplace(tiny.mlp(outputs=2).double(), likelihood=ds.Regression(), samples=2)
    ds.fit(fresh, loader, epochs=1, progress=False)
    assert not caplog.records
    Laplace(network, likelihood=ds.Regression(), samples=2).fit_posthoc(loader)
    assert "the learned noise was never trained and is still 1" in caplog.text


def test_the_curvature_of_a_network_is_that_of_its_features():
    posterior = fitted()
    features = posterior.network[:-1].eval()(tiny.points(24)[0]).detach()
    alone = Laplace(copy.deepcopy(posterior.network[-1]), samples=2)
    alone.fit_posthoc([(features, tiny.points(24)[1])])
    torch.testing.assert_close(alone.log_marginal_likelihood(), posterior.log_marginal_likelihood(), rtol=0, atol=1e-9)
    assert float(alone.curvature[0].precision) == pytest.approx(float(posterior.curvature[0].precision), rel=1e-9)
    torch.testing.assert_close(alone.variance["weight"], posterior.variance["3.weight"])


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("weight", [(), (torch.tensor([1.0, 0.0, 2.0, 1.0] * 3),)])
def test_part_of_the_data_counts_as_all_of_them_but_is_evidence_once(structure, weight):
    """Of 36 examples, each of twelve three times, the twelve are a part: three times their sums, once their evidence."""
    (x, y), network = tiny.points(), tiny.mlp().double().eval()

    def fit(loader, data_size=None, known=None):
        return Laplace(network, structure=structure, samples=2, data_size=known).fit_posthoc(
            loader, data_size=data_size
        )

    once, thrice = fit([(x, y, *weight)]), fit([(x, y, *weight)] * 3)
    parts = [(x[:5], y[:5], *(w[:5] for w in weight)), (x[5:], y[5:], *(w[5:] for w in weight))]
    for one, sums in ((fit(parts, 36), thrice), (fit([(x, y, *weight)], known=36), thrice), (fit(parts * 3, 12), once)):
        torch.testing.assert_close(one.curvature[0].eigenvalues, sums.curvature[0].eigenvalues, rtol=0, atol=1e-10)
        assert one.precision == pytest.approx(once.precision, rel=1e-9)
        found, expected = one.log_marginal_likelihood(), once.log_marginal_likelihood()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    thrice.use_prior_precision(once.precision)
    torch.testing.assert_close(fit(parts, 36).variance, thrice.variance)
    assert fit(parts, 36).log_marginal_likelihood(2.0) == pytest.approx(
        float(once.log_marginal_likelihood(2.0)), rel=1e-9
    )
    rows = torch.arange(12).repeat_interleave(weight[0].long() if weight else 1)
    repeated = fit([(x[rows], y[rows])])  # a weight of two is the example twice
    torch.testing.assert_close(once.curvature[0].eigenvalues, repeated.curvature[0].eigenvalues, rtol=0, atol=1e-10)
    torch.testing.assert_close(once.log_marginal_likelihood(), repeated.log_marginal_likelihood(), rtol=0, atol=1e-9)


def memorised():
    """A last layer that knows 30 random labels by heart, nearly without curvature, and rows it has not seen."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 40, dtype=torch.float64, generator=generator)
    direction = torch.randn(40, 3, dtype=torch.float64, generator=generator)
    y = (x @ direction).argmax(1)
    network = nn.Linear(40, 3, bias=False).double()
    network.weight.data = direction.T.contiguous()
    return network, [(x[:30], y[:30])], [(x[30:45], y[30:45]), (x[45:], y[45:])]


def score(posterior, loader):
    predictive = ds.predict(posterior, loader)
    return float(predictive.log_prob(predictive.targets).mean())


def test_a_fit_that_makes_its_own_rows_unlikely_says_so_with_the_numbers(caplog):
    network, train, _ = memorised()
    torch.manual_seed(0)
    posterior = Laplace(network, prior_precision=0.01).fit_posthoc(train)
    own = -float(F.cross_entropy(network(train[0][0]), train[0][1]).detach())
    assert own - score(posterior, train) > 0.2
    assert f"{score(posterior, train):.3f}, the network alone {own:.3f}" in caplog.text
    assert "held_out=" in caplog.text
    caplog.clear()
    Laplace(network, prior_precision=1000.0).fit_posthoc(train)
    assert not caplog.records


def test_an_exact_gaussian_is_not_called_too_unsure(caplog):
    x, y = data(12)  # 10 parameters per output and 12 rows: what the fit costs is what the Gaussian accounts for
    torch.manual_seed(0)
    phi = torch.cat([x, x**2, torch.ones(12, 1, dtype=torch.float64)], 1)
    network = nn.Linear(9, 2, bias=False).double()
    network.weight.data = torch.linalg.lstsq(phi, y).solution.T.contiguous()
    noise = ds.Regression(1.0).double()
    posterior = Laplace(network, prior_precision=1e-6, likelihood=noise).fit_posthoc([(phi, y)])
    alone = ds.predict(ds.MAP(network, likelihood=noise), [(phi, y)])
    assert float(alone.log_prob(y).mean()) - score(posterior, [(phi, y)]) > 0.2
    assert not caplog.records


def test_held_out_rows_choose_the_precision_they_are_likeliest_under(caplog):
    network, train, held_out = memorised()
    torch.manual_seed(0)
    posterior = Laplace(network, prior_precision=0.01).fit_posthoc(train, held_out=held_out)
    assert not caplog.records
    best, scores = score(posterior, held_out), {}
    for factor in (0.01, 1.0, 100.0, 1e4):
        other = Laplace(network, prior_precision=0.01 * factor).fit_posthoc(train)
        scores[factor] = score(other, held_out)
    assert best > max(scores.values()) - 0.02  # 300 samples: the error of a score is below this
    assert scores[1.0] < best - 0.05
    assert posterior.precision > 0.05
    posterior.fit_posthoc(train)
    assert posterior.precision == 0.01
    refuses(lambda: posterior.fit_posthoc(train, held_out=iter(held_out)), "expected held-out rows")
    assert posterior.precision == 0.01  # as it was
    chosen = posterior.fit_posthoc(train, held_out=held_out).precision
    ds.refresh(posterior, train)
    assert posterior.precision == chosen != 0.01
    refuses(lambda: posterior.fit_posthoc(train, data_size=2.5), r"data_size as a whole number, got 2\.5", TypeError)


def test_the_draw_that_is_kept_is_the_one_that_held_out_rows_have_chosen(monkeypatch):
    network, train, held_out = memorised()
    scores, measure = [], Laplace._mean_log_prob
    keep = lambda self, predicted: scores.append(found := measure(self, predicted)) or found  # noqa: E731
    monkeypatch.setattr(Laplace, "_mean_log_prob", keep)
    posterior = Laplace(network, prior_precision=0.01, samples=5).fit_posthoc(train, held_out=held_out)
    assert score(posterior, held_out) == pytest.approx(max(scores), abs=1e-6)


@pytest.mark.parametrize(
    ("part", "counted"), [("sampler", 100), ("subset", 100), ("most", 60), ("told", 20), ("fit", 20)]
)
def test_a_part_of_a_data_set_counts_as_all_of_it_unless_it_was_trained_on_alone(part, counted, caplog):
    torch.manual_seed(0)
    whole = TensorDataset(torch.randn(100, 4), torch.arange(100) % 3)
    rows = range(60 if part == "most" else 20)
    taken = {"sampler": SubsetRandomSampler(rows)} if part == "sampler" else {}
    loader = DataLoader(whole if taken else Subset(whole, rows), batch_size=10, **taken)
    posterior = Laplace(nn.Linear(4, 3), samples=2)
    if part == "fit":
        ds.fit(posterior, loader, epochs=1, progress=False)
    else:
        posterior.fit_posthoc(loader, data_size=20 if part == "told" else None)
    x, y = whole[: len(rows)]
    alone = Laplace(posterior.network, samples=2).fit_posthoc([(x, y)], data_size=counted)
    torch.testing.assert_close(posterior.curvature[0].eigenvalues, alone.curvature[0].eigenvalues)
    assert ("reads 20 of 100 rows, so Laplace counts each 5 times" in caplog.text) == (counted == 100)


def test_a_fit_that_is_right_more_often_than_confident_says_so(caplog):
    torch.manual_seed(0)
    x, y = 9 * nn.functional.one_hot(torch.arange(60) % 3, 3).double(), torch.arange(60) % 3
    network = nn.Linear(3, 3, bias=False).double()
    network.weight.data = torch.eye(3, dtype=torch.float64)  # logits 9, 0, 0: confident and right
    posterior = Laplace(network, prior_precision=30.0).fit_posthoc([(x, y)])
    assert not caplog.records
    posterior = Laplace(network, prior_precision=8.0).fit_posthoc([(x, y)])
    gap = 1 - float(posterior.predict(x).confidence.mean())
    assert gap > 0.05
    assert -float(posterior.predict(x).log_prob(y).mean()) < 0.1  # likelihoods alone would not say so
    assert f"right {gap:.3f} more often than it is confident" in caplog.text


@pytest.mark.parametrize(
    "change", [lambda p: p.fit_posthoc([tiny.points(24)]), lambda p: p.use_prior_precision(9.0)], ids=["data", "prior"]
)
def test_a_temperature_does_not_outlive_the_fit_it_belongs_to(change, caplog):
    posterior = fitted()
    posterior.temperature.fill_(2.0)
    change(posterior)
    assert float(posterior.temperature) == 1
    assert "sets the temperature back from 2 to 1" in caplog.text


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_pixels_that_count_are_examples(structure):
    torch.manual_seed(0)
    network = tiny.segmenter().double()
    x, y = torch.randn(3, 2, 5, 6, dtype=torch.float64), torch.randint(3, (3, 5, 6))
    y[:, :2] = 255
    likelihood = ds.Classification(ignore_index=255)
    posterior = Laplace(network, structure=structure, likelihood=likelihood, samples=2).fit_posthoc([(x, y)])
    features = network[:-1](x).detach().movedim(1, -1)[:, 2:].reshape(-1, 4)
    head = nn.Linear(4, 3).double()
    head.weight.data, head.bias.data = (
        network[-1].weight.detach()[:, :, 0, 0].clone(),
        network[-1].bias.detach().clone(),
    )
    plain = Laplace(head, structure=structure, samples=2).fit_posthoc([(features, y[:, 2:].reshape(-1))])
    torch.testing.assert_close(posterior.curvature[0].eigenvalues, plain.curvature[0].eigenvalues, rtol=0, atol=1e-9)
    torch.testing.assert_close(posterior.log_marginal_likelihood(), plain.log_marginal_likelihood(), rtol=0, atol=1e-9)


def test_a_mean_without_an_axis_and_means_at_positions_are_regressions():
    network, (x, y) = tiny.Network(lambda self, x: self.head(x)[:, 0], head=nn.Linear(4, 1)).double(), data(outputs=1)
    flat = Laplace(network, likelihood=ds.Regression(0.3), samples=4).fit_posthoc([(x, y[:, 0])])
    assert flat.predict(x).mean.shape == (32,)
    plain = Laplace(network.head, likelihood=ds.Regression(0.3), samples=4).fit_posthoc([(x, y)])
    assert torch.equal(flat.curvature[0].eigenvalues, plain.curvature[0].eigenvalues)
    at = Laplace(network.head, likelihood=ds.Regression(0.3), samples=4)
    at.fit_posthoc([(x.reshape(8, 4, 4), y.reshape(8, 4, 1))])
    torch.testing.assert_close(at.curvature[0].eigenvalues, plain.curvature[0].eigenvalues, rtol=0, atol=1e-10)
    torch.testing.assert_close(at.log_marginal_likelihood(), plain.log_marginal_likelihood(), rtol=0, atol=1e-10)
    two = Laplace(nn.Linear(4, 2).double(), likelihood=ds.HeteroscedasticRegression(), samples=10)
    assert two.fit_posthoc([(x, y)]).predict(x).epistemic.min() > 0


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_counts_have_the_curvature_of_their_rates(structure, outputs):
    """Poisson's Hessian is diag(exp(f)): G = Σ w exp(f_c) φφᵀ for each output by itself."""
    x = data()[0]
    torch.manual_seed(0)
    network, weight = nn.Linear(4, outputs).double(), torch.rand(32)
    y = torch.poisson(torch.rand(32, outputs, dtype=torch.float64))
    posterior = Laplace(network, structure=structure, prior_precision=0.7, likelihood=tiny.Poisson(), samples=3)
    posterior.fit_posthoc([(x[:20], y[:20], weight[:20]), (x[20:], y[20:], weight[20:])])
    phi, w = torch.cat([x, torch.ones_like(x[:, :1])], 1), weight.double()[:, None]
    rates = network(x).detach().exp()  # (32, C)
    if structure == "full":
        expected = [(w * rates[:, c, None] * phi).T @ phi for c in range(outputs)]
    else:
        expected = [(w[:, 0] @ rates[:, c]) * (w * phi).T @ phi / w.sum() for c in range(outputs)]
    variance = torch.stack([torch.linalg.inv(g + 0.7 * torch.eye(5, dtype=g.dtype)).diagonal() for g in expected])
    torch.testing.assert_close(posterior.variance["weight"], variance[:, :4], rtol=0, atol=1e-10)
    torch.testing.assert_close(posterior.variance["bias"], variance[:, 4], rtol=0, atol=1e-10)
    log_prob = (w[:, 0] * torch.distributions.Poisson(rates).log_prob(y).sum(1)).sum()
    torch.testing.assert_close(posterior.curvature[0].log_likelihood, log_prob, rtol=0, atol=1e-10)
    assert posterior.predict(x).mean.shape == (32, outputs)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_classes_of_ones_own_count_at_the_pixels_that_count(structure):
    torch.manual_seed(0)
    network = tiny.segmenter().double()
    x, y = torch.randn(3, 2, 5, 6, dtype=torch.float64), torch.randint(3, (3, 5, 6))
    y[:, :2] = 255
    mine, thrice = tiny.Sharper(ignore_index=255), copy.deepcopy(network)
    for parameter in thrice[-1].parameters():
        parameter.data *= 3
    keywords = {"structure": structure, "samples": 2}
    found = Laplace(network, likelihood=mine, **keywords).fit_posthoc([(x, y)]).curvature[0]
    plain = Laplace(thrice, likelihood=ds.Classification(ignore_index=255), **keywords).fit_posthoc([(x, y)])
    expected = 9 * plain.curvature[0].eigenvalues
    torch.testing.assert_close(found.eigenvalues, expected, rtol=0, atol=1e-9)


def test_each_network_of_a_list_has_the_curvature_of_its_own_outputs():
    x, y = data(outputs=1)[0], torch.ones(32, 1)
    networks = [nn.Linear(4, 1).double() for _ in range(2)]
    keywords = {"likelihood": tiny.Poisson(), "prior_precision": 1.0, "samples": 2}
    variance = Laplace(networks, **keywords).fit_posthoc([(x, y)]).variance["weight"]
    alone = [Laplace(each, **keywords).fit_posthoc([(x, y)]).variance["weight"] for each in networks]
    torch.testing.assert_close(variance, torch.stack(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.predict(tiny.points()[0]),
        lambda p: p.member(0),
        lambda p: p.draw(),
        lambda p: p.log_marginal_likelihood(),
        lambda p: p.use_prior_precision(1.0),
        lambda p: p.mean,
        lambda p: ds.evaluate(p, [tiny.points()]),
    ],
)
def test_what_needs_data_says_so_before_they_were_seen(use):
    refuses(lambda: use(Laplace(tiny.mlp().double())), r"expected a fitted Laplace.*call fit_posthoc\(loader\)")


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("covariance", ["rows", "joint"])
def test_drawn_functions_differ_from_the_network_in_the_last_layer_alone(structure, covariance):
    posterior = fitted(structure, covariance=covariance)
    network, members = posterior.network.state_dict(), [posterior.member(i).state_dict() for i in range(5)]
    for name, tensor in network.items():
        same = [torch.equal(member[name], tensor) for member in members]
        assert same == [not name.startswith("3.")] * 5, name
    spread = torch.stack([member["3.weight"] for member in members]).std(0)
    assert float(spread.min()) > 0


def test_the_network_below_the_last_layer_runs_once_for_all_samples():
    posterior, calls = fitted(), []
    posterior.network[0].register_forward_hook(lambda *_: calls.append(1))
    drawn = Laplace(posterior.network, samples=50).fit_posthoc([tiny.points()]).draw()
    calls.clear()
    assert drawn(tiny.points()[0]).shape == (50, 12, 3)
    assert len(calls) == 1
    assert drawn.particles.how == "vectorised"  # and did not fall back


def test_fitting_leaves_the_network_modes_and_random_streams_as_found():
    network = tiny.mlp(dropout=0.5).double().train()
    network[1].eval()
    before, modes = tiny.state(network), [m.training for m in network.modules()]
    posterior = Laplace(network, samples=3)
    torch.manual_seed(4)
    posterior.fit_posthoc([tiny.points()])
    assert tiny.largest_difference(before, tiny.state(network)) == 0
    assert [m.training for m in network.modules()] == modes
    assert not any(module._forward_hooks for module in network.modules())
    after = torch.get_rng_state()
    torch.manual_seed(4)
    torch.randint(2**62, ())  # the seed of the draw, and nothing else
    assert torch.equal(after, torch.get_rng_state())


def test_another_precision_draws_anew_and_leaves_what_was_drawn():
    posterior, x = fitted().eval(), tiny.points()[0]
    drawn, evidence = posterior.draw(), posterior.log_marginal_likelihood()
    before, spread = drawn(x), drawn(x).std(0).mean()
    found = posterior.precision
    posterior.use_prior_precision(1e4)
    assert posterior.precision == 1e4 != found
    assert torch.equal(drawn(x), before)
    assert posterior.log_marginal_likelihood() < evidence
    assert posterior.draw()(x).std(0).mean() < 0.1 * spread
    torch.testing.assert_close(posterior(x).mean(0), posterior.current()(x)[0], rtol=0, atol=0.1)
    posterior.use_prior_precision("marginal_likelihood")
    assert float(posterior.log_marginal_likelihood()) == pytest.approx(float(evidence))
    assert posterior.precision == pytest.approx(found)


def test_another_precision_after_further_training_belongs_to_the_network_as_it_was_fitted():
    posterior, x = fitted(prior_precision=1e8), tiny.points()[0]
    before = posterior(x)
    with torch.no_grad():
        for parameter in posterior.network.parameters():
            parameter.add_(1.0)
    posterior.use_prior_precision(1e9)
    torch.testing.assert_close(posterior(x), before, rtol=0, atol=1e-2)


def test_fit_trains_as_map_does_and_fits_at_the_end():
    x, y = tiny.points(24)

    def trained(method, **keywords):
        torch.manual_seed(1)
        posterior = method(tiny.mlp().double(), **keywords)
        ds.fit(posterior, [(x, y)], epochs=3, validation=[(x, y)], progress=False, engine="loop")
        return posterior

    plain, posterior = trained(ds.MAP), trained(Laplace, samples=3)
    network = plain.particles.template.network
    assert tiny.largest_difference(tiny.state(network), tiny.state(posterior.network)) == 0
    assert torch.equal(posterior.mean["3.weight"], network[3].weight)
    again = Laplace(network, samples=3).fit_posthoc([(x, y)])
    torch.testing.assert_close(again.log_marginal_likelihood(), posterior.log_marginal_likelihood(), rtol=0, atol=1e-10)


def test_it_watches_a_run_with_others_and_is_fitted_to_a_frozen_network_too():
    run = ds.track(tiny.mlp().double(), [ds.MAP, Laplace])
    x, y = tiny.points(24)
    ds.fit(run, [(x, y)], epochs=2, progress=False, engine="loop")
    watcher = run.watchers["laplace"]
    assert torch.equal(watcher.mean["3.bias"], watcher.network[3].bias)
    before = watcher.predict(x).mean
    frozen = Laplace(copy.deepcopy(watcher.network).requires_grad_(False), samples=2000).fit_posthoc([(x, y)])
    assert float((frozen.predict(x).mean - before).abs().max()) < 0.5


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_loaded_one_goes_on_where_it_was_saved(structure, tmp_path):
    posterior, x = fitted(structure, prior_precision=2.0), tiny.points()[0]
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, tiny.mlp())
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)
    assert torch.equal(loaded.log_marginal_likelihood(), posterior.log_marginal_likelihood())
    for each in (loaded, posterior):
        torch.manual_seed(9)
        each.use_prior_precision("marginal_likelihood")
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)


def test_one_that_was_not_fitted_is_saved_and_fitted_later(tmp_path):
    torch.manual_seed(0)
    posterior = Laplace(tiny.mlp().double(), structure="kron", samples=3, layers="3")
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, tiny.mlp())
    assert loaded.config() == posterior.config()
    for each in (loaded, posterior):
        torch.manual_seed(9)
        each.fit_posthoc([tiny.points()])
    x = tiny.points()[0]
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)


def test_a_state_brings_its_curvature_along_and_one_without_takes_it_away():
    posterior, x = fitted(), tiny.points()[0]
    other = Laplace(tiny.mlp().double(), samples=5)
    empty = copy.deepcopy(other.state_dict())
    other.load_state_dict(posterior.state_dict())
    assert torch.equal(other.predict(x).member_means, posterior.predict(x).member_means)
    other.load_state_dict(fitted("kron").state_dict())
    assert other.curvature[0].structure == "kron"
    other.load_state_dict(empty)
    assert other.curvature is None
    refuses(lambda: other.predict(x), "expected a fitted Laplace")


def test_a_failed_fit_leaves_what_there_was():
    posterior, (x, y) = fitted(), tiny.points()
    before, outputs = tiny.state(posterior), posterior.predict(x).member_means
    for loader in ([], [(x, y), (x * torch.nan, y)], [(x, y), (x, y + 3)], [(x, y, torch.zeros(12))]):
        with pytest.raises(ValueError, match=r"at least one example|finite inputs|labels in 0"):
            posterior.fit_posthoc(loader)
        assert tiny.largest_difference(before, tiny.state(posterior)) == 0
        assert torch.equal(posterior.predict(x).member_means, outputs)
    posterior.network[3].weight.data.fill_(1e308)
    refuses(lambda: posterior.fit_posthoc([(100 * x, y)]), "expected finite outputs")


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"structure": "diag"}, "expected structure of full, kron, auto"),
        ({"covariance": "diagonal"}, "expected covariance of rows, joint"),
        ({"prior_precision": 0.0}, "expected prior_precision above 0"),
        ({"prior_precision": math.nan}, "expected prior_precision above 0"),
        ({"prior_precision": True}, "expected prior_precision as a number"),
        ({"prior_precision": "marglik"}, "prior_precision of marginal_likelihood, got 'marglik'; or pass 1/σ²"),
        ({"samples": 0}, "expected samples of at least 1"),
        ({"posterior_temperature": 0}, "expected posterior_temperature above 0, got 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(keywords, words):
    refuses(lambda: Laplace(tiny.mlp(), **keywords), words, (ValueError, TypeError))


class Ending(nn.Module):
    """A last layer, called in one way or another, and something done afterwards."""

    def __init__(self, ending):
        super().__init__()
        self.first, self.head, self.ending = nn.Linear(4, 5), nn.Linear(5, 3), ending

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        outputs = self.head(input=hidden) if self.ending == "keyword" else self.head(hidden)
        if self.ending == "features":
            hidden.zero_()
        return outputs


def ending(kind):
    torch.manual_seed(0)
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.arange(20) % 3
    return Laplace(Ending(kind).double(), prior_precision=1.0).fit_posthoc([(x, y)]).variance


@pytest.mark.parametrize("times", [0, 2])
def test_a_batch_that_passes_the_last_layer_twice_or_not_at_all_is_seen(times):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 3), nn.Linear(4, 4)

        def forward(self, x):
            if len(x) > 5:
                return self.last(self.first(x))
            return self.last(F.pad(self.last(x), (0, 1))) if times else self.first(x)[:, :3]

    x, y = tiny.points(24)
    with pytest.raises(ValueError, match=f"that are called once per batch, got 'last' called {times} times"):
        Laplace(Other().double(), samples=2).fit_posthoc([(x[:20], y[:20]), (x[20:], y[20:])])


def test_what_is_done_to_the_features_in_place_changes_nothing():
    for kind in ("features", "keyword"):
        torch.testing.assert_close(ending(kind), ending("plain"))


def test_a_layer_too_wide_for_the_whole_matrix_gets_a_product(caplog, monkeypatch, tmp_path):
    monkeypatch.setattr("dissensus.methods.parts.last_layer.LARGEST", 8 * 100**2)
    network = nn.Linear(15, 8)  # 128 weights
    loader = [(torch.randn(5, 15), torch.arange(5))]
    refuses(lambda: Laplace(network, structure="full").fit_posthoc(loader), 'structure="kron"')
    caplog.set_level("INFO", "dissensus")
    posterior = Laplace(network, samples=2).fit_posthoc(loader)
    assert posterior.curvature[0].structure == "kron"
    assert caplog.text.count("structure='kron' where a full curvature would exceed 1 GiB") == 1
    ds.save(posterior, tmp_path)
    assert ds.load(tmp_path, network).curvature[0].structure == "kron"


@pytest.mark.parametrize("covariance", ["rows", "joint"])
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_posterior_temperature_is_a_factor_of_the_covariance_and_of_nothing_else(structure, covariance, tmp_path):
    found = []
    for temperature in (1.0, 0.3):
        torch.manual_seed(0)
        found.append(fitted(structure, covariance=covariance, posterior_temperature=temperature))
    plain, cold = found
    deviations = [
        {name: rows - posterior.mean[name] for name, rows in tiny.sampled(posterior).items()}
        for posterior in found
        if torch.manual_seed(5)
    ]
    for name, deviation in deviations[0].items():
        torch.testing.assert_close(deviations[1][name], 0.3**0.5 * deviation, rtol=0, atol=1e-12)
        torch.testing.assert_close(cold.variance[name], 0.3 * plain.variance[name], rtol=1e-12, atol=0)
        assert torch.equal(cold.mean[name], plain.mean[name])
    assert cold.precision == plain.precision
    assert torch.equal(cold.log_marginal_likelihood(), plain.log_marginal_likelihood())
    ds.save(cold, tmp_path)
    loaded = ds.load(tmp_path, tiny.mlp())
    assert loaded.posterior_temperature == 0.3
    assert float(loaded.temperature) == 1.0  # the calibration's, another thing


def test_a_first_batch_too_large_to_look_at_is_cut_where_it_has_rows(monkeypatch):
    network = tiny.Network(lambda self, x, scale, table: self.head(x * scale + table[6]), head=nn.Linear(2, 3))
    monkeypatch.setattr("dissensus.methods.laplace.NUMBERS", 5 * 10 * 3)  # five rows of the twenty
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)), torch.tensor(2.0), torch.ones(7, 2)
    posterior = Laplace(network, samples=10).fit_posthoc([(x, torch.arange(20) % 3)])
    assert posterior.ready


SAVED = json.loads((Path(__file__).parent / "laplace_torch.json").read_text())
PROBLEM = {name: torch.tensor(value, dtype=torch.float64) for name, value in SAVED["problem"].items()}
CASES = {"classification": ("full", True), "classification kron": ("kron", False), "regression": ("full", True)}


def fitted_to_saved(case, precision, **keywords):
    structure, bias = CASES[case]
    regression = case == "regression"
    outputs, y = (2, PROBLEM["real"]) if regression else (3, PROBLEM["classes"].long())
    layer = nn.Linear(4, outputs, bias=bias).double()
    layer.weight.data = PROBLEM["weight"][:outputs].clone()
    if bias:
        layer.bias.data = PROBLEM["bias"][:outputs].clone()
    likelihood = ds.Regression(0.3) if regression else ds.Classification()
    posterior = ds.Laplace(layer, structure=structure, prior_precision=precision, likelihood=likelihood, **keywords)
    return posterior.fit_posthoc([(PROBLEM["x"][:25], y[:25]), (PROBLEM["x"][25:], y[25:])])


def output_covariance(posterior, x):
    """(B, C, C), from the posterior's own square root: every unit of noise is one sample."""
    curvature = posterior.curvature[0]
    size = curvature.mean.numel()
    units = torch.eye(size, dtype=torch.float64).reshape(size, *curvature.mean.shape)
    root = curvature.sample_joint(units)  # (P, C, D)
    features = x if curvature.mean.shape[1] == x.shape[1] else torch.cat([x, torch.ones_like(x[:, :1])], 1)
    outputs = torch.einsum("pcd,bd->bcp", root, features)
    return outputs @ outputs.mT


def compare(found):
    for case, entry in found.items():
        for key, evidence in entry["evidence"].items():
            posterior = fitted_to_saved(case, float(key), samples=2)
            assert float(posterior.log_marginal_likelihood()) == pytest.approx(evidence, rel=1e-11), case
            covariance = output_covariance(posterior, PROBLEM["test"])
            expected = torch.tensor(entry["variances"][key], dtype=torch.float64)
            torch.testing.assert_close(covariance, expected, rtol=1e-10, atol=1e-12)


def test_evidence_and_variances_are_those_that_laplace_torch_gave():
    assert set(SAVED["found"]) == set(CASES)
    compare(SAVED["found"])


def test_evidence_and_variances_are_those_that_laplace_torch_gives():
    pytest.importorskip("laplace", reason="laplace-torch is not installed: its saved numbers are compared above")
    path = Path(__file__).parents[2] / "benchmarks" / "laplace_reference.py"
    spec = importlib.util.spec_from_file_location("laplace_reference", path)
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    problem = reference.problem()
    assert all(torch.equal(problem[name].double(), PROBLEM[name]) for name in PROBLEM)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)  # parts of it follow the default, not the network
        found = reference.measured(problem)
    finally:
        torch.set_default_dtype(before)
    compare(found)


@pytest.mark.parametrize("case", often(["classification kron"], ["classification"]))
def test_samples_by_rows_predict_what_the_probit_formula_stands_for(case):
    torch.manual_seed(0)
    posterior = fitted_to_saved(case, 3.0, samples=20_000)
    mean = posterior.predict(PROBLEM["test"]).mean
    probit = torch.tensor(SAVED["found"][case]["probabilities"]["3.0"], dtype=torch.float64)
    # An approximation of the integral over independent outputs: some hundredths off, as the other formula is not.
    assert float((mean - probit).abs().max()) < 0.05
    covariance = output_covariance(posterior, PROBLEM["test"])
    outputs = nn.functional.linear(PROBLEM["test"], posterior.network.weight, posterior.network.bias).detach()
    noise = torch.randn(200_000, *outputs.shape, dtype=torch.float64)
    exact = (outputs + noise * covariance.diagonal(dim1=1, dim2=2).sqrt()).softmax(2).mean(0)
    torch.testing.assert_close(mean, exact, rtol=0, atol=4 * 0.5 / math.sqrt(20_000))

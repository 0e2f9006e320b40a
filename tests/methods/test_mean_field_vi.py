"""MeanFieldVI against what is known: a conjugate posterior, the KL of torch, and the expectation over drawn functions."""

import copy

import pytest
import torch
from torch import distributions, nn

import dissensus as ds
import tiny
from dissensus.methods.parts.sampling_posterior import SamplingPosterior
from refusals import refuses
from thinning import often

SIZED = {"data_size": 24}


def tensors(posterior, kind):
    return torch.cat([tensor.flatten() for tensor in getattr(posterior, kind).values()])


@pytest.mark.parametrize("temperature", often([0.25], [1.0, 3.0]))
def test_of_a_gaussian_posterior_it_finds_the_mean_and_one_over_the_precisions(temperature):
    # Linear regression, correlated inputs: P = XᵀX / noise² + 1 / s². The optimum is N(P⁻¹ Xᵀy / noise², T / P_ii).
    generator = torch.Generator().manual_seed(0)
    points, noise, scale, copies = 32, 0.5, 0.7, 64
    x = torch.randn(points, 3, dtype=torch.float64, generator=generator)
    x[:, 1] += 0.8 * x[:, 0]
    y = x @ x.new_tensor([[0.5], [-1.0], [2.0]]) + noise * torch.randn(points, 1, dtype=x.dtype, generator=generator)
    with_one = torch.cat([x, torch.ones_like(y)], dim=1)
    precision = with_one.T @ with_one / noise**2 + torch.eye(4, dtype=x.dtype) / scale**2
    mean = torch.linalg.solve(precision, with_one.T @ y / noise**2).flatten()

    posterior = ds.MeanFieldVI(
        nn.Linear(3, 1).double(), likelihood=ds.Regression(noise=noise), weight_prior_std=scale, data_size=points,
        posterior_temperature=temperature, init_std=0.1,
    )  # fmt: skip
    optimizer = torch.optim.Adam(posterior.parameters(), lr=0.1)
    many = x.repeat(copies, 1), y.repeat(copies, 1)  # as many draws of each output
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.97 ** max(step - 80, 0)
        optimizer.zero_grad()
        posterior.backward(*many)
        optimizer.step()
    # Some 30 steps of 2048 draws each are averaged in the end: that leaves 1 to 3 % of a deviation, and 1 % of a variance.
    wanted = temperature / precision.diagonal()
    torch.testing.assert_close(tensors(posterior, "variance"), wanted, rtol=0.03, atol=0)
    assert float(((tensors(posterior, "mean") - mean) / wanted.sqrt()).abs().max()) < 0.05
    marginal = temperature * torch.linalg.inv(precision).diagonal()
    assert float((marginal / wanted).max()) > 1.4  # which is another answer


def twice():
    """One layer called twice, positions, an embedding, a tied weight."""

    def forward(self, x):
        hidden = torch.tanh(self.again(torch.tanh(self.again(torch.tanh(self.first(x))))))
        hidden = nn.functional.linear(hidden, self.read.weight) + self.words(x[:, 0].gt(0).long())
        return self.out(hidden)

    layers = {"first": nn.Linear(4, 5), "again": nn.Linear(5, 5), "read": nn.Linear(5, 5, bias=False)}
    network = tiny.Network(forward, **layers, words=nn.Embedding(3, 5), out=nn.Linear(5, 3, bias=False))
    network.out.weight = network.words.weight
    return network


def positions():
    """A linear layer over positions, a convolution, and a layer whose first axis is not the batch."""

    def forward(self, x):
        hidden = torch.tanh(self.conv(self.each(x[..., None]).transpose(1, 2)))  # (B, 4, 3)
        hidden = torch.tanh(self.turned(hidden.permute(2, 0, 1)))  # (3, B, 4): positions first
        return self.head(hidden.sum(0))

    layers = {"each": nn.Linear(1, 4), "conv": nn.Conv1d(4, 4, 2), "turned": nn.Linear(4, 4), "head": nn.Linear(4, 3)}
    return tiny.Network(forward, **layers)


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), ["0", "2"]),
    "twice": (twice, ["first"]),
    "positions": (positions, ["each", "conv", "head"]),
    "recurrent": (
        lambda: tiny.Network(
            lambda self, x: self.head(self.rnn(x[..., None])[0][:, -1]),
            rnn=nn.GRU(1, 4, batch_first=True),
            head=nn.Linear(4, 3),
        ),
        ["head"],
    ),
}


@pytest.mark.parametrize(("make", "apart"), NETWORKS.values(), ids=NETWORKS)
def test_the_loss_is_the_mean_nll_of_drawn_functions_plus_kl_over_n(make, apart):
    torch.manual_seed(1)
    x, y = tiny.points(3)
    posterior = ds.MeanFieldVI(make().double(), init_std=0.6, samples=200, train_samples=20, **SIZED).eval()
    cost = float(posterior.kl()) / 24
    with torch.no_grad():
        losses = torch.stack([posterior.loss(x, y) for _ in range(12)]) - cost
        each = posterior.draw()(x)  # (S, B, C)
    assert posterior._layers == apart
    assert list(posterior.account.converted) == apart
    nll = torch.stack([nn.functional.cross_entropy(outputs, y) for outputs in each])
    error = (losses.var() / len(losses) + nll.var() / len(nll)).sqrt()
    assert abs(float(losses.mean() - nll.mean())) < 4 * float(error)
    assert float(error) < 0.2


def test_a_layer_that_is_called_twice_has_the_same_weights_both_times():
    # y = w (w x) with w ~ N(μ, σ²): E y = μ² + σ², of two draws it would be μ².
    network = tiny.Network(lambda self, x: self.w(self.w(x)), w=nn.Linear(1, 1, bias=False)).double()
    nn.init.constant_(network.w.weight, 0.5)
    posterior = ds.MeanFieldVI(network, init_std=1.0, train_samples=200, likelihood=ds.Regression(noise=1.0), **SIZED)
    one = torch.ones(1, 1, dtype=torch.float64)
    with torch.no_grad():
        losses = torch.stack([posterior.loss(one, 0 * one) for _ in range(8)])
    fourth = 0.5**4 + 6 * 0.5**2 + 3  # E w⁴ at σ = 1
    expected = fourth / 2 + 0.5 * float(torch.tensor(2 * torch.pi).log()) + float(posterior.kl()) / 24
    assert float(losses.mean()) == pytest.approx(expected, abs=4 * float(losses.std()) / 8**0.5)
    assert float(losses.std()) / 8**0.5 < 0.25  # two draws would have E w² E w² / 2 in place of E w⁴ / 2: 1.5 less


@pytest.mark.parametrize("std", [0.7, {"0.*": 0.3, "*": 2.0}], ids=["number", "table"])
def test_kl_and_entropy_are_those_of_torchs_distributions(std):
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    posterior = ds.MeanFieldVI(network, weight_prior_std=std, init_std=0.4, **SIZED)
    with torch.no_grad():
        for parameter in posterior.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    kl = entropy = 0.0
    for name, mean in posterior.mean.items():
        scale = std if isinstance(std, float) else std["0.*" if name.startswith("0.") else "*"]
        q = distributions.Normal(mean, posterior.variance[name].sqrt())
        kl += float(distributions.kl_divergence(q, distributions.Normal(0.0, mean.new_tensor(scale))).sum())
        entropy += float(q.entropy().sum())
    assert float(posterior.kl()) == pytest.approx(kl, rel=1e-12)
    assert float(posterior.entropy()) == pytest.approx(entropy, rel=1e-12)
    # and with T: E −log p(y, w) − T H, by the same random numbers
    losses = []
    for temperature in (1.0, 0.3):
        posterior.posterior_temperature = temperature
        torch.manual_seed(0)
        losses.append(float(posterior.loss(*tiny.points()).detach()))
    assert losses[1] - losses[0] == pytest.approx(0.7 * entropy / 24, rel=1e-9)


def test_annealing_weighs_the_cost_and_train_samples_average():
    x, y = tiny.points()
    network = tiny.mlp().double()
    posterior = ds.MeanFieldVI(network, annealing=ds.Annealing("linear", steps=4), **SIZED).eval()
    found = []
    for steps in (0, 1, 4):
        posterior.steps.fill_(steps)
        torch.manual_seed(0)
        found.append(float(posterior.loss(x, y).detach()))
    assert found[1] - found[0] == pytest.approx(float(posterior.kl()) / 24 / 4, rel=1e-6)
    assert found[2] - found[0] == pytest.approx(float(posterior.kl()) / 24, rel=1e-6)
    torch.manual_seed(0)
    posterior = ds.MeanFieldVI(network, train_samples=2, **SIZED).eval()
    twice = float(posterior.loss(x, y).detach())
    posterior.train_samples = 1
    torch.manual_seed(0)
    posterior.before_step(posterior.prepare_batch(ds.core.batch.Batch(x, y, None)))
    torch.manual_seed(0)
    once = [float(posterior.loss(x, y).detach()) for _ in range(2)]
    assert twice == pytest.approx(sum(once) / 2, rel=1e-12)


def test_it_starts_at_the_network_it_is_given_and_leaves_that_alone():
    network = tiny.mlp().double().eval()
    before, (x, y) = copy.deepcopy(network), tiny.points()
    posterior = ds.MeanFieldVI(network, init_std=1e-6, samples=2, **SIZED)
    torch.testing.assert_close(posterior.eval()(x)[1], network(x), rtol=0, atol=1e-3)
    torch.testing.assert_close(posterior.eval().current()(x)[0], network(x), rtol=0, atol=1e-12)
    ds.fit(posterior, [(x, y)], epochs=2, progress=False)
    assert tiny.largest_difference(tiny.state(network), tiny.state(before)) == 0
    assert type(posterior.member(0)[0]) is nn.Linear


def test_norm_layers_and_tensors_without_a_prior_stay_point_estimates():
    posterior = ds.MeanFieldVI(tiny.mlp().double(), weight_prior_std={"0.*": 1.0}, samples=4, **SIZED)
    assert list(posterior.mean) == ["0.weight", "0.bias"]
    assert not any("3." in name for name in posterior.particles.shared_parameters() if "latents" in name)
    posterior.backward(*tiny.points())
    assert posterior.account.left["3"] == "a point estimate: frozen, or no prior"
    posterior = ds.MeanFieldVI(tiny.mlp().double(), samples=4, **SIZED)
    assert list(posterior.mean) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    ds.fit(posterior, [tiny.points()], epochs=1, progress=False)
    drawn = [posterior.member(i) for i in range(4)]
    assert all(torch.equal(each[1].weight, drawn[0][1].weight) for each in drawn)
    assert not torch.equal(drawn[0][0].weight, drawn[1][0].weight)
    assert not torch.equal(drawn[0][1].running_mean, drawn[1][1].running_mean)  # each function has its own


def test_frozen_tensors_have_no_noise():
    network = tiny.mlp().double()
    network[0].weight.requires_grad_(False)
    posterior = ds.MeanFieldVI(network, samples=2, **SIZED)
    assert list(posterior.mean) == ["0.bias", "3.weight", "3.bias"]
    before = posterior.particles.shared_parameters()["network.0.weight"].clone()
    ds.fit(posterior, [tiny.points()], epochs=2, progress=False)
    assert torch.equal(posterior.member(0)[0].weight, before)


def test_a_network_that_takes_no_batch_of_two_has_one_draw_for_all(caplog):
    whole = tiny.Network(lambda self, x: self.layer(x.reshape(12, 4)), layer=nn.Linear(4, 3))
    posterior = ds.MeanFieldVI(whole.double(), **SIZED)
    with caplog.at_level("INFO", logger="dissensus"):
        posterior.backward(*tiny.points())
    assert posterior._layers == []
    assert "one weight draw per batch for all layers: the network fails on two examples" in caplog.text
    assert all(bool(p.grad.isfinite().all()) for p in posterior.parameters())


def test_activation_checkpointing_would_draw_other_noise_and_is_an_error():
    def run_again(self, x):
        return self.b(torch.utils.checkpoint.checkpoint(lambda h: self.a(h).tanh(), x, use_reentrant=False))

    posterior = ds.MeanFieldVI(tiny.Network(run_again, a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double(), **SIZED)
    refuses(lambda: posterior.backward(*tiny.points()), "got 'a' run again in the backward pass, without its noise")


def test_a_table_of_deviations_is_saved_and_loaded(tmp_path):
    posterior = ds.MeanFieldVI(tiny.mlp().double(), weight_prior_std={"0.*": 0.3, "*": 2.0}, samples=2, **SIZED)
    ds.fit(posterior, [tiny.points()], epochs=1, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, tiny.mlp())
    assert loaded.prior.std == {"0.*": 0.3, "*": 2.0}
    assert torch.equal(loaded.kl(), posterior.kl())


def test_what_it_cannot_do_is_a_clear_error():
    network = tiny.mlp().double()
    refuses(lambda: ds.MeanFieldVI(network), "expected data_size with a prior, got none")
    with pytest.raises(TypeError, match="expected a GaussianPrior, whose KL has a closed form"):
        ds.MeanFieldVI(network, prior=lambda params: params["0.bias"].sum(), **SIZED)
    for keyword in ("init_std", "posterior_temperature", "deviation_lr"):
        with pytest.raises(ValueError, match=f"expected {keyword} above 0, got 0"):
            ds.MeanFieldVI(network, **{keyword: 0.0}, **SIZED)
    with pytest.raises(ValueError, match="expected patterns that match names, got 'head"):
        ds.MeanFieldVI(network, weight_prior_std={"head.*": 1.0, "*": 1.0}, **SIZED)
    refuses(lambda: ds.track(network, [ds.MeanFieldVI]), "got the members of another posterior", TypeError)
    posterior = ds.MeanFieldVI(network, **SIZED)
    posterior.use_prior(None)
    told = r"expected a Gaussian prior on every learned deviation.*got none on '0.weight'"
    refuses(lambda: posterior.backward(*tiny.points()), told)


def test_weight_decay_that_would_move_deviations_is_said(caplog):
    posterior = ds.MeanFieldVI(tiny.mlp().double(), **SIZED)
    optimizer = torch.optim.AdamW(posterior.parameters(), lr=0.01, weight_decay=0.1)
    ds.fit(posterior, [tiny.points()], epochs=1, optimizer=optimizer, progress=False)
    assert "pulls standard deviations towards log 2 by its weight decay" in caplog.text
    groups = ds.MeanFieldVI(tiny.mlp(), deviation_lr=0.02, **SIZED).parameter_groups(0.001, 0.1)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.001, 0.0), (0.02, 0.0)]


@pytest.mark.parametrize(("rate", "said"), [(None, True), (0.1, False)])
def test_deviations_that_are_still_on_their_way_are_said(rate, said, caplog):
    torch.manual_seed(0)
    x = torch.randn(200, 6)
    loader = ds.data.Batches(x, (x.sum(1) > 0).long(), batch_size=200)
    posterior = ds.MeanFieldVI(ds.nets.MLP(6, 2, hidden=(8,)), data_size=200, deviation_lr=rate)
    ds.fit(posterior, loader, epochs=40, progress=False)
    assert ("the standard deviations have not converged: their median is 0.01" in caplog.text) == said


@pytest.mark.parametrize("annealing", [None, ds.Annealing("linear"), ds.Annealing("cyclic", steps=10)])
def test_looking_at_deviations_leaves_everything_as_it_was(annealing):
    posterior = ds.MeanFieldVI(tiny.mlp(), data_size=12, annealing=annealing)
    x, y = tiny.points()
    loader = ds.data.Batches(x.float(), y, batch_size=6)
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    for _ in range(2):
        torch.manual_seed(3)
        ds.refresh(posterior, loader)
        state = torch.get_rng_state()
    with torch.inference_mode():
        ds.refresh(posterior, loader)
    torch.manual_seed(3)
    SamplingPosterior.store_draw(posterior, loader)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, posterior.state_dict()[name]) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in posterior.parameters())

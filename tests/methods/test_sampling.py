"""Sampled networks: fixed functions, stored draws that come and go with the state, draws in parts, white noise."""

import copy
import functools
import logging
import pickle

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.engine.break_even import decide_by_count
from dissensus.engine.loader import Loader
from dissensus.methods import SWA, SWAG, TRADI, GaussianPerturbation, SnapshotEnsemble
from dissensus.methods.parts import sampling_posterior
from dissensus.numerics.randomness import own_generator
from refusals import refuses
from thinning import thinned

METHODS = [TRADI, SWAG, SWA, SnapshotEnsemble, GaussianPerturbation]


def trained(posterior, steps=3):
    """The posterior after a few steps of gradient descent on points, each observed."""
    x, y = tiny.points(24)
    optimizer = torch.optim.SGD([p for p in posterior.network.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        posterior.backward(x, y)
        optimizer.step()
        posterior.observe(optimizer)
    return posterior


def test_functions_are_fixed_whatever_the_mode_of_the_network():
    posterior, (x, y) = GaussianPerturbation(tiny.mlp(dropout=0.5).double(), samples=3).train(), tiny.points()
    drawn = posterior.draw()
    before = tiny.state(posterior)
    outputs = drawn(x)
    assert torch.equal(drawn(x), outputs)  # dropout is off
    assert posterior.network[1].training
    assert tiny.largest_difference(before, tiny.state(posterior)) == 0  # batch norm has not moved
    posterior.backward(x, y)  # the network moves its statistics and keeps them to itself
    assert torch.equal(drawn(x), outputs)
    posterior.eval()
    assert torch.equal(drawn(x), outputs)


def test_a_state_brings_its_draw_along_and_one_without_takes_it_away():
    posterior, (x, y) = GaussianPerturbation(tiny.mlp().double(), samples=3), tiny.points()
    empty = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    ds.refresh(posterior, [(x, y)])
    full = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    assert full.keys() > empty.keys()
    outputs = posterior.predict(x).member_means
    posterior.load_state_dict(empty)
    assert posterior.stored is None
    posterior.load_state_dict(full)
    assert torch.equal(posterior.predict(x).member_means, outputs)


def test_a_stored_draw_is_no_parameter_follows_dtype_and_pickles():
    posterior, (x, y) = GaussianPerturbation(tiny.mlp().double(), samples=3), tiny.points()
    names = [name for name, _ in posterior.named_parameters()]
    ds.refresh(posterior, [(x, y)])
    assert [name for name, _ in posterior.named_parameters()] == names
    assert posterior.float()(x.float()).dtype == torch.float32
    copied = pickle.loads(pickle.dumps(posterior))
    assert torch.equal(copied.predict(x.float()).member_means, posterior.predict(x.float()).member_means)


def test_buffers_that_are_not_saved_stay_out_of_files(tmp_path):
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.register_buffer("scale", torch.tensor(2.0), persistent=False)

        def forward(self, x):
            return self.scale * super().forward(x)

    posterior, x = GaussianPerturbation(Scaled(), samples=2), torch.randn(5, 4)
    ds.refresh(posterior, [])
    outputs = posterior.predict(x).member_means
    ds.save(posterior, tmp_path)
    assert not any("scale" in name for name in posterior.state_dict())
    assert torch.equal(ds.load(tmp_path, Scaled()).predict(x).member_means, outputs)


# name -> (layer, shape of what it normalises)
NORMS = {
    "batch norm 1d": (lambda: nn.BatchNorm1d(3), (3, 4)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(3), (3, 2, 2)),
    "batch norm 3d": (lambda: nn.BatchNorm3d(3), (3, 2, 2, 1)),
    "synchronised": (lambda: nn.SyncBatchNorm(3), (3, 2, 2)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (3, 2, 2)),
    "own kind": (lambda: tiny.Doubled(3), (3, 2, 2)),
}


@pytest.mark.parametrize(("method", "norm"), thinned([TRADI, SWAG, SWA, GaussianPerturbation], list(NORMS), every=4))
def test_statistics_belong_to_the_samples_and_are_found_again_without_the_training_set(method, norm, tmp_path):
    layer, shape = NORMS[norm]

    def network():
        ends = nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
        return nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, shape), layer(), *ends).double()

    posterior, (x, y) = trained(method(network())), tiny.points(24)
    ds.refresh(posterior, [(x[:10], y[:10]), (x[10:], y[10:])])
    member = posterior.member(0)
    seen = [member[:2](part).detach().flatten(2) for part in (x[:10], x[10:])]
    mean = sum(len(h) * h.mean((0, 2)) for h in seen) / 24
    torch.testing.assert_close(member[2].running_mean, mean, rtol=0, atol=1e-12)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, network())
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)


def test_a_failed_refresh_leaves_the_draw_there_was():
    posterior, (x, y) = GaussianPerturbation(tiny.mlp().double(), samples=3), tiny.points()
    ds.refresh(posterior, [(x, y)])
    before, outputs = tiny.state(posterior), posterior.predict(x).member_means
    for loader in ([], [(x, y), (x[:, :2], y)], [(x, y), (x * torch.nan, y)]):
        with pytest.raises((ValueError, RuntimeError), match=r"at least one batch|shapes cannot be multiplied|NaN"):
            ds.refresh(posterior, loader)
        assert tiny.largest_difference(before, tiny.state(posterior)) == 0
        assert torch.equal(posterior.predict(x).member_means, outputs)


@pytest.mark.parametrize("method", METHODS)
def test_frozen_parameters_come_back_frozen_from_a_file(method, tmp_path):
    network, (x, y) = tiny.mlp().double(), tiny.points(24)
    network[0].requires_grad_(False)
    posterior = trained(method(network))
    ds.refresh(posterior, [(x, y)])
    ds.save(posterior, tmp_path)
    template = tiny.mlp()  # where nothing is frozen
    loaded = ds.load(tmp_path, template)
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)
    assert torch.equal(loaded.member(0)[0].weight, network[0].weight)
    assert [p.requires_grad for p in loaded.network.parameters()] == [p.requires_grad for p in network.parameters()]
    assert all(p.requires_grad for p in template.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_freezing_later_changes_nothing_about_what_is_sampled(method):
    """As for a network that is only used from here on."""
    posterior, (x, y) = trained(method(tiny.mlp().double())), tiny.points(24)
    torch.manual_seed(1)
    expected = posterior.predict(x).member_means
    posterior.requires_grad_(False)
    torch.manual_seed(1)
    assert torch.equal(posterior.predict(x).member_means, expected)
    ds.refresh(posterior, [(x, y)])


@pytest.mark.parametrize("method", METHODS)
def test_training_what_was_frozen_is_refused_and_nothing_is_counted(method):
    network, (x, _) = tiny.mlp().double(), tiny.points(24)
    network[0].requires_grad_(False)
    posterior = trained(method(network))
    network[0].requires_grad_(True)
    name = method.__name__
    message = f"same trainable parameters as when {name} was built, got '0.weight', which was frozen then"
    network(x).sum().backward()
    before = tiny.state(posterior)
    if method is not GaussianPerturbation:  # which observes nothing
        refuses(lambda: posterior.observe(torch.optim.SGD(network.parameters(), lr=0.0)), message)
    refuses(lambda: posterior.draw(), message)
    assert tiny.largest_difference(before, tiny.state(posterior)) == 0
    told = f"expected trainable parameters for {name}, got none"
    refuses(lambda: method(tiny.mlp().requires_grad_(False)), told)


@pytest.mark.parametrize("method", [TRADI, SWAG, SWA, SnapshotEnsemble])
def test_parameters_added_after_construction_are_refused_and_the_step_is_not_counted(method):
    posterior, (x, _) = trained(method(nn.Sequential(nn.Linear(4, 3)).double())), tiny.points(24)
    posterior.network.append(nn.Linear(3, 3).double())
    posterior.network(x).sum().backward()
    before = tiny.state(posterior)
    told = f"that {method.__name__} was built with, got '1.weight' added, removed or replaced since; change"
    refuses(lambda: posterior.observe(torch.optim.SGD(posterior.network.parameters(), lr=0.1)), told)
    refuses(posterior.draw, told)
    assert tiny.largest_difference(before, tiny.state(posterior)) == 0


@pytest.mark.parametrize(("method", "keywords", "message"), [
    (SWAG, {"rank": 0}, "rank of at least 1, got 0"),
    (SWAG, {"samples": 0}, "samples of at least 1, got 0"),
    (SWAG, {"posterior_temperature": -0.5}, "posterior_temperature of at least 0, got -0.5"),
    (SWAG, {"start": -1}, "start of at least 0, got -1"),
    (SWAG, {"every": 0}, "every of at least 1, got 0"),
    (TRADI, {"covariance": "full"}, "covariance of shared, diagonal, released, got 'full'"),
    (TRADI, {"correlation": "network"}, "correlation of tensor, layer, got 'network'"),
    (TRADI, {"drift": "step"}, "drift of gradient, none, got 'step'"),
    (TRADI, {"init": "zero"}, "init of current, he, got 'zero'"),
    (TRADI, {"samples": 0}, "samples of at least 1, got 0"),
    (TRADI, {"features": 0}, "features of at least 1, got 0"),
    (TRADI, {"bandwidth": -1.0}, "bandwidth of at least 0, got -1.0"),
    (TRADI, {"state_noise": (-1e-4, 1e-4)}, "state_noise of at least 0, got -0.0001"),
    (TRADI, {"measurement_noise": (0.0, 10.0)}, "measurement_noise above 0 and of at least 0, got 0.0"),
    (GaussianPerturbation, {"noise": -0.1}, "noise of at least 0"),
    (GaussianPerturbation, {"samples": 0}, "samples of at least 1"),
    (SnapshotEnsemble, {"members": 0}, "members of at least 1, got 0"),
])  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(method, keywords, message):
    refuses(lambda: method(tiny.mlp(), **keywords), f"expected {message}")


@pytest.mark.parametrize("method", METHODS)
def test_targets_that_are_not_numbers_change_nothing(method):
    posterior, (x, _) = method(tiny.mlp(outputs=1).double(), likelihood=ds.Regression(noise=1.0)), tiny.points()
    y = torch.zeros(12, 1, dtype=torch.float64)
    y[3] = torch.nan
    posterior.begin(1, 1)  # as fit will: when snapshots are to be taken is part of the state
    before = tiny.state(posterior)
    for run in (lambda: posterior.backward(x, y), lambda: ds.fit(posterior, [(x, y)], epochs=1, progress=False)):
        refuses(run, "expected finite targets, got NaN or infinity; clean the data")
        after = {**tiny.state(posterior), **{name: t for name, t in before.items() if name.endswith("plan")}}
        assert tiny.largest_difference(before, after) == 0  # when snapshots will be taken aside
        assert not tiny.gradients(posterior)
    soft = method(tiny.mlp().double())
    told, nan = r"soft labels ≥ 0 that sum to one over axis 1 \(classes\), got others", torch.full((12, 3), torch.nan)
    refuses(lambda: soft.backward(x, nan.double()), told)


DRAWN = {
    "swag": lambda networks: ds.SWAG(networks, rank=3, samples=5),
    "tradi": lambda networks: ds.TRADI(networks, samples=5),
    "gaussian_perturbation": lambda networks: ds.GaussianPerturbation(networks, samples=5),
    "mean_field_vi": lambda networks: ds.MeanFieldVI(networks, samples=5, data_size=24),
}


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def trained_copy(method, members):
    """A copy: the training itself is done once."""
    return copy.deepcopy(trained_once(method, members))


@functools.cache
def trained_once(method, members):
    networks = network(0) if members == 1 else [network(seed) for seed in range(members)]
    posterior = DRAWN[method](networks)
    ds.fit(posterior, [tiny.points(24)], epochs=12, progress=False)
    return posterior


def with_room_for_two(posterior, monkeypatch):
    free = int(2 * posterior.drawn_bytes() * 2.1 / (5 * 0.45))
    monkeypatch.setattr(sampling_posterior, "free_bytes", lambda device: free)
    return posterior


@pytest.mark.parametrize(("method", "members"), thinned(list(DRAWN), [1, 3], every=2))
def test_parts_have_the_functions_of_their_samples_network_by_network(method, members, monkeypatch, caplog):
    posterior, loader = trained_copy(method, members), [tiny.points(24)]
    x = tiny.points(7)[0]
    posterior.stored = None
    with_room_for_two(posterior, monkeypatch)
    torch.manual_seed(3)
    generator = own_generator(posterior.device)
    samples = [posterior.sample(size, generator) for size in (2, 2, 1)]  # name -> (M, S, ...) of each part
    torch.manual_seed(3)
    with caplog.at_level(logging.INFO, logger="dissensus"):
        ds.refresh(posterior, loader)
    assert "it is made in parts of 2 of 5 samples" in caplog.text
    assert posterior.stored.sizes == [2, 2, 1] * members
    drawn = posterior.draw()
    assert (drawn.members, drawn.networks) == (5 * members, members)
    whole = {name: torch.cat([part[name] for part in samples], dim=1) for name in samples[0]}
    monkeypatch.setattr(sampling_posterior, "free_bytes", lambda device: None)
    families = posterior._make_families(whole)  # the same samples at once
    posterior._refresh_statistics(families.each, loader)
    torch.testing.assert_close(drawn(x), posterior.make_functions(families)(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(drawn.member(3)(x), drawn(x)[3], rtol=0, atol=1e-12)
    torch.testing.assert_close(posterior.predict(x).mean, drawn.predict(x).mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("method", "members"), thinned(list(DRAWN), [3, 1], every=4))
def test_a_draw_in_parts_is_saved_and_loaded_bit_for_bit(method, members, monkeypatch, tmp_path):
    posterior, x = with_room_for_two(trained_copy(method, members), monkeypatch), tiny.points(7)[0]
    ds.refresh(posterior, [tiny.points(24)])
    ds.save(posterior, tmp_path / "saved")
    monkeypatch.undo()
    loaded = ds.load(tmp_path / "saved", network(9))
    assert loaded.stored.sizes == [2, 2, 1] * members
    assert torch.equal(loaded(x), posterior(x))
    other = trained_copy(method, members)  # has a whole draw, which gives way to the parts
    other.load_state_dict(posterior.state_dict())
    assert torch.equal(other(x), posterior(x))
    before, copied = posterior(x), copy.deepcopy(posterior)
    assert posterior.float()(x.float()).dtype == torch.float32  # parts follow the precision, and not those of copies
    assert torch.equal(copied(x), before)
    posterior.load_state_dict(trained_copy(method, members).state_dict())
    assert posterior.stored.sizes == [5 * members]


def test_an_interrupted_run_with_a_draw_in_parts_goes_on_with_it(monkeypatch, tmp_path):
    posterior = ds.SWAG([network(0), network(1)], rank=3, samples=5)
    with_room_for_two(posterior, monkeypatch)
    settings = {"progress": False, "checkpoint": tmp_path / "c.pt"}
    ds.fit(posterior, [tiny.points(24)], epochs=12, **settings)
    assert posterior.stored.parts
    again = ds.SWAG([network(0), network(1)], rank=3, samples=5)
    ds.fit(again, [tiny.points(24)], epochs=12, **settings)
    assert torch.equal(again(tiny.points(7)[0]), posterior(tiny.points(7)[0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_parts_stay_on_the_host_and_run_on_the_gpu(monkeypatch):
    posterior = trained_copy("swag", 3).to("cuda")
    with_room_for_two(posterior, monkeypatch)
    x = tiny.points(7)[0].to("cuda")
    loader = [tuple(t.to("cuda") for t in tiny.points(24))]
    ds.refresh(posterior, loader)
    posterior.to("cuda")
    assert {family.device.type for family in posterior.stored.each} == {"cpu"}
    on_gpu = posterior(x)
    assert on_gpu.device.type == "cuda"
    torch.testing.assert_close(posterior.draw().member(4)(x), on_gpu[4], rtol=0, atol=1e-10)
    torch.testing.assert_close(posterior.to("cpu")(x.cpu()), on_gpu.cpu(), rtol=0, atol=1e-10)
    assert ds.summarise(posterior.to("cuda"), loader).mean.device.type == "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_drawn_convolutions_lie_in_memory_as_trained_ones_do():
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    rows = ds.data.Batches(torch.randn(64, 3, 8, 8), torch.randint(3, (64,)), batch_size=16)
    posterior = ds.SWAG(layers, samples=3, rank=2)
    ds.fit(posterior, rows, epochs=3, progress=False)
    drawn = posterior.stored.each[0].own_buffers()["network.0.weight"]
    assert drawn.shape == (3, *layers[0].weight.shape)
    assert drawn.stride()[1:] == layers[0].weight.stride() == (27, 1, 9, 3)
    of_draws = torch.stack([posterior.draw().member(i)(rows.x[:5].cuda()) for i in range(3)])
    torch.testing.assert_close(of_draws, posterior(rows.x[:5].cuda()), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batch_statistics_of_draws_are_those_without_a_graph(monkeypatch):
    """Of batches of two sizes, and of a layer that runs twice."""

    def twice(self, x):
        return self.head(self.norm(torch.relu(self.norm(self.conv(x)))).mean((2, 3)))

    layers = {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "head": nn.Linear(4, 3)}
    torch.manual_seed(0)
    posterior = ds.SWAG(tiny.Network(twice, **layers).double(), samples=5, rank=2)
    rows = ds.data.Batches(torch.randn(103, 3, 8, 8).double(), torch.randint(3, (103,)), batch_size=8)
    ds.fit(posterior, rows, epochs=2, progress=False, draw=False)
    made, drawn = [], []
    captured = sampling_posterior.CapturedFunction
    for make in (
        lambda *given, **how: made.append(captured(*given, **how)) or made[0],
        lambda function, **how: function,
    ):
        monkeypatch.setattr(sampling_posterior, "CapturedFunction", make)
        torch.manual_seed(1)
        with decide_by_count():
            ds.refresh(posterior, Loader(rows))
        drawn.append({name: each.clone() for name, each in posterior.stored.each[0].own_buffers().items()})
    assert len(made[0].graphs) == 1
    for name, found in drawn[0].items():
        torch.testing.assert_close(found, drawn[1][name], rtol=0, atol=1e-12)


def test_noise_is_relative_to_each_tensors_rms():
    module = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 3)).double()
    with torch.no_grad():
        module[1].weight.mul_(100)
        module[0].bias.zero_()
    posterior = GaussianPerturbation(module, noise=0.2, samples=50)
    drawn = tiny.sampled(posterior)
    for name in ("0.weight", "1.weight"):
        weight = module.get_parameter(name).detach()
        noise = (drawn[name] - weight) / (0.2 * weight.square().mean().sqrt())  # (S, ...), of variance 1
        n = noise.numel()
        assert float(noise.mean()) == pytest.approx(0.0, abs=4 / n**0.5)
        assert float(noise.var()) == pytest.approx(1.0, abs=4 * (2 / n) ** 0.5)
        # white: neither entries of a tensor nor samples go together
        assert float((noise[:, 0, 0] * noise[:, 0, 1]).mean()) == pytest.approx(0.0, abs=4 / 50**0.5)
        assert float((noise[0] * noise[1]).mean()) == pytest.approx(0.0, abs=4 / noise[0].numel() ** 0.5)
    assert float(drawn["0.bias"].abs().max()) == 0


def test_norm_layers_and_frozen_parameters_stay():
    module = tiny.mlp().double()
    module[3].requires_grad_(False)
    posterior = GaussianPerturbation(module, samples=2)
    assert sorted(tiny.sampled(posterior)) == ["0.bias", "0.weight"]
    member = posterior.member(1)
    assert torch.equal(member[1].weight, module[1].weight)
    assert torch.equal(member[3].weight, module[3].weight)
    assert not torch.equal(member[0].weight, module[0].weight)


def test_it_follows_the_network_until_a_draw_is_stored():
    module, (x, y) = tiny.mlp().double(), tiny.points()
    posterior = GaussianPerturbation(module, noise=0.0, samples=2).eval()
    with torch.no_grad():
        module[3].bias.add_(1.0)
    for outputs in posterior(x):  # no noise is the network
        torch.testing.assert_close(outputs, module(x), rtol=0, atol=1e-12)
    ds.refresh(posterior, [(x, y)])
    stored = posterior(x)
    with torch.no_grad():
        module[3].bias.add_(1.0)
        module[1].running_mean.add_(1.0)
        module[1].weight.mul_(2.0)
    assert torch.equal(posterior(x), stored)


def test_a_network_that_vmap_cannot_run_is_perturbed_all_the_same():
    layers = {"lstm": nn.LSTM(4, 5, batch_first=True), "norm": nn.BatchNorm1d(5), "head": nn.Linear(5, 3)}
    recurrent = tiny.Network(lambda self, x: self.head(self.norm(self.lstm(x)[0][:, -1])), **layers)
    posterior, x = GaussianPerturbation(recurrent, samples=3).eval(), torch.randn(6, 7, 4)
    ds.refresh(posterior, [(x, torch.zeros(6).long())])
    drawn = posterior.draw()
    outputs = drawn(x)
    for i in range(3):
        member = drawn.member(i)
        torch.testing.assert_close(member(x), outputs[i])
        hidden = member.lstm(x)[0][:, -1].detach()
        torch.testing.assert_close(member.norm.running_mean, hidden.mean(0))


def test_tied_weights_stay_tied():
    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    posterior, x = GaussianPerturbation(tied, noise=0.5, samples=2).eval(), torch.randn(3, 4)
    drawn = posterior.draw()
    member = drawn.member(0)
    assert torch.equal(member[0].weight, member[2].weight)
    torch.testing.assert_close(member(x), drawn(x)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_in_half_precision_noise_has_the_size_it_has_in_full(dtype, size):
    """Squares of weights of 1e-4 are 0 in float16, and of 1e3 infinite."""
    module = nn.Linear(30, 40, bias=False)
    with torch.no_grad():
        module.weight.copy_(size * torch.randn(40, 30))
    module.to(dtype)
    posterior = GaussianPerturbation(module, noise=0.5, samples=10)
    drawn = tiny.sampled(posterior)["weight"]
    assert drawn.dtype == dtype
    weight = module.weight.detach().double()
    noise = (drawn.double() - weight) / (0.5 * weight.square().mean().sqrt())
    # 12,000 numbers; rounding of half precision adds less than 1 % to the variance
    assert float(noise.var()) == pytest.approx(1.0, abs=4 * (2 / noise.numel()) ** 0.5 + 0.01)

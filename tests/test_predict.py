"""Prediction over loaders: whole, batch by batch, summarised, and from a folder; with the network that was given."""

import functools
import json
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import dissensus as ds
import tiny
from dissensus.core.predictive import RunningSummary
from dissensus.engine import loader as loaders
from dissensus.storage import blueprints
from dissensus.training.validation import validation_nll
from refusals import refuses
from small_cut import ScaledEnsemble

F64 = torch.float64


batches = functools.partial(tiny.point_batches, 20, 6)


def test_a_loader_gives_what_one_batch_gives():
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points(20)
    found = ds.predict(posterior, batches())
    torch.testing.assert_close(found.member_means, posterior.predict(x).member_means, rtol=0, atol=1e-12)
    assert torch.equal(found.targets, y)
    assert found.targets.dtype == y.dtype


class CountsRows(nn.Module):
    """Says, in its first output, how many rows it sees at once; `noise` adds some of its own."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.linear, self.noise = nn.Linear(4, 3).double(), noise

    def forward(self, x, other=None):
        rows = torch.tensor([len(x), 0.0, 0.0], dtype=F64)
        return self.linear(x if other is None else x + other) + rows + self.noise * torch.randn(len(x), 3, dtype=F64)


@pytest.mark.parametrize("make", [
    lambda: ds.MAP(CountsRows()),
    lambda: ds.DeepEnsemble([CountsRows() for _ in range(3)]),
    lambda: ds.NodeBNN(CountsRows(), data_size=50, samples=3),
    lambda: ds.MCDropout(nn.Sequential(nn.Dropout(0.5), CountsRows()), samples=4),
    lambda: ds.MAP(CountsRows(noise=1.0)),
    lambda: ds.DeepEnsemble([CountsRows(noise=1.0) for _ in range(3)]),
])  # fmt: skip
@pytest.mark.parametrize("given", [
    lambda x, y: ds.data.Batches(x, y, batch_size=3),
    lambda x, y: ds.data.Batches(x, y, batch_size=3, shuffle=True, seed=1),
    lambda x, y: list(ds.data.Batches(x, y, batch_size=3)),
    lambda x, y: DataLoader([*zip(x, y, strict=True)], batch_size=3),
    lambda x, y: iter(uneven(x, y)),
])  # fmt: skip
def test_rows_that_are_read_together_are_predicted_batch_by_batch(make, given):
    """Each network sees the batches of the loader, in their order, and draws the same numbers."""
    torch.manual_seed(0)
    posterior, (x, y) = make(), tiny.points(50)
    torch.manual_seed(1)
    together = ds.predict(posterior, given(x, y))
    torch.manual_seed(1)
    means, targets = one_by_one(posterior, given(x, y))
    assert torch.equal(together.member_means, means)
    assert torch.equal(together.targets, targets)


def one_by_one(posterior, loader):
    """Members' means and targets, from batches that are read alone."""
    found = [(predictive.member_means, y) for predictive, y in ds.predict_batches(posterior, loader)]
    means, targets = zip(*found, strict=True)
    return torch.cat(means, 1), torch.cat(targets)


def uneven(x, y):
    """Batches of other sizes, which may end with a small one, with and without weights."""
    sizes = (4, 4, 2, 2, 3, 5, 5, 5, 5, 1, 7, 7)
    parts = zip(x.split(sizes), y.split(sizes), range(len(sizes)), strict=True)
    return [(a, b, torch.rand(len(b))) if number in (6, 7) else (a, b) for a, b, number in parts]


def test_rows_of_mappings_are_read_together():
    (x, y), posterior = tiny.points(50), ds.DeepEnsemble([CountsRows() for _ in range(3)])
    for given in ({"x": x}, {"x": x, "other": x}):
        loader = ds.data.Batches(given, y, batch_size=3)
        assert torch.equal(ds.predict(posterior, loader).member_means, one_by_one(posterior, loader)[0])


def _keep_first(self, x):
    self.kept = x.mean(0) if self.kept is None else self.kept
    return self.layer(x - self.kept)


def _keep_previous(self, x):
    self.kept = torch.tanh(self.layer(x) if self.kept is None else self.layer(x + self.kept.mean(0)[0]))
    return self.kept


def _take_five(self, x):
    return self.layer(x.view(5, 4))


@pytest.mark.parametrize("forward", [_keep_first, _keep_previous, _take_five])
@pytest.mark.parametrize("members", [1, 3])
def test_networks_see_rows_that_are_read_together_as_batches(forward, members):
    """What a forward keeps in attributes goes after each batch, and no call has more rows than a batch."""
    networks = [tiny.Network(forward, layer=nn.Linear(4, 3).double(), kept=None) for _ in range(members)]
    posterior, (x, y) = ds.DeepEnsemble(networks), tiny.points(50)
    loader = ds.data.Batches(x, y, batch_size=5)
    for given in (loader, list(loader)):
        assert torch.equal(ds.predict(posterior, given).member_means, one_by_one(posterior, loader)[0])


def test_a_transform_of_raw_inputs_sees_batches():
    posterior, (x, y) = ds.MAP(tiny.mlp()), tiny.points(50)
    posterior.inputs = lambda x: x - x.mean(0)
    loader = ds.data.RawBatches(x, y, batch_size=5)
    assert torch.equal(ds.predict(posterior, loader).mean, ds.predict(posterior, list(loader)).mean)


def test_few_rows_are_read_together(monkeypatch):
    """At most sixteen batches, and fewer of large inputs; a loader that changes its batches gives them one by one."""
    read, (x, y) = [], tiny.points(50)
    at = ds.data.Batches.at
    monkeypatch.setattr(ds.data.Batches, "at", lambda self, rows: (read.append(len(rows)), at(self, rows))[1])
    posterior = ds.MAP(CountsRows())
    for size, augment, expected in (
        (loaders.SMALL, None, [32, 18]),
        (4 * 2 * 2, None, [4] * 12 + [2]),
        (1, None, [2] * 25),
        (loaders.SMALL, lambda x: x, [2] * 25),
    ):
        monkeypatch.setattr(loaders, "SMALL", size)
        read.clear()
        ds.predict(posterior, ds.data.Batches(x, y, batch_size=2, augment=augment))
        assert read == expected


def test_neighbours_that_are_alike_are_copied_together(monkeypatch):
    """At most sixteen, and fewer of large inputs; of one size, but for a smaller one at the end."""
    x, y = tiny.points(50)
    every = list(ds.data.Batches(x, y, batch_size=2))

    def read(batches):
        loader = loaders.Loader(batches)
        return [
            (len(given[0]) if isinstance(given, tuple | list) else given, loader.rows)
            for given in loader.joined_batches(False, lambda: True)
        ]

    assert read(every) == [(2, None), (32, 2), (16, 2)]  # the first is looked at alone
    assert read(uneven(x, y)) == [(4, None), (6, 4), (2, None), (3, None), (5, None), (10, 5), (6, 5), (14, 7)]
    # Other types, devices of meaning or shapes stay alone; so does what is no batch of tensors.
    others = [
        (x, y),
        (x.float(), y),
        (x[:, :2], y),
        (x, y[:, None]),
        (x, y[:3]),
        [x, y, None],
        (x[:0], y[:0]),
        {"x": x, "y": y},
    ]
    assert [rows for _, rows in read(others)] == [None] * len(others)
    monkeypatch.setattr(loaders, "SMALL_COPY", 3 * 2 * (4 + 1))
    assert read(every) == [(2, None)] + [(6, 2)] * 8


def test_a_loader_may_reuse_the_memory_of_its_batches():
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points(20)

    def loader():
        memory = torch.empty_like(x[:5]), torch.empty_like(y[:5])
        for start in range(0, 20, 5):
            memory[0].copy_(x[start : start + 5])
            memory[1].copy_(y[start : start + 5])
            yield memory

    found = ds.predict(posterior, loader())
    torch.testing.assert_close(found.member_means, posterior.predict(x).member_means, rtol=0, atol=1e-12)
    assert torch.equal(found.targets, y)


def test_noise_of_a_network_does_not_repeat_where_the_loader_draws_numbers_too():
    def loader():
        for _ in range(4):
            torch.rand(1)
            yield torch.zeros(5, 4, dtype=F64), torch.zeros(5).long()

    torch.manual_seed(0)
    posterior, found = ds.MAP(CountsRows(noise=1.0)), []
    for read in (lambda: ds.predict(posterior, loader()).member_means, lambda: one_by_one(posterior, loader())[0]):
        torch.manual_seed(1)
        found.append(read())
    assert torch.equal(*found)
    assert len({float(part[0, 0, 0]) for part in found[0].split(5, 1)}) == 4


@pytest.mark.parametrize("use", [
    lambda network, rows: ds.calibrate(ds.MAP(network), rows),
    lambda network, rows: ds.calibrate(ds.MAP(network), list(rows)),
    lambda network, rows: ds.predict(ds.MAP(network, likelihood=ds.Regression()), [(x, y.float()) for x, y in rows]),
])  # fmt: skip
def test_a_network_for_one_batch_size_is_tried_on_a_batch(use):
    network = tiny.Network(_take_five, layer=nn.Linear(4, 1 if "Regression" in use.__code__.co_names else 3).double())
    x, y = tiny.points(50)
    use(network, ds.data.Batches(x, y, batch_size=5))


def test_weights_in_the_loader_are_passed_over():
    posterior = tiny.ensemble(tiny.mlp)
    weighted = [(x, y, torch.rand(len(y))) for x, y in batches()]
    assert torch.equal(ds.predict(posterior, weighted).member_means, ds.predict(posterior, batches()).member_means)


def test_labels_of_other_classes_are_welcome():
    """Out-of-distribution data brings labels the network does not know."""
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()
    assert torch.equal(ds.predict(posterior, [(x, y + 50)]).targets, y + 50)


def test_one_draw_serves_all_batches():
    posterior, (x, y) = ds.MCDropout(tiny.mlp(0.5).double(), samples=4), tiny.points()
    found = ds.predict(posterior, [(x, y), (x, y)]).member_means
    assert torch.equal(found[:, :12], found[:, 12:])
    parts = [predictive.member_means for predictive, _ in ds.predict_batches(posterior, [(x, y), (x, y)])]
    assert torch.equal(parts[0], parts[1])
    assert float(found.std(0).max()) > 0


def test_batches_come_one_by_one():
    posterior, read = tiny.ensemble(tiny.mlp), []

    def loader():
        for i, batch in enumerate(batches()):
            read.append(i)
            yield batch

    stream = ds.predict_batches(posterior, loader())
    predictive, y = next(stream)
    assert read == [0]
    assert len(predictive) == len(y) == 6
    assert torch.is_grad_enabled()  # nothing of the prediction's modes leaks while the stream waits
    assert posterior.training
    means = [predictive.mean, *(part.mean for part, _ in stream)]
    torch.testing.assert_close(torch.cat(means), ds.predict(posterior, batches()).mean, rtol=0, atol=1e-12)


def test_temperature_applies_to_loaders():
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()
    posterior.temperature.fill_(2.0)
    expected = posterior.predict(x)
    assert torch.equal(ds.predict(posterior, [(x, y)]).member_means, expected.member_means)
    torch.testing.assert_close(ds.summarise(posterior, [(x, y)]).mean, expected.mean, rtol=0, atol=1e-12)


def test_the_world_is_left_as_found():
    posterior, loader = ds.MCDropout(tiny.mlp(0.5).double(), samples=3), batches()
    modes, stream = [m.training for m in posterior.modules()], torch.get_rng_state()
    ds.predict(posterior, loader)
    ds.summarise(posterior, loader)
    list(ds.predict_batches(posterior, loader))
    assert [m.training for m in posterior.modules()] == modes
    assert torch.equal(torch.get_rng_state(), stream)


def test_half_precision_comes_close():
    posterior, (x, y) = tiny.ensemble(tiny.mlp, dtype=torch.float32), tiny.points()
    exact = ds.predict(posterior, [(x.float(), y)])
    half = ds.predict(posterior, [(x.float(), y)], precision="bf16")
    assert half.member_means.dtype == torch.float32
    assert not torch.equal(half.member_means, exact.member_means)
    torch.testing.assert_close(half.mean, exact.mean, rtol=0, atol=0.02)


@pytest.mark.parametrize("call", [ds.predict, ds.summarise, lambda p, d: list(ds.predict_batches(p, d))])
def test_bad_data_is_a_clear_error(call):
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points()
    x[5, 1] = float("nan")
    refuses(lambda: call(posterior, [(x, y)]), "expected finite inputs, got NaN or infinity in row 5 of a batch")
    refuses(lambda: call(posterior, [x]), r"expected batches \(x, y\)", TypeError)


@pytest.mark.parametrize("call", [ds.predict, ds.summarise])
def test_a_loader_may_not_know_its_length(call):
    posterior, (x, y) = tiny.ensemble(tiny.mlp), tiny.points(20)
    found = call(posterior, DataLoader(tiny.Stream(lambda: zip(x, y, strict=True)), batch_size=6))
    torch.testing.assert_close(found.mean, posterior.predict(x).mean, rtol=0, atol=1e-12)
    assert torch.equal(found.targets, y)


def test_networks_no_data_and_unknown_precisions_are_refused(tmp_path):
    posterior = tiny.ensemble(tiny.mlp)
    with pytest.raises(TypeError, match="expected a posterior, got Sequential; wrap the network"):
        ds.predict(tiny.mlp(), batches())
    for call in (ds.predict, ds.summarise):
        refuses(functools.partial(call, posterior, []), "expected at least one batch from the loader, got none")
    ds.save(posterior, tmp_path)
    refuses(lambda: ds.summarise(tmp_path, [], network=tiny.mlp()), "at least one batch")
    refuses(lambda: ds.predict(posterior, batches(), precision="fp8"), "expected precision of float32, bf16, got")


# ---------------------------------------------------------------------------------------------------- summaries


def two_outputs():
    return tiny.mlp(outputs=2)


CASES = {
    "classes": (tiny.mlp, None, lambda y: y),
    "regression": (two_outputs, ds.Regression(initial=0.5), lambda y: torch.randn(len(y), 2, dtype=F64)),
    "heteroscedastic": (two_outputs, ds.HeteroscedasticRegression(), lambda y: torch.randn(len(y), 1, dtype=F64)),
}


@pytest.fixture(params=[(name, how) for name in CASES for how in ("loop", "vectorised")], ids=" ".join)
def case(request):
    name, how = request.param
    make, likelihood, targets = CASES[name]
    posterior = tiny.ensemble(make, 4, how=how, likelihood=likelihood)
    return posterior, make, [(x, targets(y)) for x, y in batches()]


@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "from disk"])
def test_a_summary_says_what_the_members_say(case, stored, tmp_path):
    posterior, make, loader = case
    posterior.temperature.fill_(1.4)
    whole = ds.predict(posterior, loader)
    if stored:
        ds.save(posterior, tmp_path)
        summary = ds.summarise(tmp_path, loader, network=make())
    else:
        summary = ds.summarise(posterior, loader)
    assert isinstance(summary, ds.SummaryPredictive)
    assert torch.equal(summary.targets, whole.targets)
    for name in ("mean", "aleatoric", "epistemic", "total"):
        torch.testing.assert_close(getattr(summary, name), getattr(whole, name), rtol=0, atol=1e-10)
    assert torch.equal(summary.total, summary.aleatoric + summary.epistemic)
    assert len(summary) == len(whole) == 20
    refuses(lambda: summary.member_means, "expected a predictive with its members", TypeError)


def test_a_class_summary_scores_samples_and_sets_as_the_whole():
    posterior = tiny.ensemble(tiny.mlp, 4)
    whole, summary = ds.predict(posterior, batches()), ds.summarise(posterior, batches())
    y = whole.targets
    torch.testing.assert_close(summary.log_prob(y), whole.log_prob(y), rtol=0, atol=1e-12)
    torch.testing.assert_close(summary.confidence, whole.confidence, rtol=0, atol=1e-12)
    assert torch.equal(summary.credible_set(0.7), whole.credible_set(0.7))
    draws = [p.sample(50, generator=torch.Generator().manual_seed(3)) for p in (summary, whole)]
    assert torch.equal(*draws)
    for use in (lambda: summary.interval(0.9), lambda: summary.apply_temperature(2.0)):
        refuses(use, "expected a predictive with its members, got a summary", TypeError)


def test_a_regression_summary_is_the_gaussian_of_equal_moments():
    posterior = tiny.ensemble(lambda: tiny.mlp(outputs=1), 4, likelihood=ds.Regression(noise=0.5))
    x, _ = tiny.points()
    y = torch.randn(12, 1, dtype=F64)
    summary = ds.summarise(posterior, [(x, y)])
    normal = torch.distributions.Normal(summary.mean, summary.total.sqrt())
    torch.testing.assert_close(summary.log_prob(y), normal.log_prob(y)[:, 0], rtol=0, atol=1e-10)
    lower, upper = summary.interval(0.9)
    torch.testing.assert_close(upper, normal.icdf(torch.tensor(0.95, dtype=F64)), rtol=0, atol=1e-8)
    torch.testing.assert_close(lower, normal.icdf(torch.tensor(0.05, dtype=F64)), rtol=0, atol=1e-8)


def test_stored_members_need_the_same_data_each_time_and_a_file_that_is_whole(tmp_path):
    ds.save(tiny.ensemble(tiny.mlp), tmp_path)

    class Shuffled:
        def __iter__(self):
            x, y = tiny.points()
            order = torch.randperm(12)
            yield x[order], y[order]

    with pytest.raises(ValueError, match="expected the same batches for every member"):
        ds.summarise(tmp_path, Shuffled(), network=tiny.mlp())
    with pytest.raises(ValueError, match="expected the same batches for every member"):
        ds.summarise(tmp_path, iter(batches()), network=tiny.mlp())  # read once, by the first member
    shuffled = ds.data.Batches(*tiny.points(), batch_size=4, shuffle=True, seed=0)
    refuses(lambda: ds.summarise(tmp_path, shuffled, network=tiny.mlp()), "does not shuffle")
    damaged = bytearray((tmp_path / "posterior.safetensors").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "posterior.safetensors").write_bytes(damaged)
    refuses(lambda: ds.summarise(tmp_path, batches(), network=tiny.mlp()), "truncated or was changed")


@pytest.mark.parametrize(("saved", "given"), [(True, False), (False, True)])
def test_stored_members_need_the_same_ties(saved, given, tmp_path):
    posterior = tiny.ensemble(lambda: tiny.tied_layers(saved))
    ds.save(posterior, tmp_path)
    loader = batches()
    with pytest.raises(ValueError, match="expected a network whose tensors are tied as in the saved one"):
        ds.summarise(tmp_path, loader, network=tiny.tied_layers(given))
    found = ds.summarise(tmp_path, loader, network=tiny.tied_layers(saved))
    torch.testing.assert_close(found.mean, ds.predict(posterior, loader).mean, rtol=0, atol=1e-12)


def test_a_stored_posterior_without_members_is_summarised_whole(tmp_path):
    posterior = ds.MCDropout(tiny.mlp(0.5).double(), samples=4)
    ds.refresh(posterior, [])
    ds.save(posterior, tmp_path)
    found = ds.summarise(tmp_path, batches(), network=tiny.mlp(0.5))
    assert torch.equal(found.mean, ds.summarise(posterior, batches()).mean)


def test_the_memory_of_a_prediction_is_said_beforehand(caplog):
    with caplog.at_level(logging.INFO, logger="dissensus"):
        ds.predict(tiny.ensemble(tiny.mlp), ds.data.Batches(*tiny.points(48), batch_size=16))
    size = 3 * 48 * 3 * 8 / 1024
    assert any(f"{size:.3g} KiB" in record.getMessage() for record in caplog.records)


def test_a_running_summary_does_not_depend_on_how_members_come():
    means, variances = torch.randn(7, 20, 2, dtype=F64) + 1e6, torch.rand(7, 20, 2, dtype=F64)
    whole, running = ds.RegressionPredictive(means, variances), RunningSummary()
    for part in (slice(0, 1), slice(1, 4), slice(4, 7)):
        running.add(ds.RegressionPredictive(means[part], variances[part]))
    torch.testing.assert_close(running.summary().mean, whole.mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(running.summary().epistemic, whole.epistemic, rtol=1e-7, atol=0)  # means near 1e6


@pytest.mark.slow  # compiled members are in tests/engine/test_engine.py
def test_compiled_predictions_agree_with_plain_ones():
    posterior, (x, y) = tiny.ensemble(tiny.mlp, dtype=torch.float32), tiny.points()
    plain = ds.predict(posterior, [(x.float(), y)])
    compiled = ds.predict(posterior, [(x.float(), y)], compiled=True)
    torch.testing.assert_close(compiled.mean, plain.mean, rtol=1e-5, atol=1e-6)


def test_networks_with_buffers_are_read_from_disk_whole(tmp_path):
    """Batch statistics belong to each member."""
    posterior = tiny.ensemble(tiny.mlp)
    x, y = tiny.points()
    ds.fit(posterior, [(x, y)], epochs=3, progress=False, engine="loop")
    ds.save(posterior, tmp_path)
    found = ds.summarise(tmp_path, [(x, y)], network=tiny.mlp())
    torch.testing.assert_close(found.mean, posterior.predict(x).mean, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- not a number


def spoilt(how: str = "vectorised", member: int = 2):
    """Three members of which one says NaN."""
    posterior = tiny.ensemble(tiny.mlp, how=how).eval()
    with torch.no_grad():
        posterior.particles.own_parameters()["network.0.weight"][member] = float("nan")
    return posterior


def ways(posterior, x, y):
    """Every way to ask a posterior about x."""
    verbs = (ds.predict, ds.summarise, lambda *given: [*ds.predict_batches(*given)], ds.evaluate, validation_nll)
    return [lambda: posterior.predict(x), *(functools.partial(verb, posterior, [(x, y)]) for verb in verbs)]


@pytest.mark.parametrize("how", ["loop", "vectorised"])
def test_a_member_that_predicts_nan_is_named(how):
    posterior, (x, y) = spoilt(how), tiny.points()
    message = "got a prediction that is not finite in member 2 at step 0; lower"
    for call in (*ways(posterior, x, y), lambda: ds.temperature_scale(posterior, [(x, y)])):
        with pytest.raises(ds.Diverged, match=message) as error:
            call()
        assert error.value.members == [2]
    assert posterior(x)[2].isnan().all()  # what the functions say themselves is not judged


def test_a_stored_member_that_predicts_nan_is_named_by_its_own_number(tmp_path):
    ds.save(spoilt(member=1), tmp_path / "p")
    with pytest.raises(ds.Diverged, match="in member 1 at") as error:
        ds.summarise(tmp_path / "p", batches(), network=tiny.mlp().double())
    assert error.value.members == [1]


def test_a_member_that_predicts_nan_for_a_later_batch_is_named():
    """The first batch is looked at before the second is predicted, all others together in the end."""
    posterior, read = ds.DeepEnsemble([nn.Linear(2, 3) for _ in range(3)]).double(), []
    with torch.no_grad():
        posterior.particles.own_parameters()["network.weight"][1] = 1e306
    x, y = torch.zeros(4, 2, dtype=F64), torch.zeros(4, dtype=torch.int64)

    def loader(*sizes: float):
        for size in sizes:
            read.append(size)
            yield x + size, y

    for predicted in (ds.predict, ds.summarise):
        for sizes in ((0.0, 1e5, 0.0), (0.0, 0.0, 1e5)):
            with pytest.raises(ds.Diverged, match="in member 1 at") as error:
                predicted(posterior, loader(*sizes))
            assert error.value.members == [1]
    read.clear()
    refuses(
        lambda: ds.summarise(posterior, loader(1e5, 0.0)), "in member 1 at", ds.Diverged
    )  # predict reads small ones together
    assert read == [1e5]


def test_a_member_whose_mean_is_infinite_is_named():
    posterior = ds.DeepEnsemble([nn.Linear(4, 1) for _ in range(2)], likelihood=ds.Regression(noise=1.0)).double()
    with torch.no_grad():
        posterior.particles.own_parameters()["network.bias"][0] = torch.inf
    refuses(lambda: posterior.predict(tiny.points()[0]), "not finite in member 0 ", ds.Diverged)


def test_a_class_that_cannot_be_is_no_divergence():
    """A logit of −∞ is how a network rules a class out."""
    net = lambda: tiny.Network(lambda self, x, mask: self.linear(x) + mask, linear=nn.Linear(4, 3))  # noqa: E731

    posterior, (x, y) = tiny.ensemble(net), tiny.points()
    mask = torch.zeros(12, 3, dtype=F64)
    mask[:, 2] = -torch.inf
    found = posterior.predict((x, mask))
    assert (found.mean[:, 2] == 0).all()
    assert found.total.isfinite().all()
    history = ds.fit(posterior, [((x, mask), y % 2)], epochs=2, progress=False)
    assert len(history) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_numbers_are_refused(value):
    posterior, (x, y) = tiny.ensemble(tiny.mlp).eval(), tiny.points()
    x[5, 1] = value
    foreign = {"other": [(x, y)]}
    for call in (*ways(posterior, x, y), lambda: ds.evaluate(posterior, [tiny.points()], ood=foreign)):
        refuses(call, "expected finite inputs, got NaN or infinity in row")


@pytest.mark.parametrize("tile", [None, 9, (8, 30), (64, 7)])
def test_an_image_is_predicted_in_tiles_as_it_would_be_as_a_whole(tile):
    posterior = ds.DeepEnsemble([tiny.segmenter().double() for _ in range(3)])
    image = torch.randn(2, 21, 17, dtype=F64)
    found = ds.predict_image(posterior, image, tile=tile, overlap=2)  # the network sees one pixel around each
    expected = posterior.predict(image[None])
    for mine, theirs in zip(found, (expected.mean, expected.total, expected.epistemic), strict=True):
        torch.testing.assert_close(mine, theirs[0], rtol=0, atol=1e-12)
    assert found.mean.shape == (3, 21, 17)
    assert found.total.shape == found.epistemic.shape == (21, 17)


def test_tiles_that_see_too_little_differ_only_where_they_meet():
    posterior = ds.MAP(tiny.segmenter().double())
    image = torch.randn(2, 12, 12, dtype=F64)
    wrong = ds.predict_image(posterior, image, tile=6, overlap=0).mean != posterior.predict(image[None]).mean[0]
    middle = torch.isin(torch.arange(12), torch.tensor([5, 6]))
    assert torch.equal(wrong.any(0), middle[:, None] | middle)


def test_members_of_a_large_image_run_one_at_a_time_and_as_before_afterwards():
    posterior = ds.DeepEnsemble([tiny.segmenter() for _ in range(3)])
    image = torch.randn(2, 9, 9)
    posterior.predict(image[None])
    how = posterior.particles.how
    sizes = []
    handle = posterior.particles.template.network[0].register_forward_hook(lambda *args: sizes.append(args[2].shape))
    ds.predict_image(posterior, image)
    handle.remove()
    assert len(sizes) == 3
    assert posterior.particles.how == how


@pytest.mark.parametrize("samples", [ds.MCDropout, ds.GaussianPerturbation])
def test_one_draw_serves_all_tiles(samples):
    posterior = samples(tiny.segmenter(dropout=0.3).double(), samples=4)
    image = torch.randn(2, 16, 9, dtype=F64)
    torch.manual_seed(3)
    in_tiles = ds.predict_image(posterior, image, tile=8, overlap=2)
    torch.manual_seed(3)
    torch.testing.assert_close(ds.predict_image(posterior, image), in_tiles, rtol=0, atol=1e-12)


def test_what_is_no_image_or_no_segmentation_is_refused():
    posterior = ds.MAP(tiny.segmenter())
    flat, image = ds.MAP(nn.Sequential(nn.Flatten(), nn.Linear(162, 3))), torch.randn(2, 9, 9)
    refuses(lambda: ds.predict_image(posterior, image[None]), r"one image \(channels, H, W\), got \(1, 2, 9, 9\)")
    refuses(lambda: ds.predict_image(posterior, image, tile=4, overlap=4), "expected overlap below 4, got 4")
    refuses(lambda: ds.predict_image(flat, image), r"expected logits \(B, C, 9, 9\)")


# ---------------------------------------------------------------------------------------------------- one at a time


def pixels():
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(4, 3, 1)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("make", [
    lambda: ds.DeepEnsemble([pixels(), pixels()]),
    lambda: ds.MCDropout([pixels(), pixels()], samples=3),
    lambda: ds.GaussianPerturbation(pixels(), noise=0.1, samples=3),
    lambda: ds.MeanFieldVI([pixels(), pixels()], samples=2, data_size=5),
    lambda: ds.NodeBNN(pixels(), components=2, samples=2, data_size=5),
], ids=["ensemble", "dropout", "perturbation", "vi", "node"])  # fmt: skip
def test_functions_of_a_large_image_run_one_after_the_other(make, monkeypatch):
    torch.manual_seed(0)
    posterior, sizes, add = make(), [], RunningSummary.add
    image = torch.randn(3, 9, 7, dtype=F64)
    ds.refresh(posterior, [(image[None], torch.zeros(1, 9, 7, dtype=torch.int64))])
    noted = lambda self, part: (sizes.append(len(part.member_means)), add(self, part))  # noqa: E731
    monkeypatch.setattr(RunningSummary, "add", noted)
    found, whole = ds.predict_image(posterior, image), posterior.predict(image[None])
    assert sizes == [1] * len(whole.member_means)
    torch.testing.assert_close(found.mean, whole.mean[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found.epistemic, whole.epistemic[0], rtol=0, atol=1e-12)


# ------------------------------------------------------- the network that was given, also where the method cuts layers
@pytest.fixture
def trained(tmp_path):
    """(posterior, plain network, inputs, targets), saved in tmp_path."""
    plain, (x, y) = tiny.mlp().double(), tiny.points()
    posterior = ScaledEnsemble(plain)
    ds.fit(posterior, [(x, y)], epochs=2, progress=False)
    ds.save(posterior, tmp_path)
    return posterior, plain, x, y


def test_a_method_that_cuts_layers_is_loaded_around_the_plain_network(trained, tmp_path):
    posterior, plain, x, _ = trained
    assert blueprints.layer_lines(posterior.plain_network()) == blueprints.layer_lines(plain)
    assert blueprints.layer_lines(posterior.member(0)) != blueprints.layer_lines(plain)  # the function, as it is
    assert json.loads((tmp_path / "config.json").read_text())["network"]["structure"] == blueprints.layer_lines(plain)
    before = tiny.state(plain)
    loaded = ds.load(tmp_path, plain, method=ScaledEnsemble)
    assert tiny.largest_difference(before, tiny.state(plain)) == 0
    assert tiny.largest_difference(tiny.state(loaded), tiny.state(posterior)) == 0
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)
    with pytest.raises(ValueError, match="expected a network with layer '0: Linear"):
        ds.load(tmp_path, posterior.member(0), method=ScaledEnsemble)


def test_what_was_given_has_a_members_tensors_and_shares_nothing(trained):
    posterior, _, x, _ = trained
    given, before = posterior.plain_network(), posterior.predict(x).member_means
    assert torch.equal(given[0].weight, posterior.particles.shared_parameters()["network.0.linear.weight"])
    with torch.no_grad():
        for parameter in given.parameters():
            parameter.add_(1.0)
    assert torch.equal(posterior.predict(x).member_means, before)


def test_a_network_of_the_library_that_was_cut_is_built_again(tmp_path):
    x, y = tiny.points()
    posterior = ScaledEnsemble(ds.nets.MLP(4, 3, hidden=(5,)).double())
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, method=ScaledEnsemble)
    assert torch.equal(loaded.predict(x).member_means, posterior.predict(x).member_means)


def test_a_cut_network_far_larger_than_its_file_is_not_built():
    with torch.device("meta"):
        lines = blueprints.layer_lines(ds.nets.MLP(4, 3, hidden=(5000,)))
    saved = {"name": "MLP", "arguments": {"inputs": 4, "outputs": 3, "hidden": [5000]}, "structure": lines, "cut": True}
    told = "expected a network of at most 64 times the 12 numbers in the file, got 40003"
    refuses(lambda: blueprints.build_network(saved, None, {"a": (3, 4)}), told)


@pytest.mark.parametrize("known", [False, True])
def test_members_that_are_no_plain_networks_are_summarised_as_a_whole(trained, tmp_path, monkeypatch, known):
    """Also where the library knows the method, and would read members one by one."""
    posterior, plain, x, y = trained
    keywords = {"method": ScaledEnsemble}
    if known:
        monkeypatch.setitem(blueprints.METHODS, ScaledEnsemble.name, ScaledEnsemble)
        ds.save(posterior, tmp_path)
        keywords = {}
    found = ds.summarise(tmp_path, [(x, y)], network=plain, **keywords)
    torch.testing.assert_close(found.mean, posterior.predict(x).mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("read", [ds.load, lambda *a, **k: ds.summarise(a[0], [tiny.points()], network=a[1], **k)])
def test_a_method_of_ones_own_must_be_named_and_be_the_one_that_was_saved(trained, tmp_path, read):
    _, plain, _, _ = trained
    refuses(lambda: read(tmp_path, plain), "expected method=ScaledEnsemble to load into, got none")
    with pytest.raises(ValueError, match="expected a folder of the method 'map', got one of 'scaled_ensemble'"):
        read(tmp_path, plain, method=ds.MAP)
    with pytest.raises(TypeError, match="expected a class of posteriors as method, got 'scaled_ensemble'"):
        read(tmp_path, plain, method="scaled_ensemble")


def test_a_class_of_ones_own_is_not_loaded_as_the_one_whose_name_it_has(tmp_path):
    posterior, (x, _) = tiny.Repelling([tiny.mlp().double() for _ in range(3)]), tiny.points()
    ds.save(posterior, tmp_path)
    refuses(lambda: ds.load(tmp_path, tiny.mlp()), "expected method=Repelling to load into")
    loaded = ds.load(tmp_path, tiny.mlp(), method=tiny.Repelling)
    assert type(loaded) is tiny.Repelling
    assert torch.equal(loaded.predict(x).member_means, posterior.eval().predict(x).member_means)

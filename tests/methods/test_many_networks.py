"""Many networks or many methods in one run: each is what it would have been alone."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods import MAP, SWA, SWAG, TRADI, DeepEnsemble, GaussianPerturbation, SnapshotEnsemble, branch, track
from refusals import refuses
from thinning import often, thinned

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "composing.md"
LOADER = [(x, y) for x, y in zip(*(t.split(12) for t in tiny.points(24)), strict=True)]
X = tiny.points(24)[0]
RECORDING = {
    "SWAG": partial(ds.SWAG, rank=3, samples=2),
    "SWA": ds.SWA,
    "TRADI": partial(ds.TRADI, samples=2, state_noise=(1.0, 0.5)),
    "SnapshotEnsemble": partial(ds.SnapshotEnsemble, members=2),
    "Laplace": partial(ds.Laplace, samples=2, prior_precision=1.0),
}
WATCHERS = {
    **RECORDING,
    "GaussianPerturbation": partial(ds.GaussianPerturbation, samples=2),
    "MCDropout": partial(ds.MCDropout, samples=2),
}
OPTIMIZERS = {"sgd": partial(torch.optim.SGD, lr=0.1), "adam": partial(torch.optim.Adam, lr=0.01)}
SIZED = {"data_size": 24}
BASES = {  # what is given to ds.track, of three networks where it has several
    "a network": lambda: networks()[0],
    "a list": lambda: networks(),
    "DeepEnsemble": lambda: ds.DeepEnsemble(networks()),
    "WeightRDE": lambda: ds.WeightRDE(networks(), **SIZED),
    "FunctionRDE": lambda: ds.FunctionRDE(networks(), **SIZED),
    "FeatureRDE": lambda: ds.FeatureRDE(networks(), layer="3", head="4"),
    "FoRDE": lambda: ds.FoRDE(networks()),
    "SVGD": lambda: ds.SVGD(networks(), **SIZED),
    "LIT": lambda: ds.LIT(networks(), strength=0.5),
    "BatchEnsemble": lambda: ds.BatchEnsemble(networks()[0], members=3, modulation=ds.Modulation.normal(1.0, 0.5)),
    "DropoutEnsemble": lambda: ds.DropoutEnsemble(networks()[0], members=3, rate=0.3),
}


def networks(dropout: float = 0.2) -> list[nn.Module]:
    """Three networks, the same at every call."""
    made = []
    for seed in range(3):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made.append(tiny.mlp(dropout).double())
    return made


def fitted(posterior, *, optimizer=None, **keywords):
    built = None if optimizer is None else optimizer(posterior.parameters())
    ds.fit(posterior, LOADER, epochs=4, optimizer=built, progress=False, **keywords)
    return posterior


@pytest.mark.parametrize(
    ("name", "optimizer", "engine"), thinned(list(RECORDING), list(OPTIMIZERS), ["loop", "vectorised"], every=3)
)
def test_three_networks_record_and_draw_what_each_does_alone(name, optimizer, engine):
    plain, method = networks(dropout=0.0), RECORDING[name]  # masks of three would not be those of one
    settings = {"optimizer": OPTIMIZERS[optimizer], "engine": engine}
    together = fitted(method(copy.deepcopy(plain)), **settings)
    alone = [fitted(method(network), **settings) for network in plain]
    drawn = together.sample(together.samples, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    each = [one.sample(one.samples, generator) for one in alone]  # they take the noise one after the other
    for name, rows in drawn.items():  # (M, S, ...)
        torch.testing.assert_close(rows, torch.cat([one[name] for one in each]), rtol=0, atol=1e-8)
    for kept in ("mean", "variance"):
        for name, rows in getattr(together, kept, {}).items():
            same = torch.stack([getattr(one, kept)[name] for one in alone])
            torch.testing.assert_close(rows, same, rtol=0, atol=1e-8)


@pytest.mark.parametrize("method", [
    partial(ds.MCDropout, samples=2),
    partial(ds.NodeBNN, components=2, samples=2, data_size=24),
    partial(ds.MeanFieldVI, samples=2, data_size=24),
], ids=["mc_dropout", "node_bnn", "mean_field_vi"])  # fmt: skip
def test_three_networks_have_the_gradients_of_each_alone_for_the_same_noise(method):
    x, y = LOADER[0]

    def found(given):
        torch.manual_seed(7)
        posterior = method(given)
        posterior.particles.how = "loop"
        return posterior.train(), posterior.state_dict()

    together, state = found(networks())
    alone = [found(network)[0] for network in networks()]
    for m, one in enumerate(alone):  # latents begin at random: those of the three
        mine = {k.replace(".own.", ".shared."): v[m] if ".own." in k else v for k, v in state.items()}
        one.load_state_dict({k: mine[k] for k in one.state_dict()})
    torch.manual_seed(0)
    losses = together.backward(x, y)
    torch.manual_seed(0)
    each = [one.backward(x, y) for one in alone]
    torch.testing.assert_close(losses, torch.cat(each), rtol=0, atol=1e-12)
    own = {name: p.grad for name, p in together.particles.own_parameters().items()}
    same = [{name: p.grad for name, p in one.particles.shared_parameters().items()} for one in alone]
    for name, rows in own.items():
        torch.testing.assert_close(rows, torch.stack([one[name] for one in same]), rtol=0, atol=1e-12)


def test_a_functions_network_is_the_one_it_was_drawn_around():
    posterior = ds.GaussianPerturbation(networks(), samples=2, noise=0.0)
    for i, network in enumerate(network for network in networks() for _ in range(2)):
        torch.testing.assert_close(posterior.member(i)(X), network.eval()(X), rtol=0, atol=0)


def scaled(scale: float) -> nn.Module:
    layers = {"first": nn.Linear(4, 6).requires_grad_(False), "norm": nn.BatchNorm1d(6), "drop": nn.Dropout(0.2)}
    layers |= {"last": nn.Linear(6, 3), "scale": scale}
    return tiny.Network(lambda net, x: net.last(net.drop(net.scale * net.norm(net.first(x)).tanh())), **layers)


@pytest.mark.parametrize("method", WATCHERS.values(), ids=WATCHERS)
def test_functions_are_numbered_network_by_network_with_the_attributes_and_frozen_weights_of_each(method):
    given = [scaled(scale).double() for scale in (1.0, 2.0, 5.0)]
    drawn = fitted(method(copy.deepcopy(given))).draw()
    assert drawn.networks == 3
    members = [drawn.member(i) for i in range(drawn.members)]
    torch.testing.assert_close(drawn(X), torch.stack([member(X) for member in members]), rtol=0, atol=1e-12)
    for i, member in enumerate(members):
        network, own = getattr(member, "network", member), given[i * 3 // len(members)]
        assert network.scale == own.scale
        assert torch.equal(network.first.weight, own.first.weight)


@pytest.mark.parametrize("base", ["FoRDE", "BatchEnsemble"])
def test_a_watched_method_trains_bit_for_bit_and_its_weights_are_recorded(base):
    def trained(posterior, callback=None):
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
        keywords = {"optimizer": optimizer, "engine": "loop", "callback": callback, "progress": False}
        ds.fit(posterior, LOADER[:1], epochs=6, **keywords)  # every epoch is one step
        return posterior

    def weights(_=None):
        stored = {**run.particles.shared_parameters(), **run.particles.own_parameters()}
        seen.append({name.removeprefix("network."): tensor.detach().clone() for name, tensor in stored.items()})

    torch.manual_seed(0)  # of a BatchEnsemble's modulations
    plain = BASES[base]()
    run, seen = copy.deepcopy(plain), []
    swag, tradi = partial(ds.SWAG, rank=2, start=0, every=1), partial(ds.TRADI, drift="none", state_noise=(1.0, 0.5))
    ds.track(run, [swag, tradi])
    weights()
    trained(run, weights)
    for name, tensor in tiny.state(trained(plain)).items():
        assert torch.equal(tensor, run.state_dict()[name]), name
    for name, rows in run.watchers["swag"].mean.items():
        by_hand = torch.stack([each[name] for each in seen[1:]]).mean(0)
        torch.testing.assert_close(rows, by_hand.expand_as(rows), rtol=0, atol=1e-12)
    for name, mean in run.watchers["tradi"].filters.mean.items():
        by_hand, p = seen[0][name], 0.0
        for each in seen[1:]:  # Kalman's gain: of a state noise of 1 and a measurement noise of 10
            gain = (p + 1.0) / (p + 11.0)
            by_hand, p = by_hand + gain * (each[name] - by_hand), (1 - gain) * (p + 1.0)
        torch.testing.assert_close(mean, by_hand, rtol=0, atol=1e-12)


# Pairs that are tried every time: every other base with SWAG, each watcher with one of what is held, coupled and shared.
OFTEN = ("a network", "FoRDE", "BatchEnsemble")
PAIRS = [
    pytest.param(
        base, watcher, marks=() if place % 2 == i == 0 or (base in OFTEN and i % 3 == place % 3) else pytest.mark.slow
    )
    for place, base in enumerate([*OFTEN, *(base for base in BASES if base not in OFTEN)])
    for i, watcher in enumerate(WATCHERS)
]


@pytest.mark.parametrize(("base", "watcher"), PAIRS)
def test_every_watcher_composes_with_every_base_except_laplace_with_shared_weights(base, watcher, tmp_path):
    build = partial(ds.track, BASES[base](), [WATCHERS[watcher]])
    if watcher == "Laplace" and base in ("BatchEnsemble", "DropoutEnsemble"):
        refuses(lambda: build(), "expected an ordinary last layer for Laplace")
        return
    posterior = fitted(build()).watchers[0]
    predicted = posterior.predict(X).member_means
    assert len(predicted) == (1 if base == "a network" else 3) * (1 if watcher == "SWA" else 2)
    saved = posterior
    for folder in ("once", "twice") if watcher == "SWAG" else ("once",):  # what was loaded can be saved
        ds.save(saved, tmp_path / folder)
        saved = ds.load(tmp_path / folder, tiny.mlp(0.2))
        assert torch.equal(saved.predict(X).member_means, predicted)
    summary = ds.summarise(tmp_path / "once", LOADER, network=tiny.mlp(0.2))
    torch.testing.assert_close(summary.mean, posterior.predict(X).mean, rtol=0, atol=1e-12)


def test_the_page_names_what_composes():
    rule = next(line for line in PAGE.read_text().split("\n- ") if line.startswith("A network, a list"))
    assert [name for name in [*BASES, *WATCHERS] if name.lower() not in rule.lower()] == []


@pytest.mark.parametrize("base", ["a list", "FoRDE", "BatchEnsemble"])
def test_what_watches_is_not_trained_itself(base):
    run = ds.track(BASES[base](), [ds.SWAG])
    error = f"expected the posterior that trains, got SWAG, which watches {type(run).__name__}; train the one"
    refuses(lambda: ds.fit(run.watchers[0], LOADER, epochs=1, progress=False), error)
    refuses(lambda: run.watchers[0].backward(*LOADER[0]), error)
    refuses(lambda: ds.fit(ds.track(run.watchers[0], [ds.TRADI]), LOADER, epochs=1, progress=False), error)


@pytest.mark.parametrize("base", ["a list", "FoRDE", "BatchEnsemble"])
def test_a_copy_of_a_watched_run_goes_its_own_way(base):
    run = fitted(ds.track(BASES[base](), [WATCHERS["SWAG"], WATCHERS["SnapshotEnsemble"]]))
    other, before = copy.deepcopy(run), tiny.state(run)
    fitted(other)
    assert tiny.largest_difference(before, tiny.state(run)) == 0
    for posterior, again in zip(run.watchers, other.watchers, strict=True):
        assert again.base[0] is other
        assert not torch.equal(posterior.predict(X).member_means, again.predict(X).member_means)


@pytest.mark.parametrize("base", ["a network", "FoRDE", "BatchEnsemble"])
def test_a_watched_method_resumes_as_if_it_had_not_stopped(base, tmp_path):
    def begun(**keywords):
        torch.manual_seed(1)
        run = ds.track(BASES[base](), [WATCHERS["SWAG"], WATCHERS["TRADI"]])
        return fitted(run, engine="loop", draw=False, **keywords)

    whole = begun()
    begun(checkpoint=tmp_path / "run.pt", callback=lambda epoch: epoch.epoch == 2)
    resumed = begun(checkpoint=tmp_path / "run.pt")
    for one, other in zip((whole, *whole.watchers), (resumed, *resumed.watchers), strict=True):
        assert tiny.largest_difference(tiny.state(one), tiny.state(other)) == 0


@pytest.mark.parametrize("watcher", often(list(WATCHERS)[::2], list(WATCHERS)[1::2]))
def test_a_run_that_is_moved_after_it_was_built_records_in_the_new_type(watcher):
    run = ds.track(networks(), [WATCHERS[watcher]]).to(torch.float32)
    ds.fit(run, [(x.float(), y) for x, y in LOADER], epochs=4, progress=False)
    posterior = run.watchers[0]
    assert posterior.predict(X.float()).member_means.dtype == torch.float32
    assert posterior.draw().particles.own_parameters().keys() <= run.particles.own_parameters().keys()


def test_every_watcher_has_a_temperature_of_its_own():
    run = ds.track(networks(), [WATCHERS["SWAG"]])
    assert ds.track(run, [WATCHERS["TRADI"]]) is run  # a watched run can be watched by more
    swag, tradi = fitted(run).watchers
    before = [posterior.predict(X).mean for posterior in (run, tradi)]
    ds.temperature_scale(swag, LOADER)
    assert float(swag.temperature) != 1.0
    assert all(torch.equal(p.predict(X).mean, mean) for p, mean in zip((run, tradi), before, strict=True))
    fitted(run)
    assert float(swag.temperature) == 1.0  # it was fitted to other weights


def test_the_metrics_of_networks_are_those_of_their_own_mixtures():
    posterior = fitted(ds.SWAG(networks(), rank=3, samples=4))
    found = ds.evaluate(posterior, LOADER).metrics
    members, y = posterior.predict(X).log_probs, tiny.points(24)[1]  # (3·4, B, C)
    mixtures = members.unflatten(0, (3, 4)).exp().mean(1)  # (3, B, C)
    nll = -mixtures[:, torch.arange(24), y].log().mean()
    votes = mixtures.argmax(2)
    differ = torch.stack([votes[i] != votes[j] for i, j in ((0, 1), (0, 2), (1, 2))]).double().mean()
    assert found["networks/count"] == 3
    assert found["members/count"] == 12
    assert found["networks/nll"] == pytest.approx(float(nll), abs=1e-10)
    assert found["networks/disagreement"] == pytest.approx(float(differ), abs=1e-12)


def test_the_metrics_of_networks_in_a_regression():
    loader = [(x, 0.1 * x[:, :1]) for x, _ in LOADER]
    posterior = ds.TRADI([tiny.mlp(outputs=1).double() for _ in range(2)], samples=3, likelihood=ds.Regression())
    ds.fit(posterior, loader, epochs=2, progress=False)
    found = ds.evaluate(posterior, loader).metrics
    predictive, y = posterior.predict(X), 0.1 * X[:, :1]
    means, variances = (tensor.chunk(2) for tensor in predictive.defining_tensors())
    each = [float(ds.metrics.mixture_nll(m, v, y)) for m, v in zip(means, variances, strict=True)]
    assert found["networks/nll"] == pytest.approx(sum(each) / 2, abs=1e-10)
    assert "networks/disagreement" not in found


@pytest.mark.parametrize("build", [lambda: ds.SWAG(networks()[0]), lambda: ds.SWA(networks()), BASES["DeepEnsemble"]])
def test_networks_are_not_counted_where_members_say_the_same(build):
    found = ds.evaluate(fitted(build()), LOADER).metrics
    assert not [key for key in found if key.startswith("networks/")]


def test_a_watched_run_takes_the_schedule_of_what_records_it():
    alone, run = ds.SWAG(tiny.mlp()), ds.track(ds.DeepEnsemble([tiny.mlp(), tiny.mlp()]), [ds.MAP, ds.SWAG])
    assert [run.default_schedule(20)(e) for e in range(20)] == [alone.default_schedule(20)(e) for e in range(20)]
    plain = ds.track(tiny.mlp(), [ds.GaussianPerturbation])
    assert plain.default_schedule(20)(19) == ds.MAP(tiny.mlp()).default_schedule(20)(19)


def test_every_posterior_is_what_it_would_have_been_alone():
    start = tiny.mlp().double()
    methods = {"tradi": TRADI, "swag": partial(SWAG, rank=3), "swa": SWA, "map": MAP}

    def trained(posterior):
        optimizer = torch.optim.Adam(posterior.parameters(), lr=0.01)
        ds.fit(posterior, tiny.point_batches(), epochs=4, optimizer=optimizer, progress=False)
        return posterior

    together = trained(track(copy.deepcopy(start), list(methods.values())))
    assert [posterior.name for posterior in together.watchers] == list(methods)
    for name, method in methods.items():
        alone = trained(method(copy.deepcopy(start)))
        same = {k: v for k, v in tiny.state(alone).items() if not k.startswith("stored")}  # stored draws are random
        found = {k: v for k, v in tiny.state(together.watchers[name]).items() if not k.startswith("stored")}
        assert tiny.largest_difference(same, found) == 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_watched_run_keeps_its_best_epoch_and_its_watchers_their_records(interrupted, tmp_path):
    start, epochs = tiny.mlp().double(), 8
    x, y = tiny.points(24, seed=1)
    methods = [partial(SWAG, rank=2, samples=3), TRADI, partial(SnapshotEnsemble, members=3), MAP]

    def trained(posterior, validation, **keywords):
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.5)  # overfits: the best epoch is an early one
        settings = {"epochs": epochs, "validation": validation, "progress": False, **keywords}
        return ds.fit(posterior, tiny.point_batches(), optimizer=optimizer, **settings)

    alone, watched, whole = MAP(copy.deepcopy(start)), *(track(copy.deepcopy(start), methods) for _ in range(2))
    expected = trained(alone, [(x, y)])
    assert expected.best.epoch < epochs
    if interrupted:
        stopped, saved = track(copy.deepcopy(start), methods), {"checkpoint": tmp_path / "run.pt"}
        trained(stopped, [(x, y)], **saved, callback=lambda epoch: epoch.epoch == epochs - 2)
        history = trained(watched, [(x, y)], **saved)
    else:
        history = trained(watched, [(x, y)])
    assert history.best.epoch == expected.best.epoch
    assert torch.equal(watched.predict(x).mean, alone.predict(x).mean)
    assert torch.equal(watched.watchers["map"].predict(x).mean, alone.predict(x).mean)
    trained(whole, None)  # keeps the last epoch
    for name in ("swag", "tradi", "snapshot_ensemble"):
        mine, theirs = (tiny.state(run.watchers[name].recorder) for run in (watched, whole))
        assert mine
        assert tiny.largest_difference(mine, theirs) == 0
    assert watched.watchers["swag"].stored is not None
    drawn = [run.watchers["snapshot_ensemble"].predict(x).mean for run in (watched, whole)]  # from the record alone
    assert torch.equal(*drawn)


def test_patience_is_that_of_the_run_also_where_it_is_watched():
    (x, y), start, lengths = tiny.points(24, seed=1), tiny.mlp().double(), []
    for posterior in (MAP(copy.deepcopy(start)), track(copy.deepcopy(start), [partial(SWAG, start=0, every=1)])):
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.5)
        settings = {"validation": [(x, y)], "patience": 1, "progress": False}
        lengths.append(len(ds.fit(posterior, tiny.point_batches(), epochs=20, optimizer=optimizer, **settings)))
    assert lengths[0] == lengths[1] < 20


def test_a_run_is_unpacked_and_looked_up():
    tradi, noisy = watchers = track(tiny.mlp(), [TRADI, GaussianPerturbation]).watchers
    assert isinstance(tradi, TRADI)
    assert watchers[1] is watchers["gaussian_perturbation"] is noisy
    assert len(watchers) == 2
    refuses(lambda: watchers["swag"], "expected a watcher of tradi, gaussian_perturbation, got 'swag'")


def test_one_network_and_one_likelihood_for_all():
    module = tiny.mlp(outputs=2).double()
    run = track(module, [TRADI, partial(SWAG, start=0, every=1), MAP], likelihood=ds.Regression(initial=3.0))
    x, y = tiny.points(24)[0], 0.1 * torch.randn(24, 2, dtype=torch.float64)
    optimizer = torch.optim.Adam(run.parameters(), lr=0.1)
    ds.fit(run, [(x, y)], epochs=30, optimizer=optimizer, progress=False)
    noise = [float(posterior.predict(x).aleatoric.mean()) for posterior in run.watchers]
    assert noise[0] == pytest.approx(noise[1]) == pytest.approx(noise[2])
    assert noise[0] < 1.0
    assert len({id(p) for posterior in run.watchers for p in posterior.parameters()}) == len(list(run.parameters()))


def test_the_run_itself_predicts_what_the_network_says():
    module, (x, _) = tiny.mlp().double(), tiny.points()
    torch.testing.assert_close(track(module, [TRADI]).eval()(x)[0], module(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scheduled", [False, True])
def test_branches_go_on_alike_and_apart(scheduled):
    run = track(tiny.mlp().double(), [TRADI, partial(SWAG, start=6, every=1)])
    optimizer = torch.optim.Adam(run.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) if scheduled else None
    ds.fit(run, tiny.point_batches(), epochs=2, optimizer=optimizer, scheduler=scheduler, progress=False)
    other, its_optimizer = branch(run, optimizer)
    before = tiny.state(run.particles)
    ds.fit(other, tiny.point_batches(), epochs=1, optimizer=its_optimizer, progress=False)
    assert tiny.largest_difference(before, tiny.state(run.particles)) == 0  # the copy's training is its own
    assert int(run.watchers["swag"].recorder.snapshots.taken) == 0
    assert int(other.watchers["swag"].recorder.snapshots.taken) == 3
    ds.fit(run, tiny.point_batches(), epochs=1, optimizer=optimizer, progress=False)
    assert tiny.largest_difference(tiny.state(run.particles), tiny.state(other.particles)) == 0
    assert tiny.largest_difference(run.watchers["tradi"].mean, other.watchers["tradi"].mean) == 0


def test_what_has_nothing_to_draw_from_yet_is_not_refreshed():
    run = track(tiny.mlp().double(), [TRADI, partial(SWAG, start=1000)])
    ds.fit(run, tiny.point_batches(), epochs=1, progress=False)
    assert run.watchers["tradi"].stored is not None
    refuses(lambda: run.watchers["swag"].draw(), "expected at least one snapshot")


def test_what_cannot_be_watched_or_branched_is_refused():
    told = "expected a posterior without latents, got NodeBNN"
    refuses(lambda: ds.track(ds.NodeBNN(networks(), **SIZED), [ds.SWAG]), told)
    copying = lambda _, **keywords: DeepEnsemble([tiny.mlp(), tiny.mlp()], **keywords)  # noqa: E731
    told = "expected methods that can record another's weights, got DeepEnsemble"
    refuses(lambda: track(tiny.mlp(), [TRADI, copying]), told, TypeError)
    for methods in ({"swag": ds.SWAG}, ["swag"], []):  # without any, the run would be unwatched
        with pytest.raises(TypeError, match=r"expected methods, got .*; pass classes or functions of the network"):
            ds.track(tiny.mlp(), methods)
    run, other = track(tiny.mlp(), [TRADI]), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*run.parameters(), *other.parameters()], lr=0.1)
    refuses(lambda: branch(run, optimizer), r"expected an optimizer of posterior.parameters\(\) only")

"""Threads: predictions from many threads are those of one, and the caller's network is never seen with other weights."""

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.core.member_runner import network_lock
from dissensus.kernels.cpu_products import is_on_arm
from thinning import often

THREADS = 8


def conv(dropout: float = 0.0) -> nn.Module:
    """(B, 4) seen as a (B, 1, 2, 2) image."""
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), *drop,
        nn.Linear(16, 3),
    )  # fmt: skip


def attentive(dropout: float = 0.0) -> nn.Module:
    """(B, 4) seen as two tokens of two features."""
    layers = {"encoder": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)}
    layers |= {"drop": nn.Dropout(dropout), "head": nn.Linear(4, 3)}
    return tiny.Network(lambda self, x: self.head(self.drop(self.encoder(x[:, None]).mean(1))), **layers)


def networks(net, count: int = 3, **keywords) -> list[nn.Module]:
    return [net(**keywords) for _ in range(count)]


# name -> net -> posterior
METHODS = {
    "map": lambda net: ds.MAP(net()),
    "deep_ensemble": lambda net: ds.DeepEnsemble(networks(net)),
    "mc_dropout": lambda net: ds.MCDropout(net(dropout=0.3), samples=4),
    "mc_dropout_rate": lambda net: ds.MCDropout(net(), rate=0.3, samples=4),
    "weight_rde": lambda net: ds.WeightRDE(networks(net), data_size=12),
    "function_rde": lambda net: ds.FunctionRDE(networks(net), data_size=12),
    "feature_rde": lambda net: ds.FeatureRDE(networks(net), layer=last_layers(net)[0], head=last_layers(net)[1]),
    "forde": lambda net: ds.FoRDE(networks(net)),
    "svgd": lambda net: ds.SVGD(networks(net), data_size=12),
    "lit": lambda net: ds.LIT(networks(net), strength=0.1),
    "batch_ensemble": lambda net: ds.BatchEnsemble(net(), members=3, modulation=ds.Modulation.sign()),
    "dropout_ensemble": lambda net: ds.DropoutEnsemble(net(), members=3, rate=0.3),
    "tradi": lambda net: ds.TRADI(net(), samples=3, state_noise=(1.0, 0.5)),
    "swag": lambda net: ds.SWAG(net(), rank=3, samples=4, start=0, every=1),
    "swa": lambda net: ds.SWA(net(), start=0, every=1),
    "gaussian_perturbation": lambda net: ds.GaussianPerturbation(net(), samples=3),
    "snapshot_ensemble": lambda net: ds.SnapshotEnsemble(net(), members=3, start=0, every=1),
    "laplace": lambda net: ds.Laplace(net(), samples=4),
    "node_bnn": lambda net: ds.NodeBNN(net(), data_size=24, components=2, samples=4),
    "rank_one_bnn": lambda net: ds.RankOneBNN(net(), data_size=24, components=2, samples=4),
    "mean_field_vi": lambda net: ds.MeanFieldVI(net(), data_size=24, samples=4),
    "sghmc": lambda net: ds.SGHMC(net(), data_size=24, members=3, cycles=0, exploration=0.5, weight_prior_std=1.0),
    "hmc": lambda net: ds.HMC(net(), data_size=24, samples=3, warmup=1, leapfrog=1, weight_prior_std=1.0),
}


def last_layers(net) -> tuple[str, str]:
    *_, layer, head = (name for name, _ in net().named_modules())
    return layer, head


def trained(method: str, net=conv) -> ds.Posterior:
    """A posterior after three steps, its draw stored."""
    torch.manual_seed(0)
    posterior, (x, y) = METHODS[method](net), tiny.points(24)
    ds.fit(posterior, [(x.float(), y)], epochs=3, progress=False, engine="loop")
    return posterior


def in_threads(function, calls: int, threads: int = THREADS) -> list:
    """What `threads` threads got, each calling function(i) so many times, all at once."""
    start = threading.Barrier(threads)

    def work(thread: int) -> list:
        start.wait()
        return [function(thread * calls + i) for i in range(calls)]

    with ThreadPoolExecutor(threads) as pool:
        return [result for results in pool.map(work, range(threads)) for result in results]


def check_predictions(method: str, net, calls: int) -> None:
    posterior = trained(method, net)
    inputs = [tiny.points(6, seed=s)[0].float() for s in range(5)]
    expected = [posterior.predict(x).member_means for x in inputs]
    network = getattr(posterior, "network", posterior.particles.template.network)
    state, stream = tiny.state(posterior), torch.get_rng_state()
    modes = [part.training for part in network.modules()]

    got = in_threads(lambda i: posterior.predict(inputs[i % 5]).member_means, calls)

    assert all(torch.equal(members, expected[i % 5]) for i, members in enumerate(got))
    assert tiny.largest_difference(state, tiny.state(posterior)) == 0
    assert [part.training for part in network.modules()] == modes
    assert torch.equal(torch.get_rng_state(), stream)


# One of each way to run: held, stacked, masked, shared, sampled, with latents. The others run as one of these does.
OFTEN = ("map", "deep_ensemble", "mc_dropout", "batch_ensemble", "swag", "node_bnn")


@pytest.mark.parametrize("method", often(OFTEN, [name for name in METHODS if name not in OFTEN]))
def test_stored_draws_from_many_threads_are_those_of_one(method):
    check_predictions(method, conv, calls=4)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("net", [tiny.mlp, conv, attentive], ids=["mlp", "conv", "attention"])
def test_many_predictions_from_many_threads_are_those_of_one(method, net):
    check_predictions(method, net, calls=200)


def test_every_method_is_tried_in_threads():
    assert {make(tiny.mlp).name for make in METHODS.values()} == set(ds.METHODS)


@pytest.mark.parametrize("method", often(["mc_dropout"], ["deep_ensemble", "swag"]))
def test_attention_has_one_switch_for_all_threads(method):
    """Members with attention switch its fast path off: threads with other networks must not switch it on meanwhile."""
    posterior, other = trained(method, attentive), trained("deep_ensemble", attentive)
    x = tiny.points(6)[0].float()
    expected = [each.predict(x).member_means for each in (posterior, other)]
    got = in_threads(lambda i: (posterior, other)[i % 2].predict(x).member_means, calls=20)
    assert all(torch.equal(members, expected[i % 2]) for i, members in enumerate(got))
    assert torch.backends.mha.get_fastpath_enabled()
    assert {each.particles.how for each in (other,)} == {"vectorised"}  # nobody fell back


@pytest.mark.parametrize("method", often(["tradi", "mc_dropout"], ["swag", "gaussian_perturbation"]))
def test_the_callers_network_answers_as_itself_while_others_predict(method):
    posterior = trained(method)
    network, x = posterior.particles.template.network, tiny.points(6)[0].float()
    with torch.no_grad():
        expected = network(x)
        done = threading.Event()

        def predict() -> None:
            while not done.is_set():
                posterior.predict(x)

        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(predict) for _ in range(2)]
            own = [network(x) for _ in range(200)]
            done.set()
            [other.result() for other in others]
    assert all(torch.equal(outputs, expected) for outputs in own)


@pytest.mark.parametrize("method", often(["swag", "mc_dropout"], ["tradi", "gaussian_perturbation"]))
def test_an_answer_without_a_stored_draw_is_one_whole_draw(method):
    posterior = trained(method)
    if method == "mc_dropout":
        posterior.seed.fill_(-1)
    else:
        posterior.stored = None
    x = tiny.points(6)[0].float()
    got = in_threads(lambda _: posterior.predict(x).member_means, calls=5)
    # predict leaves torch's stream alone, so every one of them is the draw that comes next.
    assert all(torch.equal(members, got[0]) for members in got)
    drawn = in_threads(lambda _: posterior.draw(), calls=3)
    outputs = [each(x) for each in drawn]
    assert all(torch.equal(each(x), first) for each, first in zip(drawn, outputs, strict=True))
    assert len({outputs[i].sum().item() for i in range(len(outputs))}) == len(outputs)  # each draw() is another


def test_whole_loaders_and_evaluations_run_beside_predictions():
    posterior, (x, y) = trained("deep_ensemble"), tiny.points(12)
    loader = [(x[:6].float(), y[:6]), (x[6:].float(), y[6:])]
    members, nll = ds.predict(posterior, loader).member_means, ds.evaluate(posterior, loader).metrics["nll"]

    def one(i: int) -> bool:
        if i % 3 == 0:
            return torch.equal(ds.predict(posterior, loader).member_means, members)
        if i % 3 == 1:
            return ds.evaluate(posterior, loader).metrics["nll"] == nll
        return torch.equal(posterior.draw()(x[:6].float()), posterior(x[:6].float()))

    assert all(in_threads(one, calls=6, threads=6))


def test_members_and_gradients_from_many_threads_are_those_of_one():
    posterior, (x, y) = trained("deep_ensemble"), tiny.points(6)
    expected = [posterior.member(i)(x.float()) for i in range(3)]
    copies = [copy.deepcopy(posterior) for _ in range(THREADS)]
    posterior.zero_grad()  # fit leaves those of its last step
    posterior.backward(x.float(), y)
    gradients = tiny.gradients(posterior)

    def one(i: int) -> bool:
        mine = copies[i // 5]
        mine.zero_grad()
        mine.backward(x.float(), y)
        same = tiny.largest_difference(tiny.gradients(mine), gradients) == 0
        return same and torch.equal(posterior.member(i % 3)(x.float()), expected[i % 3])

    assert all(in_threads(one, calls=5))


def test_a_member_of_mc_dropout_is_an_ordinary_module_in_threads_too():
    posterior, x = trained("mc_dropout"), tiny.points(6)[0].float()
    member = posterior.member(1)
    expected = member(x)
    assert all(torch.equal(outputs, expected) for outputs in in_threads(lambda _: member(x), calls=20))


def test_use_by_another_thread_during_fit_is_a_clear_error():
    posterior, (x, y) = trained("swag"), tiny.points(12)
    x = x.float()
    beside = ds.MAP(posterior.network)  # holds the same network
    errors: list[str] = []

    def from_another_thread(epoch) -> None:
        def use() -> None:
            for call in (posterior.predict, beside.predict, lambda x: posterior.backward(x, y)):
                with pytest.raises(ValueError, match="expected a network that no other thread is training") as error:
                    call(x)
                errors.append(str(error.value))

        posterior.network(x)  # the thread that trains may
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    ds.fit(posterior, [(x, y)], epochs=2, progress=False, callback=from_another_thread)
    assert len(errors) == 6
    posterior.predict(x)  # afterwards all is as before


def test_an_interrupted_fit_gives_the_network_free():
    posterior, (x, y) = trained("map"), tiny.points(12)

    def interrupt(epoch) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ds.fit(posterior, [(x.float(), y)], epochs=2, progress=False, callback=interrupt)
    assert in_threads(lambda _: posterior.predict(x.float()).mean.shape, calls=1, threads=2) == [(12, 3)] * 2


def test_predictions_take_no_number_from_a_stream_that_another_thread_uses():
    posterior, x = trained("swag"), tiny.points(6)[0].float()
    posterior.stored = None  # it draws
    torch.manual_seed(3)
    expected = torch.cat([torch.rand(1) for _ in range(2000)])
    torch.manual_seed(3)
    done = threading.Event()

    def predict() -> None:
        while not done.is_set():
            posterior.predict(x)

    thread = threading.Thread(target=predict)
    thread.start()
    got = torch.cat([torch.rand(1) for _ in range(2000)])
    done.set()
    thread.join()
    assert torch.equal(got, expected)


def test_a_network_that_draws_itself_leaves_the_stream_as_found():
    noisy = tiny.Network(lambda self, x: self.layer(x) + torch.randn(len(x), 3), layer=nn.Linear(4, 3))

    posterior, x = ds.MAP(noisy), tiny.points(6)[0].float()
    before = torch.get_rng_state()
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait)
    thread.start()
    try:
        posterior.predict(x)
        assert torch.equal(torch.get_rng_state(), before)
    finally:
        idle.set()
        thread.join()


def test_locks_go_with_their_networks_and_are_not_copied():
    from dissensus.core import member_runner

    network = tiny.mlp()
    with network_lock(network):
        assert id(network) in member_runner._turns
    posterior, shapes = copy.deepcopy(ds.MAP(network)), []
    thread = threading.Thread(target=lambda: shapes.append(posterior.predict(tiny.points()[0].float()).mean.shape))
    with network_lock(network):
        thread.start()
        thread.join(timeout=0.5 if is_on_arm() else 60)
        # A copy does not wait, but where running a network switches something of the whole process (on Arm).
        assert shapes == ([] if is_on_arm() else [(12, 3)])
    thread.join(timeout=60)
    assert shapes == [(12, 3)]
    key = id(network)
    del network
    assert key not in member_runner._turns


INSIDE = threading.Event()  # not of the network, which is copied


def slow():
    """A network that is long in the middle of its run."""

    def forward(self, x):
        INSIDE.set()
        time.sleep(0.05)
        return self.layer(x)

    return tiny.Network(forward, layer=nn.Linear(4, 3)).double()


@pytest.mark.parametrize(
    "make", [lambda: ds.DeepEnsemble([slow() for _ in range(2)]), lambda: ds.MAP(slow())], ids=["stacked", "held"]
)
def test_a_copy_made_while_another_thread_predicts_is_whole(make):
    x, y = tiny.points()
    posterior = make()
    mode, expected = posterior.training, posterior.predict(x).mean
    INSIDE.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: posterior.predict(x).mean)
        assert INSIDE.wait(10)
        copied = copy.deepcopy(posterior)
        assert torch.equal(answer.result(), expected)
    assert copied.training is mode
    assert copied.state_dict().keys() == posterior.state_dict().keys()
    assert torch.equal(copied.predict(x).mean, expected)
    copied.train().backward(x, y)
    assert len(tiny.gradients(copied)) == 2

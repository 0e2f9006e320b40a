"""Members run by vmap and by the loop alike, whatever the network does."""

import copy
import logging
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import dissensus as ds
import tiny
from dissensus.core.particles import Particles
from refusals import refuses
from thinning import thinned


def recurrent(cell: type[nn.RNNBase]) -> nn.Module:
    layers = {"cell": cell(4, 5, batch_first=True), "head": nn.Linear(5, 3)}
    return tiny.Network(lambda self, x: self.head(self.cell(x)[0][:, -1]), **layers)


def attention() -> nn.Module:
    layers = {"attention": nn.MultiheadAttention(4, 2, batch_first=True), "head": nn.Linear(4, 3)}
    return tiny.Network(lambda self, x: self.head(self.attention(x, x, x, need_weights=False)[0].mean(1)), **layers)


def encoder() -> nn.Module:
    layers = {"layer": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), "head": nn.Linear(4, 3)}
    return tiny.Network(lambda self, x: self.head(self.layer(x)[:, 0]), **layers)


def branching() -> nn.Module:
    """Two paths; which one depends on the member's own values."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return hidden if hidden.sum() > 0 else self.second(x)

    return tiny.Network(forward, first=nn.Linear(4, 3), second=nn.Linear(4, 3))


def reading() -> nn.Module:
    """Asks for a number in the middle of the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return hidden / hidden.abs().max().item()

    return tiny.Network(forward, layer=nn.Linear(4, 3))


def branching_on_inputs() -> nn.Module:
    return tiny.Network(lambda self, x: self.layer(x) if x.sum() > 0 else -self.layer(x), layer=nn.Linear(4, 3))


class Counting(nn.Module):
    """Reassigns one buffer, writes into another, holds one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("scale", torch.rand(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x) * self.scale
        if self.training:
            self.count = self.count + 1
            self.total.add_(hidden.detach().sum(0))
        return hidden


def bag_of_words() -> nn.Module:
    layers = {"table": nn.Embedding(10, 4, padding_idx=0), "head": nn.Linear(4, 3)}
    return tiny.Network(lambda self, x: self.head(self.table(x).mean(1)), **layers)


def tied() -> nn.Module:
    """One matrix used twice: in and, transposed, out."""
    layers = {name: nn.Linear(4, 4, bias=False) for name in ("encode", "decode")}
    layers["decode"].weight = layers["encode"].weight
    layers["norm"] = nn.LayerNorm(4)
    return tiny.Network(lambda self, x: self.decode(self.norm(torch.tanh(self.encode(x))))[:, :3], **layers)


vectors = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
sequences = torch.randn(6, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
images = torch.randn(6, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
words = torch.randint(10, (6, 5), generator=torch.Generator().manual_seed(4))


def normed(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), layer, nn.ReLU(inplace=True), nn.Linear(6, 3))


def convolutions() -> nn.Module:
    ends = nn.ConvTranspose2d(4, 3, 2, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), *ends)


def parametrised(norm) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3))


# name -> (network, inputs, whether vmap can run it in training)
NETWORKS = {
    "batch norm": (lambda: normed(nn.BatchNorm1d(6)), vectors, True),
    "batch norm without statistics": (lambda: normed(nn.BatchNorm1d(6, track_running_stats=False)), vectors, True),
    "cumulative batch norm": (lambda: normed(nn.BatchNorm1d(6, momentum=None)), vectors, False),
    "group norm": (lambda: normed(nn.GroupNorm(2, 6)), vectors, True),
    "layer norm": (lambda: normed(nn.LayerNorm(6)), vectors, True),
    "in-place relu": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), vectors, True),
    "attention": (attention, sequences, True),
    "transformer layer": (encoder, sequences, True),
    "embedding": (bag_of_words, words, True),
    "convolutions": (convolutions, images, True),
    "lstm": (lambda: recurrent(nn.LSTM), sequences, False),
    "gru": (lambda: recurrent(nn.GRU), sequences, False),
    "a branch on values": (branching, vectors, False),
    "a branch on inputs": (branching_on_inputs, vectors, True),
    "item": (reading, vectors, False),
    "buffers of all kinds": (Counting, vectors, True),
    "tied weights": (tied, vectors, True),
    "one gradient for two": (tiny.equal_gradients, vectors, True),
    "weight norm": (lambda: parametrised(parametrizations.weight_norm), vectors, True),
    "spectral norm": (lambda: parametrised(parametrizations.spectral_norm), vectors, False),
}


@pytest.fixture(params=NETWORKS, ids=str)
def network(request):
    return NETWORKS[request.param]


def both(make, *, members: int = 3) -> tuple[ds.Posterior, ds.Posterior]:
    """The same ensemble twice: vectorised, and one member after the other."""
    vectorised = tiny.ensemble(make, members, how="vectorised")
    looped = copy.deepcopy(vectorised)
    looped.particles.how = "loop"
    return vectorised, looped


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("training", "road"), thinned([True, False], ["backward", "loss"], every=2))
def test_vmap_equals_the_loop_and_what_it_cannot_run_falls_back_with_one_log_line(network, training, road, caplog):
    make, x, can = network
    vectorised, looped = both(make)
    y = torch.arange(6) % 3
    with caplog.at_level(logging.INFO, logger="dissensus"):
        for posterior in (vectorised.train(training), looped.train(training)):
            for _ in range(2):
                posterior.backward(x, y) if road == "backward" else posterior.loss(x, y).backward()
    if training:  # some of what vmap cannot run happens there alone
        assert sum("one after the other" in record.getMessage() for record in caplog.records) == (0 if can else 1)
        assert vectorised.particles.how == ("vectorised" if can else "loop")
    assert tiny.largest_difference(tiny.gradients(vectorised), tiny.gradients(looped)) < 1e-10
    assert tiny.largest_difference(tiny.state(vectorised), tiny.state(looped)) < 1e-10
    torch.testing.assert_close(vectorised(x), looped(x), rtol=0, atol=1e-10)
    torch.testing.assert_close(vectorised.predict(x).member_means, looped.predict(x).member_means, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_members_do_what_the_networks_do_alone(network):
    """Outputs, gradients and buffers against plain modules and plain autograd, in training mode."""
    make, x, _ = network
    networks = [make().to(torch.float64) for _ in range(3)]
    posterior = ds.DeepEnsemble(networks)
    posterior.particles.how = "vectorised"
    y = torch.arange(6) % 3
    losses = posterior.backward(x, y)
    for i, net in enumerate(networks):
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        torch.testing.assert_close(losses[i], loss.detach(), rtol=0, atol=1e-10)
        member = posterior.member(i)
        assert tiny.largest_difference(tiny.state(member), tiny.state(net)) < 1e-10
        stacked = dict(posterior.particles.own.named_parameters())
        for name, parameter in net.named_parameters():
            if parameter.grad is None:  # the path not taken
                grad = stacked[f"network.{name}"].grad
                assert grad is None or float(grad[i].abs().max()) == 0
            else:
                torch.testing.assert_close(stacked[f"network.{name}"].grad[i], parameter.grad, rtol=0, atol=1e-10)
        torch.testing.assert_close(member.eval()(x), net.eval()(x), rtol=0, atol=1e-10)


def test_a_fallback_sees_the_same_random_numbers():
    """The attempt that failed leaves no trace in the random stream."""

    y = torch.arange(6) % 3
    roads = (lambda p: p.backward(vectors, y), lambda p: p.loss(vectors, y), lambda p: p(vectors))
    for road in roads:
        results = []
        for posterior in both(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), reading())):
            torch.manual_seed(3)
            results.append((road(posterior), torch.rand(1)))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("how", ["loop", "vectorised"])
def test_members_drop_different_units(how):
    posterior = ds.DeepEnsemble([nn.Sequential(nn.Dropout(0.5), nn.Linear(400, 3, bias=False)) for _ in range(3)])
    posterior.particles.how = how
    with torch.no_grad():
        for parameter in posterior.parameters():
            parameter.fill_(1.0)  # the outputs count the units kept, times two
            parameter[..., 1, :] = torch.rand(400)  # but for one that tells which were kept
    kept, which = posterior(torch.ones(1, 400))[:, 0, :2].detach().unbind(1)
    kept = kept / 2
    assert len(set(which.tolist())) == 3
    assert bool(((kept - 200).abs() < 4 * 10).all())  # binomial: sd 10
    assert torch.equal(posterior.eval()(torch.ones(1, 400))[..., 0], torch.full((3, 1), 400.0))


@pytest.mark.parametrize(
    "build", [lambda: tiny.ensemble(tied), lambda: ds.MAP(tied().to(torch.float64))], ids=["stacked", "held"]
)
def test_tied_weights_stay_tied(build, tmp_path):
    posterior = build()
    assert len(list(posterior.parameters())) == 3  # encode.weight once, not twice; norm's weight and bias
    optimizer = torch.optim.Adam(posterior.parameters(), lr=0.1)
    for _ in range(3):
        posterior.zero_grad()
        posterior.backward(vectors, torch.arange(6) % 3)
        optimizer.step()
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, tied())
    for each in (posterior, loaded):
        for i in range(posterior.particles.members):
            member = each.member(i)
            assert member.encode.weight is member.decode.weight
    assert len(list(loaded.parameters())) == 3
    assert torch.equal(loaded.predict(vectors).member_means, posterior.predict(vectors).member_means)


@pytest.mark.parametrize("how", ["loop", "vectorised"])
def test_frozen_parameters_stay_frozen(how):
    def make() -> nn.Module:
        net = tiny.mlp()
        net[0].weight.requires_grad_(False)
        return net

    posterior = tiny.ensemble(make, how=how, weight_prior_std=0.1, data_size=5)
    frozen = posterior.particles.own_parameters()["network.0.weight"]
    before = frozen.clone()
    assert not frozen.requires_grad
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        posterior.zero_grad()
        posterior.backward(*tiny.points())
        optimizer.step()
    assert frozen.grad is None
    assert torch.equal(frozen, before)
    assert not posterior.member(0)[0].weight.requires_grad
    assert posterior.member(0)[0].bias.requires_grad
    assert all(p is not frozen for g in posterior.parameter_groups(lr=1.0) for p in g["params"])


def two_like(network):
    other = tiny.mlp()
    for part, like in zip(other.modules(), network.modules(), strict=True):
        part.training = like.training
    return ds.DeepEnsemble([network, other])


@pytest.mark.parametrize("build", [ds.MAP, two_like], ids=["held", "stacked"])
def test_parts_set_to_eval_stay_so(build):
    network = tiny.mlp()
    network[1].eval()
    posterior = build(network).to(torch.float64)
    before = {k: v for k, v in tiny.state(posterior).items() if "running" in k or "tracked" in k}
    assert before
    x, y = tiny.points()
    posterior.backward(x, y)
    posterior.predict(x)
    posterior.eval()
    posterior.train()
    ds.fit(posterior, [(x, y)], epochs=2, progress=False, engine="loop")
    ds.fit(posterior, [(x, y)], epochs=1, progress=False, engine="loop")
    after = tiny.state(posterior)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_batch_statistics_are_each_members_own():
    posterior = tiny.ensemble(tiny.mlp, how="vectorised")
    x, y = tiny.points()
    posterior.backward(x, y)
    for i in range(3):
        net = posterior.member(i)
        hidden = net[0](x)
        torch.testing.assert_close(net[1].running_mean, 0.1 * hidden.mean(0), rtol=0, atol=1e-10)
        torch.testing.assert_close(net[1].running_var, 0.9 + 0.1 * hidden.var(0), rtol=0, atol=1e-10)
        assert int(net[1].num_batches_tracked) == 1


@pytest.mark.parametrize("build", [ds.MAP, lambda net: ds.DeepEnsemble([net, Counting()])], ids=["held", "stacked"])
def test_buffers_are_kept_as_forward_left_them(build):
    posterior = build(Counting())
    x, y = vectors.float(), torch.arange(6) % 3
    posterior.backward(x, y)
    posterior.loss(x, y)
    posterior(x)
    posterior.predict(x)  # in eval mode: does not count
    assert int(posterior.member(0).count) == 3
    names = posterior.state_dict().keys()
    assert any(name.endswith("count") for name in names)
    assert not any(name.endswith("scale") for name in names)


def test_buffers_that_are_not_saved_are_each_members_own():
    networks = [Counting(), Counting()]
    posterior = ds.DeepEnsemble(networks)
    for i, net in enumerate(networks):
        assert torch.equal(posterior.member(i).scale, net.scale)
        torch.testing.assert_close(posterior.eval()(vectors.float())[i], net.eval()(vectors.float()))
    assert posterior.to(torch.float64).member(0).scale.dtype == torch.float64


def test_inputs_changed_in_place_are_refused():
    """The second member would see what the first one left behind."""

    class Scaling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x /= 255
            return super().forward(x)

    for posterior in (ds.MAP(Scaling(4, 3)), ds.DeepEnsemble([Scaling(4, 3), Scaling(4, 3)])):
        for call in (posterior.predict, partial(posterior.backward, y=torch.arange(6) % 3)):
            refuses(partial(call, vectors.float()), "does not change its inputs")


def test_what_is_no_module_or_loses_the_batch_axis_is_refused():
    refuses(lambda: ds.MAP(nn.Linear), r"expected an nn\.Module, got type", TypeError)
    refuses(lambda: ds.MAP(lambda x: x), r"expected an nn\.Module, got function", TypeError)
    x, y = vectors.float(), torch.arange(6) % 3
    two = tiny.Network(lambda self, x: (self.layer(x), self.layer(x)), layer=nn.Linear(4, 3))
    refuses(lambda: ds.MAP(two).predict(x), 'one tensor, or "logits" or "out", got tuple', TypeError)
    mean = tiny.Network(lambda self, x: self.layer(x).mean(0), layer=nn.Linear(4, 3))
    told = r"expected outputs with the batch axis first \(6, ...\), got \(3,\)"
    refuses(lambda: ds.MAP(mean).backward(x, y), told)


def test_the_template_of_a_stack_holds_no_memory():
    particles = Particles.stack([tiny.mlp(), tiny.mlp()], ds.Classification())
    assert sum(t.numel() for t in [*particles.template.parameters(), *particles.template.buffers()]) == 0
    assert not [name for name, _ in particles.named_parameters() if "template" in name]


def test_the_callers_networks_stay_usable_and_their_own():
    networks = [tiny.mlp() for _ in range(2)]
    before = [tiny.state(net) for net in networks]
    posterior = ds.DeepEnsemble(networks)
    x, y = tiny.points()
    ds.fit(posterior, [(x.float(), y)], epochs=2, progress=False, engine="loop")
    for net, saved in zip(networks, before, strict=True):
        assert tiny.largest_difference(saved, tiny.state(net)) == 0
        net(x.float())


def test_a_held_network_is_the_callers_own():
    network = tiny.mlp().to(torch.float64)
    posterior = ds.MAP(network)
    x, y = tiny.points()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)  # the caller's optimiser goes on working
    before = posterior.predict(x).mean
    posterior.backward(x, y)
    optimizer.step()
    assert not torch.equal(posterior.predict(x).mean, before)
    torch.testing.assert_close(posterior.eval()(x)[0], network(x), rtol=0, atol=0)


class Checkpointed(nn.Module):
    """A network whose middle is computed again in the backward pass."""

    def __init__(self, dropout=0.0, *, again=True, reentrant=False):
        super().__init__()
        self.first, self.norm, self.middle = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(6, 3)
        self.again, self.reentrant = again, reentrant

    def block(self, x):
        return self.drop(torch.tanh(self.middle(self.norm(x))))

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(checkpoint(self.block, x, use_reentrant=self.reentrant) if self.again else self.block(x))


CHECKPOINTED = {
    "deep_ensemble": lambda nets: ds.DeepEnsemble(nets),
    "svgd": lambda nets: ds.SVGD(nets, data_size=12),
    "weight_rde": lambda nets: ds.WeightRDE(nets, data_size=12),
    "function_rde": lambda nets: ds.FunctionRDE(nets, data_size=12),
    "batch_ensemble": lambda nets: ds.BatchEnsemble(nets[0], members=3, modulation=ds.Modulation.normal(1.0, 0.5)),
    "mc_dropout": lambda nets: ds.MCDropout(nets[0], samples=3),
    "map": lambda nets: ds.MAP(nets[0]),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_activations_computed_again_in_the_backward_pass_change_nothing(name):
    x, y = tiny.points()
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        dropout = 0.3 if name == "mc_dropout" else 0.0
        posterior = CHECKPOINTED[name]([Checkpointed(dropout, again=again).double() for _ in range(2)])
        for _ in range(2):
            torch.manual_seed(1)
            posterior.zero_grad()
            posterior.backward(x, y)
        found.append((tiny.gradients(posterior), {n: b for n, b in tiny.state(posterior).items() if "running" in n}))
    for once, twice in zip(*found, strict=True):
        assert tiny.largest_difference(once, twice) < 1e-12


def test_training_with_them_counts_every_batch_once_in_the_callers_own_network():
    x, y = tiny.points()
    networks = [Checkpointed(again=again).double() for again in (False, True)]
    networks[1].load_state_dict(networks[0].state_dict())
    for network in networks:
        posterior = ds.MAP(network)
        optimizer = torch.optim.SGD(posterior.parameters(), 0.1)
        ds.fit(posterior, [(x, y)] * 2, epochs=2, optimizer=optimizer, progress=False)
    assert networks[1].norm.num_batches_tracked == 4
    assert tiny.largest_difference(*(network.state_dict() for network in networks)) < 1e-12


def test_reentrant_checkpoints_and_layers_changed_for_the_forward_pass_alone_are_refused():
    posterior, (x, y) = ds.DeepEnsemble([Checkpointed(reentrant=True).double() for _ in range(2)]), tiny.points()
    refuses(lambda: posterior.backward(x, y), "use_reentrant=False", RuntimeError)
    network = Checkpointed().double()
    network.drop = nn.Identity()  # `rate` takes no dropout beside its own
    changed = ds.MCDropout(network, rate=0.3, samples=3)
    refuses(lambda: changed.backward(x, y), "recomputed in the backward pass, got other values")


@pytest.mark.parametrize(
    "build", [lambda net: ds.DeepEnsemble([net(), net()]), lambda net: ds.MAP(net())], ids=["stack", "map"]
)
def test_networks_without_values_are_refused_in_one_line(build):
    message = "expected initialised tensors, got 'weight', which is lazy or on the meta device; run one batch"
    refuses(lambda: build(lambda: nn.LazyLinear(2)), message)
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        build(lambda: nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["script", "trace"])
@pytest.mark.parametrize("part", [False, True])
def test_scripted_and_traced_networks_and_parts_say_why_they_do_not_work(kind, part):
    def net():
        layer = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions of torch advise against torch.jit
            made = torch.jit.script(layer) if kind == "script" else torch.jit.trace(layer, torch.zeros(2, 4))
        return nn.Sequential(made, nn.Linear(3, 3)) if part else made

    told = f"of Python modules, got {'0' if part else 'one'} of torch.jit, which .*; pass the one that"
    for build in (ds.MAP, ds.SWAG, lambda net: ds.DeepEnsemble([net, net]), lambda net: ds.NodeBNN(net, data_size=9)):
        with pytest.raises(TypeError, match=told):
            build(net())
    refuses(lambda: ds.DeepEnsemble(net, members=2), told, TypeError)


@pytest.mark.parametrize(
    "net", [tiny.mlp, lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Flatten())]
)
def test_a_predictor_runs_members_one_by_one_wherever_its_tensors_are(net):
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([net() for _ in range(3)]).eval()
    x = torch.randn(5, 4)
    predictor = posterior.predictor()
    for each in (predictor, copy.deepcopy(predictor), pickle.loads(pickle.dumps(predictor))):
        torch.testing.assert_close(each(x)["mean"], posterior.predict(x).mean, rtol=0, atol=1e-6)
    expected = posterior.double().predict(x.double())
    found = predictor.double()(x.double())
    torch.testing.assert_close(found["mean"], expected.mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(found["epistemic"], expected.epistemic, rtol=0, atol=1e-12)
    predictor.load_state_dict(
        {name: torch.zeros_like(each) for name, each in predictor.state_dict().items()}, strict=False
    )
    assert not torch.allclose(predictor(x.double())["mean"], expected.mean)
    x = x.double().requires_grad_()
    assert torch.autograd.grad(posterior.predictor()(x)["mean"][:, 0].sum(), x)[0].abs().sum() > 0


def test_a_network_that_cannot_be_copied_stays_as_it_is_in_a_predictor():
    posterior = ds.MAP(tiny.mlp()).eval()
    x, predictor = torch.randn(5, 4), posterior.predictor()
    particles = predictor.drawn.particles
    particles.copy_template = lambda index=0: particles.templates[0]
    torch.testing.assert_close(predictor(x)["mean"], posterior.predict(x).mean, rtol=0, atol=1e-6)
    assert predictor.separate.known is predictor.drawn

"""NodeBNN: networks that write into what a layer returns or skip a layer, and inputs beside the examples."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dissensus as ds
import tiny
from dissensus.core import batch as batches
from dissensus.layers.nodes import NodeLayer
from refusals import refuses
from thinning import often


def beside(forward):
    """(B, 4) and another input -> (B, 3)."""
    return tiny.Network(forward, layer=nn.Linear(4, 3))


def with_table(self, x, table):
    return self.layer(x + table.sum(0))


def both(self, x, other):
    """Two tensors (B, 4), added up."""
    return self.layer(x + other)


def loss(network, *inputs):
    torch.manual_seed(0)
    posterior = ds.NodeBNN(network, data_size=9, components=2, train_samples=3).double().train()
    for each in inputs:
        torch.manual_seed(1)
        found = posterior.backward(each, torch.arange(len(each[0])) % 3)
    return found


def test_a_table_as_long_as_a_later_batch_is_not_repeated_with_the_examples():
    torch.manual_seed(2)
    x, table = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    network = beside(with_table).double()
    longer = torch.cat([table, torch.zeros(3, 4, dtype=torch.float64)])  # the same sum, and no doubt
    torch.testing.assert_close(loss(network, (torch.cat([x, x]), table), (x, table)), loss(network, (x, longer)))


def test_a_table_as_long_as_the_first_batch_is_refused():
    x, table = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    told = r"shapes \[\(4, 4\)\] with 4 examples, one of them without such rows; .* as a buffer"
    refuses(lambda: loss(beside(with_table).double(), (x, table)), told)


@pytest.mark.parametrize("train_samples", [1, 3])
def test_an_input_for_pairs_of_examples_is_refused(train_samples):
    torch.manual_seed(2)
    network = beside(lambda self, x, joined: self.layer(torch.tanh(joined @ x)))  # (B, B): every example to every other
    posterior = ds.NodeBNN(network, data_size=9, train_samples=train_samples).double()
    x, joined, y = torch.randn(6, 4).double(), torch.rand(6, 6).double(), torch.arange(6) % 3
    told = r"shapes \[\(6, 6\)\] with 6 examples, one of them without such rows; .* in forward"
    refuses(lambda: posterior.backward((x, joined), y), told)
    refuses(lambda: ds.fit(posterior, [((x, joined), y)], epochs=1, progress=False), "one of them without such rows")


def pairs(self, x, other):
    """The same, pair by pair: one example beside many of the other tensor is no error."""
    return self.layer(torch.stack([one + another for one, another in zip(x, other, strict=False)]))


def indexed(self, x, other):
    """The same, with rows looked up by number, as transformers look up masks."""
    return self.layer(x + other[torch.arange(len(x))])


@pytest.mark.parametrize("kind", [both, pairs, indexed])
@pytest.mark.parametrize("alike", [False, True])
def test_rows_of_examples_in_several_tensors_are_repeated_together(kind, alike):
    torch.manual_seed(2)
    x, other = torch.randn(2, 4, 4, dtype=torch.float64)
    other = other[:1].expand(4, 4) if alike else other
    network = beside(kind).double()

    alone = beside(lambda self, x: kind(self, x, torch.zeros_like(x))).double()
    alone.load_state_dict(network.state_dict())
    torch.testing.assert_close(loss(network, (x, other)), loss(alone, (x + other,)))


def build(net, **keywords):
    return ds.NodeBNN(net, **{"data_size": 100, "components": 2, "samples": 4, **keywords}).to(torch.float64)


def batch():
    torch.manual_seed(0)
    return torch.randn(6, 2, 4, 4, dtype=torch.float64), torch.randint(3, (6,))


def net(after, forward=lambda self, x: self.head(self.after(self.conv(x)).flatten(1))):
    """A convolution, something done to what it returns, a linear layer."""
    return tiny.Network(forward, conv=nn.Conv2d(2, 3, 3), head=nn.Linear(12, 3), after=after)


def read(calls):
    """A network that reads the weights of one of its layers and does not call it."""

    def forward(self, x):
        hidden = torch.tanh(F.linear(x.flatten(1), self.first.weight, self.first.bias))
        return self.head(hidden) if calls else F.linear(hidden, self.head.weight, self.head.bias)

    return tiny.Network(forward, first=nn.Linear(32, 5), head=nn.Linear(5, 3))


def added(x):
    x += 1.0
    return torch.sigmoid(x)


@pytest.mark.parametrize("mode", ["in", "out", "both"])
@pytest.mark.parametrize(("after", "plain"), [
    (nn.ReLU(inplace=True), nn.ReLU()), (nn.SiLU(inplace=True), nn.SiLU()),
    (added, lambda x: torch.sigmoid(x + 1.0)), (nn.Dropout(1e-12, inplace=True), nn.Identity()),
])  # fmt: skip
def test_what_a_layer_returns_may_be_written_into(after, plain, mode):
    (x, y), found = batch(), []
    for each in (after, plain):
        torch.manual_seed(1)
        posterior = build(net(each), mode=mode).train()
        torch.manual_seed(2)
        posterior.backward(x, y)
        found.append({name: p.grad for name, p in posterior.named_parameters()})
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("write", [lambda x, on: F.dropout(x, 0.3, on, True), lambda x, on: x.add_(0.5) if on else x])
def test_what_a_layer_returns_may_be_written_into_in_training_alone(write):
    def written(self, x):
        return self.head(write(self.after(self.conv(x)), self.training).flatten(1))

    (x, y), found = batch(), []
    for after in (nn.Identity(), torch.clone):
        torch.manual_seed(1)
        posterior = build(net(after, written), mode="both").train()
        torch.manual_seed(2)
        posterior.backward(x, y)
        found.append({name: p.grad for name, p in posterior.named_parameters()})
        assert all(part.training for part in posterior.particles.template.modules())
    torch.testing.assert_close(found[0], found[1])


def test_a_network_that_wants_even_batches_in_training_is_looked_at_in_eval_mode_alone():
    def even(self, x):
        first, second = x.chunk(2) if self.training else (x, x)
        if len(first) != len(second):
            raise ValueError("an even batch")
        return self.head(self.conv(x).flatten(1))

    x, y = batch()
    posterior = build(net(nn.Identity(), even)).train()
    posterior.backward(x, y)
    assert posterior.particles.template.network.conv.rewritten  # nobody knows


def test_outputs_that_nobody_writes_into_have_the_short_backward_pass():
    x, y = batch()
    posterior = build(net(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(inplace=True))))
    posterior.backward(x, y)
    layers = [part for part in posterior.particles.template.network.modules() if isinstance(part, NodeLayer)]
    assert [layer.rewritten for layer in layers] == [False, False]
    assert [layer.seen for layer in layers] == [None, None]
    posterior = build(net(nn.ReLU(inplace=True)))
    posterior.backward(x, y)
    network = posterior.particles.template.network
    assert (network.conv.rewritten, network.head.rewritten) == (True, False)


def test_a_layer_that_is_not_called_is_named(caplog):
    x, y = batch()
    with caplog.at_level(logging.WARNING, logger="dissensus"):
        posterior = build(read(calls=True))
        for _ in range(2):
            posterior.backward(x, y)
    assert [each.message.partition(",")[0] for each in caplog.records] == ["latents have no effect in first"]


def test_a_network_that_calls_no_layer_is_an_error():
    with pytest.raises(ValueError, match="expected a network that calls its layers, got Network, which calls no layer"):
        build(read(calls=False)).backward(*batch())


def test_layers_may_be_called_by_keyword():
    posterior = build(net(nn.Identity(), lambda self, x: self.head(input=self.conv(input=x).flatten(1))))
    x, y = batch()
    posterior.backward(x, y)
    functions = posterior.draw()
    torch.testing.assert_close(functions(x)[0], functions.member(0)(x))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", ["in", "out"])
def test_a_layer_run_again_in_the_backward_pass_without_its_latents_is_an_error(mode, reentrant):
    def again(self, x):
        plain = lambda x: self.head(self.after(self.conv(x)).flatten(1))  # noqa: E731
        return checkpoint(plain, x.clone().requires_grad_(), use_reentrant=reentrant)

    posterior = build(net(nn.Tanh(), again), mode=mode).train()
    with pytest.raises(ValueError, match="expected a layer that runs only in the forward pass, got 'conv' run again"):
        posterior.loss(*batch()).backward()


def test_a_stored_draw_that_training_went_past_is_said_until_it_is_refreshed(caplog, tmp_path):
    x, y = batch()
    posterior = build(net(nn.Tanh()))
    ds.fit(posterior, [(x, y)], epochs=2, progress=False)
    ds.save(posterior, tmp_path / "saved")
    loaded = ds.load(tmp_path / "saved", net(nn.Tanh()).double())
    for each in (posterior, loaded):
        caplog.clear()
        each.predict(x)
        assert not caplog.records
        optimizer = torch.optim.SGD(each.parameter_groups(0.1))
        optimizer.zero_grad()
        each.backward(x, y)
        each.predict(x)
        assert not caplog.records
        optimizer.step()
        each.predict(x)
        assert "call ds.refresh(posterior, loader)" in caplog.text
        caplog.clear()
        ds.refresh(each, [(x, y)])
        each.to(torch.float32).predict(x.float())
        assert not caplog.records


# ------------------------------------------------------------------------------------------------------ outputs by name
class Outputs(OrderedDict[str, Tensor]):
    """Outputs by name, as transformers' models return them: a dict with attributes."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


class Named(nn.Module):
    def __init__(self, kind: Callable[..., Any] = Outputs) -> None:
        super().__init__()
        self.body, self.head, self.kind = nn.Linear(4, 6), nn.Linear(6, 3), kind

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).tanh()
        return self.kind(logits=self.head(hidden), hidden=hidden)


class Plain(Named):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)["logits"]


def test_latents_at_1_reproduce_a_network_with_outputs_by_name(tmp_path):
    tiny.check_latents_around(Named, torch.randn(2, 4), tmp_path)


METHODS: dict[str, Callable[[Callable[[], nn.Module]], ds.Posterior]] = {
    "map": lambda make: ds.MAP(make()),
    "deep_ensemble": lambda make: ds.DeepEnsemble([make() for _ in range(2)]),
    "forde": lambda make: ds.FoRDE([make() for _ in range(2)], data_size=8),
    "function_rde": lambda make: ds.FunctionRDE([make() for _ in range(2)], data_size=8),
    "feature_rde": lambda make: ds.FeatureRDE([make() for _ in range(2)], data_size=8, layer="body", head="head"),
    "swag": lambda make: ds.SWAG(make()),
    "mc_dropout": lambda make: ds.MCDropout(make(), rate=0.2),
    "batch_ensemble": lambda make: ds.BatchEnsemble(make(), members=2, modulation=ds.Modulation.sign()),
    "node_bnn": lambda make: ds.NodeBNN(make(), data_size=8, components=2, samples=2),
    "mean_field_vi": lambda make: ds.MeanFieldVI(make(), data_size=8, samples=2),
}
OFTEN = ["map", "forde", "feature_rde", "node_bnn", "mean_field_vi"]  # each calls the network in its own way
SPLIT = OFTEN, [name for name in METHODS if name not in OFTEN]


def segmented(logits: Tensor, hidden: Tensor) -> OrderedDict[str, Tensor]:
    """As torchvision's networks for segmentation return them."""
    return OrderedDict(out=logits, aux=hidden)


@pytest.mark.parametrize("method", often(*SPLIT))
def test_outputs_by_name_give_what_their_logits_alone_give_and_an_aux_head_is_not_taken(method):
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    found = []
    for make in (Named, partial(Named, dict), partial(Named, segmented), Plain):
        torch.manual_seed(1)
        posterior = METHODS[method](make)
        optimizer = torch.optim.SGD(posterior.parameter_groups(lr=0.1))
        ds.fit(posterior, [(x, y)] * 3, epochs=1, optimizer=optimizer, progress=False)
        found.append(posterior.predict(x).mean)
    assert all(torch.equal(each, found[-1]) for each in found)
    assert batches.output_tensor({"out": x, "logits": y}) is y


def test_outputs_without_logits_are_refused_in_training_too():
    def unnamed(logits: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        return {"head": logits, "hidden": hidden}

    x, y = torch.randn(8, 4), torch.arange(8) % 3
    for kind, name in ((unnamed, "dict"), (lambda logits, hidden: (logits, logits), "tuple")):
        with pytest.raises(
            TypeError, match=f'expected a network that returns one tensor.*"logits" or "out", got {name}; wrap'
        ):
            ds.fit(ds.MAP(Named(kind)), [(x, y)], epochs=1, progress=False)

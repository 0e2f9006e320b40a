"""Ways to run members: which is taken, what shows in the next prediction, and what a prediction leaves as it was."""

import copy
import gc
import pickle
import sys
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dissensus as ds
import tiny
from dissensus.core.member_runner import FallbackChain, Rows, loop, run_by_vmap
from dissensus.core.posterior import inference_context
from refusals import refuses


def ways(noted, **functions):
    return FallbackChain(lambda *given: noted.append(given), **functions)


def failing(message="no such kernel"):
    def fails(*_):
        torch.rand(3)
        raise RuntimeError(message)

    return fails


def test_the_first_way_that_works_is_taken_from_then_on_with_random_numbers_put_back():
    noted = []
    able = {"third": lambda x: (x, torch.rand(2)), "fourth": failing()}
    run = ways(noted, first=failing("one\nmore"), second=failing(), **able)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    given, drawn = run(7)
    assert given == 7
    assert torch.equal(drawn, expected)
    assert run.name == "third"
    assert noted == [("first", "one", 7), ("second", "no such kernel", 7)]
    run(8)
    assert len(noted) == 2


def test_where_every_way_fails_the_last_ones_error_is_raised_and_none_is_given_up():
    def out(*_):
        raise torch.OutOfMemoryError("full")

    noted = []
    run = ways(noted, first=failing("of vmap"), last=failing("the caller's own"))
    for _ in range(2):
        refuses(lambda: run(7), "the caller's own", RuntimeError)
    assert run.name == "first"
    # Running out of memory is no reason for another way.
    refuses(lambda: ways(noted, first=out, last=lambda x: x)(7), "full", torch.OutOfMemoryError)
    assert noted == []


def test_members_fall_back_to_the_loop_once_and_the_log_says_so(caplog):
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() + self.weight.sum() > -1e9 else x

    posterior = ds.DeepEnsemble([Branching(4, 3).double() for _ in range(2)])
    with caplog.at_level("INFO", logger="dissensus"):
        posterior.predict(torch.randn(5, 4).double())
        posterior.predict(torch.randn(5, 4).double())
    assert posterior.particles.how == "loop"
    assert sum("cannot be vectorised" in record.message for record in caplog.records) == 1


class Pair(NamedTuple):
    mean: torch.Tensor
    extra: list[torch.Tensor]


@pytest.mark.parametrize("gradients", [True, False])
def test_members_at_once_are_those_of_torchs_vmap_and_of_the_loop_whatever_tree_they_return(gradients):
    generator = torch.Generator().manual_seed(0)
    own = {"w": torch.randn(3, 4, 5, dtype=torch.float64, generator=generator).requires_grad_(gradients)}
    rows = Rows(own, {"b": torch.arange(6.0).reshape(3, 2)}, {})
    x = torch.randn(2, 5, dtype=torch.float64, generator=generator)

    def one(row):
        out = x @ row.own["w"].mT
        return out, {"b": row.buffers["b"] * 2, "none": ()}, Pair(out.sum(), [out.exp()])

    with torch.set_grad_enabled(gradients):
        found, expected = run_by_vmap(one, rows, 3), torch.func.vmap(one)(rows)
        looped = loop(one, rows.member_rows(3))
    assert isinstance(found[2], Pair)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(looped, expected, rtol=1e-14, atol=1e-14)
    if gradients:
        slopes = [torch.autograd.grad(each[0].square().sum(), own["w"])[0] for each in (found, looped)]
        torch.testing.assert_close(*slopes, rtol=1e-13, atol=1e-13)


def test_rows_of_a_large_batch_are_those_of_small_ones():
    posterior, (x, _) = tiny.ensemble(tiny.mlp), tiny.points()
    assert posterior.eval().particles.how == "vectorised"
    few = torch.cat([posterior.predict(x[i : i + 3]).member_means for i in (0, 3, 6, 9)], 1)
    torch.testing.assert_close(few, posterior.predict(x).member_means, rtol=1e-12, atol=1e-12)


def frames(function) -> int:
    """Calls of this library's own functions, and those by which torch looks for a module's attributes."""
    count = 0

    def seen(frame, event, _):
        nonlocal count
        code = frame.f_code
        count += event == "call" and ("dissensus" in code.co_filename or code.co_name == "__getattr__")

    function()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_prediction_of_one_input_takes_few_calls():
    """Times depend on the machine, calls do not: they are what such a prediction costs over its network."""
    x, networks = torch.randn(1, 4), [tiny.mlp() for _ in range(5)]
    few, several = ds.MAP(networks[0]).eval(), ds.DeepEnsemble(networks).eval()
    assert frames(lambda: few.predict(x)) <= 100
    assert frames(lambda: several.predict(x)) <= 165


def test_a_training_step_of_one_network_takes_few_calls():
    (x, y), posterior = tiny.points(), ds.MAP(tiny.mlp().double())
    counts = [
        frames(lambda n=n: ds.fit(posterior, [(x, y)] * n, epochs=1, progress=False, device="cpu")) for n in (1, 10, 20)
    ]
    assert (counts[2] - counts[1]) / 10 <= 200  # the first run looks at the network


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 1, 4, 4, dtype=torch.float64)


@pytest.fixture
def posterior(x: Tensor) -> ds.DeepEnsemble:
    torch.manual_seed(0)
    made = ds.DeepEnsemble([network() for _ in range(3)])
    made.predict(x)
    assert made.particles.how == "loop"
    return made


def by_hand(posterior: ds.Posterior, x: Tensor) -> Tensor:
    members = [posterior.member(i).eval() for i in range(3)]
    with torch.no_grad():
        return torch.stack([member(x).log_softmax(1) for member in members])


def in_place(posterior: ds.DeepEnsemble) -> None:
    with torch.no_grad():
        for tensor in posterior.parameters():
            tensor.mul_(1.5)


def other_memory(posterior: ds.DeepEnsemble) -> None:
    vector_to_parameters(2 * parameters_to_vector(posterior.parameters()), posterior.parameters())


def transposed(posterior: ds.DeepEnsemble) -> None:
    weight = posterior.particles.own_parameters()["network.0.weight"]
    weight.data = weight.data.mT  # the same memory


def loaded(posterior: ds.DeepEnsemble) -> None:
    posterior.load_state_dict(ds.DeepEnsemble([network() for _ in range(3)]).state_dict())


def assigned(posterior: ds.DeepEnsemble) -> None:
    posterior.load_state_dict(ds.DeepEnsemble([network() for _ in range(3)]).state_dict(), assign=True)


def trained(posterior: ds.DeepEnsemble) -> None:
    x, y = torch.randn(8, 1, 4, 4, dtype=torch.float64), torch.randint(3, (8,))
    optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1)
    posterior.train().backward(x, y)
    optimizer.step()


@pytest.mark.parametrize("change", [in_place, other_memory, transposed, loaded, assigned, trained])
def test_a_change_of_the_stacks_shows_in_the_next_prediction(posterior, x, change):
    before = posterior.predict(x).log_probs
    change(posterior)
    after = posterior.predict(x).log_probs
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, by_hand(posterior, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda posterior: pickle.loads(pickle.dumps(posterior))])
def test_copies_have_rows_of_their_own(posterior, x, copied):
    before, other = posterior.predict(x).log_probs, copied(posterior)
    in_place(other)
    torch.testing.assert_close(other.predict(x).log_probs, by_hand(other, x), rtol=0, atol=1e-12)
    assert torch.equal(posterior.predict(x).log_probs, before)


def test_other_kinds_of_runs_leave_predictions_as_they_are(posterior, x):
    expected = posterior.predict(x).log_probs
    posterior.eval()
    outputs = posterior(x)  # with gradients
    assert outputs.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(posterior.predict(x).log_probs, expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        _, slope = torch.func.jvp(posterior, (x,), (torch.ones_like(x),))
    assert slope.abs().max() > 0
    assert torch.equal(posterior.predict(x).log_probs, expected)


def counting() -> nn.Module:
    """Assigns a buffer in its forward, and refuses negative inputs."""

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        if x.min() < -10:
            raise RuntimeError("too small")
        return self.layers(x) * self.count

    return tiny.Network(forward, layers=network(), count=torch.zeros((), dtype=torch.float64))


def test_what_a_forward_assigns_reaches_neither_the_next_member_nor_the_next_prediction(x):
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([counting() for _ in range(3)])
    template = posterior.particles.template.network
    empty = [*template._buffers.values(), *template.layers[0]._parameters.values()]
    first = posterior.predict(x).log_probs
    for _ in range(2):
        assert torch.equal(posterior.predict(x).log_probs, first)
    refuses(lambda: posterior.predict(x - 100), "too small", RuntimeError)
    now = [*template._buffers.values(), *template.layers[0]._parameters.values()]
    assert all(mine is other for mine, other in zip(now, empty, strict=True))
    torch.testing.assert_close(first, by_hand(posterior, x), rtol=0, atol=1e-12)


def test_tied_and_shared_tensors_stand_in_all_their_places(x):
    def tied() -> nn.Module:
        layers = {name: nn.Conv2d(1, 1, 3, padding=1).double() for name in ("convolution", "again")}
        layers["again"].weight = layers["convolution"].weight
        layers["frozen"] = nn.Linear(16, 3).double().requires_grad_(False)
        return tiny.Network(lambda self, x: self.frozen(self.again(self.convolution(x).relu()).flatten(1)), **layers)

    torch.manual_seed(0)
    networks = [tied() for _ in range(3)]
    for each in networks:
        each.frozen.load_state_dict(networks[0].frozen.state_dict())
    posterior = ds.DeepEnsemble(networks)
    assert posterior.particles.stored_once
    for _ in range(3):
        torch.testing.assert_close(posterior.predict(x).log_probs, by_hand(posterior, x), rtol=0, atol=1e-12)
    with torch.no_grad():
        posterior.particles.shared_parameters()["network.frozen.weight"].mul_(2)
    torch.testing.assert_close(posterior.predict(x).log_probs, by_hand(posterior, x), rtol=0, atol=1e-12)


def test_a_submodule_added_between_predictions_is_in_eval_mode_and_put_back() -> None:
    """The parts of a network are remembered from one prediction to the next, but not where there are others since."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x

    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2))).eval()
    posterior, x = ds.MAP(network).eval(), torch.randn(5, 3)
    before = posterior.predict(x).mean
    added = nn.Dropout(0.9).train(), tiny.Network(forward, calls=torch.zeros(())).train()
    network[2].extend(added)
    assert torch.equal(posterior.predict(x).mean, before)
    assert all(each.training for each in added)
    assert added[1].calls == 0
    network[2][1] = later = nn.Dropout(0.9).train()  # as many as before, and another one
    assert torch.equal(posterior.predict(x).mean, before)
    assert later.training


def test_a_posterior_that_has_predicted_is_deleted_at_once() -> None:
    posterior = ds.MAP(nn.Sequential(nn.Linear(3, 2)))
    posterior.predict(torch.randn(1, 3))
    seen = weakref.ref(posterior.particles)
    gc.disable()
    try:
        del posterior
        assert seen() is None
    finally:
        gc.enable()


class Strict(nn.Module):
    """Its mode is more than an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.modes = nn.Linear(3, 2), []

    def train(self, mode: bool = True) -> "Strict":
        self.modes.append(mode)
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def watched_by_its_object() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.train = lambda mode=True: setattr(layer, "called", True) or nn.Linear.train(layer, mode)
    return layer


def test_networks_that_do_something_when_modes_change_are_asked_to_change_them() -> None:
    strict, layer = Strict(), watched_by_its_object()
    for network in (strict, layer):
        posterior = ds.MAP(network).train()
        strict.modes.clear()
        layer.called = False
        posterior.predict(torch.randn(4, 3))
        assert network.training
        assert posterior.training
        assert {*strict.modes} == ({False} if network is strict else set())
        assert layer.called == (network is layer)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.mark.parametrize("make", [
    lambda: ds.MAP(normed()), lambda: ds.DeepEnsemble([normed(), normed()]), lambda: ds.MCDropout(normed()),
    lambda: ds.NodeBNN(normed(), data_size=10), lambda: ds.SWAG(normed()),
])  # fmt: skip
def test_modes_inside_are_those_of_eval_and_afterwards_those_of_before(make) -> None:
    posterior = make().train()
    posterior.particles.templates[0].network[1].training = False
    parts = [*posterior.modules(), *posterior.particles.templates[0].modules()]
    before = [part.training for part in parts]
    with inference_context(posterior):
        inside = [part.training for part in parts]
    assert [part.training for part in parts] == before
    posterior.eval()
    assert inside == [part.training for part in parts]


def assign_data(posterior: ds.Posterior) -> None:
    for tensor in posterior.parameters():
        tensor.data = tensor.data * 0.5


def assign_state(posterior: ds.Posterior) -> None:
    state = {name: 2 * each if each.is_floating_point() else each for name, each in posterior.state_dict().items()}
    posterior.load_state_dict(state | {"temperature": torch.ones(())}, assign=True)


def replace_layer(posterior: ds.Posterior) -> None:
    for template in posterior.particles.templates:
        template.network[3] = nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Dropout(0.9).train())


def hook_layer(posterior: ds.Posterior) -> None:
    for template in posterior.particles.templates:
        template.network[1].register_forward_hook(lambda _, __, out: out + 1)


CHANGES = {
    "weights in place": in_place,
    "weights assigned": assign_data,
    "state assigned": assign_state,
    "a layer replaced": replace_layer,
    "a hook": hook_layer,
    "training mode": lambda posterior: posterior.train(),
    "another precision": lambda posterior: posterior.float(),
    "a temperature": lambda posterior: posterior.recalibrate(2.0, None),
    "another setting of members": lambda posterior: setattr(posterior.particles, "how", "vectorised"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [ds.MAP, lambda net: ds.DeepEnsemble([net, network()])], ids=["MAP", "DeepEnsemble"])
def test_what_changes_between_two_predictions_counts_in_the_second(make, change) -> None:
    """Modules, rows and kinds of inputs are remembered; a copy, which remembers nothing, predicts the same."""
    torch.manual_seed(0)
    posterior, x = make(network()).eval(), torch.randn(1, 1, 4, 4, dtype=torch.float64)
    before = posterior.predict(x).log_probs
    CHANGES[change](posterior)
    dtype = next(posterior.parameters()).dtype
    forgetful, modes = copy.deepcopy(posterior), [part.training for part in posterior.modules()]
    found = posterior.predict(x.to(dtype)).log_probs
    torch.testing.assert_close(found, forgetful.predict(x.to(dtype)).log_probs, rtol=0, atol=1e-12)
    same = change in ("training mode", "another precision", "another setting of members")
    assert torch.allclose(found.double(), before, atol=1e-5) == same
    assert [part.training for part in posterior.modules()] == modes


@pytest.mark.parametrize(
    "context",
    [torch.inference_mode, torch.enable_grad, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["inference_mode", "enable_grad", "no_grad", "autocast"],
)
def test_a_prediction_in_another_context_leaves_the_next_ones_as_they_were(context) -> None:
    posterior = ds.DeepEnsemble([network(), network()]).float().eval()
    x = torch.randn(2, 1, 4, 4)
    with context():
        inside = posterior.predict(x).log_probs
    outside = posterior.predict(x).log_probs
    torch.testing.assert_close(inside, outside, rtol=0, atol=5e-2 if "lambda" in context.__name__ else 1e-6)
    assert not outside.is_inference()
    posterior(x).sum().backward()  # and rows of predictions take no part in gradients
    assert all(each.grad is not None for each in posterior.parameters())

"""The tree of tensors knows its names, which are kept between calls; how tensors lie in memory is kept too."""

import copy
import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune

import dissensus as ds
import tiny
from dissensus.utils import memory_layout
from dissensus.utils.tensor_tree import TensorPlaces, TensorTree, call_with_tensors, named_tensors
from dissensus.utils.torch_private import named_submodules
from refusals import refuses


def tree():
    planted = TensorTree()
    planted.add_tensor("a.weight", nn.Parameter(torch.ones(2, 3)))
    planted.add_tensor("a.count", torch.zeros(2))
    return planted


def are_those_of(module):
    parameters, buffers = named_tensors(module)
    assert [(n, id(t)) for n, t in parameters.items()] == [(n, id(t)) for n, t in module.named_parameters()]
    assert [(n, id(t)) for n, t in buffers.items()] == [(n, id(t)) for n, t in module.named_buffers()]
    return True


def test_names_follow_whatever_replaces_tensors():
    planted = tree()
    assert are_those_of(planted)
    planted.add_tensor("b.bias", nn.Parameter(torch.ones(2)))
    assert are_those_of(planted)
    planted.to(torch.float64)
    assert are_those_of(planted)
    assert named_tensors(planted)[1]["a.count"].dtype == torch.float64
    planted.load_state_dict({name: t.clone() for name, t in planted.state_dict().items()}, assign=True)
    assert are_those_of(planted)
    assert are_those_of(copy.deepcopy(planted))


def test_a_posterior_whose_state_is_assigned_trains_what_it_was_given():
    posterior, other, (x, y) = tiny.ensemble(tiny.mlp), tiny.ensemble(tiny.mlp), tiny.points()
    posterior.backward(x, y)  # names are known
    posterior.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(posterior.eval().predict(x).member_means, other.eval().predict(x).member_means)
    posterior.zero_grad()
    posterior.backward(x, y)
    assert all(parameter.grad is not None for parameter in posterior.parameters())
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)


def with_two_names() -> nn.Module:
    """A layer under two names, a tied weight, a buffer that forward assigns anew, and one that it changes in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        self.count.add_(1)
        return self.last(self.again(x)) + self.seen

    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return tiny.Network(forward, first=first, again=first, last=last, seen=torch.zeros(()), count=torch.zeros(()))


def test_a_call_with_other_tensors_is_torchs_functional_call_and_puts_back_what_was_there():
    network, x = with_two_names().double(), torch.randn(3, 4, dtype=torch.float64)
    expected = [f"{name}." if name else "" for name, _ in network.named_modules()]
    assert [name for name, _ in named_submodules(network)] == expected
    assert are_those_of(network)
    before = {name: (id(t), t.clone()) for name, t in network.state_dict(keep_vars=True).items()}
    mine, others = ({n: torch.randn_like(t) for n, t in tensors.items()} for tensors in named_tensors(network))
    given = {**mine, **others}
    copied = {name: t.clone() for name, t in given.items()}
    tied = {"last.weight": copied["first.weight"]}
    expected = functional_call(copy.deepcopy(network), {**copied, **tied}, (x,), tie_weights=False)
    for places in (None, TensorPlaces(network)):
        again = {name: t.clone() for name, t in given.items()}
        torch.testing.assert_close(call_with_tensors(network, again, x, places=places), expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError):
        call_with_tensors(network, given, torch.zeros(3, 5, dtype=torch.float64))
    after = network.state_dict(keep_vars=True)
    assert {name: id(t) for name, t in after.items()} == {name: known for name, (known, _) in before.items()}
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())


def test_a_network_that_assigns_its_buffers_predicts_the_same_every_time_and_keeps_them():
    torch.manual_seed(0)
    network, x = with_two_names(), torch.randn(3, 4)
    seen, posterior = network.seen, ds.MAP(network)
    first, second = (posterior.predict(x).member_means for _ in range(2))
    assert torch.equal(first, second)
    assert network.seen is seen
    assert float(seen) == 0
    torch.testing.assert_close(first[0], network(x).softmax(1))
    assert float(network.seen) == 1


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


POSTERIORS = {
    "MAP of one": lambda: ds.MAP(network()),
    "MAP of a list": lambda: ds.MAP([network() for _ in range(2)]),
    "DeepEnsemble": lambda: ds.DeepEnsemble([network() for _ in range(3)]),
    "FoRDE": lambda: ds.FoRDE([network() for _ in range(3)]),
    "BatchEnsemble": lambda: ds.BatchEnsemble(network(), members=3, modulation=ds.Modulation.sign()),
}


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 4, dtype=torch.float64)


def outputs(posterior: ds.Posterior, x: Tensor) -> Tensor:
    return torch.stack([posterior.member(i).eval()(x) for i in range(posterior.particles.members)])


@pytest.mark.parametrize("how", ["vectorised", "loop"])
@pytest.mark.parametrize("kind", POSTERIORS)
def test_functional_call_runs_with_the_given_tensors(kind: str, how: str, x: Tensor) -> None:
    posterior = POSTERIORS[kind]().eval()
    posterior.particles.how = how
    before = posterior(x)
    zeros = {name: torch.zeros_like(each) for name, each in posterior.named_parameters()}
    assert torch.equal(functional_call(posterior, zeros, (x,)), torch.zeros_like(before))
    with torch.no_grad():  # members in a loop keep their rows between calls
        for _ in range(2):
            assert torch.equal(functional_call(posterior, zeros, (x,)), torch.zeros_like(before))
            torch.testing.assert_close(posterior(x), before, rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", POSTERIORS)
def test_transforms_differentiate_by_the_given_tensors(kind: str, x: Tensor) -> None:
    posterior = POSTERIORS[kind]().eval()
    given = {name: each.detach().clone() for name, each in posterior.named_parameters()}
    found = torch.func.grad(lambda tensors: functional_call(posterior, tensors, (x,)).square().sum())(given)
    posterior(x).square().sum().backward()
    for name, parameter in posterior.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-12)
        assert found[name].any()


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("how", ["vectorised", "loop"])
def test_pruned_and_parametrised_members_predict_with_what_is_computed(how: str, x: Tensor) -> None:
    posterior = ds.DeepEnsemble([network() for _ in range(3)]).eval()
    posterior.particles.how = how
    with torch.no_grad():
        posterior(x)
        expected = [posterior.member(i) for i in range(3)]
        for member in expected:
            member[0].weight.zero_()
            member[2].weight.mul_(2)
    first, last = (posterior.particles.own.network.get_submodule(name) for name in ("0", "2"))
    prune.l1_unstructured(first, "weight", amount=1.0)
    parametrize.register_parametrization(last, "weight", Doubled())
    by_hand = torch.stack([member(x) for member in expected])
    for _ in range(2):
        torch.testing.assert_close(posterior(x), by_hand, rtol=0, atol=1e-12)
        torch.testing.assert_close(posterior.predict(x).mean, by_hand.softmax(2).mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(outputs(posterior, x), by_hand, rtol=0, atol=1e-12)
    posterior(x).sum().backward()
    assert last.parametrizations.weight.original.grad.any()
    refuses(lambda: posterior.backward(x, torch.zeros(6, dtype=torch.int64)), "pruned or parametrised in the stack")
    prune.remove(first, "weight")
    parametrize.remove_parametrizations(last, "weight")
    torch.testing.assert_close(posterior(x), by_hand, rtol=0, atol=1e-12)
    posterior.backward(x, torch.zeros(6, dtype=torch.int64))


def test_names_follow_the_tree() -> None:
    tree = TensorTree()
    for name in ("a.weight", "b.c.weight", "b.bias"):
        tree.add_tensor(name, nn.Parameter(torch.randn(2)))
    tree.add_tensor("b.mean", torch.zeros(2))

    def named() -> bool:
        found = tree.parameters_and_buffers()
        expected = dict(tree.named_parameters()), dict(tree.named_buffers())
        return all(list(a) == list(b) and all(a[k] is b[k] for k in a) for a, b in zip(found, expected, strict=True))

    assert named()
    other = nn.Parameter(torch.ones(2))
    tree.b.c.weight = other
    assert named()
    assert tree.parameters_and_buffers()[0]["b.c.weight"] is other
    del tree.b.bias
    assert named()
    tree.b.register_buffer("bias", torch.ones(2))
    assert named()
    tree.a, tree.b = tree.b, tree.a
    assert named()
    tree.to(torch.float64)
    assert named()
    tree.load_state_dict({name: torch.zeros(2) for name in tree.state_dict()}, assign=True)
    assert named()


FLAT = torch.arange(240, dtype=torch.float64)
LYING = {
    "in rows": FLAT.view(2, 4, 5, 6),
    "channels last": FLAT.view(2, 4, 5, 6).to(memory_format=torch.channels_last),
    "transposed": FLAT.view(20, 12).T,
    "a view of a longer one": FLAT[7:13],
    "with holes": FLAT.view(20, 12)[:, ::3],
    "one row of many": FLAT.view(20, 12)[:1, :5],
    "a number": FLAT[3],
    "nothing": FLAT[:0].view(0, 3),
}


@pytest.mark.parametrize("name", LYING)
def test_a_copy_lies_as_the_tensor_does_in_memory_of_its_own(name):
    tensor = LYING[name]
    copy = memory_layout.copy_with_strides(tensor.contiguous(), memory_layout.strides_for_copy(tensor))
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert not tensor.numel() or copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("tensor", [FLAT[:3].expand(4, 3), FLAT.view(20, 12)[::9, ::9]], ids=["overlaps", "far apart"])
def test_what_overlaps_or_lies_far_apart_has_a_dense_twin(tensor):
    strides = memory_layout.strides_for_copy(tensor)
    assert strides == tensor.clone().stride()
    assert torch.equal(memory_layout.copy_with_strides(tensor, strides), tensor)


@pytest.mark.parametrize("name", LYING)
def test_owned_memory_is_contiguous_and_nobody_elses(name):
    tensor = memory_layout.with_own_memory(LYING[name])
    assert torch.equal(tensor, LYING[name])
    assert tensor.stride() == memory_layout.contiguous_strides(tensor.shape)
    assert tensor.untyped_storage().nbytes() == 8 * tensor.numel()


def test_what_has_memory_of_its_own_is_not_copied():
    tensor = torch.zeros(3, 4)
    assert memory_layout.with_own_memory(tensor) is tensor


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4, 3), (0, 1)), ((4, 3), (1, 1)), ((4, 3), (2, 1)), ((2,), (10**9,)), ((2, 2), (10**15, 1))],
)
def test_strides_that_overlap_or_take_far_too_much_memory_do_not_fit(shape, strides):
    assert not memory_layout.is_valid_layout(shape, strides)


def test_nodes_that_come_or_go_are_seen_and_a_tree_is_deleted_at_once():
    tree = TensorTree()
    tree.add_tensor("a.weight", nn.Parameter(torch.ones(2)))
    assert list(tree.parameters_and_buffers()[0]) == ["a.weight"]
    tree.add_tensor("a.b.bias", torch.zeros(2))
    tree = copy.deepcopy(tree)
    prune.identity(tree.a, "weight")
    parameters, buffers = tree.parameters_and_buffers()
    assert (list(parameters), list(buffers)) == (["a.weight_orig", "a.weight"], ["a.weight_mask", "a.b.bias"])
    del tree.a.b
    assert list(tree.parameters_and_buffers()[1]) == ["a.weight_mask"]
    gone = weakref.ref(tree)
    gc.disable()
    try:
        del tree
        assert gone() is None
    finally:
        gc.enable()


def renamed(network):
    norm = network.norm
    del network.norm
    network.other = norm


def given_another_registry(network):
    network._modules = OrderedDict(linear=network.linear, norm=nn.BatchNorm1d(6))


@pytest.mark.parametrize("change", [renamed, given_another_registry])
@pytest.mark.parametrize("look", [lambda posterior: None, lambda posterior: posterior.predict(torch.randn(5, 4))])
def test_submodules_that_are_kept_are_those_that_there_are_now(change, look):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

        def forward(self, x):
            return list(self.children())[1](self.linear(x))

    network = Net()
    posterior = ds.MAP(network)
    look(posterior)
    change(network)
    assert {name for name, _ in posterior.named_parameters()} <= posterior.state_dict().keys()
    before = list(network.children())[1].running_mean.clone()
    ds.fit(posterior, [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))], epochs=1, progress=False)
    assert not torch.equal(list(network.children())[1].running_mean, before)

"""Whatever happens to a posterior's tensors shows in its next prediction: names are kept between calls, tensors are not."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune

import dissensus as ds
from dissensus.utils.tensor_tree import TensorTree


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
    with pytest.raises(ValueError, match="pruned or parametrised in the stack"):
        posterior.backward(x, torch.zeros(6, dtype=torch.int64))
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

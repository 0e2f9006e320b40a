"""Weights that a network uses past their layers, where its forward cannot be followed without inputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
from dissensus.surgery.conversion import Cut


class Unfollowed(nn.Module):
    """A network whose forward asks for a size; `past`: what it does beside calling its layers."""

    def __init__(self, past):
        super().__init__()
        self.first, self.middle, self.head, self.past = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3), past
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        if x.shape[0] > 1000:
            raise ValueError("too many")
        return self.head(self.norm(self.past(self, torch.tanh(self.middle(torch.tanh(self.first(x)))))))


def transposed(network, hidden):
    return F.linear(hidden, network.middle.weight.t())


def shifted(network, hidden):
    return hidden + network.middle.bias


def alike(network, hidden):
    return hidden.to(network.middle.weight.dtype)


POSTERIORS = {
    "node": lambda network: ds.NodeBNN(network, data_size=9, batch_norm="frozen", samples=4),
    "batch": lambda network: ds.BatchEnsemble(network, members=4, modulation=ds.Modulation.normal(1, 0.5)),
    "dropout": lambda network: ds.DropoutEnsemble(network, members=4, keep=0.5),
}


@pytest.mark.parametrize("past", [transposed, shifted])
@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("trains", [False, True])
def test_members_compute_what_the_drawn_functions_do(kind, past, trains):
    torch.manual_seed(0)
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    posterior = POSTERIORS[kind](Unfollowed(past)).double().eval()
    posterior.backward(x, y) if trains else posterior.predict(x)
    functions = posterior.draw()
    for i, outputs in enumerate(functions(x)):
        torch.testing.assert_close(outputs, functions.member(i)(x))


def test_a_weight_that_is_asked_for_its_dtype_alone_is_folded():
    x = torch.randn(5, 4)
    posterior = POSTERIORS["node"](Unfollowed(alike)).eval()
    kinds = {name: type(part) for name, part in posterior.particles.template.network.named_modules()}
    posterior.predict(x)
    network = posterior.particles.template.network
    assert {name: type(part) for name, part in network.named_modules()} == kinds
    assert {part.read_past for part in network.modules() if isinstance(part, Cut)} == {False}
    assert not any(isinstance(part, Cut) for part in posterior.collapse(0).modules())

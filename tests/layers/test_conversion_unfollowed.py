"""Weights that a network uses past their layers, where its forward cannot be followed without inputs."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
from thinning import thinned


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


def above(network, hidden):
    return hidden * (hidden > network.middle.bias)  # no NaN comes out of a comparison


def listed(network, hidden):
    return hidden * dict(network.named_parameters())["middle.weight"].norm()


def alike(network, hidden):
    return hidden.to(network.middle.weight.dtype)


POSTERIORS = {
    "node": lambda network: ds.NodeBNN(network, data_size=9, batch_norm="frozen", samples=4),
    "batch": lambda network: ds.BatchEnsemble(network, members=4, modulation=ds.Modulation.normal(1, 0.5)),
    "dropout": lambda network: ds.DropoutEnsemble(network, members=4, rate=0.5),
}


@pytest.mark.parametrize(
    ("kind", "past", "trains"),
    thinned(list(POSTERIORS), [transposed, shifted, above, listed], [False, True], every=2),
)
def test_members_compute_what_the_drawn_functions_do(kind, past, trains):
    torch.manual_seed(0)
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    posterior = POSTERIORS[kind](Unfollowed(past)).double().eval()
    posterior.backward(x, y) if trains else posterior.predict(x)
    functions = posterior.draw()
    for i, outputs in enumerate(functions(x)):
        torch.testing.assert_close(outputs, functions.member(i)(x))


@pytest.mark.parametrize(
    ("kind", "past", "loaded"), thinned(list(POSTERIORS), [transposed, shifted, above, alike], [False, True], every=2)
)
def test_members_are_right_before_the_first_batch(kind, past, loaded, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.float64)
    posterior = POSTERIORS[kind](Unfollowed(past)).double().eval()
    if loaded:
        ds.refresh(posterior, [(x, torch.arange(5) % 3)])
        ds.save(posterior, tmp_path / "saved")
        posterior = ds.load(tmp_path / "saved", network=Unfollowed(past)).eval()
    functions = posterior.draw()
    members = [functions.member(i) for i in range(functions.members)]
    for outputs, member in zip(functions(x), members, strict=True):
        torch.testing.assert_close(member(x), outputs)


def test_networks_are_collapsed_right_before_the_first_batch():
    torch.manual_seed(0)
    x, network = torch.randn(5, 4, dtype=torch.float64), Unfollowed(transposed).double()
    posterior = ds.NodeBNN(network, data_size=9, components=1, init_spread=0.5, samples=1).double().eval()
    collapsed = posterior.collapse(0)
    s = dict(zip(("first", "middle", "head"), posterior.mean[0].detach().split([4, 4, 3]), strict=True))
    hidden = torch.tanh(network.middle(torch.tanh(network.first(x) * s["first"])) * s["middle"])
    by_hand = network.head(network.norm.eval()(hidden @ network.middle.weight)) * s["head"]
    torch.testing.assert_close(collapsed(x), by_hand)


def test_a_member_with_weights_apart_is_a_module_like_any_other():
    torch.manual_seed(0)
    x, network = torch.randn(5, 4), Unfollowed(transposed)
    network.middle.register_forward_hook(lambda _, args, outputs: 2 * outputs)
    member = POSTERIORS["node"](network).eval().member(0)
    outputs = member(x)
    for copied in (copy.deepcopy(member), pickle.loads(pickle.dumps(POSTERIORS["node"](Unfollowed(alike)).member(0)))):
        assert isinstance(copied.middle, nn.Linear)
        assert copied.double()(x.double()).dtype == torch.float64
    assert torch.equal(copy.deepcopy(member)(x), outputs)
    with pytest.raises(RuntimeError, match=r"middle.own.weight"):  # no plain network holds both weights
        Unfollowed(transposed).load_state_dict(member.state_dict())
    member(x).sum().backward()
    assert float(member.middle.own.weight.grad.abs().sum()) > 0


def test_torchs_fast_path_does_not_read_past_weights_that_are_apart():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            assert x.shape[1] == 2
            return self.head(self.layer(x).mean(1))

    torch.manual_seed(0)
    posterior, x = POSTERIORS["batch"](Encoder()).eval(), torch.randn(5, 2, 4)
    member, outputs = posterior.member(1).eval(), posterior(x)[1]
    with torch.no_grad():
        torch.testing.assert_close(member(x), outputs)
        torch.testing.assert_close(posterior.member(1).eval()(x), outputs)

"""Sampled networks: fixed functions, stored draws that come and go with the state."""

import pickle

import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods import GaussianPerturbation


def test_functions_are_fixed_whatever_the_mode_of_the_network():
    posterior, (x, y) = GaussianPerturbation(tiny.mlp(dropout=0.5).double(), samples=3).train(), tiny.points()
    drawn = posterior.draw()
    before = tiny.state(posterior)
    outputs = drawn(x)
    assert torch.equal(drawn(x), outputs)  # dropout is off
    assert posterior.network[1].training
    assert tiny.largest_difference(before, tiny.state(posterior)) == 0  # batch norm has not moved
    posterior.backward(x, y)  # the network moves its statistics and keeps them to itself
    assert torch.equal(drawn(x), outputs)
    posterior.eval()
    assert torch.equal(drawn(x), outputs)


def test_a_state_brings_its_draw_along_and_one_without_takes_it_away():
    posterior, (x, y) = GaussianPerturbation(tiny.mlp().double(), samples=3), tiny.points()
    empty = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    ds.refresh(posterior, [(x, y)])
    full = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    assert full.keys() > empty.keys()
    outputs = posterior.predict(x).members
    posterior.load_state_dict(empty)
    assert posterior.stored is None
    posterior.load_state_dict(full)
    assert torch.equal(posterior.predict(x).members, outputs)


def test_a_stored_draw_is_no_parameter():
    posterior, (x, y) = GaussianPerturbation(tiny.mlp().double(), samples=3), tiny.points()
    names = [name for name, _ in posterior.named_parameters()]
    ds.refresh(posterior, [(x, y)])
    assert [name for name, _ in posterior.named_parameters()] == names


def test_a_stored_draw_follows_dtype_and_pickles():
    posterior, (x, y) = GaussianPerturbation(tiny.mlp().double(), samples=3), tiny.points()
    ds.refresh(posterior, [(x, y)])
    assert posterior.float()(x.float()).dtype == torch.float32
    copy = pickle.loads(pickle.dumps(posterior))
    assert torch.equal(copy.predict(x.float()).members, posterior.predict(x.float()).members)


def test_buffers_that_are_not_saved_stay_out_of_files(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("scale", torch.tensor(2.0), persistent=False)

        def forward(self, x):
            return self.scale * self.layer(x)

    posterior, x = GaussianPerturbation(Scaled(), samples=2), torch.randn(5, 4)
    ds.refresh(posterior, [])
    outputs = posterior.predict(x).members
    ds.save(posterior, tmp_path)
    assert not any("scale" in name for name in posterior.state_dict())
    assert torch.equal(ds.load(tmp_path, Scaled()).predict(x).members, outputs)

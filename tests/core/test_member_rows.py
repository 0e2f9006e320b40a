"""Members in a loop: whatever happens to the stacks shows in the next prediction."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dissensus as ds


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


class Counting(nn.Module):
    """Assigns a buffer in its forward, and refuses negative inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        if x.min() < -10:
            raise RuntimeError("too small")
        return self.layers(x) * self.count


def test_what_a_forward_assigns_reaches_neither_the_next_member_nor_the_next_prediction(x):
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([Counting() for _ in range(3)])
    template = posterior.particles.template.network
    empty = [*template._buffers.values(), *template.layers[0]._parameters.values()]
    first = posterior.predict(x).log_probs
    for _ in range(2):
        assert torch.equal(posterior.predict(x).log_probs, first)
    with pytest.raises(RuntimeError, match="too small"):
        posterior.predict(x - 100)
    now = [*template._buffers.values(), *template.layers[0]._parameters.values()]
    assert all(mine is other for mine, other in zip(now, empty, strict=True))
    torch.testing.assert_close(first, by_hand(posterior, x), rtol=0, atol=1e-12)


def test_tied_and_shared_tensors_stand_in_all_their_places(x):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(1, 1, 3, padding=1).double()
            self.again = nn.Conv2d(1, 1, 3, padding=1).double()
            self.again.weight = self.convolution.weight
            self.frozen = nn.Linear(16, 3).double().requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.again(self.convolution(x).relu()).flatten(1))

    torch.manual_seed(0)
    networks = [Tied() for _ in range(3)]
    for each in networks:
        each.frozen.load_state_dict(networks[0].frozen.state_dict())
    posterior = ds.DeepEnsemble(networks)
    assert posterior.particles.stored_once
    for _ in range(3):
        torch.testing.assert_close(posterior.predict(x).log_probs, by_hand(posterior, x), rtol=0, atol=1e-12)
    with torch.no_grad():
        posterior.particles.shared_parameters()["network.frozen.weight"].mul_(2)
    torch.testing.assert_close(posterior.predict(x).log_probs, by_hand(posterior, x), rtol=0, atol=1e-12)

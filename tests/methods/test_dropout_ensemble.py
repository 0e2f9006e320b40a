"""DropoutEnsemble: M fixed masks on hidden units, not trained, always a collective."""

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny


def test_members_are_the_network_with_fixed_units_dropped():
    network, (x, _) = tiny.mlp().double(), tiny.points()
    posterior = ds.DropoutEnsemble(network, members=3, rate=0.5).eval()
    assert list(posterior.modulations) == ["3.r"]  # neither inputs nor outputs are dropped
    masks = posterior.modulations["3.r"]
    assert set(masks.flatten().tolist()) <= {0.0, 2.0}
    hidden = network.eval()[:3](x)
    for m in range(3):
        expected = network[3](hidden * masks[m])
        torch.testing.assert_close(posterior(x)[m], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(posterior.member(m).eval()(x), expected, rtol=0, atol=1e-12)


def test_masks_stay_as_they_are_in_training_and_weights_move_by_the_mean_over_members():
    posterior, (x, y) = ds.DropoutEnsemble(tiny.mlp(), members=3, rate=0.5).double(), tiny.points()
    before = posterior.modulations["3.r"].clone()
    assert posterior.gamma == 1
    assert not any(isinstance(each, nn.Parameter) for each in posterior.modulations.values())
    weight = posterior.particles.shared_parameters()["network.3.weight"]
    alone = torch.zeros_like(weight)
    for m in range(3):
        member = posterior.member(m).train()
        nn.functional.cross_entropy(member(x), y).backward()
        alone += member[3].weight.grad * before[m] / 3  # the folded weight is W times the mask
    posterior.backward(x, y)
    torch.testing.assert_close(weight.grad, alone, rtol=0, atol=1e-12)
    ds.fit(posterior, [(x, y)], epochs=5, progress=False)
    assert torch.equal(posterior.modulations["3.r"], before)


def test_channels_are_dropped_whole_and_the_loop_agrees_with_vmap():
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    posterior = ds.DropoutEnsemble(network, members=3, rate=0.5).double().eval()
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    assert posterior.modulations["3.r"].shape == (3, 4)
    assert posterior.account.converted == {"3": "masks of 4 channels"}
    assert "inputs are not dropped" in posterior.account.left["0"]
    each = [
        posterior.particles.map_members(lambda member: member.network(x), how=how) for how in ("loop", "vectorised")
    ]
    torch.testing.assert_close(*each, rtol=0, atol=1e-12)
    assert "network.1.running_mean" in posterior.particles.own_buffers()
    assert not posterior.particles.own_parameters()  # all that is trained is shared
    assert posterior.particles.how == "loop"  # masks cost less on kernels than on activations


def test_the_mean_over_many_masks_is_about_the_network():
    """Inverted dropout keeps the size of activations: for a linear network the mean over masks is the network itself."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1)).double()
    posterior = ds.DropoutEnsemble(network, members=400, rate=0.2, likelihood=ds.Regression(1.0))
    x = torch.randn(5, 4, dtype=torch.float64)
    outputs = posterior(x)
    error = outputs.std(0) / 400**0.5
    assert bool(((outputs.mean(0) - network(x)).abs() < 4 * error).all())


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"rate": 1.0}, "rate above 0 and below 1"),
        ({"rate": "a"}, "rate as a number, got 'a'"),
        ({"members": 0}, "members of at least 1"),
        ({"regime": "loud"}, "regime of auto"),
        ({"network": nn.Linear(2, 2)}, "at least two linear or convolutional layers"),
        ({"network": nn.ReLU()}, "with a linear or convolutional layer"),
    ],
)
def test_bad_input_is_refused(keywords, words):
    with pytest.raises((ValueError, TypeError), match=words):
        ds.DropoutEnsemble(**({"network": tiny.mlp()} | keywords))


def test_a_number_as_regime_is_taken_as_it_is():
    assert ds.DropoutEnsemble(tiny.mlp(), members=3, regime="independent").gamma == 3
    assert ds.DropoutEnsemble(tiny.mlp(), members=3, regime=1.5).gamma == 1.5

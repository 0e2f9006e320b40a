"""MAP: the prior is weight decay, and on a linear-Gaussian model the answer is ridge regression."""

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_prior_is_sgd_with_weight_decay(momentum):
    """wd = 1/(N σ²) on weights and biases, none on norm layers."""
    size, std = 12, 0.4
    first, second = tiny.mlp().double(), tiny.mlp().double()
    second.load_state_dict(first.state_dict())
    prior = ds.MAP(first, weight_prior_std=std, data_size=size)
    decayed = ds.MAP(second)
    norms = {id(p) for p in second[1].parameters()}
    others = [p for p in second.parameters() if id(p) not in norms]
    groups = [
        {"params": others, "weight_decay": 1 / (size * std**2)},
        {"params": list(second[1].parameters()), "weight_decay": 0.0},
    ]
    one = torch.optim.SGD(prior.parameters(), lr=0.1, momentum=momentum)
    other = torch.optim.SGD(groups, lr=0.1, momentum=momentum)
    x, y = tiny.points(size)
    for _ in range(20):
        for posterior, optimizer in ((prior, one), (decayed, other)):
            posterior.zero_grad()
            posterior.backward(x, y)
            optimizer.step()
    assert tiny.largest_difference(tiny.state(first), tiny.state(second)) < 1e-10


def test_a_linear_gaussian_model_is_ridge_regression():
    """argmin Σ (y − Xw)²/(2s²) + ‖w‖²/(2σ²) = (XᵀX + (s²/σ²) I)⁻¹ Xᵀ y."""
    noise, std, size = 0.3, 0.5, 40
    x, _ = tiny.points(size)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]], dtype=torch.float64)
    y = y + noise * torch.randn(size, 1, dtype=torch.float64)
    network = nn.Linear(4, 1, bias=False).double()
    posterior = ds.MAP(network, likelihood=ds.Regression(noise=noise), weight_prior_std=std, data_size=size)
    optimizer = torch.optim.LBFGS(
        posterior.parameters(), max_iter=100, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = posterior.loss(x, y)
        loss.backward()
        return loss

    optimizer.step(closure)
    ridge = torch.linalg.solve(x.T @ x + (noise / std) ** 2 * torch.eye(4, dtype=torch.float64), x.T @ y)
    torch.testing.assert_close(network.weight.detach().T, ridge, rtol=0, atol=1e-8)
    torch.testing.assert_close(posterior.predict(x).mean, x @ ridge, rtol=0, atol=1e-8)


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def test_a_posterior_is_where_its_network_is(device):
    posterior = ds.MAP(tiny.mlp().to(device))
    assert posterior.device.type == posterior.steps.device.type == device


def test_map_is_the_network():
    network, (x, _) = tiny.mlp().double(), tiny.points()
    posterior = ds.MAP(network)
    assert torch.equal(posterior.eval()(x)[0], network(x))
    torch.testing.assert_close(posterior.predict(x).mean, network(x).softmax(1), rtol=0, atol=1e-12)
    assert {id(p) for p in posterior.parameters()} == {id(p) for p in network.parameters()}
    assert float(posterior.predict(x).epistemic.abs().max()) < 1e-12


def test_a_posterior_is_no_network():
    network = tiny.mlp()
    for wrong in (
        lambda: ds.MAP(ds.MAP(network)),
        lambda: ds.DeepEnsemble([ds.MAP(network), ds.MAP(tiny.mlp())]),
        lambda: ds.BatchEnsemble(ds.MAP(network), modulation=ds.Modulation.sign()),
        lambda: ds.NodeBNN(ds.MAP(network), data_size=9),
    ):
        with pytest.raises(TypeError, match="expected a network, got the posterior MAP; pass the network"):
            wrong()

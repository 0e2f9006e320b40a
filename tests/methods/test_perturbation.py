"""Gaussian perturbation: white noise of a size relative to each tensor."""

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods import GaussianPerturbation


def test_noise_is_relative_to_each_tensors_rms():
    module = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 3)).double()
    with torch.no_grad():
        module[1].weight.mul_(100)
        module[0].bias.zero_()
    posterior = GaussianPerturbation(module, noise=0.2, samples=50)
    drawn = tiny.sampled(posterior)
    for name in ("0.weight", "1.weight"):
        weight = module.get_parameter(name).detach()
        noise = (drawn[name] - weight) / (0.2 * weight.square().mean().sqrt())  # (S, ...), of variance 1
        n = noise.numel()
        assert float(noise.mean()) == pytest.approx(0.0, abs=4 / n**0.5)
        assert float(noise.var()) == pytest.approx(1.0, abs=4 * (2 / n) ** 0.5)
        # white: neither entries of a tensor nor samples go together
        assert float((noise[:, 0, 0] * noise[:, 0, 1]).mean()) == pytest.approx(0.0, abs=4 / 50**0.5)
        assert float((noise[0] * noise[1]).mean()) == pytest.approx(0.0, abs=4 / noise[0].numel() ** 0.5)
    assert float(drawn["0.bias"].abs().max()) == 0


def test_norm_layers_and_frozen_parameters_stay():
    module = tiny.mlp().double()
    module[3].requires_grad_(False)
    posterior = GaussianPerturbation(module, samples=2)
    assert sorted(tiny.sampled(posterior)) == ["0.bias", "0.weight"]
    member = posterior.member(1)
    assert torch.equal(member[1].weight, module[1].weight)
    assert torch.equal(member[3].weight, module[3].weight)
    assert not torch.equal(member[0].weight, module[0].weight)


def test_no_noise_is_the_network():
    module, (x, _) = tiny.mlp().double(), tiny.points()
    outputs = GaussianPerturbation(module, noise=0.0, samples=3).eval()(x)
    assert torch.equal(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[1], module.eval()(x), rtol=0, atol=1e-12)


def test_it_follows_the_network_until_a_draw_is_stored():
    module, (x, y) = tiny.mlp().double(), tiny.points()
    posterior = GaussianPerturbation(module, noise=0.0, samples=2).eval()
    with torch.no_grad():
        module[3].bias.add_(1.0)
    torch.testing.assert_close(posterior(x)[0], module(x), rtol=0, atol=1e-12)
    ds.refresh(posterior, [(x, y)])
    stored = posterior(x)
    with torch.no_grad():
        module[3].bias.add_(1.0)
        module[1].running_mean.add_(1.0)
        module[1].weight.mul_(2.0)
    assert torch.equal(posterior(x), stored)


def test_a_network_that_vmap_cannot_run_is_perturbed_all_the_same():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.norm, self.head = nn.LSTM(4, 5, batch_first=True), nn.BatchNorm1d(5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.norm(self.lstm(x)[0][:, -1]))

    posterior, x = GaussianPerturbation(Recurrent(), samples=3).eval(), torch.randn(6, 7, 4)
    ds.refresh(posterior, [(x, torch.zeros(6).long())])
    drawn = posterior.draw()
    outputs = drawn(x)
    for i in range(3):
        member = drawn.member(i)
        torch.testing.assert_close(member(x), outputs[i])
        hidden = member.lstm(x)[0][:, -1].detach()
        torch.testing.assert_close(member.norm.running_mean, hidden.mean(0))


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    posterior, x = GaussianPerturbation(Tied(), noise=0.5, samples=2).eval(), torch.randn(3, 4)
    drawn = posterior.draw()
    member = drawn.member(0)
    assert torch.equal(member.first.weight, member.second.weight)
    torch.testing.assert_close(member(x), drawn(x)[0])


@pytest.mark.parametrize(
    ("keywords", "message"), [({"noise": -0.1}, "noise of at least 0"), ({"samples": 0}, "samples of at least 1")]
)
def test_arguments_that_make_no_sense_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        GaussianPerturbation(tiny.mlp(), **keywords)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_in_half_precision_noise_has_the_size_it_has_in_full(dtype, size):
    """Squares of weights of 1e-4 are 0 in float16, and of 1e3 infinite."""
    module = nn.Linear(30, 40, bias=False)
    with torch.no_grad():
        module.weight.copy_(size * torch.randn(40, 30))
    module.to(dtype)
    posterior = GaussianPerturbation(module, noise=0.5, samples=10)
    drawn = tiny.sampled(posterior)["weight"]
    assert drawn.dtype == dtype
    weight = module.weight.detach().double()
    noise = (drawn.double() - weight) / (0.5 * weight.square().mean().sqrt())
    # 12,000 numbers; rounding of half precision adds less than 1 % to the variance
    assert float(noise.var()) == pytest.approx(1.0, abs=4 * (2 / noise.numel()) ** 0.5 + 0.01)

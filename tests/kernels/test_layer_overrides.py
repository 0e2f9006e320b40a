"""The one function mode of our kernels, and matrix products without oneDNN: the same numbers, everything put back."""

import platform

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dissensus as ds
from dissensus.core.batch import Batch
from dissensus.kernels import cpu_products
from dissensus.kernels.cpu_products import has_small_products
from dissensus.kernels.layer_overrides import LayerOverrides
from dissensus.utils.torch_private import without_onednn
from refusals import refuses


def test_the_innermost_is_asked_first_and_what_it_calls_goes_outwards_to_torch() -> None:
    calls = []

    def noted(name):
        def run(function, x: Tensor, *args, **kwargs) -> Tensor:
            calls.append((name, function))
            return function(x, *args, **kwargs) + 1

        return run

    x = torch.tensor([-1.0, 2.0])
    with LayerOverrides({F.relu: noted("outer")}), LayerOverrides({F.relu: noted("inner")}):
        assert F.relu(x).tolist() == [2.0, 4.0]
        assert torch.add(x, 1.0, alpha=2).tolist() == [1.0, 4.0]  # in neither table
    assert calls == [("inner", F.relu), ("outer", F.relu)]
    assert F.relu(x).tolist() == [0.0, 2.0]


DENSE = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)


def enabled() -> bool:
    return bool(torch._C._get_mkldnn_enabled())


@pytest.mark.usefixtures("arm")
def test_only_networks_of_small_linear_layers_do_without_it() -> None:
    assert has_small_products(DENSE)
    assert has_small_products(nn.TransformerEncoderLayer(8, 2))
    assert not has_small_products(nn.Linear(1024, 1024, device="meta"))
    assert not has_small_products(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 2)))
    assert not has_small_products(nn.LSTM(3, 4))
    assert not has_small_products(nn.ReLU())


def test_other_processors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert not has_small_products(DENSE)


def test_the_switch_is_put_back_even_after_an_error() -> None:
    before = enabled()
    inside = []

    def fails() -> None:
        with without_onednn():
            inside.append(enabled())
            raise ValueError("within")

    refuses(lambda: fails(), "within")
    assert inside == [False]
    assert enabled() == before


@pytest.mark.usefixtures("arm")
def test_training_and_prediction_run_without_it_and_leave_it_on() -> None:
    seen: list[bool] = []

    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(enabled())
            return super().forward(x)

    before = enabled()
    posterior = ds.DeepEnsemble([nn.Sequential(Looking(4, 3)) for _ in range(2)])
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    posterior.check_batch(Batch(x, y))
    seen.clear()
    posterior.backward(x, y)
    posterior.predict(x)
    assert seen
    assert not any(seen)
    assert enabled() == before


def test_results_are_the_same_to_rounding() -> None:
    torch.manual_seed(0)
    posterior, x, y = ds.DeepEnsemble([ds.nets.MLP(30, 4) for _ in range(3)]), torch.randn(9, 30), torch.arange(9) % 4
    found = []
    for wanted in (True, False):
        posterior.particles.runner.small_products = wanted
        posterior.zero_grad()
        losses = posterior.backward(x, y)
        found.append([losses, *(parameter.grad.clone() for parameter in posterior.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert cpu_products.SMALL == 2**19

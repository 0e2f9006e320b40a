"""Constants that a forward makes: kept in plain calls, handed out again, and refused if they change."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dissensus as ds
from dissensus.engine.cuda_graphs import Constants, NotConstant, failure_reason
from dissensus.engine.tracing import any_batch_size
from dissensus.kernels import multi_tensor


class Makes(nn.Module):
    """A network that makes tensors from the host's data in every common way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.table = torch.tensor([1.0, 2.0, 3.0])
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        factors = x.new_tensor([0.1, 0.2, 0.3])
        factors += 1  # a forward may change its own tensor
        factors = factors * torch.as_tensor(np.array([1.0, 2.0, 3.0]), device=x.device).to(x.dtype)
        return self.linear(x * factors + self.table.to(x.device) + torch.tensor(self.scale, device=x.device))[:, [1, 0]]


def watched(run, times: int = 2) -> Constants:
    constants = Constants("cpu")
    for _ in range(times):
        with constants.record_constants():
            run()
    return constants


@pytest.mark.parametrize("transform", ["none", "vmap", "grad of vmap"])
def test_kept_constants_give_what_was_computed_without_them(transform: str) -> None:
    network, x = Makes(), torch.randn(4, 3)
    weights = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in network.named_parameters()}

    def members(weights: dict[str, Tensor]) -> Tensor:
        one = lambda each: torch.func.functional_call(network, each, x)  # noqa: E731
        return torch.func.vmap(one)(weights)

    run = {
        "none": lambda: network(x),
        "vmap": lambda: members(weights),
        "grad of vmap": lambda: torch.func.grad(lambda w: members(w).square().sum())(weights)["linear.weight"],
    }[transform]
    expected, constants = run(), watched(run)
    assert constants.varying is None
    assert len(constants.entries) >= 5
    for _ in range(2):  # what the forward added to its copy is not in the next one
        with constants.reuse_constants():
            assert torch.equal(run(), expected)


def test_what_was_kept_is_handed_out_and_not_made_again() -> None:
    x = torch.zeros(1)
    run = lambda: x.new_tensor([1.0, 2.0])  # noqa: E731
    constants = watched(run)
    constants.entries[0].made.fill_(7.0)
    with constants.reuse_constants():
        assert run().tolist() == [7.0, 7.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda x, count: x.new_tensor([float(count)]),
        lambda x, count: torch.tensor(count, device=x.device),
        lambda x, count: torch.rand(3).to(x.device),
        lambda x, count: torch.as_tensor(np.random.default_rng(count).normal(size=2), device=x.device),
        lambda x, count: x[[count % 2]],
        lambda x, count: [x.new_tensor([1.0]) for _ in range(count)],
    ],
    ids=["counter", "scalar", "noise of torch", "noise of numpy", "index", "number"],
)
@pytest.mark.parametrize("times", [1, 2])
def test_what_changes_from_call_to_call_is_not_frozen(make, times: int) -> None:
    count = 0

    def run() -> None:
        nonlocal count
        count += 1
        make(torch.zeros(2), count)

    constants = watched(run, times)
    with pytest.raises(NotConstant, match="change from call to call"), constants.reuse_constants():
        run()


def test_the_line_that_makes_a_changing_tensor_is_named() -> None:
    values = iter(range(9))
    constants = watched(lambda: torch.zeros(1).new_tensor([next(values)]))
    assert "test_graph_constants.py" in constants.varying
    assert "new_tensor([next(values)])" in constants.varying
    with pytest.raises(NotConstant, match=r"new_tensor\(\[next\(values\)\]\)"), constants.reuse_constants():
        raise AssertionError("expected not to run")


def test_what_is_trained_or_on_the_device_already_is_left_alone() -> None:
    trained = torch.ones(2, requires_grad=True)
    constants = Constants("cuda")
    with constants.record_constants():
        assert trained.to(torch.float64).requires_grad
        torch.tensor([1.0])  # stays on the host
    assert [kept.made for kept in constants.entries] == [None]


def test_what_the_library_itself_makes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_tensor, "can_run_kernels", lambda device: True)
    constants = Constants("cpu")
    with constants.record_constants():
        assert multi_tensor.Chunks().find([torch.zeros(3)], on="cpu")
        likelihood = ds.Classification(class_weights=[1.0, 2.0])
        assert likelihood._weight_of_classes(torch.device("cpu"), torch.float32).tolist() == [1.0, 2.0]
    assert constants.entries == []


def test_what_a_forward_makes_is_seen_through_the_librarys_own_modes() -> None:
    network, x = Makes(), torch.randn(4, 3)
    expected, constants = network(x), Constants("cpu")
    for context in (constants.record_constants, constants.record_constants, constants.reuse_constants):
        with context(), any_batch_size():
            assert torch.equal(network(x), expected)
    assert len(constants.entries) >= 5


def test_the_reason_names_the_users_line_of_the_first_error() -> None:
    def forward() -> None:
        raise RuntimeError("no copies while capturing")

    def capture() -> None:
        try:
            forward()
        finally:
            torch.zeros(2).view(3)  # as leaving a capture that failed

    with pytest.raises(RuntimeError, match="shape") as caught:
        capture()
    assert 'raise RuntimeError("no copies while capturing")' in failure_reason(caught.value)

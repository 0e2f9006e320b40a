"""Ways to run members: one that fails is given up for the next, once."""

import sys
from typing import NamedTuple

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.core.member_runner import FallbackChain, Rows, loop, run_by_vmap


def ways(noted, **functions):
    return FallbackChain(lambda *given: noted.append(given), **functions)


def failing(message="no such kernel"):
    def fails(*_):
        torch.rand(3)
        raise RuntimeError(message)

    return fails


def test_the_first_way_that_works_is_taken_from_then_on_with_random_numbers_put_back():
    noted = []
    run = ways(
        noted, first=failing("one\nmore"), second=failing(), third=lambda x: (x, torch.rand(2)), fourth=failing()
    )
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    given, drawn = run(7)
    assert given == 7
    assert torch.equal(drawn, expected)
    assert run.name == "third"
    assert noted == [("first", "one", 7), ("second", "no such kernel", 7)]
    run(8)
    assert len(noted) == 2


def test_where_every_way_fails_the_last_ones_error_is_raised_and_none_is_given_up():
    noted = []
    run = ways(noted, first=failing("of vmap"), last=failing("the caller's own"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the caller's own"):
            run(7)
    assert run.name == "first"
    assert noted == []


def test_running_out_of_memory_is_no_reason_for_another_way():
    def out(*_):
        raise torch.OutOfMemoryError("full")

    noted = []
    run = ways(noted, first=out, last=lambda x: x)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        run(7)
    assert noted == []


def test_members_fall_back_to_the_loop_once_and_the_log_says_so(caplog):
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() + self.weight.sum() > -1e9 else x

    posterior = ds.DeepEnsemble([Branching(4, 3).double() for _ in range(2)])
    with caplog.at_level("INFO", logger="dissensus"):
        posterior.predict(torch.randn(5, 4).double())
        posterior.predict(torch.randn(5, 4).double())
    assert posterior.particles.how == "loop"
    assert sum("cannot be vectorised" in record.message for record in caplog.records) == 1


class Pair(NamedTuple):
    mean: torch.Tensor
    extra: list[torch.Tensor]


@pytest.mark.parametrize("gradients", [True, False])
def test_members_at_once_are_those_of_torchs_vmap_and_of_the_loop_whatever_tree_they_return(gradients):
    generator = torch.Generator().manual_seed(0)
    own = {"w": torch.randn(3, 4, 5, dtype=torch.float64, generator=generator).requires_grad_(gradients)}
    rows = Rows(own, {"b": torch.arange(6.0).reshape(3, 2)}, {})
    x = torch.randn(2, 5, dtype=torch.float64, generator=generator)

    def one(row):
        out = x @ row.own["w"].mT
        return out, {"b": row.buffers["b"] * 2, "none": ()}, Pair(out.sum(), [out.exp()])

    with torch.set_grad_enabled(gradients):
        found, expected, looped = run_by_vmap(one, rows, 3), torch.func.vmap(one)(rows), loop(one, rows, 3)
    assert isinstance(found[2], Pair)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(looped, expected, rtol=1e-14, atol=1e-14)
    if gradients:
        slopes = [torch.autograd.grad(each[0].square().sum(), own["w"])[0] for each in (found, looped)]
        torch.testing.assert_close(*slopes, rtol=1e-13, atol=1e-13)


def test_rows_of_a_large_batch_are_those_of_small_ones():
    posterior, (x, _) = tiny.ensemble(tiny.mlp), tiny.points()
    assert posterior.eval().particles.how == "vectorised"
    whole, few = (
        posterior.predict(x).member_means,
        torch.cat([posterior.predict(x[i : i + 3]).member_means for i in (0, 3, 6, 9)], 1),
    )
    torch.testing.assert_close(few, whole, rtol=1e-12, atol=1e-12)


def frames(function) -> int:
    """Calls of this library's own functions."""
    count = 0

    def seen(frame, event, _):
        nonlocal count
        count += event == "call" and "dissensus" in frame.f_code.co_filename

    function()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_prediction_of_one_input_takes_few_calls():
    """Times depend on the machine, calls do not: they are what such a prediction costs over its network."""
    x, networks = torch.randn(1, 4), [tiny.mlp() for _ in range(5)]
    few, several = ds.MAP(networks[0]).eval(), ds.DeepEnsemble(networks).eval()
    assert frames(lambda: few.predict(x)) <= 85
    assert frames(lambda: several.predict(x)) <= 145


def test_a_training_step_of_one_network_takes_few_calls():
    (x, y), posterior = tiny.points(), ds.MAP(tiny.mlp().double())
    counts = [
        frames(lambda n=n: ds.fit(posterior, [(x, y)] * n, epochs=1, progress=False, device="cpu")) for n in (10, 20)
    ]
    assert (counts[1] - counts[0]) / 10 <= 230

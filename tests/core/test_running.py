"""Ways to run members: one that fails is given up for the next, once."""

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.core.running import Ways


def ways(noted, **functions):
    return Ways(lambda *given: noted.append(given), **functions)


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

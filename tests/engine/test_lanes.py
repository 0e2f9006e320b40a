"""The capture of CUDA graphs, with a fake in place of torch's where there is no GPU."""

import contextlib
import warnings

import pytest
import torch

from dissensus.engine.lanes import capturing

EMPTY = (
    "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong device or stream."
)


@pytest.mark.parametrize("failing", [False, True])
def test_a_graph_that_stays_empty_is_no_warning_and_others_are(failing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    @contextlib.contextmanager
    def graph(made, *, pool, capture_error_mode):
        asked.append((made, pool, capture_error_mode))
        try:
            yield
        finally:
            warnings.warn(EMPTY, stacklevel=1)
            warnings.warn("something else", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    refused = pytest.raises(RuntimeError, match="cannot be captured") if failing else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught, refused:
        warnings.simplefilter("always")
        with capturing("graph", pool="pool"):
            if failing:
                raise RuntimeError("cannot be captured")
    assert [str(each.message) for each in caught] == ["something else"]
    assert asked == [("graph", "pool", "thread_local")]

"""CUDA graphs, with fakes in place of torch's where there is no GPU."""

import contextlib
import logging
import warnings

import pytest
import torch

from dissensus.engine.cuda_graphs import MOST_GRAPHS, CapturedCalls, Graph

EMPTY = (
    "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong device or stream."
)


class Recorded:
    """In place of a CUDA graph: counts its replays."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1

    def pool(self) -> object:
        return "pool"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list:
    """What `torch.cuda.graph` was asked for; it warns of an empty graph and of something else."""
    found = []

    @contextlib.contextmanager
    def graph(made, *, pool, capture_error_mode):
        found.append((type(made), pool, capture_error_mode))
        try:
            yield
        finally:
            warnings.warn(EMPTY, stacklevel=1)
            warnings.warn("something else", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def refusing() -> None:
    raise RuntimeError("cannot be captured\nand a second line")


@pytest.mark.parametrize("failing", [False, True])
def test_a_graph_that_stays_empty_is_no_warning_and_others_are(failing: bool, asked: list) -> None:
    refused = pytest.raises(RuntimeError, match="cannot be captured") if failing else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught, refused:
        warnings.simplefilter("always")
        Graph(refusing if failing else lambda: None, pool="pool")
    again = [(Recorded, None, "thread_local")] if failing else []  # so that random generators draw again
    assert [str(each.message) for each in caught] == ["something else"] * (1 + len(again))
    assert asked == [(Recorded, "pool", "thread_local"), *again]


@pytest.mark.filterwarnings("ignore:something else")
@pytest.mark.usefixtures("asked")
def test_a_replay_copies_what_is_given_into_the_memory_that_was_captured() -> None:
    held = torch.zeros(3)
    graph = Graph(lambda: held, [held])
    assert graph.replay([torch.arange(3.0)]) is held
    assert held.tolist() == [0.0, 1.0, 2.0]
    assert graph.graph.replays == 1
    with pytest.raises(ValueError, match="zip"):
        graph.replay([])


class Twice(CapturedCalls):
    log_name = "something"
    warm_up = 2


@pytest.mark.filterwarnings("ignore:something else")
def test_shapes_that_come_often_are_captured_up_to_a_few_in_one_pool(asked: list) -> None:
    captured = Twice()
    assert [captured.should_capture("a") for _ in range(4)] == [False, False, True, True]
    for key in range(MOST_GRAPHS):
        assert captured.capture(key, lambda: None, []) is captured.graphs[key]
    assert [pool for _, pool, _ in asked] == [None, "pool", "pool"]
    assert not any(captured.should_capture("b") for _ in range(5))


@pytest.mark.filterwarnings("ignore:something else")
@pytest.mark.usefixtures("asked")
def test_a_refused_capture_is_the_last_and_said_once_and_graphs_before_stay(caplog: pytest.LogCaptureFixture) -> None:
    captured = Twice()
    kept = captured.capture("a", lambda: None, [])
    with caplog.at_level(logging.INFO, logger="dissensus"):
        assert captured.capture("b", refusing, []) is None
        assert not captured.failed  # once more, after plain calls that keep constants
        assert [captured.should_capture("b") for _ in range(3)] == [False, False, True]
        assert captured.capture("b", refusing, []) is None
        captured.disable_capture("another reason")
    assert captured.failed
    assert captured.graphs == {"a": kept}
    assert not any(captured.should_capture("c") for _ in range(5))
    assert [record.message for record in caplog.records] == [
        "something is not captured in a CUDA graph: cannot be captured (test_cuda_graphs.py:51: "
        'raise RuntimeError("cannot be captured\\nand a second line"))'
    ]

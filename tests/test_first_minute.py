"""benchmarks/first_minute.py: loops by hand compute what the methods do, and rows say who is within which limit."""

import copy
import sys

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.numerics.rbf_kernels import input_gradient_force


@pytest.fixture
def first_minute(benchmarks):
    import first_minute

    return first_minute


def networks(count):
    return [ds.nets.MLP(4, 3, hidden=(8,)).double() for _ in range(count)]


def loader(count=24, batch=8):
    return ds.data.Batches(torch.randn(count, 4).double(), torch.randint(3, (count,)), batch_size=batch)


def train_by_hand(loop, data):
    loop.begin()
    for x, y in data:
        loop.step(x, y)
    loop.end(data)
    return loop


@pytest.mark.parametrize(("method", "members"), [("MAP", 1), ("DeepEnsemble", 3), ("FoRDE", 3)])
def test_the_loop_by_hand_trains_and_predicts_as_the_method_does(first_minute, method, members):
    given, data = networks(members), loader()
    how = {"device": "cpu", "half": False, "examples": 24, "steps": 3}
    loop = train_by_hand(first_minute.LOOPS[method](copy.deepcopy(given), **how), data)
    posterior = first_minute.METHODS[method](given, 24)
    ds.fit(posterior, data, epochs=1, progress=False, device="cpu")
    for m, network in enumerate(loop.networks):
        for ours, theirs in zip(posterior.member(m).parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    with torch.no_grad():
        theirs = torch.cat([loop.predict(x) for x, _ in data])
    torch.testing.assert_close(ds.predict(posterior, data).mean, theirs, rtol=0, atol=1e-7)


def test_the_repulsion_by_hand_has_the_force_of_the_library(first_minute):
    from loops_by_hand import log_densities

    gradients = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    log_densities(gradients).sum().backward()
    torch.testing.assert_close(gradients.grad, input_gradient_force(gradients.detach()), rtol=1e-6, atol=1e-9)


def test_swag_by_hand_has_the_moments_of_the_method(first_minute):
    given, data = networks(1), loader(8 * 100)
    how = {"device": "cpu", "half": False, "examples": 800, "steps": 100}
    loop = train_by_hand(first_minute.LOOPS["SWAG"](copy.deepcopy(given), **how), data)
    posterior = ds.SWAG(given[0])
    ds.fit(posterior, data, epochs=1, progress=False, device="cpu")
    recorder = posterior.recorder
    assert loop.taken == int(recorder.snapshots.taken) == 25
    torch.testing.assert_close(loop.mean, recorder.mean_vector[0], rtol=0, atol=1e-7)
    torch.testing.assert_close(loop.squares - loop.mean**2, recorder.variance()[0], rtol=0, atol=1e-9)
    held = recorder.deviations[:, 0]
    torch.testing.assert_close(
        torch.stack(loop.deviations).T @ torch.stack(loop.deviations), held.T @ held, rtol=0, atol=1e-9
    )
    assert len(loop.drawn) == posterior.samples


def test_the_node_network_by_hand_has_the_objective_of_the_method(first_minute):
    loop = first_minute.LOOPS["NodeBNN"](networks(1), device="cpu", half=False, examples=24, steps=3)
    posterior = ds.NodeBNN(networks(1), data_size=24)  # a list: latents are (M, K, D)
    loop.begin()
    loop.networks[0].double()
    with torch.no_grad():
        parts = [posterior._latent_parameters()[f"latents.{name}"][0].split([8, 3], 1) for name in ("mean", "raw_std")]
        for layer, mean, raw_std in zip(loop.layers, *parts, strict=True):
            layer.mean.copy_(mean), layer.raw_std.copy_(raw_std)
    torch.testing.assert_close(loop.kl(), posterior.kl()[0])
    assert (loop.components, loop.copies, loop.samples) == (
        posterior.components,
        posterior.train_samples,
        posterior.samples,
    )
    # and the latents have the deviations that both state
    data = loader()
    loop.begin()
    for x, y in data:
        loop.step(x, y)
    loop.end(data)
    torch.manual_seed(0)
    drawn = loop.layers[0].draw(torch.zeros(20_000, dtype=torch.int64))
    std = nn.functional.softplus(loop.layers[0].raw_std[0])
    torch.testing.assert_close(drawn.std(0), std, rtol=0.03, atol=0)  # six standard errors
    assert loop.predict(data.x).sum(1).allclose(torch.ones(24).double())


def test_a_process_of_its_own_answers_or_says_why_not(first_minute, tmp_path):
    import os

    found = first_minute.in_child(lambda: {"home": os.environ["TRITON_CACHE_DIR"], "id": os.getpid()}, tmp_path)
    assert found["home"].startswith(str(tmp_path))
    assert found["id"] != os.getpid()
    assert "TRITON_CACHE_DIR" not in os.environ or not os.environ["TRITON_CACHE_DIR"].startswith(str(tmp_path))
    assert first_minute.in_child(lambda: 1 / 0, tmp_path) == {"failed": "ZeroDivisionError: division by zero"}
    import time

    assert "no answer" in first_minute.in_child(lambda: time.sleep(30), tmp_path, seconds=0.1)["failed"]


def test_rows_of_a_case_have_every_call_and_are_measured_once(first_minute, tmp_path, monkeypatch, capsys):
    case = first_minute.Case("MAP", "tiny", "cpu", 8, most=5)
    monkeypatch.setattr(first_minute, "cases", lambda device: [case])
    path = tmp_path / "rows.csv"
    monkeypatch.setattr(sys, "argv", ["first_minute.py", "--lengths", "1,5,8", "--rounds", "1", "--csv", str(path)])
    threads = torch.get_num_threads()
    try:
        first_minute.main()
        rows = first_minute.read_rows(path)
        first_minute.main()
    finally:
        torch.set_num_threads(threads)
    assert first_minute.read_rows(path) == rows
    assert [row.get("note", "") for row in rows] == [""] * 18
    assert {(row["what"], row["state"], row["batches"]) for row in rows} == {
        (what, state, batches)
        for what in ("training", "prediction")
        for state in ("cold", "first", "second")
        for batches in ("1", "5", "8")
    }
    assert {row["by_hand"] for row in rows if row["batches"] == "8"} == {"from 5"}
    first_minute.write_rows(path, [row | ({"note": "failed"} if row["batches"] == "5" else {}) for row in rows])
    try:
        first_minute.main()  # what failed is measured again
    finally:
        torch.set_num_threads(threads)
    assert not any(row["note"] for row in first_minute.read_rows(path))
    assert all(float(row["ours_s"]) > 0 and float(row["by_hand_s"]) > 0 for row in rows)
    assert "rows are over their limits" in capsys.readouterr().out
    assert "6 of 6" in first_minute.page([{**row, "reached": "yes", "state": "first"} for row in rows[:6]] + rows)


def test_limits_are_those_of_the_call_and_the_device(first_minute):
    def reached(seconds, state, *, device="cuda", method="MAP", known=True):
        case = first_minute.Case(method, "MLP", device, 8, known=known)
        return first_minute.compared([seconds], [1.0], first_minute.limit_of(case, state))["reached"]

    assert [reached(seconds, "first") for seconds in (1.29, 1.31)] == ["yes", "no"]
    assert [reached(seconds, "second") for seconds in (1.04, 1.06)] == ["yes", "no"]
    assert [reached(seconds, "second", device="cpu") for seconds in (1.09, 1.11)] == ["yes", "no"]
    assert reached(1.09, "second", device="cpu", method="FoRDE") == "no"
    assert [reached(seconds, "second", known=False) for seconds in (1.9, 2.1)] == ["yes", "no"]
    assert reached(99.0, "cold") == "yes"
    of_rounds = first_minute.compared([1.0, 20.0, 3.0], [1.0, 10.0, 4.0], (1.05, 0.0))  # in turns
    assert (of_rounds["ratio"], of_rounds["excess_s"], of_rounds["ours_s"]) == (1.0, -0.05, 3.0)


def test_seconds_beyond_the_last_time_stamp_go_on_at_its_speed(first_minute):
    theirs = {10: [{"t": 2.0}], 50: [{"t": 6.0}]}
    assert first_minute.seconds_by_hand(theirs, "t", 50) == ([6.0], "measured")
    assert first_minute.seconds_by_hand(theirs, "t", 200) == ([pytest.approx(21.0)], "from 50")

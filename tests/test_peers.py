"""benchmarks/peers.py: its worker for this library computes what a plain loop does, and its table says who is faster."""

import json
import runpy
import sys
from importlib.metadata import version

import pytest
import torch

TINY = {"network": "tiny", "members": 3, "batch": 8, "rows": 24, "calls": 1, "device": "cpu"}


@pytest.mark.parametrize(
    "operation",
    ["ensemble", "ensemble predicts", "ensemble, one input", "single", "single, one input", "dropout predicts"],
)
def test_both_sides_are_asked_the_same(benchmarks, operation):
    import of_dissensus
    import of_torch
    import peers

    case = {**TINY, "operation": operation} | ({"members": 1} if operation.startswith("single") else {})
    case |= {"network": "tiny-dropout", "members": 40} if "dropout" in operation else {}
    found = {}
    for name, module in (("dissensus", of_dissensus), ("torch", of_torch)):
        run, check = module.OPERATIONS[operation](module.case_of(case))
        assert all(seconds > 0 for seconds in run().values())
        found[name] = {"compared": check().flatten().tolist()}
    most = peers.tolerance(case)
    assert most == peers.TOLERANCE[operation] <= peers.tolerance({**case, "device": "cuda"})
    assert peers.compared(operation, found, most)["torch"][1] == ""
    found["torch"]["compared"][0] += 3 * most
    assert "not timed" in peers.compared(operation, found, most)["torch"][1]


def test_what_only_this_library_and_others_have_runs(benchmarks):
    import of_dissensus

    names = [name for name in of_dissensus.OPERATIONS if name.startswith(("batch", "Laplace", "SGHMC", "mean", "emp"))]
    for name in [*names, "analytic kernel"]:
        run, check = of_dissensus.OPERATIONS[name](of_dissensus.case_of({**TINY, "operation": name}))
        assert all(seconds > 0 for seconds in run().values()), name
        assert check() is None or check().isfinite().all(), name


def test_a_step_is_the_time_between_two_batches(benchmarks):
    from tasks import Watched

    times = iter([0.0, 1.0, 3.0, 5.0, 6.0, 7.0, 8.0, 20.0])
    watched = Watched([(None, None)] * 3, lambda: next(times))
    found = watched.timed(lambda: [list(watched), list(watched)])  # two members, one after the other
    assert found == {"training step": 2.0 + 1.0, "epoch": 20.0}


def test_a_moment_on_a_gpu_makes_nobody_wait(benchmarks, monkeypatch):
    import tasks

    passed = iter([10.0, 30.0, 70.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = next(passed)

        def elapsed_time(self, other):
            return other.time - self.time  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = iter([0.0, 5.0])  # read before and after alone
    watched = tasks.Watched([(None, None)] * 3, lambda: next(clock), tasks.Moment)
    assert watched.timed(lambda: list(watched)) == {"training step": pytest.approx(0.03), "epoch": 5.0}


def test_a_worker_answers_line_by_line(benchmarks):
    import of_torch

    main = runpy.run_path(str(benchmarks / "peer_workers" / "__main__.py"))
    heard, said = iter(["go\n", "go\n", "end\n"]), []
    case = {**TINY, "operation": "ensemble predicts"}
    main["serve"](of_torch, case, lambda: next(heard), lambda **what: said.append(json.loads(json.dumps(what))))
    first, *rounds, last = said
    assert len(first["compared"]) == 24 * 3
    assert first["versions"]["torch"] == version("torch")
    assert [list(each["seconds"]) for each in rounds] == [["prediction"]] * 2
    assert last["peak_mb"] >= 0


def test_the_page_says_who_is_faster_and_what_is_not_offered(benchmarks):
    import peers
    import peers_page

    about = {"network": "mlp", "members": "5", "batch": "128", "inputs": "1280", "operation": "ensemble"}
    about |= {"measure": "training step", "peak_mb": "3", "note": "", "version": "1", "torch": "2", "threads": "1"}
    about |= {"rounds": "3", "clock": "perf_counter", "commit": "c", "device": "d", "ratio": "1.0"}
    rows = [
        about | {"library": "dissensus", "seconds": "0.01", "lower": "0.009", "upper": "0.011"},
        about | {"library": "quick", "seconds": "0.005", "ratio": "0.5", "lower": "0.004", "upper": "0.006"},
        about | {"library": "slow", "seconds": "2", "ratio": "200", "lower": "1", "upper": "3"},
        about | {"library": "broken", "seconds": "", "measure": "", "note": "ImportError: x", "ratio": ""},
        about | {"library": "other", "seconds": "", "measure": "", "note": "not offered", "ratio": ""},
    ]
    text = peers_page.page(rows)
    assert "| ms | dissensus | quick | slow | broken |" in text
    assert "| 5 × MLP, batch 128 | 10 | **5 (0.50×)** | 2,000 (200×) | ImportError: x |" in text
    assert "dissensus takes longer in 1 of 2 comparisons" in text
    assert "- quick, training step, 5 × MLP, batch 128: 2.00×." in text
    rows[1]["upper"] = "0.02"  # the quartiles overlap
    assert "Nothing here is clearly faster elsewhere" in peers_page.page(rows)
    for case in (*peers.cases("cpu"), *peers.cases("cuda")):
        assert case["operation"] in peers_page.TITLES
        assert case["network"] in peers_page.NETWORKS
        assert peers.offers("dissensus", case["operation"])
    assert not peers.offers("posteriors", "ensemble")


def test_the_page_of_a_gpu_says_so(benchmarks):
    import peers_page

    about = {"network": "resnet18", "members": "5", "batch": "128", "inputs": "1280", "operation": "ensemble"}
    about |= {"measure": "epoch", "peak_mb": "", "note": "", "version": "1", "torch": "2", "threads": "1", "ratio": "1"}
    about |= {"rounds": "3", "clock": "perf_counter", "commit": "c", "seconds": "1", "lower": "1", "upper": "1"}
    text = peers_page.page([about | {"library": "dissensus", "device": "cuda (a GPU)"}])
    assert text.startswith("## On a GPU")
    assert "Peak memory" not in text  # cases share a process
    assert "peers.py --device cuda" in text


WORKER = """
import sys, time
for line in sys.stdin:
    if line == "sleep\\n":
        time.sleep(60)
    print('{"failed": "no"}' if line == "go\\n" else '{"compared": null}', flush=True)
"""


def test_a_worker_that_stops_does_not_stop_the_others(benchmarks, monkeypatch, tmp_path):
    import peers

    (tmp_path / "__main__.py").write_text(WORKER)
    for name in ("torch", "dissensus"):
        (tmp_path / f"of_{name}.py").write_text('"ensemble":')
    for name in set(peers.EVERYONE) - {"torch", "dissensus"}:
        (tmp_path / f"of_{name.replace('-', '_')}.py").write_text("")
    monkeypatch.setattr(peers, "WORKERS", tmp_path)
    made = {name: peers.Worker(sys.executable, name, 1) for name in ("torch", "dissensus")}
    made["torch"].patience = 0.1
    assert "no answer within" in made["torch"].ask("sleep", patient=False)["failed"]
    case = next(peers.cases("cuda"))
    rows = peers.measured(case, made, rounds=2, threads=1, timer="perf_counter")
    assert {row["library"]: row["note"] for row in rows if row["note"] != "not offered"} == {
        "dissensus": "no",
        "torch": "the process ended",
    }
    for worker in made.values():
        worker.process.kill()
        worker.process.communicate()


def test_resuming_leaves_out_what_the_file_has(benchmarks):
    import peers

    case = next(peers.cases("cuda"))
    row = {key: str(case[key]) for key in ("operation", "network", "members", "batch")} | {
        "inputs": "2560",
        "threads": "2",
    }
    assert peers.same(row) == peers.same({**case, "inputs": case["rows"], "threads": 2})


def test_a_gpu_loader_gives_the_same_batches(benchmarks):
    from tasks import Case

    case = Case("Laplace, kron", network="tiny", batch=8, rows=20)
    plain, data = list(case.loader()), case.data()
    case.data = lambda: data  # type: ignore[method-assign]
    case.device = "cuda"
    whole = case.loader()
    assert len(whole) == 3
    assert len(whole.dataset) == 20
    for a, b in zip(plain, whole, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(a, b, strict=True))

"""Of processes on a mesh the first alone shows progress, logs, saves and reports; independent ones all do."""

import contextlib
import io
import logging
import pickle
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from workers import workers

import dissensus as ds
from dissensus.bench import torchrun_ranks
from dissensus.data import Batches


def done_by_all(folder, together):
    """(what was printed, what was logged, whether files came of it, what report says it wrote) in this process."""
    torch.manual_seed(0)
    rank, folder = distributed.get_rank(), Path(folder)
    posterior = ds.DeepEnsemble([nn.Linear(2, 3) for _ in range(2)])
    data = Batches(torch.randn(24, 2), torch.arange(24) % 3, batch_size=8)
    heard, printed = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(heard)
    logging.getLogger("dissensus").addHandler(handler)
    mine = folder / ("all" if together else str(rank))
    mesh = ds.distributed.mesh(data=2) if together else None
    with contextlib.redirect_stderr(printed):
        ds.fit(posterior, data, epochs=1, mesh=mesh, ranks=None if together else "independent")
        evaluation = ds.evaluate(posterior, data)
        logging.getLogger("dissensus").warning("mind this")
        # A rank's own folder, so that a file that it must not write would be seen.
        ds.save(posterior, mine / f"saved{rank}")
        files = ds.report({"ensemble": evaluation}, mine / f"page{rank}.csv")
    logging.getLogger("dissensus").removeHandler(handler)
    there = sorted(path.name for path in mine.iterdir()) if mine.is_dir() else []
    sent = pickle.loads(pickle.dumps(posterior))
    return "epoch 1/1" in printed.getvalue(), "mind this" in heard.getvalue(), there, len(files), sent.mesh is None


def test_the_first_process_of_a_mesh_speaks_for_all(tmp_path):
    first, second = workers().run(2, done_by_all, str(tmp_path), True)
    assert first[:2] == (True, True)
    assert second[:2] == (False, False)
    assert not {"saved1", "page1.csv"} & {*first[2], *second[2]}
    assert {path.name for path in (tmp_path / "all").iterdir()} == {"saved0", "page0.csv"}
    assert first[3:] == second[3:] == (1, True)


def test_independent_processes_speak_for_themselves(tmp_path):
    found = workers().run(2, done_by_all, str(tmp_path), False)
    for rank, (showed, logged, there, _, _) in enumerate(found):
        assert showed
        assert logged
        assert there == [f"page{rank}.csv", f"saved{rank}"]


def of_a_bench(trainings):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), torchrun_ranks.print_on_first_rank():
        print("a table")
        logging.getLogger("dissensus").warning("a remark")
    torchrun_ranks.wait()
    return (
        torchrun_ranks.rank(),
        list(torchrun_ranks.groups_of_this_rank(trainings)),
        torchrun_ranks.is_training_shared(len(trainings)),
        out.getvalue(),
    )


@pytest.mark.parametrize(("trainings", "dealt", "shared"), [("abc", ["ac", "b"], False), ("a", ["a", ""], True)])
def test_a_bench_deals_out_trainings_or_shares_each(trainings, dealt, shared):
    found = workers().run(2, of_a_bench, list(trainings))
    assert [each[0] for each in found] == [0, 1]
    assert ["".join(each[1]) for each in found] == dealt
    assert {each[2] for each in found} == {shared}
    assert [each[3] for each in found] == ["a table\n", ""]


def test_a_bench_on_one_process_waits_for_nobody():
    assert (torchrun_ranks.rank(), torchrun_ranks.size(), torchrun_ranks.mesh()) == (0, 1, None)
    assert torchrun_ranks.groups_of_this_rank([1, 2]) == [1, 2]
    assert not torchrun_ranks.is_training_shared(0)
    torchrun_ranks.exit_other_ranks()
    torchrun_ranks.connect()
    assert not distributed.is_initialized()

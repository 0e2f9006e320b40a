"""Training on a mesh is training on one process: the same weights, functions, losses and files."""

import functools
import inspect
import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from workers import said, workers

import dissensus as ds
import test_contract
import tiny
from dissensus.distributed.partition import MeshTrainingPartition, TrainingPartition
from dissensus.engine.loader import Loader
from dissensus.training.checkpoint import read_distributed
from dissensus.training.validation import validation_nll

MESHES = {"members": (2, 1), "data": (1, 2), "both": (2, 2)}
# Methods of the contract's table whose line there runs chains before `fit` does
METHODS = test_contract.METHODS | {
    "hmc": lambda net: ds.HMC(net(), samples=3, warmup=1, leapfrog=1, data_size=12),
    "multi_hmc": lambda net: ds.HMC([net(), net()], samples=3, warmup=1, leapfrog=1, data_size=12),
    "node_bnn_of_trained": lambda net: ds.NodeBNN.of_trained(net(), data_size=12),  # at a rate that is measured
}


def small(dropout=0.0):
    """4 inputs, batch norm, 3 outputs. No bias right before the norm: its gradient is rounding, which Adam makes steps of."""
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), *drop, nn.Linear(6, 3))


def plain(dropout=0.0):
    """4 inputs, 3 outputs, no batch norm."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def made(mesh):
    return None if mesh is None else ds.distributed.mesh(*mesh)


def trained(method, mesh=None, epochs=100, *, net=small, batch_size=7, keywords=None, **settings):
    """(state, losses, predictions, history) after training on 12 points in batches of 7 and 5.

    Not of fewer: batch norm of two rows gives ±1 whatever they are, and directions of input gradients are then rounding.
    """
    torch.manual_seed(0)
    posterior = METHODS[method](net, **(keywords or {})).to(torch.float64)
    x, y = tiny.points()
    loader = ds.data.Batches(x, y, batch_size=batch_size, shuffle=True)
    mesh = made(mesh)
    if mesh and mesh.rank:  # whose weights and random numbers are those of the first process
        state = posterior.state_dict()
        posterior.load_state_dict({name: t + 1 if t.is_floating_point() else t for name, t in state.items()})
    torch.manual_seed(9 if mesh and mesh.rank else 1)
    history = ds.fit(posterior, loader, epochs=epochs, progress=False, mesh=mesh, **settings)
    torch.manual_seed(2)
    return result(posterior, history, x)


def result(posterior, history, x):
    losses = torch.tensor([epoch.members for epoch in history.epochs], dtype=torch.float64)
    return posterior.state_dict(), losses, posterior.predict(x).member_means, history


def off(found, expected):
    """The largest difference between what two runs gave."""
    assert found[0].keys() == expected[0].keys()
    # Eigenvectors of equal eigenvalues turn with the rounding: what is made of them is compared.
    pairs = [(found[0][name], wanted) for name, wanted in expected[0].items() if not name.endswith(".vectors")]
    pairs += zip(found[1:3], expected[1:3], strict=True)
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())


def divisible(method, which):
    """Whether members of this method can lie in different processes."""
    return which == "data" or METHODS[method](small).particles.members > 1


# Kinds of exchange that no test below has; the slow suite has every method on every mesh.
FAST = [(method, "members") for method in ("svgd", "multi_mc_dropout")] + [
    (method, "data") for method in ("function_rde", "node_bnn_of_trained", "tradi", "multi_swag")
]


@pytest.mark.parametrize(("method", "which"), FAST)
def test_two_processes_train_to_the_result_of_one(method, which):
    expected = trained(method, epochs=2)
    for rank in workers().run(2, trained, method, MESHES[which], 2):
        assert off(rank, expected) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_every_mesh_to_the_result_of_one_process(method):
    """200 steps; of one network there is no members axis."""
    expected = trained(method)
    for which, mesh in MESHES.items():
        if divisible(method, which):
            for rank in workers().run(math.prod(mesh), trained, method, mesh):
                assert off(rank, expected) < 1e-8


def four(method):
    """By itself: four processes and four members are four parts of members, four processes and three members of rows."""
    return trained(method, None, 3), repr(ds.distributed.mesh())


def test_processes_choose_a_mesh():
    expected = trained("batch_ensemble", epochs=3)
    for found, _ in workers().run(4, four, "batch_ensemble"):
        assert off(found, expected) < 1e-8


# ---------------------------------------------------------------------------------------------------- batches


class Weighted(Dataset):
    """13 rows with labels, some of which do not count, and weights."""

    def __init__(self):
        self.x, self.y = tiny.points(13)
        self.y[::4] = 255
        self.weight = torch.linspace(0.5, 2.0, 13, dtype=torch.float64)

    def __len__(self):
        return 13

    def __getitem__(self, index):
        return self.x[index], self.y[index], self.weight[index]


def with_sampler(mesh, accumulate):
    """On a mesh with a DistributedSampler; without one, the same rows in the same batches."""
    torch.manual_seed(0)
    posterior = METHODS["function_rde"](plain, likelihood=ds.Classification(ignore_index=255)).double()
    data = Weighted()
    if mesh is None:
        first, second = [*range(0, 13, 2)], [*range(1, 13, 2), 0]  # what the two ranks read: the last row is read again
        loader = [data[first[i : i + 2] + second[i : i + 2]] for i in range(0, 7, 2)]
        loader[-1][2][-1] = 0.0
    else:
        mesh = ds.distributed.mesh(*mesh)
        sampler = DistributedSampler(data, num_replicas=mesh.data.size, rank=mesh.data.rank, shuffle=False)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
    settings = {"accumulate": accumulate, "clip": 0.5, "validation": loader}
    history = ds.fit(posterior, loader, epochs=4, progress=False, mesh=mesh, **settings)
    return *result(posterior, history, data.x), [epoch.validation for epoch in history.epochs]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rows_that_a_sampler_divides_count_by_their_weights_and_once(accumulate):
    *expected, scores = with_sampler(None, accumulate)
    for *rank, validation in workers().run(2, with_sampler, (1, 2), accumulate):
        assert off(rank, expected) < 1e-8
        assert validation == pytest.approx(scores, abs=1e-12)


def uneven(mesh):
    """Batches of 5, 5, 2 and 1 on 4 ranks: of the last two some ranks have no rows of their own."""
    x, y = tiny.points(13)
    weight = torch.linspace(0.0, 2.0, 13, dtype=torch.float64)
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([plain() for _ in range(2)], weight_prior_std=1.0, data_size=13).double()
    batches = [(x[rows], y[rows], weight[rows]) for rows in (slice(5), slice(5, 10), slice(10, 12), slice(12, 13))]
    return [result(posterior, ds.fit(posterior, batches, epochs=3, progress=False, mesh=made(mesh), accumulate=2), x)]


def in_a_loop(mesh):
    """Dropout of members that run one after the other: noise of other processes' members is drawn between."""
    return trained("multi_mc_dropout", mesh, 3, engine="loop"), trained("function_rde", mesh, 2, engine="loop")


def per_rank():
    """(running mean of batch norm with statistics per rank, and synchronised) after one batch of rows 0, 1 and 2, 3."""
    found = []
    for statistics in ("per rank", "synchronised"):
        posterior = ds.MAP(nn.Sequential(nn.BatchNorm1d(1, momentum=1.0), nn.Linear(1, 2))).double()
        mesh = ds.distributed.mesh(data=2, statistics=statistics)
        batch = torch.tensor([[0.0], [2.0], [10.0], [14.0]], dtype=torch.float64), torch.tensor([0, 1, 0, 1])
        ds.fit(posterior, [batch], epochs=1, progress=False, mesh=mesh)
        found += [float(each) for name, each in posterior.named_buffers() if "running_" in name]
    return found


def test_statistics_may_be_each_ranks_own():
    # means 1 and 12, variances 2 and 8; of all four rows 6.5 and 43 2/3
    for rank in workers().run(2, per_rank):
        assert rank == pytest.approx([6.5, 5.0, 6.5, 131 / 3])


# ---------------------------------------------------------------------------------------------------- files and errors


def files(folder):
    """What a run with validation and checkpoint is after an interruption, and what two ranks save."""
    mesh = ds.distributed.mesh(2, 1) if folder else None
    runs = []
    for epochs in (2, 4):  # the second goes on from the first one's checkpoint
        torch.manual_seed(0)
        posterior = ds.DeepEnsemble([small() for _ in range(3)]).double()
        x, y = tiny.points()
        loader = ds.data.Batches(x, y, batch_size=5, shuffle=True, seed=3)
        settings = {"checkpoint": f"{folder}/run.pt"} if folder else {}
        if not folder and epochs == 2:
            continue
        settings |= {"optimizer": torch.optim.AdamW(posterior.parameters(), lr=1e-2), "validation": (x, y)}
        history = ds.fit(posterior, loader, epochs=epochs, progress=False, mesh=mesh, **settings)
        runs.append((posterior, history))
    if folder:
        ds.save(posterior, f"{folder}/saved")
    return *result(posterior, history, x), [epoch.validation for epoch in history.epochs]


def test_a_run_goes_on_from_its_checkpoint_and_its_file_is_read_by_one_process(tmp_path):
    *expected, scores = files(None)
    found = workers().run(2, files, str(tmp_path))
    for *rank, validation in found:
        assert off(rank, expected) < 1e-8
        assert validation == pytest.approx(scores, abs=1e-12)
    loaded = ds.load(tmp_path / "saved", small().double())
    for state, _, members, *_ in found:
        assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
        assert torch.equal(loaded.predict(tiny.points()[0]).member_means, members)
    checkpoint = read_distributed(tmp_path / "run.pt", TrainingPartition(loaded, Loader(())), torch.device("cpu"))
    assert all(each["exp_avg"].shape[0] == 3 for each in checkpoint["optimizer"]["state"].values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.pt", "saved"]


def diverging(which):
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([nn.Linear(4, 3) for _ in range(3)]).double()
    with torch.no_grad():
        next(iter(posterior.particles.own.parameters()))[2] = 1e200
    x, y = tiny.points()
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    try:
        ds.fit(posterior, [(1e200 * x, y)], epochs=1, progress=False, mesh=ds.distributed.mesh(*which))
    except ds.Diverged as error:
        same = all(torch.equal(tensor, before[name]) for name, tensor in posterior.state_dict().items())
        return error.members, error.step, same
    return None


@pytest.mark.parametrize("which", ["members", "data"])
def test_a_member_that_diverges_is_named_in_every_process_before_anything_moves(which):
    assert workers().run(2, diverging, MESHES[which]) == [([2], 1, True)] * 2


def refused():
    """What processes say that would train something else than they were asked for."""
    rank = ds.distributed.mesh().rank
    x, y = tiny.points()
    data = torch.utils.data.TensorDataset(x, y)
    two = [plain(), plain()]

    def fit(posterior, loader=((x, y),), **mesh):
        made = ds.distributed.mesh(**mesh) if mesh else None
        return ds.fit(posterior.double(), list(loader), epochs=1, progress=False, mesh=made)

    def sampled():
        loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=3, rank=0))
        ds.fit(ds.MAP(plain().double()), loader, epochs=1, progress=False, mesh=ds.distributed.mesh(data=2))

    cases = [
        lambda: fit(ds.MAP(plain()), members=2),
        lambda: fit(ds.MAP(DistributedDataParallel(plain()))),
        lambda: fit(ds.MAP(plain()), [(x + rank, y)]),
        sampled,
        lambda: fit(ds.FoRDE(two, examples=1), data=2),
        lambda: ds.fit(ds.MAP(plain().double()), [(x, y)], epochs=1, progress=False, engine="compiled"),
        lambda: DistributedDataParallel(ds.MAP(plain().double())).module.backward(x, y),
    ]
    return [said(case) for case in cases]


def test_what_cannot_be_divided_is_said_in_one_line():
    starts = [
        "expected at most 1 ranks for 1 members, got 2; pass mesh(data=2)",
        "expected a plain network, got DistributedDataParallel; pass net.module",
        "expected the same batches on all ranks, got unequal ones on ranks 1 and 0; give shuffling loaders one seed",
        "expected samplers of ranks 0 to 1, got [0, 0] of 3; use DistributedSampler(",
        "expected z of each member with a row for each example, got shape (2, 1, 4)",
        "expected engine on a mesh of auto, loop, vectorised, got 'compiled'",
        "expected one process, got rank ",
    ]
    for words in workers().run(2, refused):
        for word, start in zip(words, starts, strict=True):
            assert word.startswith(f"ValueError: {start}")
            assert "\n" not in word


def independent():
    torch.manual_seed(torch.distributed.get_rank())
    posterior = ds.MAP(plain().double())
    history = ds.fit(posterior, [tiny.points()], epochs=1, progress=False, mesh="independent")
    return history[0].loss


def test_independent_ranks_train_models_of_their_own():
    one, other = workers().run(2, independent)
    assert one != other


# ---------------------------------------------------------------------------------------------------- rows that are read


class Counted(ds.data.Batches):
    """Not of the kind whose rows are known to be the same without the others of their batch."""


def read_rows(mesh, kind, keywords):
    """(result, rows read in each call): three epochs of 23 weighted examples, some of which have no label."""
    at, read = ds.data.Batches.at, []

    def counting(self, rows):
        found = at(self, rows)
        read.append(len(found[1]))
        return found

    torch.manual_seed(0)
    likelihood = ds.Classification(ignore_index=255)
    posterior = METHODS["function_rde"](plain, likelihood=likelihood, repulsion="1/B").double()
    x, y = tiny.points(23)
    y[::5] = 255
    weight = torch.linspace(0.5, 2.0, 23, dtype=torch.float64)
    loader = kind(x, y, weight=weight, batch_size=7, **keywords)
    ds.data.Batches.at = counting
    try:
        history = ds.fit(posterior, loader, epochs=3, mesh=made(mesh), progress=False)
    finally:
        ds.data.Batches.at = at
    return result(posterior, history, x), read


def doubled(x):
    return x * (1 + torch.rand(len(x), 1, dtype=x.dtype))  # noise of each row


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [
        (ds.data.Batches, {"shuffle": True, "seed": 3}), (ds.data.Batches, {"shuffle": True, "augment": doubled}),
        (Counted, {}), pytest.param(ds.data.Batches, {}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_each_rank_reads_its_own_rows_of_batches_in_memory(kind, keywords):
    """Of every epoch's first batch all, to be compared; of a last one of two rows each rank has one. Batches that are
    augmented, or of a kind of their own, are read whole."""
    expected, alone = read_rows(None, kind, keywords)
    assert alone == [7, 7, 7, 2] * 3
    for rank, (found, read) in enumerate(workers().run(2, read_rows, (1, 2), kind, keywords)):
        assert off(found, expected) < 1e-8
        assert read == (alone if kind is Counted or "augment" in keywords else [7, 4 - rank, 4 - rank, 1] * 3)


# ---------------------------------------------------------------------------------------------------- watchers


def watched(mesh):
    """What a run and the methods that watch it are after training, and where the watchers predict."""
    torch.manual_seed(0)
    run = ds.DeepEnsemble([small() for _ in range(2)]).double()
    ds.track(run, [functools.partial(ds.SWAG, rank=2, samples=3), functools.partial(ds.TRADI, samples=3), ds.SWA])
    x, y = tiny.points()
    mesh = made(mesh)
    history = ds.fit(run, ds.data.Batches(x, y, batch_size=7), epochs=4, mesh=mesh, progress=False)
    assert all(each.mesh is mesh for each in run.watchers)
    return [result(each, history, x) for each in (run, *run.watchers)]


# ---------------------------------------------------------------------------------------------------- what would differ unseen


def of_each_rank():
    mesh = ds.distributed.mesh(2, 2, statistics="per rank")
    posterior = ds.DeepEnsemble([small() for _ in range(2)]).double()
    ds.fit(posterior, ds.data.Batches(*tiny.points(), batch_size=6), epochs=2, mesh=mesh, progress=False)
    return posterior.state_dict()


def test_statistics_of_each_rank_are_the_same_in_all_processes_afterwards():
    first, *others = workers().run(4, of_each_rank)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


class Seen(nn.Linear):
    """Keeps a sum of what it sees, which is not synchronised."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().sum(0)
        return super().forward(x)


class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def different(which):
    """What processes that do not do the same are told."""
    mesh = ds.distributed.mesh(1, 2)
    rank, (x, y) = mesh.rank, tiny.points()
    settings = {"epochs": 2, "mesh": mesh, "progress": False}
    posterior = ds.MAP(plain()).double()
    if which == "optimizer":
        optimizer = torch.optim.SGD(posterior.parameters(), lr=0.1 + rank)
        return said(ds.fit, posterior, (x, y), optimizer=optimizer, **settings)
    if which == "buffer":
        return said(ds.fit, ds.MAP(Seen()).double(), [(x, y)], **settings)
    if which == "rows":
        return said(ds.fit, ds.MAP(Centred(4, 3)).double(), [(x, y)], **settings)
    if which == "order":  # of rows whose sums are exact, whatever their order
        turned = [6 * rank, *range(1, 6), 6 - 6 * rank, *range(7, 12)]
        return said(ds.fit, posterior, [(x.round()[turned], y[turned])], **settings)
    if which == "validation":  # of which only the first process sees the batch
        return said(ds.fit, posterior, [(x, y)], validation=[(x, y + 7)], **settings)
    parts = ds.distributed.mesh(1, 2, batches="parts")
    sizes = [4, 3, 4 - rank]
    loader = [(torch.randn(size, 4, dtype=torch.float64), torch.arange(size) % 3) for size in sizes]
    return said(ds.fit, posterior, loader, epochs=1, mesh=parts, progress=False)


@pytest.mark.parametrize(
    ("which", "told"),
    {
        "optimizer": "ValueError: expected 'particles.shared.network.0.weight' to be the same in all processes",
        "buffer": "ValueError: expected 'particles.shared.network.seen' to be the same in all processes",
        "rows": "ValueError: expected outputs that do not depend on other rows of a batch",
        "order": "ValueError: expected the same batches on all ranks, got unequal ones",
        "validation": "ValueError: expected labels in 0…2, got 9",
        "uneven parts": "ValueError: expected parts of a batch with as many rows in every process",
    }.items(),
)
def test_what_differs_between_processes_is_an_error_in_all_of_them(which, told):
    for text in workers().run(2, different, which):
        assert text[: len(told)] == told, text


def validated_on_uneven_parts():
    mesh = ds.distributed.mesh(1, 2, batches="parts")
    x, y = tiny.points(12)
    torch.manual_seed(0)
    posterior = ds.MAP(plain()).double()
    mine, rows = slice(4 * mesh.rank, 4 * mesh.rank + 4), (slice(7), slice(7, 12))[mesh.rank]
    validation = [(x[rows], y[rows])]
    history = ds.fit(posterior, [(x[mine], y[mine])], validation=validation, epochs=1, mesh=mesh, progress=False)
    return history[-1].validation, validation_nll(posterior, [(x, y)])


def test_validation_joins_uneven_parts():
    for found, of_all_rows in workers().run(2, validated_on_uneven_parts):
        assert found == pytest.approx(of_all_rows, abs=1e-12)


class Promising(tiny.Unsized):
    """One batch fewer than its length says."""

    def __len__(self):
        return len(self.make()) + 1


class Streamed(tiny.Stream):
    """A stream of rows with a length, as torch's loaders take it."""

    def __len__(self):
        return 12


def unequal(which, axes, given):
    """What two processes are told whose loaders yield other numbers of batches."""
    mesh = ds.distributed.mesh(*axes, batches=given)
    fewer, (x, y) = 1 if mesh.rank else 0, tiny.points()
    loader = {
        "stream": tiny.Unsized(lambda: [(x, y)] * (4 - fewer)),
        "empty stream": tiny.Unsized(lambda: [(x, y)] * (1 - fewer)),
        "list": [(x, y)] * (4 - fewer),
        "wrong length": Promising(lambda: [(x, y)] * 3),
        "rows": DataLoader(Streamed(lambda: zip(x[: 12 - 4 * fewer], y[: 12 - 4 * fewer], strict=True)), batch_size=4),
    }[which]
    posterior = ds.DeepEnsemble([plain() for _ in range(2)]).double()
    return said(ds.fit, posterior, loader, epochs=2, mesh=mesh, progress=False)


UNEQUAL = {
    "stream": "ValueError: expected as many batches on all ranks, and as many as len(loader), got 3 on some",
    "empty stream": "ValueError: expected as many batches on all ranks, and as many as len(loader), got 0 on some",
    "list": "ValueError: expected the same number of batches on all ranks, got unequal ones on ranks 1 and 0",
    "wrong length": "ValueError: expected as many batches on all ranks, and as many as len(loader), got 3 on some",
    "rows": "ValueError: expected as many batches on all ranks, and as many as len(loader), got 2 on some",
}


@pytest.mark.parametrize(
    ("which", "mesh", "given"),
    [
        *(("stream", axes, "whole") for axes in ((2, 1), (1, 2))),
        *((which, (1, 2), "parts") for which in ("stream", "empty stream", "list", "rows")),
        ("wrong length", (2, 1), "whole"),
    ],
)
def test_a_process_with_fewer_batches_is_an_error_in_all_of_them_at_once(which, mesh, given):
    for text in workers().run(2, unequal, which, mesh, given):
        assert text.startswith(UNEQUAL[which]), text


def streamed(mesh):
    """As `trained`, from a loader without a length."""
    torch.manual_seed(0)
    posterior = METHODS["deep_ensemble"](small).double()
    torch.manual_seed(1)
    loader = tiny.Unsized(lambda: [tiny.points()] * 3)
    history = ds.fit(posterior, loader, epochs=2, mesh=made(mesh), progress=False)
    return [result(posterior, history, tiny.points()[0])]


@pytest.mark.parametrize(
    ("run", "which"),
    [
        (uneven, (1, 4)),
        (in_a_loop, (2, 2)),
        *((streamed, mesh) for mesh in ((2, 1), (1, 2))),
        (watched, (2, 1)),
        *(pytest.param(watched, mesh, marks=pytest.mark.slow) for mesh in ((1, 2), (2, 2))),
    ],
)
def test_a_run_on_a_mesh_gives_what_one_process_gives(run, which):
    expected = run(None)
    for rank in workers().run(math.prod(which), run, which):
        assert max(off(found, wanted) for found, wanted in zip(rank, expected, strict=True)) < 1e-8


def standardised():
    """What two processes are told that measure their targets on other numbers of parts."""
    mesh = ds.distributed.mesh(1, 2, batches="parts")
    x = torch.randn(3, 4, dtype=torch.float64)
    posterior = ds.MAP(nn.Linear(4, 1), likelihood=ds.Regression()).double()
    settings = {"epochs": 1, "targets": "standardised", "mesh": mesh, "progress": False}
    return said(ds.fit, posterior, [(x, x[:, :1])] * (3 - mesh.rank), **settings)


def test_processes_with_other_numbers_of_parts_do_not_wait_for_each_other_to_measure_targets():
    for text in workers().run(2, standardised):
        assert text.startswith("ValueError: expected the same number of batches on all ranks"), text


def test_one_process_and_a_mesh_have_one_interface():
    asked = {name for name, each in vars(TrainingPartition).items() if inspect.isfunction(each)}
    assert asked <= {*vars(MeshTrainingPartition)}


def test_an_epoch_on_a_mesh_begins_where_its_first_batch_is_read():
    """A resumed epoch sets the random state before it reads: the order of the rows must not be drawn earlier."""
    x, y = tiny.points()
    loader = ds.data.Batches(x, y, batch_size=4, shuffle=True)
    batches = MeshTrainingPartition(ds.MAP(plain()), Loader(loader), ds.distributed.mesh()).training_batches(0)
    torch.manual_seed(3)
    found = next(iter(batches))
    torch.manual_seed(3)
    assert torch.equal(found[0], next(iter(loader))[0])

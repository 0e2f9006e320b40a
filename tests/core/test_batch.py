"""Batches and the loaders they come from: what is taken, whatever a user passes, and what is refused."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

import dissensus as ds
from dissensus.core import batch as batches
from dissensus.core.batch import Batch
from dissensus.data import Batches
from dissensus.engine.loader import Loader
from refusals import refuses


def test_a_batch_has_two_or_three_parts():
    x, y, w = torch.zeros(2, 3), torch.zeros(2), torch.ones(2)
    assert Batch.from_tuple((x, y)) == (x, y, None)
    assert Batch.from_tuple([x, y, w]) == (x, y, w)


@pytest.mark.parametrize(("batch", "text"), [
    (torch.zeros(2, 3), r"expected batches \(x, y\) or \(x, y, weight\), got Tensor of length 2"),
    ({"x": 1, "y": 2}, "an entry 'labels' or 'label', got 'x', 'y'; pass ds.Loader"),
    ((torch.zeros(2),), "got tuple of length 1"),
    (5, "got int"),
    ((torch.zeros(2), [0, 1]), "expected targets as a tensor, got list"),
    (("text", torch.zeros(2)), "expected inputs as a tensor, tuple or dict of tensors, got str"),
])  # fmt: skip
def test_other_batches_are_refused(batch, text):
    refuses(lambda: Batch.from_tuple(batch), text, TypeError)
    refuses(lambda: ds.fit(ds.MAP(nn.Linear(3, 2)), [batch], epochs=1, progress=False), text, TypeError)


def test_numbers_that_are_not_finite_are_found_and_named():
    x = torch.zeros(5, 3)
    batches.check_finite(x)
    batches.check_finite({"a": x, "b": torch.tensor([2**62, 2**62])})
    x[3, 1] = float("nan")
    for inputs in (x, (torch.zeros(5), x), {"a": x}):
        with pytest.raises(ValueError, match="expected finite inputs, got NaN or infinity in row 3 of a batch; clean"):
            batches.check_finite(inputs)
    batches.check_finite(torch.full((5, 3), 1e38))  # the sum overflows, the numbers do not


def test_masks_may_hold_minus_infinity_and_nothing_else_that_is_not_finite():
    batches.check_finite((torch.ones(2, 3), torch.full((2, 2), -torch.inf)))
    batches.check_finite(torch.zeros(0, 3))
    for value in (torch.inf, torch.nan):
        with pytest.raises(ValueError, match="expected finite inputs, got NaN or infinity in row 1 of a batch"):
            batches.check_finite(torch.tensor([[-torch.inf, 1.0], [-torch.inf, value]]))


@pytest.mark.parametrize(("weight", "text"), [
    (torch.tensor([1.0, torch.nan]), "finite example weights of at least 0, got nan in row 1 of a batch; use"),
    (torch.tensor([-0.5, 1.0]), "got -0.5 in row 0 of a batch"),
    (torch.tensor([1.0, torch.inf]), "got inf in row 1"),
    (torch.tensor([1, 2]), r"got torch.int64 of shape \(2,\); .* remove a third tensor that is no weight"),
    (torch.tensor(2.0), r"expected one floating-point weight per example, got torch.float32 of shape \(\)"),
    (torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [-3.0, 1.0]]]), "got -3 in row 1"),
])  # fmt: skip
def test_weights_that_are_no_weights_are_an_error_of_their_own_before_anything_runs(weight, text):
    posterior = ds.DeepEnsemble([nn.Linear(3, 2) for _ in range(2)])
    batch = (torch.ones(2, 3), torch.tensor([0, 1]), weight)
    calls = [
        lambda: batches.check_weight(weight),
        lambda: posterior.loss(*batch),
        lambda: posterior.backward(*batch),
        lambda: ds.fit(posterior, [batch], epochs=1, progress=False),
        lambda: ds.fit(posterior, [batch[:2]], epochs=1, validation=[batch], progress=False),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=text) as error:
            call()
        assert not isinstance(error.value, ds.Diverged)


def test_an_index_is_no_weight_wherever_batches_come_in():
    x, y = torch.randn(4, 3), torch.arange(4) % 2
    for door in DOORS.values():
        told = r"expected one floating-point weight per example, got torch.int64.*index"
        refuses(partial(door, nn.Linear(3, 2), [(x, y, torch.arange(4))]), told)


def test_sparse_inputs_are_refused_in_one_line_wherever_they_come_in():
    posterior = ds.MAP(nn.Linear(3, 2))
    x, y = torch.randn(4, 3).to_sparse(), torch.arange(4) % 2
    doors = [partial(door, nn.Linear(3, 2), [(x, y)]) for door in DOORS.values()]
    for call in (*doors, lambda: posterior.predict(x), lambda: posterior.predict((x,))):
        refuses(call, r"^expected dense inputs, got torch.sparse_coo; pass x.to_dense\(\)$")


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_labels_may_be_unsigned(dtype):
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    network = nn.Linear(4, 3).double()
    posterior = ds.MAP(network)
    plain = nn.functional.cross_entropy(network(x), y).detach()
    torch.testing.assert_close(posterior.loss(x, y.to(dtype)).detach(), plain)
    loader = [(x, y.to(dtype))]
    assert ds.evaluate(posterior, loader).metrics["nll"] == pytest.approx(float(plain), rel=1e-12)
    assert torch.equal(ds.predict(posterior, loader).targets, y)
    assert ds.temperature_scale(posterior, loader) > 0
    history = ds.fit(posterior, loader, epochs=1, progress=False)
    assert history.epochs[0].loss == pytest.approx(float(plain), rel=1e-12)
    refuses(lambda: posterior.loss(x, torch.full((6,), 7).to(dtype)), r"expected labels in 0…2, got 7")


def test_weights_may_be_booleans_and_zero():
    for weight in (torch.tensor([True, False]), torch.zeros(2), None):
        batches.check_weight(weight)
    rows = [(torch.ones(2, 3), torch.tensor([0, 1]), [1.0, 2.0])]
    told = "expected example weights as a tensor, got list"
    refuses(lambda: ds.fit(ds.MAP(nn.Linear(3, 2)), rows, epochs=1, progress=False), told, TypeError)


def test_losses_and_gradients_are_not_asked_for_at_inputs_that_are_not_finite():
    posterior = ds.MAP(nn.Linear(3, 2))
    x = torch.ones(2, 3)
    x[1] = torch.nan
    for call in (posterior.loss, posterior.backward):
        with pytest.raises(ValueError, match="got NaN or infinity in row 1 of a batch"):
            call(x, torch.tensor([0, 1]))
    assert posterior.particles.template.network.weight.grad is None


DOORS = {
    "fit": lambda network, loader: ds.fit(ds.MAP(network), loader, epochs=1, progress=False),
    "loss": lambda network, loader: ds.MAP(network).loss(*loader[0]),
    "backward": lambda network, loader: ds.MAP(network).backward(*loader[0]),
    "predict": lambda network, loader: ds.predict(ds.MAP(network), loader),
    "summarise": lambda network, loader: ds.summarise(ds.MAP(network), loader),
    "evaluate": lambda network, loader: ds.evaluate(ds.MAP(network), loader),
    "temperature_scale": lambda network, loader: ds.temperature_scale(ds.MAP(network), loader),
    "laplace": lambda network, loader: ds.Laplace(network).fit_posthoc(loader),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_every_door_looks_for_nan_once_in_each_batch(door, monkeypatch):
    x, y = torch.randn(4, 3), torch.arange(4) % 2
    seen, real = [], batches.check_finite
    monkeypatch.setattr(batches, "check_finite", lambda x, **where: seen.append(x) or real(x, **where))
    door(nn.Linear(3, 2), [(x, y)])
    assert len(seen) == 1
    x[2, 0] = torch.nan
    refuses(lambda: door(nn.Linear(3, 2), [(x, y)]), "expected finite inputs, got NaN or infinity in row 2 of a batch")


def test_a_batch_is_mapped_moved_and_counted_whole():
    x, y, weight = {"a": torch.ones(3, 2), "b": None}, torch.arange(3), torch.full((3,), 0.5)
    some = Batch(x, y, weight).map(lambda tensor: tensor[:2])
    assert (some.size, Batch(x, y).size) == (2, 3)
    assert [tensor.shape for tensor in some.tensors()] == [(2, 2), (2,), (2,)]
    assert len(Batch(x, y).tensors()) == 2
    moved = Batch((torch.ones(3), torch.ones(3, 1)), y, weight).to(torch.device("meta"))
    assert all(tensor.is_meta for tensor in moved.tensors())
    assert Batch(x, y).to(torch.device("cpu")).weight is None
    made = Batch.from_tuple((x["a"], y))
    assert Batch.from_tuple(made) is made


def test_a_dataset_of_batches_with_nan_is_told_of_the_nan():
    class Whole(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            if index:
                raise IndexError
            return torch.full((4, 3), torch.nan), torch.arange(4) % 2

    refuses(lambda: ds.fit(ds.MAP(nn.Linear(3, 2)), Whole(), epochs=1, progress=False), "expected finite inputs")


def test_inputs_are_mapped_in_place_of_their_tensors():
    x = {"a": torch.ones(2), "b": None}
    doubled = batches.map_tensors(x, lambda t: 2 * t)
    assert doubled["b"] is None
    assert doubled["a"].tolist() == [2, 2]
    assert isinstance(batches.map_tensors([torch.ones(2), 3], lambda t: t), tuple)
    assert batches.count_examples((torch.zeros(7, 2), torch.zeros(3))) == 7
    refuses(lambda: batches.count_examples(torch.zeros(())), "expected inputs with a batch axis first")
    for x, kind in ((np.zeros((3, 2)), "ndarray"), ([1.0], "list of float"), ({"a": np.zeros(3)}, "dict of ndarray")):
        told = f"expected inputs as a tensor, tuple or dict of tensors, got {kind}; convert"
        refuses(partial(batches.count_examples, x), told, TypeError)


def test_a_change_of_inputs_is_noticed():
    x = torch.ones(3)
    with pytest.raises(ValueError, match="changes them in place"), batches.UnchangedInputs({"a": x}):
        x.mul_(2)
    with batches.UnchangedInputs(x):
        x * 2
    with torch.inference_mode():
        y = torch.ones(3)
        with batches.UnchangedInputs(y):  # these tensors cannot be watched, and are not
            y.mul_(2)


ROWS = torch.zeros(6, 2), torch.arange(6)


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(1)


@pytest.mark.parametrize(("given", "length", "stream", "once"), [
    ([ROWS, ROWS, ROWS], 3, False, False),
    (iter([ROWS, ROWS]), None, False, True),
    (DataLoader(TensorDataset(*ROWS), batch_size=4), 2, False, False),
    (DataLoader(Endless(), batch_size=2), None, True, False),
    (Batches(*ROWS, batch_size=4), 2, False, False),
    (ROWS, 1, False, False),
], ids=["list", "iterator", "DataLoader", "stream", "Batches", "data"])  # fmt: skip
def test_a_loader_knows_how_it_can_be_read(given, length, stream, once):
    loader = Loader(given)
    assert (loader.length, loader.is_stream) == (length, stream)
    if once:
        refuses(loader.check_rereadable, "that can be read twice, got a generator")
    else:
        loader.check_rereadable()
    again = Loader(loader, complete=True)
    assert again.given is loader.given
    assert (again.is_complete, loader.is_complete) == (True, False)


def test_a_loader_knows_the_rows_that_it_reads():
    data = TensorDataset(*ROWS)
    half = DataLoader(Subset(data, [0, 2, 4]), batch_size=2)
    assert [Loader(each).row_counts for each in (half, Batches(*ROWS, batch_size=2), [ROWS])] == [(3, 6), None, None]
    own = DistributedSampler(data, num_replicas=4, rank=3, shuffle=False)
    loader = Loader(DataLoader(data, batch_size=2, sampler=own))
    assert (loader.ranks, Loader(half).ranks) == (4, 1)
    facts, rank, rows = loader.rank_rows()
    assert (facts["rows"], facts["shuffles"], rank, rows) == (6, False, 3, [3, 1])
    assert loader.first_reads(0, 1) is None, "before the last row of the rank nothing is a repeat"
    assert loader.first_reads(0, 2).tolist() == [True, False], "row 1 fills the round of 4 ranks"
    assert [
        y.tolist() for _, y in Loader(Batches(*ROWS, batch_size=4)).partial_batches(lambda size: slice(1, size))
    ] == [ROWS[1][1:4].tolist(), ROWS[1][5:].tolist()]


def test_parts_of_batches_are_in_the_order_that_is_drawn_when_the_first_is_read():
    loader = Batches(*ROWS, batch_size=6, shuffle=True)
    parts = Loader(loader).partial_batches(lambda size: slice(0, 2))
    torch.manual_seed(1)
    found = next(parts)[1]
    torch.manual_seed(1)
    assert torch.equal(found, next(iter(loader))[1][:2])


def test_data_become_batches_which_training_shuffles():
    x, y = torch.arange(64.0)[:, None], torch.arange(64)
    assert [len(rows) for _, rows in Loader((x, y))] == [64]
    first, second = Loader((x, y), shuffle=True)
    assert len(first[1]) == len(second[1]) == 32
    assert sorted(torch.cat([first[1], second[1]]).tolist()) == [*range(64)]
    assert not torch.equal(first[1], y[:32])
    assert len(next(iter(Loader([x, y, torch.ones(64)])))) == 3
    refuses(lambda: Loader(x), r"expected a loader or \(x, y\), got Tensor", TypeError)
    told = "expected a loader of batches, got TensorDataset, a Dataset of single examples"
    refuses(lambda: Loader(TensorDataset(x, y)), told, TypeError)


def test_its_state_is_that_of_its_generators():
    def orders(loader):
        return [y.tolist() for _, y in loader]

    loader = Loader(DataLoader(TensorDataset(*ROWS), batch_size=2, shuffle=True, generator=torch.Generator()))
    state = loader.state()
    assert {*state["generators"]} == {"generator", "sampler.generator", "batch_sampler.sampler.generator"}
    first = orders(loader)
    assert orders(loader) != first
    loader.restore(state)
    assert orders(loader) == first


def test_a_loader_of_all_processes_is_not_asked_again():
    posterior = ds.MAP(torch.nn.Linear(2, 6))
    whole = Loader([ROWS], complete=True)
    assert Loader.complete(whole, posterior).given is whole.given
    assert [each[0].shape for each in Loader.complete(ROWS, posterior)] == [(6, 2)]

"""The loader: what is asked of it, whatever a user passes."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dissensus as ds
from dissensus.core.loader import Loader
from dissensus.data import Batches

ROWS = torch.zeros(6, 2), torch.arange(6)


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(1)


@pytest.mark.parametrize(
    ("given", "length", "stream", "once"),
    [
        ([ROWS, ROWS, ROWS], 3, False, False),
        (iter([ROWS, ROWS]), None, False, True),
        (DataLoader(TensorDataset(*ROWS), batch_size=4), 2, False, False),
        (DataLoader(Endless(), batch_size=2), None, True, False),
        (Batches(*ROWS, batch_size=4), 2, False, False),
        (ROWS, 1, False, False),
    ],
    ids=["list", "iterator", "DataLoader", "stream", "Batches", "data"],
)
def test_a_loader_knows_how_it_can_be_read(given, length, stream, once):
    loader = Loader(given)
    assert (loader.length, loader.is_stream, loader.can_be_read_once) == (length, stream, once)
    again = Loader(loader, complete=True)
    assert again.given is loader.given
    assert (again.is_complete, loader.is_complete) == (True, False)


def test_data_become_batches_which_training_shuffles():
    x, y = torch.arange(64.0)[:, None], torch.arange(64)
    assert [len(rows) for _, rows in Loader((x, y))] == [64]
    first, second = Loader((x, y), shuffle=True)
    assert len(first[1]) == len(second[1]) == 32
    assert sorted(torch.cat([first[1], second[1]]).tolist()) == [*range(64)]
    assert not torch.equal(first[1], y[:32])
    weighted = next(iter(Loader([x, y, torch.ones(64)])))
    assert len(weighted) == 3
    with pytest.raises(TypeError, match=r"expected a loader or \(x, y\), got Tensor"):
        Loader(x)
    with pytest.raises(
        TypeError, match="expected a loader of batches, got TensorDataset, a Dataset of single examples"
    ):
        Loader(TensorDataset(x, y))


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

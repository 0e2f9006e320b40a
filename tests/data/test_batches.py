"""Batches hold what a DataLoader's hold, in an order that repeats when it should."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dissensus.data import Batches
from refusals import refuses

X = torch.arange(46.0).reshape(23, 2)
Y = torch.arange(23)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 23, 50])
def test_unshuffled_batches_equal_those_of_a_data_loader(batch_size, drop_last):
    ours = Batches(X, Y, batch_size=batch_size, drop_last=drop_last)
    theirs = DataLoader(TensorDataset(X, Y), batch_size=batch_size, drop_last=drop_last)
    assert len(ours) == len(theirs)
    for _ in range(2):
        pairs = list(zip(ours, theirs, strict=True))
        assert len(pairs) == len(ours)
        for (x, y), (x_loader, y_loader) in pairs:
            assert torch.equal(x, x_loader)
            assert torch.equal(y, y_loader)


@pytest.mark.parametrize("drop_last", [False, True])
def test_shuffled_batches_hold_every_row_once_with_its_own_target(drop_last):
    ours = Batches(X, Y, batch_size=5, shuffle=True, seed=0, drop_last=drop_last)
    theirs = DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True, drop_last=drop_last)
    ours, theirs = list(ours), list(theirs)
    assert [len(y) for _, y in ours] == [len(y) for _, y in theirs]
    for x, y in ours:
        assert torch.equal(x, X[y])
    rows = torch.cat([y for _, y in ours])
    assert len(rows.unique()) == len(rows)
    if not drop_last:
        assert torch.equal(rows.sort().values, torch.cat([y for _, y in theirs]).sort().values)


def order(batches) -> list[int]:
    return torch.cat([y for _, y in batches]).tolist()


def test_a_seed_repeats_the_run_and_advances_with_every_epoch():
    first, second = (Batches(X, Y, batch_size=4, shuffle=True, seed=7) for _ in range(2))
    epochs = [order(first) for _ in range(3)]
    torch.manual_seed(123)
    assert epochs == [order(second) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != order(Batches(X, Y, batch_size=4, shuffle=True, seed=8))


def test_a_seeded_or_unshuffled_epoch_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    order(Batches(X, Y, batch_size=4, shuffle=True, seed=7))
    order(Batches(X, Y, batch_size=4))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_without_a_seed_the_global_generator_decides_when_the_loop_starts():
    batches = Batches(X, Y, batch_size=4, shuffle=True)
    torch.manual_seed(5)
    first = order(batches)
    second = order(batches)
    torch.manual_seed(5)
    started = iter(batches)
    torch.manual_seed(6)
    assert order(started) == first
    assert second != first


def test_two_loops_over_the_same_batches_do_not_disturb_each_other():
    batches = Batches(X, Y, batch_size=23, shuffle=True, seed=1)
    reference = Batches(X, Y, batch_size=23, shuffle=True, seed=1)
    expected = [order(reference), order(reference)]
    one, two = iter(batches), iter(batches)
    assert order(two) == expected[1]
    assert order(one) == expected[0]


def test_orders_are_uniform():
    """Each of the 6 orders of 3 rows appears in 1/6 of 6,000 epochs, within 4 standard errors."""
    batches = Batches(X[:3], Y[:3], batch_size=3, shuffle=True, seed=0)
    seen = [tuple(order(batches)) for _ in range(6000)]
    assert len(set(seen)) == 6
    for permutation in set(seen):
        assert abs(seen.count(permutation) / 6000 - 1 / 6) < 4 * (5 / 36 / 6000) ** 0.5


def test_wrong_arguments_are_refused():
    refuses(lambda: Batches(X, Y[:-1], batch_size=4), "as many inputs as targets")
    refuses(lambda: Batches(X, Y, batch_size=0), "batch_size of at least 1")
    refuses(lambda: Batches(X, Y, batch_size=4, seed=0), "no seed without shuffle")


def test_tuples_dicts_and_weights_are_cut_alike() -> None:
    a, b, y, weight = torch.arange(10), torch.arange(10) + 100, torch.arange(10) * 2, torch.rand(10)
    for x in ((a, b), {"a": a, "b": b}):
        seen = 0
        for inputs, targets, w in Batches(x, y, batch_size=4, weight=weight, shuffle=True, seed=0):
            first, second = inputs.values() if isinstance(inputs, dict) else inputs
            assert torch.equal(first * 2, targets)
            assert torch.equal(second, first + 100)
            assert torch.equal(w, weight[first])
            seen += len(targets)
        assert seen == 10
    refuses(lambda: Batches((a, b[:3]), y, batch_size=2), "as many inputs as targets")

"""NodeBNN: inputs beside the examples, which are as many as those by chance."""

import pytest
import torch
from torch import nn

import dissensus as ds


class Beside(nn.Module):
    """(B, 4) and a table (T, 4) -> (B, 3)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, table):
        return self.layer(x + table.sum(0))


class Both(Beside):
    """Two tensors (B, 4), added up."""

    def forward(self, x, other):
        return self.layer(x + other)


def loss(network, *inputs):
    torch.manual_seed(0)
    posterior = ds.NodeBNN(network, data_size=9, components=2, train_samples=3).double().train()
    for each in inputs:
        torch.manual_seed(1)
        found = posterior.backward(each, torch.arange(len(each[0])) % 3)
    return found


def test_a_table_as_long_as_a_later_batch_is_not_repeated_with_the_examples():
    torch.manual_seed(2)
    x, table = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    network = Beside().double()
    longer = torch.cat([table, torch.zeros(3, 4, dtype=torch.float64)])  # the same sum, and no doubt
    torch.testing.assert_close(loss(network, (torch.cat([x, x]), table), (x, table)), loss(network, (x, longer)))


def test_a_table_as_long_as_the_first_batch_is_refused():
    x, table = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"shapes \[\(4, 4\)\] with 4 examples, one of them without such rows; .* as a buffer"
    ):
        loss(Beside().double(), (x, table))


class Joined(Beside):
    """(B, 4) and what joins every example to every other, (B, B) -> (B, 3)."""

    def forward(self, x, joined):
        return self.layer(torch.tanh(joined @ x))


@pytest.mark.parametrize("train_samples", [1, 3])
def test_an_input_for_pairs_of_examples_is_refused(train_samples):
    torch.manual_seed(2)
    posterior = ds.NodeBNN(Joined(), data_size=9, train_samples=train_samples).double()
    x, joined, y = torch.randn(6, 4).double(), torch.rand(6, 6).double(), torch.arange(6) % 3
    with pytest.raises(
        ValueError, match=r"shapes \[\(6, 6\)\] with 6 examples, one of them without such rows; .* in forward"
    ):
        posterior.backward((x, joined), y)
    with pytest.raises(ValueError, match="one of them without such rows"):
        ds.fit(posterior, [((x, joined), y)], epochs=1, progress=False)


class Pairs(Both):
    """The same, pair by pair: one example beside many of the other tensor is no error."""

    def forward(self, x, other):
        return self.layer(torch.stack([one + another for one, another in zip(x, other, strict=False)]))


class Indexed(Both):
    """The same, with rows looked up by number, as transformers look up masks."""

    def forward(self, x, other):
        return self.layer(x + other[torch.arange(len(x))])


@pytest.mark.parametrize("kind", [Both, Pairs, Indexed])
@pytest.mark.parametrize("alike", [False, True])
def test_rows_of_examples_in_several_tensors_are_repeated_together(kind, alike):
    torch.manual_seed(2)
    x, other = torch.randn(2, 4, 4, dtype=torch.float64)
    other = other[:1].expand(4, 4) if alike else other
    network = kind().double()

    class One(kind):
        def forward(self, x):
            return super().forward(x, torch.zeros_like(x))

    alone = One().double()
    alone.load_state_dict(network.state_dict())
    torch.testing.assert_close(loss(network, (x, other)), loss(alone, (x + other,)))

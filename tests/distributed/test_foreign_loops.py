"""Loops of the user's under DistributedDataParallel: averaged gradients, or an error that says what to do."""

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from workers import said, workers

import dissensus as ds
import tiny

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")


def with_loss(posterior):
    """What a LightningModule or Trainer's model does in its forward."""
    return tiny.Network(lambda self, x, y: self.posterior.loss(x, y), posterior=posterior)


def plain():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def share(x, y):
    rank, size = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    return x[rank::size], y[rank::size]


def in_ddp(module):
    return DistributedDataParallel(module) if distributed.is_initialized() else module


def ensemble():
    """The ensemble's state after four steps on each rank's share of the points, and SWAG's mean over them."""
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([plain() for _ in range(3)])
    model, optimizer = in_ddp(with_loss(posterior)), sgd(posterior)
    with ds.watching(posterior, optimizer, [ds.SWA], steps=4) as (swa,):
        for _ in range(4):
            optimizer.zero_grad()
            model(*share(*tiny.points())).backward()
            posterior.clip_grad_norm_(0.2)
            optimizer.step()
    return {**posterior.state_dict(), **swa.mean}


def recorder():
    """TRADI's means and variances, from averaged gradients, of a network in DistributedDataParallel."""
    torch.manual_seed(0)
    network = plain()
    model, optimizer = in_ddp(network), sgd(network)
    with ds.watching(network, optimizer, [ds.TRADI], steps=4) as (tradi,):
        for _ in range(4):
            optimizer.zero_grad()
            x, y = share(*tiny.points())
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return dict(tradi.filters.named_buffers())


@pytest.mark.parametrize("run", [ensemble, recorder])
def test_two_ranks_train_and_record_as_one(run):
    alone = run()
    for found in workers().run(2, run):
        assert found.keys() == alone.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-12, rtol=0)


def refused():
    x, y = tiny.points()
    ensemble, coupled = ds.DeepEnsemble([plain(), plain()]), ds.WeightRDE([plain(), plain()], data_size=12)
    wrapped = DistributedDataParallel(with_loss(coupled))
    return [said(ensemble.backward, x, y), said(ensemble.loss, x, y), said(wrapped, x, y)]


def test_gradients_that_nobody_averages_are_refused_with_the_remedy():
    for words in workers().run(2, refused):
        for word in words:
            assert word.startswith("ValueError: expected one process, got rank ")
            assert "posterior.loss in the forward of a DistributedDataParallel module" in word

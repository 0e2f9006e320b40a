"""What Accelerate does to posteriors, networks and loaders, in one process or those that torchrun has started: a line each.

A line is the largest difference to one process that was trained by hand, or the first words of an error.
"""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds

torch.set_default_dtype(torch.float64)
SIZE, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
ACCELERATOR = Accelerator(cpu=True)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def loader(batch_size=8):
    return DataLoader(TensorDataset(X, Y), batch_size=batch_size)


def by_hand(step, module, optimizer):
    """A loop of one's own: each process has its rows of batches of 8."""
    for start in range(0, 24, 8):
        rows = slice(start + RANK * 8 // SIZE, start + (RANK + 1) * 8 // SIZE)
        optimizer.zero_grad()
        step(X[rows], Y[rows])
        optimizer.step()
    return weights(module)


def prepared(step):
    """step(posterior, prepared posterior, x, y) with what Accelerate prepared."""
    posterior = ds.MAP(network())
    made, optimizer, parts = ACCELERATOR.prepare(posterior, SGD(posterior.parameters(), lr=0.1), loader(8 // SIZE))
    for x, y in parts:
        optimizer.zero_grad()
        step(posterior, made, x, y)
        optimizer.step()
    return weights(posterior)


def fitted(build, data=loader, optimizer=lambda made: made, prepare=lambda posterior: posterior):
    posterior = build()
    made = optimizer(SGD(posterior.parameters(), lr=0.1))
    ds.fit(prepare(posterior), data(), epochs=1, optimizer=made, progress=False)
    return weights(posterior)


def wrapped_by_hand():
    posterior = ds.MAP(ACCELERATOR.prepare(network()))
    step = lambda x, y: nn.functional.cross_entropy(posterior(x)[0], y).backward()  # noqa: E731
    return by_hand(step, posterior, SGD(posterior.parameters(), lr=0.1))


CASES = {
    "outputs of a prepared posterior": lambda: prepared(
        lambda p, made, x, y: ACCELERATOR.backward(nn.functional.cross_entropy(made(x)[0], y))
    ),
    "its backward": lambda: prepared(lambda p, made, x, y: p.backward(x, y)),
    "its loss": lambda: prepared(lambda p, made, x, y: ACCELERATOR.backward(p.loss(x, y))),
    "fit of a prepared posterior": lambda: fitted(lambda: ds.MAP(network()), prepare=ACCELERATOR.prepare),
    "fit with a prepared loader": lambda: fitted(lambda: ds.MAP(network()), lambda: ACCELERATOR.prepare(loader())),
    "fit with a prepared optimizer": lambda: fitted(lambda: ds.MAP(network()), optimizer=ACCELERATOR.prepare),
    "fit of a prepared network": lambda: fitted(lambda: ds.MAP(ACCELERATOR.prepare(network()))),
    "outputs of a prepared network": wrapped_by_hand,
    "an ensemble of prepared networks": lambda: fitted(lambda: ds.DeepEnsemble([ACCELERATOR.prepare(network())])),
    "evaluation with a prepared loader": lambda: ds.evaluate(
        ds.MAP(network()), ACCELERATOR.prepare(loader()), progress=False
    ),
}


def expected():
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    for start in range(0, 24, 8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X[start : start + 8]), Y[start : start + 8]).backward()
        optimizer.step()
    return weights(net)


for name, case in CASES.items():
    try:
        found = case()
        word = "right" if isinstance(found, torch.Tensor) and (found - expected()).abs().max() < 1e-12 else "another"
        word = word if isinstance(found, torch.Tensor) else "evaluated"
    except (ValueError, TypeError) as error:
        word = str(error).partition(",")[0] + "," + str(error).partition(",")[2].partition(";")[0]
    if RANK == 0:
        print(f"{name}: {word}", flush=True)
    ACCELERATOR.wait_for_everyone()

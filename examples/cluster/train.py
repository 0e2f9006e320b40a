"""The script that the recipes of this folder start: a deep ensemble, on one process or on many, to the same result.

python examples/cluster/train.py --seed 0 --out runs/seed0
torchrun --standalone --nproc-per-node 4 examples/cluster/train.py --seed 0 --out runs/seed0
"""

import argparse
from pathlib import Path

import torch

import dissensus as ds


def train(out: str | Path, *, seed: int = 0, epochs: int = 20, lr: float = 1e-2) -> dict[str, float]:
    """Trains, saves in `out` and returns the metrics of the test rows, on every process; started again, it goes on."""
    ds.distributed.start()  # joins the processes of torchrun; does nothing for one process, or where Ray has joined them
    torch.manual_seed(seed)
    x, y = ds.data.two_moons(600, seed=seed)
    posterior = ds.DeepEnsemble([ds.nets.MLP(2, 2, hidden=(32,)) for _ in range(4)])
    ds.fit(
        posterior,
        ds.data.Batches(x[:400], y[:400], batch_size=50, shuffle=True, seed=seed),
        epochs=epochs,
        optimizer=torch.optim.Adam(posterior.parameters(), lr=lr),
        checkpoint=Path(out) / "run.ckpt",
        progress=False,
    )
    evaluation = ds.evaluate(posterior, (x[400:], y[400:]), progress=False)  # on every process, never only on the first
    ds.save(posterior, Path(out) / "posterior")  # the first process writes
    return dict(evaluation.metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/cluster"), help="a folder that all machines see")
    options = parser.parse_args()
    metrics = train(options.out, seed=options.seed, epochs=options.epochs)
    if ds.distributed.mesh().is_first:
        print(f"nll {metrics['nll']:.4f}  accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()

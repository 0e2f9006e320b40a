"""Ray Tune: the learning rate that loses least, each trial in a process of its own, as many at a time as fit.

python examples/cluster/ray_tune.py --out /shared/tuned
"""

import argparse
from pathlib import Path
from typing import Any

from ray import tune
from train import train


def run_trial(config: dict[str, Any]) -> dict[str, float]:
    """One trial, with a folder of its own for checkpoint and posterior; what it returns is its result."""
    return train(Path(config["out"]) / f"lr{config['lr']:g}", epochs=config["epochs"], lr=config["lr"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/tuned"), help="a folder that all machines see")
    options = parser.parse_args()
    out = options.out.absolute()
    space = {"lr": tune.grid_search([1e-3, 1e-2, 1e-1]), "epochs": options.epochs, "out": str(out)}
    tuner = tune.Tuner(
        run_trial,
        param_space=space,
        tune_config=tune.TuneConfig(metric="nll", mode="min"),
        run_config=tune.RunConfig(name="tune", storage_path=str(out / "ray")),
    )
    best = tuner.fit().get_best_result()
    print(f"lr {best.config['lr']:g}  nll {best.metrics['nll']:.4f}  accuracy {best.metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()

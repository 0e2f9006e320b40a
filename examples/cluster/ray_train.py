"""Ray Train: one training on several workers, which Ray places, joins and starts again.

python examples/cluster/ray_train.py --workers 2 --out /shared/ensemble
"""

import argparse
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from train import train


def run_worker(config: dict[str, Any]) -> None:
    """What every worker runs; Ray has joined them, so `fit` divides members and batches among them."""
    metrics = train(config["out"], seed=config["seed"], epochs=config["epochs"])
    is_first = ray.train.get_context().get_world_rank() == 0
    saved = Checkpoint.from_directory(str(Path(config["out"]) / "posterior")) if is_first else None
    ray.train.report(metrics, checkpoint=saved)  # on every worker; Ray's checkpoint is a folder for ds.load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--out", type=Path, default=Path("runs/ray"), help="a folder that all machines see")
    options = parser.parse_args()
    out = options.out.absolute()  # workers run in folders of their own
    trainer = TorchTrainer(
        run_worker,
        train_loop_config={"out": str(out), "seed": 0, "epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(name="train", storage_path=str(out / "ray"), failure_config=FailureConfig(max_failures=3)),
    )
    metrics = trainer.fit().metrics
    print(f"nll {metrics['nll']:.4f}  accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()

"""Lightning's Trainer: `Watch`, a callback whose methods record its run, or that serves posteriors in a LightningModule."""

from typing import Any

from dissensus.integrations.trainer_watch import TrainerWatch
from dissensus.utils.extras import require_extra

require_extra("lightning")
from lightning.pytorch import Callback  # noqa: E402


class Watch(TrainerWatch, Callback):  # type: ignore[misc]
    """A callback of Trainer, as `TrainerWatch`, for the first optimiser; `gradient_clip_val` acts on each member."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        steps = int(trainer.estimated_stepping_batches)  # makes the loader, too
        self.start_run(pl_module, trainer.optimizers[0], steps=steps, done=0, loader=trainer.train_dataloader)
        if self.ensembles and trainer.gradient_clip_algorithm in (None, "norm"):  # "value" acts on single entries
            self.max_norm, trainer.gradient_clip_val = trainer.gradient_clip_val or 0.0, None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for each in self.posteriors if trainer.global_step else ():  # resumed: known only now
            (each.base or (each,))[0].begin(int(trainer.estimated_stepping_batches), 1, done=trainer.global_step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.clip_ensembles()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.on_exception(trainer, pl_module, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException | None) -> None:
        trainer.gradient_clip_val, self.max_norm = self.max_norm or trainer.gradient_clip_val, 0.0
        self.end_run(exception)

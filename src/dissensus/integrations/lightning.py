"""Lightning's Trainer: `Watch`, a callback whose methods record its run, or that serves posteriors in a LightningModule."""

from typing import Any

from dissensus.integrations.trainer_watch import TrainerWatch
from dissensus.utils.extras import require_extra

require_extra("lightning")
from lightning.pytorch import Callback  # noqa: E402


class Watch(TrainerWatch, Callback):  # type: ignore[misc]
    """A callback of Lightning's Trainer; arguments and attributes as in `TrainerWatch`.

        watch = lightning.Watch([ds.SWAG, ds.TRADI], network="net")
        Trainer(max_epochs=10, callbacks=[watch]).fit(module, loader)
        swag, tradi = watch.posteriors

    With a posterior inside the module, as `self.posterior`, whose `loss` is that of training_step, no methods are needed;
    until a method has a record, as in the sanity check, it predicts with the network itself. The Trainer's
    `gradient_clip_val` acts on each member of an ensemble.
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        steps = int(trainer.estimated_stepping_batches)  # loads the data, too
        loader = trainer.train_dataloader
        self.start_run(pl_module, trainer.optimizers, steps=steps, done=0, loader=loader)
        self.max_norm = 0.0
        if self.ensembles and trainer.gradient_clip_algorithm in (None, "norm"):  # "value" acts on single entries
            self.max_norm, trainer.gradient_clip_val = trainer.gradient_clip_val or 0.0, None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step:  # resumed: known only now
            for each in self.posteriors:
                (each.base or (each,))[0].begin(int(trainer.estimated_stepping_batches), 1, done=trainer.global_step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.clip_ensembles()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.gradient_clip_val = self.max_norm or trainer.gradient_clip_val
        self.end_run()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        trainer.gradient_clip_val = self.max_norm or trainer.gradient_clip_val
        self.stop_run(exception)

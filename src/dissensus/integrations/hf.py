"""transformers' Trainer: `Watch`, a callback whose methods record its run, and `model`, a posterior that it can train."""

import inspect
from typing import Any

from torch import Tensor, nn

from dissensus.core.posterior import Posterior, expect_posterior
from dissensus.core.predictive import CategoricalPredictive
from dissensus.integrations.trainer_watch import TrainerWatch
from dissensus.numerics.annealing import scale_gradient
from dissensus.utils.extras import require_extra

require_extra("transformers")
from transformers import TrainerCallback  # noqa: E402


class Watch(TrainerWatch, TrainerCallback):  # type: ignore[misc]
    """A callback of Trainer, as `TrainerWatch`; `max_grad_norm`, 1 by default, acts on each member of an ensemble."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **run: Any) -> None:
        steps, done, loader = state.max_steps, state.global_step, run.get("train_dataloader")
        self.start_run(run["model"], run["optimizer"], steps=steps, done=done, loader=loader)
        if self.ensembles:
            self.max_norm, args.max_grad_norm = args.max_grad_norm or self.max_norm, 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clip_ensembles()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.max_grad_norm, self.max_norm = self.max_norm or args.max_grad_norm, 0.0
        self.end_run()


class PosteriorModel(nn.Module):
    """A posterior that returns {"loss", "logits"}, as Trainer expects it."""

    accepts_loss_kwargs = False  # a mean over the batch: Trainer divides it by the number of accumulated batches

    def __init__(self, posterior: Posterior) -> None:
        super().__init__()
        self.posterior = posterior

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> dict[str, Tensor]:
        """The members' mean loss, with the gradient of their sum; in eval mode the mixture's NLL and log-probabilities."""
        posterior, members = self.posterior, self.posterior.particles.members
        if self.training:
            if posterior.run_length is None or labels is None:
                hint = "pass callbacks=[hf.Watch()], which clips each member, and rows with labels"
                raise ValueError(f"expected labels, and a Watch among Trainer's callbacks, got none; {hint}")
            return {"loss": scale_gradient(posterior.loss(inputs, labels) / members, members)}
        predictive = posterior.predict(inputs)
        mean = predictive.mean.log() if isinstance(predictive, CategoricalPredictive) else predictive.mean
        return {**({} if labels is None else {"loss": -predictive.log_prob(labels).mean()}), "logits": mean}


def model(posterior: Posterior) -> PosteriorModel:
    """A module for Trainer, with `callbacks=[Watch()]`: it trains each member as its network alone would train there.

    The logged loss is the members' mean; evaluation gives the mixture's NLL and log-probabilities (regression: means).
    """

    def forward(self: PosteriorModel, **inputs: Any) -> dict[str, Tensor]:
        return PosteriorModel.forward(self, **inputs)

    # Trainer reads the names of labels and of the columns to keep from the signature.
    named = dict(inspect.signature(type(expect_posterior(posterior).particles.template.network).forward).parameters)
    named.setdefault("labels", inspect.Parameter("labels", inspect.Parameter.KEYWORD_ONLY))
    forward.__signature__ = inspect.Signature(sorted(named.values(), key=lambda each: each.kind))  # type: ignore[attr-defined]
    return type("PosteriorModel", (PosteriorModel,), {"forward": forward})(posterior)

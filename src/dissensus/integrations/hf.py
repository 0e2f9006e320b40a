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
    """A callback of Trainer; arguments and attributes as in `TrainerWatch`.

        watch = hf.Watch([ds.SWAG, ds.TRADI])
        Trainer(network, args, train_dataset=rows, callbacks=[watch]).train()
        swag, tradi = watch.posteriors

    Trainer's `max_grad_norm`, 1 by default, acts on each member of an ensemble. A run that resumes from a checkpoint is
    recorded from there on.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        steps, done = state.max_steps, state.global_step
        self.start_run(model, [optimizer], steps=steps, done=done, loader=train_dataloader)
        if self.ensembles:
            self.max_norm, args.max_grad_norm = args.max_grad_norm or self.max_norm, 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clip_ensembles()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.ensembles:
            args.max_grad_norm, self.max_norm = self.max_norm, 0.0
        self.end_run()


class PosteriorModel(nn.Module):
    """A posterior as Trainer takes a model: it returns {"loss", "logits"}, by the names of the network's own arguments."""

    accepts_loss_kwargs = False  # the loss is the batch's mean: Trainer divides it by the number of accumulated batches

    def __init__(self, posterior: Posterior) -> None:
        super().__init__()
        self.posterior = posterior

    def outputs(self, labels: Tensor | None, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The members' mean loss, whose gradient is that of their sum; in eval mode the mixture's NLL and log-probabilities."""
        posterior = self.posterior
        if self.training:
            if posterior.run_length is None or labels is None:
                hint = "pass callbacks=[hf.Watch()], which begins the run and clips each member, and rows with labels"
                raise ValueError(f"expected labels and a Watch among Trainer's callbacks, got none; {hint}")
            members = posterior.particles.members
            return {"loss": scale_gradient(posterior.loss(inputs, labels) / members, members)}
        predictive = posterior.predict(inputs)
        classes = isinstance(predictive, CategoricalPredictive)
        found = {"logits": predictive.mean.log() if classes else predictive.mean}
        return found if labels is None else {"loss": -predictive.log_prob(labels).mean(), **found}


def model(posterior: Posterior) -> PosteriorModel:
    """A module to pass to Trainer, together with `callbacks=[Watch()]`; it trains `posterior` itself.

    Each member trains as its network would alone in a Trainer. The logged loss is the mean over members; evaluation gives
    the mixture's negative log-likelihood, and its log-probabilities (regression: means) as "logits". Columns of the data
    set that the network does not take are dropped, as for the network.

    Args:
        posterior: its networks take keyword arguments, as transformers' models do.
    """
    network = expect_posterior(posterior).particles.template.network

    def forward(self: PosteriorModel, labels: Tensor | None = None, **inputs: Any) -> dict[str, Tensor]:
        return self.outputs(labels, inputs)

    # Trainer reads the names of labels, and those of the columns to keep, from the signature.
    named = dict(inspect.signature(type(network).forward).parameters)
    named.setdefault("labels", inspect.Parameter("labels", inspect.Parameter.KEYWORD_ONLY))
    order = sorted(named.values(), key=lambda each: each.kind)
    forward.__signature__ = inspect.Signature(order)  # type: ignore[attr-defined]
    kind = type("PosteriorModel", (PosteriorModel,), {"forward": forward})
    return kind(posterior)  # type: ignore[no-any-return]

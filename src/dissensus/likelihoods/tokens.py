"""Tokens: one class per position of a sequence, as in tagging and language models, with classes on the last axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.core.likelihood import Classification, expand_weight, full_precision
from dissensus.core.predictive import CategoricalPredictive, ClassificationPredictive, ClassificationSummary, Predictive
from dissensus.utils.arrays import tensor_of
from dissensus.utils.checks import integer


class _TokenLabels:
    """Which labels count, and which outputs predict them: the settings of `Tokens` and of its predictions."""

    ignore_index: Any = -100  # an int
    shift: bool = False

    def labels(self, y: Tensor) -> Tensor:
        """(B, T) the label that the outputs at t predict: y at t, or with `shift` y at t + 1 and none at the end."""
        y = tensor_of(y)  # (n,) of rows without their sequences have been shifted
        return F.pad(y[:, 1:], (0, 1), value=self.ignore_index) if self.shift and y.ndim > 1 else y


class Tokens(_TokenLabels, Classification):
    """The likelihood of one class per token, given logits (B, T, C) as transformers return them.

    Targets are class indices (B, T). The loss is the mean over the labels that count, as in Hugging Face's models.
    Lengths T may differ between batches: predictions for a loader are padded to the longest, targets with ignore_index.

    Args:
        ignore_index: label of tokens that do not count, such as padding.
        shift: whether the logits at t predict the label at t + 1, as in causal language models, whose labels are the
            input_ids. False is the default: in tagging (NER) and masked language models every token has its own label.
        **settings: `class_weights` and the other keywords of `Classification`.
    """

    class_axis = -1

    def __init__(self, ignore_index: int = -100, *, shift: bool = False, **settings: Any) -> None:
        super().__init__(integer("ignore_index", ignore_index, least=-(2**63)), **settings)
        self.shift = shift
        self.of_rows = Classification(ignore_index, **settings)  # of tokens without their sequences

    def rows(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B·T, C) and the labels (B·T,) that they predict, for `of_rows`."""
        return outputs.flatten(0, 1), self.labels(y).flatten()

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """(B, T) at the positions of the logits: with `shift`, entry t belongs to label t + 1. 0 where ignored."""
        return self.of_rows.log_prob(*self.rows(outputs, y)).reshape(y.shape)

    def nll(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        each = None if weight is None else expand_weight(weight, full_precision(outputs[..., 0])).flatten()
        return self.of_rows.nll(*self.rows(outputs, y), each)

    def target_mask(self, y: Tensor) -> Tensor | None:
        return self.of_rows.target_mask(self.labels(y))

    def training_weight(self, y: Tensor) -> Tensor | None:
        return self.of_rows.training_weight(self.labels(y))

    def cat_targets(self, parts: Sequence[Tensor]) -> Tensor:
        if any(part.ndim != 2 for part in parts):  # inputs without labels of tokens
            return super().cat_targets(parts)
        longest = max(part.shape[1] for part in parts)
        return torch.cat([F.pad(part, (0, longest - part.shape[1]), value=self.ignore_index) for part in parts])

    def curvature(self, outputs: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(a, u), each (B, T, C): diag(a) − u uᵀ is the Hessian over the last axis at every position."""
        return (outputs.softmax(-1),) * 2

    def describe(self, outputs: Tensor) -> tuple[Tensor, ...]:
        return (F.log_softmax(full_precision(outputs), dim=-1),)

    def predictive(self, *described: Tensor) -> Predictive:
        return TokenPredictive(*described).mark(self)

    def output_warning(self, outputs: Tensor) -> str | None:
        return self.of_rows.output_warning(outputs.flatten(0, -2))

    def config(self) -> dict[str, Any]:
        return {**super().config(), "shift": self.shift}

    def check(self, output_shape: torch.Size, y: Tensor) -> None:
        indices = not (y.is_floating_point() or y.dtype == torch.bool)
        if len(output_shape) != 3 or y.shape != output_shape[:2] or not indices:
            got = f"{tuple(output_shape)} and {y.dtype} of shape {tuple(y.shape)}"
            hint = f"pad labels with {self.ignore_index} to the length of the logits"
            raise ValueError(f"expected logits (B, T, C) and integer labels (B, T), got {got}; {hint}")
        self.of_rows.check(torch.Size((y.numel(), output_shape[2])), y.flatten())


class TokenCategorical(_TokenLabels, CategoricalPredictive):
    """Base class: what follows for tokens from the mixture's log-probabilities (B, T, C), without the members."""

    kind = "tokens"
    class_axis = member_axis = -1

    def log_prob(self, y: Tensor) -> Tensor:
        """(B, T) log p̄ of labels y (B, T), 0 where they are ignored. With `shift`, entry t belongs to label t + 1."""
        return super().log_prob(self.labels(y))

    def mark(self, like: Any) -> Self:
        self.shift = like.shift
        return super().mark(like)

    def sequence(self, mask: Tensor | None = None) -> SequencePredictive:
        """The prediction for whole sequences. mask: (B, T) tokens that count, as an attention mask; None counts all."""
        places = self.log_mean.shape[:2]
        counted = torch.ones(places) if mask is None else tensor_of(mask)
        if counted.shape != places:
            got = tuple(counted.shape)
            raise ValueError(f"expected a mask of shape {tuple(places)}, got {got}; pass one number per token")
        return SequencePredictive(self, counted.to(self.log_mean.device).bool())

    def pad_parts(self, parts: Sequence[Self]) -> Sequence[Self]:
        """Parts of one length; probabilities at added positions are uniform."""
        longest, entropy = max(part.log_mean.shape[1] for part in parts), math.log(self.log_mean.shape[-1])

        def pad(tensor: Tensor, value: float) -> Tensor:  # (members, B, T, ...)
            return F.pad(tensor, (*[0, 0] * (tensor.ndim - 3), 0, longest - tensor.shape[2]), value=value)

        values = (-entropy, entropy, 0.0)  # of log-probabilities, and in a summary of aleatoric and epistemic
        return [part._like(map(pad, part.defining_tensors(), values)) for part in parts]


class TokenPredictive(TokenCategorical, ClassificationPredictive):
    """A mixture of categorical distributions for every token, from members' log-probabilities (M, B, T, C).

    `mean` is (B, T, C); `confidence`, `aleatoric`, `epistemic` and `total` are (B, T), at the positions of the logits.
    """

    def summary_like(self, *described: Tensor) -> ClassificationSummary:
        return TokenSummary(*super().summary_like(*described).defining_tensors()).mark(self)


class TokenSummary(TokenCategorical, ClassificationSummary):
    """log p̄ (1, B, T, C), aleatoric and epistemic (1, B, T) in nats."""


def token_rows(predictive: Any, y: Tensor, weight: Tensor | None = None) -> tuple[Any, Tensor, Tensor | None]:
    """The tokens that count as n inputs without their sequences, with labels and weights (n,); other predictions as given."""
    if not isinstance(predictive, TokenPredictive):
        return predictive, y, weight
    labels = predictive.labels(y)
    keep = labels != predictive.ignore_index  # (B, T)
    weight = None if weight is None else weight.reshape(len(y), -1).expand(y.shape)[keep]
    return ClassificationPredictive(predictive.log_probs[:, keep]), labels[keep], weight


class SequencePredictive:
    """The prediction for B whole sequences: `TokenPredictive.sequence(mask)`.

    `aleatoric`, `epistemic` and `total` (B,) are means over the tokens in the mask, in nats per token.
    """

    def __init__(self, tokens: TokenCategorical, mask: Tensor) -> None:
        self.tokens, self.mask = tokens, mask
        self.aleatoric, self.epistemic = (_masked_mean(each, mask) for each in (tokens.aleatoric, tokens.epistemic))
        self.total = self.aleatoric + self.epistemic

    def mean_log_prob(self, y: Tensor) -> Tensor:
        """(B,) mean of log p̄(y_t) over labels y (B, T); exp of its negative is the perplexity of a sequence."""
        y = tensor_of(y).where(self.mask, self.tokens.ignore_index)
        return _masked_mean(self.tokens.log_prob(y), self.tokens.labels(y) != self.tokens.ignore_index)

    def log_prob(self, y: Tensor) -> Tensor:
        """(B,) joint log (1/M) Σ_m Π_t p_m(y_t) of labels y (B, T): a member is right or wrong for a whole sequence."""
        labels = self.tokens.labels(tensor_of(y).where(self.mask, self.tokens.ignore_index))
        counted, members = labels != self.tokens.ignore_index, self.tokens.log_probs  # (B, T), (M, B, T, C)
        index = torch.where(counted, labels, 0).long().expand(members.shape[:-1])[..., None]
        each = torch.where(counted, members.gather(-1, index)[..., 0], 0.0).sum(2)  # (M, B)
        return each.logsumexp(0) - math.log(len(each))


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B,) means over the positions in a mask (B, T); 0 if there are none."""
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)

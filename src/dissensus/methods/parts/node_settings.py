"""What NodeBNN may be told: its settings, looked at before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from dissensus.numerics.checks import check_whole, is_finite

Bound = Literal["joint", "per_layer", "released"]
Divergence = Literal["mixture", "surrogate"]
CHOICES = {"bound": get_args(Bound), "divergence": get_args(Divergence), "batch_norm": ("frozen", "trained")}


def check_settings(settings: Mapping[str, Any], *, samples: int) -> None:
    """Raises where a setting of NodeBNN can not be meant."""
    counts = {key: settings[key] for key in ("components", "train_samples")} | {"samples": samples}
    for keyword, count in counts.items():
        check_whole(keyword, count)
        if count < 1:
            raise ValueError(f"expected {keyword} of at least 1, got {count}; 4 components and 32 samples are usual")
    for keyword, choices in CHOICES.items():
        if settings[keyword] not in choices:
            raise ValueError(f"expected {keyword} of {', '.join(choices)}, got {settings[keyword]!r}; name one of them")
    for keyword in ("prior_std", "init_std", "latent_lr"):
        value = settings[keyword]
        if (value is not None or keyword == "prior_std") and not (is_finite(value) and value > 0):
            raise ValueError(f"expected a positive {keyword}, got {value!r}; pass a number")
    for keyword in ("gamma", "init_spread", "latent_momentum"):
        value = settings[keyword]
        if (value is not None or keyword != "latent_momentum") and not (is_finite(value) and value >= 0):
            raise ValueError(f"expected {keyword} of at least 0, got {value!r}; 0 is none")
    if (momentum := settings["latent_momentum"]) is not None and momentum >= 1:
        raise ValueError(f"expected a latent_momentum below 1, got {momentum!r}; 0.9 is usual, 0 the paper's")

"""What `fit` refuses before anything is trained."""

from dissensus.core.posterior import Posterior


def check_settings(
    posterior: Posterior, *, epochs: int, accumulate: int, clip: float | None, patience: int | None, validation: object
) -> None:
    """Raises where settings make no sense for this posterior."""
    if not isinstance(posterior, Posterior):
        raise TypeError(
            f"expected a posterior, got {type(posterior).__name__}; wrap the network, for example in MAP(...)"
        )
    if epochs < 1:
        raise ValueError(f"expected at least one epoch, got {epochs}; pass epochs=1 or more")
    if accumulate < 1:
        raise ValueError(f"expected to accumulate at least one batch, got {accumulate}; 1 steps after every batch")
    if clip is not None and not clip > 0:
        raise ValueError(f"expected a positive gradient norm to clip at, got {clip}; None does not clip")
    if patience is not None and not posterior.keeps_best:
        raise ValueError(
            f"expected no patience for {type(posterior).__name__}, got {patience}: what it collects over a run needs the whole "
            "run; leave it out"
        )
    if patience is not None and validation is None:
        raise ValueError("expected validation data with patience, got none; pass validation=")

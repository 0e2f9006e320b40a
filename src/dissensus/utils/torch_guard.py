"""Foreign machinery, such as torch's exporters and compilers: it may fail halfway, and leaves no trace in torch."""

import logging

from dissensus.utils.torch_private import TorchState


class TorchStateGuard:
    """Afterwards functorch's levels, torch's modes and its dispatch keys are as before; `silent`: loggers to silence inside.

    A graph holds the beginning and the end of a vmap as separate operations. If one in between fails, the end never runs, and
    from then on torch itself computes inside that vmap. A class, since small predictions enter it: a generator takes longer.
    """

    def __init__(self, *silent: str) -> None:
        self.levels = [(logger, logger.level) for logger in map(logging.getLogger, silent)]

    def __enter__(self) -> None:
        for logger, _ in self.levels:
            logger.setLevel(logging.CRITICAL)
        self.state = TorchState()

    def __exit__(self, *error: object) -> None:
        self.state.restore(*error)
        for logger, level in self.levels:
            logger.setLevel(level)

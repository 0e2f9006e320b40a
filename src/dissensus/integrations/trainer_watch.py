"""What the callbacks for other libraries' trainers share: `watching` from the beginning of a run to its end, and clipping."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from dissensus.core.posterior import Posterior
from dissensus.training.watching import watching
from dissensus.utils.batch_norm_names import statistics_layers


class TrainerWatch:
    """Base class of the callbacks. Posteriors inside the trainer's model are begun, observed, clipped member by member and
    drawn at the end; if there are none, `methods` record its network. Afterwards they are in `posteriors`.

    Args:
        methods: as in `ds.watching`; may be empty if the model holds a posterior.
        network: name of the submodule to record; "" is the whole model.
        settings: `loader` (None: the trainer's own, if there is batch norm) and `likelihood` of `ds.watching`.
    """

    def __init__(self, methods: Sequence[Callable[..., Posterior]] = (), *, network: str = "", **settings: Any) -> None:
        self.methods, self.network, self.settings = methods, network, settings
        self.posteriors: list[Posterior] = []
        self.max_norm = 0.0  # 0 does not clip
        self._run = ExitStack()

    def start_run(self, model: nn.Module, optimizer: Optimizer, *, steps: int, done: int, loader: Any) -> None:
        """Begins to watch the run of a model; `loader`: the trainer's own."""
        self.end_run(InterruptedError())  # an earlier run that failed
        inside: list[Any] = [each for each in model.modules() if isinstance(each, Posterior) and each.base is None]
        self.posteriors, self.ensembles = [], [each for each in inside if each.particles.members > 1]
        stacked = {id(parameter) for each in self.ensembles for parameter in each.parameters()}
        self.others = [parameter for parameter in model.parameters() if id(parameter) not in stacked]
        settings = {"loader": loader if statistics_layers(model) else None, **self.settings}
        for base in inside or [model.get_submodule(self.network)]:
            run = watching(base, optimizer, self.methods, steps=steps, done=done, **settings)
            self.posteriors += self._run.enter_context(run)

    def clip_ensembles(self) -> None:
        """Clips members one by one, and the rest as one, in place of the trainer, which would clip all as one."""
        if self.max_norm:
            for each in self.ensembles:
                each.clip_grad_norm_(self.max_norm)
            clip_grad_norm_(self.others, self.max_norm)

    def end_run(self, error: BaseException | None = None) -> None:
        """Stops watching and draws the posteriors; after an error, nothing is drawn."""
        run, self._run = self._run, ExitStack()
        run.__exit__(None if error is None else type(error), error, None)

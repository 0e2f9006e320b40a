"""What the callbacks for other libraries' trainers share: `watching` from the beginning of a run to its end, and clipping."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from dissensus.core.likelihood import Likelihood
from dissensus.core.posterior import Posterior
from dissensus.training.watching import watching
from dissensus.utils.batch_norm_names import statistics_layers


class TrainerWatch:
    """Base class of the callbacks.

    Posteriors inside the trainer's model are begun, observed, clipped member by member and drawn at the end of the run;
    if there are none, `methods` record its network.

    Args:
        methods: as in `ds.watching`, such as [ds.SWAG, ds.TRADI]; may be empty if the model holds a posterior.
        network: name of the submodule to record; "" is the whole model.
        loader: the training batches (x, y), for batch norm; None is the trainer's own loader.
        likelihood: as in `ds.watching`.

    After training, `posteriors` has one of each method, or those inside the model.
    """

    def __init__(
        self,
        methods: Sequence[Callable[..., Posterior] | Posterior] = (),
        *,
        network: str = "",
        loader: Iterable[Any] | None = None,
        likelihood: Likelihood | None = None,
    ) -> None:
        self.methods, self.network, self.loader, self.likelihood = methods, network, loader, likelihood
        self.posteriors: list[Posterior] = []
        self.ensembles: list[Posterior] = []  # those that must be clipped member by member
        self.others: list[Tensor] = []  # parameters of the model outside them
        self.max_norm = 0.0  # 0 does not clip
        self._run: ExitStack | None = None

    def start_run(
        self, model: nn.Module, optimizers: Sequence[Optimizer], *, steps: int, done: int, loader: Any
    ) -> None:
        """Begins to watch the run of a model; `loader`: the trainer's own."""
        self.stop_run()
        inside = [each for each in model.modules() if isinstance(each, Posterior) and each.base is None]
        if inside and self.likelihood is not None:
            raise ValueError("expected no likelihood with a posterior in the model, got one; the posterior has its own")
        if self.loader is not None:
            loader = self.loader
        elif not statistics_layers(model):
            loader = None
        self.posteriors, self.ensembles = [], [each for each in inside if each.particles.members > 1]
        stacked = {id(parameter) for each in self.ensembles for parameter in each.parameters()}
        self.others = [parameter for parameter in model.parameters() if id(parameter) not in stacked]
        with ExitStack() as run:
            for base in inside or [model.get_submodule(self.network)]:
                mine = _optimizer_of(base, optimizers)
                settings: dict[str, Any] = {
                    "steps": steps,
                    "done": done,
                    "loader": loader,
                    "likelihood": self.likelihood,
                }
                self.posteriors += run.enter_context(watching(base, mine, self.methods, **settings))
            self._run = run.pop_all()

    def clip_ensembles(self) -> None:
        """Clips gradients member by member, in place of the trainer, which would clip all members as one."""
        if self.max_norm:
            for each in self.ensembles:
                each.clip_grad_norm_(self.max_norm)
            clip_grad_norm_(self.others, self.max_norm)

    def end_run(self) -> None:
        """Draws the posteriors and stops watching."""
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def stop_run(self, error: BaseException | None = None) -> None:
        """Stops watching a run that was interrupted; nothing is drawn."""
        run, self._run = self._run, None
        if run is not None:
            error = error or InterruptedError("the run was not finished")
            ExitStack.__exit__(run, type(error), error, None)


def _optimizer_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> Optimizer:
    """The optimiser that holds parameters of the module; the first if none does, which is refused later."""
    held = {id(parameter) for parameter in module.parameters()}
    found = (o for o in optimizers if any(id(p) in held for group in o.param_groups for p in group["params"]))
    return next(found, optimizers[0])

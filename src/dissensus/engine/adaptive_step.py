"""A training step that begins plainly and changes to a graph, or to compiled code, once the steps that are left pay for it."""

from collections.abc import Callable

from torch import Tensor

from dissensus.core.batch import Batch
from dissensus.engine.break_even import FUSED, MANY, BreakEven, is_deterministic, known_pace, may_pay
from dissensus.engine.cuda_graphs import timed_convolutions
from dissensus.engine.strategies import Plan, compiled_plan, make_plan, make_strategy, may_compile, plain_plan
from dissensus.engine.training_step import CapturedStep, EagerStep, request_key
from dissensus.kernels.channel_launch import load_wanted
from dissensus.kernels.fused_norm import can_fuse_layers


class AdaptiveStep:
    """Runs members as `engine` says; "auto" plainly at first, and faster as soon as that pays (`break_even`).

    `step`: an eager step, whose strategy is set here. `count`: batches to come, None if nobody knows.
    """

    run: Callable[[Batch], Tensor]  # a call: of the step itself once all is settled
    plan: Plan  # in use
    before: Plan  # before the last preparation

    def __init__(self, step: EagerStep, engine: str, batch: Batch, *, count: int | None) -> None:
        posterior, precision, self.eager = step.posterior, step.precision, step
        self.prepared = ""  # since when, and what was measured, for `engine_name`
        self.captured: CapturedStep | None = None
        self.ways: list[tuple[BreakEven, Callable[[Batch, BreakEven], None]]] = []
        if engine != "auto":
            self._use(make_plan(engine, posterior, batch, precision=precision))
            if count is None or count >= MANY:
                self.run = self._time_convolutions
            return
        plans, device = posterior.particles.runner.plans, posterior.device
        key = request_key(posterior, batch, precision)
        # Not before the second batch: an optimiser makes its state at its first step, and not in a graph.
        if device.type == "cuda":
            graph = known_pace(plans, key, fusing=FUSED * can_fuse_layers(posterior.particles.templates))
            if may_pay(graph, count):
                self.ways.append((BreakEven(graph, device, count, first=1), self._prepare_graph))
        compiled = known_pace(plans, key, compiles=True)
        if may_pay(compiled, count) and may_compile(posterior) and not is_deterministic():
            self.ways.append((BreakEven(compiled, device, count), self._prepare_compiled))
        self._use(plain_plan(posterior, plans.get(("activations", *key), (None,))[0]))

    def __call__(self, batch: Batch) -> Tensor:
        """(M,) losses on the batch; the next call may overwrite them."""
        return self.run(batch)

    def _time_convolutions(self, batch: Batch) -> Tensor:
        """The first call of a long run whose way was asked for: cuDNN may time its algorithms."""
        self._find_run()
        with timed_convolutions(self.eager.posterior.device):
            return self.run(batch)

    def _consider(self, batch: Batch) -> Tensor:
        """A call before all is settled: it is timed, or changes the way."""
        if self.eager.pending:
            return (self.captured or self.eager)(batch)
        way, prepare = self.ways[0]
        if way.begin_call():
            self.before = self.plan
            prepare(batch, way)
        losses = (self.captured or self.eager)(batch)
        way.end_call(fast=self.captured is None or self.captured.failed or bool(self.captured.graphs))
        if way.is_settled:
            self._settle(way)
        return losses

    def finish(self) -> None:
        """Steps with the gradients accumulated so far, if there are any."""
        self.eager.finish()

    def check(self) -> None:
        """Raises Diverged if a GPU has skipped bad steps, or if weights are not finite."""
        (self.captured or self.eager).check()

    def close(self) -> None:
        """Frees graphs, and restores the optimiser's settings."""
        self._release_graphs()
        self.eager.close()

    @property
    def engine_name(self) -> str:
        """How members run, such as "loop+captured", and since when, with what was measured."""
        return (self.captured or self.eager).engine_name + self.prepared

    def _use(self, plan: Plan) -> None:
        self._release_graphs()
        self.plan = plan
        self.taken = plan.taken  # of the way in use: not of one that has been left
        self.eager.strategy = plan.tried or make_strategy(
            plan.kind, compiled=plan.compiled, fused=plan.fused, keeps=plan.keeps
        )
        self.captured = CapturedStep(self.eager) if plan.captured else None
        self.eager.in_place = plan.kind == "loop" and not (plan.compiled or plan.captured)
        self._find_run()

    def _find_run(self) -> None:
        self.run = self._consider if self.ways else self.captured or self.eager

    def _release_graphs(self) -> None:
        if self.captured is not None:
            self.captured.close()
        self.captured = None

    def _settle(self, way: BreakEven) -> None:
        """Keeps the faster way, and goes on to the next."""
        if way.prepared_at is not None and (way.by_count or way.pace.saves):
            self.prepared = f" (since batch {way.prepared_at}{'' if way.by_count else f': {way.pace}'})"
        elif way.prepared_at is not None and self.plan is not self.before:
            self._use(self.before)
        self.ways.pop(0)
        for following, _ in self.ways:
            following.count = None if way.count is None else way.count - way.calls
        self._find_run()

    def _prepare_graph(self, batch: Batch, way: BreakEven) -> None:
        how = {"timed": way.times_convolutions, "fused": way.fused}
        if way.fused or not way.pace.fusing:
            load_wanted()
        self._use(make_plan("auto", self.eager.posterior, batch, precision=self.eager.precision, **how))
        if self.captured is not None and way.pace.is_known and way.pace.fused >= way.fused:
            self.captured.warm_up = 0  # its kernels are loaded

    def _prepare_compiled(self, batch: Batch, way: BreakEven) -> None:
        plan = compiled_plan(self.plan, self.eager.posterior, batch, precision=self.eager.precision)
        if plan is self.plan:
            way.settle()
        else:
            self._use(plan)

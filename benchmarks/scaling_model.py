"""What a training step costs on R_m × R_d ranks: bytes, memory and seconds, and a simulation of slow and failing ranks.

Letters: M members of P own and S shared parameters, batches of B examples, s bytes per number, R_m ranks on the members axis
and R_d on the data axis; a rank has m = ⌈M / R_m⌉ members and b = ⌈B / R_d⌉ examples. Nothing here needs torch.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
PASSES: dict[Kind, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # over the payload, in a ring


@dataclass(frozen=True)
class Collective:
    """One exchange among `ranks`. `payload`: bytes of the whole tensor, which every rank has before or after it."""

    kind: Kind
    axis: str
    ranks: int
    payload: float
    tensors: str = ""

    @property
    def sent(self) -> float:
        """Bytes that one rank sends: all but its own part, once in each pass of the ring."""
        return PASSES[self.kind] * (self.ranks - 1) / self.ranks * self.payload

    def seconds(self, bandwidth: float, latency: float) -> float:
        """By a ring or, where messages are small, a tree: the quicker of the two, as NCCL chooses."""
        if self.ranks == 1:
            return 0.0
        hops = PASSES[self.kind] * (self.ranks - 1)
        ring = hops * latency + self.sent / bandwidth
        passes = PASSES[self.kind]
        tree = passes * math.ceil(math.log2(self.ranks)) * latency + passes * self.payload / bandwidth
        return min(ring, tree)


@dataclass(frozen=True)
class Work:
    """A method on a network. `compared`: numbers of one member that others see, in all and for each example of a batch.

    Seconds of one rank's step: `start` + `each` × members × examples, as measured on one device; `activations`: bytes of one
    member's forward pass for one example; `moments`: numbers that the optimiser keeps for each parameter.
    """

    name: str
    members: int
    own: int
    shared: int = 0
    batch: int = 128
    compared: int = 0
    compared_each: int = 0
    bytes: int = 4
    moments: int = 2
    start: float = 0.0
    each: float = 0.0
    activations: int = 0
    at_once: bool = True  # activations of all members of a rank live together
    agrees: bool = True  # ranks of the members axis agree at every step whether all is finite
    fully: bool = False  # tensors are divided over the data axis, too (`fully_shard`)

    @property
    def coupled(self) -> bool:
        return bool(self.compared or self.compared_each)


@dataclass(frozen=True)
class Layout:
    """Ranks on the two axes."""

    members: int = 1
    data: int = 1

    @property
    def ranks(self) -> int:
        return self.members * self.data


def chosen(work: Work, ranks: int) -> Layout:
    """As many ranks on the members axis as share the members evenly, the rest on the data axis."""
    members = math.gcd(work.members, ranks)
    return Layout(members, ranks // members)


def collectives(work: Work, layout: Layout) -> list[Collective]:
    """What is exchanged in one step."""
    m, b = math.ceil(work.members / layout.members), work.batch
    s, found = work.bytes, []
    trained, losses = s * (m * work.own + work.shared), s * m
    if layout.data > 1 and work.fully:
        # Parameters are gathered for the forward and again for the backward pass.
        found += [Collective("all_gather", "data", layout.data, trained, "parameters")] * 2
        found.append(Collective("reduce_scatter", "data", layout.data, trained, "gradients"))
        found.append(Collective("all_reduce", "data", layout.data, losses, "losses"))
    elif layout.data > 1:
        found.append(Collective("all_reduce", "data", layout.data, trained + losses, "gradients and losses"))
    if layout.members > 1 and work.agrees:
        found.append(Collective("all_reduce", "members", layout.members, 4, "whether all is finite"))
    if layout.members > 1 and work.shared:
        found.append(Collective("all_reduce", "members", layout.members, s * work.shared, "shared gradients"))
    if work.coupled and layout.data > 1 and work.compared_each:
        found.append(Collective("all_gather", "data", layout.data, s * m * b * work.compared_each, "z of examples"))
    if work.coupled and layout.members > 1:
        z = work.members * (work.compared + b * work.compared_each)
        found.append(Collective("all_gather", "members", layout.members, s * z, "z of members"))
    return found


def sent(work: Work, layout: Layout) -> float:
    """Bytes that one rank sends in one step."""
    return sum(each.sent for each in collectives(work, layout))


def memory(work: Work, layout: Layout) -> float:
    """Bytes of one rank: weights, gradients, the optimiser's moments and activations of members and examples that lie there.

    Where members lie in different ranks, each keeps the weights of all as well, as they were after the last epoch.
    """
    m, b = math.ceil(work.members / layout.members), math.ceil(work.batch / layout.data)
    parameters = m * work.own + work.shared
    kept = parameters * (2 + work.moments) * work.bytes / (layout.data if work.fully else 1)
    if layout.members > 1:
        kept += work.members * work.own * work.bytes
    return kept + (m if work.at_once else 1) * b * work.activations


@dataclass(frozen=True)
class Cluster:
    """Assumptions about machines: nodes of `node` GPUs, bandwidths in bytes a second and GPU, seconds, hours.

    `excess`: a rank's step takes (1 + excess × Exp(1)) times the shortest one; `disk`: bytes a second of all ranks together.
    """

    node: int = 8
    inside: float = 300e9
    between: float = 40e9
    latency: float = 8e-6
    excess: float = 0.03
    hours: float = 50_000.0
    restart: float = 180.0
    disk: float = 5e9

    def bandwidth(self, layout: Layout, axis: str) -> float:
        """The data axis lies inside nodes as long as it fits; the members axis spans them."""
        inside = layout.data if axis == "data" else layout.ranks
        return self.inside if inside <= self.node else self.between


def compute_seconds(work: Work, layout: Layout) -> float:
    m, b = math.ceil(work.members / layout.members), math.ceil(work.batch / layout.data)
    return work.start + work.each * m * b


def exchange_seconds(work: Work, layout: Layout, cluster: Cluster) -> float:
    """Without overlap with the backward pass: the upper end."""
    each = (c.seconds(cluster.bandwidth(layout, c.axis), cluster.latency) for c in collectives(work, layout))
    return sum(each)


@dataclass(frozen=True)
class Prediction:
    """Of one step, on average, and of a long run. `efficiency`: one device's time over ranks × time, all losses in."""

    layout: Layout
    step: float
    compute: float
    exchange: float
    waiting: float
    sent: float
    memory: float
    kept: float  # share of the time that is left after failures, restarts and checkpoints
    interval: float  # seconds between two checkpoints
    efficiency: float


def epoch_seconds(
    work: Work, layout: Layout, cluster: Cluster, steps: int, random: np.random.Generator
) -> tuple[float, float]:
    """(seconds, of which waiting for slow ranks) of a simulated epoch.

    Ranks that exchange something wait for each other at every step; rows of the members axis that exchange nothing with
    each other only at the end of the epoch.
    """
    compute, exchange = compute_seconds(work, layout), exchange_seconds(work, layout, cluster)
    tied = layout.members > 1 and (work.agrees or work.coupled or work.shared > 0)
    rows, together = (1, layout.ranks) if tied else (layout.members, layout.data)
    total = np.zeros(rows)
    for _ in range(steps):
        excess = random.exponential(cluster.excess, size=(rows, together)).max(1)
        total += compute * (1 + excess) + exchange
    alone = steps * (compute * (1 + cluster.excess) + exchange)  # a rank that never waits
    return float(total.max()), float(total.max() - alone)


def run_seconds(
    useful: float, interval: float, writing: float, rate: float, restart: float, random: np.random.Generator
) -> float:
    """Seconds a simulated run of `useful` seconds takes: what is lost since the last checkpoint is done again.

    `rate`: failures a second, of all ranks. A checkpoint takes `writing` seconds after every `interval`. What fails while it
    restarts begins the restart again.
    """
    clock, done = 0.0, 0.0
    while done < useful:
        segment = min(interval, useful - done)
        failure = random.exponential(1 / rate) if rate else math.inf
        if failure >= segment + writing:
            clock, done = clock + segment + writing, done + segment
            continue
        clock += failure
        while (again := random.exponential(1 / rate)) < restart:
            clock += again
        clock += restart
    return clock


def expected_segment(length: float, rate: float, restart: float) -> float:
    """Expected seconds of work of this length that failures begin again, restarts included; the closed form.

    (e^{λ r} / λ)(e^{λ l} − 1) with rate λ, length l and restart r, which may fail itself (Daly 2006).
    """
    return math.exp(rate * restart) / rate * math.expm1(rate * length) if rate else length


def best_interval(writing: float, rate: float) -> float:
    """Seconds between checkpoints that cost least to first order (Young 1974): √(2 writing / rate)."""
    return math.sqrt(2 * writing / rate)


def predicted(work: Work, layout: Layout, cluster: Cluster, *, steps: int = 400, seed: int = 0) -> Prediction:
    """Simulated means, with one device's time for the same work as measure of efficiency."""
    random = np.random.default_rng(seed)
    compute, exchange = compute_seconds(work, layout), exchange_seconds(work, layout, cluster)
    seconds, waiting = epoch_seconds(work, layout, cluster, steps, random)
    rate = layout.ranks / (3600 * cluster.hours)
    parameters = work.members * work.own + work.shared
    writing = max(1.0, parameters * (1 + work.moments) * work.bytes / cluster.disk)
    interval = best_interval(writing, rate)
    useful = 40 * interval
    runs = [run_seconds(useful, interval, writing, rate, cluster.restart, random) for _ in range(200)]
    kept = useful / float(np.mean(runs))
    alone = compute_seconds(work, Layout()) * (1 + cluster.excess)
    step = seconds / steps
    efficiency = kept * alone / (layout.ranks * step)
    return Prediction(
        layout, step, compute, exchange, waiting / steps, sent(work, layout), memory(work, layout), kept, interval,
        efficiency,
    )  # fmt: skip

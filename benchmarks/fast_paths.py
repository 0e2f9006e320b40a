"""What each fast path gains in a row that users see: with it and without it, in turns; CSV and page out.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/fast_paths.py                       # those of a CPU
    python benchmarks/fast_paths.py --device cuda                                        # those of a GPU
    python benchmarks/fast_paths.py --paths "stacked linear layers" --rounds 9

A fast path gives the same numbers as plainer code, sooner. It stays while it makes a row at least a tenth faster on the
machine that it is for. The switch of each path is here, by replacing a function for as long as a side is built and runs: the
library has none. Each round times both sides, in an order that alternates; numbers are medians and quartiles over rounds.
`--page` only writes the page from the rows there are.
"""

import argparse
import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple
from unittest.mock import patch

import latency
import torch
from rows import Row, by_key, made_on, read_rows, write_rows
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from turns import in_turns

import dissensus as ds
from dissensus.core import gradients, member_runner, particles
from dissensus.core.batch import Batch
from dissensus.engine import build_step, cuda_graphs, fast_optimisers, prediction_loop, strategies, training_step
from dissensus.kernels import channel_launch, cpu_products, fused_conv, fused_norm, multi_tensor
from dissensus.methods import forde
from dissensus.utils import tensor_tree
from dissensus.utils.tensor_tree import all_submodules

HERE = Path(__file__).parent
FILE, PAGE = HERE / "results" / "fast_paths.csv", HERE.parent / "docs" / "developing" / "fast-paths.md"
SOURCE = Path(ds.__file__).parent
Call = Callable[[], object]
Switch = Callable[[], AbstractContextManager[object]]


class FastPath(NamedTuple):
    """A path, the code that would go with it, what switches it off, and the rows of users that it is for."""

    name: str
    code: tuple[str, ...]  # "module" or "module:function or class"
    off: Switch
    rows: tuple[str, ...]
    device: str = "cpu"


# ------------------------------------------------------------------ rows that users see


def one_input(method: str, network: str, device: str) -> Call:
    """The prediction of one input, as `latency.py` times it."""
    make, shape = latency.NETWORKS[network]
    return latency.METHODS[method](make, torch.randn(1, *shape))[0]


def step(
    make: Callable[[], ds.Posterior], shape: tuple[int, ...], batch: int, engine: str, device: str,
    precision: torch.dtype | None = None, adam: bool = False,
) -> Call:  # fmt: skip
    """A training step of all members on one batch, by SGD or the default optimiser."""
    made = make().to(device).train()
    x, y = torch.randn(batch, *shape, device=device), torch.randint(10, (batch,), device=device)
    sgd = partial(torch.optim.SGD, made.parameter_groups(1e-3), lr=1e-3, momentum=0.9)
    optimizer = made.default_optimizer() if adam else sgd()
    if device == "cuda":
        fast_optimisers.use_channels_last(made.particles)
    first = Batch(x, y)
    run = build_step(engine, made, optimizer, first, count=5000, precision=precision)

    def train() -> None:
        made.before_step(first)
        run(first)

    while run.ways:  # until nothing is left to prepare
        train()
    return train


def prediction(images: int, device: str) -> Call:
    """Images by ten ResNet-18 in half precision."""
    made = ds.DeepEnsemble([ds.nets.ResNet(18) for _ in range(10)]).to(device)
    data = ds.data.Batches(torch.randn(images, 3, 32, 32, device=device), torch.zeros(images).long(), batch_size=128)
    return lambda: ds.summarise(made, data, precision="bf16")


def small_batches(device: str) -> Call:
    """6,400 rows by one MLP."""
    made, rows = ds.MAP(latency.mlp()).to(device), torch.randn(6400, 784, device=device)
    data = ds.data.Batches(rows, torch.zeros(len(rows)).long(), batch_size=32)
    return lambda: ds.predict(made, data)


def networks(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    return [make() for _ in range(count)]


MLP, RESNET = latency.NETWORKS
WIDE = partial(ds.nets.MLP, 64, 10, hidden=(512, 512, 512))
IMAGE = (3, 32, 32)
BF16 = torch.bfloat16
ROWS: dict[str, Callable[[str], Call]] = {
    f"one input, {method}, {network}": partial(one_input, method, network)
    for network in latency.NETWORKS
    for method in latency.METHODS
}
ROWS |= {
    f"step, MAP, {MLP}, batch 16": partial(step, lambda: ds.MAP(latency.mlp()), (784,), 16, "loop"),
    f"step, MAP, {MLP}, batch 16, AdamW": partial(
        step, lambda: ds.MAP(latency.mlp()), (784,), 16, "loop", adam=True
    ),
    f"step, MAP, {RESNET}, batch 16": partial(step, lambda: ds.MAP(latency.resnet20()), IMAGE, 16, "loop"),
    f"200 batches of 32, MAP, {MLP}": small_batches,
    "step, DeepEnsemble, M = 20, MLP 784-200-200-200-10, batch 16": partial(
        step, lambda: ds.DeepEnsemble(networks(latency.mlp, 20)), (784,), 16, "vectorised"
    ),
    "step, DeepEnsemble, M = 5, ResNet-20, batch 8": partial(
        step, lambda: ds.DeepEnsemble(networks(latency.resnet20, 5)), IMAGE, 8, "loop"
    ),
    "step, BatchEnsemble, M = 4, MLP 64-512-512-512-10, batch 128": partial(
        step,
        lambda: ds.BatchEnsemble(WIDE(), members=4, modulation=ds.Modulation.sign()), (64,), 128, "vectorised",
    ),
    "step, FoRDE, M = 2, ResNet-20, batch 32": partial(
        step, lambda: ds.FoRDE(networks(latency.resnet20, 2)), IMAGE, 32, "loop"
    ),
    "step, DeepEnsemble, M = 10, ResNet-18, batch 128, bf16": partial(
        step, lambda: ds.DeepEnsemble(networks(partial(ds.nets.ResNet, 18), 10)), IMAGE, 128, "auto", precision=BF16
    ),
    "step, FoRDE, M = 10, ResNet-18, batch 128, bf16": partial(
        step, lambda: ds.FoRDE(networks(partial(ds.nets.ResNet, 18), 10)), IMAGE, 128, "auto", precision=BF16
    ),
    "step, NodeBNN, ResNet-18, batch 128, bf16": partial(
        step, lambda: ds.NodeBNN(ds.nets.ResNet(18), data_size=50_000), IMAGE, 128, "auto", precision=BF16
    ),
    "step, TRADI, ResNet-18, batch 128, bf16": partial(
        step, lambda: ds.TRADI(ds.nets.ResNet(18)), IMAGE, 128, "auto", precision=BF16
    ),
    **{f"{n:,} images, DeepEnsemble, M = 10, ResNet-18, bf16": partial(prediction, n) for n in (1280, 10_000)},
}  # fmt: skip
ENSEMBLE, DROPOUT = (f"one input, {method}, " for method in list(latency.METHODS)[1:])
STEPS, (PREDICTION, PREDICTIONS) = list(ROWS)[-6:-2], list(ROWS)[-2:]


# ------------------------------------------------------------------ switches


def without(holder: Any, name: str, plain: Any) -> Switch:
    """A switch that puts something plain in the place of a function or class."""
    return lambda: patch.object(holder, name, plain)


def without_all(*switches: Switch) -> Switch:
    @contextmanager
    def all_off() -> Iterator[None]:
        with ExitStack() as stack:
            for switch in switches:
                stack.enter_context(switch())
            yield

    return all_off


def refuse_capture(*_: Any, **__: Any) -> None:
    raise RuntimeError("switched off")


def functional_call(module: nn.Module, tensors: Any, *args: Any, places: Any = None) -> Any:
    return torch.func.functional_call(module, tensors, args)


def map_members(self: Any, function: Any, *args: Any, varying: Any = None, how: Any = None) -> Any:
    """`Particles.map_members` as if the one member were not the caller's module."""
    shared, common = tensor_tree.named_tensors(self.shared)

    def one(row: Any) -> Any:
        inner = args if varying is None else (row.varying, *args)
        return self.call(function, {**shared, **row.own}, {**common, **row.buffers}, *inner)

    count = self.members if not varying else len(next(iter(varying.values())))
    return self.run(one, self.rows(varying, common), count, how=how)[0]


def map_pytrees(function: Callable[[Any], Tensor], trees: Any) -> Any:
    return pytree.tree_map(lambda *column: function(column), *trees)


@contextmanager
def only_modulated(self: Any, device: torch.device) -> Iterator[None]:
    """`StackedLinear.use_stacked_forwards` with torch's forward of linear layers."""
    for attributes in self.modulated:
        attributes["members_at_once"] = True
    yield
    for attributes in self.modulated:
        attributes["members_at_once"] = False


PATHS = [
    FastPath(
        "submodules found once",
        ("utils.tensor_tree:SubmoduleCache",),
        without(tensor_tree.SubmoduleCache, "__call__", lambda self, *m, trees=True: all_submodules(*m, trees=trees)),
        (f"one input, MAP, {RESNET}", f"one input, MAP, {MLP}", f"{ENSEMBLE}{RESNET}"),
    ),
    FastPath(
        "the caller's module as it is, in predictions",
        ("core.member:ForwardAttributes.run_with_own_tensors",),
        without(particles.Particles, "map_members", map_members),
        (f"one input, MAP, {MLP}", f"one input, MAP, {RESNET}"),
    ),
    FastPath(
        "the caller's module as it is, in training",
        ("core.gradients:can_train_in_place", "core.gradients:in_place_gradients", "utils.tensor_tree:OwnTensors"),
        without_all(*(without(each, "can_train_in_place", lambda *_: False) for each in (gradients, training_step))),
        (f"step, MAP, {MLP}, batch 16", f"step, MAP, {RESNET}, batch 16"),
    ),
    FastPath(
        "the optimiser's kernel alone",
        ("engine.fast_optimisers:FusedStep", "engine.fast_optimisers:_FusedGroup"),
        without(fast_optimisers.FusedStep, "__call__", lambda self: self.optimizer.step()),
        (f"step, MAP, {MLP}, batch 16, AdamW", f"step, MAP, {MLP}, batch 16"),
    ),
    FastPath(
        "small batches read together",
        ("engine.loader:Loader.joined_batches", "core.batch:split_rows"),
        without(prediction_loop, "TOGETHER", 1),
        (f"200 batches of 32, MAP, {MLP}",),
    ),
    FastPath(
        "vmap entered by hand",
        ("core.member_runner:run_by_vmap",),
        without(
            member_runner, "run_by_vmap", lambda one, rows, count: torch.func.vmap(one, randomness="different")(rows)
        ),
        (f"{ENSEMBLE}{MLP}", f"{DROPOUT}{MLP}"),
    ),
    FastPath(
        "trees mapped by hand",
        ("core.member_runner:map_trees",),
        without_all(*(without(each, "map_trees", map_pytrees) for each in (member_runner, gradients))),
        (f"{ENSEMBLE}{MLP}", f"step, MAP, {MLP}, batch 16", f"{ENSEMBLE}{RESNET}"),
    ),
    FastPath(
        "tensors put into their places",
        ("utils.tensor_tree:call_with_tensors", "utils.tensor_tree:TensorPlaces", "utils.tensor_tree:assign_tensors"),
        without(particles, "call_with_tensors", functional_call),
        (f"{ENSEMBLE}{MLP}", f"{DROPOUT}{MLP}", "step, DeepEnsemble, M = 5, ResNet-20, batch 8"),
    ),
    FastPath(
        "one network's copy kept",
        ("core.particles:SingleMemberCache",),
        without(particles.SingleMemberCache, "__call__", lambda self, given: particles.single_member(given, 0)),
        (f"{DROPOUT}{MLP}", f"{DROPOUT}{RESNET}"),
    ),
    FastPath(
        "stacked linear layers",
        ("kernels.cpu_products:StackedLinear", "kernels.cpu_products:_Transposed"),
        without(cpu_products.StackedLinear, "use_stacked_forwards", only_modulated),
        ("step, DeepEnsemble, M = 20, MLP 784-200-200-200-10, batch 16", f"{ENSEMBLE}{MLP}"),
    ),
    FastPath(
        "fast second derivatives",
        ("kernels.double_backward",),
        without(forde, "fast_second_derivatives", lambda **_: nullcontext()),
        ("step, FoRDE, M = 2, ResNet-20, batch 32",),
    ),
    FastPath(
        "small products without oneDNN",
        ("kernels.cpu_products:has_small_products",),
        without(member_runner, "has_small_products", lambda network: False),
        ("step, DeepEnsemble, M = 20, MLP 784-200-200-200-10, batch 16", f"one input, MAP, {MLP}"),
        "arm",
    ),
    FastPath(
        "batch norm with the layers after it",
        ("kernels.fused_norm", "kernels.lazy_tensor", "kernels.norm_launch", "kernels.triton_norm"),
        without_all(*(without(each, "fuse_layers", nullcontext) for each in (strategies, cuda_graphs))),
        (*STEPS[:2], PREDICTION),
        "cuda",
    ),
    FastPath(
        "convolutions with the layers after them",
        ("kernels.fused_conv:PendingConvolution",),
        lambda: patch.dict(fused_norm.OVERRIDES, {torch.conv2d: lambda function, *a, **k: function(*a, **k)}),
        (PREDICTION,),
        "cuda",
    ),
    FastPath(
        "narrow convolutions",
        ("kernels.triton_first_conv", "kernels.fused_conv:has_narrow_kernel", "kernels.fused_conv:_NarrowConvolution"),
        without(fused_conv, "has_narrow_kernel", lambda *_: False),
        (STEPS[0], PREDICTION, PREDICTIONS),
        "cuda",
    ),
    FastPath(
        "casts and folded weights kept",
        ("kernels.weight_cache",),
        without(cuda_graphs, "WeightCache", lambda tensors: None),
        (PREDICTION, PREDICTIONS),
        "cuda",
    ),
    FastPath(
        "second derivatives on a GPU",
        ("kernels.double_backward",),
        without(forde, "fast_second_derivatives", lambda **_: nullcontext()),
        (STEPS[1],),
        "cuda",
    ),
    FastPath(
        "CUDA graphs",
        ("engine.cuda_graphs", "engine.training_step:CapturedStep"),
        without(cuda_graphs.Graph, "__init__", refuse_capture),
        (STEPS[0], PREDICTION),
        "cuda",
    ),
    FastPath(
        "kernels over many tensors",
        ("kernels.multi_tensor", "kernels.triton_multi_tensor"),
        without(multi_tensor, "can_run_kernels", lambda device: False),
        (STEPS[0], STEPS[3]),
        "cuda",
    ),
    FastPath(
        "channel programs",
        ("kernels.channel_launch", "kernels.triton_channels", "layers.batch_norm:_NormaliseFunction"),
        without(channel_launch, "channel_layout", lambda *_, **__: None),
        (STEPS[2],),
        "cuda",
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "arm", "cuda"), default="cpu")
    parser.add_argument("--paths", nargs="+", choices=[path.name for path in PATHS])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.2, help="of one side in a round, about")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    given = parser.parse_args()
    rows = read_rows(FILE)
    chosen = [path for path in PATHS if path.device == given.device and (not given.paths or path.name in given.paths)]
    for path in () if given.page else chosen:
        for row in path.rows:
            found = measured(path, row, given.rounds, given.seconds) | made_on(torch_device(given.device))
            print("  ".join(f"{key}={value}" for key, value in found.items()), flush=True)
            rows = [each for each in rows if (each["path"], each["row"]) != (path.name, row)] + [found]
            write_rows(FILE, rows)
    PAGE.write_text(page(rows))


def measured(path: FastPath, row: str, rounds: int, seconds: float) -> Row:
    """Both sides of a row, in turns: medians and quartiles in ms, and the ratio of neighbours."""
    sides: dict[str, Call] = {}
    clock = latency.clock if path.device != "cuda" else time.perf_counter
    for side, switch in (("with", nullcontext), ("without", path.off)):
        torch.manual_seed(0)
        with switch(), torch.random.fork_rng():
            call = ROWS[row](torch_device(path.device))
            for _ in range(5):  # a step is captured after three
                call()
            start = clock()
            repeat(call, nullcontext, 1)
            calls = max(1, int(seconds / (clock() - start)))
        sides[side] = partial(repeat, call, switch, calls)
    times = in_turns(sides, rounds, uncounted=1, clock=clock)
    each = {side: [1e3 * t / sides[side].args[2] for t in found] for side, found in times.items()}  # type: ignore[attr-defined]
    ratios = [plain / fast for fast, plain in zip(each["with"], each["without"], strict=True)]
    found: Row = {"path": path.name, "row": row, "lines": lines_of(path)}
    for side, values in each.items():
        low, middle, high = quantiles(values)
        found |= {f"{side}_ms": f"{middle:.4f}", f"{side}_low": f"{low:.4f}", f"{side}_high": f"{high:.4f}"}
    low, middle, high = quantiles(ratios)
    return found | {"ratio": f"{middle:.3f}", "ratio_low": f"{low:.3f}", "ratio_high": f"{high:.3f}", "rounds": rounds}


def repeat(call: Call, switch: Switch, calls: int) -> None:
    with switch():
        for _ in range(calls):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def torch_device(machine: str) -> str:
    return "cuda" if machine == "cuda" else "cpu"


def lines_of(path: FastPath) -> int:
    """Lines of the code that would go with it; whole files are not imported, since some need Triton."""
    files = [SOURCE / f"{each.replace('.', '/')}.py" for each in path.code if ":" not in each]
    parts = [inspect.getsource(resolve(each)) for each in path.code if ":" in each]
    return sum(len(text.splitlines()) for text in (*(file.read_text() for file in files), *parts))


def resolve(place: str) -> Any:
    """The module, or the function or class in it, of "module:name"."""
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(f"dissensus.{module}")
    for part in name.split(".") if name else ():
        found = getattr(found, part)
    return found


def page(rows: list[Row]) -> str:
    """The page of all paths, with those that did not pay at its end."""
    made = {name: f"<!-- {name} -->\n{table}\n<!-- /{name} -->" for name, table in page_tables(rows)}
    parts = [HEAD, *(f"## {what}\n\n{made[f'fast-paths-{machine}']}" for machine, what in MACHINES.items())]
    return "\n\n".join([*parts, NOTES, f"## Removed\n\n{REMOVED}", made["fast-paths-removed"]]) + "\n"


def page_tables(rows: list[Row]) -> Iterator[tuple[str, str]]:
    """(name of a block, its table): each path's row of the largest ratio, and rows that were never measured."""
    known = {path.name for path in PATHS}
    for machine in MACHINES:
        lines, shown = [*TABLE], list[Row]()
        for path in (each for each in PATHS if each.device == machine):
            found = [row for row in rows if row["path"] == path.name]
            about = f"{path.name} (`{path.code[0].replace(':', '.')}`{', …' * (len(path.code) > 1)})"
            shown += (best := largest_ratios(found))
            lines += [f"| {about} | {r['lines']} | {r['row']} | {measures_of(r)} |" for r in best]
            missing = [row for row in path.rows if row not in {each["row"] for each in found}]
            lines += [f"| {about} | {lines_of(path)} | {row} | not measured | |" for row in missing]
        yield f"fast-paths-{machine}", "\n".join([*lines, *caption(shown, f"--device {machine}")])
    gone = largest_ratios([row for row in rows if row["path"] not in known])
    removed = [f"| {row['path']} | {row['lines']} | {measures_of(row).split(' | ')[1]} |" for row in gone]
    head = ("| path | lines | ratio |", "|---|---|---|")
    yield "fast-paths-removed", "\n".join([*head, *removed, *caption(gone, "")])


def largest_ratios(rows: list[Row]) -> list[Row]:
    """One row of each path: the one that it makes faster than all others."""
    return [max(each, key=lambda row: float(row["ratio"])) for each in by_key(rows, "path").values()]


def caption(rows: list[Row], option: str) -> list[str]:
    """Below a table: the command, the machines and the file."""
    machines = "; ".join(dict.fromkeys(f"{row['device']}, torch {row['torch']}" for row in rows)) or "not measured yet"
    command = f"python benchmarks/fast_paths.py {option}".rstrip()
    return ["", f"*`{command}`; {machines}; the other rows are in `fast_paths.csv`.*"]


def measures_of(row: Row) -> str:
    """Milliseconds with and without the path, and their ratio with its quartiles."""
    fast, plain = (
        f"{v:,.0f}" if v >= 100 else f"{v:#.3g}" for v in (float(row[f"{s}_ms"]) for s in ("with", "without"))
    )
    ratio, low, high = (f"{float(row[key]):.2f}" for key in ("ratio", "ratio_low", "ratio_high"))
    return f"{fast} → {plain} | {ratio} ({low}–{high})"


HEAD = """# Fast paths

Code that computes the same numbers faster than plainer code. A path stays while it makes something that users run at least a
tenth faster on its machine. `benchmarks/fast_paths.py` writes this page and switches each path off: the tables show the case
each path helps most, as medians over rounds in turns, with quartiles of the ratio."""
NOTES = """Two paths below a tenth remain, since a row may lose a tenth in all. Without graphs, the time includes attempts to
capture; `gpu_h200.csv` has a plain loop."""
REMOVED = """These gained less than a tenth; modes only helped networks in training mode, which `fit` leaves; chains only
dense layers of one method on a CPU."""
MACHINES = {"cpu": "On a CPU", "arm": "On an Arm CPU", "cuda": "On a GPU"}
TABLE = ("| path | lines | case | ms, with → without | ratio |", "|---|---|---|---|---|")

if __name__ == "__main__":
    main()

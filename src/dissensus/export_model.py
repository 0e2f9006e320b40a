"""export: a posterior as one file for servers without this library: ONNX, or torch's own .pt2."""

import copy
import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from dissensus.calibration.conformal import INTERVAL_SCORES, Conformal
from dissensus.calibration.selective import Gate
from dissensus.core import batch as batches
from dissensus.core.batch import Inputs
from dissensus.core.calibrated import describe_model
from dissensus.core.drawn_functions import MOMENTS, Predictor
from dissensus.core.member import tensors_by_name
from dissensus.core.member_runner import first_line
from dissensus.core.particles import Particles
from dissensus.core.posterior import Posterior, expect_posterior
from dissensus.core.predictive import CategoricalPredictive, Predictive
from dissensus.engine.tracing import random_operations, trace
from dissensus.layers.factored import FactoredLayer
from dissensus.methods.parts.node_posterior import NodeFunctions
from dissensus.numerics.randomness import preserve_random_state
from dissensus.storage.atomic_files import write_atomically
from dissensus.utils.checks import one_of
from dissensus.utils.extras import require_extra
from dissensus.utils.text import format_bytes
from dissensus.utils.torch_private import ConvNd, TorchStateGuard
from dissensus.version import __version__

log = logging.getLogger("dissensus")

HOST = torch.device("cpu")
# Tolerance between outputs of the file and of `predict`, times the largest above 1; in half precision that many roundings.
CLOSE, ROUNDINGS = 1e-5, 4
RANDOM = (
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout",
)  # fmt: skip
# ONNX's TopK, which sorts, is always stable: equal values stay in their order.
ONNX_FORMS = {
    torch.ops.aten.sort.stable: lambda x, *, stable=None, dim=-1, descending=False: torch.sort(x, dim, descending)
}
Axes = Mapping[int, str]  # an axis of an input -> its name in the file
Checked = tuple[Inputs, dict[str, tuple[Tensor, Tensor]]]  # inputs, and the (least, most) of each output for them


def export(
    posterior: Posterior,
    path: str | os.PathLike[str],
    *,
    example: Any,
    dynamic: Axes | Mapping[str, Axes] | None = None,
) -> None:
    """Writes the computation of `predict` to one file: "m.onnx" for ONNX runtimes, "m.pt2" for `torch.export.load`.

    The file takes the same inputs as `predict`, with any batch size. Its outputs, by name, are mean, total, aleatoric and
    epistemic, as in a `Predictive`, and the posterior's promises: `NAME` (B, C) for conformal sets, `NAME_lower` and
    `NAME_upper` for intervals, `NAME` (B,) for the inputs that a gate accepts. Temperature and calibration are included.
    Before the file is written, its outputs are compared with `predict` on the example.

    Args:
        posterior: a trained posterior; sampling methods must have stored a draw (`fit` does; else `ds.refresh`).
        path: ends in .onnx (needs onnx and onnxscript) or .pt2 (needs only torch).
        example: inputs for `predict`, of any batch size.
        dynamic: other axes of any length, with names: {1: "length"} in every input, or {"input_ids": {1: "length"}, ...} by
            input (those of a tuple are "x0", "x1", ...). The file is also compared on the first half of these axes.

    Raises:
        ValueError: predictions differ from call to call, or the network cannot be traced.
    """
    path = Path(path)
    write = {".onnx": _onnx_bytes, ".pt2": _pt2_bytes}[one_of("the ending", path.suffix, (".onnx", ".pt2"))]
    if path.suffix == ".onnx":
        require_extra("export")
    module = ExportedPosterior(expect_posterior(posterior))
    given = getattr(posterior.inputs, "raw", batches.convert_inputs)(example)
    x = _at_least_two_rows(batches.move_to_device(given, posterior.device))
    axes = _free_axes(x, dynamic or {})
    checked = [_with_outputs(posterior, module, part) for part in (x, batches.map_tensors(x, lambda each: each[:1]))]
    if any(axes):
        try:
            checked.append(_with_outputs(posterior, module, _first_half(x, axes)))
        except Exception as error:
            got = f"{first_line(error)}; name only axes that are free"
            raise ValueError(f"expected a network that takes half of its dynamic axes, got: {got}") from error
    if posterior.classes is not None and len(posterior.classes) != (outputs := checked[0][1]["mean"][0].shape[1]):
        raise ValueError(f"expected the names of {outputs} classes, got {len(posterior.classes)}; name every output")
    _log_size(path, module.predictor)
    # nobody else uses the network while it is traced, on the host
    with posterior.particles.lock_network(), torch.no_grad():
        module, x, failed = module.cpu(), checked[0][0], list[str]()
        for how in ("vectorised", "loop"):
            _set_engine(module.predictor, how)
            try:
                module(x)  # creates tensors that depend on the shape of x, such as masks, outside of the graph
                program = trace(module, x, ONNX_FORMS if path.suffix == ".onnx" else None, axes)
                _check_no_randomness(random_operations(program))
                for part, wanted in checked:
                    _check_outputs(program.module()(*batches.input_tensors(part)), wanted, path)
                content = write(program, module.file_metadata(x), checked, axes)
                break
            except (_RandomGraphError, ImportError):
                raise
            except Exception as error:
                root: BaseException = error
                while root.__cause__ is not None:  # exporters wrap it in advice on how to debug them
                    root = root.__cause__
                failed.append(first_line(root))
        else:
            hint = "simplify its forward" + (", or write .pt2" if path.suffix == ".onnx" else "")
            raise ValueError(f"expected a network and a calibration that can be exported, got: {failed[-1]}; {hint}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically({path: content})


class ExportedPosterior(nn.Module):
    """x -> tensors by name: the computation in the file."""

    def __init__(self, posterior: Posterior) -> None:
        super().__init__()
        self.predictor = posterior.predictor()
        self.inputs, self.dtype = posterior.inputs, posterior.temperature.dtype
        self.traced = getattr(self.inputs, "traceable", False)
        if self.inputs is not None and not self.traced:
            log.warning("the file takes encoded inputs, posterior.inputs(x), because tensors hold no text")
        self.model_metadata = {
            "dissensus": __version__,
            "method": posterior.name,
            "model": describe_model(posterior),
            "classes": None if posterior.classes is None else list(posterior.classes),
            "unit": getattr(posterior.likelihood, "unit", None),
            "inputs": None if self.inputs is None else {"kind": self.inputs.kind, **self.inputs.config()},  # type: ignore[attr-defined]
        }
        self.promises: dict[str, Callable[[Predictive, float], dict[str, Tensor]]] = {}
        self.descriptions: dict[str, str] = {}
        for name, promise in posterior.promises.items():
            if (told := _guarantee_outputs(name, promise)) is not None:
                self.promises[name], self.descriptions[name] = told, str(promise.describe())  # type: ignore[operator]

    def network_inputs(self, x: Inputs) -> Inputs:
        """The file's inputs, transformed to the network's."""
        if self.inputs is None:
            return x
        found: Any = self.inputs.transform(x) if self.traced else x  # type: ignore[attr-defined]
        return found.to(self.dtype)

    def forward(self, x: Inputs) -> dict[str, Tensor]:
        return self.outputs(self.predictor.predictive(self.network_inputs(x)))

    def outputs(self, predictive: Predictive, slack: float = 0.0) -> dict[str, Tensor]:
        """The file's outputs for a predictive, by name; thresholds of sets and gates are raised by a share `slack`."""
        found = {name: getattr(predictive, name) for name in MOMENTS}
        for name, promised in self.promises.items():
            if found.keys() & (more := promised(predictive, slack)):
                raise ValueError(f"expected a promise of another name than an output's, got {name!r}; rename it")
            found |= more
        return found

    def file_metadata(self, x: Inputs) -> dict[str, Any]:
        """Metadata stored in the file, as JSON values."""
        classes = isinstance(self.predictor.predictive(self.network_inputs(x)), CategoricalPredictive)
        told = {"mean": "probabilities" if classes else "means", "functions": self.predictor.drawn.members}
        facts = {name: value for name, value in (self.model_metadata | told).items() if value is not None}
        return facts | {"promises": self.descriptions}


class _RandomGraphError(ValueError):
    """An error that no other way of tracing would avoid."""


def _guarantee_outputs(name: str, promise: nn.Module) -> Callable[[Predictive, float], dict[str, Tensor]] | None:
    """The outputs of a promise as a function of (predictive, slack); None, with a warning, if it needs other inputs."""
    if isinstance(promise, Gate):
        gate, threshold = promise, torch.tensor(promise.threshold, dtype=torch.float64)
        return lambda predictive, slack: {name: gate.decide(predictive).score < _add_slack(threshold, slack)}
    if not isinstance(promise, Conformal) or any(promise.facts[each] for each in ("weighted", "randomised")) or (
        promise.facts["by"] == "group"
    ):  # fmt: skip
        log.warning("%s is not in the file: besides inputs it needs weights, groups or random numbers", name)
        return None
    thresholds = promise.thresholds(torch.ones(1, dtype=torch.float64))

    def outputs(predictive: Predictive, slack: float) -> dict[str, Tensor]:
        intervals = promise.score in INTERVAL_SCORES
        at = _add_slack(thresholds, 0.0 if intervals else slack).to(predictive.mean.device)
        if intervals:
            return dict(zip((f"{name}_lower", f"{name}_upper"), promise.interval_below(predictive, at), strict=True))
        return {name: promise.set_below(predictive, at)}

    return outputs


def _add_slack(values: Tensor, slack: float, least: float = 0.01) -> Tensor:
    """The values, raised by this share of the largest finite one or of `least`; truth values are left as they are."""
    if not slack or values.dtype == torch.bool:
        return values
    return values + slack * values.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp(min=least)


def _input_names(x: Inputs) -> list[str]:
    """Names of the file's inputs, in the order of `input_tensors`."""
    return list(x) if isinstance(x, dict) else [f"x{i}" for i in range(len(x))] if isinstance(x, tuple) else ["x"]


def _free_axes(x: Inputs, dynamic: Mapping[Any, Any]) -> list[Axes]:
    """For each tensor in x, axis -> name of the axes that may have any length besides the first."""
    if not isinstance(dynamic, Mapping):
        raise TypeError(f'expected dynamic as axes and their names, got {dynamic!r}; pass {{1: "length"}}, for example')
    names, tensors = _input_names(x), batches.input_tensors(x)
    by_input = dynamic if all(isinstance(each, str) for each in dynamic) else dict.fromkeys(names, dynamic)
    if unknown := sorted(by_input.keys() - {*names}):
        raise ValueError(f"expected names of inputs in dynamic, {', '.join(names)}, got {', '.join(unknown)}")
    for name, tensor in zip(names, tensors, strict=True):
        for axis in by_input.get(name, {}):
            if not (axis in range(tensor.ndim) and tensor.shape[axis] > 1):
                got = f"{axis} of {name} {tuple(tensor.shape)}; count from 0, and pass a longer example"
                raise ValueError(f"expected a dynamic axis of length 2 or more, got {got}")
    return [{axis: each for axis, each in by_input.get(name, {}).items() if axis} for name in names]


def _first_half(x: Inputs, axes: Sequence[Axes]) -> Inputs:
    """x with the first half of every free axis."""
    half, free = lambda tensor, axis: tensor.narrow(axis, 0, (tensor.shape[axis] + 1) // 2), iter(axes)
    return batches.map_tensors(x, lambda tensor: reduce(half, next(free), tensor))


def _at_least_two_rows(x: Inputs) -> Inputs:
    """x with at least two rows: torch treats an axis of length one as fixed."""
    several = batches.count_examples(x) > 1
    return x if several else batches.map_tensors(x, lambda tensor: tensor.repeat(2, *[1] * (tensor.ndim - 1)))


def _with_outputs(posterior: Posterior, module: ExportedPosterior, given: Inputs) -> Checked:
    """Inputs, and (least, most) of the outputs of `predict` and of the promises, by name; raises if a second call differs."""
    view, x = copy.copy(posterior), module.network_inputs(given)
    view.inputs = None
    with preserve_random_state(posterior.device):
        first = view.predict(x)
        torch.rand(1)  # advances torch's generator, so that new draws would differ
        again = view.predict(x)
    pairs = zip(first.defining_tensors(), again.defining_tensors(), strict=True)
    # GPUs may round differently.
    if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True) for a, b in pairs):
        got = f"{type(posterior).__name__} with a new draw each time; call ds.refresh(posterior, training_loader) first"
        why = "no network that draws in eval mode can be exported"
        raise ValueError(f"expected equal predictions in every call, got {got} ({why})")
    rounding = max((torch.finfo(p.dtype).eps for p in posterior.parameters() if p.is_floating_point()), default=0.0)
    close = max(CLOSE, ROUNDINGS * rounding)  # scores that equal a threshold up to it may fall on either side
    least, most = (module.outputs(first, slack) for slack in (-close, close))
    bounds = ((name, _add_slack(least[name], -close, 1.0), _add_slack(most[name], close, 1.0)) for name in least)
    return batches.move_to_device(given, HOST), {name: (low.cpu(), high.cpu()) for name, low, high in bounds}


def _set_engine(predictor: Predictor, how: Literal["vectorised", "loop"]) -> None:
    """Runs members in a loop, or in one pass if they share kernels, so that the file holds these and the graph once."""
    for part in predictor.modules():
        if isinstance(part, NodeFunctions) and how == "vectorised":
            part.unfold()
        if isinstance(part, Particles) and (how == "loop" or (len(part.templates) == 1 and not _has_own_kernels(part))):
            part.how = how
            for layer in part.template.modules() if how == "vectorised" else ():
                if isinstance(layer, FactoredLayer):
                    vars(layer)["members_at_once"] = True


def _has_own_kernels(particles: Particles) -> bool:
    """Whether members have their own convolutions, which are faster one after the other."""
    own, parts = tensors_by_name(particles.own), particles.template.named_modules()
    return any(isinstance(part, ConvNd) and f"{name}.weight" in own for name, part in parts)


def _check_no_randomness(found: list[str]) -> None:
    if found:
        hint = "put dropout and noise in eval mode, or make them depend on self.training"
        raise _RandomGraphError(f"expected no random numbers in the network's graph, got {', '.join(found)}; {hint}")


def _check_outputs(found: dict[str, Tensor], wanted: dict[str, tuple[Tensor, Tensor]], path: Path) -> None:
    for name, (least, most) in wanted.items():
        made = torch.as_tensor(found[name]).cpu()
        if made.shape != least.shape:
            raise ValueError(f"expected {name} of shape {tuple(least.shape)} in {path}, got {tuple(made.shape)}")
        if wrong := int((~((least <= made) & (made <= most))).sum()):
            got = f"{wrong} of {made.numel()} values that differ in {path}"
            raise ValueError(f"expected {name} as in predict, got {got}")


def _log_size(path: Path, predictor: Predictor) -> None:
    """Logs the size of the file, which is large if every function has its own weights."""
    own = shared = 0
    for part in predictor.modules():
        if isinstance(part, Particles):
            own += sum(t.nbytes for t in (*part.own_parameters().values(), *part.own_buffers().values()))
            shared += sum(t.nbytes for t in (*part.shared_parameters().values(), *part.shared_buffers().values()))
    if path.suffix == ".onnx" and own + shared > 2**31 - 2**20:
        got = format_bytes(own + shared)
        raise ValueError(f"expected at most 2 GiB for ONNX, got {got}; write .pt2, or use fewer functions")
    log.info(
        "%s will take about %s: %d functions with %s of own weights, and %s of shared ones",
        path, format_bytes(own + shared), predictor.drawn.members, format_bytes(own), format_bytes(shared),
    )  # fmt: skip


def _pt2_bytes(
    program: ExportedProgram, facts: dict[str, Any], checked: Sequence[Checked], axes: Sequence[Axes]
) -> bytes:
    for node in program.graph.nodes:  # source locations of the operations take half of a small file
        for remark in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "torch_fn"):
            node.meta.pop(remark, None)
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"dissensus.json": json.dumps(facts)})
    return file.getvalue()


def _onnx_bytes(
    program: ExportedProgram, facts: dict[str, Any], checked: Sequence[Checked], axes: Sequence[Axes]
) -> bytes:
    """The file's content; if onnxruntime is installed, its outputs are compared with those of `predict`."""
    names, outputs = _input_names(checked[0][0]), checked[0][1]
    while not outputs.keys().isdisjoint(names):  # in an ONNX file a name is that of one value
        names = [f"input_{name}" for name in names]
        log.warning("outputs have the names of inputs, which are called %s in the file", ", ".join(names))
    content, random = onnx_content(program, names, list(outputs), facts, axes)
    _check_no_randomness(random)
    for part, wanted in checked:
        given = dict(zip(names, batches.input_tensors(part), strict=True))
        if (found := run_onnx(content, given)) is not None:
            _check_outputs(found, wanted, Path("ONNX"))
    return content


def onnx_content(
    program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], facts: dict[str, Any], axes: Sequence[Axes]
) -> tuple[bytes, list[str]]:
    """(the file's bytes, kinds of nodes that draw random numbers); inputs, outputs and axes get these names."""
    import onnx

    given, found = [f"input {name}" for name in inputs], [f"output {name}" for name in outputs]  # torch has no spaces
    with TorchStateGuard("torch.onnx"):  # which logs missing packages
        called: dict[str, Any] = {"input_names": given, "output_names": found}
        made = torch.onnx.export(program, dynamo=True, verbose=False, optimize=True, **called)
    model: Any = made.model_proto  # type: ignore[union-attr]
    _strip_metadata(model)
    _name_axes(model.graph, axes)
    _rename_values(model.graph, dict(zip([*given, *found], [*inputs, *outputs], strict=True)))
    for name, value in facts.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = name, value if isinstance(value, str) else json.dumps(value)
    content = model.SerializeToString()
    written = onnx.load_from_string(content)
    onnx.checker.check_model(written)  # among others, that every value has one name
    for wanted, values in ((inputs, written.graph.input), (outputs, written.graph.output)):
        if (names := [value.name for value in values]) != [*wanted]:
            raise ValueError(f"expected the names {', '.join(wanted)} in the file, got {', '.join(names)}")
    return content, sorted({node.op_type for node in _all_nodes(written)} & {*RANDOM})


def run_onnx(content: bytes, x: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Outputs by name; None if onnxruntime is not installed."""
    try:
        import onnxruntime
    except ImportError:
        log.info("the ONNX file was not run: onnxruntime is not installed")
        return None
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    made = session.run(None, {name: tensor.numpy() for name, tensor in x.items()})
    return {output.name: torch.from_numpy(value) for output, value in zip(session.get_outputs(), made, strict=True)}


def _strip_metadata(model: Any) -> None:
    """Removes source locations of operations, and intermediate shapes, which a runtime infers itself."""
    for function in model.functions:
        del function.metadata_props[:]
    for node in _all_nodes(model):
        del node.metadata_props[:]
        node.doc_string = ""
    graph = model.graph
    del graph.value_info[:], graph.metadata_props[:], model.metadata_props[:]
    for value in (*graph.input, *graph.output, *graph.initializer):
        del value.metadata_props[:]


def _name_axes(graph: Any, axes: Sequence[Axes]) -> None:
    """Names the free axes of inputs, and those of outputs that have the same lengths; axis 0 is "batch"."""
    dims = [value.type.tensor_type.shape.dim for value in (*graph.input, *graph.output)]
    known = {each[axis].dim_param: name for each, free in zip(dims, axes, strict=False) for axis, name in free.items()}
    for each in dims:
        each[0].dim_param = "batch"
        for dim in [dim for dim in each[1:] if dim.dim_param]:
            dim.dim_param = known.get(dim.dim_param, dim.dim_param)


def _rename_values(graph: Any, names: dict[str, str]) -> None:
    """Renames values of a graph; inner values that already have such a name get a longer one."""
    names = {**{new: f"inner {new}" for new in names.values()}, **names}
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in _walk_nodes(graph.node):
        for part in (node.input, node.output):
            part[:] = [names.get(name, name) for name in part]


def _all_nodes(model: Any) -> Iterator[Any]:
    return _walk_nodes([*model.graph.node, *(node for function in model.functions for node in function.node)])


def _walk_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """The nodes, and those in their branches."""
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                waiting += graph.node

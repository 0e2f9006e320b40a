"""ONNX files: torch's export with readable names and without comments, checked for random numbers."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from dissensus.utils.torch_private import TorchStateGuard

log = logging.getLogger("dissensus")

RANDOM = (
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout",
)  # fmt: skip
# ONNX's TopK, which sorts, is always stable: equal values stay in their order.
ONNX_FORMS = {
    torch.ops.aten.sort.stable: lambda x, *, stable=None, dim=-1, descending=False: torch.sort(x, dim, descending)
}


def onnx_content(
    program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], facts: Mapping[str, Any]
) -> tuple[bytes, list[str]]:
    """(the file's bytes, kinds of nodes that draw random numbers); inputs and outputs get these names, axis 0 is "batch"."""
    import onnx

    given, found = [f"input {name}" for name in inputs], [f"output {name}" for name in outputs]  # torch has no spaces
    with TorchStateGuard("torch.onnx"):  # which logs missing packages
        made = torch.onnx.export(
            program, dynamo=True, input_names=given, output_names=found, verbose=False, optimize=True
        )
    model: Any = made.model_proto  # type: ignore[union-attr]
    _strip_metadata(model)
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
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"


def _rename_values(graph: Any, names: dict[str, str]) -> None:
    """Renames values of a graph; inner values that already have such a name get a longer one."""
    names = {**{new: f"inner {new}" for new in names.values()}, **names}
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in _walk_nodes(graph.node):
        for part in (node.input, node.output):
            part[:] = [names.get(name, name) for name in part]


def _all_nodes(model: Any) -> Iterator[Any]:
    """All nodes, including those in branches and functions."""
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

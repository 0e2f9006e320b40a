"""Exported files: what they say is what predict says, at every batch size, and nothing in them is random."""

import json
import logging
import re
import sys
import zipfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
import tiny
from dissensus import export_model
from dissensus.engine.tracing import random_operations, trace
from refusals import refuses
from test_contract import METHODS

MOMENTS = ("mean", "total", "aleatoric", "epistemic")


def stored(posterior, x):
    """The posterior with a stored draw, and a temperature that is not 1."""
    if getattr(posterior, "stored", posterior) is None or hasattr(posterior, "seed"):
        y = torch.arange(len(x)) % 3
        ds.refresh(posterior, [(x, y if x.ndim == 2 else y[:, None, None].expand(-1, *x.shape[2:]))])
    posterior.temperature.fill_(1.7)
    return posterior.eval()


def inputs(batch, kind="mlp"):
    return torch.randn(batch, *((4,) if kind == "mlp" else (2, 5, 6)), generator=torch.Generator().manual_seed(batch))


def in_onnxruntime(path, **x):
    session = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {name: value.numpy() for name, value in x.items()})
    return {output.name: torch.from_numpy(value) for output, value in zip(session.get_outputs(), found, strict=True)}


def check(found, predictive):
    for name in MOMENTS:
        torch.testing.assert_close(found[name], getattr(predictive, name), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_pt2_file_says_what_predict_says_at_every_batch_size(tmp_path):
    posterior = stored(METHODS["deep_ensemble"](tiny.mlp), inputs(5))  # batch norm, which vmap ties to a batch size
    posterior.classes = ("cat", "dog", "eel")
    ds.export(posterior, tmp_path / "m.pt2", example=inputs(1))
    extra = {"dissensus.json": ""}
    module = torch.export.load(tmp_path / "m.pt2", extra_files=extra).module()
    for batch in (1, 7, 256):
        check(module(inputs(batch)), posterior.predict(inputs(batch)))
    told = json.loads(extra["dissensus.json"])
    assert (told["method"], told["classes"], told["functions"]) == ("deep_ensemble", ["cat", "dog", "eel"], 3)
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt2"]
    with zipfile.ZipFile(tmp_path / "m.pt2") as archive:  # every tensor once: neither unused weights nor copies of them
        sizes = [entry.file_size for entry in archive.infolist() if re.search(r"(weight|tensor)_\d+$", entry.filename)]
    assert sum(sizes) <= 1.1 * sum(t.nbytes for t in posterior.particles.state_dict().values())


def test_functions_that_differ_from_call_to_call_are_refused(tmp_path):
    noisy = tiny.Network(lambda self, x: self.layer(x + torch.randn_like(x)), layer=nn.Linear(4, 3))
    for posterior in (METHODS["gaussian_perturbation"](tiny.mlp), METHODS["mc_dropout"](tiny.mlp), ds.MAP(noisy)):
        with pytest.raises(ValueError, match=r"call ds\.refresh"):
            ds.export(posterior.eval(), tmp_path / "m.pt2", example=inputs(4))
    assert not list(tmp_path.iterdir())


class FusedAttention(nn.Module):
    """Token ids and their mask -> outputs of the first token; at most 20 tokens."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(9, 4), nn.Embedding(20, 4)
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, ids, mask):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = (each.unflatten(-1, (2, 2)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, mask.bool()[:, None, None])
        return self.head(mixed.transpose(1, 2).flatten(2)[:, 0])


def sentences(batch, length):
    ids = torch.randint(1, 9, (batch, length), generator=torch.Generator().manual_seed(length))
    return {"ids": ids, "mask": (torch.arange(length) <= torch.arange(batch)[:, None]).long()}


def test_random_operations_in_a_graph_are_found_and_attention_draws_only_to_drop():
    attend = F.scaled_dot_product_attention
    plain = tiny.Network(lambda self, x: attend(x, x, x))
    noisy = tiny.Network(lambda self, x: attend(x, x, torch.randn_like(x), dropout_p=0.1))
    still, drawn = (random_operations(trace(net, torch.randn(2, 1, 3, 4))) for net in (plain, noisy))
    assert still == []
    assert [name.partition(".")[2] for name in drawn] == ["randn_like.default", "scaled_dot_product_attention.default"]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_axes_that_dynamic_names_have_any_length(tmp_path):
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([FusedAttention() for _ in range(2)]).eval()
    lengths = {"ids": {0: "batch", 1: "length"}, "mask": {1: "length"}}
    ds.export(posterior, tmp_path / "m.pt2", example=sentences(3, 6), dynamic=lengths)
    module = torch.export.load(tmp_path / "m.pt2").module()
    for batch, length in ((1, 1), (2, 5), (4, 20)):
        x = sentences(batch, length)
        check(module(*x.values()), posterior.predict(x))


@pytest.mark.slow
def test_axes_have_their_names_in_an_onnx_file(tmp_path):
    onnx = pytest.importorskip("onnx")
    torch.manual_seed(0)
    posterior = ds.MAP(nn.Sequential(nn.Conv1d(4, 3, 3, padding=1))).eval()  # an output for every step
    ds.export(posterior, tmp_path / "m.onnx", example=torch.randn(2, 4, 6), dynamic={2: "time"})
    graph = onnx.load(tmp_path / "m.onnx").graph
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert (shapes["x"], shapes["mean"]) == (["batch", 4, "time"], ["batch", 3, "time"])
    x = torch.randn(5, 4, 11)
    check(in_onnxruntime(tmp_path / "m.onnx", x=x), posterior.predict(x))


@pytest.mark.parametrize(("dynamic", "told"), [
    (True, "expected dynamic as axes and their names, got True"),
    ({"words": {1: "length"}}, "expected names of inputs in dynamic, ids, mask, got words"),
    ({2: "length"}, r"expected a dynamic axis of length 2 or more, got 2 of ids \(2, 1\)"),
    ({1: "length"}, r"expected a dynamic axis of length 2 or more, got 1 of ids \(2, 1\)"),
])  # fmt: skip
def test_axes_that_are_none_are_refused(dynamic, told, tmp_path):
    posterior = ds.MAP(FusedAttention()).eval()
    error = TypeError if dynamic is True else ValueError
    refuses(lambda: ds.export(posterior, tmp_path / "m.pt2", example=sentences(2, 1), dynamic=dynamic), told, error)


def test_an_axis_that_the_network_fixes_is_refused(tmp_path):
    example = torch.randn(2, 4, 5)
    fixed = ds.MAP(nn.Sequential(nn.Flatten(), nn.Linear(20, 3))).eval()
    told = r"expected a network that takes half of its dynamic axes, got: .*; name only axes that are free"
    refuses(lambda: ds.export(fixed, tmp_path / "m.pt2", example=example, dynamic={2: "length"}), told)
    pooled = tiny.Network(lambda self, x: self.drop(x).mean(2), drop=nn.Dropout(0.5))
    masked = ds.MCDropout(pooled, samples=2).eval()
    ds.refresh(masked, [])
    told = "expected inputs of one shape for dropout masks, got dynamic axes; export without dynamic="
    refuses(lambda: ds.export(masked, tmp_path / "m.pt2", example=example, dynamic={2: "length"}), told)


def test_a_file_that_cannot_be_written_is_not_there(tmp_path, monkeypatch):
    posterior = ds.MAP(tiny.mlp()).eval()
    refuses(lambda: ds.export(posterior, tmp_path / "m.pth", example=inputs(2)), r"\.onnx, \.pt2")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r'^an ONNX file needs onnxscript: pip install "dissensus\[export\]"$'):
        ds.export(posterior, tmp_path / "m.onnx", example=inputs(2))
    posterior.classes = ("cat", "dog")
    refuses(lambda: ds.export(posterior, tmp_path / "m.pt2", example=inputs(2)), "names of 3 classes")
    assert not list(tmp_path.iterdir())


# One of each family; the rest of the contract's table runs the same code.
FAMILIES = [
    "map", "deep_ensemble", "forde", "svgd", "feature_rde", "batch_ensemble", "dropout_ensemble", "mc_dropout",
    "mc_dropout_rate", "tradi", "swag", "snapshot_ensemble", "laplace", "node_bnn", "node_bnn_in", "rank_one_bnn",
    "mean_field_vi", "multi_swag", "multi_mc_dropout", "multi_node_bnn", "multi_laplace", "sghmc", "hmc",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("method", FAMILIES)
def test_every_family_is_exported(method, kind, tmp_path):
    torch.manual_seed(0)
    posterior = stored(METHODS[method](tiny.mlp if kind == "mlp" else tiny.segmenter), inputs(5, kind))
    ds.export(posterior, tmp_path / "m.onnx", example=inputs(5, kind))
    for batch in (1, 7, 256):
        check(in_onnxruntime(tmp_path / "m.onnx", x=inputs(batch, kind)), posterior.predict(inputs(batch, kind)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["batch_ensemble", "dropout_ensemble", "node_bnn", "mc_dropout_rate"])
def test_shared_weights_are_in_the_file_once(method, tmp_path, caplog):
    def net(dropout=0.0):
        return nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip

    build = {
        "batch_ensemble": lambda: ds.BatchEnsemble(net(), members=8, modulation=ds.Modulation.sign()),
        "dropout_ensemble": lambda: ds.DropoutEnsemble(net(), members=8),
        "node_bnn": lambda: ds.NodeBNN(net(), data_size=10, samples=8),
        "mc_dropout_rate": lambda: ds.MCDropout(net(), rate=0.1, samples=8),
    }[method]
    x = torch.randn(4, 3, 12, 12)
    posterior = build()
    ds.refresh(posterior, [(x, torch.arange(4))])
    with caplog.at_level(logging.INFO, "dissensus"):
        ds.export(posterior.eval(), tmp_path / "m.onnx", example=x)
    parameters = sum(p.numel() * p.element_size() for p in posterior.parameters())
    assert (tmp_path / "m.onnx").stat().st_size <= 1.3 * parameters + 50_000
    assert "will take about" in caplog.text


@pytest.mark.slow
def test_transforms_calibration_and_promises_are_inside(tmp_path):
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (200, 3, 10, 12), dtype=torch.uint8), torch.arange(200) % 3
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    posterior = ds.BatchEnsemble(net, members=3, modulation=ds.Modulation.sign())
    posterior.inputs = ds.data.ImageInputs([0.5, 0.4, 0.3], [0.2, 0.2, 0.3], resize=9, crop=8)
    ds.fit(posterior, [(images[:100], labels[:100])], epochs=2, progress=False)
    ds.calibrate(posterior, [(images[100:], labels[100:])], "vector")
    sets = ds.conformal(posterior, [(images[100:150], labels[100:150])], level=0.8)
    gate = ds.ood_gate(posterior, [(images[100:150], labels[100:150])], false_alarm=0.2)
    ds.export(posterior, tmp_path / "m.onnx", example=images[0])
    for rows in (images[150:151], images[150:157], images[150:]):
        found = in_onnxruntime(tmp_path / "m.onnx", x=rows)
        check(found, posterior.predict(rows))
        assert torch.equal(found["conformal"], sets.set(rows))
        assert torch.equal(found["ood_gate"], gate(rows).accept)


@pytest.mark.slow
def test_a_regression_is_exported_in_the_units_of_its_targets(tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows = 50 + 7 * torch.randn(100, 2, generator=generator)
    y = 1e4 + 300 * rows[:, :1] + 30 * torch.randn(100, 1, generator=generator)
    scale = ds.data.Standardiser.of_rows(rows)
    posterior = ds.DeepEnsemble([ds.nets.MLP(2, 1, hidden=(8,)) for _ in range(2)], likelihood=ds.Regression())
    posterior.inputs = ds.data.input_transforms.RowInputs.of(scale)
    ds.fit(posterior, (rows, y), epochs=5, progress=False, targets="standardised")
    intervals = ds.conformal(posterior, [(rows, y)])
    ds.export(posterior, tmp_path / "m.onnx", example=rows[0])
    found = in_onnxruntime(tmp_path / "m.onnx", x=rows.double())
    predictive = posterior.predict(rows)
    for name in MOMENTS:
        wanted = getattr(predictive, name)
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    for name, end in zip(("conformal_lower", "conformal_upper"), intervals.interval(rows), strict=True):
        torch.testing.assert_close(found[name], end, rtol=1e-5, atol=0)
    assert np.median(np.abs(found["mean"].numpy() - y.numpy())) < 5000


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_several_inputs_keep_their_names(named, tmp_path):
    posterior = stored(ds.DeepEnsemble([tiny.Pair() for _ in range(2)]), inputs(5))

    def pair(batch):
        a, b = inputs(batch), inputs(batch) + 1
        return {"a": a, "b": b} if named else (a, b)

    ds.export(posterior, tmp_path / "m.onnx", example=pair(3))
    for batch in (1, 7):
        given = pair(batch)
        found = in_onnxruntime(tmp_path / "m.onnx", **(given if named else {"x0": given[0], "x1": given[1]}))
        check(found, posterior.predict(given))


def plain():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def labelled(rows=60):
    return inputs(rows), torch.arange(rows) % 3


@pytest.mark.slow
def test_an_ensemble_in_half_precision_is_exported_and_leaves_torch_as_it_was(tmp_path, monkeypatch):
    torch.manual_seed(0)
    posterior = ds.DeepEnsemble([plain() for _ in range(3)]).bfloat16()
    x = inputs(64).bfloat16()
    ds.export(posterior, tmp_path / "m.pt2", example=x)  # what runs members at once fails inside a vmap
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    nn.Linear(2, 2)  # draws its weights, which that vmap would refuse
    program = torch.export.load(tmp_path / "m.pt2")
    found = program.module()(inputs(7).bfloat16())
    rounding = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found["mean"], posterior.predict(inputs(7).bfloat16()).mean, rtol=0, atol=8 * rounding)
    monkeypatch.setattr(export_model, "ROUNDINGS", 0.0)  # members in turn round differently from those at once
    monkeypatch.setattr(export_model, "CLOSE", 0.0)
    monkeypatch.setattr(export_model, "trace", lambda *_: program)
    refuses(lambda: ds.export(posterior, tmp_path / "n.pt2", example=x), "expected mean as in predict, got")
    nn.Linear(2, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt2"]  # of the refused one there is nothing


def tampered(module):
    """A module whose truth value of the first row is another."""

    def forward(self, x):
        found = self.module(x)
        first = torch.ones_like(found["gate"], dtype=torch.int64).cumsum(0) == 1
        return found | {"gate": found["gate"] ^ first}

    return tiny.Network(forward, module=module)


def test_a_gate_checked_on_few_rows_may_differ_only_where_the_score_is_at_the_threshold(tmp_path, monkeypatch):
    torch.manual_seed(0)
    posterior = ds.MAP(plain()).eval()
    x, y = labelled()
    gate = ds.ood_gate(posterior, [(x, y)], false_alarm=0.2, name="gate")
    score = float(gate(x[:1]).score)
    programs = []

    def traced(module, *rest):  # both times what the first one was: the first row's answer is turned around anyway
        programs.append(programs[0] if programs else trace(tampered(module), *rest))
        return programs[0]

    monkeypatch.setattr(export_model, "trace", traced)
    gate.threshold = score * (1 + 1e-7)
    ds.export(posterior, tmp_path / "m.pt2", example=x[:2])
    gate.threshold = score * 1.01
    with pytest.raises(ValueError, match=r"expected gate as in predict, got \d of 2 values that differ"):
        ds.export(posterior, tmp_path / "n.pt2", example=x[:1])
    assert len(programs) == 3  # members at once, and again in turn


def summed(network, **x):
    """Inputs by any names, added up with other weights."""
    return network.layers(sum(i * each for i, each in enumerate(x.values(), start=1)))


NAMES = [
    (["x", "total", "input_total"], ["input_x", "input_total", "input_input_total"]),
    (["val_0", "linear"], ["val_0", "linear"]),  # which torch may give to inner values
    (["mean", "std"], ["input_mean", "input_std"]),
]


@pytest.mark.parametrize(
    ("given", "runtime"), [(NAMES[0], False), *(pytest.param(each, True, marks=pytest.mark.slow) for each in NAMES)]
)
def test_an_onnx_file_says_what_predict_says_by_the_names_of_inputs_and_outputs(
    given, runtime, tmp_path, monkeypatch, caplog
):
    """At every batch size; sets by sorted classes are in it, too."""
    names, inside = given
    onnx = pytest.importorskip("onnx")
    torch.manual_seed(0)
    network = tiny.Network(summed, layers=nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    posterior = ds.BatchEnsemble(network, members=2, modulation=ds.Modulation.normal(1.0, 0.5))
    _, y = labelled(30)
    x = {name: torch.randn(30, 4) for name in names}
    ds.fit(posterior, [(x, y)], epochs=1, progress=False)
    scores = {"x": "lac", "raps": "raps"}
    sets = {n: ds.conformal(posterior, [(x, y)], level=0.5, score=score, name=n) for n, score in scores.items()}
    with monkeypatch.context() as patch:
        if not runtime:
            patch.setitem(sys.modules, "onnxruntime", None)
        ds.export(posterior, tmp_path / "m.onnx", example={name: each[:3] for name, each in x.items()})
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert [value.name for value in graph.input] == inside
    assert [value.name for value in graph.output] == [*MOMENTS, *sets]
    assert (", ".join(inside) in caplog.text) == (names != inside)
    for batch in (1, 7, 30):
        some = {name: each[:batch] for name, each in x.items()}
        found = in_onnxruntime(tmp_path / "m.onnx", **dict(zip(inside, some.values(), strict=True)))
        check(found, posterior.predict(some))
    assert (tmp_path / "m.onnx").stat().st_size < 40_000
    for name, promise in sets.items():
        assert torch.equal(found[name], promise.set(x))
        assert 0 < float(found[name].float().mean()) < 1


class Bessel(nn.Linear):
    """An operation that ONNX does not have."""

    def forward(self, x):
        return torch.special.i0(super().forward(x))


@pytest.mark.slow
def test_an_operation_that_onnx_lacks_is_named_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"i0.*write \.pt2$") as error:
        ds.export(ds.MAP(Bessel(4, 3)).eval(), tmp_path / "m.onnx", example=inputs(3))
    assert not re.search(r"\x1b|\n|Next steps", str(error.value))


def test_promises_with_the_name_of_an_output_are_refused(tmp_path):
    x = inputs(60)
    posterior = ds.MAP(nn.Linear(4, 1), likelihood=ds.Regression()).eval()
    ds.conformal(posterior, [(x, x[:, :1])], name="width")
    ds.ood_gate(posterior, [(x, x[:, :1])], false_alarm=0.2, name="width_lower")
    with pytest.raises(ValueError, match="expected a promise of another name than an output's, got 'width_lower'"):
        ds.export(posterior, tmp_path / "m.pt2", example=x[:3])

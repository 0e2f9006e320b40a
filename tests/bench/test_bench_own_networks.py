"""Networks that Python can import, in tasks and conversions: network.name = "package.module:name"."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.bench.run.convert import convert
from dissensus.bench.run.jobs import bench, report_runs
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task
from dissensus.bench.task.objects import network_maker
from refusals import refuses

pytestmark = pytest.mark.usefixtures("undrawn")

SOURCE = """
from torch import nn


class Own(nn.Module):
    def __init__(self, inputs, num_classes, hidden=8):
        super().__init__()
        self.hidden, self.head = nn.Linear(inputs, hidden), nn.Linear(hidden, num_classes)

    def forward(self, x):
        return {"logits": self.head(self.hidden(x).tanh())}


class Nets:
    small = Own


def any_keyword(**keywords):
    return Own(2, **{"num_classes": 7, **keywords})


def number():
    return 3


built = nn.Linear(2, 2)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder."""
    name = f"networks_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def task(name: str, *overrides: str):
    """Three methods on the moons with the network of that name."""
    path = Path("own.toml")
    path.write_text(
        f"""
methods = ["map", "node_bnn", "deep_ensemble"]
[data]
name = "two_moons"
[network]
name = "{name}"
[training]
epochs = 1
[method.deep_ensemble]
members = 2
[method.node_bnn]
components = 2
samples = 2
"""
    )
    return load_task(str(path), size="smoke", overrides=list(overrides))


def test_a_task_runs_with_a_network_of_ones_own_and_its_posteriors_load(module, tmp_path):
    own = task(f"{module}:Own", "network.hidden=5")
    results, _ = bench(own, out=tmp_path / "runs")
    assert set(results.methods) == {"map", "node_bnn", "deep_ensemble"}
    folder = tmp_path / "runs" / "node_bnn-seed0"
    loaded = Run.open(folder).posterior()
    x = torch.randn(3, 2)
    network = sys.modules[module].Own(2, 2, hidden=5)
    assert torch.equal(ds.load(folder / "posterior", network).predict(x).mean, loaded.predict(x).mean)
    assert loaded.latents == 5 + 2
    path = Path(f"{module}.py")
    for written, message in (
        (SOURCE.replace("tanh()", "relu()").replace(", hidden)", ", 2 * hidden)"), "expected a network .*got"),
        ("", "can be imported"),
    ):
        sys.modules.pop(module)
        path.write_text(written)
        with pytest.raises(ValueError, match=message) as raised:
            Run.open(folder).posterior()
        assert "damaged" not in str(raised.value)  # nothing is wrong with the run
    refuses(lambda: ds.load(folder / "posterior"), "expected a network to load into, got none; pass network=")


def test_a_task_goes_on_from_weights_of_ones_own_network(module, tmp_path):
    own = task(f"{module}:Nets.small")  # imports nothing yet
    assert module not in sys.modules
    torch.manual_seed(3)
    network = network_maker(f"{module}:Nets.small")(2, 2)
    torch.save(network.state_dict(), "own.pt")
    whole = tmp_path / "own.pt"
    own = task(f"{module}:Nets.small", f'network.weights="{whole}"', "training.epochs=0")
    bench(own, methods=["map"], out=tmp_path / "runs")
    posterior = Run.open(tmp_path / "runs" / "map-seed0").posterior()
    assert torch.equal(posterior.member(0).head.weight, network.head.weight)


def test_a_report_of_runs_imports_nothing(module, tmp_path):
    bench(task(f"{module}:Own"), methods=["map"], out=tmp_path / "runs")
    sys.modules.pop(module)
    Path(f"{module}.py").write_text("raise SystemExit('imported')")
    _, written = report_runs([str(tmp_path / "runs")], tmp_path / "page")
    assert {path.name for path in written} == {"results.csv", "report.md", "report.html"}
    assert module not in sys.modules


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("{}:any_keyword", [], r"expected 2 outputs of .*any_keyword.*shape \(2, 7\); set .*num_classes = 2"),
        ("{}:any_keyword", ["network.hiden=3"], r"expected settings that fit the network .*hiden.*correct them"),
        ("{}:number", [], "expected a network from .*number, got int; name a class of nn.Module"),
        ("{}:built", [], "expected a class or function that makes a network, got Linear as .*built'"),
        ("{}:Nope", [], "can be imported, .*AttributeError.*; correct the name, or the file"),
        (
            "no_such_package_here:Net",
            [],
            "got 'no_such_package_here:Net' .ModuleNotFoundError.*install it, or put its file beside the task",
        ),
        ("{}:", [], "as module:name, got"),
        (":Own", [], "as module:name, got ':Own'"),
    ],
)
def test_a_network_that_cannot_be_had_is_one_error_and_nothing_is_written(module, tmp_path, name, overrides, message):
    refuses(lambda: bench(task(name.format(module), *overrides), methods=["map"], out=tmp_path / "runs"), message)
    assert not (tmp_path / "runs").exists()


def test_a_name_that_is_none_offers_those_there_are_and_the_form_of_ones_own(module):
    with pytest.raises(
        ValueError, match=r"expected network.name \(or package.module:name\) of MLP, .*ConvNet.*did you mean"
    ):
        task("ResNett")


def test_weights_of_a_network_of_ones_own_are_converted(module, tmp_path):
    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    torch.manual_seed(0)
    twin = Twin()
    torch.save(twin.state_dict(), "own.pt")
    sets = [
        "network.inputs=4",
        "network.num_classes=3",
        "method.data_size=50",
        "method.components=1",
        "method.samples=1",
    ]
    posterior = convert(Path("own.pt"), "node_bnn", tmp_path / "out", overrides=[f"network.name={module}:Own", *sets])
    loaded = ds.load(tmp_path / "out", sys.modules[module].Own(4, 3))
    x = torch.randn(5, 4)
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)
    assert torch.equal(loaded.particles.shared_parameters()["network.head.weight"], twin.head.weight)
    with pytest.raises(
        ValueError, match=r"expected settings that fit the network .*:Own, got others .*missing .*'num_classes'"
    ):
        convert(Path("own.pt"), "map", tmp_path / "no", overrides=[f"network.name={module}:Own", "network.inputs=4"])
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("library", "name", "settings"),
    [
        ("torchvision.models", "torchvision.models:squeezenet1_1", ["network.num_classes=3"]),
        ("timm", "timm:create_model", ["network.model_name=resnet10t", "network.num_classes=3"]),
    ],
)
def test_weights_of_a_foreign_model_are_converted(library, name, settings, tmp_path):
    pytest.importorskip(library, reason=f"{library} is not installed")
    network = network_maker(name)(
        **dict(each.removeprefix("network.").split("=") for each in settings) | {"num_classes": 3}
    )
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    sets = [f"network.name={name}", *settings, "method.data_size=50", "method.init_std=0.1", "method.batch_norm=frozen"]
    posterior = convert(tmp_path / "weights.pth", "node_bnn", tmp_path / "out", overrides=sets)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(ds.load(tmp_path / "out", network).predict(x).mean, posterior.predict(x).mean)
    weights = posterior.particles.shared_parameters()
    for key, tensor in network.named_parameters():
        assert torch.equal(weights[f"network.{key}"], tensor)

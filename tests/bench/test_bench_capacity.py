"""`dissensus capacity`: the published counts to the digit, and networks by name."""

import re
import sys
import types

import pytest
import torch
from torch import nn

from dissensus.bench.capacity_table import capacities

# nodes: the talk on node noise and spec of its networks, Σ in_channels; parameters: torchvision's, and those of the papers
PUBLISHED = {
    "LeNet, 28×28": (44_190, 467, 44_426),
    "AlexNet": (61_090_496, 18_307, 61_100_840),
    "VGG16, small head": (15_239_872, 5_251, 15_245_130),
    "VGG16, large head": (138_344_128, 36_995, 138_357_544),
    "ResNet-50": (25_502_912, 24_579, 25_557_032),
    "WRN-28-10": (36_461_232, 9_475, 36_479_194),
}


def test_the_talks_table_to_the_digit():
    found = capacities([])
    assert {name: (each.weights, each.nodes, each.parameters) for name, each in found.items()} == PUBLISHED
    assert found["AlexNet"].ratio == 61_090_496 / 18_307


def test_settings_go_to_every_network_that_has_them():
    settings = ("inputs=5", "outputs=3", "hidden=[4]", "in_features=2", "out_features=9")
    found = capacities(["MLP", "LeNet", "torch.nn:Linear"], [f"network.{each}" for each in settings])
    assert [each.nodes for each in found.values()] == [5 + 4, 467, 2]
    assert found["LeNet"].layers["head.5"].weights == 84 * 3


class NoMeta(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(int(torch.ones(3).sum()), 2))  # values of a tensor, which the meta device lacks


def test_a_network_that_needs_values_is_built_with_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(NoMeta=NoMeta))
    assert capacities(["mine:NoMeta"])["mine:NoMeta"].nodes == 3


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["LeNett"], r"of MLP, AlexNet, .*WideResNet, got 'LeNett'; did you mean 'LeNet'\?"),
        (["nowhere.at.all:Net"], "expected a network that can be imported"),
        (["VGG16", "--set", "network.haed=large"], "did you mean 'head'"),
        (["VGG16", "--set", "network.head=huge"], "expected head of small, large, got 'huge'"),
        (["ResNet", "--set", "depth=18"], r"expected network.key=value for --set, got 'depth=18'"),
        (["ResNet", "--set", "network.depth=deep"], "expected a whole number for network.depth, got 'deep'"),
        (["MLP"], "missing 2 required positional arguments"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(arguments, error, command_line):
    code, _, said = command_line("capacity", *arguments)
    assert code == 2
    assert re.search(error, said)


def test_the_command_prints_the_table_and_what_is_left_out(command_line):
    code, printed, _ = command_line("capacity")
    assert code == 0
    for weights, nodes, parameters in PUBLISHED.values():
        assert any(all(f"{n:,}" in line for n in (weights, nodes, parameters)) for line in printed.splitlines())
    assert "41,640" in printed
    settings = ["--set", "network.d_model=4", "--set", "network.nhead=2"]
    _, printed, _ = command_line("capacity", "torch.nn:TransformerEncoderLayer", *settings)
    assert "no nodes in self_attn, self_attn.out_proj" in printed
    assert "41,640" not in printed

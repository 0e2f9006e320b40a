"""Modes are left as found, also after an error."""

import pytest
import torch
from torch import nn

from dissensus.utils.torch_modes import eval_mode


def test_modes_come_back_one_by_one():
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))
    network[1][1].eval()
    with eval_mode(network):
        assert not any(module.training for module in network.modules())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), eval_mode(network):
        network(torch.zeros(3, 5))
    assert [module.training for module in network.modules()] == [True, True, True, True, False]

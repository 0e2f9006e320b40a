"""Switches of torch, which belong to the whole process."""

import pytest
import torch

from dissensus.utils.torch_modes import convolution_timing


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("first_leaves_first", [False, True])
def test_timing_is_as_it_was_after_the_last_of_several_threads(before, first_leaves_first, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    runs = [convolution_timing(not before), convolution_timing(False)]
    for run in runs:
        run.__enter__()
    for run in runs if first_leaves_first else runs[::-1]:
        run.__exit__(None, None, None)
    assert torch.backends.cudnn.benchmark is before


def test_an_inner_setting_ends_with_its_block(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    with convolution_timing(True):
        with convolution_timing(False):
            assert not torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark

"""Switches of torch, which belong to the whole process."""

import platform
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from dissensus.utils.torch_modes import convolution_timing, set_attributes, thread


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


def test_attributes_are_those_from_before_however_the_block_ends():
    one, two = SimpleNamespace(how="a", left=0), SimpleNamespace(how="b")
    with set_attributes(one, two, how="c"), set_attributes(one, how="d", left=1):
        assert (one.how, one.left, two.how) == ("d", 1, "c")
    with pytest.raises(ZeroDivisionError), set_attributes(one, two, how=1):
        one.how /= 0
    assert (one.how, one.left, two.how) == ("a", 0, "b")


def test_what_is_on_in_one_thread_is_off_in_another():
    seen = []
    with set_attributes(thread, for_graph=True):
        other = threading.Thread(target=lambda: seen.append(thread.for_graph))
        other.start()
        other.join()
        seen.append(thread.for_graph)
    assert [*seen, thread.for_graph] == [False, True, False]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc decides how much freed memory it keeps")
def test_freed_memory_is_kept():
    """Three blocks of 8 MiB are more than glibc keeps of itself; it then takes up to 6,144 pages anew in every round."""
    code = """
import resource, torch
from dissensus.utils.torch_modes import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        blocks = [torch.ones(8 * 2**18) for _ in range(3)]
        del blocks
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 5

first = faults()
keep_freed_memory()
faults()
print(first, faults())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    without, kept = map(float, done.stdout.split())
    assert kept <= 0.1 * without or without < 500  # a system that counts no faults

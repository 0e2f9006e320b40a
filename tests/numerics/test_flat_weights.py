"""Flat weights go there and back, and a block's views lie in memory as the tensors they were made for."""

import pytest
import torch

import tiny
from dissensus.numerics.flat_weights import Block, state_dtype, unflatten
from refusals import refuses


def test_a_vector_is_taken_apart_into_tensors_like_those_given():
    parameters = dict(tiny.mlp().double().named_parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters.values()])
    back = unflatten(flat, parameters)
    assert all(torch.equal(back[name], parameters[name]) for name in parameters)
    stacked = unflatten(torch.stack([flat, 2 * flat]), parameters)
    assert all(torch.equal(stacked[name][1], 2 * parameters[name]) for name in parameters)


def test_half_precision_is_summed_in_float32_and_comes_back_in_half():
    weights = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4, dtype=torch.bfloat16)}
    assert state_dtype(list(weights.values())) == torch.float32
    assert unflatten(torch.ones(10), weights)["a"].dtype == torch.bfloat16
    assert state_dtype([torch.zeros(1, dtype=torch.float64), weights["a"]]) == torch.float64


def test_a_vector_of_another_length_is_refused():
    refuses(lambda: unflatten(torch.zeros(5), {"a": torch.zeros(2, 3)}), "split_sizes", RuntimeError)


def test_a_block_lies_as_its_tensors_do():
    rows, channels = torch.randn(3, 4), torch.randn(5, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    block = Block([rows, channels], torch.float64)
    assert [view.stride() for view in block.views] == [rows.stride(), channels.stride()]
    torch._foreach_copy_(block.views, [rows, channels])
    assert torch.equal(block.views[1], channels.double())
    assert block.flat.sum().item() == pytest.approx(float(rows.double().sum() + channels.double().sum()), abs=1e-12)
    block.flat.zero_()
    assert float(block.views[0].abs().max()) == 0
    assert block.has_layout_of([rows, channels])
    assert not block.has_layout_of([rows, channels.contiguous()])


def test_a_tensor_with_holes_in_memory_gets_a_dense_view():
    holes = torch.randn(4, 6)[:, ::2]
    block = Block([holes], torch.float32)
    block.views[0].copy_(holes)
    assert torch.equal(block.views[0], holes)
    assert block.flat.shape == (12,)
    assert block.has_layout_of([holes])

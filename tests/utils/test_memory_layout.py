"""How tensors lie in memory is kept, as far as it can be."""

import pytest
import torch

from dissensus.utils.memory_layout import (
    contiguous_strides,
    copy_with_strides,
    is_valid_layout,
    strides_for_copy,
    with_own_memory,
)

FLAT = torch.arange(240, dtype=torch.float64)
LYING = {
    "in rows": FLAT.view(2, 4, 5, 6),
    "channels last": FLAT.view(2, 4, 5, 6).to(memory_format=torch.channels_last),
    "transposed": FLAT.view(20, 12).T,
    "a view of a longer one": FLAT[7:13],
    "with holes": FLAT.view(20, 12)[:, ::3],
    "one row of many": FLAT.view(20, 12)[:1, :5],
    "a number": FLAT[3],
    "nothing": FLAT[:0].view(0, 3),
}


@pytest.mark.parametrize("name", LYING)
def test_a_copy_lies_as_the_tensor_does_in_memory_of_its_own(name):
    tensor = LYING[name]
    copy = copy_with_strides(tensor.contiguous(), strides_for_copy(tensor))
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert not tensor.numel() or copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("tensor", [FLAT[:3].expand(4, 3), FLAT.view(20, 12)[::9, ::9]], ids=["overlaps", "far apart"])
def test_what_overlaps_or_lies_far_apart_has_a_dense_twin(tensor):
    strides = strides_for_copy(tensor)
    assert strides == tensor.clone().stride()
    assert torch.equal(copy_with_strides(tensor, strides), tensor)


@pytest.mark.parametrize("name", LYING)
def test_owned_memory_is_contiguous_and_nobody_elses(name):
    tensor = with_own_memory(LYING[name])
    assert torch.equal(tensor, LYING[name])
    assert tensor.stride() == contiguous_strides(tensor.shape)
    assert tensor.untyped_storage().nbytes() == 8 * tensor.numel()


def test_what_has_memory_of_its_own_is_not_copied():
    tensor = torch.zeros(3, 4)
    assert with_own_memory(tensor) is tensor


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4, 3), (0, 1)), ((4, 3), (1, 1)), ((4, 3), (2, 1)), ((2,), (10**9,)), ((2, 2), (10**15, 1))],
)
def test_strides_that_overlap_or_take_far_too_much_memory_do_not_fit(shape, strides):
    assert not is_valid_layout(shape, strides)

"""Inputs as buffers of a module: given back as they were, moved and saved with it."""

import json

import pytest
import torch

from dissensus.methods.repulsive_ensembles import InputBuffers
from refusals import refuses

ROWS, WORDS = torch.randn(3, 4), torch.tensor([1, 0, 2])


@pytest.mark.parametrize("x", [ROWS, (ROWS, WORDS), {"rows": ROWS, "words": WORDS}])
def test_inputs_come_back_in_their_form_also_through_a_state_dict(x):
    buffers = InputBuffers(x)
    again = InputBuffers.from_config(json.loads(json.dumps(buffers.config())))
    again.load_state_dict(buffers.state_dict())
    for found in (buffers.inputs(), again.inputs()):
        torch.testing.assert_close(found, x, rtol=0, atol=0)  # form, types and values
    cast = buffers.double().inputs()
    first = cast if isinstance(x, torch.Tensor) else next(iter(cast.values() if isinstance(x, dict) else cast))
    assert first.dtype == torch.float64


def test_what_is_held_is_a_copy():
    rows = ROWS.clone()
    buffers = InputBuffers(rows)
    rows.zero_()
    assert torch.equal(buffers.inputs(), ROWS)


def test_bad_input_is_a_clear_error():
    with pytest.raises(TypeError, match="expected inputs as a tensor, tuple or dict of tensors, got float"):
        InputBuffers((ROWS, 1.0))
    refuses(lambda: InputBuffers(()), "got tuple", TypeError)
    refuses(lambda: InputBuffers(torch.zeros(0, 4)), r"expected inputs \(n, ...\), got shape \(0, 4\)")
    refuses(lambda: InputBuffers(torch.tensor([[0.0, float("nan")]])), "expected finite inputs, got NaN or infinity")

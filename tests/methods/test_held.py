"""Inputs held by a module: given back as they were, moved and saved with it."""

import json

import pytest
import torch

from dissensus.methods.held import HeldInputs

ROWS, WORDS = torch.randn(3, 4), torch.tensor([1, 0, 2])


@pytest.mark.parametrize("x", [ROWS, (ROWS, WORDS), {"rows": ROWS, "words": WORDS}])
def test_inputs_come_back_in_their_form_also_through_a_state_dict(x):
    held = HeldInputs(x)
    again = HeldInputs.skeleton(json.loads(json.dumps(held.config())))
    again.load_state_dict(held.state_dict())
    for found in (held.inputs(), again.inputs()):
        torch.testing.assert_close(found, x, rtol=0, atol=0)  # form, types and values
    cast = held.double().inputs()
    first = cast if isinstance(x, torch.Tensor) else next(iter(cast.values() if isinstance(x, dict) else cast))
    assert first.dtype == torch.float64


def test_what_is_held_is_a_copy():
    rows = ROWS.clone()
    held = HeldInputs(rows)
    rows.zero_()
    assert torch.equal(held.inputs(), ROWS)


def test_bad_input_is_a_clear_error():
    with pytest.raises(TypeError, match="expected inputs as a tensor, tuple or dict of tensors, got float"):
        HeldInputs((ROWS, 1.0))
    with pytest.raises(TypeError, match="got tuple"):
        HeldInputs(())
    with pytest.raises(ValueError, match=r"expected inputs \(n, ...\), got shape \(0, 4\)"):
        HeldInputs(torch.zeros(0, 4))
    with pytest.raises(ValueError, match="expected finite inputs, got NaN or infinity"):
        HeldInputs(torch.tensor([[0.0, float("nan")]]))

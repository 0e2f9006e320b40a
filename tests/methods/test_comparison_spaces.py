"""Spaces: input gradients against autograd written out, hooks that leave no trace, noise that follows from the step."""

import json

import pytest
import torch
from torch import Tensor, nn

import dissensus as ds
import tiny
from dissensus.methods.parts import repulsion
from dissensus.methods.repulsive_ensembles import InputBuffers
from refusals import refuses


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def gradient(net: nn.Module, likelihood: ds.Likelihood, x: Tensor, y: Tensor, kind: str = "logit") -> Tensor:
    def function(x):
        return repulsion.selected_output(likelihood, net(x), y, kind), "rest"

    found, rest = repulsion.input_gradient(function, x)
    assert rest == "rest"
    return found.detach()


def jacobians(net: nn.Module, x: Tensor) -> Tensor:
    """(B, C, D) of each example alone."""
    return torch.stack([torch.func.jacrev(lambda row: net(row[None])[0])(row) for row in x]).detach()


def test_the_true_class_logit_is_differentiated():
    net, (x, y) = network(), tiny.points()
    expected = jacobians(net, x)[torch.arange(12), y]
    torch.testing.assert_close(gradient(net, ds.Classification(), x, y), expected, rtol=0, atol=1e-12)
    soft = torch.rand(12, 3, dtype=torch.float64).softmax(1)
    expected = torch.einsum("bc,bcd->bd", soft, jacobians(net, x))
    torch.testing.assert_close(gradient(net, ds.Classification(), x, soft), expected, rtol=0, atol=1e-12)


def test_the_log_probability_has_the_gradient_of_the_logit_less_its_mean():
    """∇ log p_y = ∇ f_y − Σ_c p_c ∇ f_c, which does not change when a function is added to all logits."""
    net, (x, y) = network(), tiny.points()
    slopes, p = jacobians(net, x), net(x).detach().softmax(1)
    expected = slopes[torch.arange(12), y] - torch.einsum("bc,bcd->bd", p, slopes)
    found = gradient(net, ds.Classification(), x, y, "log_prob")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

    class Shifted(nn.Module):
        def forward(self, x):
            return net(x) + x.square().sum(1, keepdim=True)

    torch.testing.assert_close(gradient(Shifted(), ds.Classification(), x, y, "log_prob"), found, rtol=0, atol=1e-12)
    assert not torch.allclose(gradient(Shifted(), ds.Classification(), x, y), gradient(net, ds.Classification(), x, y))


def test_pixels_that_do_not_count_have_no_gradient():
    net, x = tiny.segmenter().double(), torch.randn(2, 2, 4, 4, dtype=torch.float64)
    y = torch.randint(3, (2, 4, 4))
    y[1] = 255
    found = gradient(net, ds.Classification(ignore_index=255), x, y)
    assert found.shape == (2, 32)
    assert float(found[1].abs().max()) == 0.0
    assert float(found[0].abs().max()) > 0.0
    log_prob = gradient(net, ds.Classification(ignore_index=255), x, y, "log_prob")
    assert float(log_prob[1].abs().max()) == 0.0


def test_regression_differentiates_the_mean():
    net, (x, _) = network(), tiny.points()
    y = torch.zeros(12, 3, dtype=torch.float64)
    expected = jacobians(net, x).sum(1)
    torch.testing.assert_close(gradient(net, ds.Regression(noise=0.1), x, y), expected, rtol=0, atol=1e-12)
    double = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    found = gradient(double, ds.HeteroscedasticRegression(), x, y[:, :1])
    torch.testing.assert_close(found, jacobians(double, x)[:, 0], rtol=0, atol=1e-12)


def test_plain_autograd_and_function_transforms_give_the_same_gradient_and_graph():
    net, (x, y) = network(), tiny.points()
    weight = net[0].weight.detach()

    def objective(weight: Tensor) -> Tensor:
        def function(x):
            out = torch.func.functional_call(net, {"0.weight": weight}, (x,))
            return repulsion.selected_output(ds.Classification(), out, y, "logit"), out

        found, out = repulsion.input_gradient(function, x)
        return found.square().sum() + out.sin().sum()

    leaf = weight.clone().requires_grad_()
    (plain,) = torch.autograd.grad(objective(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(objective)(weight), plain, rtol=0, atol=1e-12)
    (batched,) = torch.func.vmap(torch.func.grad(objective))(weight[None])
    torch.testing.assert_close(batched, plain, rtol=0, atol=1e-12)


def test_without_recording_nothing_keeps_a_graph():
    net, (x, y) = network(), tiny.points()

    def function(x):
        out = net(x)
        return repulsion.selected_output(ds.Classification(), out, y, "logit"), out

    with torch.no_grad():
        found, out = repulsion.input_gradient(function, x)
    assert not found.requires_grad
    assert not out.requires_grad
    torch.testing.assert_close(found, gradient(net, ds.Classification(), x, y), rtol=0, atol=1e-12)
    assert not x.requires_grad


def test_several_inputs_are_joined_and_integers_left_out():
    net, a, b = tiny.Pair().double(), torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)

    def function(x):
        return net(x["a"], x["b"]).sum() + 0 * x["index"].sum(), None

    found, _ = repulsion.input_gradient(function, {"a": a, "index": torch.arange(5), "b": b})
    assert found.shape == (5, 8)
    left, right = torch.func.grad(lambda a, b: net(a, b).sum(), argnums=(0, 1))(a, b)
    torch.testing.assert_close(found, torch.cat([left, right], 1), rtol=0, atol=1e-12)
    assert repulsion.input_dimension({"a": a, "index": torch.arange(5), "b": b}) == 8


def test_the_slope_at_a_feature_is_the_slope_by_the_shift():
    net, (x, y) = network(), tiny.points()

    def function(shift):
        with repulsion.add_to_output(net, "1", shift) as seen:
            out = net(x)
        return nn.functional.cross_entropy(out, y), seen[0]

    (slope,), feature = repulsion.differentiate(function, torch.zeros(12, 6, dtype=torch.float64))
    torch.testing.assert_close(feature, net[:2](x), rtol=0, atol=1e-12)
    expected = torch.func.grad(lambda f: nn.functional.cross_entropy(net[2](f), y))(net[:2](x))
    torch.testing.assert_close(slope, expected, rtol=0, atol=1e-12)
    assert not net[1]._forward_hooks


def test_layers_that_give_no_one_feature_are_clear_errors():
    twice = tiny.Network(
        lambda self, x: self.recurrent(self.layer(self.layer(x)))[0],
        layer=nn.Linear(4, 4),
        unused=nn.Linear(4, 4),
        recurrent=nn.LSTM(4, 4),
    )
    net, x = twice, torch.randn(3, 4)
    for layer, runs in (("layer", 2), ("unused", 0)):
        with (
            pytest.raises(ValueError, match=f"runs once per forward pass, got {runs} runs"),
            repulsion.add_to_output(net, layer, None),
        ):
            net(x)
    with (
        pytest.raises(TypeError, match="returns one tensor, got tuple"),
        repulsion.add_to_output(net, "recurrent", None),
    ):
        net(x)
    assert not any(module._forward_hooks for module in net.modules())


def test_noise_follows_from_the_step_and_is_normal():
    like = torch.zeros(200, 50)
    first = repulsion.normal_from_step(like, torch.tensor(3))
    assert torch.equal(first, repulsion.normal_from_step(like, torch.tensor(3)))
    other = repulsion.normal_from_step(like, torch.tensor(4))
    for noise in (first, other):
        # 10,000 numbers: standard errors 0.01 of the mean, 0.007 of the deviation, 0.024 and 0.05 of the higher moments
        assert abs(float(noise.mean())) < 0.04
        assert float(noise.std()) == pytest.approx(1, abs=0.03)
        assert abs(float(noise.pow(3).mean())) < 0.16
        assert float(noise.pow(4).mean()) == pytest.approx(3, abs=0.4)
    correlation = torch.corrcoef(torch.stack([first.flatten(), other.flatten(), first.roll(1, 0).flatten()]))
    assert float((correlation - torch.eye(3)).abs().max()) < 0.04  # four standard errors
    drawn = torch.func.vmap(lambda z: z + repulsion.normal_from_step(like, torch.tensor(3)))(torch.zeros(2, 1, 1))
    assert torch.equal(drawn[1], first)


def test_an_example_of_weight_two_lies_as_far_as_the_example_twice():
    a, b = torch.randn(2, 3, 2, dtype=torch.float64)
    weight = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
    weighted = (repulsion.outputs_as_points(a, weight) - repulsion.outputs_as_points(b, weight)).square().sum()
    torch.testing.assert_close(weighted, (a - b)[[0, 1, 1, 2]].square().sum(), rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- inputs as buffers
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

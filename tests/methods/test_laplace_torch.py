"""Laplace against laplace-torch: its numbers in laplace_torch.json, and the program itself where it imports."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import dissensus as ds
from thinning import often

SAVED = json.loads((Path(__file__).parent / "laplace_torch.json").read_text())
PROBLEM = {name: torch.tensor(value, dtype=torch.float64) for name, value in SAVED["problem"].items()}
CASES = {"classification": ("full", True), "classification kron": ("kron", False), "regression": ("full", True)}


def fitted(case, precision, **keywords):
    structure, bias = CASES[case]
    regression = case == "regression"
    outputs, y = (2, PROBLEM["real"]) if regression else (3, PROBLEM["classes"].long())
    layer = nn.Linear(4, outputs, bias=bias).double()
    layer.weight.data = PROBLEM["weight"][:outputs].clone()
    if bias:
        layer.bias.data = PROBLEM["bias"][:outputs].clone()
    likelihood = ds.Regression(0.3) if regression else ds.Classification()
    posterior = ds.Laplace(layer, structure=structure, prior_precision=precision, likelihood=likelihood, **keywords)
    return posterior.fit_posthoc([(PROBLEM["x"][:25], y[:25]), (PROBLEM["x"][25:], y[25:])])


def output_covariance(posterior, x):
    """(B, C, C), from the posterior's own square root: every unit of noise is one sample."""
    curvature = posterior.curvature[0]
    size = curvature.mean.numel()
    root = curvature.sample_joint(
        torch.eye(size, dtype=torch.float64).reshape(size, *curvature.mean.shape)
    )  # (P, C, D)
    features = x if curvature.mean.shape[1] == x.shape[1] else torch.cat([x, torch.ones_like(x[:, :1])], 1)
    outputs = torch.einsum("pcd,bd->bcp", root, features)
    return outputs @ outputs.mT


def compare(found):
    for case, entry in found.items():
        for key, evidence in entry["evidence"].items():
            posterior = fitted(case, float(key), samples=2)
            assert float(posterior.log_marginal_likelihood()) == pytest.approx(evidence, rel=1e-11), case
            covariance = output_covariance(posterior, PROBLEM["test"])
            expected = torch.tensor(entry["variances"][key], dtype=torch.float64)
            torch.testing.assert_close(covariance, expected, rtol=1e-10, atol=1e-12)


def test_evidence_and_variances_are_those_that_laplace_torch_gave():
    assert set(SAVED["found"]) == set(CASES)
    compare(SAVED["found"])


def test_evidence_and_variances_are_those_that_laplace_torch_gives():
    pytest.importorskip("laplace", reason="laplace-torch is not installed: its saved numbers are compared above")
    path = Path(__file__).parents[2] / "benchmarks" / "laplace_reference.py"
    spec = importlib.util.spec_from_file_location("laplace_reference", path)
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    problem = reference.problem()
    assert all(torch.equal(problem[name].double(), PROBLEM[name]) for name in PROBLEM)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)  # parts of it follow the default, not the network
        found = reference.measured(problem)
    finally:
        torch.set_default_dtype(before)
    compare(found)


@pytest.mark.parametrize("case", often(["classification kron"], ["classification"]))
def test_samples_by_rows_predict_what_the_probit_formula_stands_for(case):
    torch.manual_seed(0)
    posterior = fitted(case, 3.0, samples=20_000)
    mean = posterior.predict(PROBLEM["test"]).mean
    probit = torch.tensor(SAVED["found"][case]["probabilities"]["3.0"], dtype=torch.float64)
    # An approximation of the integral over independent outputs: some hundredths off, as the other formula is not.
    assert float((mean - probit).abs().max()) < 0.05
    covariance = output_covariance(posterior, PROBLEM["test"])
    outputs = nn.functional.linear(PROBLEM["test"], posterior.network.weight, posterior.network.bias).detach()
    noise = torch.randn(200_000, *outputs.shape, dtype=torch.float64)
    exact = (outputs + noise * covariance.diagonal(dim1=1, dim2=2).sqrt()).softmax(2).mean(0)
    torch.testing.assert_close(mean, exact, rtol=0, atol=4 * 0.5 / math.sqrt(20_000))

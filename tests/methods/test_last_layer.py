"""The last layer is found by running the network; its curvature against brute force and known cases."""

import math

import pytest
import torch
from torch import nn

import dissensus as ds
import tiny
from dissensus.methods.parts import last_layer as curvatures
from dissensus.methods.parts.last_layer import (
    Curvature,
    CurvatureSums,
    LinearLayer,
    choose_layers,
    eigendecompose,
    resolve_precision,
)
from refusals import refuses


def last_layer(network, x, name=None):
    """The one layer that is found."""
    (found,) = choose_layers(network, x, name)
    return found


def linear(inputs=4, outputs=3):
    return nn.Linear(inputs, outputs).double()


def test_the_last_linear_layer_that_is_called_is_found_whatever_its_place():
    layers = {"head": linear(6), "body": linear(4, 6), "unused": linear()}
    network = tiny.Network(lambda net, x: net.head(torch.tanh(net.body(x))), **layers)
    found = last_layer(network, tiny.points()[0])
    assert found.name == "head"
    assert list(found.parameters) == ["head.weight", "head.bias"]
    assert last_layer(linear(), tiny.points()[0]).name == ""  # the network itself
    assert list(last_layer(linear(), tiny.points()[0]).parameters) == ["weight", "bias"]


class Vision(nn.Module):
    """A vision transformer from outside, as timm writes one: class token and positions are the root's, the head is its last."""

    def __init__(self):
        super().__init__()
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 3, 4))
        self.patch_embed, self.norm, self.head = nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward_features(self, x):  # (B, 4): two patches of two
        tokens = self.patch_embed(x.reshape(len(x), 2, 2))
        return self.norm(torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1) + self.pos_embed)

    def forward_head(self, tokens):
        return self.head(tokens[:, 0])

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


def test_a_module_with_weights_around_the_last_layer_is_not_taken_for_it():
    torch.manual_seed(0)
    x, y = tiny.points()
    assert last_layer(Vision().double(), x).name == "head"
    assert last_layer(nn.Sequential(Vision()).double(), x).name == "0.head"
    assert ds.Laplace(Vision().double(), samples=3).fit_posthoc([(x, y)]).sampled_names() == [
        "head.weight",
        "head.bias",
    ]


@pytest.mark.parametrize(("network", "words"), [
    (lambda: nn.Sequential(nn.Flatten(), nn.Tanh()), "no layer with weights called"),
    (lambda: tiny.Network(lambda net, x: x @ net.head.weight.T, head=linear()), "no layer with weights called"),
    (lambda: nn.Sequential(linear(4, 4), nn.Bilinear(4, 4, 3)), "Bilinear"),
    (lambda: tiny.Network(lambda net, x: net.a(net.a(x)), a=linear(4, 4)), "'a' called 2 times"),
])  # fmt: skip
def test_a_network_without_a_linear_layer_at_its_end_is_a_clear_error(network, words):
    network = network().double()
    if isinstance(network, nn.Sequential) and isinstance(network[-1], nn.Bilinear):
        network = tiny.Network(lambda net, x: net.last(net.first(x), x), first=network[0], last=network[1])
    refuses(lambda: last_layer(network, tiny.points()[0]), rf"expected .*{words}")


def test_a_convolution_is_a_linear_layer_where_it_sees_single_points():
    x = torch.randn(2, 2, 5, 6)
    assert last_layer(tiny.segmenter(), x).name == "2"
    for options in ({"kernel_size": 3}, {"kernel_size": 1, "stride": 2}, {"kernel_size": 1, "padding": 1}):
        with pytest.raises(ValueError, match=r"'0', a Conv2d.*; put an nn.Linear or a 1×1 convolution last"):
            last_layer(nn.Sequential(nn.Conv2d(2, 3, **options)), x)
    refuses(lambda: last_layer(nn.Sequential(nn.Conv2d(2, 4, 1, groups=2)), x), "1×1 convolution")


def test_a_layer_may_be_named_and_a_wrong_name_is_a_clear_error():
    x = tiny.points()[0]
    layers = {"body": linear(4, 6), "head": linear(6), "unused": linear()}
    network = tiny.Network(lambda net, x: net.head(torch.tanh(net.body(x))), **layers)
    assert last_layer(network, x, "head").name == "head"
    told = r"expected names of layers, got fc, which match no layer; the network has body, head, unused"
    refuses(lambda: last_layer(network, x, "fc"), told)
    refuses(lambda: last_layer(network, x, "unused"), "'unused' never called")


def test_a_layer_that_does_something_else_with_its_weights_is_refused():
    class Cosine(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(nn.functional.normalize(x), nn.functional.normalize(self.weight))

    with pytest.raises(ValueError, match=r"put an nn.Linear or a 1×1 convolution last"):
        last_layer(nn.Sequential(Cosine(4, 3).double()), tiny.points()[0])


def test_weights_that_are_tied_or_parametrised_are_refused():
    x = tiny.points()[0]
    network = nn.Sequential(linear(4, 4), nn.Tanh(), linear(4, 4))
    network[2].weight = network[0].weight
    refuses(lambda: last_layer(network, x), r"'2' tied to 0\.weight; untie them")
    network = nn.Sequential(nn.utils.parametrizations.weight_norm(linear()))
    refuses(lambda: last_layer(network, x), r"'0' with parametrised weights; remove")


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 3), nn.Linear(4, 3, bias=False), nn.Conv2d(4, 3, 1), nn.Conv1d(4, 3, 1)]
)
def test_weights_and_biases_are_one_matrix_and_back(layer):
    last = LinearLayer("a.b", layer, {f"a.b.{name}": p for name, p in layer.named_parameters()})
    matrix = last.matrix(last.parameters).detach()
    assert matrix.shape == (3, 4 if layer.bias is None else 5)
    assert matrix.dtype == torch.float64
    back = last.tensors(torch.stack([matrix, 2 * matrix]))
    for name, parameter in last.parameters.items():
        assert torch.equal(back[name], torch.stack([parameter, 2 * parameter]))
        assert back[name].is_contiguous()
        assert back[name].dtype == parameter.dtype
    assert torch.equal(last.matrix(back), torch.stack([matrix, 2 * matrix]))


N, D, C = 32, 4, 3


def rows(seed=0, classes=C):
    like = {"dtype": torch.float64, "generator": torch.Generator().manual_seed(seed)}
    return torch.randn(N, D, **like), torch.randn(classes, D, **like), torch.rand(N, **like)


def gathered(structure, likelihood, phi, outputs, weight):
    sums = CurvatureSums(structure, (outputs.shape[1], phi.shape[1]), phi.device)
    half = len(phi) // 2
    for part in (slice(None, half), slice(half, None)):
        sums.add(phi[part], *likelihood.curvature(outputs[part]), weight[part])
    return sums


def brute_force(likelihood, phi, mean, y, weight):
    """(P, P) second derivatives of −Σ w log p(y | W φ) in W, by automatic differentiation."""

    def nll(flat):
        return -(weight * likelihood.log_prob(phi @ flat.reshape(mean.shape).T, y)).sum()

    return torch.func.hessian(nll)(mean.flatten())


@pytest.mark.parametrize("likelihood", [ds.Classification(), ds.Regression(0.4)], ids=["classification", "regression"])
def test_the_full_matrix_is_the_hessian(likelihood):
    phi, mean, weight = rows()
    y = torch.randn(N, C, dtype=torch.float64) if isinstance(likelihood, ds.Regression) else torch.arange(N) % C
    found = gathered("full", likelihood, phi, phi @ mean.T, weight).sums[0]
    torch.testing.assert_close(found, brute_force(likelihood, phi, mean, y, weight), rtol=0, atol=1e-10)


def test_the_full_matrix_is_the_mean_hessian_of_a_heteroscedastic_regression():
    phi, mean, weight = rows(classes=2)
    likelihood = ds.HeteroscedasticRegression()
    centre, variance = likelihood.describe(phi @ mean.T)
    # The Hessian is linear in y − mean and in its square: two points one deviation off have both moments of y.
    both = [brute_force(likelihood, phi, mean, centre + sign * variance.sqrt(), weight) for sign in (-1.0, 1.0)]
    found = gathered("full", likelihood, phi, phi @ mean.T, weight).sums[0]
    torch.testing.assert_close(found, sum(both) / 2, rtol=0, atol=1e-10)


def test_rows_are_taken_in_small_pieces_with_the_same_result(monkeypatch):
    phi, mean, weight = rows()
    for structure in ("full", "kron"):
        whole = gathered(structure, ds.Classification(), phi, phi @ mean.T, weight).sums
        monkeypatch.setattr(curvatures, "CHUNK", 5 * C * D)
        pieces = gathered(structure, ds.Classification(), phi, phi @ mean.T, weight).sums
        monkeypatch.undo()
        for a, b in zip(whole, pieces, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("likelihood", [ds.Classification(), ds.Regression(0.4)], ids=["classification", "regression"])
def test_whole_hessians_give_what_their_parts_do(structure, likelihood, monkeypatch):
    phi, mean, weight = rows()
    outputs = phi @ mean.T
    parts = gathered(structure, likelihood, phi, outputs, weight)
    a, u = likelihood.curvature(outputs)
    monkeypatch.setattr(curvatures, "CHUNK", 5 * C * D)
    whole = CurvatureSums(structure, (C, D), phi.device)
    whole.add(phi, torch.diag_embed(a) - (0 if u is None else u[:, :, None] * u[:, None]), None, weight)
    for found, expected in zip(whole.sums, parts.sums, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["one example", "equal outputs", "regression"])
def test_the_kronecker_product_is_exact_where_the_hessians_are_all_one(case):
    phi, mean, weight = rows()
    if case == "one example":
        phi, weight = phi[:1], weight[:1]
    outputs = torch.zeros(len(phi), C, dtype=torch.float64) + 0.3 if case == "equal outputs" else phi @ mean.T
    likelihood = ds.Regression(0.7) if case == "regression" else ds.Classification()
    full = gathered("full", likelihood, phi, outputs, weight)
    kron = gathered("kron", likelihood, phi, outputs, weight)
    product = torch.kron(*kron.sums) / kron.weight
    torch.testing.assert_close(product, full.sums[0], rtol=0, atol=1e-12)
    two = [Curvature.from_sums(each, mean, layer=0) for each in (full, kron)]
    torch.testing.assert_close(*(each.eigenvalues.flatten().sort()[0] for each in two), rtol=0, atol=1e-10)
    torch.testing.assert_close(*(each.variance() for each in two), rtol=0, atol=1e-10)
    torch.testing.assert_close(*(each.log_marginal_likelihood(torch.tensor(2.0)) for each in two), rtol=0, atol=1e-10)


@pytest.fixture(params=["full", "kron"])
def curvature(request):
    """A curvature, and the matrix it is one of."""
    phi, mean, weight = rows()
    sums = gathered(request.param, ds.Classification(), phi, phi @ mean.T, 5 * weight)
    sums.log_likelihood.fill_(-12.0)
    matrix = sums.sums[0] if request.param == "full" else torch.kron(*sums.sums) / sums.weight
    return Curvature.from_sums(sums, mean, layer=0), matrix.clone()


def test_the_evidence_is_that_of_the_determinants(curvature):
    found, matrix = curvature
    for precision in (0.1, 1.0, 30.0):
        size = C * D
        determinant = torch.linalg.slogdet(matrix + precision * torch.eye(size, dtype=torch.float64))[1]
        prior = 0.5 * size * math.log(precision / (2 * math.pi)) - 0.5 * precision * found.mean.square().sum()
        expected = -12.0 + prior + 0.5 * size * math.log(2 * math.pi) - 0.5 * determinant
        torch.testing.assert_close(
            found.log_marginal_likelihood(torch.tensor(precision, dtype=torch.float64)), expected, rtol=0, atol=1e-10
        )


def test_the_gradient_of_the_evidence_is_the_one_that_is_solved_for(curvature):
    found, _ = curvature
    precision = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(found.log_marginal_likelihood(precision), precision)
    gamma = (found.eigenvalues / (found.eigenvalues + 0.8)).sum()
    expected = 0.5 * (gamma / 0.8 - found.mean.square().sum())
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)


def test_the_best_precision_has_the_largest_evidence(curvature):
    found, _ = curvature
    best = torch.tensor(resolve_precision("marginal_likelihood", [found]), dtype=torch.float64, requires_grad=True)
    evidence = found.log_marginal_likelihood(best)
    (gradient,) = torch.autograd.grad(evidence, best)
    assert abs(float(gradient)) < 1e-9
    everywhere = [found.log_marginal_likelihood(p) for p in torch.logspace(-6, 6, 400, dtype=torch.float64)]
    assert float(evidence.detach()) >= max(map(float, everywhere))


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_the_best_precision_is_found_far_away_too(curvature, scale):
    found, _ = curvature
    before = resolve_precision("marginal_likelihood", [found])
    found.mean.mul_(scale**-0.5)
    found.eigenvalues.mul_(scale)  # all in other units
    assert resolve_precision("marginal_likelihood", [found]) == pytest.approx(before * scale, rel=1e-9)


@pytest.mark.parametrize("what", ["mean", "eigenvalues"])
def test_a_prior_that_nothing_is_known_of_is_a_clear_error(curvature, what):
    found, _ = curvature
    getattr(found, what).zero_()
    told = r"expected finite non-zero weights and curvature, .* pass prior_precision="
    refuses(lambda: resolve_precision("marginal_likelihood", [found]), told)


def covariance_of(function, shape):
    """(P, P) of a function that is linear in standard normal noise (S, C, D)."""
    size = math.prod(shape)
    root = function(torch.eye(size, dtype=torch.float64).reshape(size, *shape)).flatten(1)
    return root.T @ root


def test_samples_have_the_covariance_of_the_posterior(curvature):
    found, matrix = curvature
    found.precision.fill_(0.6)
    expected = torch.linalg.inv(matrix + 0.6 * torch.eye(C * D, dtype=torch.float64))
    torch.testing.assert_close(covariance_of(found.sample_joint, (C, D)), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.variance().flatten(), expected.diagonal(), rtol=0, atol=1e-10)
    blocks = torch.block_diag(*(expected[c * D : (c + 1) * D, c * D : (c + 1) * D] for c in range(C)))
    torch.testing.assert_close(covariance_of(found.sample_rows, (C, D)), blocks, rtol=0, atol=1e-10)


def test_it_stays_in_float64(curvature):
    found, _ = curvature
    before = tiny.state(found)
    posterior = nn.ModuleDict({"curvature": found}).half().float()
    assert all(t.dtype == torch.float64 for t in posterior["curvature"].buffers() if t.is_floating_point())
    assert tiny.largest_difference(before, tiny.state(found)) == 0
    assert posterior.to("meta")["curvature"].mean.device.type == "meta"


@pytest.mark.parametrize(
    ("structure", "classes", "features", "words"),
    [("full", 1000, 2049, 'structure="kron"'), ("kron", 10, 20_000, "choose narrower layers")],
)
def test_a_matrix_that_is_too_large_is_refused_before_it_is_made(structure, classes, features, words):
    with pytest.raises(ValueError, match=f"expected at most 11,585 rows in a {structure} curvature.*{words}"):
        CurvatureSums(structure, (classes, features), torch.device("cpu"))


def test_eigenvalues_below_zero_by_rounding_are_zero():
    values, vectors = eigendecompose(torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-12]], dtype=torch.float64))
    assert float(values.min()) == 0.0
    assert vectors.is_contiguous()

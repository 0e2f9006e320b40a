"""Laplace on networks of transformers, peft and torchvision, small and with random weights."""

import copy

import pytest
import torch
from torch import nn

import dissensus as ds

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.randint(1, 30, (6, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 4:] = MASK[3, 2:] = 0
X = {"input_ids": IDS.where(MASK == 1, 0), "attention_mask": MASK}
Y = torch.tensor([0, 1, 2, 0, 1, 2])
SMALL = {"vocab_size": 30, "num_labels": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def decoder(kind):
    torch.manual_seed(0)
    if kind == "GPT2":
        settings = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    else:
        settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = getattr(transformers, f"{kind}Config")(**settings, **SMALL)
    return getattr(transformers, f"{kind}ForSequenceClassification")(config).double().eval()


def bert(kind="BertForSequenceClassification"):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return getattr(transformers, kind)(transformers.BertConfig(**sizes, **SMALL)).double().eval()


def exact_curvature(network, name, x, y):
    """(P, P) Gauss–Newton matrix of the weights of one layer without a bias, of logits (B, C)."""
    weight = network.get_parameter(f"{name}.weight")
    logits = network(**x).logits
    rows = [torch.autograd.grad(each, weight, retain_graph=True)[0].flatten() for each in logits.flatten()]
    jacobian = torch.stack(rows).reshape(*logits.shape, -1)  # (B, C, P)
    p = logits.detach().softmax(1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return torch.einsum("bcp,bcd,bdq->pq", jacobian, hessian, jacobian)


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_decoder_classifiers_have_the_curvature_of_their_last_token(kind, tmp_path):
    network = decoder(kind)
    posterior = ds.Laplace(network, samples=10).fit_posthoc([(X, Y)])
    assert posterior.sampled_names() == ["score.weight"]
    (found,) = posterior.curvature
    vectors = found.get_buffer("vectors")
    exact = exact_curvature(network, "score", X, Y)
    torch.testing.assert_close(vectors * found.eigenvalues @ vectors.T, exact, rtol=0, atol=1e-6)
    predictive = posterior.predict(X)
    assert predictive.mean.shape == (6, 3)
    assert float(predictive.epistemic.min()) > 0
    ds.evaluate(posterior, [(X, Y)])


def test_laplace_over_adapters_samples_them_alone_and_is_saved(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    settings = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    network = peft.get_peft_model(bert(), settings).double().eval()
    posterior = ds.Laplace(network, layers="*lora*", structure="kron", samples=4).fit_posthoc([(X, Y)])
    assert len(posterior.curvature) == 4
    assert all("lora_" in name for name in posterior.sampled_names())
    full = ds.Laplace(network, layers="*lora*", structure="full", samples=2, prior_precision=1.0).fit_posthoc([(X, Y)])
    for name, curvature in zip(full.sampled_names(), full.curvature, strict=True):
        vectors = curvature.get_buffer("vectors")
        exact = exact_curvature(network, name.removesuffix(".weight"), X, Y)
        torch.testing.assert_close(vectors * curvature.eigenvalues @ vectors.T, exact, rtol=0, atol=1e-6)
    assert float(posterior.predict(X).epistemic.min()) > 0
    ds.save(posterior, tmp_path)
    loaded = ds.load(tmp_path, copy.deepcopy(network))
    assert torch.equal(loaded.predict(X).member_means, posterior.predict(X).member_means)


class Transposed(nn.Module):
    """A token model of transformers with logits (B, C, T)."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, **x):
        return self.network(**x).logits.transpose(1, 2)


def test_token_models_are_fitted_in_closed_form():
    labels = torch.where(MASK == 1, IDS % 3, -100)
    network = Transposed(bert("BertForTokenClassification"))
    likelihood = ds.Classification(ignore_index=-100)
    posterior = ds.Laplace(network, likelihood=likelihood, samples=5).fit_posthoc([(X, labels)])
    features = network.network.bert(**X).last_hidden_state.detach()[MASK == 1]
    head = copy.deepcopy(network.network.classifier)
    plain = ds.Laplace(head, samples=5).fit_posthoc([(features, labels[MASK == 1])])
    torch.testing.assert_close(posterior.curvature[0].eigenvalues, plain.curvature[0].eigenvalues, rtol=0, atol=1e-10)
    assert posterior.predict(X).mean.shape == (6, 3, 7)


def test_segmentation_with_resized_outputs_and_an_auxiliary_head():
    segmentation = pytest.importorskip("torchvision", reason="torchvision is not installed").models.segmentation
    torch.manual_seed(0)
    network = segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3, aux_loss=True
    )
    x, y = torch.randn(2, 3, 32, 32), torch.randint(3, (2, 32, 32))
    posterior = ds.Laplace(network, samples=3).fit_posthoc([(x, y)])
    assert posterior.sampled_names() == ["classifier.4.weight", "classifier.4.bias"]
    assert posterior.predict(x).mean.shape == (2, 3, 32, 32)
    assert float(posterior.predict(x).epistemic.mean()) > 0


def gpt2_as_linear(network):
    """The same GPT-2 with nn.Linear in the place of transformers' Conv1D."""
    network = copy.deepcopy(network)
    for name, part in list(network.named_modules()):
        if type(part).__name__ == "Conv1D":
            linear = nn.Linear(part.nx, part.nf).to(part.weight)
            linear.weight.data, linear.bias.data = part.weight.data.T.contiguous(), part.bias.data.clone()
            parent, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(parent), leaf, linear)
    return network


LAYERED = {
    "batch_ensemble": lambda net: ds.BatchEnsemble(net, members=2, modulation=ds.Modulation.normal(1.0, 0.3)),
    "dropout_ensemble": lambda net: ds.DropoutEnsemble(net, members=2, rate=0.3),
    "node_bnn": lambda net: ds.NodeBNN(net, data_size=6, samples=4),
    "rank_one_bnn": lambda net: ds.RankOneBNN(net, data_size=6, samples=4),
}


@pytest.mark.parametrize("method", LAYERED)
def test_gpt2_is_converted_as_if_its_layers_were_linear(method):
    network, found = decoder("GPT2"), []
    for each in (network, gpt2_as_linear(network)):
        torch.manual_seed(3)
        posterior = LAYERED[method](each)
        assert sum("c_" in name for name in posterior.account.converted) >= 3
        torch.manual_seed(4)
        outputs = posterior.predict(X).member_means
        if "bnn" not in method:  # the others draw anew for every prediction
            member = posterior.member(1)(**X).logits.softmax(1)
            torch.testing.assert_close(member.detach(), outputs[1], rtol=0, atol=1e-6)
        found.append(outputs)
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)


def test_node_bnn_of_deberta_names_the_layer_that_has_no_examples_and_works_without_it():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 16}
    config = transformers.DebertaV2Config(**sizes, **relative, **SMALL)
    network = transformers.DebertaV2ForSequenceClassification(config)
    loader = [(X, Y)]
    with pytest.raises(
        ValueError, match=r"on the first axis of layer '.*pos_key_proj'.*exclude this layer with layers="
    ):
        ds.fit(ds.NodeBNN(network, data_size=6), loader, epochs=1, progress=False)
    posterior = ds.NodeBNN(network, data_size=6, samples=4, layers=["*dense", "*value_proj", "classifier"])
    ds.fit(posterior, loader, epochs=1, progress=False)
    assert posterior.predict(X).mean.shape == (6, 3)

"""ONNX files of BERT and of vision transformers: free batch and length, equal to predict."""

import pytest
import torch

import dissensus as ds

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
timm = pytest.importorskip("timm", reason="timm is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter


def bert():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=40, num_labels=3, initializer_range=0.3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def tokens(batch, length):
    """Rows of different lengths, padded."""
    generator = torch.Generator().manual_seed(batch + length)
    ids = torch.randint(1, 50, (batch, length), generator=generator)
    lengths = torch.randint(1, length + 1, (batch,), generator=generator).clamp(min=length // 2)
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def hf_vit():
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        num_labels=3, initializer_range=0.3,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def timm_vit():
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    network = timm.create_model("vit_tiny_patch16_224", **sizes)
    torch.nn.init.normal_(network.head.weight)
    return network


def images(batch, size):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch))


LENGTHS = {"input_ids": {0: "batch", 1: "length"}, "attention_mask": {0: "batch", 1: "length"}}
CASES = {
    "bert": (lambda: ds.DeepEnsemble([bert(), bert()]), tokens, LENGTHS, (3, 8), [(1, 8), (2, 1), (5, 13), (2, 40)]),
    "vit": (lambda: ds.MAP(hf_vit()), images, None, (2, 16), [(1, 16), (7, 16)]),
    "timm vit": (lambda: ds.MAP(timm_vit()), images, None, (2, 16), [(1, 16), (7, 16)]),
}


@pytest.mark.parametrize(("build", "data", "dynamic", "traced", "others"), CASES.values(), ids=CASES)
def test_the_file_of_a_transformer_says_what_predict_says_at_other_sizes(
    build, data, dynamic, traced, others, tmp_path
):
    torch.manual_seed(0)
    posterior = build().eval()
    ds.export(posterior, tmp_path / "m.onnx", example=data(*traced), dynamic=dynamic)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    for sizes in others:
        x = data(*sizes)
        given = x if isinstance(x, dict) else {"x": x}
        found = dict(zip(names, session.run(None, {name: each.numpy() for name, each in given.items()}), strict=True))
        wanted = posterior.predict(x)
        for name in ("mean", "total", "epistemic"):
            torch.testing.assert_close(torch.from_numpy(found[name]), getattr(wanted, name), rtol=0, atol=1e-5)

"""Attacks in an evaluation: each number against a direct computation; in the bench and in its report."""

import re

import pytest
import torch

import dissensus as ds
import tiny
from dissensus import attacks, metrics
from dissensus.bench.run.jobs import bench
from dissensus.bench.run.run import Run
from dissensus.bench.task.config import load_task
from dissensus.data import Batches, Standardiser
from refusals import refuses

pytestmark = pytest.mark.usefixtures("undrawn")

RADII = [0.1, 0.3]


def problem(members=3):
    torch.manual_seed(0)
    images = torch.randint(256, (10, 1, 4, 4), dtype=torch.uint8)
    standardiser = Standardiser.of_channels(images)
    networks = [ds.nets.MLP(16, 3, hidden=(8,)) for _ in range(members)]
    return ds.DeepEnsemble(networks), standardiser(images), torch.arange(10) % 3, standardiser


@pytest.mark.parametrize("members", [1, 3])
def test_every_number_is_that_of_the_attack_by_hand(members):
    posterior, x, y, standardiser = problem(members)
    posterior.temperature.fill_(0.5)
    curves = ds.AttackCurves(epsilons=RADII, steps=3, fool_steps=4, standardiser=standardiser)
    found = ds.evaluate(posterior, Batches(x, y, batch_size=4), attack=curves)
    member = ds.MAP(posterior.member(0))
    member.temperature.fill_(0.5)
    by_hand = {
        "fgsm": lambda e: attacks.fgsm(posterior, x, y, e, standardiser=standardiser),
        "pgd": lambda e: attacks.pgd(posterior, x, y, e, steps=3, standardiser=standardiser),
        "transfer": lambda e: attacks.pgd(member, x, y, e, steps=3, standardiser=standardiser),
    }
    for name, attack in by_hand.items():
        each = []
        for epsilon in (0, *RADII):
            said = posterior.predict(attack(epsilon).inputs if epsilon else x)
            expected = {
                "accuracy": metrics.accuracy(said.mean, y),
                "nll": metrics.nll(said.log_mean, y),
                "ece": metrics.ece(said.mean, y),
                "entropy": said.total.mean(),
                "mutual_information": said.epistemic.mean(),
            }
            each.append(expected)
            for key, value in expected.items():
                if epsilon:
                    assert found.metrics[f"attack/{name}/{epsilon:g}/{key}"] == pytest.approx(float(value), abs=1e-5)
        for key in each[0]:
            values = torch.tensor([float(one[key]) for one in each])
            assert torch.allclose(found.arrays[f"attack/{name}/{key}"].float(), values, atol=1e-5)
            assert found.metrics[f"attack/{name}/{key}"] == pytest.approx(float(values[1:].mean()), abs=1e-5)
        assert found.metrics[f"attack/{name}/nll"] == pytest.approx(
            float(found.arrays[f"attack/{name}/example_nll"].mean())
        )
        assert f"attack/{name}/accuracy" in found.table()
        assert f"attack/{name}/0.1/" not in found.table()
    assert found.arrays["attack/epsilons"].tolist() == [0, *RADII]
    if members == 1:
        assert found.metrics["attack/transfer/nll"] == pytest.approx(found.metrics["attack/pgd/nll"])


def test_fooling_inputs_are_kept_in_pixels_with_what_is_said_of_them():
    posterior, x, y, standardiser = problem()
    curves = ds.AttackCurves(epsilons=RADII, names=["fgsm"], fool_steps=30, standardiser=standardiser)
    found = ds.evaluate(posterior, [(x, y)], attack=curves)
    inputs = found.arrays["examples/fooling/inputs"]
    assert inputs.shape == (3, 1, 4, 4)
    assert float(inputs.min()) > -1e-6
    assert float(inputs.max()) < 1 + 1e-6
    said = posterior.predict(standardiser(inputs)).mean
    assert torch.allclose(found.arrays["examples/fooling/confidence"].float(), said.diagonal(), atol=1e-4)
    assert found.metrics["fool/confidence"] == pytest.approx(float(said.diagonal().mean()), abs=1e-4)
    assert torch.equal(found.arrays["examples/fooling/reached"].bool(), said.argmax(1) == torch.arange(3))
    none = ds.evaluate(posterior, [(x, y)], attack=ds.AttackCurves(RADII, ["fgsm"], standardiser=standardiser))
    assert not [key for key in (*none.metrics, *none.arrays) if "fool" in key]


def test_attacked_draws_are_those_that_are_measured():
    """Of a method that samples anew: FGSM's step of the functions that judged the clean inputs."""
    torch.manual_seed(0)
    posterior, (x, y) = ds.MCDropout(tiny.mlp(0.5), samples=4), tiny.points(30)
    before = torch.get_rng_state()
    found = ds.evaluate(posterior, [(x.float(), y)], attack=ds.AttackCurves([0.2], ["fgsm"], bounds=None))
    assert torch.equal(torch.get_rng_state(), before)
    step = attacks.fgsm(posterior, x.float(), y, 0.2, bounds=None).inputs
    assert found.metrics["attack/fgsm/nll"] == pytest.approx(
        float(-posterior.predict(step).log_prob(y).mean()), abs=1e-5
    )


def test_labels_that_do_not_count_are_not_attacked():
    torch.manual_seed(0)
    networks, (x, y) = [tiny.mlp() for _ in range(2)], tiny.points(12)
    ignoring = ds.DeepEnsemble(networks, likelihood=ds.Classification(ignore_index=2))
    curves = ds.AttackCurves([0.2], ["pgd"], bounds=None)
    found = ds.evaluate(ignoring, [(x.float(), y)], attack=curves)
    kept = y != 2
    expected = ds.evaluate(ds.DeepEnsemble(networks), [(x[kept].float(), y[kept])], attack=curves)
    assert found.metrics["attack/pgd/nll"] == pytest.approx(expected.metrics["attack/pgd/nll"])


@pytest.mark.parametrize(("keywords", "said"), [
    ({"epsilons": []}, "ascending epsilons"), ({"epsilons": [0.2, 0.1]}, "ascending epsilons"),
    ({"epsilons": [0.0, 0.1]}, "epsilons above 0"), ({"names": ["pdg"]}, "did you mean 'pgd'"),
    ({"names": []}, "expected attacks and ascending"), ({"steps": 0}, "expected steps of at least 1"),
    ({"fool_steps": -1}, "expected fool_steps"),
])  # fmt: skip
def test_curves_that_cannot_be_drawn_are_said(keywords, said):
    refuses(lambda: ds.AttackCurves(**{"epsilons": [0.1]} | keywords), said)


def test_regressions_and_loaders_that_are_used_up_are_refused():
    (x, y), curves = tiny.points(), ds.AttackCurves([0.1], bounds=None)
    posterior = ds.MAP(tiny.mlp(outputs=1), likelihood=ds.Regression()).double()
    with pytest.raises(ValueError, match="expected a classification to attack, got a regression"):
        ds.evaluate(posterior, [(x, x[:, :1])], attack=curves)
    with pytest.raises(ValueError, match="expected inputs to attack, got no batch"):
        ds.evaluate(ds.MAP(tiny.mlp()).double(), iter([(x, y)]), attack=curves)


def test_the_task_runs_and_its_page_shows_attacks_and_fooling_inputs(tmp_path):
    task = load_task("adversarial", size="smoke")
    results, _ = bench(task, methods=["map", "batch_ensemble"], out=tmp_path)
    for several in results.methods.values():
        found = several[0].metrics
        assert {f"attack/{n}/0.1/{k}" for n in ("fgsm", "pgd", "transfer") for k in ("accuracy", "entropy")} <= {*found}
        assert found["attack/pgd/nll"] >= found["attack/fgsm/nll"] - 0.05
        assert 0 < found["fool/confidence"] < 1
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert "What happens on attacked inputs?" in page
    assert page.count("Noise turned into a class") == 2
    assert "## By attack and radius: Mutual information, nats" in text
    row = re.search(r"\| pgd, ε = 0.1 \|(.*)\|", text)
    assert row is not None
    assert len(row[1].split("|")) == 2
    again = Run.open(tmp_path / "map-seed0")
    assert again.evaluate().metrics == results.methods["map"][0].metrics


@pytest.mark.parametrize(("override", "said"), [
    ("evaluation.attack=pdg", "did you mean 'pgd'"),
    ("evaluation.epsilons=[-0.1]", "expected epsilon of at least 0"),
    ("evaluation.attack_norm=l2", "expected norm of inf, 2, got 'l2'"),
])  # fmt: skip
def test_attacks_of_a_task_are_checked_before_anything_is_trained(override, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        bench(load_task("adversarial", size="smoke", overrides=[override]), methods=["map"], out=tmp_path / "runs")
    assert not list(tmp_path.rglob("*.toml"))


def test_a_regression_task_with_attacks_is_refused(tmp_path):
    task = load_task("cubic", size="smoke", overrides=["evaluation.attack=pgd", "evaluation.epsilons=[0.1]"])
    refuses(lambda: bench(task, methods=["map"], out=tmp_path), "got a regression; pass attack=None")

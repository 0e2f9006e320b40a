"""`dissensus theory`: what its rows obey, and that every command writes its figure."""

import sys

import pytest
import torch

from dissensus.bench import cli
from dissensus.bench.theory import studies

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "arguments",
    [("kernels", "--widths", "16,32", "--seeds", "3"), ("dynamics", "--width", "32", "--steps", "5"),
     ("width", "--widths", "16,32", "--seeds", "2"), ("regimes",)],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_a_command_writes_its_figure(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dissensus", "theory", *arguments, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert not done.value.code
    assert (tmp_path / f"theory-{arguments[0]}.png").read_bytes().startswith(PNG)
    printed = capsys.readouterr().out
    assert f"theory-{arguments[0]}.png" in printed
    if arguments[0] in ("kernels", "width"):
        assert (tmp_path / f"{arguments[0]}.csv").read_text().startswith("setting,width,seed")


def test_wrong_widths_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dissensus", "theory", "kernels", "--widths", "64,wide"])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 2
    assert "expected whole numbers with commas between, got '64,wide'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["kernels", "dynamics", "width", "regimes"])
def test_a_file_in_place_of_the_folder_is_found_before_anything_is_computed(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    for work in ("kernels", "dynamics", "width", "regimes"):
        monkeypatch.setattr(studies, work, lambda *_, **__: pytest.fail("computed"))
    monkeypatch.setattr(sys, "argv", ["dissensus", "theory", command, "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 2
    assert "expected a folder to write to, got" in capsys.readouterr().err


def test_cross_member_kernels_of_independent_members_deviate_from_zero_as_one_over_the_root_of_the_width():
    rows = [row for row in studies.kernels((32, 128, 512), seeds=20).rows if "independent" in row["setting"]]
    deviations = {width: [] for width in (32, 128, 512)}
    for row in rows:
        if row["kernel"] == "common_cross":
            deviations[row["width"]].append(row["empirical"] - row["analytic"])
    mine = [
        {"width": width, "error": float(torch.tensor(each).square().mean().sqrt())}
        for width, each in deviations.items()
    ]
    assert studies.slope(mine)[0] == pytest.approx(-0.5, abs=0.25)  # three points of 20 draws, 16 % each
    assert {row["analytic"] for row in rows if row["kernel"].endswith("cross")} == {0}


def test_the_map_has_its_known_borders():
    rate, speed = studies.regime_map([0.0, 1.0], [1, 4, 64])
    assert torch.allclose(rate[0], torch.ones(3, dtype=torch.float64))  # independent members need no smaller rate
    assert torch.allclose(speed[0], torch.ones(3, dtype=torch.float64))
    assert float(speed[1].abs().max()) < 1e-9  # equal members do not differ
    assert float(rate[1, 2]) < float(rate[1, 1]) < 1


def test_a_slope_is_found_with_its_interval():
    rows = [
        {"width": 10**k, "error": 3 * 10 ** (-0.5 * k) * (1 + 0.01 * (-1) ** i)} for k in (1, 2, 3) for i in range(4)
    ]
    found, lower, upper = studies.slope(rows)
    assert lower < -0.5 < upper
    assert found == pytest.approx(-0.5, abs=0.01)

"""`dissensus theory`: what its rows obey, and that every command writes its figure."""

import numpy as np
import pytest
import torch

from dissensus.bench import theory_studies
from dissensus.bench.report.comparisons import slope_weights

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "arguments",
    [("kernels", "--widths", "16,32", "--seeds", "3"), ("dynamics", "--width", "32", "--steps", "5"),
     ("width", "--widths", "16,32", "--seeds", "2"), pytest.param(("regimes",), marks=pytest.mark.slow)],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_a_command_writes_its_figure(arguments, tmp_path, command_line):
    code, printed, _ = command_line("theory", *arguments, "--out", str(tmp_path))
    assert code == 0
    assert (tmp_path / f"theory-{arguments[0]}.png").read_bytes().startswith(PNG)
    assert f"theory-{arguments[0]}.png" in printed
    if arguments[0] == "width":
        assert (tmp_path / f"{arguments[0]}.csv").read_text().startswith("setting,width,seed")


def test_wrong_widths_are_one_line(command_line):
    code, _, said = command_line("theory", "kernels", "--widths", "64,wide")
    assert code == 2
    assert "expected --widths as a whole number, got 'wide'" in said


@pytest.mark.parametrize("command", ["kernels", "dynamics", "width", "regimes"])
def test_a_file_in_place_of_the_folder_is_found_before_anything_is_computed(
    command, tmp_path, monkeypatch, command_line
):
    (tmp_path / "file").write_text("")
    for work in ("kernels", "dynamics", "width", "regimes"):
        monkeypatch.setattr(theory_studies, work, lambda *_, **__: pytest.fail("computed"))
    code, _, said = command_line("theory", command, "--out", str(tmp_path / "file"))
    assert code == 2
    assert "expected a folder to write to, got" in said


def test_cross_member_kernels_of_independent_members_deviate_from_zero_as_one_over_the_root_of_the_width():
    widths = (32, 128, 512)
    signs = next(iter(theory_studies.SETTINGS.values()))
    far = theory_studies.deviations(signs, widths, 20)[3].numpy()  # common_cross
    assert slope_weights(widths) @ np.log2(far) == pytest.approx(-0.5, abs=0.25)  # three points of 20 draws, 16 % each
    x, _ = theory_studies.random_data(2, seed=0)
    assert float(signs.kernels(x).common_cross.abs().max()) == float(signs.kernels(x).gp_cross.abs().max()) == 0


def test_the_map_has_its_known_borders():
    rate, speed = theory_studies.regime_map([0.0, 1.0], [1, 4, 64])
    assert torch.allclose(rate[0], torch.ones(3, dtype=torch.float64))  # independent members need no smaller rate
    assert torch.allclose(speed[0], torch.ones(3, dtype=torch.float64))
    assert float(speed[1].abs().max()) < 1e-9  # equal members do not differ
    assert float(rate[1, 2]) < float(rate[1, 1]) < 1

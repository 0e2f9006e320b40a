"""MATLAB files written by SciPy come back as they were; damaged ones are ValueErrors and nothing worse."""

import numpy as np
import pytest
from scipy.io import savemat

from dissensus.data.file_formats import matlab_arrays, read_mat
from thinning import often

TYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("code", TYPES)
def test_arrays_of_every_type_come_back_from_scipy(tmp_path, code, compressed):
    generator = np.random.default_rng(0)
    arrays = {
        "a": generator.integers(0, 100, (3, 4, 5)).astype(code),
        "of_a_longer_name": generator.integers(0, 100, (1, 2)).astype(code),  # small enough to share its tag
        "tall": generator.integers(0, 100, (1001, 1)).astype(code),
    }
    savemat(tmp_path / "file.mat", arrays, do_compression=compressed)
    found = matlab_arrays((tmp_path / "file.mat").read_bytes())
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == np.dtype(code)


def test_big_endian_files_are_read(tmp_path):
    """The first bytes of a file from a machine of the other byte order, by hand: one 2×1 int16 matrix z = (1, −2)."""

    def element(kind: int, data: bytes) -> bytes:
        return kind.to_bytes(4, "big") + len(data).to_bytes(4, "big") + data + bytes(-len(data) % 8)

    flags, sizes = (10).to_bytes(4, "big") + bytes(4), (2).to_bytes(4, "big") + (1).to_bytes(4, "big")
    matrix = element(6, flags) + element(5, sizes) + element(1, b"z") + element(3, b"\0\1\xff\xfe")
    (tmp_path / "file.mat").write_bytes(b"MATLAB".ljust(124) + b"\1\0MI" + element(14, matrix))
    np.testing.assert_array_equal(matlab_arrays((tmp_path / "file.mat").read_bytes())["z"], [[1], [-2]])


def test_text_cells_structures_and_complex_numbers_are_passed_over(tmp_path):
    others = {"text": "hello", "cell": np.array([1, "two"], dtype=object), "structure": {"a": 1}, "complex": 1j}
    savemat(tmp_path / "file.mat", others | {"number": 3.0})
    assert set(matlab_arrays((tmp_path / "file.mat").read_bytes())) == {"number"}


@pytest.mark.parametrize("compressed", often([True], [False]))
def test_damaged_files_are_value_errors(tmp_path, compressed):
    path = tmp_path / "file.mat"
    savemat(path, {"X": np.zeros((3, 4, 1, 5), np.uint8), "y": np.arange(5)[:, None]}, do_compression=compressed)
    raw = path.read_bytes()
    for damaged in (b"", raw[:100], raw[:-5], raw[:140], raw[:126] + b"??" + raw[128:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="expected a MATLAB 5 file"):
            read_mat(path)
    generator = np.random.default_rng(1)
    refused = 0
    for _ in range(300):  # any byte may be wrong: an array or a ValueError, never another error
        changed = bytearray(raw)
        changed[generator.integers(128, len(raw))] = generator.integers(256)
        path.write_bytes(changed)
        try:
            read_mat(path)
        except ValueError:
            refused += 1
    assert refused > 10

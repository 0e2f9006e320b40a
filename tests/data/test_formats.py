"""The readers give back what was written by other means, and refuse what is damaged; shipped files are what they say."""

import gzip
import hashlib
import io
import itertools
import os
import pickle
import struct
import tracemalloc
import zlib
from importlib.resources import files

import numpy as np
import pytest
import torch
from scipy.io import savemat, whosmat

from dissensus.data import cifar10, digits, fashion, file_formats
from dissensus.data.toy import three_clusters
from refusals import refuses
from thinning import often, thinned

IDX_CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}
STRUCT_CODES = {"u1": "B", "i1": "b", "i2": "h", "i4": "i", "f4": "f", "f8": "d"}


def idx_bytes(values: np.ndarray, code: str) -> bytes:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, IDX_CODES[code], values.ndim, *values.shape)
    return header + struct.pack(f">{values.size}{STRUCT_CODES[code]}", *values.flatten().tolist())


class Intruder:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def python2_batch(rows: np.ndarray, entries: dict[bytes, list[int]], fortran: bool = False) -> bytes:
    """A CIFAR batch as Python 2 wrote it: protocol 2, byte strings, NumPy 1 names. Opcodes by hand."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    def integer(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + short(b"|") + b"NNN" + integer(-1) + integer(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R"
    raw = rows.tobytes(order="F" if fortran else "C")
    array += b"(K\x01" + integer(rows.shape[0]) + integer(rows.shape[1]) + b"\x86" + dtype
    array += (b"\x88" if fortran else b"\x89") + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    body = short(b"data") + array
    for key, values in entries.items():
        body += short(key) + b"](" + b"".join(map(integer, values)) + b"e"
    body += short(b"filenames") + b"](" + short(b"a.png") + b"e"
    return b"\x80\x02}(" + body + b"u."


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)


@pytest.mark.parametrize("code", IDX_CODES)
def test_idx_of_every_type_comes_back_as_written(tmp_path, code):
    limit = 120 if code.startswith("i") else 250
    for shape, zipped in itertools.product([(7,), (3, 4), (2, 3, 4)], [False, True]):
        values = np.random.default_rng(1).integers(-limit if code[0] != "u" else 0, limit, shape).astype(code)
        raw = idx_bytes(values, code)
        (tmp_path / "values").write_bytes(gzip.compress(raw) if zipped else raw)
        found = file_formats.read_idx(tmp_path / "values")
        assert found.dtype == np.dtype(code)
        assert found.dtype.isnative
        np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(("change", "message"), [
    (lambda raw: raw[:-1], "28 bytes are needed for shape"), (lambda raw: raw + b"\0", "it has 29"),
    (lambda raw: raw[:10], "it has 10"), (lambda raw: raw[:3], "expected an IDX file"),
    (lambda raw: b"", "expected an IDX file"), (lambda raw: b"\1" + raw[1:], "expected an IDX file"),
    (lambda raw: raw[:2] + b"\x0a" + raw[3:], "expected an IDX file"),
    (lambda raw: raw[:3] + b"\0", "expected an IDX file"), (lambda raw: gzip.compress(raw)[:-9], "gzip"),
    (lambda raw: gzip.compress(raw)[:-6] + b"\0\0\0\0\0\0", "gzip"), (lambda raw: b"\x1f\x8bnothing", "gzip"),
])  # fmt: skip
def test_damaged_idx_is_a_value_error(tmp_path, change, message):
    raw = idx_bytes(np.arange(16, dtype=np.uint8).reshape(4, 4), "u1")
    path = tmp_path / "values.gz"
    path.write_bytes(change(raw))
    refuses(lambda: file_formats.read_idx(path), message)


def test_missing_files_are_os_errors(tmp_path):
    for read in (
        file_formats.read_idx,
        file_formats.read_npz,
        file_formats.read_mat,
        file_formats.read_cifar_binary,
        file_formats.read_cifar_python,
    ):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "nothing")


@pytest.mark.parametrize("keys", [("images", "labels"), ("x", "y")])
@pytest.mark.parametrize("layout", ["NHW", "NCHW", "NHWC", "grey NHWC"])
def test_npz_images_come_channels_first_from_every_layout(tmp_path, keys, layout):
    channels = 3 if layout in ("NCHW", "NHWC") else 1
    images = np.random.default_rng(2).integers(0, 256, (5, channels, 6, 7), dtype=np.uint8)
    stored = {"NHW": images[:, 0], "NCHW": images}.get(layout, images.transpose(0, 2, 3, 1))
    np.savez(tmp_path / "set.npz", **{keys[0]: stored, keys[1]: np.arange(5, dtype=np.uint8)[:, None]})
    found, labels = file_formats.read_npz(tmp_path / "set.npz")
    np.testing.assert_array_equal(found, images)
    np.testing.assert_array_equal(labels, np.arange(5))
    assert labels.dtype == np.int64


@pytest.mark.parametrize(("arrays", "message"), [
    ({"pictures": np.zeros((2, 4, 4), np.uint8)}, "expected the keys"),
    ({"images": np.zeros((2, 4, 4)), "labels": np.zeros(2, int)}, "uint8"),
    ({"images": np.zeros((2, 3, 4, 3), np.uint8), "labels": np.zeros(2, int)}, "one channel axis"),
    ({"images": np.zeros((2, 5, 4, 4), np.uint8), "labels": np.zeros(2, int)}, "one channel axis"),
    ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(3, int)}, "2 integer labels"),
    ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(2)}, "2 integer labels"),
])  # fmt: skip
def test_npz_with_the_wrong_arrays_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "set.npz", **arrays)
    refuses(lambda: file_formats.read_npz(tmp_path / "set.npz"), message)


def test_npz_never_unpickles(tmp_path):
    trap = np.empty(1, dtype=object)
    trap[0] = Intruder(tmp_path / "intruder")
    np.savez(tmp_path / "set.npz", images=trap, labels=np.zeros(1, int))
    refuses(lambda: file_formats.read_npz(tmp_path / "set.npz"), "plain arrays")
    assert not (tmp_path / "intruder").exists()


def test_damaged_npz_is_a_value_error(tmp_path):
    whole = io.BytesIO()
    np.savez_compressed(whole, images=np.random.default_rng(3).integers(0, 256, (9, 8, 8), dtype=np.uint8))
    raw = whole.getvalue()
    flipped = raw[:200] + bytes([raw[200] ^ 255]) + raw[201:]
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    for damaged in (raw[: len(raw) // 2], flipped, b"not a zip", b"", array.getvalue()):
        (tmp_path / "set.npz").write_bytes(damaged)
        refuses(lambda: file_formats.npz_arrays(tmp_path / "set.npz"), "plain arrays")


@pytest.mark.parametrize("labels", [np.arange(1, 6, dtype=np.uint8), np.arange(1.0, 6.0)])
def test_mat_file_is_turned_channels_first(tmp_path, labels):
    images = np.random.default_rng(4).integers(0, 256, (5, 3, 8, 6), dtype=np.uint8)
    savemat(tmp_path / "set.mat", {"X": images.transpose(2, 3, 1, 0), "y": labels[:, None]})
    found, classes = file_formats.read_mat(tmp_path / "set.mat")
    np.testing.assert_array_equal(found, images)
    assert classes.tolist() == [1, 2, 3, 4, 5]
    assert classes.dtype == np.int64


def test_mat_file_with_the_wrong_arrays_is_refused(tmp_path):
    images = np.zeros((4, 4, 3, 2), np.uint8)
    for arrays, message in (
        ({"X": images}, "expected X"),
        ({"X": images[0], "y": [[1], [2]]}, "expected X"),
        ({"X": images, "y": [[1.5], [2.0]]}, "2 integer labels"),
        ({"X": images, "y": [[1]]}, "2 integer labels"),
        ({"X": images.astype(float), "y": [[1], [2]]}, "uint8"),
    ):
        savemat(tmp_path / "set.mat", arrays)
        refuses(lambda: file_formats.read_mat(tmp_path / "set.mat"), message)


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_cifar_binary_rows_are_labels_then_red_green_blue(tmp_path, rows, label_bytes):
    labels = np.random.default_rng(5).integers(0, 100, (4, label_bytes), dtype=np.uint8)
    (tmp_path / "batch.bin").write_bytes(b"".join(bytes(a) + bytes(b) for a, b in zip(labels, rows, strict=True)))
    images, found = file_formats.read_cifar_binary(tmp_path / "batch.bin", label_bytes=label_bytes)
    assert images.shape == (4, 3, 32, 32)
    assert images[2, 1, 5, 7] == rows[2, 1024 + 5 * 32 + 7]
    np.testing.assert_array_equal(images.reshape(4, -1), rows)
    np.testing.assert_array_equal(found, labels)


@pytest.mark.parametrize("size", [0, 3072, 3074, 2 * 3073 - 1])
def test_cifar_binary_of_the_wrong_length_is_refused(tmp_path, size):
    (tmp_path / "batch.bin").write_bytes(bytes(size))
    refuses(lambda: file_formats.read_cifar_binary(tmp_path / "batch.bin"), "rows of 3073 bytes")


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("fortran", [False, True])
def test_cifar_batches_of_python_2_are_read(tmp_path, rows, fortran, older):
    raw = python2_batch(rows, {b"fine_labels": [3, 1, 99, 5], b"coarse_labels": [0, 1, 2, 19]}, fortran)
    true = pickle.loads(raw, encoding="latin1")["data"]
    np.testing.assert_array_equal(true, rows)  # the hand-made file is a true one
    (tmp_path / "batch").write_bytes(b"(" + raw[4:-2] + b"d." if older else raw)  # protocols 0 and 1 end a dict so
    images, fine = file_formats.read_cifar_python(tmp_path / "batch", labels="fine_labels")
    np.testing.assert_array_equal(images.reshape(4, -1), rows)
    assert fine.tolist() == [3, 1, 99, 5]
    assert file_formats.read_cifar_python(tmp_path / "batch", labels="coarse_labels")[1].tolist() == [0, 1, 2, 19]
    refuses(lambda: file_formats.read_cifar_python(tmp_path / "batch"), "data and labels")


@pytest.mark.parametrize("protocol", [3, 4])
def test_cifar_batches_saved_again_by_python_3_are_read(tmp_path, rows, protocol):
    batch = {b"data": rows, "labels": [1, 2, 3, 4]}
    (tmp_path / "batch").write_bytes(pickle.dumps(batch, protocol=protocol))
    images, labels = file_formats.read_cifar_python(tmp_path / "batch")
    np.testing.assert_array_equal(images.reshape(4, -1), rows)
    assert labels.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_that_would_run_code_are_refused_before_they_do(tmp_path, protocol):
    batch = {"labels": [0], "data": Intruder(tmp_path / "intruder")}
    raw = pickle.dumps(batch, protocol=protocol)
    (tmp_path / "batch").write_bytes(raw)
    refuses(lambda: file_formats.read_cifar_python(tmp_path / "batch"), "which no CIFAR batch contains")
    assert not (tmp_path / "intruder").exists()
    pickle.loads(raw)
    assert (tmp_path / "intruder").exists()  # it would have


@pytest.mark.parametrize(
    "name", ["os\nsystem", "builtins\neval", "builtins\ngetattr", "numpy\nload", "numpy.core.multiarray\nfrombuffer"]
)
def test_every_other_global_is_refused(tmp_path, name):
    (tmp_path / "batch").write_bytes(b"c" + name.encode() + b"\n.")
    refuses(lambda: file_formats.read_cifar_python(tmp_path / "batch"), "which no CIFAR batch contains")


def test_pickles_cannot_leave_anything_behind_on_the_admitted_names(tmp_path):
    """BUILD sets attributes on what it is given; on the stand-ins of NumPy's names it must fail."""
    (tmp_path / "batch").write_bytes(b"\x80\x02cnumpy\nndarray\nN}U\x04trapK\x01s\x86b.")
    refuses(lambda: file_formats.read_cifar_python(tmp_path / "batch"), "CIFAR batch")


def test_damaged_cifar_pickles_are_value_errors(tmp_path, rows):
    raw = python2_batch(rows, {b"labels": [1, 2, 3, 4]})
    short = raw.replace(struct.pack("<i", 3072), struct.pack("<i", 3071), 1)
    wide = raw.replace(b"U\x02u1", b"U\x02i4")
    float_labels = pickle.dumps({"data": rows, "labels": [0.5, 1.0, 2.0, 3.0]}, protocol=4)
    few_labels = pickle.dumps({"data": rows, "labels": [0]}, protocol=4)
    no_array = pickle.dumps({"data": [1, 2], "labels": [0, 1]}, protocol=4)
    half_rows = raw.replace(b"J" + struct.pack("<i", 4) + b"J", b"G" + struct.pack(">d", 4.0) + b"J", 1)
    bare = b"\x80\x02}(U\x04datacnumpy\nndarray\n)\x81U\x06labels]u."
    wrong = short, wide, half_rows, float_labels, few_labels, no_array, bare
    for damaged in (raw[:100], raw[:-1], b"", b"garbage", b"K\x01.", *wrong):
        (tmp_path / "batch").write_bytes(damaged)
        refuses(lambda: file_formats.read_cifar_python(tmp_path / "batch"), "expected")


# -------------------------------------------------------------------------------------------------------------- MATLAB
TYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"]


@pytest.mark.parametrize(("code", "compressed"), thinned(TYPES, [False, True], every=2))
def test_arrays_of_every_type_come_back_from_scipy(tmp_path, code, compressed):
    generator = np.random.default_rng(0)
    arrays = {
        "a": generator.integers(0, 100, (3, 4, 5)).astype(code),
        "of_a_longer_name": generator.integers(0, 100, (1, 2)).astype(code),  # small enough to share its tag
        "tall": generator.integers(0, 100, (1001, 1)).astype(code),
    }
    savemat(tmp_path / "file.mat", arrays, do_compression=compressed)
    found = file_formats.matlab_arrays((tmp_path / "file.mat").read_bytes())
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
    np.testing.assert_array_equal(file_formats.matlab_arrays((tmp_path / "file.mat").read_bytes())["z"], [[1], [-2]])


def test_text_cells_structures_and_complex_numbers_are_passed_over(tmp_path):
    others = {"text": "hello", "cell": np.array([1, "two"], dtype=object), "structure": {"a": 1}, "complex": 1j}
    savemat(tmp_path / "file.mat", others | {"number": 3.0})
    assert set(file_formats.matlab_arrays((tmp_path / "file.mat").read_bytes())) == {"number"}


@pytest.mark.parametrize("compressed", often([True], [False]))
def test_damaged_files_are_value_errors(tmp_path, compressed):
    path = tmp_path / "file.mat"
    savemat(path, {"X": np.zeros((3, 4, 1, 5), np.uint8), "y": np.arange(5)[:, None]}, do_compression=compressed)
    raw = path.read_bytes()
    for damaged in (b"", raw[:100], raw[:-5], raw[:140], raw[:126] + b"??" + raw[128:]):
        path.write_bytes(damaged)
        refuses(lambda: file_formats.read_mat(path), "expected a MATLAB 5 file")
    generator = np.random.default_rng(1)
    refused = 0
    for _ in range(300):  # any byte may be wrong: an array or a ValueError, never another error
        changed = bytearray(raw)
        changed[generator.integers(128, len(raw))] = generator.integers(256)
        path.write_bytes(changed)
        try:
            file_formats.read_mat(path)
        except ValueError:
            refused += 1
    assert refused > 10


def test_a_small_file_that_unpacks_to_far_more_is_refused_before_that_is_in_memory(tmp_path):
    """Half a megabyte for a 1 × 1 matrix with 512 MiB of values; SciPy reads them all before it compares."""
    path, block, blocks = tmp_path / "file.mat", bytes(2**20), 512
    head = [struct.pack("<4I", 6, 8, 9, 0), struct.pack("<4I", 5, 8, 1, 1), struct.pack("<2I8s", 1, 1, b"X")]
    head.append(struct.pack("<2I", 2, blocks * len(block)))
    matrix = struct.pack("<2I", 14, sum(map(len, head)) + blocks * len(block)) + b"".join(head)
    packer = zlib.compressobj(9)
    first, one = (packer.compress(part) + packer.flush(zlib.Z_FULL_FLUSH) for part in (matrix, block))
    packed = first + blocks * one  # after a full flush, equal blocks are packed into equal bytes
    start = b"MATLAB 5.0".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    path.write_bytes(start + struct.pack("<2I", 15, len(packed)) + packed)
    assert whosmat(path) == [("X", (1, 1), "uint8")]
    tracemalloc.start()
    try:
        refuses(lambda: file_formats.read_mat(path), "unpacks to far more bytes than usual")
        assert tracemalloc.get_traced_memory()[1] < blocks * len(block)
    finally:
        tracemalloc.stop()


# ----------------------------------------------------------------------------------------- the data inside the package
EMBEDDED = files("dissensus.data") / "embedded"


def test_the_embedded_files_stay_small_and_carry_their_licences():
    sizes = {file.name: len(file.read_bytes()) for file in EMBEDDED.iterdir()}
    assert sum(sizes.values()) < 2_500_000
    licences = (EMBEDDED / "LICENSES.md").read_text(encoding="utf-8")
    for name in {name for name in sizes if name.endswith((".npz", ".npy"))}:
        assert name in licences
        assert hashlib.sha256((EMBEDDED / name).read_bytes()).hexdigest() in licences


def test_digits_have_a_thousand_train_and_two_hundred_test_images_of_each_class():
    train, test = digits()
    assert train.images.shape == (10_000, 1, 28, 28)
    assert test.images.shape == (2_000, 1, 28, 28)
    assert train.labels.bincount().tolist() == [1000] * 10
    assert test.labels.bincount().tolist() == [200] * 10
    assert train.classes == tuple("0123456789")


def test_the_first_rows_are_the_well_known_first_rows_of_the_originals():
    """MNIST begins 5, 0, 4, 1, 9 and its test file 7, 2, 1, 0; Fashion-MNIST's test file 9, 2, 1: all first of their class."""
    train, test = digits()
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert test.labels[:4].tolist() == [7, 2, 1, 0]
    assert [fashion().classes[label] for label in fashion().labels[:3]] == ["Ankle boot", "Pullover", "Trouser"]


def test_rows_of_the_originals_are_kept_ascending_and_once():
    for name, prefixes in (("digits.npz", ("train_", "test_")), ("fashion.npz", ("",))):
        with (EMBEDDED / name).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            for prefix in prefixes:
                rows = arrays[f"{prefix}rows"].astype(int)
                assert (np.diff(rows) > 0).all()
                assert rows[-1] < (60_000 if prefix == "train_" else 10_000)


def test_no_test_digit_is_also_a_train_digit():
    train, test = digits()
    seen = {image.numpy().tobytes() for image in train.images}
    assert not any(image.numpy().tobytes() in seen for image in test.images)


def test_pixels_have_the_mean_and_deviation_known_of_mnist():
    """0.1307 and 0.3081; image means scatter by about 0.04, so the mean of 10,000 by 4 · 0.04 / 100 = 0.0016 (and balancing
    the classes moves it by less than 0.001)."""
    pixels = digits()[0].images.double() / 255
    assert abs(float(pixels.mean()) - 0.1307) < 0.0026
    assert abs(float(pixels.std()) - 0.3081) < 0.0026


def test_labels_belong_to_their_images():
    """The nearest class mean, in plain pixels, is right for 82.0 % of MNIST's test file; 4 σ of 2,000 draws are 3.4 %."""
    train, test = digits()
    x, t = train.images.flatten(1).double(), test.images.flatten(1).double()
    means = torch.stack([x[train.labels == label].mean(0) for label in range(10)])
    accuracy = float((torch.cdist(t, means).argmin(1) == test.labels).double().mean())
    assert abs(accuracy - 0.820) < 0.034


def test_fashion_is_a_hundred_images_of_each_class():
    clothes = fashion()
    assert clothes.images.shape == (1000, 1, 28, 28)
    assert clothes.labels.bincount().tolist() == [100] * 10
    assert clothes.name == "fashion_mnist"


def test_regression_points_lie_in_three_clusters():
    features, y = three_clusters(dtype=torch.float64)
    assert features.shape == (400, 2)
    x = 2 * features[:, 0]
    inside = [((x >= low) & (x <= low + 2.4)).sum() for low in (-7.2, -1.2, 4.8)]
    assert sum(inside) == 400
    assert min(inside) > 100
    assert -0.61 < float(y.min()) < float(y.max()) < 0.91


def test_a_missing_set_names_its_files_with_their_sizes(tmp_path):
    refuses(lambda: cifar10("test", folder=tmp_path), r"test_batch\.bin  30730000 bytes", FileNotFoundError)

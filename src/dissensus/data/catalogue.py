"""The public image sets that can be read by name: class names, files, checksums, and where they lie in the user's folder."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dissensus.utils.checks import one_of


@dataclass(frozen=True)
class SourceFile:
    """One published file; bytes and sha256 are None if users make the file themselves."""

    name: str
    bytes: int | None
    sha256: str | None


@dataclass(frozen=True)
class Variant:
    """One published form of a split: its reader, its usual sub-folders and its files, in order."""

    reader: str
    folders: tuple[str, ...]
    files: tuple[SourceFile, ...]


@dataclass(frozen=True)
class Source:
    """One image set: its class names and, for each split, the variants in order of preference."""

    classes: tuple[str, ...]
    splits: dict[str, tuple[Variant, ...]]


DIGITS = tuple("0123456789")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

# Set, split, reader and usual sub-folders; below them each file with its size in bytes and its SHA-256.
FILES = """
mnist train idx mnist MNIST/raw
  train-images-idx3-ubyte.gz   9912422 440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
  train-labels-idx1-ubyte.gz     28881 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
mnist train idx mnist MNIST/raw
  train-images-idx3-ubyte     47040016 ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db
  train-labels-idx1-ubyte        60008 65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5
mnist test idx mnist MNIST/raw
  t10k-images-idx3-ubyte.gz    1648877 8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
  t10k-labels-idx1-ubyte.gz       4542 f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6
mnist test idx mnist MNIST/raw
  t10k-images-idx3-ubyte       7840016 0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7
  t10k-labels-idx1-ubyte         10008 ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2
fashion_mnist train idx fashion_mnist FashionMNIST/raw
  train-images-idx3-ubyte.gz  26421880 3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
  train-labels-idx1-ubyte.gz     29515 a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
fashion_mnist train idx fashion_mnist FashionMNIST/raw
  train-images-idx3-ubyte     47040016 c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
  train-labels-idx1-ubyte        60008 bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
fashion_mnist test idx fashion_mnist FashionMNIST/raw
  t10k-images-idx3-ubyte.gz    4422102 346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
  t10k-labels-idx1-ubyte.gz       5148 67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5
fashion_mnist test idx fashion_mnist FashionMNIST/raw
  t10k-images-idx3-ubyte       7840016 5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
  t10k-labels-idx1-ubyte         10008 0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34
notmnist test idx notmnist notMNIST
  t10k-images-idx3-ubyte.gz    3172375 70ae9e06201f2827e5b0a3781a3169d735dd2efc69996b9eeaee7f10ed4044d7
  t10k-labels-idx1-ubyte.gz       5118 1fa03836e01c862542f8eb83463bb951bebec6fcb3efa28dad748c6b38a9021b
notmnist test idx notmnist notMNIST
  t10k-images-idx3-ubyte       7840016 8e7f38ae95cc8f48e0986175ffc9137e5007ebcf3d8fdf6656c904eb9dab198b
  t10k-labels-idx1-ubyte         10008 5f8e6012f2ce730700d8d05fca098bc47f71d25b890e4bec7ac5ebfd614a4001
cifar10 train cifar10-binary cifar-10-batches-bin
  data_batch_1.bin            30730000 cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5
  data_batch_2.bin            30730000 a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed
  data_batch_3.bin            30730000 bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67
  data_batch_4.bin            30730000 014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48
  data_batch_5.bin            30730000 755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add
cifar10 train cifar10-python cifar-10-batches-py
  data_batch_1                31035704 54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd
  data_batch_2                31035320 766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8
  data_batch_3                31035999 0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9
  data_batch_4                31035696 3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b
  data_batch_5                31035623 d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154
cifar10 test cifar10-binary cifar-10-batches-bin
  test_batch.bin              30730000 8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b
cifar10 test cifar10-python cifar-10-batches-py
  test_batch                  31035526 f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831
cifar100 train cifar100-binary cifar-100-binary
  train.bin                  153700000 f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29
cifar100 train cifar100-python cifar-100-python
  train                      155249918 735e79b04f092ca3d2e6d07f368c0a7d70d48c48d28865950cc24454cf45129b
cifar100 test cifar100-binary cifar-100-binary
  test.bin                    30740000 d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a
cifar100 test cifar100-python cifar-100-python
  test                        31049707 4b67687d9933c4db8f0831104447f15b93774f4f464bd0516f0f0f2ac83b7864
svhn train svhn-mat svhn
  train_32x32.mat            182040794 435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8
svhn train svhn-npz svhn
  train_32x32.npz                    - -
svhn test svhn-mat svhn
  test_32x32.mat              64275384 cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b
svhn test svhn-npz svhn
  test_32x32.npz                     - -
"""


def _splits(name: str) -> dict[str, tuple[Variant, ...]]:
    splits: dict[str, tuple[Variant, ...]] = {}
    for block in FILES.replace("\n  ", "\t").strip().splitlines():  # one line a variant, its files after tabs
        head, *rows = block.split("\t")
        owner, split, reader, *folders = head.split()
        files = tuple(_file(*row.split()) for row in rows)
        if owner == name:
            splits[split] = (*splits.get(split, ()), Variant(reader, tuple(folders), files))
    return splits


def _file(name: str, size: str, digest: str) -> SourceFile:
    return SourceFile(name, None, None) if size == "-" else SourceFile(name, int(size), digest)


CATALOGUE = {
    "mnist": Source(DIGITS, _splits("mnist")),
    "fashion_mnist": Source(FASHION, _splits("fashion_mnist")),
    "notmnist": Source(tuple("ABCDEFGHIJ"), _splits("notmnist")),
    "cifar10": Source(CIFAR10, _splits("cifar10")),
    "cifar100": Source(tuple(CIFAR100.split()), _splits("cifar100")),
    "svhn": Source(DIGITS, _splits("svhn")),
}


Folder = str | Path | None
FOLDER_VARIABLE = "DISSENSUS_DATA"
NO_FOLDER = f"folder=None and no {FOLDER_VARIABLE} in the environment"
SHARED_NAMES = ("idx",)  # readers of several sets whose files have the same names


def locate(name: str, split: str, *, folder: Folder = None, verify: bool = False) -> tuple[Variant, list[Path]]:
    """The first variant of a split whose files exist, and their paths; FileNotFoundError lists the missing files.

    verify: compares every checksum. MNIST, Fashion-MNIST and notMNIST use the same file names: if such files lie directly
    in the folder, their checksums are always compared.
    """
    splits = CATALOGUE[one_of("name", name, CATALOGUE, hint="read other files with dissensus.data.file_formats")].splits
    variants = splits[one_of(f"split of {name}", split, splits)]
    root = data_folder(folder)
    if root is not None:
        for variant in variants:
            for sub in (*variant.folders, "."):
                paths = [root / sub / file.name for file in variant.files]
                if not all(path.is_file() for path in paths):
                    continue
                shared = sub == "." and variant.reader in SHARED_NAMES
                if shared and not all(map(_matches_checksum, paths, variant.files)):
                    continue
                if verify:
                    _check_checksums(paths, variant.files)
                return variant, paths
    raise FileNotFoundError(_missing_message(name, split, root, variants))


def data_folder(folder: Folder) -> Path | None:
    """The folder named by the caller, else by the environment variable DISSENSUS_DATA, else None."""
    chosen = os.environ.get(FOLDER_VARIABLE) if folder is None else folder
    return Path(chosen).expanduser() if chosen else None


def find_place(folder: Folder, places: Sequence[str], what: str) -> Path:
    """The first of these places in the user's folder that exists; `what`: description in the error."""
    root = data_folder(folder)
    for path in () if root is None else [root / place for place in places]:
        if path.exists():
            return path
    got = NO_FOLDER if root is None else f"none of them in {root}"
    raise FileNotFoundError(f"expected {what} as one of {', '.join(places)}, got {got}; put it there, or pass folder=")


def _matches_checksum(path: Path, file: SourceFile) -> bool:
    return path.stat().st_size == file.bytes and sha256(path) == file.sha256


def _check_checksums(paths: list[Path], files: tuple[SourceFile, ...]) -> None:
    for path, file in zip(paths, files, strict=True):
        if (found := sha256(path)) != file.sha256:
            wanted = file.sha256 or "as published, but none is published: pass verify=False"
            raise ValueError(f"expected {path} with sha256 {wanted}, got {found}; download the file again")


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _missing_message(name: str, split: str, root: Path | None, variants: tuple[Variant, ...]) -> str:
    if root is None:
        shown, got = Path("FOLDER"), NO_FOLDER
    else:
        places = [Path(sub) / file.name for variant in variants for sub in variant.folders for file in variant.files]
        present = [str(place) for place in places if (root / place).is_file()]
        shown, got = root, f"only {', '.join(present)}" if present else "none of its files"
    fix = f"put its files there, or name another folder by folder= or {FOLDER_VARIABLE}"
    lines = [f"expected the {split} split of {name} in {shown}, got {got}; {fix}:"]
    for variant in variants:
        lines.append(f"{'either' if len(lines) == 1 else 'or'} in {shown / variant.folders[0]}")
        for file in variant.files:
            known = "" if file.bytes is None else f"  {file.bytes} bytes  sha256 {file.sha256}"
            lines.append(f"  {file.name}{known}")
    if any(variant.reader in SHARED_NAMES for variant in variants):
        lines.append("(files directly in the folder must have these checksums, because other sets use the same names)")
    return "\n".join(lines)

"""Small files in the format of the UCI regression sets, for tests that must not need the real ones."""

from pathlib import Path

import numpy as np


def write_uci_files(folder: Path, *, name: str = "bostonHousing", rows: int = 506, features: int = 13) -> Path:
    """The folder, now with a set of that name and shape: linear targets around 200 with noise of 20, two splits."""
    place = folder / name / "data"
    place.mkdir(parents=True)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, features)) * np.logspace(-1, 3, features) + 5.0
    y = 200 + 30 * (x[:, 0] - 5) / 0.1 + generator.normal(scale=20.0, size=rows)
    np.savetxt(place / "data.txt", np.column_stack([x, y]), fmt="%.12g")
    np.savetxt(place / "index_features.txt", range(features), fmt="%d")
    np.savetxt(place / "index_target.txt", [features], fmt="%d")
    np.savetxt(place / "n_splits.txt", [2], fmt="%d")
    for split in range(2):
        order = generator.permutation(rows)
        np.savetxt(place / f"index_train_{split}.txt", order[: rows * 9 // 10], fmt="%d")
        np.savetxt(place / f"index_test_{split}.txt", order[rows * 9 // 10 :], fmt="%d")
    return folder

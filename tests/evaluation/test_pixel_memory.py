"""Evaluating a segmentation takes memory that does not grow with the images."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
import dissensus as ds

torch.set_num_threads(1)
ensemble = ds.DeepEnsemble([ds.nets.ENet(9) for _ in range(10)], likelihood=ds.Classification(ds.data.VOID))
images = torch.randint(256, (233, 3, 180, 240), dtype=torch.uint8)
masks = torch.randint(9, (233, 180, 240), dtype=torch.uint8)
foreign = torch.randint(2, (233, 180, 240), dtype=torch.uint8)

class Loader:
    def __init__(self, y):
        self.y = y

    def __iter__(self):
        for start in range(0, 233, 4):
            rows = slice(start, start + 4)
            yield images[rows] / 255, self.y[rows]

result = ds.evaluate(ensemble, Loader(masks), ood={"odd": Loader(foreign)})
assert len(result.arrays["ood/odd/mutual_information/auroc"]) == 233
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
"""


@pytest.mark.slow
def test_evaluating_233_images_with_ten_members_takes_less_than_two_gigabytes():
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert float(found.stdout) < 2.0

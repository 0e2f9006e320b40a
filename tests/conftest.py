"""Every test starts from the same random state, on one thread, and on the CPU unless it is marked `gpu`."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_start(request, monkeypatch):
    torch.manual_seed(0)
    if "gpu" not in request.keywords:
        # `fit` takes a GPU where there is one; what these tests compare with stays on the CPU.
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

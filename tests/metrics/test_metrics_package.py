"""The package's names, and what importing it costs."""

import subprocess
import sys

import pytest

from dissensus import metrics


def test_importing_the_metrics_does_not_import_torchmetrics():
    program = (
        "import sys, dissensus.metrics as m\n"
        "heavy = {'torchmetrics', 'matplotlib', 'sklearn', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_name_is_there_and_says_what_it_is():
    for name in metrics.__all__:
        assert getattr(metrics, name).__doc__, name
    assert set(metrics.__all__) <= set(dir(metrics))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Ece'"):
        _ = metrics.Ece

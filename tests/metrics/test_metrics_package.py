"""The package's names, and what importing it costs."""

import subprocess
import sys

import pytest

from dissensus import metrics


def test_every_name_is_there_and_says_what_it_is():
    for name in metrics.__all__:
        assert getattr(metrics, name).__doc__, name
    assert set(metrics.__all__) <= set(dir(metrics))


def test_metrics_are_light_and_without_torchmetrics_classes_say_what_to_install():
    program = (
        "import sys\n"
        "sys.modules['torchmetrics'] = None  # as if it were not installed\n"
        "from dissensus import metrics\n"
        "heavy = {'matplotlib', 'sklearn', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from dissensus.metrics import *\n"
        "assert auroc is metrics.auroc and 'ECE' not in globals()\n"
        "try:\n"
        "    metrics.ECE\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == 'a metric class needs torchmetrics: pip install "dissensus[torchmetrics]"'


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Ece'"):
        _ = metrics.Ece

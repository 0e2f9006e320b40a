"""The package's names; what importing it costs is in test_imports.py."""

from dissensus import metrics
from refusals import refuses


def test_every_name_is_there_and_says_what_it_is():
    for name in metrics.__all__:
        assert getattr(metrics, name).__doc__, name
    assert set(metrics.__all__) <= set(dir(metrics))


def test_an_unknown_name_is_an_attribute_error():
    refuses(lambda: metrics.Ece, "has no attribute 'Ece'", AttributeError)

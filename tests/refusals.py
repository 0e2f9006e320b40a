"""One line for each input that is refused."""

from collections.abc import Callable

import pytest


def refuses(call: Callable[[], object], message: str, error: type[Exception] = ValueError) -> None:
    """`call` raises this error, and the regular expression `message` is found in what it says."""
    with pytest.raises(error, match=message):
        call()

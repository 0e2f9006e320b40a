"""One error for damaged files, whatever the parser raised."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

RUN_AGAIN = "delete it and run the command again"


def damage_error(path: str | PathLike[str], why: object, fix: str = RUN_AGAIN, *, kind: str = "a whole") -> ValueError:
    """The error for a damaged file. `kind`: description of the file, before its name in the error."""
    return ValueError(f"expected {kind} {path}, got a damaged one ({why}); {fix}")


@contextmanager
def read_errors(path: str | PathLike[str], remedy: str = RUN_AGAIN, *, kind: str = "a whole") -> Iterator[None]:
    """Turns any error raised inside into a `damage_error`, so that parsers need few checks of their own."""
    # A ValueError that says "expected …, got …" is raised unchanged, and so is the error for a file that cannot be opened.
    try:
        yield
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).split("\n")[0]
        unopened = isinstance(error, OSError) and (error.filename or isinstance(error, FileNotFoundError))
        if unopened or (isinstance(error, ValueError) and re.match("expected .*, got ", said)):
            raise
        why = said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
        raise damage_error(path, why, remedy, kind=kind) from error

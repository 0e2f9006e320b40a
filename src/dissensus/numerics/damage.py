"""One error for a file that cannot be what it should be, whatever the parser underneath raised."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

RUN_AGAIN = "delete it and run the command again"


def damaged(path: str | PathLike[str], why: object, remedy: str = RUN_AGAIN, *, kind: str = "a whole") -> ValueError:
    """The error for a file that cannot be what it should be. `kind`: of the file; its name follows in the error."""
    return ValueError(f"expected {kind} {path}, got a damaged one ({why}); {remedy}")


@contextmanager
def reading(path: str | PathLike[str], remedy: str = RUN_AGAIN, *, kind: str = "a whole") -> Iterator[None]:
    """Turns whatever is raised inside into `damaged`, so that parsers need not check what the next line would stumble over.

    A ValueError that already says what was expected passes through, and so does a file that cannot be opened.
    """
    try:
        yield
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).split("\n")[0]
        unopened = isinstance(error, OSError) and (error.filename or isinstance(error, FileNotFoundError))
        if unopened or (isinstance(error, ValueError) and re.match("expected .*, got ", said)):
            raise
        why = said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
        raise damaged(path, why, remedy, kind=kind) from error

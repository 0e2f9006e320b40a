"""The command `dissensus`, and `python -m dissensus`."""

import sys

from dissensus.utils.extras import MissingExtra, require_extra


def main() -> None:
    """Runs the command line, or says in one line which extra it needs."""
    try:
        require_extra("bench")
    except MissingExtra as error:
        sys.exit(f"dissensus: {error}")
    from dissensus.bench.cli import main as run

    run()


if __name__ == "__main__":
    main()

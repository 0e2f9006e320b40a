"""The command `dissensus`, and `python -m dissensus`."""

import sys

from dissensus.numerics.extras import MissingExtra


def main() -> None:
    """Runs the command line, or says in one line which extra it needs."""
    try:
        from dissensus.bench.cli import main as run
    except MissingExtra as error:
        sys.exit(f"dissensus: {error}")
    run()


if __name__ == "__main__":
    main()

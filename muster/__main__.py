"""``python -m muster``, also known as ``muster``: every command of Muster."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that is named first; without one the launcher."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["certs"]:
        from muster.certs.__main__ import main as certs

        return certs(arguments[1:])
    if arguments[:1] == ["bench"]:
        from muster.bench.__main__ import main as bench

        return bench(arguments[1:])
    if arguments[:1] == ["scheduler"]:
        from muster.scheduler.__main__ import main as scheduler

        return scheduler(arguments[1:])
    from muster.worker.__main__ import main as worker

    return worker(arguments)


if __name__ == "__main__":
    sys.exit(main())

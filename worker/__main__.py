"""``python -m worker`` and the console command ``muster``: launches workers; makes rank tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that is named first; without one, or with ``run``, the launcher."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["run"]:
        del arguments[0]
    from worker import launch_command

    return launch_command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())

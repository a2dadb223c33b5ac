"""``python -m worker``, also known as ``muster``: launches workers, checks hosts, makes rank tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that is named first; without one, or with ``run``, the launcher."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["ranktable"]:
        from worker import launch_ranktable

        return launch_ranktable.main(arguments[1:])
    if arguments[:1] == ["check"]:
        from worker import check

        return check.main(arguments[1:])
    from worker import launch_command

    return launch_command.main(arguments[1:] if arguments[:1] == ["run"] else arguments)


if __name__ == "__main__":
    sys.exit(main())

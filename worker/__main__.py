"""``python -m worker``, or ``muster``: launches workers, checks hosts, makes rank tables, plans."""

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
    if arguments[:1] == ["plan"]:
        from worker.parallel import command

        return command.main(arguments[1:])
    from worker import launch_command

    try:
        return launch_command.main(arguments[1:] if arguments[:1] == ["run"] else arguments)
    except SystemExit as error:  # perhaps of a script in a fork of this process
        if "worker.process" in sys.modules:
            from worker.process import note_exit

            note_exit(error.code)
        raise


if __name__ == "__main__":
    sys.exit(main())

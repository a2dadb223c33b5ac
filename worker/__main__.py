"""``muster run``, or ``muster``: launches workers, checks hosts, makes rank tables, plans."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that is named first; without one, or with ``run``, the launcher."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["ranktable"]:
        from muster.worker.launch import rank_table as launch_ranktable

        return launch_ranktable.main(arguments[1:])
    if arguments[:1] == ["check"]:
        from muster.worker.check import command as check

        return check.main(arguments[1:])
    if arguments[:1] == ["plan"]:
        from muster.worker.parallel import command

        return command.main(arguments[1:])
    from muster.worker.launch import command as launch_command

    try:
        return launch_command.main(arguments[1:] if arguments[:1] == ["run"] else arguments)
    except SystemExit as error:  # perhaps of a script in a fork of this process
        if "muster.worker.runtime" in sys.modules:
            from muster.worker.runtime import note_exit

            note_exit(error.code)
        raise


if __name__ == "__main__":
    sys.exit(main())

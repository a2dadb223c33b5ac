"""``muster``, or ``python -m muster``: every command of Muster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from muster.version import __version__
from muster.wire.json_lines import say
from muster.wire.output import to_its_end
from muster.wire.variables import misspelt

COMMANDS = {
    "run": "start the workers of a job on this host, and the scheduler if asked",
    "train": "train the example, a small network on handwritten digits",
    "status": "show a job, its workers and how far they are",
    "jobs": "list the jobs of a scheduler",
    "drain": "let a worker finish its step and leave",
    "admit": "let a GPU in again that was refused",
    "stacks": "show where the processes of workers stand",
    "web": "show jobs, plots and faults as a page in the browser",
    "report": "write a page about a run, to keep or to send",
    "health": "ask whether a scheduler serves, for probes",
    "scheduler": "gather the workers of jobs and give them their ranks",
    "certs": "make, show, renew and revoke certificates",
    "audit": "check an audit log, and say who was a member in which step",
    "check": "form a job without training, and say what differs or is slow",
    "slurm": "run a job within a Slurm allocation",
    "nccl-plugin": "build what encrypts NCCL's traffic, or show it",
    "ranktable": "write a rank table, or merge those of several hosts",
    "plan": "divide a model among GPUs without having any",
    "bench": "run one of the benchmarks",
    "completion": "print what completes these commands in bash, zsh or fish",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that is named first; options without a command belong to the launcher.

    Returns:
        The exit code; 2 if there is no such command.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return to_its_end(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"muster {__version__}")
        return 0
    name, rest = ("run", arguments) if arguments[0].startswith("-") else (arguments[0], arguments[1:])
    if name not in COMMANDS:
        print(f"muster: {_unknown(name)}", file=sys.stderr)
        return 2
    for sentence in misspelt(os.environ):
        say(sentence, level="WARNING", as_text=f"muster: {sentence}")
    return _runner(name)(rest)


def _runner(name: str) -> Callable[[Sequence[str]], int]:
    """Returns the function that runs a command; imports only its own modules."""
    if name == "run":
        from muster.launch.command import main as run

        return run
    if name in ("status", "jobs", "drain", "admit", "stacks", "health"):
        from muster.scheduler.__main__ import main as ask

        return lambda rest: ask([name, *rest], prog="muster")
    if name == "web":
        from muster.web.command import main as web

        return web
    if name == "report":
        from muster.web.report import main as report

        return report
    if name == "scheduler":
        from muster.scheduler.__main__ import main as scheduler

        return lambda rest: scheduler(rest, prog="muster scheduler")
    if name == "certs":
        from muster.certs.__main__ import main as certs

        return certs
    if name == "audit":
        from muster.scheduler.audit.command import main as audit

        return audit
    if name == "check":
        from muster.launch.check.command import main as check

        return check
    if name == "slurm":
        from muster.launch.slurm.command import main as slurm

        return slurm
    if name == "nccl-plugin":
        from muster.launch.nccl_plugin import main as nccl_plugin

        return nccl_plugin
    if name == "ranktable":
        from muster.launch.rank_table import main as ranktable

        return ranktable
    if name == "plan":
        from muster.parallel.command import main as plan

        return plan
    if name == "bench":
        from muster.bench.__main__ import main as bench

        return bench
    if name == "train":
        from muster.example.command import main as train

        return train
    from muster.completion import main as completion

    return lambda rest: completion(rest, COMMANDS)


def usage() -> str:
    """Returns the list of commands, with one line for each."""
    lines = [f"  {name:<11} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: muster COMMAND [options]",
            "",
            *lines,
            "",
            "Each has its own --help. muster --version: the version.",
        ]
    )


def _unknown(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    if near:
        return f"there is no command {name[:80]!r}; did you mean muster {near[0]}?"
    return f"there is no command {name[:80]!r}; there are {', '.join(COMMANDS)}."


if __name__ == "__main__":
    sys.exit(main())

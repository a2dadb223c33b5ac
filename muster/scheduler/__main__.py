"""``python -m scheduler``: serve a job; ``status``, ``health``, ``drain``, ``admit``, ``stacks`` ask one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.certs.errors import CertificateError
from muster.scheduler import __version__
from muster.scheduler.config import load_settings
from muster.scheduler.errors import SchedulerError
from muster.wire.json_lines import log_own_process_as_json, process_lines, say, wanted
from muster.wire.output import to_its_end
from muster.wire.variables import SCHEDULER, misspelt, option_help, variables_help

DESCRIPTION = """\
Gathers the workers of a training job, checks who they are and gives each its rank.
Settings come from the environment (below).
Other commands: muster status, jobs, health (for probes), drain, admit, stacks;
python -m scheduler has them too."""

COMMANDS = ("status", "jobs", "health", "drain", "admit", "stacks")


def main(
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    prog: str = "python -m scheduler",
) -> int:
    """Runs one command.

    Args:
        argv: the command line.
        env: the environment.
        prog: the name of the program in messages.

    Returns:
        The exit code; 2 for a wrong setting, 130 for Ctrl-C before anything runs.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    environment = os.environ if env is None else env
    if not prog.startswith("muster"):  # The command itself has printed the error.
        for sentence in misspelt(environment):
            say(sentence, level="WARNING", as_text=f"scheduler: {sentence}")
    return to_its_end(lambda: _run(arguments, environment, prog))


def _run(arguments: list[str], environment: Mapping[str, str], prog: str) -> int:
    try:
        if arguments and arguments[0] in COMMANDS:
            from muster.scheduler.cli.command import command

            return command(arguments, environment, prog)
        if arguments and not arguments[0].startswith("-"):
            parser(prog).error(f"there is no command {arguments[0]!r}; there are {', '.join(COMMANDS)}")
        return _serve(arguments, environment, prog)
    except (SchedulerError, CertificateError) as error:
        name = "muster" if prog.startswith("muster") else "scheduler"
        say(str(error), level="ERROR", as_text=f"{name}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted", as_text="interrupted")
        return 130


def parser(prog: str = "python -m scheduler") -> argparse.ArgumentParser:
    """Makes the parser of the serving scheduler."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=variables_help(SCHEDULER),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--config", type=Path, metavar="FILE", help=option_help("MS_CONFIG_FILE"))
    made.add_argument(
        "--password-file",
        type=Path,
        metavar="FILE",
        help="file that holds the password of the scheduler's .p12 file (MS_SERVER_PASSWORD_FILE)",
    )
    made.add_argument("--serve", action="store_true", help="serve any number of jobs and stay when they end")
    made.add_argument("--port", type=int, help="listen here instead of MS_SCHED_PORT; 0 takes any free port")
    made.add_argument("--bind", default="", metavar="ADDRESS", help="listen here instead of MS_SCHED_HOST")
    made.add_argument(
        "--adopt",
        action="store_true",
        help="take over the generation that all its workers hold, where the journal is older or lost",
    )
    made.add_argument(
        "--drain-stragglers", metavar="1.5x:60s", default=None, help=option_help("MS_DRAIN_STRAGGLERS")
    )
    made.add_argument("--version", action="version", version=f"muster {__version__}")
    return made


def _serve(arguments: list[str], env: Mapping[str, str], prog: str) -> int:
    options = parser(prog).parse_args(arguments)
    if wanted(env):
        log_own_process_as_json("scheduler")
    if options.password_file is not None:
        env = {name: value for name, value in env.items() if name != "MS_SERVER_PASSWORD"}
        env["MS_SERVER_PASSWORD_FILE"] = str(options.password_file.absolute())
    settings = load_settings(
        env,
        config_path=options.config,
        serve=options.serve,
        port=options.port,
        bind_host=options.bind,
        adopt=options.adopt,
        drain_stragglers=options.drain_stragglers,
    )
    from muster.scheduler.audit import logs
    from muster.scheduler.audit.native_stderr import handshakes_watched
    from muster.scheduler.serve.credentials import load_security
    from muster.wire.malloc import bound_arenas

    bound_arenas(env)
    process_lines.job = None if settings.serve else settings.job_id
    logs.set_up(settings.log_level, env, settings.log_format)
    with handshakes_watched(os.environ, tls=settings.config_path is not None) as watch:
        # This must precede the import of grpc, which reads the cipher list only at import.
        security = load_security(settings, env)
        from muster.scheduler.serve.server import main as serve

        return serve(settings, security, watch)


if __name__ == "__main__":
    sys.exit(main())

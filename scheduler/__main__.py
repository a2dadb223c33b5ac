"""``python -m scheduler``: serve a job; ``status``, ``health`` and ``drain`` ask a running scheduler."""

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

DESCRIPTION = """\
Gathers the workers of a training job, checks who they are and gives each its rank.
Settings come from the environment: MS_WORKER_NUM, MS_SCHED_HOST, MS_SCHED_PORT and others.
Other commands: 'python -m scheduler status', 'python -m scheduler health' (for probes) and
'python -m scheduler drain NODE'."""


def main(argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit code; 2 for a wrong setting, 130 for Ctrl-C before anything runs.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    environment = os.environ if env is None else env
    try:
        if arguments[:1] in (["status"], ["health"], ["drain"]):
            from muster.scheduler.cli.status import command

            return command(arguments, environment)
        if arguments and not arguments[0].startswith("-"):
            parser().error(f"there is no command {arguments[0]!r}; there are status, health and drain")
        return _serve(arguments, environment)
    except (SchedulerError, CertificateError) as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the serving scheduler."""
    made = argparse.ArgumentParser(
        prog="python -m scheduler", description=DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument(
        "--config", type=Path, metavar="FILE", help="config.json with the certificates (or MS_CONFIG_FILE)"
    )
    made.add_argument("--serve", action="store_true", help="serve any number of jobs and stay when they end")
    made.add_argument("--port", type=int, help="listen here instead of MS_SCHED_PORT; 0 takes any free port")
    made.add_argument("--bind", default="", metavar="ADDRESS", help="listen here instead of MS_SCHED_HOST")
    made.add_argument("--version", action="version", version=f"muster {__version__}")
    return made


def _serve(arguments: list[str], env: Mapping[str, str]) -> int:
    options = parser().parse_args(arguments)
    settings = load_settings(
        env, config_path=options.config, serve=options.serve, port=options.port, bind_host=options.bind
    )
    from muster.scheduler.audit import logs
    from muster.scheduler.audit.native_stderr import handshakes_watched
    from muster.scheduler.serve.credentials import load_security

    logs.set_up(settings.log_level, env)
    with handshakes_watched(os.environ, tls=settings.config_path is not None) as watch:
        security = load_security(settings, env)  # before grpc is imported: it reads the ciphers only then
        from muster.scheduler.serve.server import main as serve

        return serve(settings, security, watch)


if __name__ == "__main__":
    sys.exit(main())

"""``muster web``: a page that shows a scheduler's jobs, and lets an operator drain workers and end jobs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import html
import logging
import os
import sys
import tempfile
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from muster.certs.errors import CertificateError
from muster.scheduler.cli import command as asking
from muster.scheduler.cli.client import SchedulerClient
from muster.scheduler.config import Address
from muster.scheduler.errors import SchedulerError, SchedulerSettingsError
from muster.version import how_to_install
from muster.wire.json_lines import log_own_process_as_json, say, wanted
from muster.wire.settings import is_loopback, show_address
from muster.wire.threads import Pool

if TYPE_CHECKING:
    from muster.web.logs import Log
    from muster.web.series import Point
    from muster.web.serve import Transport

AT_ONCE = 16
"""The largest number of simultaneous blocking calls, such as drains."""

EXTRA = f"muster web needs its extra. {how_to_install('web')}"


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    made = argparse.ArgumentParser(
        prog="muster web",
        description="Shows the jobs of a scheduler as a page in the browser. Without an address, those of "
        f"{asking.WHICH}. It prints a link, which is good once.",
        parents=[asking.common_options()],
    )
    made.add_argument("--port", type=int, default=0, metavar="N", help="of the page (default: any free one)")
    made.add_argument("--open", action="store_true", help="open it in the browser of this desktop")
    made.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="serve it on this address. Beyond loopback that is HTTPS with the scheduler's certificate, and "
        "browsers must show an operator's certificate",
    )
    made.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="another name by which browsers call this host, as its certificate has it; may be repeated",
    )
    return made


def main(argv: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Serves the page until Ctrl-C; returns the exit code."""
    options = parser().parse_args(list(argv))
    environment = dict(os.environ if env is None else env)
    if wanted(environment):
        log_own_process_as_json("web", "muster", "uvicorn")
    try:
        import jinja2  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        obstacle = f"{EXTRA} ({error.name} is not installed)"
        say(obstacle, level="ERROR", as_text=f"muster: {obstacle}")
        return 1
    try:
        return _serve(options, environment)
    except (SchedulerError, CertificateError) as error:
        say(str(error), level="ERROR", as_text=f"muster: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 0


def _serve(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    from muster.web import serve
    from muster.web.app import Pages
    from muster.web.guard import LoginLinks
    from muster.web.logs import launch_of, logs_of
    from muster.web.model import Followed
    from muster.web.past import command_of, points_of

    if not 0 <= options.port <= 65_535:
        raise SchedulerSettingsError(f"--port must be from 0 to 65535; it is {options.port}.")
    target = asking.find_scheduler(options, asking.with_password(options, env))
    address, env = target.address, target.env
    certificate = asking.operator_certificate(options, address)
    connect = _Connector(address, env, certificate)
    transport = _transport(options, address, env)
    identity, ends = _own(address, env, certificate)
    listener = serve.bind(options.bind, options.port)
    links = _Links(transport.origins(listener.getsockname()[1])[0], transport.place, opens=options.open)

    def logs(job_id: str) -> list[Log]:
        launch = launch_of(job_id, address.port, env)
        return logs_of(Path(launch.directory)) if launch is not None else []

    def past(job_id: str) -> list[Point]:
        launch = launch_of(job_id, address.port, env)
        return points_of(Path(launch.directory)) if launch is not None else []

    def origin(job_id: str) -> tuple[str, str]:
        launch = launch_of(job_id, address.port, env)
        return (command_of(Path(launch.directory)), launch.directory) if launch is not None else ("", "")

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(Pool(AT_ONCE, "muster-web"))
        pages = Pages(
            Followed(", ".join(show_address(host, address.port) for host in address.hosts)),
            LoginLinks(links.show_next),
            connect,
            identity,
            ends,
            logs,
            past,
            origin=origin,
            by_certificate=transport.server is not None,
        )
        token = "" if transport.server is not None else pages.login_links.token
        await serve.serve(pages, transport, listener, lambda: links.show(token))

    try:
        with _ready_to_ask(address):
            asyncio.run(run())
    finally:
        links.close()
    return 0


@contextlib.contextmanager
def _ready_to_ask(address: Address) -> Iterator[None]:
    """Loads, while file descriptors are left, everything that is needed to ask a scheduler.

    If no descriptor were left, gRPC would abort the process, and Python would never find its codec for host
    names.
    """
    if address.config_path is not None:
        from muster.certs.config import apply_cipher_list, load_config

        apply_cipher_list(load_config(address.config_path))
        import muster.certs.runtime.grpc_credentials
        import muster.certs.runtime.preflight  # noqa: F401
    import grpc

    "localhost".encode("idna")
    with grpc.insecure_channel("127.0.0.1:1"):  # It never connects.
        yield


class _Connector:
    """Connects to the scheduler as the operator, for one job or for all."""

    def __init__(self, address: Address, env: Mapping[str, str], certificate: Path | None) -> None:
        self._address, self._env, self._certificate = address, env, certificate

    def __call__(self, job_id: str) -> SchedulerClient:
        address = dataclasses.replace(self._address, job_id=job_id) if job_id else self._address
        return SchedulerClient(address, self._env, certificate=self._certificate, wait_s=0.0)


class _Links:
    """Prints the login links, and opens the first one in a browser if asked to.

    Every user of the host can read a browser's command line. So the browser opens a file that only its owner
    can read, and which redirects to the link. The file is removed once the link was used.
    """

    def __init__(self, origin: str, place: str, *, opens: bool) -> None:
        self._origin, self._place, self._opens = origin, place, opens
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def show(self, token: str) -> None:
        """Prints the first link; an empty token is for browsers that log in by certificate."""
        link = f"{self._origin}{self._place}/enter?token={token}" if token else f"{self._origin}/"
        print(f"muster web is on {link}", flush=True)
        if self._opens:
            webbrowser.open(self._leading_to(link) if token else link)

    def _leading_to(self, link: str) -> str:
        self._folder = tempfile.TemporaryDirectory(prefix="muster-web-")  # mode 0700
        file = Path(self._folder.name) / "open.html"
        to = html.escape(link)
        file.write_text(f'<meta http-equiv="refresh" content="0; url={to}"><a href="{to}">muster web</a>\n')
        return file.as_uri()

    def close(self) -> None:
        """Removes the redirecting file, if there is one."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def show_next(self, token: str) -> None:
        """Prints the next link, for another browser."""
        self.close()
        print(f"For another browser: {self._origin}{self._place}/enter?token={token}", flush=True)


def _transport(options: argparse.Namespace, address: Address, env: Mapping[str, str]) -> Transport:
    from muster.web.serve import Transport

    if is_loopback(options.bind):
        names = dict.fromkeys([options.bind, "127.0.0.1", "localhost", *options.name])
        return Transport(tuple(names))
    if address.config_path is None:
        raise SchedulerSettingsError(
            f"--bind {options.bind} is not loopback: the page is served there with TLS only.",
            remedy="Give a config.json by --config or MS_CONFIG_FILE, or leave --bind out and use ssh -L.",
        )
    from muster.certs.runtime.follower import follow_files

    log = logging.getLogger("muster.web")
    server = follow_files(address.config_path, "scheduler", env, log, job=None)
    names = dict.fromkeys([*options.name, options.bind])
    return Transport(tuple(names), server, address.job_id)


def _own(address: Address, env: Mapping[str, str], certificate: Path | None) -> tuple[str, float | None]:
    """Returns the operator's identity in words, and when its certificate ends, in seconds since 1970.

    Raises:
        SchedulerSettingsError: the certificate is not an operator's.
    """
    if address.config_path is None:
        return "", None
    from muster.certs.config import load_config
    from muster.certs.runtime.store import load_configured

    config = load_config(address.config_path)
    if certificate is not None:
        config = dataclasses.replace(config, client_cert_path=certificate)
    credentials = load_configured(config, "operator", env)
    reason = credentials.identity.may(role="operator")
    if reason is not None:
        raise SchedulerSettingsError(reason, remedy="Give the operator's .p12 with --cert.")
    return f"{credentials.identity} ({credentials.fingerprint[:23]})", credentials.not_after.timestamp()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``muster web`` beside a real scheduler with mutual TLS: who is let in, what is shown, what is done."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import select
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import pytest
from cryptography import x509

from muster.certs.pki.identity import Identity
from muster.certs.runtime.tls import client_ssl_context
from muster.web.app import VIEWERS
from muster.web.serve import CONNECTIONS, bind
from tests.scheduler.processes import (
    ROOT,
    Pki,
    Scheduler,
    Stream,
    channel,
    environment,
    form,
    join,
    scheduler,
)
from tests.waiting import LIMIT_S, wait_for
from tests.web.processes import Visitor, Web, web


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def running(pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    audit = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    env = {**pki.env(), "MS_WORKER_NUM": "", "MS_AUDIT_LOG": str(audit), "MS_NODE_TIMEOUT": "600"}
    with scheduler("--serve", **env) as started:
        yield started


@pytest.fixture(scope="module")
def page(running: Scheduler) -> Iterator[Web]:
    with web(running) as started:
        yield started


@pytest.fixture(scope="module")
def inside(page: Web) -> Visitor:
    """Somebody who has come by the first link."""
    visitor = Visitor(page)
    assert visitor.enter(page.link()).status == 303
    return visitor


# ---------------------------------------------------------------- who is let in


def test_a_link_is_good_once_and_the_next_is_printed(page: Web, inside: Visitor) -> None:
    assert inside.ask("jobs").status == 200
    again = Visitor(page)
    assert again.enter(page.link()).status == 403
    assert "good once" in again.enter(page.link()).text
    assert again.ask("jobs").status == 403
    assert again.enter(page.link(1)).status == 303
    assert again.ask("jobs").status == 200 and again.cookie != inside.cookie


@pytest.mark.parametrize("token", ["", "wrong", "x" * 3000])
def test_a_wrong_or_missing_token_lets_nobody_in(page: Web, token: str) -> None:
    visitor = Visitor(page)
    answer = visitor.ask(f"enter?token={token}")
    assert answer.status == 403 and "set-cookie" not in answer.headers
    assert visitor.ask("jobs").status == 403
    assert Visitor(page, "muster=forged").ask("jobs").status == 403


def test_without_the_pages_own_path_there_is_nothing(page: Web, inside: Visitor) -> None:
    for path in ("/", "/jobs", "/enter", "/assets/style.css", f"{page.place}x/jobs"):
        assert inside.ask(path).status == 404
    assert inside.ask(f"{page.place}/assets/../../etc/passwd").status == 404


def test_the_cookie_is_for_these_pages_alone(page: Web) -> None:
    visitor = Visitor(page)
    cookie = visitor.enter(page.link(2 if len(page.lines) > 2 else 1)).headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert f"path={page.place}/".lower() in cookie


def test_another_name_for_this_address_is_refused(page: Web, inside: Visitor) -> None:
    port = urlsplit(page.origin).port
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "127.0.0.1:1", ""):
        assert inside.ask("jobs", Host=host).status in (400, 421), host
    assert inside.ask("jobs", Host=f"localhost:{port}").status == 200


def test_requests_of_other_sites_are_refused(page: Web, inside: Visitor) -> None:
    for origin in (
        "https://evil.example",
        "null",
        page.origin.replace("127.0.0.1", "127.0.0.2"),
        "http://127.0.0.1:1",
    ):
        assert inside.ask("jobs", Origin=origin).status == 403
        assert inside.post("end", origin=origin, id="a").status == 403
    assert inside.post("end", origin="", id="a").status == 403
    for site in ("cross-site", "same-site"):
        assert inside.ask("jobs", Sec_Fetch_Site=site).status == 403
        assert inside.ask("events", Sec_Fetch_Site=site).status == 403
    assert inside.ask("jobs", Sec_Fetch_Site="same-origin").status == 200
    assert inside.ask("jobs", method="DELETE").status == 405


def test_a_form_that_is_not_the_sessions_own_does_nothing(page: Web, inside: Visitor) -> None:
    assert inside.post("end", id="a", csrf_token="wrong").status == 403
    assert inside.post("drain", id="a", node="0").status == 403
    assert inside.post("end", id="a", csrf_token="x" * 20_000).status == 413


def test_every_answer_keeps_the_browser_to_what_is_here(inside: Visitor) -> None:
    for path in ("jobs", "job?id=x", "assets/live.js", "nothing", "/other"):
        headers = inside.ask(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
        assert headers["x-frame-options"] == "DENY" and headers["referrer-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store" and "server" not in headers


def test_no_command_line_has_the_token_where_a_browser_is_opened(running: Scheduler, tmp_path: Path) -> None:
    """Asset: the operator's page; position: another user of the host, who may read what runs with what."""
    opener, noted = tmp_path / "browser", tmp_path / "noted"
    opener.write_text(f'#!/bin/sh\necho "$@" > {noted}.part && mv {noted}.part {noted}\n')
    opener.chmod(0o700)
    with web(running, "--open", BROWSER=f"{opener} %s") as page:
        token = page.link().partition("token=")[2]
        wait_for(noted.exists)
        assert token and token not in noted.read_text()
        file = Path(urlsplit(noted.read_text().strip()).path)
        assert page.link() in file.read_text()
        assert file.parent.stat().st_mode & 0o077 == 0
        visitor = Visitor(page)
        parts = urlsplit(page.link())
        answer = visitor.ask(
            f"{parts.path}?{parts.query}", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate"
        )
        assert answer.status == 200 and answer.headers["refresh"] == f"0; url={page.place}/jobs"
        visitor.cookie = answer.headers["set-cookie"].partition(";")[0]
        assert visitor.ask("jobs", Sec_Fetch_Site="same-origin").status == 200
        assert not file.parent.exists()


# ---------------------------------------------------------------- what is shown and done


def test_jobs_are_shown_as_they_change_and_a_worker_is_drained(
    running: Scheduler, pki: Pki, inside: Visitor
) -> None:
    with channel(running.target, pki.credentials("client")) as workers:
        first, second = form(workers)
        seen = inside.events("events", lambda known: "running" in known.get("jobs", ""))
        assert "All is well." in seen["jobs"]
        inside.events("events?id=default", lambda known: "rank 1" in known.get("grid", ""))
        shown = inside.ask("job?id=default").text
        assert "rank 0" in shown and "rank 1" in shown and "Generation 1" in shown
        assert pki.credentials("client").fingerprint[:23] in shown
        form_page = "drain?id=default&node=node-1"
        done = inside.post(
            "drain", id="default", node="node-1", csrf_token=inside.csrf_token(form_page), reason="too hot"
        )
        assert done.status == 303
        assert "too hot" in second.next("quiesce").quiesce.reason
        flash = inside.ask("job?id=default").text
        assert "will leave at a step boundary: too hot" in flash
        inside.events("events?id=default", lambda known: "leaving" in "".join(known.values()))
        assert (
            "drained"
            in inside.events("events?id=default", lambda known: "drained" in known.get("trail", ""))["trail"]
        )
        second.call.cancel()
        inside.events(
            "events?id=default",
            lambda known: "suspended" in known.get("head", "") and "s-missing" in known.get("grid", ""),
        )
        csrf_token = inside.csrf_token("end?id=default")
        assert inside.post("end", id="default", csrf_token=csrf_token, reason="enough").status == 303
        ended = first.next("ended").ended
        assert not ended.ok and "An operator has ended the job: enough" in ended.reason
        assert "has ended the job" in inside.ask("job?id=default").text
        assert "Not done: " in _flash_of_end(inside)
    audit = Path(running.env["MS_AUDIT_LOG"]).read_text().splitlines()
    by_us = [each for each in map(json.loads, audit) if each["event"] in ("drained", "ended")]
    assert [(each["event"], each["certificate"]) for each in by_us] == [
        ("drained", pki.credentials("operator").fingerprint),
        ("ended", pki.credentials("operator").fingerprint),
    ]


def _flash_of_end(inside: Visitor) -> str:
    """A second end of a job that is over is refused in words."""
    inside.post("end", id="default", csrf_token=inside.csrf_token("end?id=default"))
    return inside.ask("job?id=default").text


def test_what_a_worker_calls_itself_is_text(running: Scheduler, pki: Pki, inside: Visitor) -> None:
    with channel(running.target, pki.credentials("client")) as workers:
        stream = Stream(workers)
        stream.put(join("<script>alert(1)</script>"))
        stream.next("welcome")
        seen = inside.events("events?id=default", lambda known: "alert(1)" in known.get("grid", ""))
        assert "<script>" not in seen["grid"]
        stream.call.cancel()


def test_so_many_windows_and_no_more(page: Web, inside: Visitor) -> None:
    parts = urlsplit(page.origin)
    held = []
    for _ in range(VIEWERS):
        connection = socket.create_connection((parts.hostname, parts.port), LIMIT_S)
        request = (
            f"GET {page.place}/events HTTP/1.1\r\nHost: {parts.netloc}\r\nCookie: {inside.cookie}\r\n\r\n"
        )
        connection.sendall(request.encode())
        assert b"200" in connection.recv(20)
        held.append(connection)
    refused = inside.ask("events")
    assert refused.status == 503 and "close one" in refused.text
    assert inside.ask("jobs").status == 200
    for connection in held:
        connection.close()
    wait_for(lambda: inside.ask("jobs").status == 200 and _streams(inside), lambda: "no place became free")


def _streams(inside: Visitor) -> bool:
    try:
        inside.events("events", lambda known: known)
    except AssertionError:
        return False
    return True


def test_half_requests_keep_nobody_out(page: Web, inside: Visitor) -> None:
    """Any user of this host may open as many as it likes."""
    parts = urlsplit(page.origin)
    halves = [socket.create_connection((parts.hostname, parts.port), LIMIT_S) for _ in range(2 * CONNECTIONS)]
    for half in halves:
        with contextlib.suppress(OSError):
            half.sendall(b"GET / HT")
    for _ in range(3):
        assert inside.ask("jobs").status == 200
    assert inside.events("events", lambda known: known)
    with contextlib.suppress(ConnectionError):
        assert halves[0].recv(1) == b""
    for half in halves:
        half.close()


@pytest.mark.parametrize("who", ["strangers", "strangers who do not read", "the owner's windows"])
def test_connections_that_were_answered_keep_nobody_out(page: Web, inside: Visitor, who: str) -> None:
    """Position: any user of this host. They were kept for 20 s, and new ones were hung up on instead."""
    parts = urlsplit(page.origin)
    cookie = f"Cookie: {inside.cookie}\r\n" if who == "the owner's windows" else ""
    request = f"GET {page.place}/jobs HTTP/1.1\r\nHost: {parts.netloc}\r\n{cookie}\r\n"
    times = 10_000 if who == "strangers who do not read" else 1
    held = []
    for _ in range(2 * CONNECTIONS):
        held.append(socket.create_connection((parts.hostname, parts.port), LIMIT_S))
        held[-1].setblocking(False)
        with contextlib.suppress(OSError):
            held[-1].sendall(request.encode() * times)
    wait_for(lambda: select.select(held[-1:], (), (), 0)[0])  # the last one has its answer
    assert (b"connection: close" in held[-1].recv(1000)) == (who != "the owner's windows")
    for _ in range(5):
        assert inside.ask("jobs").status == 200
    for each in held:
        each.close()


@pytest.mark.parametrize("where", ["refused", "read"])
def test_bodies_that_trickle_keep_nobody_out(page: Web, inside: Visitor, where: str) -> None:
    """Position: any user of this host. As many as there may be connections held the owner out for ever."""
    parts = urlsplit(page.origin)
    path = "/other" if where == "refused" else f"{page.place}/end"
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nOrigin: {page.origin}\r\n"
    head += f"Cookie: {inside.cookie}\r\nContent-Length: 5000\r\n"
    head += "\r\nid=" if where == "refused" else "Expect: 100-continue\r\n\r\n"
    halves = [socket.create_connection((parts.hostname, parts.port), LIMIT_S) for _ in range(CONNECTIONS)]
    for half in halves:
        with contextlib.suppress(OSError):
            half.sendall(head.encode())
            if where == "read" and half is not halves[0]:  # which goes as the last one comes
                assert half.recv(100).startswith(b"HTTP/1.1 100")
    for _ in range(3):
        assert inside.ask("jobs").status == 200
    if where == "refused":  # and it is hung up on, though it goes on sending
        said = b""
        with contextlib.suppress(ConnectionError):
            while more := halves[-1].recv(4096):
                said += more
                halves[-1].sendall(b"x")
        assert b" 404 " in said
    for half in halves:
        half.close()


def test_a_scheduler_that_goes_and_comes_again(pki: Pki, tmp_path: Path) -> None:
    journal = {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(tmp_path)}
    with scheduler("--serve", **pki.env(), **journal) as first, web(first) as page:
        visitor = Visitor(page)
        visitor.enter(page.link())
        visitor.events("events", lambda known: "up for" in known.get("scheduler", ""))
        first.process.kill()
        first.process.wait(LIMIT_S)
        seen = visitor.events("events", lambda known: "cannot be reached since" in known.get("absence", ""))
        assert "No scheduler can be reached" in seen["absence"]
        with scheduler("--serve", port=str(first.port), **pki.env(), **journal):
            visitor.events("events", lambda known: "absence" in known and not known["absence"].strip())


# ---------------------------------------------------------------- beyond loopback, and what cannot be


def test_beyond_loopback_an_operators_certificate_is_asked_for(running: Scheduler, pki: Pki) -> None:
    with web(running, "--bind", "0.0.0.0", "--name", "localhost") as page:
        parts = urlsplit(page.link())
        assert (parts.scheme, parts.path) == ("https", "/")

        def ask(name: str | None, path: str = "/") -> bytes:
            context = client_ssl_context(pki.credentials(name)) if name else _without_certificate()
            with (
                socket.create_connection(("127.0.0.1", parts.port), LIMIT_S) as plain,
                context.wrap_socket(plain) as connection,
            ):
                request = f"GET {path} HTTP/1.1\r\nHost: localhost:{parts.port}\r\nConnection: close\r\n\r\n"
                connection.sendall(request.encode())
                answer = b""
                while data := connection.recv(65536):
                    answer += data
                return answer

        entered = ask("operator")
        assert b"303 See Other" in entered and b"Secure" in entered
        assert b"403 Forbidden" in ask("client") and b"has the role worker" in ask("client")
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert ask(None) == b""


def _silent_one(port: int) -> socket.socket:
    """A connection that says nothing; one of too many, which the kernel puts off, is not waited for."""
    made = socket.socket()
    made.setblocking(False)
    made.connect_ex(("127.0.0.1", port))
    return made


@pytest.mark.parametrize("room", [200, 0])
def test_silent_connections_of_strangers_keep_no_operator_out(
    running: Scheduler, pki: Pki, room: int
) -> None:
    """They held all descriptors until 60 s were over, and tracebacks by the megabyte went to the terminal.

    Without room for them, as where others have the descriptors, who comes is turned away while that lasts.
    """
    with web(running, "--bind", "0.0.0.0", "--name", "localhost") as page:
        port = urlsplit(page.link()).port or 0
        context = client_ssl_context(pki.credentials("operator"))
        request = f"GET / HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n".encode()

        def enters() -> bool:
            try:
                with (
                    socket.create_connection(("127.0.0.1", port), LIMIT_S) as plain,
                    context.wrap_socket(plain) as connection,
                ):
                    connection.sendall(request)
                    return b"303 See Other" in connection.recv(1000)
            except OSError:
                return False

        assert enters()
        used = len(list(Path(f"/proc/{page.process.pid}/fd").iterdir()))
        most = resource.prlimit(page.process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(page.process.pid, resource.RLIMIT_NOFILE, (used + room, most))
        silent = [_silent_one(port) for _ in range(400)]
        if room:
            assert enters()
            silent[-1].settimeout(30)
            with contextlib.suppress(ConnectionError):
                assert silent[-1].recv(1) == b""  # within seconds
        else:
            with page.grown:
                assert page.grown.wait_for(lambda: "are turned away" in "".join(page.lines), LIMIT_S)
        for each in silent:
            each.close()
        resource.prlimit(page.process.pid, resource.RLIMIT_NOFILE, (used + 200, most))
        wait_for(enters)
        said = "".join(page.lines)
        assert "Traceback" not in said and len(said) < 2000
        assert ("are turned away" in said) == (room == 0)


FEW_DESCRIPTORS_AFTER_THE_FIRST_HANDSHAKE = """
import contextlib, os, resource, threading
import muster.certs.runtime.preflight as module

most, done, taken = resource.getrlimit(resource.RLIMIT_NOFILE), module.preflight, []

def leave_few():
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, most[1]))
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    os.close(taken.pop())
    os.close(taken.pop())
    threading.Timer(0.5, resource.setrlimit, (resource.RLIMIT_NOFILE, most)).start()

def preflight(*arguments, **more):
    found = done(*arguments, **more)
    if not taken:
        leave_few()
    return found

module.preflight = preflight
"""


def test_the_page_outlives_having_few_descriptors_on_its_way_to_the_scheduler(
    running: Scheduler, tmp_path: Path
) -> None:
    """gRPC aborted it, or the thread that asks died and nothing new was shown for good."""
    (tmp_path / "sitecustomize.py").write_text(FEW_DESCRIPTORS_AFTER_THE_FIRST_HANDSHAKE)
    with web(running, PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT)))) as page:
        inside = Visitor(page)
        token = page.link()

        def follows() -> bool:
            assert page.process.poll() is None, "".join(page.lines)
            with contextlib.suppress(ConnectionError):
                if not inside.cookie:
                    inside.enter(token)
                answer = inside.ask("jobs")
                return answer.status == 200 and "Waiting for the scheduler" not in answer.text
            return False

        wait_for(follows, lambda: "".join(page.lines))
        assert "Traceback" not in "".join(page.lines)


def test_the_descriptor_that_is_kept_for_hanging_up_is_had_again_after_another_thread_took_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    async def accepted() -> OSError:
        with pytest.raises(OSError) as error:
            listener.accept()
        await asyncio.sleep(0)
        return error.value

    with bind("127.0.0.1", 0) as listener:
        monkeypatch.setattr(socket.socket, "accept", none_left)
        with monkeypatch.context() as taken:
            taken.setattr(os, "open", none_left)
            assert isinstance(asyncio.run(accepted()), ConnectionAbortedError)  # the last one
            assert asyncio.run(accepted()).errno == errno.EMFILE  # asyncio waits for a second
        assert isinstance(asyncio.run(accepted()), ConnectionAbortedError)


def test_an_operator_who_is_revoked_sees_nothing_more(tmp_path: Path) -> None:
    pki = Pki.make(tmp_path / "pki", crl_path="crl.pem")
    pki.issue("former", Identity("default", "operator"))
    pki.authority.write_revocations([])
    with scheduler(**pki.env()) as started, web(started, "--bind", "0.0.0.0", "--name", "localhost") as page:
        parts = urlsplit(page.link())
        request = f"GET /none HTTP/1.1\r\nHost: localhost:{parts.port}\r\n\r\n".encode()

        def connected() -> ssl.SSLSocket:
            plain = socket.create_connection(("127.0.0.1", parts.port), LIMIT_S)
            return client_ssl_context(pki.credentials("former")).wrap_socket(plain)

        with connected() as inside:
            inside.sendall(request)
            assert b"404" in inside.recv(1000)
            leaf = x509.load_pem_x509_certificate(pki.credentials("former").leaf_pem)
            pki.authority.write_revocations([leaf.serial_number])
            with contextlib.suppress(ConnectionError):
                while inside.recv(1000):
                    pass
        with connected() as again:
            again.sendall(request)
            answer = again.recv(1000)
            assert b"403" in answer and b"revoked" in answer


def test_the_page_shows_a_browser_the_certificate_that_was_renewed(tmp_path: Path) -> None:
    pki = Pki.make(tmp_path / "pki")
    with scheduler(**pki.env()) as started, web(started, "--bind", "0.0.0.0", "--name", "localhost") as page:
        port = urlsplit(page.link()).port

        def shown() -> bytes | None:
            plain = socket.create_connection(("127.0.0.1", port), LIMIT_S)
            with client_ssl_context(pki.credentials("operator")).wrap_socket(plain) as connection:
                return connection.getpeercert(binary_form=True)

        def in_force() -> bytes:
            return ssl.PEM_cert_to_DER_cert(pki.credentials("server").leaf_pem.decode())

        assert shown() == in_force()
        renewed = pki.issue("renewed", Identity("default", "scheduler"), ("127.0.0.1", "localhost"))
        renewed.replace(pki.directory / "server.p12")
        wait_for(lambda: shown() == in_force())


def _without_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_beyond_loopback_without_certificates_it_does_not_start() -> None:
    with scheduler() as running, web(running, "--bind", "0.0.0.0") as page:
        assert page.process.wait(LIMIT_S) == 2
        page.process.wait(LIMIT_S)
    assert "not loopback: the page is served there with TLS only" in "".join(page.lines)


def test_a_workers_certificate_does_not_do(running: Scheduler, pki: Pki) -> None:
    with web(running, "--cert", str(pki.directory / "client.p12")) as page:
        assert page.process.wait(LIMIT_S) == 2
    assert "has the role worker, and this needs operator" in "".join(page.lines)


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError('no', name='starlette')\n")
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "muster", "web"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 1
    assert "pip install '.[web]' in a checkout" in ran.stderr and "Traceback" not in ran.stderr
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)

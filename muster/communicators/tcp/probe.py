"""Probes: checks whether a worker can be reached at its data address, and has the right identity.

A probe is a connection to a worker's endpoint, with TLS like any other connection. The endpoint's thread
answers with the probe's own nonce, whatever the worker's training is doing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping

from muster.communicators.tcp.endpoint import Endpoint, host_and_port
from muster.communicators.tcp.handshake import HELLO, PROBE, PROBE_ANSWER, TlsPolicy
from muster.wire.settings import is_loopback
from muster.wire.threads import start_thread

CONNECT_TIMEOUT_S = 3.0
"""A kernel answers at once, however busy its processes are; a lost packet is sent again after 1 s."""

ANSWER_TIMEOUT_S = 8.0
"""A process may be slow to answer on a loaded machine."""

RETRY_S = 0.2
AT_ONCE = 64


class ProbeError(Exception):
    """A worker cannot be reached, or has another identity."""


class Prober:
    """Tries to reach workers of a job.

    Args:
        tls: returns how peers are authenticated, called for each probe; None for plaintext.
        job_id: the job that their certificates must be for.
    """

    def __init__(self, tls: Callable[[], TlsPolicy] | None, job_id: str) -> None:
        self._tls = tls
        self._job_id = job_id

    def __call__(self, targets: Mapping[str, str]) -> dict[str, str]:
        """Probes workers in parallel.

        Args:
            targets: their addresses by node id.

        Returns:
            For each worker that cannot be reached, the reason, by node id.
        """
        waiting = list(targets.items())
        unreached: dict[str, str] = {}

        def work() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    node_id, address = waiting.pop()
                    if why := self._reach(node_id, address):
                        unreached[node_id] = why

        threads = [start_thread(work, name="muster-probe") for _ in range(min(AT_ONCE, len(waiting)))]
        for thread in threads:
            thread.join()
        return unreached

    def _reach(self, node_id: str, address: str) -> str:
        """Tries to reach one worker until CONNECT_TIMEOUT_S is over.

        Returns:
            The reason why it cannot be reached; "" if it can.
        """
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            began = time.monotonic()
            try:
                self._try(node_id, address)
                return ""
            except (OSError, ValueError, ProbeError) as error:
                why = f"{address}: {getattr(error, 'strerror', None) or error}"
            now = time.monotonic()
            if now > began + CONNECT_TIMEOUT_S + ANSWER_TIMEOUT_S + 1.0:
                deadline = now + CONNECT_TIMEOUT_S  # this process itself was paused
            elif now + RETRY_S >= deadline:
                return why
            time.sleep(RETRY_S)

    def _try(self, node_id: str, address: str) -> None:
        with socket.create_connection(host_and_port(address), CONNECT_TIMEOUT_S) as plain:
            plain.settimeout(ANSWER_TIMEOUT_S)
            if self._tls is None:
                _ask(plain)
                return
            tls = self._tls()
            with tls.client.wrap_socket(plain) as sock:
                refusal = tls.refusal(sock, self._job_id, node_id)
                if refusal is not None:
                    raise ProbeError(refusal)
                _ask(sock)


def _ask(sock: socket.socket) -> None:
    hello = (PROBE + os.urandom(32)).ljust(HELLO.size, b"\0")
    sock.sendall(hello)
    wanted = PROBE_ANSWER + hello[len(PROBE) :]
    answer = b""
    while len(answer) < len(wanted):
        piece = sock.recv(len(wanted) - len(answer))
        if not piece:
            raise ProbeError("the connection was closed before the answer")
        answer += piece
    if answer != wanted:
        raise ProbeError("the answer is not that of a worker")


def answer_probes(
    tls: Callable[[], TlsPolicy] | None, address: str, *, allow_insecure: bool = False
) -> tuple[Endpoint | None, str]:
    """Opens an endpoint that answers probes, for a worker whose backend has none.

    Args:
        tls: returns how peers are authenticated, called for each probe; None for plaintext.
        address: a local address.
        allow_insecure: whether plaintext may leave loopback.

    Returns:
        The endpoint and its ``host:port``; None and "" if nothing may listen without TLS.
    """
    if tls is None and not allow_insecure and not is_loopback(address):
        return None, ""
    endpoint = Endpoint(tls)
    return endpoint, endpoint.open(address)

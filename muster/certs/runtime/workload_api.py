"""Gets certificate, key and authorities from the SPIFFE Workload API, by the library ``spiffe``.

The API is a gRPC service on a Unix socket of this host. Its agent finds out which process asks, and sends new
certificates long before the old ones end:
https://github.com/spiffe/spiffe/blob/main/standards/SPIFFE_Workload_API.md.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from muster.certs.errors import WorkloadIdentityError
from muster.certs.runtime.material import Material
from muster.version import how_to_install

if TYPE_CHECKING:
    from spiffe import WorkloadApiClient, X509Source

FIRST_S = 30.0
"""Time limit for the first answer, in seconds: the agent may not know a new workload at once."""

RETRY_S = 2.0
"""Seconds after a refusal until the API is asked again."""

CLIENTS_KEPT = 5
"""How many of the latest clients stay open. An attempt that is given up has a thread of the library's that
may only then make its call, and gRPC crashes the process if the client is closed by then.
"""

logging.getLogger("spiffe").setLevel(logging.CRITICAL + 1)  # what is wrong is said here, once


class WorkloadApi:
    """Holds what the Workload API has sent last. All methods may be called from any thread.

    Args:
        socket: address of the API, ``unix:///PATH``.

    Raises:
        WorkloadIdentityError: the library is not installed.
    """

    def __init__(self, socket: str) -> None:
        self.socket = socket
        self._lock = threading.Lock()
        self._source: X509Source | None = None
        self._clients: list[WorkloadApiClient] = []
        self._updates = 0
        self._why = "it has not answered yet"
        self._not_before = 0.0
        try:
            import spiffe  # noqa: F401
        except ImportError:
            raise WorkloadIdentityError(
                "The SPIFFE Workload API is reached by the package spiffe, which is not installed.",
                remedy=f"{how_to_install('spiffe')}.",
            ) from None

    def __enter__(self) -> WorkloadApi:
        """Returns the API, which is closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()

    def close(self) -> None:
        """Closes the connection to the API."""
        with self._lock:
            if self._source is not None:
                self._drop()
                self._clients.pop().close()  # the others are of attempts whose threads may yet call

    def updates(self) -> int:
        """The number of updates that the API has sent; asks it again if it has refused this process."""
        with self._lock:
            self._open(0.1)
            return self._updates

    def newest(self) -> Material:
        """Returns the latest certificate, key and authorities; waits for the first ones.

        Authorities are those of the certificate's own trust domain: federated ones are not trusted.

        Raises:
            WorkloadIdentityError: no identity came in time, or it cannot be used.
        """
        deadline = time.monotonic() + FIRST_S
        while True:
            with self._lock:
                source = self._open(max(0.1, min(RETRY_S, deadline - time.monotonic())))
                if source is not None:
                    return _material(source.get_x509_context(), self.socket)
                why = self._why
            if time.monotonic() >= deadline:
                raise WorkloadIdentityError(
                    f"The SPIFFE Workload API at {self.socket} gave no certificate in {FIRST_S:g} s: {why}.",
                    remedy="See that its agent runs, that this process may open the socket, and that an entry"
                    " is registered for it.",
                )
            time.sleep(0.1)

    def _open(self, timeout_s: float) -> X509Source | None:
        """Returns the source; opens it if there is none, or the last one was refused."""
        from spiffe import WorkloadApiClient, X509Source

        if self._source is not None and not self._source.is_closed():
            return self._source
        if self._source is not None:  # it was refused since
            self._drop()
        if time.monotonic() < self._not_before:
            return None
        self._not_before = time.monotonic() + RETRY_S
        while len(self._clients) >= CLIENTS_KEPT:
            self._clients.pop(0).close()
        try:
            self._clients.append(WorkloadApiClient(self.socket))
            self._source = X509Source(workload_api_client=self._clients[-1], timeout_in_seconds=timeout_s)
        except Exception as error:  # the library, gRPC and the parser of certificates have their own
            self._why = " ".join(str(error).split())[:200]
            return None
        self._source.subscribe_for_updates(self._count)
        self._updates += 1
        return self._source

    def _count(self) -> None:
        self._updates += 1  # on the library's thread, which alone calls this

    def _drop(self) -> None:
        if self._source is not None:
            with contextlib.suppress(Exception):
                self._source.close()
        self._source = None


def _material(context: Any, socket: str) -> Material:
    svid = context.default_svid
    bundle = context.x509_bundle_set.get_bundle_for_trust_domain(svid.spiffe_id.trust_domain)
    roots = (
        tuple(sorted(bundle.x509_authorities, key=lambda each: each.subject.rfc4514_string()))
        if bundle
        else ()
    )
    if not roots:
        raise WorkloadIdentityError(
            f"The SPIFFE Workload API at {socket} sent no authorities of {svid.spiffe_id.trust_domain}.",
            remedy="Check its agent.",
        )
    leaf, *extra = svid.cert_chain
    return Material(svid.private_key, leaf, tuple(extra), roots, f"The certificate from {socket}")

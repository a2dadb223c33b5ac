"""A synchronous client of the scheduler, for the operator's commands."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.certs.config import apply_cipher_list, load_config
from muster.scheduler.config import Address
from muster.scheduler.errors import SchedulerError
from muster.wire.settings import show_address

if TYPE_CHECKING:
    import grpc

    from muster.wire.v1 import rendezvous_pb2 as pb
    from muster.wire.v1 import watch_pb2 as watch_pb

SERVICE = "rendezvous.v1.Rendezvous"
WATCHING_SERVICE = "rendezvous.v1.Watching"
HEALTH_SERVICE = "grpc.health.v1.Health"
TIMEOUT_S = 10.0
STACKS_TIMEOUT_S = 20.0
"""Timeout of a request for stacks, in seconds; longer than the time that workers have to answer."""

TRY_S = 2.0
"""How long one of several schedulers may take to answer before the next one is tried, in seconds."""

TAKEOVER_S = 5.0
"""How long to wait for one of several schedulers to become the leader, in seconds."""

AGAIN_S = 0.2
PROBE_TIMEOUT_S = 2.0
MAX_REPLY_BYTES = 256 * 1024 * 1024


class UnreachableError(SchedulerError):
    """No process answers at the scheduler's address."""


class TlsNeededError(UnreachableError):
    """The scheduler requires TLS, and no config.json is set on this side."""


class RefusedByScheduler(SchedulerError):  # noqa: N818 - it passes on the scheduler's refusal
    """The scheduler refused the call; ``code`` is the name of gRPC's status code."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class SchedulerClient(contextlib.AbstractContextManager["SchedulerClient"]):
    """A connection to a scheduler for a few calls; if there are several schedulers, to the leader.

    Args:
        address: the address of the scheduler, or of each of several schedulers, and the job.
        env: the environment, which may contain the certificate's password.
        certificate: the PKCS#12 file to use instead of the configured one.
        role: the role whose configured certificate and password are used, ``operator`` or ``scheduler``.
        wait_s: how long to look for the leader if there are several schedulers, in seconds.

    Raises:
        UnreachableError: no scheduler answers there, or none of several leads.
        muster.certs.errors.CertificateError: TLS failed on either side.
    """

    def __init__(
        self,
        address: Address,
        env: Mapping[str, str],
        *,
        certificate: Path | None = None,
        role: str = "operator",
        wait_s: float = TAKEOVER_S,
    ) -> None:
        self._job_id = address.job_id
        self._address = address
        self._host = address.hosts[0]
        self._limit_s = TIMEOUT_S if len(address.hosts) == 1 else TRY_S
        self._channel = self._connect_in_time(env, certificate, role, wait_s)

    def status(self) -> pb.StatusReply:
        """Asks for the job's state."""
        from muster.wire.v1 import rendezvous_pb2 as pb

        request = pb.StatusRequest(job_id=self._job_id)
        reply: pb.StatusReply = self._call("Status", request, pb.StatusReply.FromString)
        return reply

    def jobs(self) -> pb.JobsReply:
        """Asks for the jobs that this caller may see."""
        from muster.wire.v1 import rendezvous_pb2 as pb

        reply: pb.JobsReply = self._call("Jobs", pb.JobsRequest(), pb.JobsReply.FromString)
        return reply

    def drain(self, node_id: str, reason: str) -> str:
        """Drains a worker: it finishes its step and leaves. Returns the scheduler's answer as text."""
        from muster.wire.v1 import rendezvous_pb2 as pb

        request = pb.DrainRequest(job_id=self._job_id, node_id=node_id, reason=reason)
        reply: pb.DrainReply = self._call("Drain", request, pb.DrainReply.FromString)
        return reply.sentence

    def drain_many(
        self,
        node_ids: Sequence[str],
        hosts: Sequence[str],
        reason: str = "",
        *,
        at_s: float = 0.0,
        cancel: bool = False,
        preview: bool = False,
    ) -> str:
        """Drains workers now or later, cancels planned drains, or asks what a drain would cost.

        Returns the scheduler's answer as text.

        Args:
            node_ids: the node ids of the workers.
            hosts: hosts of which all workers are drained.
            reason: the reason, for the log and the workers.
            at_s: the time of the drain, in seconds since 1970; 0 means now.
            cancel: whether to cancel planned drains instead.
            preview: whether to only ask what the drain would cost.
        """
        from muster.wire.v1 import rendezvous_pb2 as pb

        request = pb.DrainRequest(
            job_id=self._job_id,
            node_ids=node_ids,
            hosts=hosts,
            reason=reason,
            at_s=at_s,
            cancel=cancel,
            preview=preview,
        )
        reply: pb.DrainReply = self._call("Drain", request, pb.DrainReply.FromString)
        return reply.sentence

    def admit(self, name: str) -> str:
        """Readmits a refused GPU, or all those of a host or node; returns the scheduler's answer."""
        from muster.wire.v1 import rendezvous_pb2 as pb

        request = pb.AdmitRequest(job_id=self._job_id, name=name)
        reply: pb.AdmitReply = self._call("Admit", request, pb.AdmitReply.FromString)
        return reply.sentence

    def stacks(self, node_id: str = "") -> pb.StacksReply:
        """Asks for the stacks of a worker's process, or of all workers."""
        from muster.wire.v1 import rendezvous_pb2 as pb

        request = pb.StacksRequest(job_id=self._job_id, node_id=node_id)
        parse = pb.StacksReply.FromString
        reply: pb.StacksReply = self._call("Stacks", request, parse, timeout_s=STACKS_TIMEOUT_S)
        return reply

    def watch(self, job_id: str = "") -> Iterator[watch_pb.WatchReply]:
        """Follows one job, or without a job id, all jobs that this caller may see, until the scheduler ends.

        Args:
            job_id: the job.

        Raises:
            UnreachableError: the scheduler is gone.
            RefusedByScheduler: the caller may not watch, or the job does not exist or has ended.
        """
        import grpc

        from muster.wire.v1 import watch_pb2 as watch_pb

        call = self._channel.unary_stream(
            f"/{WATCHING_SERVICE}/Watch",
            request_serializer=watch_pb.WatchRequest.SerializeToString,
            response_deserializer=watch_pb.WatchReply.FromString,
        )
        try:
            yield from call(watch_pb.WatchRequest(job_id=job_id))
        except grpc.RpcError as error:
            raise self._in_words(error) from None

    def end_job(self, reason: str) -> str:
        """Ends the job; returns the scheduler's answer."""
        from muster.wire.v1 import watch_pb2 as watch_pb

        request = watch_pb.EndJobRequest(job_id=self._job_id, reason=reason)
        parse = watch_pb.EndJobReply.FromString
        reply: watch_pb.EndJobReply = self._call("EndJob", request, parse, WATCHING_SERVICE)
        return reply.sentence

    def health(self) -> str:
        """Asks the standard gRPC health service; a healthy scheduler answers ``SERVING``."""
        from grpc_health.v1 import health_pb2

        request = health_pb2.HealthCheckRequest(service=SERVICE)
        reply = self._call("Check", request, health_pb2.HealthCheckResponse.FromString, HEALTH_SERVICE)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

    def close(self) -> None:
        """Closes the connection, which ends calls that are in progress."""
        self._channel.close()

    def __exit__(self, *_: object) -> None:
        """Closes the connection."""
        self.close()

    # ------------------------------------------------------------ inside

    @property
    def where(self) -> str:
        """The address that is queried."""
        return show_address(self._host, self._address.port)

    def _connect_in_time(
        self, env: Mapping[str, str], certificate: Path | None, role: str, wait_s: float
    ) -> grpc.Channel:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return self._connect_first(env, certificate, role)
            except UnreachableError:
                if len(self._address.hosts) == 1 or time.monotonic() > deadline:
                    raise
            time.sleep(AGAIN_S)

    def _connect_first(self, env: Mapping[str, str], certificate: Path | None, role: str) -> grpc.Channel:
        failures: list[UnreachableError] = []
        for host in self._address.hosts:
            self._host = host
            try:
                if self._address.config_path is None and len(self._address.hosts) > 1:
                    self._check_listens()
                return self._connect(self._address, env, certificate, role)
            except UnreachableError as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        where = ", ".join(show_address(host, self._address.port) for host in self._address.hosts)
        raise UnreachableError(
            f"None of the schedulers at {where} leads: {failures[-1].message}",
            remedy="Has the job ended? Is etcd up? Without a majority of its members nobody leads; training"
            " goes on.",
        )

    def _check_listens(self) -> None:
        """Checks that a process listens at the address.

        A channel without TLS connects only at its first call, when it is too late to try another address.
        """
        try:
            socket.create_connection((self._host, self._address.port), self._limit_s).close()
        except OSError as error:
            raise self._unreachable(error.strerror or error) from None

    def _call(
        self,
        method: str,
        request: Any,
        parse: Callable[[bytes], Any],
        service: str = SERVICE,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        import grpc

        call = self._channel.unary_unary(
            f"/{service}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=parse,
        )
        try:
            return call(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._in_words(error, timeout_s) from None

    def _in_words(self, error: grpc.RpcError, timeout_s: float = TIMEOUT_S) -> SchedulerError:
        import grpc

        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnreachableError(f"The scheduler at {self.where} did not answer within {timeout_s:g} s.")
        if code is grpc.StatusCode.UNAVAILABLE:
            reason = details.rpartition("Failed to connect to remote host: ")[2]  # gRPC lists all attempts
            return self._tls_needed() or self._unreachable(reason)
        return RefusedByScheduler(details or code.name, code=code.name)

    def _tls_needed(self) -> TlsNeededError | None:
        """Returns the error for a plaintext call to a scheduler that uses TLS.

        Returns None if the call failed for another reason.
        """
        from muster.certs.runtime.probe import Spoken, spoken_at

        address = self._address
        if address.config_path is not None:
            return None
        with contextlib.suppress(OSError):
            if spoken_at(self._host, address.port, PROBE_TIMEOUT_S) is Spoken.TLS:
                return TlsNeededError(
                    f"The scheduler at {self.where} speaks TLS, and no config.json is set here.",
                    remedy="Set MS_CONFIG_FILE, or give --config.",
                )
        return None

    def _unreachable(self, reason: object) -> UnreachableError:
        return UnreachableError(
            f"No scheduler can be reached at {self.where}: {reason}.",
            remedy="Check MS_SCHED_HOST and MS_SCHED_PORT, and that both sides use TLS or neither does.",
        )

    def _connect(
        self, address: Address, env: Mapping[str, str], certificate: Path | None, role: str
    ) -> grpc.Channel:
        options: list[tuple[str, Any]] = [("grpc.max_receive_message_length", MAX_REPLY_BYTES)]
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # Muster's errors say what gRPC would log.
        if address.config_path is None:
            import grpc

            return grpc.insecure_channel(self.where, [*options, ("grpc.enable_http_proxy", 0)])
        config = load_config(address.config_path)
        apply_cipher_list(config)
        import dataclasses

        from muster.certs.runtime.preflight import preflight
        from muster.certs.runtime.store import load_configured

        if certificate is not None:
            config = dataclasses.replace(config, client_cert_path=certificate)
        credentials = load_configured(config, role, env)
        try:
            found = preflight(
                self._host, address.port, credentials, job=address.job_id, timeout_s=self._limit_s
            )
        except OSError as error:
            raise self._unreachable(error.strerror or error) from None
        import grpc

        from muster.certs.runtime.grpc_credentials import channel_credentials
        from muster.wire.settings import client_options

        options += client_options(schedulers=len(address.hosts))
        if found.name_override is not None:
            options.append(("grpc.ssl_target_name_override", found.name_override))
        return grpc.secure_channel(
            self.where, channel_credentials(credentials, found.server_leaf_pem), options
        )


class Following(contextlib.AbstractContextManager["Following"]):
    """A client that reconnects. If its scheduler is one of several and is gone, it looks for the new leader.

    Args:
        connect: opens a connection; may raise the errors of :class:`SchedulerClient`.
        several: whether there are several schedulers.
    """

    def __init__(self, connect: Callable[[], SchedulerClient], *, several: bool) -> None:
        self._connect = connect
        self._several = several
        self._client = connect()

    def status(self) -> pb.StatusReply:
        """Asks for the job's state.

        Raises:
            UnreachableError: the scheduler does not answer, or none of several becomes the leader in time.
        """
        try:
            return self._client.status()
        except UnreachableError:
            if not self._several:
                raise
        self._client.close()
        self._client = self._connect()
        return self._client.status()

    def __exit__(self, *_: object) -> None:
        """Closes the connection."""
        self._client.close()

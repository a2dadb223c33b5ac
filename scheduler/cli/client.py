"""A small synchronous client for the operator's commands, whose errors come in words."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from muster.certs.config import apply_cipher_list, load_config
from muster.scheduler.config import Address
from muster.scheduler.errors import SchedulerError
from muster.scheduler.serve.listen import show

if TYPE_CHECKING:
    import grpc

    from muster.rendezvous.v1 import rendezvous_pb2 as pb

SERVICE = "rendezvous.v1.Rendezvous"
HEALTH_SERVICE = "grpc.health.v1.Health"
TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 2.0
MAX_REPLY_BYTES = 256 * 1024 * 1024


class UnreachableError(SchedulerError):
    """Nobody answers at the scheduler's address."""


class TlsNeededError(UnreachableError):
    """The scheduler speaks TLS, and this side has no config.json."""


class RefusedByScheduler(SchedulerError):  # noqa: N818 - the scheduler's own word, handed on
    """The scheduler refused the call; ``code`` is gRPC's name of the reason."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class Client:
    """One connection to a scheduler, for a few calls.

    Args:
        address: where it is, and the job that is meant.
        env: where the certificate's password is looked for.
        certificate: the PKCS#12 file to use instead of the configured one.
        role: whose configured certificate and password to use, ``operator`` or ``scheduler``.

    Raises:
        UnreachableError: nobody listens there.
        certs.errors.CertificateError: TLS failed on either side.
    """

    def __init__(
        self,
        address: Address,
        env: Mapping[str, str],
        *,
        certificate: Path | None = None,
        role: str = "operator",
    ) -> None:
        self._job_id = address.job_id
        self._address = address
        self._where = show(address.host, address.port)
        self._channel = self._connect(address, env, certificate, role)

    def status(self) -> pb.StatusReply:
        """Asks for the job's state."""
        from muster.rendezvous.v1 import rendezvous_pb2 as pb

        request = pb.StatusRequest(job_id=self._job_id)
        reply: pb.StatusReply = self._call("Status", request, pb.StatusReply.FromString)
        return reply

    def drain(self, node_id: str, reason: str) -> str:
        """Asks that a worker finish its step and leave; returns the scheduler's answer."""
        from muster.rendezvous.v1 import rendezvous_pb2 as pb

        request = pb.DrainRequest(job_id=self._job_id, node_id=node_id, reason=reason)
        reply: pb.DrainReply = self._call("Drain", request, pb.DrainReply.FromString)
        return reply.sentence

    def health(self) -> str:
        """Asks the standard gRPC health service; ``SERVING`` is the good answer."""
        from grpc_health.v1 import health_pb2

        request = health_pb2.HealthCheckRequest(service=SERVICE)
        reply = self._call("Check", request, health_pb2.HealthCheckResponse.FromString, HEALTH_SERVICE)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

    def __enter__(self) -> Client:
        """Enters; leaving closes the connection."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the connection."""
        self._channel.close()

    # ------------------------------------------------------------ inside

    def _call(self, method: str, request: Any, parse: Callable[[bytes], Any], service: str = SERVICE) -> Any:
        import grpc

        call = self._channel.unary_unary(
            f"/{service}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=parse,
        )
        try:
            return call(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise self._in_words(error) from None

    def _in_words(self, error: grpc.RpcError) -> SchedulerError:
        import grpc

        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnreachableError(f"The scheduler at {self._where} did not answer within {TIMEOUT_S:g} s.")
        if code is grpc.StatusCode.UNAVAILABLE:
            reason = details.rpartition("Failed to connect to remote host: ")[2]  # gRPC tells all tries
            return self._tls_needed() or self._unreachable(reason)
        return RefusedByScheduler(details or code.name, code=code.name)

    def _tls_needed(self) -> TlsNeededError | None:
        """Why a call without TLS did not get through, if that is why."""
        from muster.certs.runtime.probe import Spoken, spoken_at

        address = self._address
        if address.config_path is not None:
            return None
        with contextlib.suppress(OSError):
            if spoken_at(address.host, address.port, PROBE_TIMEOUT_S) is Spoken.TLS:
                return TlsNeededError(
                    f"The scheduler at {self._where} speaks TLS, and no config.json is set here.",
                    remedy="Set MS_CONFIG_FILE, or give --config.",
                )
        return None

    def _unreachable(self, reason: object) -> UnreachableError:
        return UnreachableError(
            f"No scheduler can be reached at {self._where}: {reason}.",
            remedy="Check MS_SCHED_HOST and MS_SCHED_PORT, and that both sides use TLS or neither does.",
        )

    def _connect(
        self, address: Address, env: Mapping[str, str], certificate: Path | None, role: str
    ) -> grpc.Channel:
        options: list[tuple[str, Any]] = [("grpc.max_receive_message_length", MAX_REPLY_BYTES)]
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it would say, our own errors say
        if address.config_path is None:
            import grpc

            return grpc.insecure_channel(self._where, [*options, ("grpc.enable_http_proxy", 0)])
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
                address.host, address.port, credentials, job=address.job_id, timeout_s=TIMEOUT_S
            )
        except OSError as error:
            raise self._unreachable(error.strerror or error) from None
        import grpc

        from muster.certs.runtime.grpc_credentials import channel_credentials, client_options

        options += client_options()
        if found.name_override is not None:
            options.append(("grpc.ssl_target_name_override", found.name_override))
        return grpc.secure_channel(
            self._where, channel_credentials(credentials, found.server_leaf_pem), options
        )

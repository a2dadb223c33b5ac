"""Runs a JAX program that knows nothing of Muster: ``jax.distributed.initialize()`` finds the job by itself.

The agent starts ``python -m muster.programs.jax_program SCRIPT`` for ``python SCRIPT``. When the script
imports JAX, Muster's ``ClusterEnv`` is registered before all others; JAX is not imported earlier. Process ids
are the ranks. The coordination service of process 0 listens on its host's address, and its address is
published in the store. The service and its clients speak mutual TLS with Muster's certificates, from files in
memory.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import runpy
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from muster.errors import SecurityError
from muster.programs.assignment import KEY, Handover
from muster.wire.settings import is_loopback
from muster.worker.program_environment import STORE_VARIABLE
from muster.worker.stacks.handler import answer_signal

if TYPE_CHECKING:
    from muster.certs.runtime.store import Credentials

log = logging.getLogger("muster.worker")

CLUSTERS = "jax._src.clusters"
NAME = "muster"
ADDRESS = "jax/coordinator/%d"
BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"

_VALIDATE, _SET, _GET, _WAIT = 0, 1, 3, 6
_MAGIC = 0x3C85F7CE
_CONNECT_TIMEOUT_S = 60.0


def main(arguments: Sequence[str]) -> None:
    """Runs ``SCRIPT [ARGUMENT...]`` or ``-m MODULE [ARGUMENT...]`` as Python would."""
    sys.meta_path.insert(0, _Finder())
    answer_signal(os.environ)
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


class _Finder(importlib.abc.MetaPathFinder):
    """Registers Muster's ``ClusterEnv`` as soon as JAX has loaded its own."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != CLUSTERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        register(module)


def register(clusters: Any) -> None:
    """Makes Muster's ``ClusterEnv`` the first one that JAX tries.

    Args:
        clusters: JAX's module ``jax._src.clusters``.
    """
    cluster = Cluster(os.environ)

    class MusterCluster(clusters.ClusterEnv):  # type: ignore[misc]
        """This job, as a ``ClusterEnv`` of JAX."""

        name = NAME

        @classmethod
        def is_env_present(cls) -> bool:
            return STORE_VARIABLE in os.environ

        @classmethod
        def get_coordinator_address(
            cls, timeout_secs: int | None = None, override_coordinator_port: str | None = None
        ) -> str:
            return cluster.coordinator_address(int(override_coordinator_port or 0))

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["WORLD_SIZE"])

        @classmethod
        def get_process_id(cls) -> int:
            cluster.protect()
            return cluster.process_id

        @classmethod
        def get_local_process_id(cls) -> int | None:
            return int(os.environ["LOCAL_RANK"])

    kinds: list[Any] = clusters.ClusterEnv._cluster_types
    kinds.remove(MusterCluster)
    kinds.insert(0, MusterCluster)


class Cluster:
    """The job, read from the environment variables and the agent's listener.

    Args:
        env: this process's environment variables, with those that the agent has set.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._store: AgentStore | None = None
        self._handover: Handover | None = None
        self._protected = False
        self._meetings = 0
        self._held: list[int] = []

    @property
    def process_id(self) -> int:
        """This process's rank."""
        return int(self._env["RANK"])

    @property
    def store(self) -> AgentStore:
        """This generation's store; the first access connects to it."""
        if self._store is None:
            self._store = AgentStore(self._env[STORE_VARIABLE])
        return self._store

    @property
    def handover(self) -> Handover:
        """The agent's handover; the first access reads it from the store."""
        if self._handover is None:
            self._handover = Handover.decode(self.store.get(KEY))
        return self._handover

    def coordinator_address(self, port: int = 0) -> str:
        """Returns ``host:port`` of process 0's coordination service.

        Process 0 chooses the port and publishes it in the store, where the others wait for it.

        Args:
            port: the port; 0 for any that is free.

        Raises:
            SecurityError: the service cannot be protected.
            ConnectionError: the generation is over.
        """
        self.protect()
        self._meetings += 1
        key = ADDRESS % self._meetings
        if self.process_id == 0:
            host = self.handover.address
            address = f"[{host}]" if ":" in host else host
            address = f"{address}:{port or free_port(host)}"
            os.environ.setdefault(BIND_VARIABLE, address)  # JAX's default is every address of the host
            self.store.set(key, address.encode())
        return self.store.get(key).decode()

    def protect(self) -> None:
        """Configures JAX's coordination service for mutual TLS; idempotent.

        Raises:
            SecurityError: this JAX has no mutual TLS, or the job has no certificates, and plaintext is not
                allowed; or the certificate cannot be used.
        """
        if self._protected:
            return
        import jax

        handover = self.handover
        can = hasattr(jax.config, "jax_mtls_cert_file")
        if handover.config_path and can:
            self._use(jax.config, load_credentials(handover, self._env))
        else:
            check_plaintext(handover, jax.__version__ if handover.config_path else "")
        self._protected = True

    def _use(self, config: Any, credentials: Credentials) -> None:
        """Gives JAX the certificate, the key and the authorities as files that exist only in memory.

        Raises:
            SecurityError: the certificate has a SPIFFE ID, from which JAX cannot read the job.
        """
        if credentials.identity.spiffe_id:
            raise SecurityError(
                "JAX compares the beginning of the other side's URI, and that of a SPIFFE ID names no job.",
                remedy="Give the workers of JAX programs certificates of `muster certs issue`.",
            )
        config.update("jax_mtls_cert_file", self._file(credentials.cert_chain_pem))
        config.update("jax_mtls_key_file", self._file(credentials.key_pem))
        config.update("jax_mtls_ca_file", self._file(credentials.ca_pem))
        config.update("jax_mtls_peer_uri_prefix", credentials.identity.uri().rpartition("/worker")[0] + "/")
        config.update("jax_distributed_verify_secure_credentials", True)

    def _file(self, data: bytes) -> str:
        handle = os.memfd_create("muster", os.MFD_CLOEXEC)
        os.write(handle, data)
        self._held.append(handle)
        return f"/proc/self/fd/{handle}"


def load_credentials(handover: Handover, env: Mapping[str, str]) -> Credentials:
    """Loads this worker's certificate and key.

    Raises:
        SettingsError: config.json or the password is wrong.
        SecurityError: the certificate cannot be used.
    """
    from muster.programs.addresses import follow

    return follow(handover, env)()


def check_plaintext(handover: Handover, too_old: str) -> None:
    """Checks that JAX's coordination service may run in plaintext.

    It may with MS_ALLOW_INSECURE, and in a job without certificates on loopback.

    Args:
        handover: the agent's handover, with the host's address and whether plaintext is allowed.
        too_old: the version of a JAX that has no mutual TLS; empty if the job has no certificates.

    Raises:
        SecurityError: plaintext is not allowed.
    """
    if handover.allow_insecure:
        log.warning("JAX's coordination service is NOT encrypted (MS_ALLOW_INSECURE).")
        return
    if too_old:
        raise SecurityError(
            f"JAX {too_old} cannot encrypt its coordination service; JAX 0.12 and later can.",
            remedy="Install one, or set MS_ALLOW_INSECURE=1 to let it run in plaintext.",
        )
    if not is_loopback(handover.address):
        raise SecurityError(
            f"Without TLS JAX's coordination service stays on loopback; this host is {handover.address}.",
            remedy="Give certificates (MS_CONFIG_FILE), or set MS_ALLOW_INSECURE=1.",
        )


def free_port(host: str) -> int:
    """Returns a port of this host's address that no process listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class AgentStore:
    """A client of the agent's listener for programs without torch: set and get of TCPStore's protocol.

    Args:
        address: the listener's ``host:port`` on loopback.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S)
        self._socket.settimeout(None)
        self._socket.sendall(struct.pack("<BI", _VALIDATE, _MAGIC))

    def set(self, key: str, value: bytes) -> None:
        """Sets a key."""
        self._socket.sendall(bytes((_SET,)) + _counted(f"/{key}".encode()) + _counted(value))

    def get(self, key: str) -> bytes:
        """Waits until a key has a value; returns it.

        Raises:
            ConnectionError: the generation is over.
        """
        name = _counted(f"/{key}".encode())
        self._socket.sendall(struct.pack("<BQ", _WAIT, 1) + name)
        self._hear(1)
        self._socket.sendall(bytes((_GET,)) + name)
        (size,) = struct.unpack("<Q", self._hear(8))
        return self._hear(size)

    def _hear(self, size: int) -> bytes:
        heard = b""
        while len(heard) < size:
            more = self._socket.recv(size - len(heard))
            if not more:
                raise ConnectionError("The store of this generation has gone.")
            heard += more
        return heard


def _counted(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


if __name__ == "__main__":
    main(sys.argv[1:])

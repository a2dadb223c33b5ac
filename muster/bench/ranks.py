"""Processes of this machine, joined by a CPU communicator without a scheduler.

For benchmarks that need only a communicator. All else that a session does (loss of workers, replacement) is
absent.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from muster.bench.launches import by_pipes, receive
from muster.communicators.membership import Membership, Peer

_JOB, _PASSWORD = "bench", b"bench"
_MEETING_S = 60.0


def run_ranks(
    workers: int,
    function: Callable[..., Any],
    *arguments: Any,
    tls: bool = True,
    seal: bool = True,
) -> list[Any]:
    """Calls ``function(communicator, *arguments)`` on all ranks at once, each in a process.

    Args:
        workers: the number of ranks.
        function: a module's function; it must not return a text.
        arguments: its further arguments, which must be picklable.
        tls: whether to use mutual TLS, with certificates that are made for it.
        seal: whether to use the communicator's own records; False for those of TLS.

    Returns:
        Each rank's result, in the order of ranks.

    Raises:
        RuntimeError: a process failed, or ended early.
    """
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as scratch:
        folder = _certificates(Path(scratch)) if tls else None
        with by_pipes(workers, _rank, folder, seal, function, arguments) as pipes:
            places = [receive(pipe) for pipe in pipes]
            for pipe in pipes:
                pipe.send(([address for address, _ in places], places[0][1]))
            return [receive(pipe) for pipe in pipes]


def _certificates(folder: Path) -> Path:
    from muster.certs.files import write_file
    from muster.certs.pki.authority import create_authority
    from muster.certs.pki.identity import Identity

    authority = create_authority(folder / "authority", _PASSWORD)
    write_file(folder / "client.p12", authority.issue(Identity(_JOB, "worker")).p12(_PASSWORD))
    return folder


def _rank(
    rank: int,
    pipe: Connection,
    folder: Path | None,
    seal: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    try:
        from muster.communicators import create_backend

        tls = None
        if folder is not None:
            from muster.certs.runtime.store import load_credentials

            tls = load_credentials(folder / "client.p12", _PASSWORD, folder / "authority" / "ca.crt")
        backend = create_backend("tcp", tls=tls, job_id=_JOB, seal=seal)
        pipe.send((backend.open_endpoint("127.0.0.1"), backend.mint_unique_ids(1)))
        addresses, unique_ids = pipe.recv()
        peers = tuple(
            Peer(index, f"bench-{index}", index, "bench", "localhost", address)
            for index, address in enumerate(addresses)
        )
        membership = Membership(_JOB, 1, "world", rank, peers, unique_ids)
        communicator = backend.connect(membership, timeout_s=_MEETING_S, cancelled=lambda: None)
        result = function(communicator, *arguments)
        communicator.barrier()
        communicator.close()
        backend.close()
        pipe.send(result)
    except Exception as error:
        pipe.send(f"rank {rank}: {type(error).__name__}: {error}")

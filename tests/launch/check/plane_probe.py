"""What two workers of a test do: measure a plane beside their session, as the check measures NCCL."""

from __future__ import annotations

from muster.communicators import create_backend
from muster.launch.check.bandwidth import Arrays, Beside
from muster.worker.session.session import Session


def probe(session: Session) -> list[object]:
    """The ranks with wrong numbers, and which ranks saw a speed, of a good plane and of one that lies."""
    found: list[object] = []
    for arrays in (Arrays(), Arrays(read=lambda array: array + (session.rank == 1))):
        backend = create_backend("tcp", tls=None, allow_insecure=True)
        plane = Beside(session, backend, arrays)
        found.append(plane.wrong_ranks(1))
        found.append([speed > 0 for speed in plane.speeds([(0, 2)], 1, 1)])
        plane.close()
    return found

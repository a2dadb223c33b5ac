"""NCCL and its plug-in as far as the backend calls them, and the members of a group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from muster.communicators.membership import Membership, Peer
from muster.communicators.nccl import bootstrap as nccl_handles


def membership(
    endpoints: list[str], ids: tuple[bytes, ...] = (b"secret",), generation: int = 3
) -> Membership:
    peers = tuple(Peer(r, f"w{r}", r, "h", "host", endpoint) for r, endpoint in enumerate(endpoints))
    return Membership("job", generation, "world", 0, peers, ids)


class FakeNccl:
    """NCCL whose communicator is in progress for ever, or for a while."""

    class NCCLError(Exception):
        pass

    class UniqueId:
        @staticmethod
        def from_buffer(data: bytes) -> bytes:
            return data

    class Config:
        blocking = -1
        ptr = 1

    def __init__(self, polls: int, outcome: int = 0) -> None:
        self.polls, self.outcome = polls, outcome
        self.aborted: list[Any] = []

    def comm_init_rank_config(self, size: int, unique_id: bytes, rank: int, config: int) -> str:
        return f"comm {rank} of {size}"

    def comm_init_rank_scalable(self, size: int, rank: int, count: int, ids: Any, config: int) -> str:
        if memoryview(ids).readonly:
            raise ValueError("a 1D contiguous writable buffer")  # as nccl4py does
        return f"comm {rank} of {size} with {count} ids, {len(ids)} bytes"

    def comm_get_async_error(self, comm: Any) -> int:
        self.polls -= 1
        return self.outcome if self.polls < 0 else nccl_handles.IN_PROGRESS

    def comm_abort(self, comm: Any) -> None:
        self.aborted.append(comm)

    def get_error_string(self, state: int) -> str:
        return f"error {state}"


class EndedConnection:
    """A plug-in with a connection that has ended."""

    def use_secret(self, generation: int, secret: bytes) -> None:
        return

    def reason(self) -> str:
        return "10.0.0.2:4711 proved another secret. See that all hosts are of this job."

    def forget_reason(self) -> None:
        return


ENDED = r"proved another secret\. See that .*That address is of rank 1 \(w1 on host\)"


class RecordingNccl:
    class NCCLError(Exception):
        pass

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def Config(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=1)

    def comm_split(self, parent: str, color: int, key: int, config: int) -> str:
        return f"child of {parent}"

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return 0

        return call

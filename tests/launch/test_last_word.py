"""What a launcher has said of processes that have ended: until somebody who leads has it."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from muster.launch.last_word import tell
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.worker.session.streams import DeniedError, Stream

WORDS = [
    pb.ProcessEndedRequest(job_id="job", node_id=node_id, incarnation=7, detail="was killed by SIGKILL")
    for node_id in "ab"
]


class Schedulers:
    """Those that are tried, one after the other: what each answers, or why not."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)
        self.heard: list[str] = []
        self.closed = 0

    def dial(self, outbox: SimpleQueue[bytes | None]) -> Stream:
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        data = outbox.get_nowait()
        assert data is not None and outbox.get_nowait() is None  # the request is whole
        self.heard.append(pb.ProcessEndedRequest.FromString(data).node_id)
        return self._replies(answer), self._close

    def _replies(self, answer: bool | Exception) -> Iterator[bytes]:
        if isinstance(answer, Exception):
            raise answer
        yield pb.ProcessEndedReply(gone=answer).SerializeToString()

    def _close(self) -> None:
        self.closed += 1


def test_each_word_is_said_again_until_a_scheduler_has_taken_it() -> None:
    schedulers = Schedulers(ConnectionRefusedError("nobody leads"), False, True, True)
    pauses: list[float] = []
    tell(schedulers.dial, WORDS, pauses.append)
    assert schedulers.heard == ["a", "a", "b"]
    assert schedulers.closed == 3
    assert len(pauses) == 2


def test_who_may_not_say_it_does_not_say_it_again() -> None:
    schedulers = Schedulers(DeniedError("bound to another node", by_scheduler=True))
    with pytest.raises(DeniedError):
        tell(schedulers.dial, WORDS)
    assert schedulers.heard == ["a"]

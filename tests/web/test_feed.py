"""What the page asks of a scheduler, and when it asks again."""

from __future__ import annotations

import asyncio
import errno
import queue
from collections.abc import Iterator
from typing import Any

import pytest

from muster.certs.errors import UntrustedError
from muster.scheduler.cli.client import RefusedByScheduler
from muster.web.feed import AGAIN_S, Feed
from muster.web.model import Followed
from muster.wire.v1 import watch_pb2 as pb
from tests.waiting import go, until


class FakeScheduler:
    """Lists jobs, and refuses to show any."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.overviews: queue.SimpleQueue[pb.WatchReply | None] = queue.SimpleQueue()

    def __call__(self, job_id: str) -> Any:
        return self

    def __enter__(self) -> FakeScheduler:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        self.overviews.put(None)

    def watch(self, job_id: str) -> Iterator[pb.WatchReply]:
        self.asked.append(job_id)
        if job_id:
            raise RefusedByScheduler(f"There is no job {job_id}.", code="NOT_FOUND")
        while (reply := self.overviews.get()) is not None:
            yield reply

    def list(self, *jobs: str) -> None:
        lines = [pb.JobLine(job_id=job_id) for job_id in jobs]
        self.overviews.put(pb.WatchReply(overview=pb.Overview(version="1", jobs=lines)))


async def asked_for_so_long(scheduler: FakeScheduler, many: int) -> None:
    await until(lambda: scheduler.asked.count("a") >= many)
    await asyncio.sleep(4 * AGAIN_S)
    assert scheduler.asked.count("a") == many


def test_a_job_that_is_gone_is_asked_for_once_by_each_who_comes_and_when_it_is_there_again() -> None:
    """1.5 refusals a second for ever, from a page that somebody had left open, made an alert fire."""

    async def follow() -> None:
        scheduler, known = FakeScheduler(), Followed("here")
        feed = Feed(scheduler, known, lambda: None)
        try:
            feed.open()
            scheduler.list()
            feed.watch("a")
            await asked_for_so_long(scheduler, 1)
            feed.watch("a")  # somebody loads the page again
            await asked_for_so_long(scheduler, 2)
            scheduler.list("a")
            await until(lambda: scheduler.asked.count("a") == 3)
            await until(lambda: known.jobs["a"].refusal)
            await asked_for_so_long(scheduler, 3)  # it is there, and still refused: not at once again
        finally:
            feed.close()

    go(follow())


def test_what_the_system_refuses_while_a_scheduler_is_asked_is_told_and_it_is_asked_again() -> None:
    """The thread died of it, with a traceback."""

    async def follow() -> None:
        scheduler, known = FakeScheduler(), Followed("here")
        refusals = [OSError(errno.EMFILE, "Too many open files")]

        def connect(job_id: str) -> Any:
            if refusals:
                raise refusals.pop()
            return scheduler

        feed = Feed(connect, known, lambda: None)
        try:
            feed.open()
            await until(lambda: "Too many open files" in known.why_absent)
            await until(lambda: scheduler.asked == [""])
        finally:
            feed.close()

    go(follow())


def test_a_certificate_that_does_not_count_is_shown_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two failed handshakes a second for ever, from a page that was left open, would make an alert fire."""
    monkeypatch.setattr("muster.web.feed.UNTRUSTED_S", 60.0)

    async def follow() -> None:
        scheduler, known = FakeScheduler(), Followed("here")
        tried: list[str] = []
        counts = [False]

        def connect(job_id: str) -> Any:
            tried.append(job_id)
            if not counts[0]:
                raise UntrustedError("The certificate is of another authority.", remedy="Renew it.")
            return scheduler

        feed = Feed(connect, known, lambda: None)
        try:
            feed.open()
            await until(lambda: "another authority" in known.why_absent)
            await asyncio.sleep(4 * AGAIN_S)
            assert tried == [""]
            counts[0] = True  # it was renewed, and somebody loads a page
            feed.watch("a")
            await until(lambda: sorted(scheduler.asked) == ["", "a"])
        finally:
            feed.close()

    go(follow())

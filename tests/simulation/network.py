"""Streams between workers and the scheduler: in order, delayed, broken, cut; bytes on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.scheduler.core import events as se
from muster.scheduler.core import messages as sm
from muster.scheduler.wire import AssignmentEncoder, JoinRequest, decode_worker_message
from muster.worker.control import events as e
from muster.worker.control import messages as m
from muster.worker.control.wire import decode, encode
from tests.scheduler.core.transcript import show_message

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World


CONNECT_TIMEOUT_S = 2.0


class Stream:
    """One stream. Each side learns of its end by itself."""

    def __init__(self, session: int, worker: Worker, number: int) -> None:
        self.session = session
        self.worker = worker
        self.number = number
        self.server_open = True
        self.worker_open = True
        self.up_at = 0.0
        self.down_at = 0.0
        self.unread = 0


class Network:
    """All streams of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sessions = 0
        self.encoder = AssignmentEncoder()

    def delay(self) -> float:
        rng = self.world.rng
        return rng.random() * (0.3 if rng.random() < 0.05 else 0.01)

    # ------------------------------------------------------------ opening and ending

    def connect(self, worker: Worker, number: int) -> None:
        """The worker asks for a stream."""
        self.world.loop.after(self.delay(), self._arrive, worker, number)

    def _arrive(self, worker: Worker, number: int) -> None:
        if not worker.alive:
            return
        paused_for = self.world.scheduler.paused_until - self.world.loop.now
        if 0.0 < paused_for < CONNECT_TIMEOUT_S:  # the kernel has taken the connection
            self.world.loop.after(paused_for, self._arrive, worker, number)
            return
        if paused_for <= 0.0:  # a flood is in the way
            paused_for = self.world.scheduler.deaf_until - self.world.loop.now
        if paused_for > 0.0:
            self.world.loop.after(CONNECT_TIMEOUT_S, worker.post, e.StreamLost(number, "no answer"))
            return
        if worker.is_cut() or not self.world.scheduler.up:
            pause = 1.0 if worker.is_cut() else self.delay()
            self.world.loop.after(pause, worker.post, e.StreamLost(number, "no answer"))
            return
        self.sessions += 1
        stream = Stream(self.sessions, worker, number)
        self.world.scheduler.streams[stream.session] = stream
        worker.stream = stream
        worker.post(e.StreamOpened(number))

    def disconnect(self, worker: Worker, number: int) -> None:
        """The worker closes its stream: what it has sent still arrives."""
        stream = worker.stream
        if stream is not None and stream.number == number and stream.worker_open:
            stream.worker_open = False
            self._after_up(stream, self._server_sees_end, stream, "closed by the worker")

    def break_up(self, stream: Stream, detail: str, *, worker_too: bool = True) -> None:
        """The stream breaks; what is under way may be lost."""
        self.world.loop.after(self.delay(), self._server_sees_end, stream, detail)
        if worker_too:
            self.world.loop.after(self.delay(), self._worker_sees_end, stream, detail)

    def closed_by_scheduler(self, stream: Stream, detail: str) -> None:
        """The scheduler closes a stream (after a final message), or is gone."""
        stream.server_open = False
        when = max(self.world.loop.now + self.delay(), stream.down_at)
        self.world.loop.at(when, self._worker_sees_end, stream, detail)

    def _server_sees_end(self, stream: Stream, detail: str) -> None:
        if self.world.loop.now < self.world.scheduler.paused_until:
            self.world.loop.at(self.world.scheduler.paused_until, self._server_sees_end, stream, detail)
            return
        if self.world.loop.now < self.world.scheduler.deaf_until:
            stream.unread += 1
            self.world.loop.at(self.world.scheduler.deaf_until, self._server_reads_end, stream, detail)
            return
        if stream.worker.is_cut():
            return  # silence tells
        if stream.server_open:
            stream.server_open = False
            self.world.scheduler.lost(stream, detail)

    def _server_reads_end(self, stream: Stream, detail: str) -> None:
        stream.unread -= 1
        self._server_sees_end(stream, detail)

    def _worker_sees_end(self, stream: Stream, detail: str) -> None:
        if stream.worker_open and stream.worker.alive:
            stream.worker_open = False
            stream.worker.post(e.StreamLost(stream.number, detail))

    # ------------------------------------------------------------ messages

    def send_up(self, worker: Worker, message: m.Outgoing) -> None:
        stream = worker.stream
        if stream is None or not stream.worker_open:
            return
        data = encode(message)
        times = 2 if self.world.rng.random() < self.world.scenario.repeat else 1
        for _ in range(times):
            self._after_up(stream, self._deliver_up, stream, data)

    def _after_up(self, stream: Stream, action: Callable[..., None], *arguments: object) -> None:
        stream.up_at = max(self.world.loop.now + self.delay(), stream.up_at)
        self.world.loop.at(stream.up_at, action, *arguments)

    def _deliver_up(self, stream: Stream, data: bytes) -> None:
        worker = stream.worker
        if worker.is_cut():
            self.world.loop.at(worker.cut_until, self._deliver_up, stream, data)
            return
        if not stream.server_open or not self.world.scheduler.up:
            return
        if self.world.loop.now < self.world.scheduler.paused_until:
            self.world.loop.at(self.world.scheduler.paused_until, self._deliver_up, stream, data)
            return
        if self.world.loop.now < self.world.scheduler.deaf_until:
            stream.unread += 1
            self.world.loop.at(self.world.scheduler.deaf_until, self._read_up, stream, data)
            return
        decoded = decode_worker_message(data, stream.session)
        event = decoded.event if isinstance(decoded, JoinRequest) else decoded
        if isinstance(event, se.Joined):
            self.world.judge.identify(stream.session, event.candidate)
        self.world.scheduler.feed(event)

    def _read_up(self, stream: Stream, data: bytes) -> None:
        stream.unread -= 1
        self._deliver_up(stream, data)

    def send_down(self, stream: Stream, message: sm.Message) -> None:
        data = self.encoder.encode(message)
        final = isinstance(message, sm.Refused | sm.Ended)
        times = 2 if not final and self.world.rng.random() < self.world.scenario.repeat else 1
        for _ in range(times):
            stream.down_at = max(self.world.loop.now + self.delay(), stream.down_at)
            self.world.loop.at(stream.down_at, self._deliver_down, stream, data)
        if self.world.trace is not None:
            self.world.note(f"scheduler -> {stream.worker} {show_message(message)}")
        if final:
            self.world.scheduler.streams.pop(stream.session, None)
            self.closed_by_scheduler(stream, "it closed the stream")

    def _deliver_down(self, stream: Stream, data: bytes) -> None:
        worker = stream.worker
        if worker.is_cut():
            self.world.loop.at(worker.cut_until, self._deliver_down, stream, data)
        elif stream.worker_open and worker.alive:
            worker.post(e.Received(stream.number, decode(data)))

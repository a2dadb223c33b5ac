"""Streams between workers and the scheduler: in order, delayed, broken, cut; bytes on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.scheduler.access import Caller
from muster.scheduler.core import events as scheduler_events
from muster.scheduler.errors import SchedulerError
from muster.scheduler.serve.sessions import event_of
from muster.wire import codec, messages
from muster.worker.session import events as worker_events
from tests.scheduler.core.transcript import show_message, words

if TYPE_CHECKING:
    from tests.simulation.scheduler import Scheduler
    from tests.simulation.worker import Worker
    from tests.simulation.world import World


CONNECT_TIMEOUT_S = 2.0
HUNG_S = 1.5
"""After so long without a sign of life of its uplink a worker connects directly."""


class Stream:
    """One stream. Each side learns of its end by itself. The scheduler's driver knows it as its session."""

    def __init__(
        self, network: Network, session: int, worker: Worker, number: int, scheduler: Scheduler
    ) -> None:
        self.network = network
        self.scheduler = scheduler
        self.session = self.id = session
        self.caller = Caller(f"10.0.0.1:{session}")
        self.generation = 0
        self.rank = -1
        self.takes_deltas = True
        self.held = 0
        self.last: messages.Assignment | None = None
        self.worker = worker
        self.number = number
        self.server_open = True
        self.worker_open = True
        self.up_at = 0.0
        self.down_at = 0.0
        self.held_up: list[bytes] = []
        self.held_down: list[messages.SchedulerMessage] = []
        self.end_unread = False
        self.stuck_until = 0.0
        self.may_return = False

    @property
    def unread(self) -> int:
        """How much of it has arrived at the scheduler's machine and was not read."""
        deaf = self.network.world.loop.now < self.scheduler.deaf_until
        return self.end_unread + (len(self.held_up) if deaf and not self.worker.is_cut() else 0)

    def send(self, *parts: bytes, of_generation: bool = False, assigns: int = 0) -> None:
        """The driver sends a message, in pieces."""
        if self.server_open and self.scheduler.sending():
            self.held = assigns or self.held
            self.network.send_down(self, b"".join(parts))

    def close(self, error: SchedulerError | None = None) -> None:
        """The driver has nothing more to say."""
        if self.server_open and self.scheduler.up:
            self.scheduler.streams.pop(self.session, None)
            self.network.closed_by_scheduler(self, "it closed the stream")


class Network:
    """All streams of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sessions = 0

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
            self.world.loop.after(
                CONNECT_TIMEOUT_S, worker.post, worker_events.StreamLost(number, "no answer")
            )
            return
        if worker.is_cut() or not self.world.scheduler.up:
            pause = 1.0 if worker.is_cut() else self.delay()
            self.world.loop.after(pause, worker.post, worker_events.StreamLost(number, "no answer"))
            return
        self.sessions += 1
        stream = Stream(self, self.sessions, worker, number, self.world.scheduler)
        self.world.scheduler.streams[stream.session] = stream
        worker.stream = stream
        worker.post(worker_events.StreamOpened(number))

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

    def uplink_dies(self, stream: Stream) -> None:
        """The worker's uplink is killed, which says nothing of the worker."""
        stream.may_return = True
        self.break_up(stream, "its host's stream ended")

    def uplink_stands_still(self, stream: Stream, until: float) -> None:
        """The worker soon goes on by another stream; what it has sent on this comes late, as its end does."""
        loop = self.world.loop
        stream.stuck_until, stream.may_return = until, True
        if until < loop.now + HUNG_S:
            return
        loop.at(loop.now + HUNG_S, self._worker_sees_end, stream, "no sign of life")
        stream.up_at = max(stream.up_at, until)
        self._after_up(stream, self._server_sees_end, stream, "its host's stream ended")

    def closed_by_scheduler(self, stream: Stream, detail: str) -> None:
        """The scheduler closes a stream (after a final message), or is gone."""
        stream.server_open = False
        when = max(self.world.loop.now + self.delay(), stream.down_at)
        self.world.loop.at(when, self._worker_sees_end, stream, detail)

    def _server_sees_end(self, stream: Stream, detail: str) -> None:
        if self.world.loop.now < stream.scheduler.paused_until:
            self.world.loop.at(stream.scheduler.paused_until, self._server_sees_end, stream, detail)
            return
        if self.world.loop.now < stream.scheduler.deaf_until:
            stream.end_unread = True
            self.world.loop.at(stream.scheduler.deaf_until, self._server_reads_end, stream, detail)
            return
        if stream.worker.is_cut():
            return  # silence tells
        if stream.server_open:
            stream.server_open = False
            stream.scheduler.lost(stream, detail, may_return=stream.may_return)

    def _server_reads_end(self, stream: Stream, detail: str) -> None:
        stream.end_unread = False
        self._server_sees_end(stream, detail)

    def _worker_sees_end(self, stream: Stream, detail: str) -> None:
        if stream.worker_open and stream.worker.alive:
            stream.worker_open = False
            stream.worker.post(worker_events.StreamLost(stream.number, detail))

    # ------------------------------------------------------------ messages

    def send_up(self, worker: Worker, message: messages.WorkerMessage) -> None:
        stream = worker.stream
        if stream is None or not stream.worker_open:
            return
        data = codec.encode(message)
        times = 2 if self.world.rng.random() < self.world.scenario.repeat else 1
        for _ in range(times):
            self._after_up(stream, self._deliver_up, stream, data)

    def _after_up(self, stream: Stream, action: Callable[..., None], *arguments: object) -> None:
        stream.up_at = max(self.world.loop.now + self.delay(), stream.up_at)
        self.world.loop.at(stream.up_at, action, *arguments)

    def _deliver_up(self, stream: Stream, data: bytes) -> None:
        stream.held_up.append(data)
        if len(stream.held_up) == 1:
            self._release_up(stream)

    def _release_up(self, stream: Stream) -> None:
        """Delivers what was held, in order, until something holds it again."""
        while stream.held_up:
            until = self._holds_up_until(stream)
            if self.world.loop.now < until:
                self.world.loop.at(until, self._release_up, stream)
                return
            event = event_of(stream.session, codec.decode_worker_message(stream.held_up.pop(0)))
            if not stream.server_open or not stream.scheduler.up:
                continue
            if isinstance(event, scheduler_events.Joined):
                self.world.judge.identify(stream.session, event.candidate)
            stream.scheduler.feed(event)

    def _holds_up_until(self, stream: Stream) -> float:
        if stream.worker.is_cut():
            return stream.worker.cut_until
        if not stream.server_open or not stream.scheduler.up:
            return 0.0
        return max(stream.scheduler.paused_until, stream.scheduler.deaf_until, stream.stuck_until)

    def send_down(self, stream: Stream, data: bytes) -> None:
        message = codec.decode_scheduler_message(data, stream.last)
        stream.last = message if isinstance(message, messages.Assignment) else stream.last
        self.world.judge.sending(stream.session, message)
        final = isinstance(message, messages.Refused | messages.Ended)
        times = 2 if not final and self.world.rng.random() < self.world.scenario.repeat else 1
        for _ in range(times):
            stream.down_at = max(self.world.loop.now + self.delay(), stream.down_at)
            self.world.loop.at(stream.down_at, self._deliver_down, stream, message)
        if self.world.trace is not None:
            self.world.note(f"scheduler -> {stream.worker} {show_message(message)} {words(message)}")

    def _deliver_down(self, stream: Stream, message: messages.SchedulerMessage) -> None:
        stream.held_down.append(message)
        if len(stream.held_down) == 1:
            self._release_down(stream)

    def _release_down(self, stream: Stream) -> None:
        worker = stream.worker
        while stream.held_down:
            if worker.is_cut():
                self.world.loop.at(worker.cut_until, self._release_down, stream)
                return
            if self.world.loop.now < stream.stuck_until:
                self.world.loop.at(stream.stuck_until, self._release_down, stream)
                return
            message = stream.held_down.pop(0)
            if stream.worker_open and worker.alive:
                worker.post(worker_events.Received(stream.number, message))

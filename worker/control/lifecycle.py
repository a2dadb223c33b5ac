"""What the membership machine knows, its deadlines and its endings: the part below the handlers."""

from __future__ import annotations

from collections.abc import Callable

from muster.worker.control import events as e
from muster.worker.control import messages as m
from muster.worker.control.reconnect import Link


class Lifecycle:
    """State of one worker process's claim on a place, what time does to it, and how it ends.

    Args:
        profile: who this worker is.
        timing: deadlines.
        jitter: random numbers from [0, 1).
        address: the scheduler's host and port, for what is told of it.
    """

    def __init__(
        self, profile: m.Profile, timing: e.Timing, jitter: Callable[[], float], address: str = ""
    ) -> None:
        self.profile = profile
        self._scheduler = f"the scheduler at {address}" if address else "the scheduler"
        self._timing = timing
        self._link = Link(timing, jitter)
        self._step = 0
        self._started = 0
        self._samples_per_s = 0.0
        self._now = 0.0
        self._reset()

    def _reset(self) -> None:
        self._messages: list[m.Outgoing] = []
        self._notices: list[e.Notice] = []
        self._reason = ""
        self._ended = False
        self._welcome: m.Welcome | None = None
        self._renewed = False  # and not welcomed since
        self._heartbeat_at: float | None = None
        self._waiting_sentence = ""
        self._seen = 0  # highest generation heard of
        self._over = 0  # generations up to this one are over
        self._current: m.Assignment | None = None  # the generation that the training thread is in
        self._next: m.Assignment | None = None  # a newer one that it has not entered yet
        self._ids: m.UniqueIds | None = None
        self._minted: e.UniqueIdsMinted | None = None
        self._wants_entry = False
        self._built = False
        self._running = False
        self._suspended = False
        self._held = 0  # generation in which no further step may begin
        self._uses_steps = False
        self._stepped_in = 0  # the last generation in which a step was begun
        self._leave_reason: str | None = None
        self._goodbye: e.Goodbye | None = None
        self._leave_at: float | None = None
        self._suspicion_since: float | None = None
        self._suspicion: m.SuspectPeer | None = None
        self._late_told_at: float | None = None
        self._timed_out_step = -1  # in which collectives timed out before
        self._stuck = False  # cut off from the scheduler, and from some peer too
        self._need_since: float | None = None

    def deadline(self) -> float | None:
        """When to feed the next Tick; None: no timer is needed."""
        if self._ended:
            return None
        times = (
            self._link.retry_at,
            self._link.report_at,
            self._heartbeat_at if self._link.settled else None,
            self._give_up_at(),
            self._verdict_at(),
            self._leave_at,
        )
        return min((t for t in times if t is not None), default=None)

    @property
    def phase(self) -> str:
        """The state in one word, for logs and tests."""
        if self._ended:
            return "ended"
        if self._goodbye is not None:
            return "leaving"
        if self._seen and not self._link.settled:
            return "reconnecting"
        if self._suspended:
            return "suspended"
        if self._next is not None:
            return "changing" if self._current is not None else "assigned"
        if self._current is not None:
            return "running" if self._running else "building"
        return "waiting" if self._welcome is not None else "joining"

    @property
    def generation(self) -> int:
        """The generation that the training thread is in; 0 before the first."""
        return self._current.generation if self._current is not None else 0

    @property
    def is_over(self) -> bool:
        """Whether the generation that the training thread is in has ended."""
        return self._current is not None and self._current.generation <= self._over

    @property
    def is_away(self) -> bool:
        """Whether there is no scheduler at the moment."""
        return not self._link.settled

    def is_changing(self, generation: int) -> bool:
        """Whether ``generation`` is over or a newer one is known."""
        return self._ended or generation <= self._over or generation < self._seen

    def _send(self, message: m.Outgoing) -> None:
        """Sends if the stream stands; what matters is told again after a reconnect."""
        if self._link.open:
            self._messages.append(message)

    # ------------------------------------------------------------ time

    def _on_tick(self, _: e.Tick) -> None:
        if self._ended:
            return
        now, link = self._now, self._link
        if self._is_due(self._leave_at):
            self._finish_leaving(heard=False)
        elif self._is_due(self._give_up_at()):
            self._give_up()
        else:
            if self._is_due(link.report_at):
                link.reported(now)
                self._notices.append(e.Tell(self._absence()))
            if self._is_due(link.retry_at):
                self._notices.append(e.Connect(link.start(now)))
            if self._is_due(self._verdict_at()):
                self._suspicion_since = None
                self._notices.append(e.NoVerdict(self.generation))
            if link.settled and self._is_due(self._heartbeat_at):
                self._send_heartbeat()

    def _is_due(self, at: float | None) -> bool:
        return at is not None and at <= self._now

    def _send_heartbeat(self) -> None:
        assert self._welcome is not None
        self._heartbeat_at = self._now + self._welcome.heartbeat_interval_s
        self._send(
            m.Heartbeat(
                self._seen,
                self._step,
                self._started,
                self._samples_per_s,
                entered_generation=self.generation,
            )
        )

    def _is_calm(self) -> bool:
        """Nothing is wanted from the scheduler: training may go on without it."""
        return (
            self._running
            and self._next is None
            and not self.is_over
            and self._held != self.generation
            and self._suspicion_since is None
            and not self._stuck
            and self._goodbye is None
        )

    def _give_up_at(self) -> float | None:
        away = self._link.away_since
        if self._link.settled or away is None:
            return None
        if self._seen == 0:
            looks_s = self._timing.topo_timeout_s
            if self._renewed:  # the scheduler was there: it need not be waited for as one that is to start
                looks_s = min(looks_s, self._timing.reconnect_timeout_s)
            return away + looks_s
        if self._need_since is None:
            return None
        return max(away, self._need_since) + self._timing.reconnect_timeout_s

    def _verdict_at(self) -> float | None:
        if self._suspicion_since is None or self._welcome is None or not self._link.settled:
            return None
        return self._suspicion_since + self._welcome.node_timeout_s + self._timing.verdict_margin_s

    def _absence(self) -> str:
        since = self._now - (self._link.away_since or self._now)
        detail = f" ({self._link.detail})" if self._link.detail else ""
        give_up_at = self._give_up_at()
        until = "training goes on" if give_up_at is None else f"for {give_up_at - self._now:.0f} s more"
        return f"{self._scheduler} has not answered for {since:.0f} s{detail}; trying again, {until}."

    def _give_up(self) -> None:
        since = self._now - (self._link.away_since or self._now)
        detail = f": {self._link.detail}" if self._link.detail else ""
        if self._stuck or self._suspicion_since is not None:
            sentence = (
                f"this worker seems to be cut off: its collectives stand still or fail, and the scheduler, "
                f"which would know why, has been away for {since:.0f} s{detail}"
            )
        elif self._seen:
            sentence = (
                f"a change of members needs the scheduler, which has been away for {since:.0f} s{detail}"
            )
        else:
            sentence = f"{self._scheduler} could not be reached within {since:.0f} s{detail}"
        self._fail(e.FailureKind.UNREACHABLE, sentence)

    # ------------------------------------------------------------ endings

    def _newest(self) -> m.Assignment | None:
        return self._next if self._next is not None else self._current

    def _interrupt(
        self, reason: str, lost: tuple[str, ...], *, planned: bool = False, save: bool = False
    ) -> None:
        """Declares the training thread's generation over, once."""
        current = self._current
        if current is None or current.generation <= self._over:
            return
        self._over = current.generation
        self._suspicion_since = None
        self._notices.append(e.Interrupt(current.generation, reason, lost, planned=planned, save=save))

    def _fail(
        self,
        kind: e.FailureKind,
        sentence: str,
        code: m.RefusalCode = m.RefusalCode.UNSPECIFIED,
        *,
        ok: bool = False,
    ) -> None:
        if self._goodbye is not None:  # whoever waits for its answer has no use for a failure
            self._finish_leaving(heard=False)
            return
        self._end()
        self._reason = sentence
        self._notices.append(e.Failed(kind, sentence, code, ok))

    def _finish_leaving(self, *, heard: bool) -> None:
        self._end()
        self._notices.append(e.Left(heard))

    def _end(self) -> None:
        self._ended = True
        self._leave_at = None
        self._minted = self._ids = None
        self._notices.append(e.Disconnect(self._link.stream))
        self._link.close()

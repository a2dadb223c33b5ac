"""The worker's state machine: its membership from the first Join to the last Leave, including reconnects.

It has no clock, no thread and no socket. Its driver, the :class:`~muster.worker.session.client.Client`,
follows these rules:

* ``step(event, now)`` is called by one thread at a time, with a clock that never goes back. Events of one
  stream come in the order in which they happened.
* The notices of a decision are carried out in order. Then its messages are sent in order on the newest
  stream, all before the next step. Work that may block may be done later, on any thread.
* ``Connect`` is answered by one ``StreamOpened``, each message by ``Received``, and the end of the attempt
  or the stream by one ``StreamLost`` or ``StreamDenied``. Events of older streams change nothing.
* ``MintUniqueIds`` is answered by ``UniqueIdsMinted``, ``Build`` by ``CommunicatorBuilt`` or
  ``CommunicatorFailed``, ``ProbeWanted`` by ``ProbesDone``, ``TakeStacks`` by ``StacksTaken``. ``Over``
  aborts the generation's communicators unless it was planned; the training thread then comes back with
  ``EntryRequested`` or ``Goodbye``.
* After each step, ``deadline()`` returns when ``DeadlineReached`` is due, if nothing happens before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.version import __version__
from muster.wire import messages
from muster.worker.session import events
from muster.worker.session.copies import Copies
from muster.worker.session.incarnation import Incarnation
from muster.worker.session.link import Link


class MembershipMachine:
    """The state machine of one worker process's membership, from its first Join to its Leave.

    Args:
        profile: this worker's identity and description.
        timing: deadlines.
        jitter: returns random numbers from [0, 1).
        address: the scheduler's host and port, for log lines and errors.
    """

    def __init__(
        self, profile: messages.Profile, timing: events.Timing, jitter: Callable[[], float], address: str = ""
    ) -> None:
        self.profile = profile
        self._scheduler = f"the scheduler at {address}" if address else "the scheduler"
        self._timing = timing
        self._link = Link(timing, jitter)
        self._step = 0
        self._started = 0
        self._samples_per_s = 0.0
        self._loss: float | None = None
        self._learning_rate: float | None = None
        self._steps = 0
        self._copies = Copies()
        self._now = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.Started: self._on_started,
            events.StreamOpened: self._on_stream_opened,
            events.StreamLost: self._on_stream_lost,
            events.StreamDenied: self._on_stream_denied,
            events.Received: self._on_received,
            events.UniqueIdsMinted: self._on_minted,
            events.EntryRequested: self._on_entry_requested,
            events.CommunicatorBuilt: self._on_built,
            events.CommunicatorFailed: self._on_failed,
            events.CollectivesStuck: self._on_stuck,
            events.PeersLate: self._on_peers_late,
            events.ProbesDone: self._on_probes_done,
            events.StacksTaken: self._on_stacks_taken,
            events.StepStarting: self._on_step_starting,
            events.ProgressReported: self._on_progress,
            events.SnapshotChanged: self._on_snapshot_changed,
            events.CheckpointWritten: self._on_checkpoint_written,
            events.LeaveWanted: self._on_leave_requested,
            events.Goodbye: self._on_goodbye,
            events.Renewed: self._on_renewed,
            events.GpuFailed: self._on_gpu_failed,
            events.DeadlineReached: self._on_tick,
            messages.Welcome: self._on_welcome,
            messages.Waiting: self._on_waiting,
            messages.Assignment: self._on_assignment,
            messages.UniqueIds: self._on_unique_ids,
            messages.GroupBuilt: self._on_group_built,
            messages.Suspended: self._on_suspended,
            messages.Quiesce: self._on_quiesce,
            messages.Probe: self._on_probe,
            messages.StacksWanted: self._on_stacks_wanted,
            messages.SnapshotWord: self._on_snapshot_word,
            messages.Refused: self._on_refused,
            messages.Ended: self._on_ended,
        }
        self._state = Incarnation()
        self._messages: list[messages.WorkerMessage] = []
        self._notices: list[events.Notice] = []
        self._reason = ""
        self._probe_asked = (0, 0)  # The stream and the round of the last request.

    def deadline(self) -> float | None:
        """Returns the time of the next DeadlineReached; None if no timer is needed."""
        state = self._state
        if state.ended:
            return None
        times = (
            self._link.retry_at,
            self._link.report_at,
            state.heartbeat_at if self._link.settled else None,
            self._give_up_at(),
            self._verdict_at(),
            state.leave_at,
        )
        return min((t for t in times if t is not None), default=None)

    @property
    def phase(self) -> str:
        """The state as one word, for logs and tests."""
        state = self._state
        if state.ended:
            return "ended"
        if state.goodbye is not None:
            return "leaving"
        if state.seen and not self._link.settled:
            return "reconnecting"
        if state.suspended:
            return "suspended"
        if state.next is not None:
            return "changing" if state.current is not None else "assigned"
        if state.current is not None:
            return "running" if state.running else "building"
        return "waiting" if state.welcome is not None else "joining"

    @property
    def generation(self) -> int:
        """The generation that the training thread is in; 0 before the first."""
        return self._state.generation

    @property
    def times_put_off(self) -> int:
        """How often in this incarnation the scheduler has reported that it cannot decide anything."""
        return self._state.times_put_off

    @property
    def is_away(self) -> bool:
        """Whether there is no scheduler at present."""
        return not self._link.settled

    def is_over(self, generation: int) -> bool:
        """Whether ``generation`` has ended, or a newer one is known."""
        return self._state.is_over(generation)

    def _send(self, message: messages.WorkerMessage) -> None:
        """Sends a message if there is a stream; important messages are repeated after a reconnect."""
        if self._link.open:
            self._messages.append(message)

    # ------------------------------------------------------------ time

    def _on_tick(self, _: events.DeadlineReached) -> None:
        state = self._state
        if state.ended:
            return
        now, link = self._now, self._link
        if self._is_due(state.leave_at):
            self._finish_leaving(heard=False)
        elif self._is_due(self._give_up_at()):
            self._give_up()
        else:
            if self._is_due(link.report_at):
                link.reported(now)
                state.absent = True
                self._notices.append(events.LogLine(self._absence()))
            if self._is_due(link.retry_at):
                self._notices.append(events.Connect(link.start(now)))
            if self._is_due(self._verdict_at()):
                self._end_suspicion()
            if link.settled and self._is_due(state.heartbeat_at):
                self._send_heartbeat()

    def _end_suspicion(self, finished_rank: int = -1, sentence: str = "") -> None:
        self._state.suspicion_since = None
        self._notices.append(events.NoVerdict(self.generation, finished_rank, sentence))

    def _is_due(self, at: float | None) -> bool:
        return at is not None and at <= self._now

    def _interval_s(self, welcome: messages.Welcome) -> float:
        """Returns the interval of heartbeats, in seconds; it is longer before this worker has a place."""
        waits = self._state.seen == 0 and welcome.waiting_interval_s
        return welcome.waiting_interval_s if waits else welcome.heartbeat_interval_s

    def _send_heartbeat(self) -> None:
        state = self._state
        assert state.welcome is not None
        state.heartbeat_at = self._now + self._interval_s(state.welcome)
        self._send(
            messages.Heartbeat(
                state.seen,
                self._step,
                self._started,
                self._samples_per_s,
                entered_generation=state.generation,
                loss=self._loss,
                learning_rate=self._learning_rate,
                steps=self._steps,
                snapshot=self._copies.snapshot(self._now),
                checkpoint=self._copies.checkpoint(self._now),
            )
        )

    def _give_up_at(self) -> float | None:
        state = self._state
        away = self._link.away_since
        if self._link.settled or away is None:
            return None
        if state.seen == 0:
            looks_s = self._timing.topo_timeout_s
            # The scheduler was there, so this is not the wait for a scheduler that is still starting.
            if state.renewed and not self._timing.waits_without_limit:
                looks_s = min(looks_s, self._timing.reconnect_timeout_s)
            return away + looks_s
        if state.need_since is None or self._timing.waits_without_limit:
            return None
        return max(away, state.need_since) + self._timing.reconnect_timeout_s

    def _verdict_at(self) -> float | None:
        state = self._state
        if state.suspicion_since is None or state.welcome is None or not self._link.settled:
            return None
        patience_s = state.welcome.node_timeout_s + self._timing.verdict_margin_s
        # A worker that suspects a peer is always answered with a generation, even by a scheduler that is far
        # behind.
        if state.suspicion is not None:
            patience_s = max(patience_s, self._timing.reconnect_timeout_s)
        return state.suspicion_since + patience_s

    def _absence(self) -> str:
        since = self._now - (self._link.away_since or self._now)
        detail = f" ({self._link.detail})" if self._link.detail else ""
        give_up_at = self._give_up_at()
        if give_up_at is not None:
            until = f"for {give_up_at - self._now:.0f} s more"
        elif self._state.need_since is None:
            until = "training goes on"
        else:
            until = "without limit, as MS_RECONNECT_TIMEOUT is not set; training waits"
        return f"{self._scheduler} has not answered for {since:.0f} s{detail}; trying again, {until}."

    def _give_up(self) -> None:
        state = self._state
        since = self._now - (self._link.away_since or self._now)
        detail = f": {self._link.detail}" if self._link.detail else ""
        if state.stuck or state.suspicion_since is not None:
            sentence = (
                f"this worker seems to be cut off: its collectives stand still or fail, and the scheduler, "
                f"which would know why, has been away for {since:.0f} s{detail}"
            )
        elif state.seen:
            sentence = (
                f"a change of members needs the scheduler, which has been away for {since:.0f} s{detail}"
            )
        else:
            sentence = f"{self._scheduler} could not be reached within {since:.0f} s{detail}"
        self._fail(events.FailureKind.UNREACHABLE, sentence)

    # ------------------------------------------------------------ endings

    def _end_generation(
        self, reason: str, lost: tuple[str, ...], *, planned: bool = False, save: bool = False
    ) -> None:
        """Ends the training thread's generation, unless that has been done already."""
        state = self._state
        current = state.standing
        if current is None:
            return
        state.over = current.generation
        state.suspicion_since = None
        self._notices.append(events.Over(current.generation, reason, lost, planned=planned, save=save))

    def _fail(
        self,
        kind: events.FailureKind,
        sentence: str,
        code: messages.RefusalCode = messages.RefusalCode.UNSPECIFIED,
        *,
        ok: bool = False,
    ) -> None:
        # A worker that waits for the answer to its Leave has no use for a failure.
        if self._state.goodbye is not None:
            self._finish_leaving(heard=False)
            return
        self._end()
        self._reason = sentence
        self._notices.append(events.Failed(kind, sentence, code, ok))

    def _finish_leaving(self, *, heard: bool) -> None:
        self._end()
        self._notices.append(events.Left(heard))

    def _end(self) -> None:
        self._state.end()
        self._notices.append(events.Disconnect(self._link.stream))
        self._link.close()

    # ------------------------------------------------------------ interface

    def step(self, event: events.Event, now: float) -> events.Effects:
        """Handles one event at time ``now``; never raises because of what a scheduler or network does."""
        self._now = now
        self._messages, self._notices, self._reason = [], [], ""
        self._handlers[type(event)](event)
        state = self._state
        if state.is_calm:
            state.need_since = None
        elif state.need_since is None:
            state.need_since = now
        return events.Effects(tuple(self._messages), tuple(self._notices), self._reason)

    # ------------------------------------------------------------ the stream

    def _on_started(self, _: events.Started) -> None:
        self._notices.append(events.Connect(self._link.start(self._now)))

    def _on_stream_opened(self, event: events.StreamOpened) -> None:
        state = self._state
        if state.ended or not self._link.opened(event.stream):
            self._notices.append(events.Disconnect(event.stream))
            return
        newest = state.newest
        held = newest is not None and newest.generation > state.over
        self._messages.append(
            messages.Join(
                self.profile,
                held_generation=state.seen,
                held_rank=newest.rank if held and newest is not None else -1,
                built=held and newest is state.current and state.built,
                step=self._step,
                held_world_size=len(newest.members) if held and newest is not None else 0,
                takes_deltas=True,
                gives_stacks=True,
            )
        )
        if state.goodbye is not None:
            self._send_leave()

    def _on_stream_lost(self, event: events.StreamLost) -> None:
        state = self._state
        if state.ended or not self._link.lost(event.stream, event.detail, self._now):
            return
        self._reason = f"lost the scheduler: {event.detail}"
        if state.goodbye is not None and not state.goodbye.finished:
            self._finish_leaving(heard=False)

    def _on_stream_denied(self, event: events.StreamDenied) -> None:
        state = self._state
        if state.ended or event.stream != self._link.stream:
            return
        if state.goodbye is not None:
            self._finish_leaving(heard=False)
        elif event.by_scheduler or state.seen == 0:
            self._fail(events.FailureKind.SECURITY, event.sentence)
        else:  # A member keeps its place, for example while the scheduler's certificate is being replaced.
            self._on_stream_lost(events.StreamLost(event.stream, event.sentence))

    def _on_received(self, event: events.Received) -> None:
        if not self._state.ended and event.stream == self._link.stream and self._link.open:
            self._handlers[type(event.message)](event.message)

    # ------------------------------------------------------------ messages

    def _on_welcome(self, message: messages.Welcome) -> None:
        state = self._state
        why = messages.version_obstacle(scheduler=message.version, worker=__version__)
        if why:
            self._fail(events.FailureKind.REFUSED, why, messages.RefusalCode.SETTINGS_DIFFER)
            return
        # A scheduler of version 0.2 does not know GPU checks, and would give this worker a place.
        if self.profile.gpu_fault:
            self._fail(events.FailureKind.REFUSED, self._gpu_failure(), messages.RefusalCode.GPU_FAILED)
            return
        state.welcome = message
        state.renewed = False
        if state.absent:
            state.absent = False
            self._notices.append(events.LogLine(f"{self._scheduler} answers again.", waits=False))
        self._link.welcomed()
        state.stuck = False
        if message.spare and not state.seen:
            self._notices.append(
                events.LogLine("this worker waits as a spare: it takes a place that comes free.")
            )
        state.heartbeat_at = self._now + self._interval_s(message)
        if state.suspicion_since is not None:  # A restarted scheduler does not know of it.
            state.suspicion_since = self._now
            if state.suspicion is not None:
                self._send(state.suspicion)
        if state.leave_reason is not None and state.seen:
            self._send(messages.RequestLeave(state.seen, state.leave_reason))

    def _on_waiting(self, message: messages.Waiting) -> None:
        state = self._state
        if message.sentence != state.waiting_sentence:
            state.waiting_sentence = message.sentence
            over = state.running and message.present >= message.needed
            self._notices.append(events.LogLine(message.sentence, waits=not over))
        if message.undecided:  # The message's other fields have no meaning yet.
            state.times_put_off += 1
            self._link.put_off(self._now)
            if state.suspicion_since is not None:
                state.suspicion_since = self._now
        if message.finished_ranks and state.suspicion_since is not None and state.suspicion is None:
            self._end_suspicion(message.finished_ranks[0], message.sentence)

    def _on_assignment(self, new: messages.Assignment) -> None:
        state = self._state
        if new.generation <= state.over or new.generation < state.seen or not self._is_mine(new):
            self._reason = f"dropped an assignment of generation {new.generation}"
            return
        if new.generation > state.seen:
            self._take_up(new)
        elif state.held == new.generation:  # Sent again: the planned change is postponed or cancelled.
            state.held = 0
            self._notices += [events.ChangePutOff(), events.GateChanged()]
        if new.rank == 0 and (state.next is not None or not state.running):
            self._mint_or_publish(new)

    def _note_loss(self, loss: messages.FirstLoss | None) -> None:
        if loss is not None:
            self._notices.append(events.LossKnown(loss))

    def _is_mine(self, assignment: messages.Assignment) -> bool:
        if assignment.rank < 0:  # The worker leaves as asked.
            return True
        me = assignment.members[assignment.rank]
        return me.node_id == self.profile.node_id and me.incarnation == self.profile.incarnation

    def _take_up(self, new: messages.Assignment) -> None:
        state = self._state
        first = state.seen == 0
        state.take_up(new)
        if state.heartbeat_at is not None and state.welcome is not None and first:
            # The heartbeats of all members are spread over the interval.
            share = (new.rank + 1) / len(new.members)
            state.heartbeat_at = min(state.heartbeat_at, self._now + share * self._interval_s(state.welcome))
        self._note_loss(new.first_loss)
        # The leave was requested before there was a place to leave.
        if first and state.leave_reason is not None:
            self._send(messages.RequestLeave(new.generation, state.leave_reason))
        self._reason = f"generation {new.generation}, rank {new.rank} of {len(new.members)}: {new.reason}"
        current = state.standing
        if current is None:
            self._dismiss_if_leaving(new)
            return
        if state.built and state.is_by_steps(new, self._step) and not state.suspicion_since:
            self._become_running(current)
            self._notices.append(events.ChangePending(new.generation, new.reason, new.switch_after_step))
            self._notices.append(events.GateChanged())
        else:
            self._dismiss_if_leaving(new)
            self._end_generation(new.reason, new.lost)

    def _dismiss_if_leaving(self, new: messages.Assignment) -> None:
        if new.rank < 0:
            self._notices.append(events.Dismissed(new.reason, alone=new.state_source_rank < 0))

    def _mint_or_publish(self, assignment: messages.Assignment) -> None:
        minted = self._state.minted
        if minted is not None:
            self._send(messages.PublishUniqueIds(minted.generation, minted.unique_ids))
        elif self._state.next is not None:
            self._notices.append(events.MintUniqueIds(assignment.generation, assignment.unique_id_count))

    def _on_unique_ids(self, message: messages.UniqueIds) -> None:
        state = self._state
        new = state.next
        if new is None or message.generation != new.generation or state.ids is not None:
            return
        if len(message.unique_ids) != new.unique_id_count:
            self._reason = f"dropped {len(message.unique_ids)} unique ids, expected {new.unique_id_count}"
            return
        state.ids = message
        self._try_entry()

    def _on_group_built(self, message: messages.GroupBuilt) -> None:
        current = self._state.current
        if current is not None and current.generation == message.generation and self._state.built:
            self._become_running(current)

    def _become_running(self, current: messages.Assignment) -> None:
        state = self._state
        if not state.running and current.generation > state.over:
            state.running = True
            self._notices.append(events.Running(current.generation))

    def _on_suspended(self, message: messages.Suspended) -> None:
        state = self._state
        if message.generation < state.seen or (message.generation == state.over and state.suspended):
            return
        self._note_loss(message.first_loss)
        self._end_generation(message.reason, (message.reason,), save=message.save)
        state.suspend(message.generation)
        reason = message.reason.rstrip(".")
        self._notices.append(events.LogLine(f"{reason}. Waiting up to {message.wait_s:.0f} s for workers."))

    def _on_quiesce(self, message: messages.Quiesce) -> None:
        state = self._state
        if message.generation != state.seen or message.generation <= state.over:
            return
        state.held = message.generation
        self._notices.append(events.ChangePending(message.generation, message.reason, -1))
        self._send(messages.Quiesced(message.generation, self._started))

    def _on_probe(self, message: messages.Probe) -> None:
        asked = (self._link.stream, message.round)
        if asked == self._probe_asked:  # Repeated: a second answer would only delay the next one.
            return
        self._probe_asked = asked
        self._notices.append(events.ProbeWanted(message.round, message.targets))

    def _on_stacks_wanted(self, message: messages.StacksWanted) -> None:
        self._notices.append(events.TakeStacks(message.request, message.limit_bytes))

    def _on_snapshot_word(self, message: messages.SnapshotWord) -> None:
        self._notices.append(events.SnapshotWordCame(message))

    def _on_refused(self, message: messages.Refused) -> None:
        if self._state.goodbye is not None:
            self._finish_leaving(heard=True)
        elif message.code is messages.RefusalCode.TOPO_TIMEOUT:
            self._fail(events.FailureKind.FORMATION_TIMEOUT, message.sentence, message.code)
        elif message.code is messages.RefusalCode.JOB_ENDED and self._state.seen:
            self._fail(events.FailureKind.JOB_ENDED, message.sentence, message.code)
        elif message.code is messages.RefusalCode.NOT_PERMITTED:  # According to the certificate.
            self._fail(events.FailureKind.SECURITY, message.sentence, message.code)
        else:
            self._fail(events.FailureKind.REFUSED, message.sentence, message.code)

    def _on_ended(self, message: messages.Ended) -> None:
        self._note_loss(message.first_loss)
        if self._state.goodbye is not None:
            self._finish_leaving(heard=True)
        elif message.leave:
            self._fail(events.FailureKind.LEAVE, message.reason)
        elif self._state.seen or message.ok:
            self._fail(events.FailureKind.JOB_ENDED, message.reason, ok=message.ok)
        else:
            self._fail(events.FailureKind.FORMATION_TIMEOUT, message.reason)

    # ------------------------------------------------------------ the training thread

    def _on_minted(self, event: events.UniqueIdsMinted) -> None:
        state = self._state
        new = state.next
        if new is not None and new.generation == event.generation and state.minted is None:
            state.minted = event
            self._send(messages.PublishUniqueIds(event.generation, event.unique_ids))

    def _on_entry_requested(self, _: events.EntryRequested) -> None:
        state = self._state
        state.wants_entry = True
        if state.next is not None:
            state.over = max(state.over, state.generation)
            self._dismiss_if_leaving(state.next)
        self._try_entry()

    def _try_entry(self) -> None:
        state = self._state
        new, ids = state.next, state.ids
        if new is None or ids is None or new.rank < 0 or not state.wants_entry or state.ended:
            return
        state.enter(new)
        self._started = self._step  # A step that was aborted does not begin in the new generation.
        self._notices.append(events.Build(new, ids.unique_ids))

    def _on_built(self, event: events.CommunicatorBuilt) -> None:
        current = self._state.standing
        if current is None or current.generation != event.generation:
            return
        self._state.built = True
        self._send(messages.Built(event.generation))

    def _on_failed(self, event: events.CommunicatorFailed) -> None:
        state = self._state
        current = state.standing
        if current is None or current.generation != event.generation:
            return
        # It names itself, because it does not know which peer failed.
        suspect = event.rank if event.rank >= 0 else current.rank
        hint = messages.SuspectPeer(event.generation, suspect, event.detail)
        if state.next is not None:  # Peers have switched already or will, and so does this worker.
            self._send(hint)  # Through the scheduler, this reaches members that still hang in the last step.
            self._dismiss_if_leaving(state.next)
            self._end_generation(state.next.reason, state.next.lost)
            return
        if state.suspicion_since is None:
            state.suspicion_since = self._now
        # A peer that did not come in time may still come in the next generation. But a second time-out in the
        # same step counts as an error.
        late = event.timed_out and state.timed_out_step != self._step
        state.timed_out_step = self._step if event.timed_out else state.timed_out_step
        state.suspicion = hint if event.rank >= 0 or late else None
        self._send(state.suspicion or hint.replaced(rank=-1))

    def _on_stuck(self, event: events.CollectivesStuck) -> None:
        self._state.stuck = event.stuck

    def _on_peers_late(self, event: events.PeersLate) -> None:
        state = self._state
        reported_at = state.late_reported_at
        current = state.standing
        if current is None or not self._link.settled:
            return
        if reported_at is None or self._now >= reported_at + self._timing.late_again_s:
            state.late_reported_at = self._now
            self._send_heartbeat()
            self._send(messages.Late(current.generation, event.seconds))

    def _on_probes_done(self, event: events.ProbesDone) -> None:
        if self._link.settled and not self._state.ended:
            self._send_heartbeat()  # First, this worker's own progress.
            reply = messages.Probed(
                event.round, event.unreached, event.late, event.waits, event.busy, event.seconds
            )
            self._send(reply)

    def _on_stacks_taken(self, event: events.StacksTaken) -> None:
        if self._link.settled and not self._state.ended:
            self._send(messages.Stacks(event.request, event.text))

    def _on_step_starting(self, event: events.StepStarting) -> None:
        state = self._state
        state.uses_steps = True
        self._step = event.step
        current, new = state.standing, state.next
        if current is None:
            self._notices.append(events.StepHeld())
        elif new is not None and event.step >= new.switch_after_step:
            self._dismiss_if_leaving(new)
            self._end_generation(new.reason, new.lost, planned=True)
        elif new is None and state.held == current.generation:
            self._notices.append(events.StepHeld())
        else:
            self._started = event.step + 1
            self._notices.append(events.StepGranted())
            self._report_first_step(current)

    def _report_first_step(self, current: messages.Assignment) -> None:
        """Reports immediately that this newcomer holds the state, so that the state's sender may leave."""
        if self._state.stepped_in < current.generation:
            self._state.stepped_in = current.generation
            if current.rank in current.newcomer_ranks and self._link.settled:
                self._send_heartbeat()

    def _on_progress(self, event: events.ProgressReported) -> None:
        self._step = event.step
        self._samples_per_s = event.samples_per_s
        self._loss, self._learning_rate, self._steps = event.loss, event.learning_rate, event.steps

    def _on_snapshot_changed(self, event: events.SnapshotChanged) -> None:
        self._copies.note_snapshot(event.report, self._now)

    def _on_checkpoint_written(self, event: events.CheckpointWritten) -> None:
        self._copies.note_checkpoint(event, self._now)

    def _on_leave_requested(self, event: events.LeaveWanted) -> None:
        state = self._state
        if state.leave_reason is None and not state.ended:
            state.leave_reason = event.reason
            if state.seen:
                self._send(messages.RequestLeave(state.seen, event.reason))

    def _on_goodbye(self, event: events.Goodbye) -> None:
        state = self._state
        if state.goodbye is not None:
            return
        state.goodbye = event
        state.leave_at = self._now + self._timing.goodbye_timeout_s
        if state.ended:
            self._notices.append(events.Left(heard=False))
        elif self._link.open:
            self._send_leave()
        elif state.seen == 0 or not event.finished:
            self._finish_leaving(heard=False)

    def _send_leave(self) -> None:
        said = self._state.goodbye
        assert said is not None
        self._send(
            messages.Leave(
                self._state.seen,
                said.finished,
                said.reason,
                said.consequence,
                said.exit_code,
                said.gpu_fault,
            )
        )

    def _gpu_failure(self) -> str:
        who, fault = self.profile, self.profile.gpu_fault.rstrip(".")
        where = f"node {who.node_id} on host {who.host.name}"
        return f"The GPU of {where} has failed its check: {fault}. Reset or replace it."

    def _on_gpu_failed(self, event: events.GpuFailed) -> None:
        self.profile = self.profile.replaced(gpu_fault=event.fault)

    def _on_renewed(self, event: events.Renewed) -> None:
        self._state = Incarnation(renewed=True)
        self.profile = self.profile.replaced(incarnation=event.incarnation, data_address=event.data_address)
        self._notices.append(events.Connect(self._link.start(self._now)))

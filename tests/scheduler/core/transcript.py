"""Transcripts of a job: commands in, what the machine decides below each, rewritable.

They hold facts; how things are said, ``wording.txt`` shows once for each kind of sentence.

A line ``> TIME COMMAND ...`` is stepped; the lines up to the next blank line are what came of it. Run the
tests with ``REWRITE_TRANSCRIPTS=1`` to write down what the machine says now, then read the diff.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from muster.scheduler.core import events, records
from muster.scheduler.core.events import Decision
from muster.scheduler.core.machine import Machine
from muster.wire import messages
from muster.wire.rank_table import parse_rank_table

Arguments = dict[str, str]


def candidate(node_id: str, options: Arguments, worker_num: int) -> messages.Candidate:
    host = options.get("host", f"host-{node_id}")
    facts = [pair.split(":") for pair in options.get("facts", "").split(",") if pair]
    return messages.Candidate(
        node_id=node_id,
        incarnation=int(options.get("inc", "1")),
        host=messages.Host(options.get("hostid", f"id-{host}"), host, options.get("address", "10.0.0.1"), ""),
        device=messages.Device(index=int(options.get("device", "-1"))),
        worker_num=int(options.get("num", worker_num)),
        worker_min=int(options.get("min", "0")),
        backend=options.get("backend", "tcp"),
        spare="spare" in options,
        facts=tuple((key, value) for key, value in facts),
    )


def words(message: messages.SchedulerMessage) -> str:
    """What a message says in words."""
    if isinstance(message, messages.Waiting | messages.Refused):
        return message.sentence
    return (
        message.reason if isinstance(message, messages.Suspended | messages.Quiesce | messages.Ended) else ""
    )


def show_message(message: messages.SchedulerMessage) -> str:
    """What a message says in facts."""
    if isinstance(message, messages.Welcome):
        return "Welcome as spare" if message.spare else "Welcome"
    if isinstance(message, messages.Waiting):
        return f"Waiting {message.present}/{message.needed}"
    if isinstance(message, messages.Assignment):
        members = " ".join(member.node_id for member in message.members)
        parts = [f"Assignment g{message.generation} rank {message.rank} of [{members}]"]
        if message.state_source_rank >= 0:
            parts.append(f"state from {message.state_source_rank} to {list(message.newcomer_ranks)}")
        if message.switch_after_step >= 0:
            parts.append(f"after step {message.switch_after_step}")
        if message.lost:
            parts.append(f"{len(message.lost)} lost")
        return ", ".join(parts)
    if isinstance(message, messages.UniqueIds):
        return f"UniqueIds g{message.generation} x{len(message.unique_ids)}"
    if isinstance(message, messages.GroupBuilt):
        return f"GroupBuilt g{message.generation}"
    if isinstance(message, messages.Suspended):
        return f"Suspended g{message.generation} for {message.wait_s:g} s"
    if isinstance(message, messages.Quiesce):
        return f"Quiesce g{message.generation}"
    if isinstance(message, messages.Probe):
        return f"Probe {message.round} of {' '.join(node_id for node_id, _ in message.targets)}"
    if isinstance(message, messages.SnapshotWord):
        return f"SnapshotWord g{message.generation}: {message.complete} counts, next from {message.next} on"
    if isinstance(message, messages.StacksWanted):
        return f"StacksWanted {message.request}"
    if isinstance(message, messages.Refused):
        return f"Refused {message.code.name}"
    return f"Ended {'leave' if message.leave else 'well' if message.ok else 'badly'}"


def show_record(record: records.Record) -> str:
    name = type(record).__name__
    if isinstance(record, records.JobOpened):
        return f"{name} {record.worker_num}/{record.worker_min}"
    if isinstance(record, records.Admitted):
        return f"{name} {record.candidate.node_id}#{record.candidate.incarnation}"
    if isinstance(record, records.LeavePlanned):
        return f"{name} {record.node_id}#{record.incarnation}"
    if isinstance(record, records.Removed):
        return f"{name} {record.node_id}#{record.incarnation}{' finished' if record.finished else ''}"
    if isinstance(record, records.GenerationFormed):
        members = " ".join(
            f"{each.candidate.node_id}({each.local_rank}/{each.local_world_size})" for each in record.members
        )
        return f"{name} g{record.generation} [{members}]"
    if isinstance(record, records.GroupEstablished | records.GenerationEnded):
        return f"{name} g{record.generation}"
    return f"{name} {'well' if record.ok else 'badly'}" if isinstance(record, records.JobEnded) else name


class Player:
    """Plays one transcript."""

    def __init__(self) -> None:
        self.settings = events.CoreSettings(2, 0, 0, 30.0, 5.0, 1.0)
        self.job = Machine("job", self.settings)
        self.records: list[records.Record] = []
        self.sent: set[events.SessionId] = set()
        self.over: set[events.SessionId] = set()
        self.said: list[str] = []

    def play(self, lines: list[str]) -> Iterator[str]:
        """The transcript with the machine's answers."""
        for line in lines:
            if line.startswith("> "):
                yield line
                yield from self._command(line[2:].split())
            elif line.startswith("#"):
                yield line
            elif not line:
                yield ""

    def _command(self, words: list[str]) -> Iterator[str]:
        if words[0] == "settings":
            self._configure(words[1:])
            return
        now, name = float(words[0]), words[1]
        options = dict(word.partition("=")[::2] for word in words[2:])
        if name == "restart":
            self._restart(now)
        elif name == "view":
            yield from self._view(now)
        else:
            event = EVENTS[name](words[2:], options, self.settings)
            decision = self.job.step(event, now)
            yield from self._show(decision)

    def _configure(self, words: list[str]) -> None:
        values = dict(word.split("=") for word in words)
        table = None
        if "table" in values:
            servers: dict[str, list[object]] = {}
            for rank, place in enumerate(values["table"].split(",")):
                host, device = place.split(":")
                servers.setdefault(host, []).append({"device_id": device, "rank_id": str(rank)})
            document = {"server_list": [{"server_id": h, "device": d} for h, d in servers.items()]}
            table = parse_rank_table(document)
        self.settings = events.CoreSettings(
            worker_num=int(values.get("num", "2")),
            worker_min=int(values.get("min", "0")),
            spares=int(values.get("spares", "0")),
            topo_timeout_s=float(values.get("topo", "30")),
            node_timeout_s=float(values.get("node", "5")),
            heartbeat_interval_s=1.0,
            stall_timeout_s=float(values.get("stall", "60")),
            ranks_per_unique_id=int(values.get("per_id", "128")),
            rank_table=table,
        )
        self.job = Machine("job", self.settings)

    def _restart(self, now: float) -> None:
        before = self.job
        self.job = Machine.recover("job", self.settings, self.records, now)
        assert self.job.job.ledger == before.job.ledger, "what was recovered differs from what was"
        self.over |= self.sent

    def _view(self, now: float) -> Iterator[str]:
        view = self.job.view(now)
        yield f"  {view.state} g{view.generation} {view.worker_num}/{view.worker_min}"
        for w in view.workers:
            yield f"    {w.rank} {w.candidate.node_id} {w.state} step {w.step} silent {w.silent_s:g}"
        yield from (f"    missing {name}" for name in view.missing)
        self.said.append(view.reason)

    def _show(self, decision: Decision) -> Iterator[str]:
        self.records += decision.records
        yield from (f"  * {show_record(record)}" for record in decision.records)
        for session, message in decision.messages:
            assert session not in self.over, f"message to session {session} after its last one"
            self.sent.add(session)
            if isinstance(message, messages.Refused | messages.Ended):
                self.over.add(session)
            yield f"  -> {session} {show_message(message)}"
            self.said.append(words(message))
        self.said.append(decision.reason)
        deadline = self.job.deadline()
        yield f"  next {'never' if deadline is None else f'{deadline:g}'}"


def joined(words: list[str], options: Arguments, settings: events.CoreSettings) -> events.Event:
    generation, _, rank = options.get("held", "0/-1").partition("/")
    return events.Joined(
        int(words[0]),
        candidate(words[1], options, settings.worker_num or 2),
        int(generation),
        int(rank or "-1"),
        "built" in options,
        int(options.get("step", "0")),
        last_call_s=float(options.get("last_call", "0")),
    )


def heard(words: list[str], options: Arguments, settings: events.CoreSettings) -> events.Event:
    session, generation, step = (int(word) for word in words[:3])
    recent = []
    for item in options.get("recent", "").split(","):
        if item:
            sequence, name, size, done = item.split(":")
            recent.append(
                messages.Collective(int(sequence), name, "world", "float32", int(size), done == "done")
            )
    started, entered = int(options.get("started", step)), int(options.get("in", generation))
    return events.Heard(session, generation, step, started, 1.0, tuple(recent), entered)


EVENTS: dict[str, Callable[[list[str], Arguments, events.CoreSettings], events.Event]] = {
    "join": joined,
    "heard": heard,
    "ids": lambda w, o, s: events.UniqueIdsPublished(
        int(w[0]), int(w[1]), (b"secret",) * int(o.get("count", 1))
    ),
    "built": lambda w, o, s: events.BuiltReported(int(w[0]), int(w[1])),
    "quiesced": lambda w, o, s: events.QuiescedReported(int(w[0]), int(w[1]), int(w[2])),
    "suspect": lambda w, o, s: events.PeerSuspected(int(w[0]), int(w[1]), int(w[2]), "connection reset"),
    "request-leave": lambda w, o, s: events.LeaveRequested(int(w[0]), int(w[1]), "SIGTERM"),
    "leave": lambda w, o, s: events.LeftCleanly(int(w[0]), int(w[1]), "finished" in o, ""),
    "lost": lambda w, o, s: events.SessionLost(int(w[0]), "reset"),
    "drain": lambda w, o, s: events.DrainRequested(w[0], "maintenance"),
    "expel": lambda w, o, s: events.Expel(w[0], "certificate revoked"),
    "tick": lambda w, o, s: events.Tick(),
    "still": lambda w, o, s: events.ProcessPaused(float(w[0])),
}

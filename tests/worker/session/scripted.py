"""A scheduler and a data plane that do what the test says: no network, no clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from muster.communicators.arrays import Array
from muster.communicators.base import Backend, Communicator
from muster.communicators.membership import Membership, Peer
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.work import FINISHED, Work
from muster.errors import CommunicatorAbortedError, MembershipChanged
from muster.version import __version__
from muster.wire import messages
from muster.wire.messages import Device
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.worker.config import Settings
from muster.worker.host import DeviceChoice
from muster.worker.session.connection import SchedulerConnection
from muster.worker.session.events import Timing
from muster.worker.session.own_gpu import OwnGpu
from muster.worker.session.session import Session
from muster.worker.session.streams import Stream
from tests.waiting import LIMIT_S
from tests.worker.session.machine import assignment as make_assignment
from tests.worker.session.machine import profile


class Line:
    """One stream: the test hears what the worker sends, and says what the scheduler would."""

    def __init__(self, outbox: SimpleQueue[bytes | None]) -> None:
        self._outbox = outbox
        self._inbox: SimpleQueue[bytes | Exception | None] = SimpleQueue()
        self.closed = False

    def hear(self, body: str) -> Any:
        """The next message of the worker, which must be of this kind; heartbeats are skipped."""
        while True:
            data = self._outbox.get(timeout=LIMIT_S)
            assert data is not None
            message = pb.WorkerMessage.FromString(data)
            kind = message.WhichOneof("body")
            if kind != "heartbeat" or body == "heartbeat":
                assert kind == body, f"{kind}, not {body}"
                return getattr(message, body)

    def say(self, **body: object) -> None:
        self._inbox.put(pb.SchedulerMessage(**body).SerializeToString())  # type: ignore[arg-type]

    def welcome(self, heartbeat_interval_s: float = 3600.0, node_timeout_s: float = 5.0) -> None:
        self.say(
            welcome=pb.Welcome(
                heartbeat_interval_s=heartbeat_interval_s,
                node_timeout_s=node_timeout_s,
                topo_timeout_s=60.0,
                version=__version__,
            )
        )

    def assign(self, join: Any, generation: int = 1, rank: int = 1, **changes: object) -> None:
        """Gives the worker that sent ``join`` a place."""
        value = make_assignment(generation, rank, incarnation=join.incarnation, **changes)
        self.say(assignment=to_wire(value))

    def form(self, join: Any, generation: int = 1, rank: int = 1, **changes: object) -> None:
        """Takes the worker through formation until it runs."""
        self.assign(join, generation, rank, **changes)
        self.say(unique_ids=pb.UniqueIds(generation=generation, unique_ids=[b"secret"]))
        assert self.hear("built").generation == generation
        self.say(group_built=pb.GroupBuilt(generation=generation))

    def fail(self, error: Exception | None) -> None:
        """Breaks the stream; None: it just ends."""
        self._inbox.put(error)

    def __iter__(self) -> Iterator[bytes]:
        while (item := self._inbox.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def close(self) -> None:
        self.closed = True
        self._inbox.put(None)


def to_wire(value: messages.Assignment) -> pb.Assignment:
    members = [
        pb.Member(
            rank=each.rank,
            node_id=each.node_id,
            incarnation=each.incarnation,
            host_index=each.rank,
            device=pb.Device(kind="cpu", index=-1),
            local_rank=each.local_rank,
            local_world_size=each.local_world_size,
            data_address=each.data_address,
        )
        for each in value.members
    ]
    return pb.Assignment(
        generation=value.generation,
        rank=value.rank,
        members=members,
        hosts=[pb.Host(id=e.host.id, name=e.host.name, address=e.host.address) for e in value.members],
        state_source_rank=value.state_source_rank,
        newcomer_ranks=value.newcomer_ranks,
        unique_id_count=value.unique_id_count,
        reason=value.reason,
        switch_after_step=value.switch_after_step,
        lost=value.lost,
        launch=value.launch,
    )


class ScriptedConnector:
    """Opens lines; the test takes them from ``next_line``. Planned errors come first."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self._lines: SimpleQueue[Line] = SimpleQueue()
        self.lines: list[Line] = []
        self.attempts = 0

    def dial(self, outbox: SimpleQueue[bytes | None]) -> Stream:
        self.attempts += 1
        if self._errors:
            raise self._errors.pop(0)
        line = Line(outbox)
        self.lines.append(line)
        self._lines.put(line)
        return line, line.close

    def next_line(self) -> Line:
        return self._lines.get(timeout=LIMIT_S)


class StubCommunicator(Communicator):
    """Does nothing with arrays. ``behave`` is called in each collective and may block or raise."""

    name = "stub"

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.timeout_s = 0.0
        self.behave: Callable[[StubCommunicator], None] = lambda _: None
        self.calls: list[str] = []
        self.entered = threading.Event()
        self.aborted = threading.Event()
        self.error: Exception | None = None
        self.closed = False
        self.parts: list[StubCommunicator] = []

    def _do(self, name: str) -> Work:
        self.calls.append(name)
        self.entered.set()
        self.behave(self)
        if self.error is not None:
            raise self.error
        return FINISHED

    def hang(self) -> None:
        """Blocks until it is aborted."""
        assert self.aborted.wait(LIMIT_S)

    def all_reduce(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        return self._do("all_reduce")

    def reduce(
        self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, async_op: bool = False
    ) -> Work:
        return self._do("reduce")

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> Work:
        return self._do("broadcast")

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        return self._do("all_gather")

    def reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> Work:
        return self._do("reduce_scatter")

    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> Work:
        return self._do("gather")

    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> Work:
        return self._do("scatter")

    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> Work:
        return self._do("all_to_all")

    def send(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        return self._do("send")

    def recv(self, buffer: Array, peer: int, *, async_op: bool = False) -> Work:
        return self._do("recv")

    def barrier(self) -> None:
        self._do("barrier")

    def split(self, group: str, ranks: Sequence[int]) -> Communicator | None:
        self._do(f"split {group}")
        if self.rank not in ranks:
            return None
        peers = tuple(self.membership.peers[rank] for rank in ranks)
        part = StubCommunicator(
            Membership(
                self.membership.job_id, self.membership.generation, group, list(ranks).index(self.rank), peers
            )
        )
        self.parts.append(part)
        return part

    def abort(self, error: Exception) -> None:
        self.error = self.error or error
        self.aborted.set()

    def close(self) -> None:
        self.closed = True
        self.error = self.error or CommunicatorAbortedError("closed")


def stub_communicator(rank: int = 0, size: int = 2) -> StubCommunicator:
    peers = tuple(Peer(r, f"n{r}", r + 1, "host-id", "alpha", "") for r in range(size))
    return StubCommunicator(Membership("job", 1, "world", rank, peers))


class StubBackend(Backend):
    """Makes stub communicators; ``connecting`` is called before each and may raise."""

    name = "stub"

    def __init__(self) -> None:
        self.made: list[StubCommunicator] = []
        self.connecting: Callable[[Membership, Callable[[], Exception | None]], None] = lambda *_: None
        self.behave: Callable[[StubCommunicator], None] = lambda _: None
        self.closed = False

    def open_endpoint(self, address: str) -> str:
        return f"{address}:5000"

    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        return tuple(b"minted" for _ in range(count))

    def connect(
        self, membership: Membership, *, timeout_s: float, cancelled: Callable[[], Exception | None]
    ) -> Communicator:
        self.connecting(membership, cancelled)
        made = StubCommunicator(membership)
        made.behave = self.behave
        self.made.append(made)
        return made

    def close(self) -> None:
        self.closed = True


def scripted_session(
    connector: ScriptedConnector,
    backend: StubBackend | None = None,
    answering: Any = None,
    prepare: Callable[[], None] | None = None,
    timing: Timing | None = None,
    device: DeviceChoice | None = None,
    gpu: OwnGpu | None = None,
    **settings: object,
) -> Session:
    """A session as node ``n0`` of a job of two."""
    return Session(
        Settings(worker_num=2, worker_min=2, **settings),  # type: ignore[arg-type]
        profile=profile(),
        device=device or DeviceChoice(Device()),
        gpu=gpu,
        backend=backend or StubBackend(),
        connection=SchedulerConnection(connector.dial),
        answering=answering,
        prepare=prepare,
        timing=timing,
    )


class Thread(threading.Thread):
    """Runs a function; ``result`` gives what it returned or raises what it raised."""

    def __init__(self, body: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._body = body
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._body()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(LIMIT_S)
        assert not self.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._value


def opened(
    session: Session, connector: ScriptedConnector, heartbeat_interval_s: float = 3600.0
) -> tuple[Line, Any]:
    """Opens a session in a group that forms at once; returns its line, and the join that it sent."""
    opening = Thread(session.open)
    line = connector.next_line()
    join = line.hear("join")
    line.welcome(heartbeat_interval_s)
    line.form(join)
    opening.result()
    return line, join


def end(session: Session, line: Line) -> None:
    releasing = Thread(session.release)
    line.say(ended=pb.Ended(ok=True, reason="bye"))
    releasing.result()


def is_over(session: Session) -> bool:
    """Whether its generation is."""
    try:
        return session.communicator is None
    except MembershipChanged:
        return True


def beats(line: Line) -> Iterator[Any]:
    while True:
        yield line.hear("heartbeat")

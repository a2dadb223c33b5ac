"""Collectives that follow the array: real connections for those on the CPU, threads in place of NCCL."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import muster
from muster.communicators.arrays import describe
from muster.communicators.base import Backend, Communicator, check_place
from muster.communicators.fault_aware import FaultAwareCommunicator, FlightRecorder
from muster.communicators.following import FollowingBackend, FollowingCommunicator
from muster.communicators.membership import Membership, Peer
from muster.communicators.nccl.bootstrap_tls import BootstrapTls
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.work import FINISHED, Work
from muster.errors import (
    ArrayError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorError,
    FormationTimeoutError,
    MembershipChanged,
    PeerFinishedError,
    SecurityError,
    WorkerError,
)
from tests.communicators.tcp.world import JOB, Office, World, make_world, together
from tests.fakes import FakeCommunicator, Meeting
from tests.gpu.stand_in import HostArray
from tests.logs import said
from tests.waiting import wait_for

SUM = ReduceOp.SUM
NCCL_ID = b"NCCL's id, which is no secret"


class Gpus(FakeCommunicator):
    """Collectives on GPUs: among threads, on arrays that look like CuPy's."""

    name = "nccl"
    on_device = capturable = pre_multiplies = True
    recording = False

    def all_reduce(self, send: Any, recv: Any, op: ReduceOp, *, async_op: bool = False) -> Any:
        arrays = [check_place(describe(each), self).array.values for each in (send, recv)]
        return super().all_reduce(arrays[0], arrays[1], op, async_op=async_op)

    def send(self, buffer: Any, peer: int, *, async_op: bool = False) -> Work:
        self.log.append(("send", describe(buffer).size))
        return FINISHED

    def capturing(self) -> bool:
        return self.recording

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        yield

    def split(self, group: str, ranks: Sequence[int]) -> Gpus | None:
        part = self.membership.part(group, ranks)
        meeting = vars(self._meeting).setdefault(group, Meeting(len(ranks)))
        return None if part is None else Gpus(part, meeting)


class GpuBackend(Backend):
    """Makes them; ``stuck`` never forms a communicator, as NCCL when a rank does not come."""

    name = "nccl"
    on_device = True

    def __init__(self, meetings: dict[int, Meeting]) -> None:
        self._meetings = meetings
        self.absent: Callable[[], list[Peer]] | None = None
        self.stuck = False
        self.given: tuple[bytes, ...] = ()
        self.sealed_by: Any = None
        self.bootstrap_tls: BootstrapTls | None = None
        self.connecting: Callable[[int], Any] = lambda generation: None

    def seal(self, plugin: Any) -> None:
        self.sealed_by = plugin

    def open_endpoint(self, address: str) -> str:
        return ""

    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        return (NCCL_ID,) * count

    def connect(
        self, membership: Membership, *, timeout_s: float, cancelled: Callable[[], Exception | None]
    ) -> Communicator:
        self.connecting(membership.generation)
        self.given = membership.unique_ids
        if self.stuck:
            assert self.absent is not None
            for _ in range(10):  # a rank has a second to answer, and the machine may stand still for one
                if len(missing := [peer.rank for peer in self.absent()]) == 1:
                    break
            raise FormationTimeoutError(f"missing: {missing}")
        meeting = self._meetings.setdefault(membership.generation, Meeting(membership.world_size))
        return Gpus(membership, meeting)

    def close(self) -> None:
        return


class Job:
    """Ranks of a session on GPUs."""

    def __init__(self, world: World) -> None:
        self.world = world
        meetings: dict[int, Meeting] = {}
        self.gpus = [GpuBackend(meetings) for _ in world.backends]
        self.backends = [
            FollowingBackend(cast("Any", gpus), host)
            for gpus, host in zip(self.gpus, world.backends, strict=True)
        ]
        ids = self.backends[0].mint_unique_ids(1)
        self.memberships = [replace(each, unique_ids=ids) for each in world.memberships]
        self.ranks: list[FollowingCommunicator] = []

    def connect(self) -> list[FollowingCommunicator]:
        self.ranks = together(
            [
                lambda rank=rank: self.backends[rank].connect(  # type: ignore[misc]
                    self.memberships[rank], timeout_s=60, cancelled=lambda: None
                )
                for rank in range(len(self.backends))
            ]
        )
        return self.ranks

    def next(self) -> list[FollowingCommunicator]:
        ids = self.backends[0].mint_unique_ids(1)
        self.memberships = [
            replace(each, generation=each.generation + 1, unique_ids=ids) for each in self.memberships
        ]
        return self.connect()

    def run(
        self, body: Callable[[FollowingCommunicator], Any], ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Calls ``body`` on ranks at once; gives each one's result or error."""
        chosen = range(len(self.ranks)) if ranks is None else ranks
        return together([lambda rank=rank: body(self.ranks[rank]) for rank in chosen])  # type: ignore[misc]


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    return Office(tmp_path_factory.mktemp("office"))


@pytest.fixture
def make(office: Office) -> Iterator[Callable[[int], Job]]:
    made: list[Job] = []

    def make_job(size: int) -> Job:
        job = Job(make_world([office.credentials(node=f"n{rank}") for rank in range(size)]))
        made.append(job)
        job.connect()
        return job

    yield make_job
    for job in made:
        for each in job.ranks:
            if isinstance(each, Communicator):
                each.abort(MembershipChanged("the test is over", generation=5))
                each.close()
        for backend in job.backends:
            backend.close()


def on_gpu(*values: float) -> HostArray:
    return HostArray(np.array(values, np.float32))


def on_cpu(*values: float) -> Any:
    return np.array(values, np.float32)


def total(comm: Communicator, array: Any, *, async_op: bool = False) -> Work:
    return comm.all_reduce(array, array, SUM, async_op=async_op)


def connections(comm: FollowingCommunicator) -> int:
    return len(comm.host.links())


def test_each_array_goes_where_it_is_and_connections_open_at_the_first_on_the_cpu(
    make: Callable[[int], Job],
) -> None:
    def body(comm: FollowingCommunicator) -> Any:
        first, plain, large = on_gpu(1, 2), on_cpu(comm.rank, 5), np.full(100_000, comm.rank + 1.0)
        total(comm, first)
        comm.barrier()
        before = connections(comm)
        total(comm, plain)
        total(comm, large)
        gathered = np.zeros(3, np.int64)
        comm.all_gather(describe(comm.rank), gathered)  # a number
        return before, first.values.tolist(), plain.tolist(), set(large.tolist()), gathered.tolist()

    job = make(3)
    assert job.run(body) == [(0, [3, 6], [3, 15], {6}, [0, 1, 2])] * 3
    assert all(connections(comm) > 0 for comm in job.ranks)
    assert job.ranks[0].device.log == [("all_reduce", 2), ("barrier", 0)]  # type: ignore[attr-defined]


def test_an_exchange_with_neighbours_takes_arrays_on_the_cpu(
    make: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = threading.local()  # the ranks are threads
    monkeypatch.setattr("muster.worker.collectives.current", lambda: sessions.own)

    def body(comm: FollowingCommunicator) -> Any:
        sessions.own = SimpleNamespace(group=lambda name: comm)
        left, right, got = (comm.rank - 1) % 3, (comm.rank + 1) % 3, on_cpu(0, 0)
        muster.neighbor_exchange({right: on_cpu(comm.rank, 7)}, {left: got})
        return got.tolist()

    assert make(3).run(body) == [[2, 7], [0, 7], [1, 7]]


@pytest.mark.parametrize("name", ["reduce", "broadcast", "reduce_scatter", "gather", "scatter", "all_to_all"])
def test_all_collectives_take_arrays_on_the_cpu(make: Callable[[int], Job], name: str) -> None:
    def body(comm: FollowingCommunicator) -> Any:
        send, recv, half = on_cpu(comm.rank, 10), np.zeros(2, np.float32), np.zeros(1, np.float32)
        whole = np.zeros(4, np.float32)
        mine = comm.rank == 1
        calls: dict[str, Callable[[], Any]] = {
            "reduce": lambda: comm.reduce(send, recv if mine else None, SUM, 1) and recv,
            "broadcast": lambda: comm.broadcast(send, 1) and send,
            "reduce_scatter": lambda: comm.reduce_scatter(send, half, SUM) and half,
            "gather": lambda: comm.gather(send, whole if mine else None, 1) and whole,
            "scatter": lambda: comm.scatter(send if mine else None, half, 1) and half,
            "all_to_all": lambda: comm.all_to_all(send, recv) and recv,
        }
        return calls[name]().tolist()

    expected = {
        "reduce": [[0, 0], [1, 20]],
        "broadcast": [[1, 10], [1, 10]],
        "reduce_scatter": [[1], [20]],
        "gather": [[0, 0, 0, 0], [0, 10, 1, 10]],
        "scatter": [[1], [10]],
        "all_to_all": [[0, 1], [10, 10]],
    }
    assert make(2).run(body) == expected[name]


def test_a_message_between_two_ranks_waits_for_no_third(make: Callable[[int], Job]) -> None:
    def body(comm: FollowingCommunicator) -> Any:
        array = on_cpu(comm.rank, 7)
        if comm.rank == 0:
            comm.send(array, 2)
        else:
            comm.recv(array, 0)
        return array.tolist()

    job = make(3)
    assert job.run(body, ranks=[0, 2]) == [[0, 7], [0, 7]]
    assert connections(job.ranks[1]) == 0


def test_groups_follow_the_array_too(make: Callable[[int], Job]) -> None:
    def body(comm: FollowingCommunicator) -> Any:
        part = comm.split("pair", [2, 0])
        before = connections(comm)
        if part is None:
            return None
        gpu, cpu = on_gpu(comm.rank + 1), on_cpu(comm.rank + 1)
        total(part, gpu)
        total(part, cpu)
        return part.rank, before, gpu.values.tolist(), cpu.tolist()

    assert make(3).run(body) == [(1, 0, [4], [4]), None, (0, 0, [4], [4])]


@pytest.mark.parametrize("call", ["small", "large", "gathered"])
def test_calls_of_both_kinds_in_another_order_are_named_on_all_ranks(
    make: Callable[[int], Job], call: str
) -> None:
    calls: dict[str, Callable[[Communicator], Any]] = {
        "small": lambda comm: total(comm, on_cpu(1)),
        "large": lambda comm: total(comm, np.ones(100_000)),
        "gathered": lambda comm: comm.all_gather(on_cpu(1), on_cpu(0, 0)),
    }

    def body(comm: FollowingCommunicator) -> None:
        calls[call](comm)
        if comm.rank:
            total(comm, on_gpu(1), async_op=True)
        calls[call](comm)

    for error in make(2).run(body):
        assert isinstance(error, CollectiveMismatchError)
        assert "rank 0" in str(error) and "rank 1" in str(error)


def test_an_asynchronous_call_has_the_number_that_it_had_when_it_was_made(make: Callable[[int], Job]) -> None:
    late = threading.Event()

    def body(comm: FollowingCommunicator) -> Any:
        first, second = on_cpu(1), on_cpu(2)
        total(comm, on_gpu(1), async_op=True)
        if comm.rank:
            works = [total(comm, first, async_op=True)]
            total(comm, on_gpu(1), async_op=True)
            late.set()
        else:
            works = [total(comm, first, async_op=True)]
            assert late.wait(60)
            total(comm, on_gpu(1), async_op=True)
        works.append(total(comm, second, async_op=True))
        for work in works:
            work.wait()
        return first.tolist(), second.tolist()

    assert make(2).run(body) == [([2], [4])] * 2


def test_what_was_refused_does_not_count(make: Callable[[int], Job]) -> None:
    def body(comm: FollowingCommunicator) -> Any:
        if comm.rank:
            with pytest.raises(ArrayError, match="on the CPU"):
                comm.all_reduce(on_gpu(1), on_cpu(1), SUM)
            with pytest.raises(ArrayError, match="on a GPU"):
                comm.all_reduce(on_cpu(1), on_gpu(1), SUM)
        array = on_cpu(1)
        total(comm, array)
        return array.tolist()

    assert make(2).run(body) == [[2], [2]]


def test_arrays_on_the_cpu_are_refused_where_nothing_but_nccl_can_be(make: Callable[[int], Job]) -> None:
    comm = make(2).ranks[0]
    cast("Any", comm.device).recording = True
    with pytest.raises(CommunicatorError, match=r"all_reduce .* a CUDA graph.*tensor\.cuda\(\)"):
        total(comm, on_cpu(1))
    with pytest.raises(CommunicatorError, match="send of an array on the CPU"):
        comm.send(on_cpu(1), 1)
    comm.send(on_gpu(1), 1)
    cast("Any", comm.device).recording = False
    with comm.group():
        with pytest.raises(CommunicatorError, match=r"group\(\)"):
            comm.broadcast(on_cpu(1), 0)
        comm.send(on_gpu(1), 1)
    assert connections(comm) == 0


def test_the_first_call_on_the_cpu_is_logged_once(
    make: Callable[[int], Job], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "muster.worker")
    comm = make(1).ranks[0]
    total(comm, on_gpu(1))
    assert not said(caplog)
    total(comm, on_cpu(1, 2))
    total(comm, on_cpu(1))
    assert said(caplog) == [
        "all_reduce of 8 bytes on the CPU uses tcp, not NCCL, as all arrays on the CPU do"
    ]


def test_a_rank_that_does_not_come_is_named_at_the_deadline(make: Callable[[int], Job]) -> None:
    job = make(2)
    job.ranks[0].timeout_s = 0.3
    [error] = job.run(lambda comm: total(comm, on_cpu(1)), ranks=[0])
    assert isinstance(error, CollectiveTimeoutError)
    assert "rank 1" in str(error) and "all_reduce" in str(error)


def test_an_abort_ends_the_wait_for_the_first_connection(make: Callable[[int], Job]) -> None:
    job = make(2)
    changed = MembershipChanged("rank 1 is gone", generation=5)
    entered = threading.Event()

    def body(comm: FollowingCommunicator) -> None:
        entered.set()
        total(comm, on_cpu(1))

    def end() -> None:
        assert entered.wait(60)
        job.ranks[0].abort(changed)

    ender = threading.Thread(target=end)
    ender.start()
    assert job.run(body, ranks=[0]) == [changed]
    ender.join()
    with pytest.raises(MembershipChanged):
        total(job.ranks[0], on_gpu(1))


def test_each_generation_has_connections_of_its_own(make: Callable[[int], Job]) -> None:
    def body(comm: FollowingCommunicator) -> Any:
        array = on_cpu(comm.rank + 1)
        total(comm, array)
        return array.tolist()

    job = make(2)
    assert job.run(body) == [[3], [3]]
    old = job.ranks
    for each in old:
        each.abort(MembershipChanged("over", generation=5))
    job.next()
    assert job.run(body) == [[3], [3]]
    assert all(isinstance(each, MembershipChanged) for each in together([lambda: total(old[0], on_cpu(1))]))


def test_a_rank_that_has_finished_is_named_to_those_that_go_on(make: Callable[[int], Job]) -> None:
    job = make(2)
    job.run(lambda comm: total(comm, on_cpu(1)))
    job.ranks[1].finished = True
    job.ranks[1].close()
    [error] = job.run(lambda comm: total(comm, on_cpu(1)), ranks=[0])
    assert isinstance(error, PeerFinishedError)


def test_tcp_has_a_secret_that_nccl_never_sees(make: Callable[[int], Job]) -> None:
    job = make(2)
    [whole] = job.memberships[0].unique_ids
    assert job.gpus[0].given == (NCCL_ID,)
    assert whole.startswith(NCCL_ID) and len(whole) > len(NCCL_ID)
    # One who knows NCCL's id alone, and has a certificate of this job, is no member.
    guess = NCCL_ID + bytes(len(whole) - len(NCCL_ID))
    job.memberships = [
        replace(each, generation=6, unique_ids=(guess if each.rank else whole,)) for each in job.memberships
    ]
    for each in job.ranks:
        each.abort(MembershipChanged("over", generation=5))
    job.connect()

    def fail(comm: FollowingCommunicator) -> None:
        try:
            total(comm, on_cpu(1))
        except WorkerError as error:
            for each in job.ranks:  # the other may wait for the end of its time
                each.abort(error)
            raise

    errors = job.run(fail)
    assert all(isinstance(error, WorkerError) for error in errors)
    assert any(isinstance(error, SecurityError) for error in errors)


class Plugin:
    """Notes what NCCL's plug-in is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, bytes]] = []

    def use_secret(self, generation: int, secret: bytes) -> None:
        self.told.append((generation, secret))

    def reason(self) -> str:
        return ""

    def forget_reason(self) -> None:
        return


def test_the_plug_in_gets_a_secret_of_each_generation_before_nccl_connects(
    make: Callable[[int], Job],
) -> None:
    """It comes from tcp's secret, which NCCL never sees: who knows NCCL's id alone knows nothing of it."""
    job = make(2)
    plugins = [Plugin(), Plugin()]
    for backend, gpus, plugin in zip(job.backends, job.gpus, plugins, strict=True):
        backend.seal(plugin)
        assert gpus.sealed_by is plugin
        gpus.connecting = lambda number, plugin=plugin: numbers.append((number, len(plugin.told)))  # type: ignore[misc]
    numbers: list[tuple[int, int]] = []
    for round_ in (1, 2):
        for each in job.ranks:
            each.abort(MembershipChanged("over", generation=5))
        job.next()
        assert plugins[0].told == plugins[1].told and len(plugins[0].told) == round_
    (first, secret), (second, other) = plugins[0].told
    assert second == first + 1 and secret != other and {len(secret), len(other)} == {32}
    assert sorted(numbers) == [(first, 1), (first, 1), (second, 2), (second, 2)]
    assert not any(secret in told or told in secret for told in job.gpus[0].given)


class TlsNccl:
    """What of NCCL's bindings sets a key; ``keys`` are those that were set."""

    class NCCLError(Exception):
        pass

    class EncryptionConfig:
        mode, psk = 0, ""

        @property
        def ptr(self) -> tuple[int, str]:
            return self.mode, self.psk

    def __init__(self) -> None:
        self.keys: list[str] = []

    def set_encryption(self, config: tuple[int, str]) -> None:
        mode, key = config
        assert mode == 1
        self.keys.append(key)


def test_the_key_of_nccl_s_bootstrap_travels_with_the_ids_and_stays(make: Callable[[int], Job]) -> None:
    job = make(2)
    bindings = [TlsNccl(), TlsNccl()]
    for gpus, nccl in zip(job.gpus, bindings, strict=True):
        gpus.bootstrap_tls = BootstrapTls(nccl)
    minting = job.gpus[0].mint_unique_ids
    keyed: list[int] = []

    def mint(count: int) -> tuple[bytes, ...]:
        keyed.append(len(bindings[0].keys))
        return minting(count)

    job.gpus[0].mint_unique_ids = mint  # type: ignore[method-assign]
    for _ in range(2):
        for each in job.ranks:
            each.abort(MembershipChanged("over", generation=5))
        job.next()
    assert keyed == [1, 1]  # set before NCCL listens, and once
    assert bindings[0].keys == bindings[1].keys and len(bindings[0].keys[0]) >= 32
    assert job.gpus[0].given == job.gpus[1].given == (NCCL_ID,)
    # Rank 0 of the next generation is a new process, which knows no key: the other takes its.
    new = TlsNccl()
    job.gpus[0].bootstrap_tls = BootstrapTls(new)
    for each in job.ranks:
        each.abort(MembershipChanged("over", generation=5))
    job.next()
    assert bindings[1].keys == [*bindings[0].keys, *new.keys] and len(set(bindings[1].keys)) == 2
    total = job.run(lambda comm: total_of(comm))
    assert total == [[3], [3]]


def total_of(comm: FollowingCommunicator) -> Any:
    array = on_cpu(comm.rank + 1)
    total(comm, array)
    return array.tolist()


def test_who_has_not_come_is_named_where_nccl_does_not_say(make: Callable[[int], Job]) -> None:
    job = make(3)
    for each in job.ranks:
        each.abort(MembershipChanged("over", generation=5))
    ids = job.backends[0].mint_unique_ids(1)
    job.memberships = [replace(each, generation=6, unique_ids=ids) for each in job.memberships]
    job.gpus[0].stuck = True
    host = job.world.backends[
        1
    ].listen(  # rank 1 has come, rank 2 has not
        replace(job.memberships[1], unique_ids=(ids[0][len(NCCL_ID) :],)), timeout_s=10
    )
    with pytest.raises(FormationTimeoutError, match=r"missing: \[2\]"):
        job.backends[0].connect(job.memberships[0], timeout_s=1, cancelled=lambda: None)
    host.close()


def test_where_nothing_may_listen_arrays_on_the_cpu_are_refused(tmp_path: Path) -> None:
    from muster.communicators.tcp.backend import TcpBackend

    backend = FollowingBackend(cast("Any", GpuBackend({})), TcpBackend(tls=None))
    try:
        assert backend.open_endpoint("192.0.2.7") == ""
        alone = Membership(
            JOB, 1, "world", 0, (Peer(0, "n0", 1, "h", "host", ""),), backend.mint_unique_ids(1)
        )
        comm = backend.connect(alone, timeout_s=1, cancelled=lambda: None)
        with pytest.raises(ArrayError, match="needs an array on a GPU"):
            check_place(describe(on_cpu(1)), comm)
    finally:
        backend.close()


def test_the_record_of_calls_tells_the_places_apart(make: Callable[[int], Job]) -> None:
    """What the scheduler lays side by side, while one waits on the CPU and the other one in NCCL."""
    job = make(2)
    recorders = [FlightRecorder(), FlightRecorder()]
    guarded = [
        FaultAwareCommunicator(
            comm,
            world_ranks=range(2),
            verdict=lambda rank, error: error,
            recorder=recorder,
            adopted=lambda each: None,
            closed=lambda each: None,
        )
        for comm, recorder in zip(job.ranks, recorders, strict=True)
    ]
    assert all(each.takes_host for each in guarded)
    together([lambda each=each: total(each, on_cpu(1)) for each in guarded])  # type: ignore[misc]
    assert [recorder.recent()[-1].done for recorder in recorders] == [True, True]
    waiting = threading.Thread(target=lambda: together([lambda: total(guarded[0], on_cpu(1, 2))]))
    waiting.start()
    wait_for(lambda: len(recorders[0].recent()) == 2)
    total(guarded[1], on_gpu(1, 2), async_op=True)
    [cpu], [gpu] = (recorder.recent(last_only=True) for recorder in recorders)
    assert (cpu.sequence, cpu.dtype, cpu.done) == (2, "float32 on the CPU", False)
    assert (gpu.sequence, gpu.dtype, gpu.done) == (2, "float32 on a GPU", False)
    assert recorders[0].waits() and recorders[0].hanging_s() > 0
    recorders[0].settle()  # what is waited for of the device says nothing of the CPU
    assert not recorders[0].recent(last_only=True)[0].done
    job.ranks[0].abort(MembershipChanged("over", generation=5))
    waiting.join()

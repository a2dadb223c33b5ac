"""A real uplink between real schedulers and workers: who is lost when what dies, and who is kept out."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from muster.certs.pki.identity import Identity
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.worker.session.streams import DeniedError, Dial, MessageRejectedError, Stream
from muster.worker.uplink.door import OUTER, inherited, named
from muster.worker.uplink.frames import MAX_FROM_WORKER_BYTES
from muster.worker.uplink.process import FAREWELL_S
from tests.scheduler.processes import Pki, Scheduler, scheduler
from tests.waiting import LIMIT_S, wait_for
from tests.worker.uplink.hosts import Host, Member, host

pytestmark = pytest.mark.slow

NODE_TIMEOUT_S = "20"
SOON = {"MS_NODE_TIMEOUT": "16"}
"""Of a worker that takes an uplink that is silent for four seconds for one that stands still."""

HELD = {"held_generation": 1, "held_world_size": 2, "built": True}


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    pki = Pki.make(tmp_path_factory.mktemp("uplink-pki"))
    pki.issue("host", Identity("default", "host", nodes=("node-0", "node-1")))
    return pki


@pytest.fixture
def running(pki: Pki) -> Iterator[Scheduler]:
    with scheduler(**pki.env(), MS_NODE_TIMEOUT=NODE_TIMEOUT_S) as running:
        yield running


@pytest.fixture
def here(tmp_path: Path, running: Scheduler, pki: Pki) -> Iterator[Host]:
    with host(tmp_path, running, pki, MS_NODE_TIMEOUT=NODE_TIMEOUT_S) as here:
        yield here


def formed(here: Host, *dials: Dial) -> list[Member]:
    """Two members of a group that stands, by the uplink."""
    members = [here.join(f"node-{i}", dial) for i, dial in enumerate(dials or (here.dial(), here.dial()))]
    for rank, member in enumerate(members):
        assert member.next("assignment").assignment.rank == rank
    ids = pb.PublishUniqueIds(generation=1, unique_ids=[b"UNIQUE-ID-" * 12])
    members[0].put(pb.WorkerMessage(publish_unique_ids=ids))
    for member in members:
        member.next("unique_ids")
        member.put(pb.WorkerMessage(built=pb.Built(generation=1)))
    for member in members:
        member.next("group_built")
    return members


def back(here: Host, dial: Dial, index: int) -> Member:
    """A member that opens its stream again, as it does after a loss of that."""
    return here.join(f"node-{index}", dial, held_rank=index, **HELD)


def test_a_group_forms_and_ends_on_one_connection(here: Host, running: Scheduler) -> None:
    members = formed(here)
    for member in members:
        member.put(pb.WorkerMessage(leave=pb.Leave(generation=1, finished=True)))
    for member in members:
        assert member.next("ended").ended.ok
        assert member.end() is None
    assert running.wait() == 0
    peers = {line.split("peer=")[1].split()[0] for line in running.log.splitlines() if " joined " in line}
    assert len(peers) == 1
    here.uplink.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
    assert here.uplink.wait(LIMIT_S) == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("more", [(), ("child",)], ids=["alone", "its child holds its socket"])
def test_a_killed_worker_is_lost_at_once(here: Host, running: Scheduler, more: tuple[str, ...]) -> None:
    member = here.join("node-0")
    worker = here.worker("node-1", *more)
    member.next("assignment")
    worker.kill()
    running.await_log("its stream ended (no goodbye was said)")
    assert "not heard" not in running.log


@pytest.mark.parametrize("again", [True, False], ids=["another uplink", "directly"])
def test_an_uplink_that_is_killed_takes_nobody_along(here: Host, running: Scheduler, again: bool) -> None:
    dials = [here.dial(None if again else here.direct()) for _ in range(2)]
    members = formed(here, *dials)
    uplink = here.uplink
    assert uplink is not None
    uplink.kill()
    for member in members:
        assert isinstance(member.end(), ConnectionError)
    if again:
        here.start().poll()
        dials = [here.dial() for _ in members]  # which give it more time than a member has under load
    members = [back(here, dial, index) for index, dial in enumerate(dials)]
    for index, member in enumerate(members):
        assert member.next("assignment").assignment.rank == index
        running.await_log(f"Rank {index} (node node-{index} on host host, cpu:{index}) is back")
    assert "Generation 2" not in running.log


def test_an_uplink_that_stands_still_is_left_and_calls_nobody_dead_later(
    here: Host, running: Scheduler
) -> None:
    dials = [here.dial(here.direct(), **SOON) for _ in range(2)]
    members = [here.join(f"node-{index}", dial) for index, dial in enumerate(dials)]
    for member in members:
        member.next("assignment")
    uplink = here.uplink
    assert uplink is not None
    uplink.send_signal(signal.SIGSTOP)
    for index, (member, dial) in enumerate(zip(members, dials, strict=True)):
        assert isinstance(member.end(), TimeoutError)
        back(here, dial, index).next("assignment")
    uplink.send_signal(signal.SIGCONT)
    here.has_logged("")  # it runs
    third = here.worker("node-2")  # served after what waited in the old streams
    assert third.poll() is None
    assert "lost" not in running.log


def test_who_moves_to_another_stream_is_not_lost(here: Host, running: Scheduler) -> None:
    """The uplink reads the word that a worker lives before it reads the end of its stream."""
    dial = here.dial(here.direct())
    here.join("node-0", dial).next("welcome")
    other = here.join("node-1", here.dial(None, **SOON))
    other.next("assignment")
    uplink = here.uplink
    assert uplink is not None
    uplink.send_signal(signal.SIGSTOP)
    assert isinstance(other.end(), TimeoutError)
    uplink.send_signal(signal.SIGCONT)
    running.await_log("it has")  # so many seconds to come back
    assert "is lost" not in running.log


def test_what_is_still_sent_on_a_stream_that_is_left_costs_nobody_his_place(
    here: Host, running: Scheduler
) -> None:
    """A heartbeat that comes due between the two is not behind the word that the worker goes on elsewhere."""
    other = here.join("node-0")
    member = here.join("node-1")
    other.next("assignment")
    member.next("assignment")
    uplink = here.uplink
    assert uplink is not None
    uplink.send_signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        for _ in member.replies:
            pass
    member.put(pb.WorkerMessage(heartbeat=pb.Heartbeat(generation=1)))
    wait_for(member.outbox.empty)
    member.close()
    uplink.send_signal(signal.SIGCONT)
    running.await_log("it has")  # so many seconds to come back
    assert "is lost" not in running.log


def test_an_uplink_that_moves_again_has_who_has_not_come_anywhere_yet(here: Host) -> None:
    """As where a firewall drops what workers themselves send: to find that out takes seconds."""
    answers, closed = threading.Event(), threading.Event()
    uplink = here.uplink
    assert uplink is not None

    def direct(_: SimpleQueue[bytes | None]) -> Stream:
        uplink.send_signal(signal.SIGCONT)
        answers.wait(2 * LIMIT_S)
        return (), closed.set

    dial = here.dial(direct)
    member = here.join("node-0", dial)
    member.next("welcome")
    uplink.send_signal(signal.SIGSTOP)
    assert isinstance(member.end(), TimeoutError)
    again = here.join("node-0", dial)
    again.next("welcome")
    assert not answers.is_set()
    answers.set()
    assert closed.wait(LIMIT_S)  # nobody needs it
    here.join("node-1", dial).next("assignment")  # which a worker gets that is there
    again.next("assignment")


def test_a_scheduler_that_is_started_again_gets_its_workers_back_by_the_same_uplink(
    tmp_path: Path, pki: Pki
) -> None:
    journal = {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(tmp_path / "journal")}
    journal["MS_NODE_TIMEOUT"] = "60"
    slow = {"MS_NODE_TIMEOUT": NODE_TIMEOUT_S}
    with scheduler(**pki.env(), **journal) as first, host(tmp_path, first, pki, **slow) as here:
        members = formed(here)
        first.signal(signal.SIGKILL)
        first.wait()
        for member in members:
            assert isinstance(member.end(), ConnectionError)
        with scheduler(**pki.env(), **journal, port=str(first.port)) as second:
            for index in range(2):
                assert back(here, here.dial(), index).next("assignment").assignment.generation == 1
            assert "lost" not in second.log


def test_a_hosts_certificate_takes_the_places_of_its_own_nodes_alone(
    tmp_path: Path, running: Scheduler, pki: Pki
) -> None:
    (pki.directory / "host.json").write_text(
        pki.config.read_text().replace("client.p12", "host.p12"), encoding="utf-8"
    )
    own = {"MS_CONFIG_FILE": str(pki.directory / "host.json"), "MS_NODE_TIMEOUT": NODE_TIMEOUT_S}
    with host(tmp_path, running, pki, **own) as here:
        first = here.join("node-0")
        first.next("welcome")
        foreign = here.join("node-5")
        assert (
            "bound to the nodes 'node-0', 'node-1', not 'node-5'" in foreign.next("refused").refused.sentence
        )
        error = foreign.end()
        assert isinstance(error, DeniedError)
        assert error.by_scheduler
        second = here.join("node-1")
        first.next("assignment")
        second.next("assignment")


def test_a_scheduler_that_is_not_trusted_is_told_as_on_a_stream_of_its_own(
    tmp_path: Path, running: Scheduler, tmp_path_factory: pytest.TempPathFactory
) -> None:
    foreign = Pki.make(tmp_path_factory.mktemp("foreign"))
    with host(tmp_path, running, foreign, MS_NODE_TIMEOUT=NODE_TIMEOUT_S) as here:
        error = here.join("node-0").end()
        assert isinstance(error, DeniedError)
        assert not error.by_scheduler


def test_what_one_worker_does_wrong_ends_its_own_stream_alone(here: Host) -> None:
    good = here.join("node-0")
    good.next("welcome")
    bad = here.join("node-1")
    bad.next("welcome")
    bad.put(pb.WorkerMessage(join=pb.Join()))
    assert isinstance(bad.end(), MessageRejectedError)
    huge = here.join("node-1")
    huge.outbox.put(bytes(MAX_FROM_WORKER_BYTES + 1))
    assert isinstance(huge.end(), OSError)
    good.put(pb.WorkerMessage(leave=pb.Leave(generation=0, finished=False, reason="done")))
    good.next("ended")


def test_an_uplink_that_is_asked_to_end_stays_until_its_workers_have_left(here: Host) -> None:
    """As by a batch system that asks all processes of a step at once."""
    first = here.join("node-0")
    first.next("welcome")
    uplink = here.uplink
    assert uplink is not None
    uplink.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        uplink.wait(FAREWELL_S + 1.0)
    second = here.join("node-1")  # one that connects again on its way out
    second.next("assignment")
    for member in (first, second):
        member.put(pb.WorkerMessage(leave=pb.Leave(reason="SIGTERM")))
        member.next("ended")
        assert member.end() is None
    assert uplink.wait(LIMIT_S) == 0


def test_a_stream_that_is_closed_before_it_is_read_ends(here: Host) -> None:
    """As where a worker leaves, or is interrupted, while its stream is opened."""
    messages, close = here.dial()(SimpleQueue())
    close()
    close()
    assert not list(messages)
    here.join("node-0").next("welcome")


def test_a_stream_that_is_closed_while_it_is_read_ends_at_once(here: Host) -> None:
    """Whichever of its threads is faster: the one that sends ends by the same call."""
    for _ in range(20):
        messages, close = here.dial()(SimpleQueue())
        reading = threading.Thread(target=_read_to_the_end, args=(messages,), daemon=True)
        reading.start()
        close()
        reading.join(LIMIT_S)
        assert not reading.is_alive()


def _read_to_the_end(messages: Iterator[bytes]) -> None:
    with contextlib.suppress(ConnectionError):
        assert not list(messages)


def test_a_worker_of_another_launch_goes_directly(here: Host) -> None:
    with pytest.raises(AssertionError, match="went directly"):
        here.join("node-0", here.dial(MS_SCHED_HOST="localhost"))
    here.join("node-0").next("welcome")


def test_without_its_inner_end_a_door_sends_workers_directly_and_at_once(
    tmp_path: Path, running: Scheduler, pki: Pki
) -> None:
    here = Host(tmp_path, running, pki)
    here.inner.close()
    with pytest.raises(AssertionError, match="went directly"):  # not after the patience of ten seconds
        here.join("node-0")
    here.join("node-0", here.dial(here.direct())).next("welcome")
    here.end()


# ---------------------------------------------------------------- who may use a door

STRANGER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
own, theirs = socket.socketpair()
door = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(door, [sys.argv[2].encode()], [theirs.fileno()])
theirs.close()
own.settimeout(20)
print(len(own.recv(100)), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_stream_that_another_user_made_is_refused(here: Host, running: Scheduler, pki: Pki) -> None:
    here.join("node-0").next("welcome")
    request = f"127.0.0.1:{running.port}\n{pki.config}"
    stranger = subprocess.run(
        [sys.executable, "-c", STRANGER, str(here.outer.fileno()), request],
        pass_fds=[here.outer.fileno()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert stranger.stdout.split() == ["0"], stranger.stderr
    here.has_logged("it is not one of this user's processes'")


def test_a_door_has_no_name_by_which_another_process_finds_it(here: Host) -> None:
    inodes = {str(os.fstat(end.fileno()).st_ino) for end in (here.inner, here.outer)}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    mine = [line for line in lines if line[6] in inodes]
    assert mine
    assert all(len(line) == 7 for line in mine)  # an eighth field would be its name
    with pytest.raises(OSError):
        Path(f"/proc/self/fd/{here.outer.fileno()}").read_bytes()


def test_junk_at_the_door_and_on_a_stream_ends_nobody_else(here: Host) -> None:
    good = here.join("node-0")
    good.next("welcome")
    here.outer.send(b"junk")
    read_end, write_end = os.pipe()
    request = b"x" * 5000
    socket.send_fds(here.outer, [request], [read_end])
    for end in (read_end, write_end):
        os.close(end)
    bad = here.join("node-1")
    bad.next("welcome")
    good.put(pb.WorkerMessage(leave=pb.Leave(reason="done")))
    good.next("ended")


def test_a_door_that_is_full_keeps_nobody_from_the_scheduler(
    tmp_path: Path, running: Scheduler, pki: Pki
) -> None:
    """As where the uplink stands still for long and workers have tried often; each goes directly, once."""
    here = Host(tmp_path, running, pki)
    with contextlib.suppress(BlockingIOError):
        while True:
            here.outer.sendmsg([b"a stream"], [], socket.MSG_DONTWAIT)
    went: SimpleQueue[int] = SimpleQueue()

    def worker(index: int) -> None:
        def direct(_: SimpleQueue[bytes | None]) -> Stream:
            went.put(index)
            return (), lambda: None

        here.dial(direct)(SimpleQueue())

    threads = [threading.Thread(target=worker, args=(index,), daemon=True) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S / len(threads))
    try:
        assert sorted(went.get(timeout=0) for _ in range(went.qsize())) == list(range(8))
    finally:
        here.end()  # frees one that waits in the door


def test_a_variable_that_names_another_file_is_no_door(here: Host) -> None:
    number = here.outer.fileno()
    for value in (
        "",
        "x",
        f"{number}:1",
        "0:0",
        f"{number}",
        named(here.outer) + "x",
        f"9999999999:{number}",
        f"{number}:\u00b2",
        f"{number}:" + "9" * 5000,
    ):
        assert inherited({OUTER: value}, OUTER) is None
    stream, other = socket.socketpair()
    assert inherited({OUTER: named(stream)}, OUTER) is None
    door = inherited({OUTER: named(here.outer)}, OUTER)
    assert door is not None
    assert not os.get_inheritable(number)
    for end in (stream, other, door):
        end.close()


def test_a_flood_of_one_worker_does_not_hold_up_another(here: Host, running: Scheduler) -> None:
    flooding = here.join("node-0")
    flooding.next("welcome")
    beat = pb.WorkerMessage(heartbeat=pb.Heartbeat(step=1))
    for _ in range(60_000):
        flooding.put(beat)
    other = here.join("node-1")
    other.next("assignment")
    left = flooding.outbox.qsize()
    assert left, "the flood was over before the other came"
    wait_for(lambda: flooding.outbox.qsize() < left)
    assert "lost" not in running.log


def test_who_is_held_up_when_the_scheduler_dies_leaves_nothing_behind(here: Host, running: Scheduler) -> None:
    """Its stream is not read while it waits, so its end would not be seen."""
    assert here.uplink is not None
    kept = Path(f"/proc/{here.uplink.pid}/fd")
    calm = here.join("node-0")
    calm.next("welcome")
    before = len(list(kept.iterdir()))
    flooding = here.join("node-1")
    flooding.next("welcome")
    running.signal(signal.SIGSTOP)
    for _ in range(400):
        flooding.put(pb.WorkerMessage(request_leave=pb.RequestLeave(reason="x" * 2000)))
    wait_for(lambda: flooding.outbox.qsize() < 300)
    running.process.kill()
    for member in (flooding, calm):
        member.close()
    # Both members' ends and the pidfds that watch them; its connection has gone with the scheduler.
    wait_for(lambda: len(list(kept.iterdir())) < before)

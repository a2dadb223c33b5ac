"""Who gets in and who does not, and that those who do not disturb nobody."""

from __future__ import annotations

import gc
import socket
import ssl
import threading
import time
import traceback
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from muster.certs.runtime.tls import client_ssl_context
from muster.communicators import create_backend
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.tcp.backend import TcpBackend
from muster.communicators.tcp.communicator import TcpCommunicator
from muster.communicators.tcp.connection import PeerConnection
from muster.communicators.tcp.handshake import HELLO, REPLY, Hello, group_label
from muster.errors import (
    CollectiveMismatchError,
    CommunicatorAbortedError,
    CommunicatorError,
    FormationTimeoutError,
    MembershipChanged,
    PeerLostError,
    SecurityError,
    SettingsError,
    WorkerError,
)
from muster.wire.variables import TABLE
from tests.communicators.tcp.world import JOB, Office, World, make_world, together
from tests.waiting import LIMIT_S, wait_for

SHORT_S = 0.7


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    return Office(tmp_path_factory.mktemp("office"))


@pytest.fixture
def world(office: Office) -> Iterator[World]:
    made = make_world([office.credentials(node=f"n{rank}") for rank in range(2)])
    yield made
    made.close()


def check_works(communicators: list[TcpCommunicator]) -> None:
    """All-reduces, small and large, and closes."""
    for size in (1, 50_000):
        arrays = [np.full(size, rank + 1.0) for rank in range(len(communicators))]
        pairs = list(zip(communicators, arrays, strict=True))
        together([lambda c=c, a=a: c.all_reduce(a, a, ReduceOp.SUM) for c, a in pairs])  # type: ignore[misc]
        wanted = sum(range(1, len(arrays) + 1))
        assert all((array == wanted).all() for array in arrays)
    together([c.close for c in communicators])


def address_of(world: World, rank: int) -> tuple[str, int]:
    host, _, port = world.memberships[0].peers[rank].data_address.rpartition(":")
    return host, int(port)


def test_generations_follow_one_another_on_one_endpoint(world: World) -> None:
    for _ in range(3):
        check_works(world.connect())
        world.next()


def test_generations_that_break_leave_no_memory_behind(world: World) -> None:
    """An error and the communicator that it broke hold each other; the collector would come too late."""
    gc.disable()
    tracemalloc.start()
    try:
        for _generation in range(4):
            communicators = world.connect()
            communicators[1].abort(CommunicatorAbortedError("It is over."))
            array = np.ones(50_000)
            with pytest.raises(CommunicatorError):
                communicators[0].all_reduce(array, array, ReduceOp.SUM)
            together([each.close for each in communicators])
            world.next()
        assert tracemalloc.get_traced_memory()[0] < 8 << 20  # four generations' records are 16 MB
    finally:
        tracemalloc.stop()
        gc.enable()


def test_who_is_cut_off_amid_its_data_learns_what_the_other_called(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_world([None, None])
    first, second = made.connect()
    other_is_gone, write = threading.Event(), PeerConnection.write

    def write_slowly(self: PeerConnection, view: memoryview) -> int:
        """Rank 0 is still sending its data when rank 1 has seen what it called, and has hung up."""
        count = write(self, view)
        if self.peer == 1:
            other_is_gone.wait(10)
        return count

    def other() -> None:
        try:
            second.all_reduce(np.ones(1 << 20), np.ones(1 << 20), ReduceOp.MAX)
        finally:
            other_is_gone.set()

    monkeypatch.setattr(PeerConnection, "write", write_slowly)
    array = np.ones(1 << 20)
    errors = together([partial(first.all_reduce, array, array, ReduceOp.MIN), other])
    made.close()
    assert [type(error) for error in errors] == [CollectiveMismatchError] * 2, errors


def test_who_waits_for_a_connection_learns_that_the_others_have_failed() -> None:
    """Of six ranks, 0 and 3 have none between them until one sends the other something."""
    made = make_world([None] * 6)
    communicators = made.connect()
    communicators[3].abort(CommunicatorAbortedError("It is over."))
    calls = [
        partial(communicators[0].recv, np.ones(1), 3),
        *(communicators[rank].barrier for rank in (1, 2, 4, 5)),
    ]
    errors = together(calls)
    made.close()
    assert [type(error) for error in errors] == [PeerLostError] * 5, errors


@pytest.mark.parametrize("size", [2, 3])
def test_data_may_go_in_tls_records_or_in_plaintext(office: Office, size: int) -> None:
    for credentials, seal in ((office.credentials(), False), (None, True)):
        made = make_world([credentials] * size, seal=seal)
        check_works(made.connect())
        made.close()


def sending_threads() -> set[threading.Thread]:
    """Those of this process; others, of earlier tests, may begin and end at any time."""
    return {thread for thread in threading.enumerate() if thread.name == "muster-tcp-send"}


@pytest.mark.parametrize("seal", [True, False])
def test_one_connection_of_openssl_is_used_by_one_thread_at_a_time(
    office: Office, seal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(4)))
    made = make_world([office.credentials()] * 2, seal=seal)
    communicators = made.connect()
    before = sending_threads()
    sums = [np.ones(1 << 19) for _ in communicators]
    together(
        [
            partial(each.all_reduce, array, array, ReduceOp.SUM)
            for each, array in zip(communicators, sums, strict=True)
        ]
    )
    more = sending_threads() - before
    together([each.close for each in communicators])
    made.close()
    assert all((array == 2).all() for array in sums)
    assert len(more) == (2 if seal else 0)


def test_ends_that_disagree_about_sealing_do_not_connect(office: Office) -> None:
    made = make_world([office.credentials(), office.credentials()])
    other = create_backend("tcp", tls=office.credentials(), job_id=JOB, seal=False)
    assert isinstance(other, TcpBackend)
    made.backends[1].close()
    made.backends[1] = other
    address = other.open_endpoint("127.0.0.1")
    for rank, membership in enumerate(made.memberships):
        peers = (membership.peers[0], replace(membership.peers[1], data_address=address))
        made.memberships[rank] = replace(membership, peers=peers)
    errors = made.connect(timeout_s=SHORT_S)
    made.close()
    assert all(isinstance(error, WorkerError) for error in errors)


def test_garbage_silence_and_half_handshakes_disturb_nobody(world: World) -> None:
    sockets = []
    for rank in (0, 1):
        for payload in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\0" * 5000):
            for _ in range(5):
                sock = socket.create_connection(address_of(world, rank))
                sock.sendall(payload)
                sockets.append(sock)
    check_works(world.connect())
    for sock in sockets:
        sock.close()


def hello_over_tls(world: World, context: ssl.SSLContext, hello: bytes) -> bytes:
    """Says hello to rank 0 and returns what it answers before it hangs up."""
    with (
        socket.create_connection(address_of(world, 0), timeout=LIMIT_S) as raw,
        context.wrap_socket(raw) as sock,
    ):
        sock.sendall(hello)
        sock.settimeout(SHORT_S)
        try:
            return sock.recv(REPLY.size)
        except (OSError, ssl.SSLError):
            return b""


def test_a_member_of_an_older_generation_gets_no_answer(world: World, office: Office) -> None:
    old = world.memberships[1]
    world.next()
    communicators = world.connect()
    hello = Hello(old.generation, 1, 0, group_label(old, "world"), b"n" * 32)
    context = client_ssl_context(office.credentials(node="n1"))
    assert hello_over_tls(world, context, hello.encode()) == b""
    check_works(communicators)


def test_a_right_hello_without_the_unique_id_gets_a_challenge_but_never_in(
    world: World, office: Office
) -> None:
    communicators = world.connect()
    mine = world.memberships[1]
    hello = Hello(mine.generation, 1, 0, group_label(mine, "world"), b"n" * 32)
    context = client_ssl_context(office.credentials(node="n1"))
    with (
        socket.create_connection(address_of(world, 0), timeout=LIMIT_S) as raw,
        context.wrap_socket(raw) as sock,
    ):
        sock.sendall(hello.encode())
        assert len(sock.recv(REPLY.size)) == REPLY.size
        sock.sendall(b"p" * 64)
        assert sock.recv(1) == b""
    check_works(communicators)


@pytest.mark.parametrize(
    ("role", "job", "node"),
    [("worker", JOB, "n0"), ("scheduler", JOB, None), ("operator", JOB, None), ("worker", "job-b", None)],
)
def test_the_wrong_certificate_gets_no_challenge(
    world: World, office: Office, role: str, job: str, node: str | None
) -> None:
    communicators = world.connect()
    mine = world.memberships[1]
    hello = Hello(mine.generation, 1, 0, group_label(mine, "world"), b"n" * 32)
    context = client_ssl_context(office.credentials(role, job, node))
    assert hello_over_tls(world, context, hello.encode()) == b""
    check_works(communicators)


def test_certificates_of_another_authority_do_not_meet(office: Office, tmp_path: Path) -> None:
    made = make_world([office.credentials(), Office(tmp_path).credentials()])
    errors = made.fail_to_connect()
    made.close()
    kinds = {type(error) for error in errors}
    assert SecurityError in kinds
    assert kinds <= {SecurityError, FormationTimeoutError}


def test_the_dialer_refuses_an_impostor_at_the_address(office: Office) -> None:
    made = make_world([office.credentials(node="somebody-else"), office.credentials(node="n1")])
    errors = made.fail_to_connect()
    made.close()
    assert any(isinstance(error, SecurityError) and "somebody-else" in str(error) for error in errors)


def test_members_with_other_unique_ids_do_not_meet(world: World) -> None:
    world.memberships[1] = replace(world.memberships[1], unique_ids=world.backends[1].mint_unique_ids(1))
    errors = world.fail_to_connect()
    assert all(isinstance(error, (SecurityError, FormationTimeoutError)) for error in errors)
    assert any("unique id" in str(error) for error in errors)


def test_who_does_not_come_is_named(world: World) -> None:
    (error,) = world.connect(ranks=[0], timeout_s=0.2)
    assert isinstance(error, FormationTimeoutError)
    assert "rank 1 (node n1 on host)" in str(error)


def test_an_early_member_is_kept_until_the_late_one_enters(world: World) -> None:
    results = together(
        [lambda: world.connect(ranks=[0])[0], lambda: world.connect(ranks=[1])[0]],
    )
    check_works(results)


@pytest.mark.parametrize("early", [0, 1])
def test_who_waits_for_long_is_let_go_and_comes_again(world: World, early: int) -> None:
    """One of the two dials: the other's endpoint parks that connection, and must not turn in circles."""
    late, time_out_s = world.backends[1 - early].endpoint, 0.2
    late.parked_timeout_s = time_out_s

    def enter_late() -> object:
        time.sleep(5 * time_out_s)  # as long as some parked connections live
        wait_for(lambda: all(each.expires > time.monotonic() for each in list(late.handshakes)))
        return world.connect(ranks=[1 - early])[0]

    results = together([lambda: world.connect(ranks=[early])[0], enter_late])
    check_works(sorted(results, key=lambda each: each.rank))


def test_connecting_can_be_cancelled(world: World) -> None:
    change = SettingsError("the generation is over")
    with pytest.raises(SettingsError, match="over"):
        world.backends[0].connect(world.memberships[0], timeout_s=LIMIT_S, cancelled=lambda: change)


def test_a_hello_for_another_rank_is_refused(world: World, office: Office) -> None:
    communicators = world.connect()
    mine = world.memberships[1]
    context = client_ssl_context(office.credentials(node="n1"))
    for from_rank, to_rank in ((1, 1), (7, 0)):
        hello = Hello(mine.generation, from_rank, to_rank, group_label(mine, "world"), b"n" * 32)
        assert hello_over_tls(world, context, hello.encode()) == b""
    assert hello_over_tls(world, context, b"x" * HELLO.size) == b""
    check_works(communicators)


def test_a_generation_without_a_unique_id_is_refused(world: World) -> None:
    with pytest.raises(SecurityError, match="unique id"):
        world.backends[0].connect(
            replace(world.memberships[0], unique_ids=()), timeout_s=1, cancelled=lambda: None
        )


def test_an_error_that_is_raised_again_and_again_shows_the_last_time_only(world: World) -> None:
    first, second = world.connect()
    first.abort(MembershipChanged("node-1 left", generation=5))
    second.close()
    depths = set()
    for _ in range(3):
        with pytest.raises(MembershipChanged) as caught:
            first.barrier()
        depths.add(len(list(traceback.walk_tb(caught.value.__traceback__))))
    assert len(depths) == 1


def test_unique_ids_are_random_and_not_shown(world: World) -> None:
    one, two = world.backends[0].mint_unique_ids(2)
    assert len(one) == len(two) == 128
    assert one != two
    assert "unique" not in repr(world.memberships[0])


def test_plaintext_stays_on_loopback() -> None:
    backend = TcpBackend(tls=None)
    with pytest.raises(SecurityError, match="loopback"):
        backend.open_endpoint("0.0.0.0")
    backend.close()


def test_an_ipv6_endpoint_says_so() -> None:
    backend = TcpBackend(tls=None)
    try:
        assert backend.open_endpoint("::1").startswith("[::1]:")
    finally:
        backend.close()


def test_a_removed_backend_is_answered_with_what_became_of_it() -> None:
    with pytest.raises(SettingsError) as caught:
        create_backend("gloo", tls=None)
    assert TABLE["MS_BACKEND"].removed["gloo"] in caught.value.message
    assert caught.value.exit_code == 2


def test_unknown_backends_are_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="nccl, tcp"):
        create_backend("mpi", tls=None)

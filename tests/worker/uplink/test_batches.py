"""What leaves when: pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.worker.uplink.batches import BATCH_BYTES, MAX_WAITING, Batches, Item, Sent, StreamEnded


def beat(batches: Batches, worker: int, message: bytes = b"beat") -> None:
    batches.add(worker, message, heartbeat=True)


def taken(batches: Batches) -> list[tuple[int, bytes]]:
    return [(item.worker, item.message) for item in batches.take() if isinstance(item, Sent)]


def test_a_message_leaves_at_once_and_takes_waiting_heartbeats_along() -> None:
    batches = Batches()
    beat(batches, 1)
    beat(batches, 2)
    batches.take()
    beat(batches, 1)
    assert not batches.due
    batches.add(2, b"built", heartbeat=False)
    assert batches.due
    assert taken(batches) == [(1, b"beat"), (2, b"built")]
    assert not batches.due


def test_heartbeats_leave_together_once_everybody_has_beaten_who_did_last_time() -> None:
    batches = Batches()
    for worker in (1, 2, 3):
        beat(batches, worker)
    batches.take()
    for worker in (1, 2):
        beat(batches, worker)
        assert not batches.due
    beat(batches, 3)
    assert batches.due
    assert [worker for worker, _ in taken(batches)] == [1, 2, 3]


def test_who_beats_no_more_is_waited_for_once_and_for_one_interval() -> None:
    batches = Batches()
    beat(batches, 1)
    beat(batches, 2)
    batches.take()
    beat(batches, 1)
    assert not batches.due
    beat(batches, 1)  # 2 stands still
    assert batches.due
    assert taken(batches) == [(1, b"beat"), (1, b"beat")]
    beat(batches, 1)
    assert batches.due


def test_who_has_gone_is_waited_for_no_more() -> None:
    batches = Batches()
    beat(batches, 1)
    beat(batches, 2)
    batches.take()
    beat(batches, 1)
    batches.end(2, "", may_return=False)
    assert batches.due
    assert batches.take() == [Sent(1, b"beat"), StreamEnded(2)]
    beat(batches, 1)
    assert batches.due


def test_of_whom_the_scheduler_has_let_go_nothing_is_sent() -> None:
    batches = Batches()
    beat(batches, 1)
    beat(batches, 2)
    batches.take()
    beat(batches, 2)
    batches.forget(2)
    beat(batches, 1)
    assert taken(batches) == [(1, b"beat")]


def test_a_flood_of_one_worker_fills_its_own_queue_and_holds_up_nobody() -> None:
    batches = Batches()
    count = 0
    while batches.has_room(1):
        batches.add(1, b"x" * 10_000, heartbeat=False)
        count += 1
    assert count == MAX_WAITING
    assert batches.has_room(2)
    batches.add(2, b"built", heartbeat=False)
    batch = batches.take()
    assert Sent(2, b"built") in batch
    assert sum(len(item.message) for item in batch if isinstance(item, Sent)) <= BATCH_BYTES
    assert batches.due  # the rest


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("mbe"), st.integers(1, 4), st.integers(0, BATCH_BYTES)),
            st.just(("t", 0, 0)),
        ),
        max_size=60,
    )
)
def test_nothing_is_lost_doubled_or_out_of_order(steps: list[tuple[str, int, int]]) -> None:
    batches, put, out = Batches(), dict[int, list[Item]](), list[Item]()
    for kind, worker, size in steps:
        if kind == "t":
            out += batches.take()
        elif not batches.has_room(worker) or (put.get(worker) and isinstance(put[worker][-1], StreamEnded)):
            continue
        elif kind == "e":
            batches.end(worker, "gone", may_return=False)
            put.setdefault(worker, []).append(StreamEnded(worker, "gone"))
        else:
            batches.add(worker, bytes(size), heartbeat=kind == "b")
            put.setdefault(worker, []).append(Sent(worker, bytes(size)))
    for _ in range(len(steps) + 1):
        out += batches.take()
    for worker in range(1, 5):
        assert [item for item in out if item.worker == worker] == put.get(worker, [])

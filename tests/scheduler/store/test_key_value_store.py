"""One namespace of the store: TCPStore's answers, waits, deadlines, quotas, and each change once."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Sequence

import pytest

from muster.programs.history import ChangeHistory
from muster.scheduler.store import wire
from muster.scheduler.store.key_value_store import (
    Answer,
    Effect,
    EffectKind,
    EndedError,
    KeyValueStore,
    Member,
    MemoryBudget,
    Operation,
    OperationKind,
    QuotaError,
    Quotas,
    Returned,
    Status,
)
from muster.wire.v1 import store_pb2 as pb
from tests.scheduler.core.test_linear import work

A, B = ("a", 1), ("b", 1)


class Rig:
    """A namespace with its members' histories, as their processes keep them."""

    def __init__(self, **options: object) -> None:
        self.answers: list[tuple[Member, Answer]] = []
        self.ids = {A: 0, B: 0}
        self.histories = {A: ChangeHistory(), B: ChangeHistory()}
        self.store = KeyValueStore(lambda member, answer: self.answers.append((member, answer)), **options)  # type: ignore[arg-type]

    def begin(
        self,
        member: Member,
        kind: OperationKind,
        keys: Sequence[bytes] = (),
        values: Sequence[bytes] = (),
        *,
        amount: int = 0,
        timeout_s: float = 0.0,
        now: float = 0.0,
    ) -> Operation:
        self.ids[member] += 1
        operation = Operation(self.ids[member], kind, tuple(keys), tuple(values), amount, timeout_s)
        before = len(self.answers)
        self.store.execute(member, operation, now)
        for to, answer in self.answers[before:]:
            if to == member and answer.id == operation.id:
                said = pb.StoreOperation(
                    id=operation.id, kind=int(kind), keys=keys, values=values, amount=amount  # type: ignore[arg-type]
                )  # fmt: skip
                self.histories[member].note(said, _said(answer))
        return operation

    def ask(
        self, member: Member, kind: OperationKind, keys: Sequence[bytes] = (), *values: bytes, amount: int = 0
    ) -> Answer:
        operation = self.begin(member, kind, keys, values, amount=amount)
        [answer] = [each for to, each in self.answers if to == member and each.id == operation.id]
        return answer

    def after_restart(self) -> Rig:
        """The namespace of a scheduler that was started again, put together from what members hand in."""
        again = Rig(members=(A, B))
        again.ids, again.histories = self.ids, self.histories
        for member, history in self.histories.items():
            history.hear(self.store.number)
            assert again.store.wants_replay(member)
            returned = Returned()
            for part in history.parts():
                if wire.add_replay(returned, part):
                    again.store.hand_in(member, returned, 0.0)
        return again

    def contents(self) -> object:
        keys = sorted(self.ask(A, OperationKind.LIST_KEYS).values)
        queues = [self.ask(A, OperationKind.QUEUE_LEN, [b"q%d" % i]).amount for i in range(3)]
        return dict(zip(keys, self.ask(A, OperationKind.MULTI_GET, keys).values, strict=True)), queues


def _said(answer: Answer) -> pb.StoreAnswer:
    return pb.StoreReply.FromString(wire.encode_answers([answer], 0)).answers[0]


def test_a_wait_is_answered_when_all_its_keys_are_there_and_brings_a_single_value_along() -> None:
    rig = Rig()
    both = rig.begin(A, OperationKind.WAIT, [b"x", b"y"])
    one = rig.begin(A, OperationKind.WAIT, [b"x"])
    rig.ask(B, OperationKind.SET, [b"x"], b"1")
    assert rig.answers[0] == (A, Answer(one.id, values=(b"1",)))
    rig.ask(B, OperationKind.ADD, [b"y"], amount=5)
    assert (A, Answer(both.id)) in rig.answers


def test_a_wait_ends_at_its_deadline_and_not_before() -> None:
    rig = Rig()
    wait = rig.begin(A, OperationKind.WAIT, [b"x"], timeout_s=2.0, now=10.0)
    assert rig.store.deadline() == 12.0
    rig.store.expire(11.9)
    assert not rig.answers
    rig.store.expire(12.0)
    assert rig.answers == [(A, Answer(wait.id, Status.TIMEOUT))]
    assert rig.store.deadline() is None
    rig.ask(B, OperationKind.SET, [b"x"], b"1")
    assert len(rig.answers) == 2


def test_a_wait_that_nobody_waits_for_is_not_answered() -> None:
    rig = Rig()
    wait = rig.begin(A, OperationKind.WAIT, [b"x"], timeout_s=1.0)
    rig.store.cancel(A, wait.id)
    rig.ask(B, OperationKind.SET, [b"x"], b"1")
    rig.store.expire(5.0)
    assert [to for to, _ in rig.answers] == [B]


def test_an_element_of_a_queue_wakes_one_that_waits() -> None:
    rig = Rig()
    first, second = rig.begin(A, OperationKind.WAIT, [b"q0"]), rig.begin(B, OperationKind.WAIT, [b"q0"])
    rig.ask(B, OperationKind.QUEUE_PUSH, [b"q0"], b"1")
    assert (A, Answer(first.id)) in rig.answers
    assert (B, Answer(second.id)) not in rig.answers
    rig.ask(A, OperationKind.QUEUE_PUSH, [b"q0"], b"2")
    assert (B, Answer(second.id)) in rig.answers


def test_corner_cases_are_those_of_tcpstore() -> None:
    rig = Rig()
    assert rig.ask(A, OperationKind.COMPARE_SET, [b"k"], b"", b"1").values == (b"1",)
    assert rig.ask(A, OperationKind.COMPARE_SET, [b"k"], b"2", b"3").values == (b"1",)
    assert rig.ask(A, OperationKind.COMPARE_SET, [b"new"], b"2", b"3").values == (b"2",)  # it is not there
    assert rig.ask(A, OperationKind.CHECK).amount == 1
    assert rig.ask(A, OperationKind.GET, [b"new"]).values == ()
    rig.ask(A, OperationKind.SET, [b"n"], b" 41 or so")
    assert rig.ask(A, OperationKind.ADD, [b"n"], amount=1).amount == 42
    rig.ask(A, OperationKind.SET, [b"n"], str(2**63 - 1).encode())
    assert rig.ask(A, OperationKind.ADD, [b"n"], amount=1).amount == -(2**63)
    rig.ask(A, OperationKind.QUEUE_PUSH, [b"q0"], b"x")
    assert rig.ask(A, OperationKind.CHECK, [b"q0"]).amount == 1
    assert rig.ask(A, OperationKind.DELETE, [b"q0"]).amount == 0
    assert rig.ask(A, OperationKind.NUM_KEYS).amount == 2
    assert rig.ask(A, OperationKind.NUM_KEYS, [b"k"]).amount == 1
    assert rig.ask(A, OperationKind.QUEUE_POP, [b"q0"]).values == (b"x",)
    assert rig.ask(A, OperationKind.QUEUE_POP, [b"q0"]) == Answer(rig.ids[A])


def test_a_value_that_is_no_number_is_refused_in_words_and_kept() -> None:
    rig = Rig()
    rig.ask(A, OperationKind.SET, [b"k"], b"secret")
    answer = rig.ask(A, OperationKind.ADD, [b"k"], amount=1)
    assert (answer.status, answer.sentence) == (Status.REFUSED, "add() needs a key whose value is a number.")
    assert rig.ask(A, OperationKind.GET, [b"k"]).values == (b"secret",)


@pytest.mark.parametrize(
    ("quotas", "words"),
    [
        (Quotas(keys=2), "at most 2 keys"),
        (Quotas(size_bytes=1 << 20), "at most 1 MiB"),
    ],
)
def test_quotas_refuse_in_words_and_deleting_makes_room(quotas: Quotas, words: str) -> None:
    rig = Rig(quotas=quotas)
    value = bytes(400_000)
    for key in (b"1", b"2"):
        assert rig.ask(A, OperationKind.SET, [key], value).status is Status.OK
    refused = rig.ask(A, OperationKind.SET, [b"3"], value)
    assert refused.status is Status.REFUSED
    assert words in refused.sentence
    assert rig.ask(A, OperationKind.CHECK, [b"3"]).amount == 0
    rig.ask(A, OperationKind.DELETE, [b"1"])
    assert rig.ask(A, OperationKind.SET, [b"3"], value).status is Status.OK


def test_namespaces_share_a_budget_and_give_it_back() -> None:
    budget = MemoryBudget(limit_bytes=1000)
    first, second = Rig(budget=budget), Rig(budget=budget)
    assert first.ask(A, OperationKind.SET, [b"k"], bytes(800)).status is Status.OK
    assert "of this scheduler" in second.ask(A, OperationKind.SET, [b"k"], bytes(800)).sentence
    first.store.end("over")
    assert budget.used_bytes == 0
    assert second.ask(A, OperationKind.SET, [b"k"], bytes(800)).status is Status.OK


def _asked(rig: Rig, member: Member, kind: OperationKind, prefix: bytes = b"") -> Callable[[], Answer | None]:
    """Asks about all keys; returns what gives the answer once it is there."""
    operation = rig.begin(member, kind, [prefix])
    return lambda: next((each for to, each in rig.answers if (to, each.id) == (member, operation.id)), None)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_asked_about_all_keys_in_turns_is_answered_as_of_one_moment(seed: int) -> None:
    rig, rng = Rig(quotas=Quotas(turn_keys=3)), random.Random(seed)
    keys = [b"%s%d" % (prefix, number) for prefix in (b"x/", b"y/") for number in range(15)]
    held = set(rng.sample(keys, 20))
    rig.ask(A, OperationKind.MULTI_SET, sorted(held), *[b""] * len(held))
    for _ in range(3):
        listed, counted = (
            _asked(rig, A, OperationKind.LIST_KEYS, b"x/"),
            _asked(rig, B, OperationKind.NUM_KEYS, b"x/"),
        )
        moments = [{key for key in held if key.startswith(b"x/")}]
        while rig.store.looking:
            rig.store.turn()
            for key in rng.sample(keys, 2):
                held ^= {key}
                rig.ask(
                    A,
                    OperationKind.SET if key in held else OperationKind.DELETE,
                    [key],
                    *[b""] * (key in held),
                )
                moments.append({key for key in held if key.startswith(b"x/")})
        list_, count = listed(), counted()
        assert list_ is not None and count is not None
        assert len(list_.values) == list_.amount and set(list_.values) in moments
        assert count.amount in map(len, moments)
        # From now on the number is known: it is answered without a turn, and follows the keys.
        assert rig.ask(A, OperationKind.NUM_KEYS, [b"x/"]).amount == len(moments[-1])
        assert rig.ask(A, OperationKind.NUM_KEYS).amount == len(held)


def test_questions_about_all_keys_come_in_turns_and_who_has_gone_gets_none() -> None:
    rig = Rig(quotas=Quotas(turn_keys=2, waits=3))
    rig.ask(A, OperationKind.MULTI_SET, [b"1", b"2", b"3"], b"", b"", b"")
    first, cancelled, last = (_asked(rig, A, OperationKind.LIST_KEYS) for _ in range(3))
    assert "for 3 things" in rig.ask(A, OperationKind.LIST_KEYS).sentence
    rig.store.cancel(A, rig.ids[A] - 2)
    others = _asked(rig, B, OperationKind.LIST_KEYS)
    while not others():
        rig.store.turn()
    assert first() is not None and last() is None
    while rig.store.looking:
        rig.store.turn()
    assert last() is not None and cancelled() is None
    dropped = _asked(rig, A, OperationKind.LIST_KEYS)
    rig.store.turn()
    rig.store.drop_looks(A)
    again = _asked(rig, A, OperationKind.LIST_KEYS)
    while rig.store.looking:
        rig.store.turn()
    assert again() is not None and dropped() is None


@pytest.mark.parametrize("turn_keys", [2, 1000])
def test_a_list_of_keys_that_is_too_large_is_refused_in_words_and_a_shorter_one_is_not(
    turn_keys: int,
) -> None:
    rig = Rig(quotas=Quotas(turn_keys=turn_keys, answer_bytes=1 << 20))
    for number in range(300):
        rig.ask(A, OperationKind.SET, [b"%d/" % (number % 2) + b"%d" % number + bytes(4000)], b"")
    every, half = _asked(rig, A, OperationKind.LIST_KEYS), _asked(rig, A, OperationKind.LIST_KEYS, b"0/")
    while rig.store.looking:
        rig.store.turn()
    refused, answer = every(), half()
    assert refused is not None and answer is not None
    assert refused.status is Status.REFUSED and "at most 1 MiB" in refused.sentence
    assert not refused.values and len(answer.values) == 150


@pytest.mark.parametrize(("key", "value"), [(bytes(5000), b""), (b"k", bytes(800_000))])
def test_what_is_too_large_is_refused_without_being_shown(key: bytes, value: bytes) -> None:
    answer = Rig().ask(A, OperationKind.SET, [key], value)
    assert answer.status is Status.REFUSED
    assert str(max(len(key), len(value))) in answer.sentence


def test_waits_and_unconfirmed_answers_are_bounded() -> None:
    rig = Rig(quotas=Quotas(waits=2, unconfirmed=2))
    for _ in range(2):
        rig.begin(A, OperationKind.WAIT, [b"x"])
    assert "may wait for 2" in rig.ask(A, OperationKind.WAIT, [b"x"]).sentence
    for _ in range(2):
        rig.ask(B, OperationKind.ADD, [b"n"], amount=1)
    with pytest.raises(QuotaError, match="unconfirmed"):
        rig.begin(B, OperationKind.ADD, [b"n"], amount=1)


def test_what_a_member_waits_for_is_bounded_in_bytes() -> None:
    rig = Rig(quotas=Quotas(kept_bytes=1 << 20))
    long = [b"%d" % number + bytes(4000) for number in range(200)]
    rig.begin(A, OperationKind.WAIT, long)
    assert "keys of 1 MiB" in rig.ask(A, OperationKind.WAIT, long).sentence
    rig.begin(B, OperationKind.WAIT, long)  # each has its own
    rig.store.cancel(A, 1)
    short = [b"%d" % number for number in range(1000)]
    rig.begin(A, OperationKind.WAIT, short)
    assert "keys of 1 MiB" in rig.ask(A, OperationKind.WAIT, [b"x" + key for key in 2 * short]).sentence
    rig.store.cancel(A, 3)
    rig.begin(A, OperationKind.WAIT, long)


def test_answers_kept_for_a_member_are_bounded_in_bytes() -> None:
    """What is popped stands in the store no more, and is kept until it is confirmed."""
    rig = Rig(quotas=Quotas(kept_bytes=1 << 20))
    for turn in range(4):
        for _ in range(2):
            rig.ask(B, OperationKind.QUEUE_PUSH, [b"q"], bytes(500_000))
            assert rig.ask(A, OperationKind.QUEUE_POP, [b"q"]).amount == 1
        if turn < 3:
            rig.store.confirm(A, rig.ids[A] + 1)
    rig.ask(B, OperationKind.QUEUE_PUSH, [b"q"], bytes(500_000))
    with pytest.raises(QuotaError, match="answers of 1 MiB"):
        rig.begin(A, OperationKind.QUEUE_POP, [b"q"])


def test_waits_that_are_cancelled_leave_nothing_behind() -> None:
    rig = Rig()
    tracemalloc.start()
    try:
        for number in range(3000):
            rig.begin(A, OperationKind.WAIT, [bytes(4000)], timeout_s=1e6)
            rig.store.cancel(A, number + 1)
        assert tracemalloc.get_traced_memory()[0] < 2 << 20
    finally:
        tracemalloc.stop()


def test_waits_of_one_member_for_the_same_keys_cost_each_its_own_when_they_end() -> None:
    """Counted are the bytecodes: ten times as many waits on the same keys, all of them cancelled."""

    def cost_of(waits: int) -> int:
        rig, keys = Rig(), [b"%d" % number for number in range(4)]
        for _ in range(waits):
            rig.begin(A, OperationKind.WAIT, keys)

        def cancel_all() -> None:
            for number in range(waits):
                rig.store.cancel(A, number + 1)

        return work(cancel_all)

    assert cost_of(500) < 12 * cost_of(50)


def test_members_that_are_gone_are_forgotten_but_for_the_last() -> None:
    answers: list[tuple[Member, Answer]] = []
    store = KeyValueStore(lambda member, answer: answers.append((member, answer)))
    members = [(f"node-{number}", 1) for number in range(100)]
    tracemalloc.start()
    try:
        for member in members:
            store.execute(
                member, Operation(1, OperationKind.WAIT, tuple(bytes(4000) for _ in range(100))), 0.0
            )
            store.forget_gone({member}, keep=2)
        assert tracemalloc.get_traced_memory()[0] < 2 << 20
    finally:
        tracemalloc.stop()
    store.execute(A, Operation(1, OperationKind.SET, (bytes(4000),), (b"v",)), 0.0)
    assert [to for to, answer in answers if answer.id == 1 and to != A] == members[-3:]


def test_what_is_repeated_after_a_broken_stream_is_carried_out_once() -> None:
    rig = Rig()
    operation = rig.begin(A, OperationKind.ADD, [b"n"], amount=1)
    rig.store.execute(A, operation, 0.0)  # its answer was lost
    assert [answer for _, answer in rig.answers] == [Answer(1, amount=1, number=1)] * 2
    rig.store.confirm(A, operation.id + 1)
    assert rig.ask(A, OperationKind.GET, [b"n"]).values == (b"1",)
    wait = rig.begin(A, OperationKind.WAIT, [b"x"])
    rig.store.execute(A, wait, 0.0)
    rig.ask(B, OperationKind.SET, [b"x"], b"1")
    assert [answer.id for to, answer in rig.answers if to == A].count(wait.id) == 1


def test_the_end_of_a_generation_ends_its_store_for_good() -> None:
    rig = Rig()
    rig.begin(A, OperationKind.WAIT, [b"x"], timeout_s=1.0)
    rig.store.end("rank 1 is lost")
    rig.store.end("another reason")
    assert rig.store.deadline() is None
    with pytest.raises(EndedError, match="rank 1 is lost"):
        rig.begin(A, OperationKind.SET, [b"x"], [b"1"])


# ---------------------------------------------------------------- a scheduler that was started again


def _random_change(rig: Rig, rng: random.Random) -> None:
    member, key = rng.choice((A, B)), b"k%d" % rng.randrange(4)
    queue, value = b"q%d" % rng.randrange(3), b"%d" % rng.randrange(100)
    changes: tuple[Callable[[], object], ...] = (
        lambda: rig.ask(member, OperationKind.SET, [key], value),
        lambda: rig.ask(member, OperationKind.ADD, [key], amount=1),
        lambda: rig.ask(member, OperationKind.APPEND, [key], value),
        lambda: rig.ask(member, OperationKind.DELETE, [key]),
        lambda: rig.ask(member, OperationKind.COMPARE_SET, [key], value, b"7"),
        lambda: rig.ask(member, OperationKind.MULTI_SET, [b"k0", b"k1"], value, b"5"),
        lambda: rig.ask(member, OperationKind.QUEUE_PUSH, [queue], value),
        lambda: rig.ask(member, OperationKind.QUEUE_POP, [queue]),
    )
    rng.choice(changes)()


@pytest.mark.parametrize("seed", range(40))
def test_a_namespace_is_put_together_as_it_was(seed: int) -> None:
    rig, rng = Rig(), random.Random(seed)
    for _ in range(3):
        for _ in range(rng.randrange(40)):
            _random_change(rig, rng)
        before, number = rig.contents(), rig.store.number
        rig = rig.after_restart()
        assert rig.contents() == before
        assert rig.store.number == number


def test_what_is_asked_before_all_are_back_waits_for_them() -> None:
    rig = Rig()
    rig.ask(B, OperationKind.ADD, [b"n"], amount=41)
    again = Rig(members=(A, B))
    asked = again.begin(A, OperationKind.ADD, [b"n"], amount=1)
    again.store.hand_in(A, Returned(), 0.0)
    assert not again.answers
    [part] = rig.histories[B].parts()
    returned = Returned()
    wire.add_replay(returned, part)
    again.store.hand_in(B, returned, 0.0)
    assert again.answers == [(A, Answer(asked.id, amount=42, number=2))]


def test_what_members_bring_after_a_restart_is_bounded() -> None:
    rig = Rig(members=(A, B), quotas=Quotas(size_bytes=1000))
    for operation_id in (1, 1, 1, 2):  # repeated on newer streams
        rig.store.execute(A, Operation(operation_id, OperationKind.SET, (b"k",), (bytes(400),)), 0.0)
    with pytest.raises(QuotaError, match="under way after a restart"):
        rig.store.execute(A, Operation(3, OperationKind.SET, (b"k",), (bytes(400),)), 0.0)
    rig.store.cancel(A, 2)
    rig.store.execute(A, Operation(3, OperationKind.SET, (b"k",), (bytes(400),)), 0.0)
    returned = Returned()
    for number in range(1, 9):
        rig.store.check_returned(returned)
        returned.add(Effect(number, EffectKind.SET, b"k", b"v"))
    with pytest.raises(QuotaError, match="may hand in"):
        rig.store.check_returned(returned)


def test_a_change_whose_answer_never_came_but_that_others_saw_ends_the_generation() -> None:
    rig = Rig()
    rig.ask(A, OperationKind.ADD, [b"n"], amount=1)
    rig.histories[A] = ChangeHistory()  # the answer was on its way when the scheduler went
    rig.ask(B, OperationKind.ADD, [b"n"], amount=1)
    with pytest.raises(EndedError, match="cannot be restored"):
        rig.after_restart()


def test_who_has_finished_is_not_waited_for() -> None:
    rig = Rig()
    rig.ask(A, OperationKind.SET, [b"k"], b"1")
    again = Rig(members=(A, B))
    asked = again.begin(A, OperationKind.GET, [b"k"])
    returned = Returned()
    [part] = rig.histories[A].parts()
    wire.add_replay(returned, part)
    again.store.hand_in(A, returned, 0.0)
    again.store.excuse([A], 0.0)
    assert again.answers == [(A, Answer(asked.id, values=(b"1",)))]


def test_too_long_a_history_says_so_instead_of_growing() -> None:
    rig = Rig()
    rig.histories[A] = ChangeHistory(max_entries=2)
    for i in range(3):
        rig.ask(A, OperationKind.SET, [b"%d" % i], b"1")
    [part] = rig.histories[A].parts()
    assert part.incomplete
    assert not part.effects
    with pytest.raises(EndedError):
        rig.after_restart()

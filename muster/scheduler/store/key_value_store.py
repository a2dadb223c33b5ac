"""One namespace of the store, with the semantics of torch's TCPStore, as a function of operations and time.

Every operation is answered immediately, when its keys exist, or at its deadline. Changes are numbered. A
member that reconnects on a new stream repeats its unanswered operations, and each change is still carried
out only once.

An operation on all keys takes several turns if there are many keys, but it is answered as if it took only
one. A list has the keys at the start of the first turn, and a count is that at the time of the answer.

If the generation was formed before this scheduler started, the namespace is restored from the changes that
all members send.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import re
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Container,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field

Member = tuple[str, int]
"""Node id and incarnation."""

MAX_KEY_BYTES = 4096
MAX_VALUE_BYTES = 768 * 1024
PUSHED_BYTES = 64 * 1024
"""A value up to this size in bytes is sent along with the answer to a wait for its key."""

OVERHEAD_BYTES = 128
"""The memory charged for a key in addition to its own bytes, in bytes."""

VALUE_BYTES = 8
"""The memory charged for a value of an answer in addition to its own bytes, in bytes."""

COUNTS_KEPT = 8
"""Number of prefixes whose number of keys is cached: the prefixes that were queried last."""

WAITED_BYTES = 512
"""The memory charged for a key that a member waits for, in addition to the key's own bytes, in bytes."""

_NUMBER = re.compile(rb"\s*([+-]?[0-9]{1,19})")
_SIGN, _WRAP = 1 << 63, 1 << 64


class OperationKind(enum.IntEnum):
    """The kind of an operation; the values are those on the wire."""

    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    NUM_KEYS = 7
    DELETE = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    QUEUE_PUSH = 12
    QUEUE_POP = 13
    QUEUE_LEN = 14
    LIST_KEYS = 15


class Status(enum.IntEnum):
    """The result of an operation; the values are those on the wire."""

    OK = 0
    TIMEOUT = 1
    REFUSED = 2


class EffectKind(enum.IntEnum):
    """The state of a key after a change; the values are those on the wire."""

    SET = 1
    APPEND = 2
    DELETE = 3
    PUSH = 4
    POP = 5


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a member; ``id`` is the member's own number for it. Keys and values are secrets."""

    id: int
    kind: OperationKind
    keys: tuple[bytes, ...] = field(default=(), repr=False)
    values: tuple[bytes, ...] = field(default=(), repr=False)
    amount: int = 0
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the operation ``id``.

    ``number`` is the number of the change; 0 if the operation changed nothing.
    """

    id: int
    status: Status = Status.OK
    values: Sequence[bytes] = field(default=(), repr=False)
    amount: int = 0
    number: int = 0
    popped: int = 0
    sentence: str = ""
    size_bytes: int = field(default=0, compare=False)
    """The size of the values, if it was counted in turns; otherwise 0."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The state of a key after a change; see ``StoreEffect`` in ``store.proto``."""

    number: int
    kind: EffectKind
    key: bytes = field(repr=False)
    value: bytes = field(default=b"", repr=False)
    popped: int = 0


@dataclass(slots=True)
class Returned:
    """A member's copy of a namespace, sent to restore it after a restart of the scheduler.

    Attributes:
        count: the number of this member's changes that were answered.
        seen: the highest number of a change that the member knows of.
        incomplete: whether the member could not keep all its effects, because there were too many.
        size_bytes: memory used by the effects, in bytes.
    """

    effects: list[Effect] = field(default_factory=list)
    count: int = 0
    seen: int = 0
    incomplete: bool = False
    size_bytes: int = 0

    def add(self, effect: Effect) -> None:
        """Adds one more effect."""
        self.effects.append(effect)
        self.size_bytes += _cost(effect.key, effect.value)


@dataclass(slots=True)
class MemoryBudget:
    """A limit on the memory of all namespaces together, in bytes."""

    limit_bytes: int = 512 << 20
    used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits for one namespace, and for the operations of one member."""

    keys: int = 1 << 20
    size_bytes: int = 128 << 20
    waits: int = 4096
    unconfirmed: int = 8192
    """The most answers to changes that a member may leave unconfirmed."""

    kept_bytes: int = 64 << 20
    """The most bytes of a member's waits and unconfirmed answers."""

    answer_bytes: int = 32 << 20
    """The largest list of keys, in bytes."""

    turn_keys: int = 4096
    """The number of keys that are examined in one turn; then all other members have a turn."""


class QuotaError(Exception):
    """An operation is refused because of a limit. The message names the limit, and no key."""


class EndedError(Exception):
    """The namespace no longer exists; the message says why."""


@dataclass(slots=True)
class _Wait:
    member: Member
    operation: Operation
    missing: set[bytes]
    number: int
    over: bool = False


@dataclass(slots=True)
class _MemberState:
    """A member's state that outlives its stream, so that it can continue on a new one."""

    done: dict[int, Answer] = field(default_factory=dict)
    waits: dict[int, _Wait] = field(default_factory=dict)
    looks: dict[int, Operation] = field(default_factory=dict)
    """Operations on all keys that wait for their turns."""

    held: dict[int, Operation] = field(default_factory=dict)
    held_bytes: int = 0
    kept_bytes: int = 0


class KeyValueStore:
    """One namespace.

    Args:
        answer: called with each answer and the member that gets it.
        members: the members that must send their changes before any operation is carried out; empty if the
            namespace is new.
        quotas: limits of this namespace.
        budget: the limit on all namespaces together.

    Attributes:
        number: the number of the newest change.
        ended: why the namespace has ended; empty if it has not.
        lost: whether it has ended because it could not be restored, while its generation goes on.
    """

    def __init__(
        self,
        answer: Callable[[Member, Answer], None],
        *,
        members: Iterable[Member] = (),
        quotas: Quotas | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.number = 0
        self.ended = ""
        self.lost = False
        self._answer = answer
        self._quotas = quotas or Quotas()
        self._budget = budget or MemoryBudget()
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[tuple[int, bytes]]] = {}
        self._size_bytes = 0
        self._waits: dict[bytes, dict[int, _Wait]] = {}
        self._wait_ids = itertools.count()
        self._deadlines: list[tuple[float, int, _Wait]] = []
        self._over_early = 0
        self._counts: dict[bytes, int] = {}
        self._counting: dict[bytes, int] = {}
        self._lookers: dict[Member, None] = {}
        self._under_way: Iterator[None] | None = None
        self._states: dict[Member, _MemberState] = {}
        self._awaited: set[Member] = set(members)
        self._returned: list[Returned] = []

    # ------------------------------------------------------------ members

    def wants_replay(self, member: Member) -> bool:
        """Whether this member must send its changes."""
        return member in self._awaited

    @property
    def members(self) -> int:
        """The number of members whose state is kept."""
        return len(self._states)

    @property
    def restoring(self) -> bool:
        """Whether the namespace waits for members to send their changes.

        Operations that arrive before that are carried out afterwards.
        """
        return bool(self._awaited)

    def check_returned(self, returned: Returned) -> None:
        """Raises QuotaError if a member has sent more than the namespace may hold."""
        if returned.size_bytes > self._quotas.size_bytes:
            raise QuotaError(f"A member may hand in at most {self._quotas.size_bytes >> 20} MiB.")

    def hand_in(self, member: Member, returned: Returned, now: float) -> None:
        """Stores a member's changes, and restores the namespace once all members have sent theirs."""
        if member in self._awaited and not self.ended:
            self._awaited.discard(member)
            self._returned.append(returned)
            self._try_restore(now)

    def excuse(self, present: Iterable[Member], now: float) -> None:
        """Stops waiting for members that are not in ``present``, because they will not come back."""
        if self._awaited and not self.ended:
            self._awaited.intersection_update(present)
            self._try_restore(now)

    def confirm(self, member: Member, below: int) -> None:
        """Forgets the kept answers to operations with ids under ``below``: the member has received them."""
        state = self._state_of(member)
        done = state.done
        while done:  # Oldest operation first.
            first = next(iter(done))
            if first >= below:
                return
            state.kept_bytes -= _kept(done.pop(first))

    def forget_gone(self, present: Container[Member], keep: int) -> None:
        """Forgets the state of members that are gone, except for the most recent of them.

        Args:
            present: the members that are not gone.
            keep: the number of absent members whose state is kept, so that a member that soon reconnects
                finds it.
        """
        gone = [member for member in self._states if member not in present]
        for member in gone[: max(0, len(gone) - keep)]:
            for wait in list(self._states[member].waits.values()):
                self._close(wait)
            self.drop_looks(member)
            del self._states[member]

    def end(self, reason: str) -> None:
        """Drops the content for good. The caller must end the members' streams."""
        self.ended = self.ended or reason
        self._budget.used_bytes -= self._size_bytes
        self._size_bytes = 0
        self._under_way = None
        for held in (
            self._values, self._queues, self._waits, self._deadlines, self._counts, self._counting,
            self._lookers, self._states, self._awaited,
        ):  # fmt: skip
            held.clear()

    # ------------------------------------------------------------ operations

    def execute(self, member: Member, operation: Operation, now: float) -> None:
        """Carries out one operation, or repeats an answer that was lost."""
        if self.ended:
            raise EndedError(self.ended)
        state = self._state_of(member)
        if self._awaited:
            if len(state.held) >= self._quotas.waits:
                raise QuotaError(f"A member may have {self._quotas.waits} operations under way.")
            if operation.id in state.held:  # The member repeats the operation on a newer stream.
                return
            size_bytes = state.held_bytes + _length(operation)
            if size_bytes > self._quotas.size_bytes:
                limit = f"{self._quotas.size_bytes >> 20} MiB"
                raise QuotaError(f"A member may have operations of {limit} under way after a restart.")
            state.held[operation.id], state.held_bytes = operation, size_bytes
            return
        if operation.id in state.waits or operation.id in state.looks:
            return
        answer = state.done.get(operation.id)
        if answer is None:
            try:
                answer = self._carry_out(member, operation, now)
            except QuotaError as error:
                answer = Answer(operation.id, Status.REFUSED, sentence=str(error))
        if answer is None:
            return
        if answer.number:
            state.done[operation.id] = answer
            state.kept_bytes += _kept(answer)
            if len(state.done) > self._quotas.unconfirmed:
                raise QuotaError(f"A member may leave {self._quotas.unconfirmed} answers unconfirmed.")
            if state.kept_bytes > self._quotas.kept_bytes:
                limit = f"{self._quotas.kept_bytes >> 20} MiB"
                raise QuotaError(f"A member may leave answers of {limit} unconfirmed.")
        self._answer(member, answer)

    def cancel(self, member: Member, operation_id: int) -> None:
        """Cancels an operation, so that it gets no answer."""
        state = self._state_of(member)
        held = state.held.pop(operation_id, None)
        if held is not None:
            state.held_bytes -= _length(held)
        state.looks.pop(operation_id, None)
        wait = state.waits.get(operation_id)
        if wait is not None:
            self._close(wait)

    def drop_looks(self, member: Member) -> None:
        """Drops a member's unfinished operations on all keys when its stream is gone.

        The member repeats them on its next stream.
        """
        state = self._states.get(member)
        if state is not None:
            state.looks.clear()

    @property
    def looking(self) -> bool:
        """Whether any operation on all keys still needs a turn."""
        return self._under_way is not None or bool(self._lookers)

    def turn(self) -> None:
        """Runs one turn of an operation on all keys, which takes a few milliseconds.

        Members take turns. Each operation is finished before the next one begins, so that at most one copy
        of all keys is in memory.
        """
        if self._under_way is None and self._lookers:
            member = next(iter(self._lookers))
            del self._lookers[member]
            self._under_way = self._look_through(member)
        if self._under_way is not None and next(self._under_way, self) is self:
            self._under_way = None

    def deadline(self) -> float | None:
        """The time at which the next wait times out; None if no wait has a timeout."""
        while self._deadlines and self._deadlines[0][2].over:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> None:
        """Answers the waits that have timed out."""
        while (due := self.deadline()) is not None and due <= now:
            wait = heapq.heappop(self._deadlines)[2]
            self._close(wait)
            self._answer(wait.member, Answer(wait.operation.id, Status.TIMEOUT))

    # ------------------------------------------------------------ inside

    def _state_of(self, member: Member) -> _MemberState:
        return self._states.setdefault(member, _MemberState())

    def _carry_out(self, member: Member, operation: Operation, now: float) -> Answer | None:
        kind, keys, values, at = operation.kind, operation.keys, operation.values, operation.id
        if kind is OperationKind.WAIT:
            return self._wait(member, operation, now)
        if kind in (OperationKind.NUM_KEYS, OperationKind.LIST_KEYS):
            return self._look_at_all(member, operation)
        if kind is OperationKind.GET:
            value = self._values.get(keys[0])
            return Answer(at, values=() if value is None else (value,))
        if kind in (OperationKind.SET, OperationKind.MULTI_SET):
            self._put(keys, values)
        elif kind is OperationKind.ADD:
            total = self._sum(keys[0], operation.amount)
            self._put(keys, (b"%d" % total,))
            return Answer(at, amount=total, number=self.number)
        elif kind is OperationKind.COMPARE_SET:
            return self._compare_set(at, keys[0], *values)
        elif kind is OperationKind.APPEND:
            self._put(keys, (self._values.get(keys[0], b"") + values[0],))
        elif kind is OperationKind.DELETE:
            return self._delete(at, keys[0])
        elif kind is OperationKind.QUEUE_PUSH:
            self._push(keys[0], values[0])
        elif kind is OperationKind.QUEUE_POP:
            return self._pop(at, keys[0])
        else:
            return self._look(operation)
        return Answer(at, number=self.number)

    def _look(self, operation: Operation) -> Answer:
        kind, keys, at = operation.kind, operation.keys, operation.id
        if kind is OperationKind.CHECK:
            return Answer(at, amount=int(all(self._has(key) for key in keys)))
        if kind is OperationKind.MULTI_GET:
            return Answer(at, values=tuple(self._values.get(key, b"") for key in keys))
        return Answer(at, amount=len(self._queues.get(keys[0], ())))

    # ------------------------------------------------------------ questions about all keys

    def _look_at_all(self, member: Member, operation: Operation) -> Answer | None:
        """Answers an operation on all keys if one turn is enough; otherwise queues it and returns None."""
        prefix = _prefix(operation)
        if len(prefix) > MAX_KEY_BYTES:  # No key has such a long prefix, and its count would be cached.
            return Answer(operation.id)
        known = self._counted(operation)
        if known is not None:
            return known
        if len(self._values) <= self._quotas.turn_keys:
            found, size_bytes = _begin_with(prefix, self._values)
            return self._looked(operation, found, len(found), size_bytes)
        state = self._state_of(member)
        self._check_waits(state)
        state.looks[operation.id] = operation
        self._lookers.setdefault(member)
        return None

    def _look_through(self, member: Member) -> Iterator[None]:
        """Answers a member's oldest operation on all keys; each ``yield`` ends a turn."""
        state = self._states.get(member)
        if state is None or not state.looks:
            return
        looks = state.looks
        operation = next(iter(looks.values()))
        answer = self._counted(operation)  # The number may have become known while the operation waited.
        if answer is None:
            answer = yield from self._look_in_turns(operation, looks)
        if looks.get(operation.id) is operation:
            del looks[operation.id]
            self._answer(member, answer)
        if looks:
            self._lookers.setdefault(member)

    def _look_in_turns(
        self, operation: Operation, looks: Mapping[int, Operation]
    ) -> Generator[None, None, Answer]:
        prefix, lists, step = (
            _prefix(operation),
            operation.kind is OperationKind.LIST_KEYS,
            self._quotas.turn_keys,
        )
        keys = list(self._values)  # Copying takes a turn of its own: 3 to 8 ms for a million keys.
        self._counting = {prefix: 0}
        found: list[bytes] = []
        count = size_bytes = 0
        yield
        try:
            for at in range(0, len(keys), step):
                if looks.get(operation.id) is not operation:  # The answer is no longer wanted.
                    return Answer(operation.id)
                some, some_bytes = _begin_with(prefix, keys[at : at + step])
                count += len(some)
                if lists:
                    found += some
                    size_bytes += some_bytes
                    if size_bytes > self._quotas.answer_bytes:
                        break
                yield
            else:
                self._keep_count(prefix, count + self._counting[prefix])
        finally:
            self._counting = {}
        return self._looked(operation, found, count if lists else self._counts[prefix], size_bytes)

    def _looked(self, operation: Operation, found: list[bytes], count: int, size_bytes: int) -> Answer:
        if operation.kind is OperationKind.NUM_KEYS:
            return Answer(operation.id, amount=count)
        limit = self._quotas.answer_bytes
        if size_bytes > limit:
            sentence = f"A list of keys takes at most {limit >> 20} MiB, and this one takes more."
            return Answer(operation.id, Status.REFUSED, sentence=sentence)
        return Answer(operation.id, values=found, amount=count, size_bytes=size_bytes)

    def _counted(self, operation: Operation) -> Answer | None:
        """Answers an operation for which the number of keys is cached."""
        prefix = _prefix(operation)
        if operation.kind is not OperationKind.NUM_KEYS or (prefix and prefix not in self._counts):
            return None
        if not prefix:
            return Answer(operation.id, amount=len(self._values))
        self._keep_count(prefix, self._counts[prefix])
        return Answer(operation.id, amount=self._counts[prefix])

    def _keep_count(self, prefix: bytes, count: int) -> None:
        """Caches how many keys have this prefix, in place of the least recently queried count."""
        self._counts.pop(prefix, None)
        self._counts[prefix] = count
        if len(self._counts) > COUNTS_KEPT:
            del self._counts[next(iter(self._counts))]

    def _count(self, key: bytes, change: int) -> None:
        """Updates the cached counts: ``change`` is 1 for a new key and -1 for a deleted one."""
        for counts in (self._counts, self._counting):
            for prefix in counts:
                if key.startswith(prefix):
                    counts[prefix] += change

    def _has(self, key: bytes) -> bool:
        return key in self._values or bool(self._queues.get(key))

    # ------------------------------------------------------------ changes

    def _put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Sets all the keys, or none of them if a limit would be exceeded."""
        sizes = {}
        for key, value in zip(keys, values, strict=True):
            _check_sizes(key, value)
            sizes[key] = len(value) - len(self._values[key]) if key in self._values else _cost(key, value)
        self._reserve(sum(sizes.values()), new_keys=sum(key not in self._values for key in sizes))
        self.number += 1
        for key, value in zip(keys, values, strict=True):
            if key not in self._values:
                self._count(key, 1)
            self._values[key] = value
        for key in sizes:
            self._wake(key)

    def _sum(self, key: bytes, amount: int) -> int:
        held = self._values.get(key)
        if held is None:
            return amount
        number = _NUMBER.match(held)
        if number is None:
            raise QuotaError("add() needs a key whose value is a number.")
        return (int(number[1]) + amount + _SIGN) % _WRAP - _SIGN

    def _compare_set(self, at: int, key: bytes, expected: bytes, desired: bytes) -> Answer:
        held = self._values.get(key)
        if held == expected or (held is None and not expected):
            self._put((key,), (desired,))
            return Answer(at, values=(desired,), number=self.number)
        return Answer(at, values=(expected if held is None else held,))

    def _delete(self, at: int, key: bytes) -> Answer:
        value = self._values.pop(key, None)
        if value is None:
            return Answer(at)
        self._count(key, -1)
        self._reserve(-_cost(key, value))
        self.number += 1
        return Answer(at, amount=1, number=self.number)

    def _push(self, key: bytes, value: bytes) -> None:
        _check_sizes(key, value)
        self._reserve(_cost(key, value), new_keys=key not in self._queues)
        self.number += 1
        self._queues.setdefault(key, deque()).append((self.number, value))
        self._wake(key, one=True)

    def _pop(self, at: int, key: bytes) -> Answer:
        queue = self._queues.get(key)
        if not queue:
            return Answer(at)
        length = len(queue)
        popped, value = queue.popleft()
        if not queue:
            del self._queues[key]
        self._reserve(-_cost(key, value))
        self.number += 1
        return Answer(at, values=(value,), amount=length, number=self.number, popped=popped)

    def _reserve(self, size_bytes: int, *, new_keys: int = 0) -> None:
        quotas, budget = self._quotas, self._budget
        if new_keys and len(self._values) + len(self._queues) + new_keys > quotas.keys:
            raise QuotaError(f"The store of a generation holds at most {quotas.keys} keys.")
        if size_bytes > 0 and self._size_bytes + size_bytes > quotas.size_bytes:
            raise QuotaError(f"The store of a generation holds at most {quotas.size_bytes >> 20} MiB.")
        if size_bytes > 0 and budget.used_bytes + size_bytes > budget.limit_bytes:
            raise QuotaError(f"The stores of this scheduler hold at most {budget.limit_bytes >> 20} MiB.")
        self._size_bytes += size_bytes
        budget.used_bytes += size_bytes

    # ------------------------------------------------------------ waits

    def _wait(self, member: Member, operation: Operation, now: float) -> Answer | None:
        missing = {key for key in operation.keys if not self._has(key)}
        if not missing:
            return self._found(operation)
        state = self._state_of(member)
        self._check_waits(state)
        size_bytes = _waited(operation)
        if state.kept_bytes + size_bytes > self._quotas.kept_bytes:
            raise QuotaError(f"A member may wait for keys of {self._quotas.kept_bytes >> 20} MiB at once.")
        state.kept_bytes += size_bytes
        wait = _Wait(member, operation, missing, next(self._wait_ids))
        state.waits[operation.id] = wait
        for key in missing:
            self._waits.setdefault(key, {})[wait.number] = wait
        if operation.timeout_s > 0:
            heapq.heappush(self._deadlines, (now + operation.timeout_s, wait.number, wait))
        return None

    def _check_waits(self, state: _MemberState) -> None:
        if len(state.waits) + len(state.looks) >= self._quotas.waits:
            raise QuotaError(f"A member may wait for {self._quotas.waits} things at once.")

    def _found(self, operation: Operation) -> Answer:
        """Answers a wait for keys that exist; includes a small value, because it is usually read next."""
        value = self._values.get(operation.keys[0]) if len(operation.keys) == 1 else None
        pushed = value is not None and len(value) <= PUSHED_BYTES
        return Answer(operation.id, values=(value,) if value is not None and pushed else ())

    def _wake(self, key: bytes, *, one: bool = False) -> None:
        """Answers the waits for a key that now exists: all of them, or with ``one``, a single wait."""
        waits = self._waits.get(key)
        if waits is None:
            return
        for number, wait in list(waits.items()):
            del waits[number]
            if wait.over:
                continue
            wait.missing.discard(key)
            if not wait.missing:
                self._close(wait)
                self._answer(wait.member, self._found(wait.operation))
                if one:
                    break
        if not waits:
            self._waits.pop(key, None)

    def _close(self, wait: _Wait) -> None:
        wait.over = True
        state = self._state_of(wait.member)
        if state.waits.pop(wait.operation.id, None) is not None:
            state.kept_bytes -= _waited(wait.operation)
        if wait.operation.timeout_s > 0:
            self._drop_old_deadlines()
        for key in wait.missing:
            waits = self._waits.get(key)
            if waits is not None:
                waits.pop(wait.number, None)
                if not waits:
                    del self._waits[key]

    def _drop_old_deadlines(self) -> None:
        """Removes finished waits from the deadlines, once more than half of the deadlines are theirs."""
        self._over_early += 1
        if self._over_early > max(64, len(self._deadlines) // 2):
            self._over_early = 0
            self._deadlines = [each for each in self._deadlines if not each[2].over]
            heapq.heapify(self._deadlines)

    # ------------------------------------------------------------ after a restart

    def _try_restore(self, now: float) -> None:
        if self._awaited:
            return
        returned, self._returned = self._returned, []
        count = sum(each.count for each in returned)
        seen = max((each.seen for each in returned), default=0)
        if any(each.incomplete for each in returned) or count != seen:
            self.lost = True
            raise EndedError(
                "The scheduler was restarted, and the store cannot be restored, because a change of it was "
                "in progress."
            )
        self._restore(
            heapq.merge(*(sorted(each.effects, key=_by_number) for each in returned), key=_by_number)
        )
        self.number = seen
        held = [(member, each.held.values()) for member, each in self._states.items()]
        for state in self._states.values():
            state.held, state.held_bytes = {}, 0
        for member, operations in held:
            for operation in operations:
                self.execute(member, operation, now)

    def _restore(self, effects: Iterator[Effect]) -> None:
        popped = set()
        for effect in effects:
            key = effect.key
            if effect.kind is EffectKind.SET:
                self._values[key] = effect.value
            elif effect.kind is EffectKind.APPEND:
                self._values[key] = self._values.get(key, b"") + effect.value
            elif effect.kind is EffectKind.DELETE:
                self._values.pop(key, None)
            elif effect.kind is EffectKind.PUSH:
                self._queues.setdefault(key, deque()).append((effect.number, effect.value))
            else:
                popped.add(effect.popped)
        for key in list(self._queues):
            left = deque(each for each in self._queues[key] if each[0] not in popped)
            if left:
                self._queues[key] = left
            else:
                del self._queues[key]
        size = sum(_cost(key, value) for key, value in self._values.items())
        size += sum(_cost(key, value) for key, queue in self._queues.items() for _, value in queue)
        self._size_bytes = size
        self._budget.used_bytes += size


def _by_number(effect: Effect) -> int:
    return effect.number


def _prefix(operation: Operation) -> bytes:
    return operation.keys[0] if operation.keys else b""


def _begin_with(prefix: bytes, keys: Collection[bytes]) -> tuple[list[bytes], int]:
    """Returns the keys with this prefix, and their size in an answer, in bytes."""
    found = [key for key in keys if key.startswith(prefix)]
    return found, sum(map(len, found)) + VALUE_BYTES * len(found)


def _length(operation: Operation) -> int:
    return sum(map(len, operation.keys + operation.values))


def _waited(operation: Operation) -> int:
    """The memory charged for a wait, in bytes."""
    return _length(operation) + WAITED_BYTES * len(operation.keys)


def _kept(answer: Answer) -> int:
    """The memory charged for an answer that is kept in case its operation is repeated, in bytes."""
    return sum(map(len, answer.values)) + OVERHEAD_BYTES


def _cost(key: bytes, value: bytes) -> int:
    return len(key) + len(value) + OVERHEAD_BYTES


def _check_sizes(key: bytes, value: bytes) -> None:
    if len(key) > MAX_KEY_BYTES:
        raise QuotaError(f"A key has at most {MAX_KEY_BYTES} bytes; this one has {len(key)}.")
    if len(value) > MAX_VALUE_BYTES:
        raise QuotaError(f"A value has at most {MAX_VALUE_BYTES} bytes; this one has {len(value)}.")

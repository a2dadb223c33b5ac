"""Keeps the changes that this member has made in a generation's store and that no later one has replaced.

The scheduler keeps the store in memory. After a restart it rebuilds the store from all members' changes: see
proto/muster/wire/v1/store.proto.
"""

from __future__ import annotations

from collections.abc import Iterator

from muster.wire.v1 import store_pb2 as pb

MAX_ENTRIES = 1 << 18
MAX_BYTES = 64 << 20
PART_BYTES = 512 * 1024
"""The size at which a part of a replay is sent, in bytes."""

_SETS = (pb.STORE_KIND_SET, pb.STORE_KIND_MULTI_SET)


class ChangeHistory:
    """The changes of one member, by their numbers.

    Args:
        max_entries: maximum number of entries; beyond it, all are dropped and ``incomplete`` is set.
        max_bytes: maximum size of all entries, in bytes, with the same effect.

    Attributes:
        count: the number of changes that were answered.
        seen: the highest number of a change that this member has heard of.
        incomplete: whether the changes were dropped because they exceeded a limit.
    """

    def __init__(self, *, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self.count = 0
        self.seen = 0
        self.incomplete = False
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries = 0
        self._bytes = 0
        self._plain: dict[bytes, list[pb.StoreEffect]] = {}
        self._pushes: dict[int, pb.StoreEffect] = {}
        self._pops: list[pb.StoreEffect] = []

    def note(self, operation: pb.StoreOperation, answer: pb.StoreAnswer) -> None:
        """Records an answered operation, if it has changed the store."""
        if not answer.number:
            return
        self.count += 1
        self.seen = max(self.seen, answer.number)
        if self.incomplete:
            return
        kind, keys, values = operation.kind, operation.keys, operation.values
        if kind in _SETS:
            for key, value in zip(keys, values, strict=True):
                self._put(answer.number, key, value)
        elif kind == pb.STORE_KIND_ADD:
            self._put(answer.number, keys[0], b"%d" % answer.amount)
        elif kind == pb.STORE_KIND_COMPARE_SET:
            self._put(answer.number, keys[0], values[1])
        elif kind == pb.STORE_KIND_APPEND:
            effect = _effect(answer.number, pb.StoreEffect.KIND_APPEND, keys[0], values[0])
            self._plain.setdefault(keys[0], []).append(effect)
            self._count_in(effect)
        elif kind == pb.STORE_KIND_DELETE:
            self._replace(_effect(answer.number, pb.StoreEffect.KIND_DELETE, keys[0]))
        elif kind == pb.STORE_KIND_QUEUE_PUSH:
            effect = _effect(answer.number, pb.StoreEffect.KIND_PUSH, keys[0], values[0])
            self._pushes[answer.number] = effect
            self._count_in(effect)
        else:
            self._pop(answer, keys[0])

    def hear(self, seen: int) -> None:
        """Notes that the namespace already contains the change with the number ``seen``."""
        self.seen = max(self.seen, seen)

    def parts(self) -> Iterator[pb.StoreReplay]:
        """Yields the changes for a replay, in parts; ``last`` is set in the last one."""
        part, size = pb.StoreReplay(), 0
        for effect in self._effects():
            part.effects.append(effect)
            size += _size(effect)
            if size >= PART_BYTES:
                yield part
                part, size = pb.StoreReplay(), 0
        part.count, part.seen, part.incomplete, part.last = self.count, self.seen, self.incomplete, True
        yield part

    def _effects(self) -> Iterator[pb.StoreEffect]:
        for effects in self._plain.values():
            yield from effects
        yield from self._pushes.values()
        yield from self._pops

    def _put(self, number: int, key: bytes, value: bytes) -> None:
        self._replace(_effect(number, pb.StoreEffect.KIND_SET, key, value))

    def _replace(self, effect: pb.StoreEffect) -> None:
        for before in self._plain.get(effect.key, ()):
            self._entries -= 1
            self._bytes -= _size(before)
        self._plain[effect.key] = [effect]
        self._count_in(effect)

    def _pop(self, answer: pb.StoreAnswer, key: bytes) -> None:
        own = self._pushes.pop(answer.popped, None)
        if own is not None:
            self._entries -= 1
            self._bytes -= _size(own)
            return
        effect = _effect(answer.number, pb.StoreEffect.KIND_POP, key, popped=answer.popped)
        self._pops.append(effect)
        self._count_in(effect)

    def _count_in(self, effect: pb.StoreEffect) -> None:
        self._entries += 1
        self._bytes += _size(effect)
        if self._entries > self._max_entries or self._bytes > self._max_bytes:
            self.incomplete = True
            self._plain.clear()
            self._pushes.clear()
            self._pops.clear()


def _effect(
    number: int, kind: pb.StoreEffect.Kind, key: bytes, value: bytes = b"", popped: int = 0
) -> pb.StoreEffect:
    return pb.StoreEffect(number=number, kind=kind, key=key, value=value, popped=popped)


def _size(effect: pb.StoreEffect) -> int:
    return len(effect.key) + len(effect.value) + 32

"""Torch's own TCPStore and Muster's store by the same operations of several clients, in the same order.

Run as a module it does so for as long as asked: ``python -m tests.programs.test_differential 100000``.
"""

from __future__ import annotations

import contextlib
import functools
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

dist = pytest.importorskip("torch.distributed")

CLIENTS = 4
SHORT, LONG = timedelta(milliseconds=60), timedelta(seconds=60)
KEYS = ("k0", "k1", "k2", "", "k/é")
QUEUES = ("q0", "q1")
VALUES = (b"", b"7", b"-12", b"\x00\xff binary", b"x" * 3000)
NUMBERS = ("n0", "n1")


@contextlib.contextmanager
def both(prefixes: tuple[str, ...]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Clients of TCPStore, and as many of Muster's store, whose service and proxies are another process."""
    rig = [sys.executable, "-m", "tests.scheduler.store.rig", str(CLIENTS)]
    with subprocess.Popen(rig, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdin is not None
        assert served.stdout is not None
        try:
            ports = [int(port) for port in served.stdout.readline().split()]
            master = dist.TCPStore("127.0.0.1", 0, None, True, timeout=LONG)
            theirs = [
                dist.TCPStore("127.0.0.1", master.port, CLIENTS, False, timeout=LONG) for _ in range(CLIENTS)
            ]
            ours = [dist.TCPStore("127.0.0.1", port, CLIENTS, False, timeout=LONG) for port in ports]
            kept = (master, *theirs, *ours)  # beneath the prefixes
            for prefix in prefixes:
                theirs = [dist.PrefixStore(prefix, store) for store in theirs]
                ours = [dist.PrefixStore(prefix, store) for store in ours]
            yield theirs, ours
            del kept
        finally:
            served.stdin.close()
            served.wait(60)


def outcome(call: Callable[[], object]) -> object:
    """What a call returns, or the kind of its error."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__


class Script:
    """Seeded operations, each to be done on any kind of store."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> tuple[str, int, Callable[[Any], object]]:
        """The name of an operation, the client that does it, and what to do with its store."""
        rng = self._random
        client, key, value = rng.randrange(CLIENTS), rng.choice(KEYS), rng.choice(VALUES)
        other, amount = rng.choice(KEYS), rng.randrange(-5, 50)
        number, queue, expected = rng.choice(NUMBERS), rng.choice(QUEUES), rng.choice(VALUES)
        name = rng.choice(OPERATIONS)
        operations: dict[str, Callable[[Any], object]] = {
            "set": lambda s: s.set(key, value),
            "get": lambda s: s.get(key) if s.check([key]) else None,
            "add": lambda s: s.add(number, amount),
            "number": lambda s: s.set(number, str(amount)),
            "compare_set": lambda s: s.compare_set(key, expected, value),
            "check": lambda s: s.check([key, other]),
            "check_none": lambda s: s.check([]),
            "wait": lambda s: s.wait([key, other], SHORT) if not s.check([key]) else s.wait([key], LONG),
            "wait_number": lambda s: s.wait([number], LONG if s.check([number]) else SHORT),
            "delete": lambda s: s.delete_key(key),
            "num_keys": lambda s: s.num_keys(),
            "append": lambda s: s.append(key, value),
            "multi_set": lambda s: s.multi_set([key, other], [value, expected]),
            "multi_get": lambda s: s.multi_get([key, other]) if s.check([key, other]) else None,
            "push": lambda s: s.queue_push(queue, value),
            "pop": lambda s: s.queue_pop(queue, False),
            "pop_wait": lambda s: s.queue_pop(queue) if s.queue_len(queue) else None,
            "len": lambda s: s.queue_len(queue),
            "list_keys": lambda s: sorted(s.list_keys()),
            "extended": lambda s: s.has_extended_api(),
        }
        return name, client, operations[name]


OPERATIONS = (
    *("set", "get", "add", "number", "compare_set", "check", "wait", "delete", "append", "multi_set") * 3,
    *("multi_get", "push", "pop", "pop_wait", "len", "num_keys") * 2,
    *("check_none", "list_keys", "extended", "wait_number"),
)


def compare(seed: int, count: int, prefixes: tuple[str, ...] = ()) -> int:
    """Does ``count`` operations on both; returns how many have done more than to fail alike."""
    script, good = Script(seed), 0
    with both(prefixes) as (theirs, ours):
        for number in range(count):
            name, client, operation = script.next()
            results = []
            for stores in (theirs, ours):
                results.append(outcome(functools.partial(operation, stores[client])))
                stores[client].check([])  # torch waits for no answer to a set: now it has been done
            assert results[0] == results[1], (
                f"{results}: operation {number}, {name}, by client {client}, seed {seed}"
            )
            good += not isinstance(results[0], str)
    return good


@pytest.mark.parametrize("prefixes", [(), ("outer", "inner")], ids=["plain", "prefixes"])
def test_both_stores_answer_alike(prefixes: tuple[str, ...]) -> None:
    assert compare(len(prefixes), 600, prefixes) > 400


def test_all_kinds_of_wait_end_alike_by_what_another_client_does() -> None:
    changes: dict[str, Callable[[Any, str], object]] = {
        "set": lambda s, key: s.set(key, "1"),
        "add": lambda s, key: s.add(key, 1),
        "append": lambda s, key: s.append(key, "1"),
        "compare_set": lambda s, key: s.compare_set(key, "", "1"),
        "multi_set": lambda s, key: s.multi_set([key, "beside"], ["1", "2"]),
    }
    with both(("waits",)) as pairs:
        for stores in pairs:
            for name, change in changes.items():
                got: list[object] = []

                def get(store: Any, key: str = name, got: list[object] = got) -> None:
                    got.append(store.get(key))

                waits = [threading.Thread(target=get, args=(store,)) for store in stores[1:]]
                for each in waits:
                    each.start()
                change(stores[0], name)
                for each in waits:
                    each.join(60)
                assert got == [b"1"] * (CLIENTS - 1), name


def test_clones_and_the_barrier_of_torch() -> None:
    with both(()) as pairs:
        for stores in pairs:
            stores[0].set("k", "v")
            stores[0].check([])
            if hasattr(dist.Store, "clone"):  # since torch 2.6
                assert stores[1].clone().get("k") == b"v"
            done: list[None] = []

            def meet(store: Any, done: list[None] = done) -> None:
                dist.distributed_c10d._store_based_barrier(
                    0, store, "group", CLIENTS, LONG, timedelta(seconds=10)
                )
                done.append(None)

            threads = [threading.Thread(target=meet, args=(store,)) for store in stores]
            for each in threads:
                each.start()
            for each in threads:
                each.join(60)
            assert len(done) == CLIENTS


if __name__ == "__main__":
    total = int(sys.argv[1])
    for seed in range(total // 5000):
        print(seed, compare(seed, 5000, ("p",) * (seed % 3)), flush=True)

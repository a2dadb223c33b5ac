"""A pool of worker processes, spawned once, in which tests run their functions on every rank."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from muster.communicators.base import Backend, Communicator
from muster.communicators.membership import Membership, Peer
from tests.contracts.kits import JOB, Kit, kit

HANG_S = 120.0
FORM_S = 60.0


@dataclass
class Place:
    """What a function of a test gets: its communicator, its kit, and the backend it came from."""

    comm: Communicator
    kit: Kit
    backend: Backend
    membership: Membership


@dataclass(frozen=True)
class Failure:
    """An exception of an agent."""

    kind: str
    text: str
    trace: str


class Agent:
    """The loop of one worker process."""

    def __init__(self, rank: int, certificates: Path) -> None:
        self._rank = rank
        self._certificates = certificates
        self._backends: dict[str, tuple[Backend, str]] = {}
        self._kept: dict[tuple[str, int], Place] = {}

    def prepare(self, name: str) -> tuple[str, tuple[bytes, ...]]:
        """Opens a backend once; returns its address and a fresh unique id."""
        if name not in self._backends:
            backend = kit(name).create(self._certificates, self._rank)
            self._backends[name] = (backend, backend.open_endpoint("127.0.0.1"))
        backend, address = self._backends[name]
        return address, backend.mint_unique_ids(1) if self._rank == 0 else ()

    def keep(self, name: str, membership: Membership, timeout_s: float) -> None:
        """Forms a communicator that tests share."""
        self._kept[name, membership.world_size] = self._form(name, membership, timeout_s)

    def run(self, name: str, size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a function on a shared communicator."""
        return function(self._kept[name, size], *args)

    def fresh(
        self,
        name: str,
        membership: Membership,
        timeout_s: float,
        function: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Any:
        """Runs a function on a communicator of its own, which it may ruin."""
        place = self._form(name, membership, timeout_s)
        try:
            return function(place, *args)
        finally:
            place.comm.close()

    def end(self) -> None:
        """Closes everything."""
        for place in self._kept.values():
            place.comm.close()
        for backend, _ in self._backends.values():
            backend.close()

    def _form(self, name: str, membership: Membership, timeout_s: float) -> Place:
        backend = self._backends[name][0]
        comm = backend.connect(membership, timeout_s=FORM_S, cancelled=lambda: None)
        comm.timeout_s = timeout_s
        return Place(comm, kit(name), backend, membership)


def agent_main(rank: int, pipe: Connection, certificates: Path) -> None:
    """Serves one agent until the pipe closes."""
    agent = Agent(rank, certificates)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(getattr(agent, method)(*args))
        except Exception as error:
            pipe.send(Failure(type(error).__name__, str(error), traceback.format_exc()))
    agent.end()


class Agents:
    """The pool. A test that leaves an agent hanging makes the pool spawn again."""

    def __init__(self, count: int, certificates: Path) -> None:
        self._count = count
        self._certificates = certificates
        self._generation = 0
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._kept: set[tuple[str, int]] = set()

    def run(self, name: str, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs ``function(place, *args)`` on every rank of a shared communicator."""
        self._spawn()
        if (name, size) not in self._kept:
            memberships = self._memberships(name, size)
            self._good(self._all(size, "keep", [(name, m, FORM_S) for m in memberships]))
            self._kept.add((name, size))
        return self._good(self._all(size, "run", [(name, size, function, args)] * size))

    def fresh(
        self,
        name: str,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = FORM_S,
        per_rank: list[tuple[Any, ...]] | None = None,
        may_fail: bool = False,
    ) -> list[Any]:
        """Runs ``function(place, *args)`` on every rank of a communicator made for it alone."""
        self._spawn()
        memberships = self._memberships(name, size)
        every = per_rank or [args] * size
        calls = [(name, m, timeout_s, function, a) for m, a in zip(memberships, every, strict=True)]
        results = self._all(size, "fresh", calls)
        return results if may_fail else self._good(results)

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []
        self._kept.clear()

    def _spawn(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.close()
        context = multiprocessing.get_context("spawn")
        for rank in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=agent_main, args=(rank, theirs, self._certificates), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _memberships(self, name: str, size: int) -> list[Membership]:
        prepared = self._good(self._all(size, "prepare", [(name,)] * size))
        self._generation += 1
        peers = tuple(
            Peer(rank, f"node-{rank}", 1000 + rank, "host-a", "localhost", address, rank)
            for rank, (address, _) in enumerate(prepared)
        )
        return [
            Membership(JOB, self._generation, "world", rank, peers, prepared[0][1]) for rank in range(size)
        ]

    def _all(self, size: int, method: str, calls: list[tuple[Any, ...]]) -> list[Any]:
        for pipe, args in zip(self._pipes[:size], calls, strict=True):
            pipe.send((method, args))
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes[:size])}
        results: list[Any] = [None] * size
        while waiting:
            ready = wait(list(waiting), HANG_S)
            if not ready:
                ranks = sorted(waiting.values())
                self._kill()
                raise AssertionError(f"{method} hangs on ranks {ranks}")
            for answered in ready:
                rank = waiting.pop(answered)
                try:
                    results[rank] = self._pipes[rank].recv()
                except EOFError:
                    results[rank] = Failure("Died", f"the process of rank {rank} ended", "")
        return results

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()

    @staticmethod
    def _good(results: list[Any]) -> list[Any]:
        for rank, result in enumerate(results):
            if isinstance(result, Failure):
                raise AssertionError(f"rank {rank}: {result.kind}: {result.text}\n{result.trace}")
        return results

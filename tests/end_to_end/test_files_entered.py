"""How many files one has to read to follow what Muster does: those that all threads of both sides enter.

A file of the project is counted once, when any of its functions is called, be it a property. Constructors do
not count, nor generated code, what runs while modules are imported, and threads that wake by the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import grpc.aio
import numpy as np
import pytest

import muster
from muster.scheduler.access import Access
from muster.scheduler.audit.logs import Recorder
from muster.scheduler.config import load_settings
from muster.scheduler.core.machine import Machine
from muster.scheduler.jobs.driver import Jobs
from muster.scheduler.serve.sessions import Limits, Service, Sessions
from muster.worker.communicators.base import ReduceOp
from muster.worker.config import SecurityContext
from muster.worker.control.session import Session
from muster.worker.runtime import open_session
from muster.worker.training.loop import ElasticLoop
from muster.worker.training.sampler import ShardedSampler
from muster.worker.training.state import TrainingState
from tests.scheduler.processes import ROOT, environment

WAIT_S = 30.0
BY_THE_CLOCK = ("muster-timer", "muster-watcher", "muster-probes")
PACKAGES = ("scheduler", "worker", "rendezvous", "certs", "muster", "bench")


class Trace:
    """The project's files that threads enter while it records; made before the threads are."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_recording = False
        self._names: dict[str, str] = {}
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def close(self) -> None:
        self.is_recording = False
        threading.setprofile(None)
        sys.setprofile(None)

    @contextlib.contextmanager
    def recording(self) -> Iterator[set[str]]:
        self.files = set()
        self.is_recording = True
        try:
            yield self.files
        finally:
            self.is_recording = False

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if not self.is_recording or event != "call" or frame.f_code.co_name in ("__init__", "<module>"):
            return
        path = frame.f_code.co_filename
        name = self._names.get(path)
        if name is None:
            name = self._names[path] = _name_in_project(path)
        if name and name not in self.files and threading.current_thread().name not in BY_THE_CLOCK:
            self.files.add(name)


def _name_in_project(path: str) -> str:
    """The file's name within the project; empty: it is not of it, or generated."""
    if "/v1/" in path:
        return ""
    with contextlib.suppress(ValueError):
        parts = Path(path).resolve().relative_to(ROOT).parts
        if parts[0] in PACKAGES:
            return "/".join(parts)
    return ""


@pytest.fixture
def trace() -> Iterator[Trace]:
    made = Trace()
    yield made
    made.close()


@contextlib.contextmanager
def served(workers: int) -> Iterator[int]:
    """The port of a scheduler in a thread of this process."""
    ready: Future[tuple[int, Callable[[], object]]] = Future()

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        recorder = Recorder()
        env = {"MS_WORKER_NUM": str(workers), "MS_WORKER_MIN": "1", "MS_NODE_TIMEOUT": "30"}
        jobs = Jobs(
            load_settings(env), loop, recorder.note, new_machine=Machine, recover_machine=Machine.recover
        )
        await jobs.open()
        access = Access(tls=False)
        service = Service(Sessions(jobs, access, recorder, Limits()), "default")
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((service.handler(),))
        bound = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.set_result((bound, lambda: loop.call_soon_threadsafe(stop.set)))
        await stop.wait()
        await jobs.close()
        await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="scheduler")
    thread.start()
    bound, stop = ready.result(WAIT_S)
    yield bound
    stop()
    thread.join(WAIT_S)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """All modules are loaded before anything is recorded."""
    with served(1) as port:
        session = joined(port, 0, 1)
        assert callable(muster.init) and callable(muster.all_reduce)
        train(session, generation=1)
        session.release()


@pytest.fixture
def port(trace: Trace) -> Iterator[int]:
    with served(2) as bound:
        yield bound


def settings_of(port: int, node: int, workers: int = 2) -> dict[str, str]:
    return {
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": str(workers),
        "MS_WORKER_MIN": "1",
        "MS_SCHED_PORT": str(port),
        "MS_NODE_ID": str(node),
        "MS_BACKEND": "tcp",
        "MS_NODE_TIMEOUT": "30",
        "MS_LOG_LEVEL": "DEBUG",
    }


def joined(port: int, node: int, workers: int = 2) -> Session:
    """A worker of this process beside the default session's."""
    session = open_session(settings_of(port, node, workers), SecurityContext())
    session.open()
    return session


class Gate(logging.Filter):
    """Holds each worker where it says that it has an assignment, until both have; it ends the record."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace
        self._both = threading.Barrier(2, action=self._end)

    def _end(self) -> None:
        self._trace.is_recording = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("generation 1, rank "):
            self._both.wait(WAIT_S)
        return True


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def started(
    monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor, port: int
) -> tuple[Session, Session]:
    """Two members: the default session's, and another."""
    for name, value in settings_of(port, 0).items():
        monkeypatch.setenv(name, value)
    second = threads.submit(joined, port, 1)
    first = muster.init()
    return first, second.result(WAIT_S)


def ended(threads: ThreadPoolExecutor, *sessions: Session) -> None:
    list(threads.map(Session.release, sessions))


def test_from_init_to_the_assignment(
    trace: Trace, port: int, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, logger = Gate(trace), logging.getLogger("muster.worker")
    logger.addFilter(gate)
    try:
        with trace.recording() as files:
            sessions = started(monkeypatch, threads, port)
    finally:
        logger.removeFilter(gate)
    ended(threads, *sessions)
    assert len(files) <= 23, "\n".join(sorted(files))


def test_one_all_reduce(
    trace: Trace, port: int, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = started(monkeypatch, threads, port)
    x = np.ones(4, np.float32)
    both = threads.submit(second.communicator.barrier)  # what is loaded when it is first used
    muster.barrier()
    both.result(WAIT_S)
    with trace.recording() as files:
        peer = threads.submit(second.communicator.all_reduce, x, np.empty_like(x), ReduceOp.SUM)
        assert muster.all_reduce(x).tolist() == [2, 2, 2, 2]
        peer.result(WAIT_S)
    ended(threads, first, second)
    assert len(files) <= 8, "\n".join(sorted(files))


def train(session: Session, generation: int) -> None:
    """Steps as those of ``plain_loop``, until one is finished in a generation."""
    weights, gradient = np.zeros(10, np.float32), np.ones(10, np.float32)
    state = TrainingState({"weights": weights}, ShardedSampler(1000, 10, seed=0))
    for step in ElasticLoop(session, state, epochs=2):
        with step:
            session.communicator.all_reduce(np.ones(10, np.float32), gradient, ReduceOp.MEAN)
            weights -= 0.1 * gradient
        if step.done and session.generation == generation:
            return


def test_from_a_lost_member_to_the_next_good_step(
    trace: Trace, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """The one that is lost is a process, killed amid a step."""
    with served(3) as port:
        env = environment(**settings_of(port, 2, 3), BLOCK_AFTER="5")
        script = [sys.executable, "-m", "tests.end_to_end.plain_loop", str(tmp_path / "saved")]
        with subprocess.Popen(script, env=env, stdout=subprocess.PIPE, text=True) as lost:
            try:
                survivors = list(threads.map(lambda node: joined(port, node, 3), range(2)))
                training = [threads.submit(train, session, 2) for session in survivors]
                assert lost.stdout is not None
                assert "blocked\n" in iter(lost.stdout.readline, "")
                with trace.recording() as files:
                    lost.kill()
                    for each in training:
                        each.result(WAIT_S)
            finally:
                lost.kill()
        ended(threads, *survivors)
    assert len(files) <= 24, "\n".join(sorted(files))

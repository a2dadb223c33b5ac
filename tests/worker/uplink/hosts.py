"""A host with a real uplink process, whose workers are this process or others."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue

from muster.wire.v1 import rendezvous_pb2 as pb
from muster.worker.config import load_settings
from muster.worker.session.credentials import load_keyring
from muster.worker.session.dialing import grpc_dial
from muster.worker.session.streams import Dial, Stream
from muster.worker.uplink.dialing import dial_by_uplink
from muster.worker.uplink.door import INNER, OUTER, make_door, named
from tests.scheduler.processes import Pki, Scheduler, environment, join
from tests.waiting import LIMIT_S, wait_for

WORKER = """
import os, sys, time
from queue import SimpleQueue
from muster.worker.config import load_settings
from muster.worker.uplink.dialing import dial_by_uplink
def direct(outbox): raise SystemExit("no uplink")
outbox = SimpleQueue()
messages, close = dial_by_uplink(os.environ, direct, load_settings(os.environ))(outbox)
outbox.put(bytes.fromhex(sys.argv[1]))
print(len(next(messages)), flush=True)
if sys.argv[2:] and os.fork() == 0:
    os.setsid()
for _ in messages:
    pass
"""
"""Joins and stays; with another argument a child in a session of its own holds its socket, too."""


def answers(env: Mapping[str, str]) -> bool:
    """Whether the uplink behind the door takes streams: who waits for one too long goes directly."""
    directly: list[bool] = []

    def direct(_: SimpleQueue[bytes | None]) -> Stream:
        directly.append(True)
        return (), lambda: None

    _, close = dial_by_uplink(env, direct, load_settings(env))(SimpleQueue())
    close()
    return not directly


class Host:
    """A door and what is behind it."""

    def __init__(self, directory: Path, scheduler: Scheduler, pki: Pki | None, **env: str) -> None:
        self.inner, self.outer = make_door()
        own = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_PORT": str(scheduler.port)}
        self.env = environment(**{**own, **(pki.env() if pki is not None else {}), **env})
        self.log = directory / "uplink.log"
        self.uplink: subprocess.Popen[bytes] | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self.members: list[Member] = []

    def start(self) -> subprocess.Popen[bytes]:
        """Starts an uplink."""
        env = {**self.env, INNER: named(self.inner)}
        command = [sys.executable, "-W", "error", "-m", "muster.worker.uplink"]
        with self.log.open("ab") as log:
            self.uplink = subprocess.Popen(command, env=env, stderr=log, pass_fds=[self.inner.fileno()])
        self.processes.append(self.uplink)
        return self.uplink

    def dial(self, direct: Dial | None = None, **changes: str) -> Dial:
        """A worker's way to the scheduler."""
        settings = load_settings({**self.env, **changes})
        return dial_by_uplink({OUTER: named(self.outer)}, direct or _nowhere, settings)

    def join(self, node_id: str, dial: Dial | None = None, **changes: object) -> Member:
        """A worker in this process that has asked for a place, by the uplink or as ``dial`` leads."""
        member = Member(dial or self.dial(), node_id, **changes)
        self.members.append(member)
        return member

    def direct(self) -> Dial:
        """Its way without an uplink."""
        settings = load_settings(self.env)
        return grpc_dial(settings, load_keyring(settings, self.env))

    def worker(self, node_id: str, *more: str) -> subprocess.Popen[bytes]:
        """A process of its own that has joined through the door."""
        command = [sys.executable, "-c", WORKER, join(node_id).SerializeToString().hex(), *more]
        env = {**self.env, OUTER: named(self.outer)}
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, pass_fds=[self.outer.fileno()])
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    def has_logged(self, words: str) -> None:
        """Waits for these words in the uplink's log."""
        wait_for(lambda: words in self.log.read_text(), lambda: f"no {words!r} in {self.log.read_text()}")

    def end(self) -> None:
        """Ends everything."""
        for member in self.members:
            member.close()
            for _ in _to_the_end(member):
                pass
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(LIMIT_S)
            if process.stdout is not None:
                process.stdout.close()
        self.inner.close()
        self.outer.close()


def _nowhere(_: SimpleQueue[bytes | None]) -> Stream:
    raise AssertionError("went directly")


@contextlib.contextmanager
def host(directory: Path, scheduler: Scheduler, pki: Pki | None = None, **env: str) -> Iterator[Host]:
    """A host with its uplink."""
    made = Host(directory, scheduler, pki, **env)
    try:
        made.start()
        wait_for(lambda: answers({**made.env, OUTER: named(made.outer)}))
        yield made
    finally:
        made.end()


class Member:
    """A worker in this process: what is put goes out, what comes in is read one by one."""

    def __init__(self, dial: Dial, node_id: str, **changes: object) -> None:
        self.outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self.messages, self.close = dial(self.outbox)
        self.replies = iter(self.messages)
        self.put(join(node_id, **changes))

    def put(self, message: pb.WorkerMessage) -> None:
        self.outbox.put(message.SerializeToString())

    def next(self, body: str) -> pb.SchedulerMessage:
        for data in self.replies:
            message = pb.SchedulerMessage.FromString(data)
            if message.WhichOneof("body") == body:
                return message
        raise AssertionError(f"the stream ended well without {body!r}")

    def end(self) -> Exception | None:
        """Reads to the end; returns what it raised."""
        try:
            for _ in self.replies:
                pass
        except Exception as error:
            return error
        finally:
            self.close()
        return None


def _to_the_end(member: Member) -> Iterator[bytes]:
    with contextlib.suppress(Exception):
        yield from member.replies

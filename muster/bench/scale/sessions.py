"""Runs real sessions of a host's workers in one process; reports each disconnection and step.

Its argument is JSON: the ``indices`` of its workers, and whether a direct connection works, is refused or
gets no answer (``direct``).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from muster.worker.config import Settings, load_settings
from muster.worker.session.connection import SchedulerConnection
from muster.worker.session.credentials import load_keyring
from muster.worker.session.dialing import grpc_dial
from muster.worker.session.incarnation_number import new_incarnation
from muster.worker.session.schedulers import connect_timeout_s
from muster.worker.session.session import Session
from muster.worker.session.streams import Dial, Stream
from muster.worker.uplink.dialing import dial_by_uplink, timing_by_uplink

STEP_S = 0.05
PAUSE_S = 0.5
"""The time after a step's begin from which the next one counts as late, in seconds."""

_printing = threading.Lock()


def main() -> None:
    """Runs the workers until the process is killed."""
    logging.getLogger("muster").setLevel(os.environ["MS_LOG_LEVEL"])
    orders = json.loads(sys.argv[1])
    workers = [_Worker(index, direct=orders["direct"]) for index in orders["indices"]]
    threads = [threading.Thread(target=worker.train, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # a thread ends only by an error, which is on standard error
    sys.exit(1)


class _Worker:
    """One worker's session, with reports about its streams and steps."""

    def __init__(self, index: int, *, direct: str) -> None:
        self._index = index
        self._settings = load_settings({**os.environ, "MS_NODE_ID": f"node-{index}"})
        self._directly = self._late = False
        reach = grpc_dial(self._settings, load_keyring(self._settings, os.environ))
        self._direct: Dial = {"works": reach, "refused": _refused, "silent": _silent}[direct]
        self._session = _session(index, self._settings, self._watched(self._by_uplink()))
        self._step_at = 0.0
        self._telling = threading.Lock()

    def train(self) -> None:
        """Begins one step after the other, through all generations."""
        from muster.errors import MembershipChanged, RefusedError

        session = self._session
        session.open()
        watch = threading.Thread(target=self._look, daemon=True)
        step, self._step_at = 0, time.monotonic()
        generation = session.generation
        self._say("steps", generation=generation)
        watch.start()
        while True:
            try:
                session.step_boundary(step)
            except (MembershipChanged, RefusedError):
                session.rejoin()
                continue
            with self._telling:
                self._step_at = time.monotonic()
                if self._late or generation != session.generation:
                    self._late, generation = False, session.generation
                    self._say("steps", generation=generation)
            step += 1
            session.report(step)
            time.sleep(STEP_S)

    def _look(self) -> None:
        while True:
            time.sleep(PAUSE_S)
            with self._telling:  # so that the report of the pause comes before that of the next step
                if not self._late and time.monotonic() > self._step_at + PAUSE_S:
                    self._late = True
                    self._say("pauses")

    def _by_uplink(self) -> Dial:
        def direct(outbox: SimpleQueue[bytes | None]) -> Stream:
            stream = self._direct(outbox)
            self._directly = True
            return stream

        return dial_by_uplink(os.environ, direct, self._settings)

    def _watched(self, dial: Dial) -> Dial:
        """Wraps a dial with reports of a stream's first message and of its end."""

        def replies(messages: Any) -> Iterator[bytes]:
            directly, there = self._directly, False
            try:
                for message in messages:
                    if not there:
                        there = True
                        self._say("there", directly=directly)
                    yield message
            finally:
                self._say("away")

        def watched(outbox: SimpleQueue[bytes | None]) -> Stream:
            self._directly = False
            messages, close = dial(outbox)
            return replies(messages), close

        return watched

    def _say(self, what: str, **more: object) -> None:
        said = {"worker": self._index, "what": what, "at": time.monotonic(), **more}
        with _printing:
            print(json.dumps(said), flush=True)


def _refused(_: SimpleQueue[bytes | None]) -> Stream:
    raise ConnectionRefusedError("only the uplink reaches the scheduler")


def _silent(_: SimpleQueue[bytes | None]) -> Stream:
    """Times out, as if a firewall dropped the worker's own packets.

    Raises:
        TimeoutError: always, after the connect timeout.
    """
    time.sleep(connect_timeout_s(1))
    raise TimeoutError("nobody answers")


@functools.cache
def _host() -> Any:
    from muster.worker.host import describe_host

    return describe_host(load_settings(os.environ))


def _session(index: int, settings: Settings, dial: Dial) -> Session:
    from muster.communicators.outside import OutsideBackend
    from muster.wire.messages import Device, Profile
    from muster.worker.host import DeviceChoice

    device = DeviceChoice(Device(kind="cpu", index=index))
    backend = OutsideBackend()
    profile = Profile(
        job_id=settings.job_id,
        node_id=settings.node_id,
        incarnation=new_incarnation(),
        worker_num=settings.worker_num,
        worker_min=settings.worker_min,
        host=_host(),
        device=device.device,
        backend=backend.name,
        local_index=index,
    )
    return Session(
        settings,
        profile=profile,
        device=device,
        backend=backend,
        connection=SchedulerConnection(dial),
        timing=timing_by_uplink(),
    )


if __name__ == "__main__":
    main()

"""Joins a job as a spare after some seconds, and prints how long that took; started by ``bench flood``.

The time is measured from the first attempt to connect, TLS included, to the scheduler's welcome; without
imports.
"""

from __future__ import annotations

import os
import sys
import time
from queue import SimpleQueue

from muster.communicators import create_backend
from muster.wire import messages
from muster.wire.codec import decode_scheduler_message, encode
from muster.worker.config import load_settings
from muster.worker.host import describe_host, join_facts
from muster.worker.session.credentials import load_keyring
from muster.worker.session.dialing import grpc_dial
from muster.worker.session.streams import DeniedError, Dial

LIMIT_S = 30.0
PAUSE_S = 0.05


def main() -> None:
    """``python -m muster.bench.flood.join SECONDS``."""
    settings = load_settings(os.environ)
    keyring = load_keyring(settings, os.environ)
    plane = create_backend("tcp", tls=keyring, job_id=settings.job_id, allow_insecure=False)
    profile = messages.Profile(
        job_id=settings.job_id,
        node_id=settings.node_id or "late",
        incarnation=time.time_ns(),
        worker_num=settings.worker_num,
        worker_min=settings.worker_min,
        host=describe_host(settings),
        device=messages.Device("cpu", 0),
        backend="tcp",
        spare=True,
        facts=tuple(sorted(join_facts(plane, os.environ).items())),
    )
    dial = grpc_dial(settings, keyring)
    time.sleep(float(sys.argv[1]))
    began = time.monotonic()
    while time.monotonic() < began + LIMIT_S:
        answer = _answer(dial, profile)
        if isinstance(answer, messages.Refused):
            raise SystemExit(answer.sentence)
        if answer is not None:
            print(time.monotonic() - began, flush=True)
            break
        time.sleep(PAUSE_S)
    os._exit(0)  # gone without a word, like a spare that is killed: the job does not need it


def _answer(dial: Dial, profile: messages.Profile) -> messages.SchedulerMessage | None:
    """Returns the scheduler's first message; None if it could not be reached."""
    outbox: SimpleQueue[bytes | None] = SimpleQueue()
    outbox.put(encode(messages.Join(profile)))
    try:
        return next((decode_scheduler_message(data) for data in dial(outbox)[0]), None)
    except (OSError, DeniedError):
        return None


if __name__ == "__main__":
    main()

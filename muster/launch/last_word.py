"""``python -m muster.launch.last_word``: reports that processes of a launch's workers have ended.

The scheduler sees the loss of a worker by the end of its stream. If the scheduler that saw it is lost as
well, the next leader only sees that the worker does not come back, and waits for it. The launcher knows
better, because it has collected the process. So it starts this program, which reports the end to the leading
scheduler until one has made it durable.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue

from muster.errors import WorkerError
from muster.launch.plan import ENDED_VARIABLE
from muster.wire.json_lines import log_own_process_as_json, process_lines, wanted
from muster.wire.log_lines import BoundedFormatter
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.worker.config import load_settings
from muster.worker.session.credentials import load_keyring
from muster.worker.session.dialing import grpc_dial
from muster.worker.session.streams import DeniedError, Dial, MessageRejectedError

METHOD = "/rendezvous.v1.Rendezvous/ProcessEnded"
AGAIN_S = 0.25
"""Seconds until an ending is reported again."""

log = logging.getLogger("muster.worker")


def tell(
    dial: Dial, words: Iterable[pb.ProcessEndedRequest], pause: Callable[[float], object] = time.sleep
) -> None:
    """Reports each ending to the leading scheduler until it has accepted it; retries while none answers.

    Raises:
        DeniedError: this certificate may not report the ending, or there is no safe connection.
        MessageRejectedError: the scheduler does not know the call.
    """
    for word in words:
        while not _taken(dial, word):
            pause(AGAIN_S)


def _taken(dial: Dial, word: pb.ProcessEndedRequest) -> bool:
    outbox: SimpleQueue[bytes | None] = SimpleQueue()
    outbox.put(word.SerializeToString())
    outbox.put(None)
    try:
        replies, close = dial(outbox)
        try:
            return any(pb.ProcessEndedReply.FromString(data).gone for data in replies)
        finally:
            close()
    except OSError as error:
        log.debug("no scheduler took the report of ended processes: %s", error)
        return False


def main(env: Mapping[str, str] = os.environ) -> int:
    """Reports the endings that the launcher has put into the environment; returns the exit code."""
    if wanted(env):
        log_own_process_as_json("launcher", "muster")
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(BoundedFormatter())
        logging.getLogger("muster").addHandler(handler)
    try:
        settings = load_settings(env)
        process_lines.job = settings.job_id
        logging.getLogger("muster").setLevel(settings.log_level)
        words = [
            pb.ProcessEndedRequest(
                job_id=settings.job_id, node_id=node_id, incarnation=incarnation, detail=detail
            )
            for node_id, incarnation, detail in json.loads(env.get(ENDED_VARIABLE, "[]"))
        ]
        tell(grpc_dial(settings, load_keyring(settings, env), METHOD), words)
    except WorkerError as error:
        log.warning("%s", error)
        return error.exit_code
    except (DeniedError, MessageRejectedError) as error:
        log.warning("The scheduler was not told which processes have ended: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # gRPC's threads may still be in their last call

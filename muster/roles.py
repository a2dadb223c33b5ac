"""``muster.init`` in either role: a worker joins the job; with MS_ROLE=MS_SCHED the process serves it.

Scheduler and worker never import each other, so this module is in a layer above both.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from muster.worker.session.session import Session


def init(backend: str | None = None) -> Session:
    """Joins the job that the environment names; returns when all members can communicate.

    With MS_ROLE=MS_SCHED, which MindSpore's scripts set for their scheduler, it does not return. The process
    is then the job's scheduler, with the settings of ``muster scheduler`` and of ``set_ps_context``. It ends
    with the scheduler's exit code, which is 0 if the job has ended well.

    A second call without a release in between returns the existing session. In a program whose agent holds
    the session (``muster run --program torch``), it returns a session with ranks and reports but without a
    communicator.

    Args:
        backend: "nccl" or "tcp"; None for MS_BACKEND or, if that is not set, "nccl" with GPUs and "tcp"
            without.

    Returns:
        The session, which is also the default session of the functions of this package.

    Raises:
        SettingsError: a variable or argument is wrong; exit code 2.
        SecurityError: TLS failed, or the certificate or identity of either side was not accepted.
        RefusedError: the scheduler has no place for this worker; the message says why.
        SchedulerUnreachableError: the scheduler did not answer within MS_TOPO_TIMEOUT.
        FormationTimeoutError: the group did not form within MS_TOPO_TIMEOUT; the message says who is missing.
        JobEndedError: the job failed before this worker had a place.
        SystemExit: while it waited, SIGTERM (exit code 143) or a drain (0) asked it to leave, or the job
            ended well before this worker, a spare, was needed (0). In the scheduler's role: the scheduler has
            ended.

    An error of Muster that the script does not catch, here or later, ends the script with one sentence and
    the error's exit code. With MS_LOG_LEVEL=DEBUG, the traceback is shown, too.
    """
    from muster.worker import runtime

    if os.environ.get("MS_ROLE", "").strip() == "MS_SCHED":
        _serve(runtime.process.context.for_scheduler(os.environ))
    return runtime.init(backend)


def _serve(env: dict[str, str]) -> NoReturn:
    """Serves the job in this process, which ends with the scheduler's exit code."""
    from muster.scheduler.__main__ import main

    code = main([], env, prog="muster scheduler")
    if "_pytest.main" in sys.modules:
        # The tutorials start their scripts with pytest, which counts SystemExit in a module as a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)

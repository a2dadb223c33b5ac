"""``muster.init`` in either role: a worker joins the job; under MS_ROLE=MS_SCHED the process serves it.

Scheduler and worker never import each other, so that this stands above both.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from muster.worker.session.session import Session


def init(backend: str | None = None) -> Session:
    """Joins the job that the environment names; returns when all members can communicate.

    Under MS_ROLE=MS_SCHED, with which MindSpore's scripts start their scheduler, it does not return: the
    process is the job's scheduler, with the settings of ``muster scheduler`` and of ``set_ps_context``, and
    ends with its exit code, 0 when the job has ended well.

    Called again without a release in between, it returns the session that is there. In a program whose agent
    holds the session (``muster run --program torch``), it returns that: ranks and reports, no communicator.

    Args:
        backend: "nccl" or "tcp"; None: MS_BACKEND, else "nccl" where there are GPUs, else "tcp".

    Returns:
        The session, which is also the default one of the functions of this package.

    Raises:
        SettingsError: a variable or argument is wrong; exit code 2.
        SecurityError: TLS, certificate or identity failed on either side.
        RefusedError: the scheduler has no place for this worker; says why.
        SchedulerUnreachableError: the scheduler did not answer within MS_TOPO_TIMEOUT.
        FormationTimeoutError: the group did not form within it; says who is missing.
        JobEndedError: the job failed before this worker was in.
        SystemExit: while it waited it was asked to leave, by SIGTERM (exit code 143) or a drain (0), or the
            job ended well before this worker, a spare, was needed (0); or as a scheduler it has ended.

    An error that the script does not catch ends it with one sentence and the error's exit code, now and
    later; the traceback is shown with MS_LOG_LEVEL=DEBUG.
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
        # The tutorials start their scripts with pytest, to which an exit of a module or test is a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)

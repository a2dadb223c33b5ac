"""The GPU of a session's worker: readings for heartbeats, and checks before a join and after a loss."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.wire.messages import GpuReport
    from muster.worker.gpu_health.check import GpuCheck
    from muster.worker.gpu_health.trial import GpuVerdict
    from muster.worker.gpu_health.watch import GpuWatch

log = logging.getLogger("muster.worker")

MEMBERS_A_SECOND = 100
"""How many members of a group report on their GPUs in one second, at most."""


class OwnGpu:
    """Reads and checks the session's GPU; does nothing if there is none.

    Args:
        watch: creates the reader of the GPU with CUDA's given number in this process.
        check: checks the GPU; None for no check.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        watch: Callable[[int], GpuWatch] | None = None,
        check: GpuCheck | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_watch = watch
        self._watch: GpuWatch | None = None
        self._check = check
        self._clock = clock
        self._due = self._apart_s = 0.0

    def watch(self, ordinal: int, members: int = 1) -> None:
        """Starts to read the GPU, once a place has determined which one it is.

        Args:
            ordinal: CUDA's number of the GPU in this process; -1 if there is none.
            members: number of members of the group. Members of a large group report less often, which limits
                the total cost.
        """
        self._apart_s = members / MEMBERS_A_SECOND
        if self._make_watch is not None and self._watch is None and ordinal >= 0:
            self._watch = self._make_watch(ordinal)
            self._watch.start()

    def take(self) -> GpuReport | None:
        """Returns the reading since the last call; None if there is none, or if it is not due yet."""
        now = self._clock()
        if self._watch is None or now < self._due:
            return None
        report = self._watch.take()
        if report is not None:
            self._due = now + self._apart_s
        return report

    def fault_before_join(self) -> str:
        """Checks the GPU before a join; returns how it has failed, or "" if healthy or not to be checked."""
        return "" if self._check is None else _fault(self._check.before_join())

    def fault_after_loss(self) -> str:
        """Does the same after members were lost."""
        return "" if self._check is None else _fault(self._check.after_loss())

    def close(self) -> None:
        """Ends reading and checking."""
        if self._watch is not None:
            self._watch.close()
        if self._check is not None:
            self._check.close()


def _fault(verdict: GpuVerdict) -> str:
    if verdict.word == "failed":
        return verdict.reason
    if verdict.word == "unknown":
        log.warning("the GPU could not be checked: %s", verdict.reason)
    else:
        log.info("the GPU has passed its check in %.1f s", verdict.seconds)
    return ""

"""Checks a worker's GPU: in a separate process, or in this one if torch already has the GPU open.

``python -m muster.worker.gpu_health.check N`` is that process, for the GPU with CUDA's number N. It writes to
stdout when the GPU is open, and then the result of its test.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from muster.wire.threads import start_thread
from muster.worker.gpu_health.torch_gpu import TorchGpu
from muster.worker.gpu_health.trial import FAILED, LIMIT_S, UNKNOWN, GpuVerdict, is_fault, try_gpu

log = logging.getLogger("muster.worker")

OPEN_S = 60.0
"""How long loading torch and opening the GPU may take, in seconds, while other workers do the same."""

OVER_S = 1.0
"""How much longer than the test's own limit to wait for it, in seconds; after that it counts as hanging."""

BEGUN = b"begun\n"


class CheckProcess:
    """A process that tests a GPU; it starts immediately.

    Args:
        command: the command to run; its output must be like that of this module's ``main``.
        open_s: how long it may take until it begins to test.
        limit_s: how long its test may take.
    """

    def __init__(self, command: Sequence[str], *, open_s: float = OPEN_S, limit_s: float = LIMIT_S) -> None:
        self._open_s, self._limit_s = open_s, limit_s
        self._begun_at = time.monotonic()
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def verdict(self) -> GpuVerdict:
        """Waits for the result. If the process hangs or dies during the test, the GPU has failed."""
        begun = time.monotonic()
        try:
            if not self._hear(len(BEGUN), self._begun_at + self._open_s).startswith(BEGUN):
                return GpuVerdict(UNKNOWN, f"it was not opened: {self._end()}", time.monotonic() - begun)
            said = self._hear(4096, time.monotonic() + self._limit_s + OVER_S)
            with contextlib.suppress(ValueError, TypeError):
                return GpuVerdict(**json.loads(said))
            return GpuVerdict(
                FAILED, f"its test did not come to an end: {self._end()}", time.monotonic() - begun
            )
        finally:
            self.close()

    def _hear(self, most: int, until: float) -> bytes:
        """Reads the process's output: at most ``most`` bytes, until its end or the time ``until``."""
        assert self._process.stdout is not None
        heard, pipe = b"", self._process.stdout.fileno()
        while len(heard) < most and select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            more = os.read(pipe, most - len(heard))
            if not more:
                break
            heard += more
        return heard

    def _end(self) -> str:
        """Describes how the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(0.2)
            return (
                f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            )
        return "its process hangs"

    def close(self) -> None:
        """Ends the process. A process that the kernel cannot end is left alone."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        if self._process.stdout is not None:
            self._process.stdout.close()


class GpuCheck:
    """The check of one worker's GPU, before it joins and after others are lost.

    Args:
        ordinal: CUDA's number of the GPU in this process.
        begin: starts a process that tests it.
        opened: returns the GPU if this process has opened it through torch, otherwise None.
    """

    def __init__(
        self,
        ordinal: int,
        *,
        begin: Callable[[int], CheckProcess] | None = None,
        opened: Callable[[int], Any] | None = None,
    ) -> None:
        self._ordinal = ordinal
        self._begin = begin or begin_process
        self._opened = opened or opened_here
        self._process: CheckProcess | None = None
        self._obstacle = "torch is not installed here"

    def begin(self) -> None:
        """Starts the check that :meth:`before_join` waits for."""
        if self._process is not None or find_spec("torch") is None:
            return
        try:
            self._process = self._begin(self._ordinal)
        except OSError as error:
            self._obstacle = f"its process was not started: {error.strerror or error}"

    def before_join(self) -> GpuVerdict:
        """Waits for the result of the check before a join."""
        self.begin()
        process, self._process = self._process, None
        if process is None:
            return GpuVerdict(UNKNOWN, self._obstacle)
        return process.verdict()

    def after_loss(self) -> GpuVerdict:
        """Checks the GPU again; in this process if torch has opened the GPU here, which takes a moment.

        Otherwise, this is the same check as before a join.
        """
        gpu = self._opened(self._ordinal)
        return self.before_join() if gpu is None else check_here(gpu)

    def close(self) -> None:
        """Ends a check whose result nobody waits for."""
        if self._process is not None:
            self._process.close()


def begin_process(ordinal: int) -> CheckProcess:
    """Starts to test a GPU in a separate process."""
    return CheckProcess([sys.executable, "-m", "muster.worker.gpu_health.check", str(ordinal)])


def opened_here(ordinal: int) -> Any:
    """Returns the GPU, if torch has opened it in this process; otherwise None."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return lambda: TorchGpu(f"cuda:{ordinal}")


def check_here(
    open_gpu: Callable[[], Any], *, open_s: float = OPEN_S, limit_s: float = LIMIT_S
) -> GpuVerdict:
    """Tests a GPU in this process, on a thread, so that a hanging test is waited for only until its limit."""
    found: list[GpuVerdict] = []
    opened, done = threading.Event(), threading.Event()

    def run() -> None:
        try:
            gpu = open_gpu()
            opened.set()
            found.append(try_gpu(gpu, time.monotonic, limit_s))
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            found.append(GpuVerdict(FAILED if is_fault(error) else UNKNOWN, text))
        finally:
            opened.set()
            done.set()

    begun = time.monotonic()
    start_thread(run, name="muster-gpu-check")
    if not opened.wait(open_s):
        return GpuVerdict(UNKNOWN, "it was not opened: that hangs", time.monotonic() - begun)
    done.wait(limit_s + OVER_S)
    return found[0] if found else GpuVerdict(FAILED, "its test hangs", time.monotonic() - begun)


def main(arguments: Sequence[str]) -> int:
    """Tests a GPU, and writes the result to stdout."""
    gpu = TorchGpu(f"cuda:{int(arguments[0])}")
    sys.stdout.buffer.write(BEGUN)
    sys.stdout.buffer.flush()
    verdict = try_gpu(gpu, time.monotonic)
    print(json.dumps(vars(verdict)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

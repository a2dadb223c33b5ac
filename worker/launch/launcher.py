"""The local launcher's loop: starts the scheduler and this host's workers and sees them to their end.

One thread, one loop over the processes' pipes and the signals. What to start is decided before
(:mod:`muster.worker.launch.plan`); here it is only carried out.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from muster.worker.errors import SIGTERM_EXIT_CODE
from muster.worker.launch.guardian import Guardian
from muster.worker.launch.process import Child, Recipe, say, spawn, timestamp, write
from muster.worker.launch.report import (
    Ending,
    describe_exit,
    describe_other,
    exit_status,
    first_failure,
    shortened,
)

SCHEDULER_LINGER_S = 2.0
"""How long the scheduler may take to end after its workers, or workers after it failed."""

SETTLE_S = 2.0
"""How long after a failure the scheduler's word on who failed first may take to come, and that one to end."""

LOOK_S = 0.02
"""How often it is looked for meanwhile."""

STRAGGLING_S = 5.0
"""How long workers may run on after one that ended well before that is told."""

OTHERS_SHOWN = 16
"""Of so many workers the end is told in a line each."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}


@dataclass(frozen=True, slots=True)
class Policy:
    """What the launcher does when a process ends, and how it shows output."""

    grace_s: float = 10.0
    max_restarts: int = 0
    min_workers: int = 0
    """Workers that are enough to go on with; 0: all of them."""

    timestamps: bool = False


class Launcher:
    """Runs one launch from start to end.

    Args:
        policy: see :class:`Policy`.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._guardian = Guardian()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in (*_ENDING, *_PASSED_ON, signal.SIGCHLD):
            signal.signal(number, _noted)
        self._workers: list[Child] = []
        self._scheduler: Child | None = None
        self._status = 0
        self._stopping = False
        self._interrupted = False
        self._deadline: float | None = None
        self._next_signal = signal.SIGTERM
        self._straggling_at: float | None = None
        self._failed_at: float | None = None
        self._settled = False
        self._ended_count = 0
        self._replaced: frozenset[tuple[str, int]] = frozenset()

    def start_scheduler(self, recipe: Recipe | None) -> None:
        """Starts the scheduler, beside all that is done before the workers start; None: it runs elsewhere.

        Raises:
            SettingsError: its log cannot be written.
        """
        if recipe is not None:
            self._scheduler = self._start(recipe)

    # ------------------------------------------------------------ the loop

    def run(self, workers: Sequence[Recipe]) -> int:
        """Starts the workers and returns the exit code of the launch when everything has ended.

        Raises:
            SettingsError: a log cannot be written.
        """
        for recipe in workers:
            self._workers.append(self._start(recipe))
        while self._alive():
            for key, _ in self._selector.select(self._patience_s()):
                if isinstance(key.data, Child):
                    self._pump(key.data)
                else:
                    self._take_signals()
            self._reap()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._overdue()
            if self._straggling_at is not None and time.monotonic() >= self._straggling_at:
                self._tell_stragglers()
            if self._failed_at is not None and not self._settled:
                self._settle()
        if self._failed_at is not None:
            self._blame_first()
        elif not self._status and self._workers and all(each.words().left for each in self._workers):
            self._status = SIGTERM_EXIT_CODE if self._left_by_sigterm() else 0
        self.close()
        return self._status

    def _left_by_sigterm(self) -> bool:
        return any(worker.returncode == SIGTERM_EXIT_CODE for worker in self._workers)

    def _patience_s(self) -> float | None:
        """How long nothing needs to be done unless something happens; None: for ever."""
        if self._failed_at is not None and not self._settled:
            return LOOK_S
        ends = [end for end in (self._deadline, self._straggling_at) if end is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def abandon(self) -> None:
        """Ends everything at once: the launcher itself has failed."""
        for child in self._alive():
            child.signal(signal.SIGKILL)
        for child in self._alive():
            while not child.reap(self._guardian):
                time.sleep(0.001)
        self.close()

    def close(self) -> None:
        """Lets go of pipes, logs and the guardian."""
        for child in self._all():
            child.forget()
        self._let_go()
        self._guardian.close()

    def forget(self) -> None:
        """In a forked worker: closes what belongs to the launcher."""
        for child in self._all():
            child.forget()
        self._let_go()
        self._guardian.forget()

    def _let_go(self) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    # ------------------------------------------------------------ processes

    def _all(self) -> list[Child]:
        return self._workers + ([self._scheduler] if self._scheduler else [])

    def _alive(self) -> list[Child]:
        return [child for child in self._all() if child.returncode is None]

    def _working(self) -> bool:
        return any(worker.returncode is None for worker in self._workers)

    def _start(self, recipe: Recipe, *, again: bool = False) -> Child:
        child = spawn(recipe, self._guardian, log_needed=not again)
        self._selector.register(child.output, selectors.EVENT_READ, child)
        return child

    def _pump(self, child: Child) -> bool:
        descriptor = child.output
        more = child.pump(self._show, stamp=self._policy.timestamps)
        if not child.open and descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
        return more

    def _reap(self) -> None:
        for child in self._all():
            if child.reap(self._guardian):
                while self._pump(child):
                    pass
                if child.open:  # something that left the group still holds the pipe
                    self._selector.unregister(child.output)
                    child.close()
                self._ended(child)

    def _ended(self, child: Child) -> None:
        code = child.returncode or 0
        child.order = self._ended_count = self._ended_count + 1
        if child is self._scheduler:
            self._scheduler_ended(child, code)
        elif code and not self._stopping and not child.words().left:
            self._worker_failed(child, code)
        elif not self._stopping:
            self._straggling_at = time.monotonic() + STRAGGLING_S
        if not self._working():
            self._workers_done()

    def _worker_failed(self, child: Child, code: int) -> None:
        if self._failed_at is not None:
            return
        how = _how(code)
        if child.restarts < self._policy.max_restarts:
            count = f"{child.restarts + 1} of {self._policy.max_restarts}"
            say(f"worker {child.label} {how}; starting it again ({count})")
            again = self._start(child.recipe, again=True)
            again.restarts = child.restarts + 1
            self._replaced |= child.words().places
            self._workers[self._workers.index(child)] = again
            return
        left = sum(worker.returncode in (None, 0) or worker.words().left for worker in self._workers)
        if self._policy.min_workers and left >= self._policy.min_workers:
            say(f"worker {child.label} {how}; going on with {left}")
            return
        self._failed_at = time.monotonic()

    def _settle(self) -> None:
        """Ends the workers that are left once it is known who failed first, and that one has ended.

        Asked to end before, it might not come to say why it fails.
        """
        assert self._failed_at is not None
        if (
            first_failure(self._endings(), self._replaced).sure
            or time.monotonic() >= self._failed_at + SETTLE_S
        ):
            self._settled = True
            if not self._stopping:
                self._stop(signal.SIGTERM)

    def _endings(self) -> list[Ending]:
        return [Ending(each.returncode, each.order, each.stopped, each.words()) for each in self._workers]

    def _scheduler_ended(self, child: Child, code: int) -> None:
        if not code or self._stopping or not self._working():
            return
        if child.restarts < self._policy.max_restarts:
            say(f"the scheduler {_how(code)}; starting it again")
            self._scheduler = self._start(child.recipe, again=True)
            self._scheduler.restarts = child.restarts + 1
            return
        self._blame(child, code)
        self._stopping = True  # the workers know the reason too and end with it, or are made to
        self._give(SCHEDULER_LINGER_S, then=signal.SIGTERM)

    def _workers_done(self) -> None:
        """Nothing is left to do but to see the scheduler end: by itself if all went well."""
        scheduler = self._scheduler
        if scheduler is None or scheduler.returncode is not None:
            return
        if self._stopping or self._failed_at is not None:
            self._stopping = True
            scheduler.signal(signal.SIGTERM)
            self._give(self._policy.grace_s, then=signal.SIGKILL)
        else:
            self._stopping = True
            self._give(SCHEDULER_LINGER_S, then=signal.SIGTERM)

    def _tell_stragglers(self) -> None:
        """Workers of one job end together; if not, one left early, and the others may wait for another."""
        self._straggling_at = None
        done = ", ".join(worker.label for worker in self._workers if worker.returncode == 0)
        left = ", ".join(worker.label for worker in self._workers if worker.returncode is None)
        if left and not self._stopping:
            say(f"ended well: worker {done}; still running: worker {left}; their logs say what they wait for")

    # ------------------------------------------------------------ endings

    def _blame(self, child: Child, code: int, why: str = "") -> None:
        """Takes this process's code as the launch's and shows why it ended."""
        self._status = self._status or exit_status(code) or 1
        where = f"pid {child.pid} on {os.uname().nodename}"
        if why:
            say(shortened(f"{self._name(child)} failed first: {why}"))
        say(f"{self._name(child)} ({where}) {_how(code)}; the end of {child.recipe.log_path}:")
        for line in child.last_lines:
            write(sys.stderr.fileno(), b"    " + line + b"\n")

    def _blame_first(self) -> None:
        """Shows who failed first, and how, and of each other worker in a line how it ended."""
        endings = self._endings()
        verdict = first_failure(endings, self._replaced)
        first = verdict.elsewhere
        if verdict.index is not None:
            child, words = self._workers[verdict.index], endings[verdict.index].words
            lost = next((e.words.first for e in endings if e.words.first is not None), None)
            seen = lost.sentence if lost is not None and not words.error else ""
            self._blame(child, child.returncode or 0, words.error or seen)
        elif first is not None:
            self._status = self._status or first.exit_code or self._first_code(endings) or 1
            say(shortened(f"the first to fail runs elsewhere, where its log says more: {first.sentence}"))
        others = [i for i, each in enumerate(endings) if i != verdict.index and each.code is not None]
        for i in others[:OTHERS_SHOWN]:
            say(shortened(f"worker {self._workers[i].label} {describe_other(endings[i], _SIGNAL_NAMES)}"))
        if len(others) > OTHERS_SHOWN:
            say(f"and {len(others) - OTHERS_SHOWN} more")

    @staticmethod
    def _first_code(endings: Sequence[Ending]) -> int:
        failed = sorted((each for each in endings if each.failed), key=lambda each: each.order)
        return exit_status(failed[0].code or 0) if failed else 0

    def _name(self, child: Child) -> str:
        return "the scheduler" if child is self._scheduler else f"worker {child.label}"

    def _stop(self, number: int) -> None:
        """Asks the workers to end; what is left after the grace is killed."""
        self._stopping = True
        for worker in self._workers:
            worker.signal(number)
        self._give(self._policy.grace_s, then=signal.SIGKILL)

    def _give(self, seconds: float, *, then: signal.Signals) -> None:
        """Lets the processes that remain have some time, after which they get this signal."""
        self._deadline = time.monotonic() + seconds
        self._next_signal = then

    def _overdue(self) -> None:
        """The time is up. The scheduler has been asked to end only if no worker is left."""
        number = self._next_signal
        late = [child for child in self._alive() if child is not self._scheduler or not self._working()]
        for child in late:
            if number == signal.SIGKILL:
                waited = f"did not end within {self._policy.grace_s:g} s; killed"
                say(f"{self._name(child)} (pid {child.pid}) {waited}")
            child.signal(number)
        self._deadline = None
        if number != signal.SIGKILL:
            self._give(self._policy.grace_s, then=signal.SIGKILL)

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._wake_read.recv(256):
                if number in _PASSED_ON:
                    for worker in self._workers:
                        worker.signal(number)
                elif number in _ENDING:
                    self._asked_to_end(signal.Signals(number))

    def _asked_to_end(self, number: signal.Signals) -> None:
        self._status = self._status or 128 + number
        if self._interrupted:
            say(f"{number.name} again: killing everything")
            for child in self._alive():
                child.signal(signal.SIGKILL)
            return
        self._interrupted = True
        say(f"{number.name}: ending the workers; once more kills them at once")
        self._stop(number)
        if not self._working():
            self._workers_done()

    # ------------------------------------------------------------ the terminal

    def _show(self, child: Child, lines: Sequence[bytes]) -> None:
        head = b"[%s] " % child.label.encode()
        if self._policy.timestamps:
            head = timestamp() + b" " + head
        write(sys.stdout.fileno(), b"".join(head + line + b"\n" for line in lines))


def _how(code: int) -> str:
    return describe_exit(code, _SIGNAL_NAMES)


def _noted(_number: int, _frame: object) -> None:
    """The wake-up descriptor has told the loop."""

"""The launcher's loop: starts the scheduler and this host's workers, and waits for their end.

One thread runs one loop over the processes' pipes and the signals. The plan is made before
(:mod:`muster.launch.plan`), and is only carried out here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import selectors
import shlex
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from muster.errors import SIGTERM_EXIT_CODE, SettingsError
from muster.launch import fork
from muster.launch.last_stacks import LastStacks
from muster.launch.plan import ENDED_VARIABLE, LaunchPlan, Recipe
from muster.launch.process import Child, Guardian, reap, spawn, timestamp
from muster.launch.programs import AGENT
from muster.launch.report import (
    SUSPENDED,
    Ending,
    Verdict,
    Waits,
    advice_on_wait,
    describe_exit,
    describe_group,
    describe_other,
    describe_progress,
    duration,
    exit_status,
    figures_of,
    first_failure,
)
from muster.launch.screen import Screen, shortened
from muster.wire.json_lines import process_lines
from muster.wire.launches import RUNS, LaunchDirectory, RunRecord
from muster.worker.uplink.door import INNER, OUTER, make_door, named

SCHEDULER_LINGER_S = 2.0
"""How long the scheduler may take to end after its workers, in seconds."""

SETTLE_S = 2.0
"""How long the launcher waits, after a failure, to learn from the scheduler who failed first, in seconds."""

LOOK_S = 0.02
"""How often the launcher checks for that report, in seconds."""

WAITING_S = 2.0
"""How long workers wait for a replacement before the launcher shows it, in seconds."""

FORMING_S, FORMING_LENGTH = 5.0, 92
"""Seconds until the launcher shows for which workers a forming group waits; maximum length of the line."""

FOLLOW_S, LOOK_UP_S = 0.1, 0.5
"""Polling intervals of the workers' notes, in seconds: while forming or showing progress; otherwise."""

STRAGGLING_S = 5.0
"""How long workers may still run after one that ended well before the launcher shows it, in seconds."""

UPLINK_RESTARTS = 8
"""How many times an uplink is restarted."""

LAST_WORD_S = 12.0
"""How long endings are reported after the last worker's end, in seconds; later the scheduler knows anyway."""

OTHERS_SHOWN = 16
"""Maximum number of workers whose end is shown, in a line each."""

_NO_RANK = re.compile(
    rb"environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set"
)
"""The words of torch's error for a missing rank."""

_OF_THIS_LAUNCH = ("MS_LEAVE_TIMEOUT", "MS_CLIENT_PASSWORD")
"""Variables that a worker started by hand does not need, or for which it asks the user."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}


class Launcher:
    """Runs one launch from start to end. Nothing is started before :meth:`run`.

    Args:
        plan: the plan of the launch.
        screen: shows to the user what happens.
    """

    def __init__(self, plan: LaunchPlan, screen: Screen) -> None:
        self._plan, self._policy, self._screen = plan, plan.policy, screen
        self._selector = selectors.DefaultSelector()
        self._workers: list[Child] = []
        self._scheduler: Child | None = None
        self._uplink: Child | None = None
        self._last_words: list[Child] = []
        self._last_words_until: float | None = None
        self._door: tuple[socket.socket, ...] = ()
        self._inherits = -1
        self._again: list[Child] = []
        self._status = 0
        self._stopping = False
        self._interrupted = False
        self._deadline: float | None = None
        self._next_signal = signal.SIGTERM
        self._straggling_at: float | None = None
        self._failed_at: float | None = None
        self._settled = False
        self._told_replacement = False
        self._ended_count = 0
        self._replaced: frozenset[tuple[str, int]] = frozenset()
        self._generation = 0
        self._noted = -1
        self._waits = Waits()

    # ------------------------------------------------------------ the loop

    def run(self) -> int | Callable[[], None]:
        """Starts everything and waits for its end.

        Returns:
            The launch's exit code. In a forked worker: the function that runs its command, for the
            caller to call.

        Raises:
            SettingsError: a log cannot be written, or the configuration cannot be read.
        """
        began_s = time.monotonic()
        for note in self._plan.notes:
            self._screen.say(note)
        self._directory = self._make_directory()
        self._history = self._begin_history()
        self._guardian, self._stacks = Guardian.start(), LastStacks()
        self._watch_signals()
        try:
            become = self._start_all() or self._see_to_the_end()
        except BaseException:
            self._abandon()
            raise
        if become is not None:
            self._forget()
            return become
        if self._workers:
            self._history.figures(**figures_of(self._workers[0].progress()))
        self._close()
        self._say_how_it_ended(time.monotonic() - began_s)
        return self._status

    def _make_directory(self) -> LaunchDirectory:
        plan = self._plan
        try:
            return LaunchDirectory.begin(
                plan.job_id, plan.log_dir, shared=plan.counts.world_size > plan.counts.local_size
            )
        except OSError as error:
            if plan.log_dir is not None:
                what = f"--log-dir {plan.log_dir} cannot be written: {error.strerror}."
            else:
                what = f"{RUNS} cannot be written: {error.strerror}; name another directory with --log-dir."
            raise SettingsError(what) from error

    def _begin_history(self) -> RunRecord:
        """Begins the run's record in its directory."""
        plan = self._plan
        history = RunRecord(self._directory.path, os.uname().nodename)
        history.note(
            "began",
            job_id=plan.job_id,
            host=os.uname().nodename,
            workers=plan.counts.world_size,
            workers_here=len(plan.workers),
            command=shortened(" ".join(plan.recipes[0].argv) if plan.recipes else "", 1000),
        )
        for note in plan.notes:
            history.note("said", text=note)
        self._screen.heard = lambda sentence, kind: history.note("said", text=sentence, tone=kind)
        return history

    def _watch_signals(self) -> None:
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in (*_ENDING, *_PASSED_ON, signal.SIGCHLD):
            signal.signal(number, _noted)

    def _behind_the_door(self, recipe: Recipe) -> Recipe:
        """Adds to a process's recipe its end of the socket pair between workers and uplink."""
        if not self._door:
            return recipe
        inner, outer = self._door
        variable, end = (INNER, inner) if recipe is self._plan.uplink else (OUTER, outer)
        return replace(recipe, env={**recipe.env, variable: named(end)}, inherits=end.fileno())

    def _start_all(self) -> Callable[[], None] | None:
        """Starts the scheduler and the workers; first imports the modules that forked processes need."""
        plan = self._plan
        if plan.scheduler is not None:
            env = {**self._directory.incidents(os.environ), **plan.scheduler.env}
            recipe = fork.warmed_scheduler(replace(plan.scheduler, env=env), plan.config_path)
            self._scheduler = self._start(recipe)
            if self._scheduler is None:
                return functools.partial(fork.become, recipe)
        if plan.uplink is not None:  # not earlier, or the guardian would keep it open
            self._door = make_door()
        self._directory.publish(
            host=plan.address[0],
            port=plan.address[1],
            config=plan.config_path,
            password_file=plan.password_file,
        )
        recipes = [self._behind_the_door(each) for each in (plan.uplink, *plan.recipes) if each is not None]
        if plan.forks and not self._warm_up():
            recipes = [replace(recipe, forked=False) for recipe in recipes]
        for recipe in recipes:
            child = self._start(recipe)
            if child is None:
                return functools.partial(fork.become, recipe)
            if recipe.last:
                self._uplink = child
            else:
                self._workers.append(child)
        fork.forget()
        return None

    def _warm_up(self) -> bool:
        """Imports the modules that workers need; returns False if workers cannot be forked after that."""
        from muster.certs.errors import CertificateError

        os.environ.update(self._plan.common)  # some libraries read their variables when loaded
        try:
            fork.warm_up(self._plan.config_path, self._plan.recipes[0].environment(os.environ))
        except CertificateError as error:
            raise SettingsError(error.message, remedy=error.remedy) from error
        if fork.threads() == 1:
            return True
        if self._plan.start == "fork":
            self._screen.say("--start fork: a library has started threads; starting each worker afresh")
        return False

    def _see_to_the_end(self) -> Callable[[], None] | None:
        while self._alive() or self._again:
            for key, _ in self._selector.select(self._patience_s()):
                if isinstance(key.data, Child):
                    self._pump(key.data)
                else:
                    self._take_signals()
            self._reap()
            become = self._start_again()
            if become is not None:
                return become
            self._end_the_late()
            now_s = time.monotonic()
            if self._deadline is not None and now_s >= self._deadline:
                self._overdue()
            if self._straggling_at is not None and now_s >= self._straggling_at:
                self._show_stragglers()
            if self._last_words_until is not None and now_s >= self._last_words_until:
                self._end_last_words()
            if self._failed_at is not None and not self._settled:
                self._settle()
            self._follow()
        if self._failed_at is not None:
            self._blame_first()
        elif not self._status and self._workers and all(each.words().left for each in self._workers):
            self._status = SIGTERM_EXIT_CODE if self._left_by_sigterm() else 0
        return None

    def _start_again(self) -> Callable[[], None] | None:
        """Restarts the processes that have ended and may be restarted."""
        while self._again:
            ended = self._again.pop(0)
            if ended is self._uplink and not self._working():
                continue
            ended.forget()
            recipe = ended.recipe
            if ended is self._scheduler:  # gRPC was imported with the workers' variables
                recipe = replace(recipe, forked=False)
            child = self._start(recipe, again=True)
            if child is None:
                return functools.partial(fork.become, recipe)
            child.restarts = ended.restarts + 1
            if ended is self._scheduler:
                self._scheduler = child
            elif ended is self._uplink:
                self._uplink = child
            else:
                self._workers[self._workers.index(ended)] = child
        return None

    def _left_by_sigterm(self) -> bool:
        return any(worker.returncode == SIGTERM_EXIT_CODE for worker in self._workers)

    def _patience_s(self) -> float | None:
        """Seconds until the loop has to run again without an event; None: for ever."""
        if self._failed_at is not None and not self._settled:
            return LOOK_S
        dues = (self._deadline, self._straggling_at, self._last_words_until)
        ends = [end for end in dues if end is not None]
        patience_s = max(0.0, min(ends) - time.monotonic()) if ends else None
        if self._stopping or not self._workers:
            return patience_s
        look_s = FOLLOW_S if self._screen.live or not self._generation else LOOK_UP_S
        return look_s if patience_s is None else min(look_s, patience_s)

    def _abandon(self) -> None:
        """Kills everything at once: the launcher itself has failed."""
        for child in self._alive():
            child.signal(signal.SIGKILL)
        while alive := self._alive():
            for _ in reap(alive, self._guardian):
                pass
            time.sleep(0.001)
        self._close()

    def _close(self) -> None:
        """Closes pipes, logs and the guardian."""
        self._screen.close()
        self._let_go()
        self._guardian.close()
        self._directory.withdraw()

    def _forget(self) -> None:
        """Closes, in a forked process, the launcher's descriptors that the process does not inherit."""
        for end in self._door:
            if end.fileno() == self._inherits:
                end.detach()
        self._let_go()
        self._guardian.forget()

    def _let_go(self) -> None:
        for child in self._all():
            child.forget()
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()
        self._close_door()
        self._stacks.close()

    def _close_door(self) -> None:
        for end in self._door:
            end.close()
        self._door = ()

    # ------------------------------------------------------------ what the workers note

    def _follow(self) -> None:
        """Shows what workers have noted: the group, the workers that it waits for, and its progress."""
        self._stacks.look(self._workers, self._directory.path, self._screen.say)
        known = self._workers if not self._generation else [w for w in self._workers if w.returncode is None]
        worker = next((each for each in known if each.returncode is None), known[0] if known else None)
        if worker is None or (self._stopping and self._generation):
            self._screen.close()
            return
        if worker.noted() != self._noted:
            self._noted = worker.noted()
            words = worker.words()
            number = words.group.get("generation", 0)
            if isinstance(number, int) and number > self._generation:
                self._generation = number
                self._history.note("group", **words.group)
                text, encrypted = describe_group(words.group, encrypts_gloo=words.encrypts_gloo)
                self._screen.say_group(number, text, "" if encrypted else "warning")
            after_s = WAITING_S if self._generation else FORMING_S
            over = self._waits.hear(words.waits, words.phase, time.monotonic(), after_s=after_s)
            if over and words.goes_on:
                self._screen.say(words.goes_on, "good")
        if self._failed_at is None and (sentence := self._waits.take(time.monotonic())):
            self._show_wait(sentence, worker.words().phase)
        if self._screen.live or self._history.wants_figures:
            self._follow_figures(worker.progress())

    def _follow_figures(self, noted: bytes) -> None:
        """Shows the training's progress, and adds it to the run's record when due."""
        progress = describe_progress(noted)
        if progress is None:
            return
        if self._screen.live:
            self._screen.follow(*progress)
        if self._history.wants_figures:
            self._history.figures(**figures_of(noted))

    def _show_wait(self, sentence: str, phase: str) -> None:
        """Shows which workers the others wait for, and which option would help."""
        if not self._generation:
            self._screen.say(shortened(sentence, FORMING_LENGTH))
            return
        process_lines.over()
        advice = advice_on_wait(
            phase,
            min_workers=self._policy.min_workers,
            max_restarts=self._policy.max_restarts,
            workers=self._plan.counts.world_size,
            spares=self._policy.spares,
            replacement=self._replacement() if phase == SUSPENDED else "",
        )
        self._screen.say(f"{sentence} {advice}".rstrip(), "warning")

    def _replacement(self, ended: Child | None = None) -> str:
        """Returns the command line that replaces a worker of this launch that has ended."""
        gone = (each for each in self._workers if each.returncode is not None)
        ended = ended or next(gone, None)
        if ended is None or ended in self._again:
            return ""
        env = ended.recipe.env
        own = {name for name in env if name.startswith("MS_")} - set(_OF_THIS_LAUNCH)
        names = sorted(own | ({"CUDA_VISIBLE_DEVICES", "DEVICE_ID"} & env.keys()))
        return shlex.join(["env", *(f"{name}={env[name]}" for name in names), *ended.recipe.argv])

    def _say_how_it_ended(self, seconds: float) -> None:
        self._history.note("ended", code=self._status)
        after = f"after {duration(seconds)}; logs: {self._directory.path}"
        if self._status and any(map(_lacked_ranks, self._workers)):
            self._screen.say(
                "this command was not recognized as a program of torch.distributed, so it got no RANK:"
                " start it with muster run --program torch",
                "warning",
            )
        if self._status:
            self._screen.say(f"ended with exit code {self._status} {after}", "error")
            return
        if self._workers and not any(worker.words().places for worker in self._workers):
            self._screen.say("no worker joined the job: the command never called muster.init()", "warning")
        self._screen.say(f"ended well {after}", "good")

    # ------------------------------------------------------------ processes

    def _all(self) -> list[Child]:
        others = [each for each in (self._uplink, self._scheduler) if each is not None]
        return [*self._workers, *self._last_words, *others]

    def _alive(self) -> list[Child]:
        return [child for child in self._all() if child.returncode is None]

    def _working(self) -> bool:
        return any(worker.returncode is None for worker in self._workers)

    def _start(self, recipe: Recipe, *, again: bool = False) -> Child | None:
        """Starts a process; returns None in the new process itself, if it is a fork."""
        recipe = replace(recipe, env={**recipe.env, **self._stacks.variables})
        child = spawn(recipe, self._directory.path, self._guardian, self._screen.say, log_needed=not again)
        if child is None:
            self._inherits = recipe.inherits
            return None
        self._selector.register(child.output, selectors.EVENT_READ, child)
        return child

    def _pump(self, child: Child) -> bool:
        descriptor = child.output
        more = child.pump(self._show, stamp=self._policy.timestamps)
        if not child.open and descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
        return more

    def _reap(self) -> None:
        ended: list[Child] = []
        for child in reap(self._all(), self._guardian):
            while self._pump(child):
                pass
            if child.open:  # a process outside the session still holds the pipe
                self._selector.unregister(child.output)
                child.close()
            self._ended(child)
            ended.append(child)
        self._say_last_words([child for child in ended if child in self._workers])

    def _say_last_words(self, ended: Sequence[Child]) -> None:
        """Starts a process that tells several schedulers which workers ended without a goodbye."""
        recipe = self._plan.last_word
        words = [
            (*place, _how(child.returncode or 0))
            for child in ended
            if child.returncode and not child.stopped and not child.words().left
            for place in sorted(child.words().places)
        ]
        if recipe is not None and words and not self._interrupted:
            env = {**recipe.env, ENDED_VARIABLE: json.dumps(words)}
            child = self._start(replace(recipe, env=env), again=True)
            assert child is not None  # it is not a fork
            self._last_words.append(child)
        if self._last_words and not self._working() and self._last_words_until is None:
            self._last_words_until = time.monotonic() + LAST_WORD_S

    def _end_last_words(self) -> None:
        """Ends reporters that no scheduler has answered, unless workers have been restarted since."""
        self._last_words_until = None
        if not self._working():
            for child in self._last_words:
                child.signal(signal.SIGKILL)

    def _ended(self, child: Child) -> None:
        code = child.returncode or 0
        child.order = self._ended_count = self._ended_count + 1
        self._history.note("process_ended", name=self._name(child), code=code, how=_how(code))
        if child in self._last_words:
            self._last_words.remove(child)
            child.forget()
            return
        if child is self._uplink:
            self._uplink_ended(child, code)
            return
        if child is self._scheduler:
            self._scheduler_ended(child, code)
        elif code and not self._stopping and not child.words().left and not self._is_late(child):
            self._worker_failed(child, code)
        elif not self._stopping:
            if child.words().left and self._working():
                self._say_left(child)
            self._straggling_at = time.monotonic() + STRAGGLING_S
        if not self._working() and not self._again:
            self._workers_done()

    def _end_the_late(self) -> None:
        """Ends restarted workers that have not joined the job, once the job has ended well."""
        alive = [worker for worker in self._workers if worker.returncode is None]
        if self._stopping or not alive or not all(map(self._is_late, alive)):
            return
        for worker in alive:
            words = "is not needed any more: the job has ended well without it"
            self._screen.say(f"worker {worker.label} {words}")
        self._stop(signal.SIGTERM)

    def _is_late(self, worker: Child) -> bool:
        """Whether a worker was restarted, has been in no group since, and the job has ended well."""
        return worker.restarts > 0 and not worker.words().group and self._has_ended_well()

    def _has_ended_well(self) -> bool:
        """Whether the job has ended well: by this launch's scheduler, or by a worker that completed it.

        After that, a scheduler admits no new worker.
        """
        if self._scheduler is not None:
            return self._scheduler.returncode == 0
        ended = [worker for worker in self._workers if worker.returncode == 0]
        return any(worker.words().group and not worker.words().left for worker in ended)

    def _uplink_ended(self, child: Child, code: int) -> None:
        """Starts another uplink; workers wait a moment for it, or connect directly."""
        if self._stopping or not self._working():
            return
        if child.restarts < UPLINK_RESTARTS:
            self._screen.say(f"{self._name(child)} {_how(code)}; starting it again")
            self._again.append(child)
        else:
            self._screen.say(f"{self._name(child)} {_how(code)}; workers connect to the scheduler directly")
            self._close_door()

    def _worker_failed(self, child: Child, code: int) -> None:
        if self._failed_at is not None:
            return
        how = _how(code)
        over = self._scheduler is not None and self._has_ended_well()  # a new one would find no scheduler
        if child.restarts < self._policy.max_restarts and not over:
            count = f"{child.restarts + 1} of {self._policy.max_restarts}"
            self._screen.say(f"worker {child.label} {how}; starting it again ({count})", "warning")
            self._again.append(child)
            self._replaced |= child.words().places
            return
        goes_on = self._why_it_goes_on(child, over=over)
        if goes_on:
            self._screen.say(f"worker {child.label} {how}; {goes_on}", "warning")
            return
        self._failed_at = time.monotonic()
        if self._working() and not self._stopping:
            self._screen.say(f"worker {child.label} {how}; ending the others", "warning")

    def _why_it_goes_on(self, child: Child, *, over: bool) -> str:
        """Returns why the launch goes on without this worker, in words; empty: it does not.

        Spares of other hosts count, too. The launcher of this host cannot know whether they are used up; if
        they are, the job waits for a replacement.

        Args:
            child: the worker that has failed.
            over: whether the job has ended well.
        """
        policy = self._policy
        left = sum(worker.returncode in (None, 0) or worker.words().left for worker in self._workers)
        lost = len(self._workers) - left
        if lost <= policy.spares and self._working() and not over:
            waited = self._is_spare(child) and not child.words().group
            return "going on without this spare" if waited else "a spare takes its place"
        dispensable = self._plan.counts.local_size - policy.min_workers
        if policy.min_workers and lost <= policy.spares + dispensable:
            return f"going on with {left}{self._how_to_replace(child)}"
        return ""

    def _is_spare(self, child: Child) -> bool:
        return child.recipe.env.get("MS_WORKER_SPARE") == "1"

    def _how_to_replace(self, child: Child) -> str:
        """Returns how to replace a worker, only once: the commands for other workers hardly differ."""
        line = "" if self._told_replacement or not self._working() else self._replacement(child)
        self._told_replacement |= bool(line)
        return f". To start another in its place: {line}" if line else ""

    def _say_left(self, child: Child) -> None:
        """Says that a worker has left as asked, and how to replace it; the others report if they wait."""
        staying = sum(worker.returncode is None for worker in self._workers)
        more = self._how_to_replace(child) if 0 < self._policy.min_workers <= staying else ""
        self._screen.say(f"worker {child.label} left as it was asked to{more}")

    def _settle(self) -> None:
        """Ends the remaining workers once the worker that failed first is known and has ended.

        It waits until then because a worker that is asked to end earlier might not report why it fails. The
        scheduler of a failed job may end before the worker at fault.
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
            self._screen.say(f"the scheduler {_how(code)}; starting it again", "warning")
            self._again.append(child)
            return
        self._failed_at = self._failed_at or time.monotonic()

    def _workers_done(self) -> None:
        """Handles the end of the last worker; if all went well, the scheduler ends by itself."""
        scheduler, uplink = self._scheduler, self._uplink
        if uplink is not None and uplink.returncode is None:
            uplink.signal(signal.SIGTERM)
            self._give(self._policy.grace_s, then=signal.SIGKILL)
        if scheduler is None or scheduler.returncode is not None:
            return
        if self._stopping or self._failed_at is not None:
            self._stopping = True
            scheduler.signal(signal.SIGTERM)
            self._give(self._policy.grace_s, then=signal.SIGKILL)
        else:
            self._stopping = True
            self._give(SCHEDULER_LINGER_S, then=signal.SIGTERM)

    def _show_stragglers(self) -> None:
        """Warns if workers still run after another has finished without having been asked to leave."""
        self._straggling_at = None
        finished = [each for each in self._workers if each.returncode == 0 and not each.words().left]
        running = [each for each in self._workers if each.returncode is None]
        if finished and running and not self._stopping:
            done, left = (", ".join(each.label for each in some) for some in (finished, running))
            self._screen.say(
                f"ended well: worker {done}; still running: worker {left}; their logs say what they wait for"
            )

    # ------------------------------------------------------------ endings

    def _blame(self, child: Child, code: int, why: str = "") -> None:
        """Takes a process's exit code as the launch's, and shows why it ended."""
        self._status = self._status or exit_status(code) or 1
        where = f"pid {child.pid} on {os.uname().nodename}"
        if why:
            self._screen.say(shortened(f"{self._name(child)} failed first: {why}"), "error")
        self._screen.say(f"{self._name(child)} ({where}) {_how(code)}; the end of {child.log_path}:", "error")
        self._screen.show_end(child.last_lines)
        lines = [shortened(line.decode(errors="replace"), 500) for line in child.last_lines]
        self._history.note("end_of_log", name=self._name(child), lines=lines)

    def _blame_first(self) -> None:
        """Shows which worker failed first, and how; shows in a line how each other worker ended."""
        endings = self._endings()
        verdict = first_failure(endings, self._replaced)
        if self._scheduler_failed_first(endings, verdict):
            assert self._scheduler is not None
            self._blame(self._scheduler, self._scheduler.returncode or 1)
            return
        first = verdict.elsewhere
        if verdict.index is not None:
            child, words = self._workers[verdict.index], endings[verdict.index].words
            lost = next((e.words.first for e in endings if e.words.first is not None), None)
            seen = lost.sentence if lost is not None and not words.error else ""
            if child.stopped and lost is not None:  # the launcher stopped it after its failure
                self._status = self._status or lost.exit_code
            self._blame(child, child.returncode or 0, words.error or seen)
        elif first is not None:
            self._status = self._status or first.exit_code or self._first_code(endings) or 1
            self._screen.say(
                shortened(f"the first to fail runs elsewhere, where its log says more: {first.sentence}")
            )
        others = [i for i, each in enumerate(endings) if i != verdict.index and each.code is not None]
        for i in others[:OTHERS_SHOWN]:
            self._screen.say(
                shortened(f"worker {self._workers[i].label} {describe_other(endings[i], _SIGNAL_NAMES)}")
            )
        if len(others) > OTHERS_SHOWN:
            self._screen.say(f"and {len(others) - OTHERS_SHOWN} more")

    def _scheduler_failed_first(self, endings: Sequence[Ending], verdict: Verdict) -> bool:
        """Whether the scheduler failed by itself, and not because of a worker (which may end later)."""
        scheduler = self._scheduler
        if scheduler is None or not scheduler.returncode or scheduler.stopped:
            return False
        if any(each.words.first is not None or each.words.failed for each in endings):
            return False
        return verdict.index is None or scheduler.order < endings[verdict.index].order

    @staticmethod
    def _first_code(endings: Sequence[Ending]) -> int:
        failed = sorted((each for each in endings if each.failed), key=lambda each: each.order)
        return exit_status(failed[0].code or 0) if failed else 0

    def _name(self, child: Child) -> str:
        if child is self._uplink:
            return "the uplink"
        if child in self._last_words:
            return "the process that tells the schedulers who has ended"
        return "the scheduler" if child is self._scheduler else f"worker {child.label}"

    def _stop(self, number: int) -> None:
        """Sends the workers this signal; kills those that are left after the grace period."""
        self._stopping = True
        for worker in self._workers:
            worker.signal(number)
        self._give(self._policy.grace_s, then=signal.SIGKILL)

    def _give(self, seconds: float, *, then: signal.Signals) -> None:
        """Sets a deadline at which the remaining processes are sent this signal."""
        self._deadline = time.monotonic() + seconds
        self._next_signal = then

    def _overdue(self) -> None:
        """Handles the deadline; scheduler and uplink are asked to end once no worker is left."""
        number, grace_s = self._next_signal, self._policy.grace_s
        alive = [child for child in self._alive() if child not in self._last_words]
        for child in [each for each in alive if each in self._workers or not self._working()]:
            if number == signal.SIGKILL:
                kept = self._stacks.keep(child.pid, child.label, self._directory.path)
                who = f"{self._name(child)} (pid {child.pid}) did not end within {grace_s:g} s"
                self._screen.say(f"{who}; killed{kept}")
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
            self._screen.say(f"{number.name} again: killing everything")
            for child in self._alive():
                child.signal(signal.SIGKILL)
            return
        self._interrupted = True
        for child in self._last_words:
            child.signal(signal.SIGKILL)
        self._screen.say(f"{number.name}: ending the workers; once more kills them at once")
        self._stop(number)
        if not self._working():
            self._workers_done()

    def _show(self, child: Child, lines: Sequence[bytes]) -> None:
        self._follow()  # notes from before this output are shown first
        stamp = timestamp() + b" " if self._policy.timestamps else b""
        self._screen.show(stamp + b"[%s] " % child.label.encode(), lines)


def _lacked_ranks(child: Child) -> bool:
    """Whether a worker ended because torch found no rank in its environment, since it had no agent."""
    if not child.returncode or AGENT in child.recipe.argv:
        return False
    return any(_NO_RANK.search(line) for line in child.last_lines)


def _how(code: int) -> str:
    return describe_exit(code, _SIGNAL_NAMES)


def _noted(_number: int, _frame: object) -> None:
    """A signal handler that does nothing: the wake-up descriptor wakes the loop."""

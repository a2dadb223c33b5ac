"""Disturbs a job of six workers and two spares for hours, and checks the result of every step.

The seed determines the schedule. It kills and stops workers; cuts or degrades their connections, with each
other and with the scheduler; floods the scheduler and its page with TLS hellos; kills the scheduler; moves
clocks by an hour; fills the journal's disk (where one can be mounted); and lets a member send false reports
about others. Some faults come in bursts; others wait until the job has made progress, so that a busy machine
gets fewer of them. Each step has one right result, which the benchmark computes, too.

One worker is never killed, and the scheduler is not killed after a third of the time. The benchmark watches
the memory and descriptors of these two, and of a ``muster web`` with a viewer. In runs of over a quarter of
an hour, scheduler and page are first flooded until they have allocated the memory that floods need.

  muster bench soak --hours 2 --seed 1 --json soak.json --keep logs

With ``--snapshots`` each rank holds a part of the weights, and copies of it are in other ranks' memory and
on disk:

  muster bench soak --snapshots --hours 0.17 --seed 1 --json soak.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from muster.bench.launches import stopwatch
from muster.bench.recovery.job import WorkerProcess
from muster.bench.small_disk import SmallDisk
from muster.bench.snapshots.forked import ForkedJob
from muster.bench.soak.clock import CLOCK_VARIABLE, shift
from muster.bench.soak.divided import CHECKPOINTS_VARIABLE
from muster.bench.soak.job import (
    BAD_NETWORK,
    HARM_VARIABLE,
    STOP_VARIABLE,
    block_digests,
    blocks_of,
    digest_of_blocks,
    first_weights,
    mix,
    part,
    rows_of,
)
from muster.bench.soak.page import Page
from muster.bench.soak.relay import Relay, Trouble

WORKERS, SPARES, WORKERS_MIN = 6, 2, 3
HARMS = {
    "kill": 10,
    "stop": 6,
    "cut data": 6,
    "cut control": 6,
    "flood": 2,
    "scheduler": 4,
    "clock": 3,
    "no space": 3,
    "lie": 2,
    "bad data network": 3,
    "bad control network": 3,
}
CLOCKS_S = (-3600.0, 0.0, 3600.0)
NO_SPACE_S = (2.0, 8.0, 20.0)
DISK_BYTES = 16 << 20
"""The size of the journal's disk: the journal of a job of eight grows to 1 MB before it is compacted."""

LIE_S = 25.0
"""How long a member lies, in seconds. It is then killed, because the scheduler remembers the broken pairs."""

NODE_TIMEOUT_S = 5.0
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 180.0
SAMPLE_S = 5.0
PROGRESS_S = 10.0
FLOOD_S = 3.0
WARM_UP_FLOODS, WARM_UP_FLOOD_S = 10, 8.0
"""The number of floods before memory is watched, and the length of each in seconds. A new scheduler grew from
63 to 297 MB in six floods of 8 s, and by 1 MB in eight further ones."""

LONG_S = 900.0
PATIENCE_S = 30.0
"""The longest wait for the job to go on before the next harm, in seconds."""

BURST = 0.4
"""The share of harms after which the next one does not wait for the job to go on."""

RESTORED = {
    "from memory": r"The state is that of (step \d+ of generation \d+), from the ranks' memory",
    "from a checkpoint": r"The state is that of the checkpoint (\S+)",
}
"""The log lines of workers that have restored the state, by its source."""

KEPT_STEPS = 20_000
"""The number of steps before the newest one whose results are kept for checks."""

Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    option = parser.add_argument
    option("--hours", type=float, default=2.0, metavar="H", help="duration; 0.05 is three minutes (2)")
    option("--seed", type=int, default=0, help="seed of the faults: which process, and when (0)")
    option("--pace-ms", type=float, default=50.0, metavar="MS", help="least time of a step in ms (50)")
    option("--snapshots", action="store_true", help="shard the weights, with snapshots; needs torch")
    option("--keep", type=Path, metavar="DIR", help="keep logs there; after a failure they are always kept")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the soak, and returns the results.

    Raises:
        RuntimeError: the job did not start, did not end, or a requirement did not hold.
    """
    say = stopwatch()

    directory = Path(tempfile.mkdtemp(prefix="muster-soak-"))
    keep = options.keep
    try:
        with Soak(directory / "job", options.pace_ms / 1000, say, snapshots=options.snapshots) as job:
            result = soak(job, 3600 * options.hours, random.Random(options.seed))
        result["seed"], result["hours"] = options.seed, options.hours
        if result["did_not_hold"]:
            keep = keep or Path(f"soak-{options.seed}-logs")
            raise RuntimeError(f"{json.dumps(result, indent=1)}\nDid not hold; the logs are in {keep}.")
        return result
    finally:
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in (directory / "job").glob("*.log"):
                shutil.copy(path, keep)
        shutil.rmtree(directory, ignore_errors=True)


def report(result: dict[str, Any]) -> None:
    """Prints the results for people."""
    for name, value in result.items():
        print(f"{name:20} {value}")


class Results:
    """Computes the right result of each step, and compares the workers' with it.

    Args:
        divided: whether each rank holds its own part of the weights instead of all of them.
    """

    def __init__(self, *, divided: bool = False) -> None:
        self._divided = divided
        self._weights = first_weights()
        self._digests: deque[list[bytes]] = deque(maxlen=KEPT_STEPS)
        self._newest = 0
        self.checked = 0
        self.wrong: list[dict[str, Any]] = []
        self.generations: set[int] = set()
        self.setbacks: list[dict[str, int]] = []

    def right(self, step: int, rank: int = 0, world_size: int = 1) -> str:
        """Returns the digest of a rank's part of the weights after ``step`` steps; of all, with one rank."""
        while self._newest < step:
            mix(self._weights, part(self._newest, rows_of(self._newest)))
            self._newest += 1
            self._digests.append(block_digests(self._weights))
        behind = self._newest - step
        if behind >= len(self._digests):
            return "too long ago to be checked"
        blocks = blocks_of(rank, world_size)
        return digest_of_blocks(self._digests[-1 - behind][blocks.start : blocks.stop])

    def take(self, worker: WorkerProcess) -> None:
        """Checks the steps that a worker has recorded since the last call, and drops them."""
        worker.follow()
        events, worker.events[:] = list(worker.events), worker.events[-1:]
        for event in events:
            if event.get("taken") or event["what"] != "step":
                continue
            event["taken"] = True
            self.checked += 1
            self._note_setback(event["generation"], event["step"])
            place = (event["rank"], event["world"]) if self._divided else ()
            if event["digest"] != self.right(event["step"], *place):
                self.wrong.append({"worker": worker.name, **event})

    def _note_setback(self, generation: int, step: int) -> None:
        """Records a generation that begins behind the newest step, because nobody in it held the state.

        One step is tolerated: a single worker may have finished it before it was killed.
        """
        if generation in self.generations:
            return
        self.generations.add(generation)
        if step < self._newest and generation == max(self.generations):
            self.setbacks.append({"generation": generation, "from_step": self._newest, "to_step": step})

    @property
    def newest(self) -> int:
        """The furthest step that a worker has finished."""
        return self._newest


class WatchedProcess:
    """Samples the memory and the file descriptors of one process over time."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []

    def look(self, pid: int) -> None:
        """Takes a sample."""
        with contextlib.suppress(OSError, StopIteration, ValueError):
            status = Path(f"/proc/{pid}/status").read_text()
            kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
            descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            self.samples.append((int(kilobytes) / 1024, descriptors))

    def summary(self) -> dict[str, float]:
        """Returns the medians of the second and of the last quarter of the time, in MB and descriptors."""
        quarter = max(1, len(self.samples) // 4)
        early, late = self.samples[quarter : 2 * quarter] or self.samples, self.samples[-quarter:]
        if not late:
            return {}
        return {
            "seconds": SAMPLE_S * len(self.samples),
            "memory_mb_early": round(statistics.median(sample[0] for sample in early), 1),
            "memory_mb_late": round(statistics.median(sample[0] for sample in late), 1),
            "descriptors_early": statistics.median(sample[1] for sample in early),
            "descriptors_late": statistics.median(sample[1] for sample in late),
        }


def is_flat(summary: dict[str, float], *, floods: int = 0) -> bool:
    """Whether neither memory nor descriptors have grown by more than noise.

    Python and gRPC keep memory that they once had. So a short run, which has no floods before the watch, must
    allow for floods: on two cores four of 8 s took an idle scheduler from 58 to 446 MB, of which the last one
    added nothing.
    """
    if not summary:
        return True
    long = summary["seconds"] > LONG_S
    short_mb = 450 if floods else 150
    room_mb, room = (8 + 0.1 * summary["memory_mb_early"], 16) if long else (short_mb, 64)
    return (
        summary["memory_mb_late"] <= summary["memory_mb_early"] + room_mb
        and summary["descriptors_late"] <= summary["descriptors_early"] + room
    )


class FloodsFirst:
    """Floods scheduler and page before their memory is watched, so that later floods need no more memory.

    Args:
        floods: the number of floods; 0 for none.
    """

    def __init__(self, floods: int) -> None:
        self._left = floods

    def over(self, job: Soak) -> bool:
        """Starts the next flood if the last one has ended; returns whether all are over."""
        if self._left and not job.flooded:
            self._left -= 1
            job.flood(job.port, WARM_UP_FLOOD_S)
            if job.page is not None:
                job.flood(job.page.port, WARM_UP_FLOOD_S)
            return False
        return not self._left and not job.flooded


class Soak(ForkedJob):
    """The soak's job, with a relay before the scheduler.

    Args:
        directory: the folder for keys, logs and records, which is created.
        pace_s: the least time of a step, in seconds.
        say: shows progress.
        snapshots: whether each rank holds its part of the weights, with snapshots of it.

    Attributes:
        disk: the journal's disk.
        can_fill: whether that is a disk of its own, which can be filled up.
        until: the end of each harm to the scheduler's network or disk, by its name.
        liars: the time at which each lying worker is killed.
    """

    scheduler_module = "muster.bench.soak.scheduler"

    def __init__(self, directory: Path, pace_s: float, say: Say, *, snapshots: bool = False) -> None:
        directory.mkdir(parents=True)
        self.snapshots, self._checkpoints = snapshots, directory / "checkpoints"
        pace, self.stop_file = directory / "pace", directory / "stop"
        pace.write_text(str(pace_s))
        self.disk = SmallDisk(directory / "disk", DISK_BYTES)
        try:
            self.disk.mount()
            self.can_fill = True
        except RuntimeError as error:
            say(f"the journal never runs out of space here: {error}")
            self.can_fill = False
        super().__init__(
            directory,
            "muster.bench.soak.divided" if snapshots else "",
            workers=WORKERS,
            worker_min=WORKERS_MIN,
            command=[] if snapshots else ["-m", "muster.bench.soak.job"],
            env={
                "MUSTER_BENCH_PACE": str(pace),
                STOP_VARIABLE: str(self.stop_file),
                "MS_NODE_TIMEOUT": str(NODE_TIMEOUT_S),
                "MS_SPARES": "6",
                "MS_TOPO_TIMEOUT": "120",
                "MS_RECOVERY_PATH": str(self.disk.path / "journal"),
                CLOCK_VARIABLE: str(directory / "clock-scheduler"),
                CHECKPOINTS_VARIABLE: str(self._checkpoints),
                "CUDA_VISIBLE_DEVICES": "",  # more workers than most hosts have GPUs
            },
            say=say,
        )
        self.relay = Relay(self.port)
        self.results = Results(divided=snapshots)
        self.resting: dict[WorkerProcess, float] = {}
        self.liars: dict[WorkerProcess, float] = {}
        self.touched: set[WorkerProcess] = set()
        self.reported: list[str] = []
        self.floods: list[subprocess.Popen[bytes]] = []
        self.page: Page | None = None
        self.until: dict[str, float] = {}
        self._seen_ended: set[WorkerProcess] = set()
        self._others_ended: set[str] = set()

    def begin(self) -> None:
        """Starts everything and waits until all train."""
        self.start_scheduler()
        for number in range(WORKERS):
            self.start(f"node-{number}")
        self.wait("all train", lambda: self.training(WORKERS, 2), START_TIMEOUT_S)
        if self.snapshots:
            self.wait("there is a checkpoint", lambda: any(self._checkpoints.glob("snap*")), START_TIMEOUT_S)
        self.page = Page(self.env, self.directory / "page.log")
        self.refill()

    def restored(self) -> dict[str, int]:
        """Returns the number of snapshots and of checkpoints from which the job has restored its state."""
        said = [worker.log.read_text(errors="replace") for worker in self.workers]
        return {
            where: len({found for text in said for found in re.findall(pattern, text)})
            for where, pattern in RESTORED.items()
        }

    def start(self, name: str, **env: str) -> WorkerProcess:
        """Starts a worker that reaches the scheduler through the relay."""
        number = len(self.workers)
        env |= {
            CLOCK_VARIABLE: str(self.directory / f"clock-{number}"),
            HARM_VARIABLE: str(self._harm_file(number)),
        }
        return self.start_worker(name, MS_SCHED_PORT=str(self.relay.port), **env)

    def _harm_file(self, number: int) -> Path:
        return self.directory / f"harm-{number}"

    def harm(self, worker: WorkerProcess, what: str, seconds: float) -> None:
        """Makes a worker harm itself: writes its file of harms, and sends SIGUSR1."""
        self._harm_file(self.workers.index(worker)).write_text(json.dumps({"what": what, "seconds": seconds}))
        worker.process.send_signal(signal.SIGUSR1)

    def jump(self, whose: WorkerProcess | None, seconds: float) -> None:
        """Shifts the clock of a worker, or for None of the scheduler, by ``seconds``."""
        name = "scheduler" if whose is None else str(self.workers.index(whose))
        shift(self.directory / f"clock-{name}", seconds)

    def refill(self) -> None:
        """Starts spares until there are ``WORKERS + SPARES`` processes."""
        while len(self.living()) < WORKERS + SPARES:
            self.start(f"spare-{len(self.workers)}", MS_WORKER_SPARE="1")

    @property
    def flooded(self) -> bool:
        """Whether a flood is in progress."""
        self.floods = [each for each in self.floods if each.poll() is None]
        return bool(self.floods)

    def flood(self, port: int, seconds: float) -> None:
        """Starts a flood of a port with TLS hellos."""
        arguments = ["127.0.0.1", str(port), "127.0.0.9", str(seconds)]
        command = [sys.executable, "-m", "muster.bench.flood.hellos", *arguments]
        self.floods.append(subprocess.Popen(command, env=self.env, stdout=subprocess.DEVNULL))

    def check(self, *, may_end: bool = False) -> None:
        """Records every unexpected end of a process."""
        others = {
            "scheduler": self.scheduler and self.scheduler.poll(),
            "page": self.page and self.page.ended,
        }
        for name, code in others.items():
            if code is not None and not may_end and name not in self._others_ended:
                self._others_ended.add(name)
                self.reported.append(f"the {name} ended with {code}")
                self.say(self.reported[-1])
        for worker in self.workers:
            code = worker.process.poll()
            if code is None or worker in self._seen_ended:
                continue
            self._seen_ended.add(worker)
            self.results.take(worker)
            text = worker.log.read_text(errors="replace")
            was_out = "refused" in text.lower() or "lost its place" in text.lower()
            if code == -signal.SIGKILL or (code == 0 and may_end) or (was_out and worker in self.touched):
                continue
            last = text.strip().splitlines()[-1:] or ["(nothing was said)"]
            self.reported.append(f"{worker.name} ended with {code}: {last[0][:300]}")
            self.say(self.reported[-1])

    def holders(self) -> list[WorkerProcess]:
        """Returns the workers that run, are not stopped, and hold the state."""
        return [each for each in self.living() if each not in self.resting and each.events]

    def wake(self, now: float) -> None:
        """Ends the harms whose time is over: stops, lies, bad networks, full disks."""
        for worker in [each for each, until in self.resting.items() if until <= now]:
            del self.resting[worker]
            if worker.alive:
                worker.process.send_signal(signal.SIGCONT)
        for worker in [each for each, until in self.liars.items() if until <= now]:
            del self.liars[worker]
            if worker.alive:
                worker.kill()
        for what in [each for each, until in self.until.items() if until <= now]:
            del self.until[what]
            if what == "no space":
                self.disk.make_space()
            else:
                self.relay.trouble = Trouble()

    def __exit__(self, *error: Any) -> None:
        """Kills what still runs."""
        self.wake(float("inf"))
        for flood in self.floods:
            flood.kill()
            flood.wait()
        if self.page is not None:
            self.page.close()
        self.relay.close()
        super().__exit__(*error)
        if self.can_fill:
            self.disk.unmount()


def soak(job: Soak, seconds: float, chance: random.Random) -> dict[str, Any]:
    """Harms the job for ``seconds``, lets it end, and returns the results with what did not hold."""
    job.begin()
    veteran, done = job.workers[0], Counter[str]()
    began = time.monotonic()
    watched = {"worker": WatchedProcess(), "scheduler": WatchedProcess(), "page": WatchedProcess()}
    next_harm = next_sample = next_progress = began
    kinds = _kinds(chance)
    wanted, patience = 0, began
    warm_up, settled = FloodsFirst(WARM_UP_FLOODS if seconds > LONG_S else 0), False
    while (now := time.monotonic()) < began + seconds:
        job.wake(now)
        for worker in job.living():
            job.results.take(worker)
        job.check()
        job.refill()
        rests = now > began + seconds / 3
        settled = settled or (rests and warm_up.over(job))
        if now >= next_harm and (job.results.checked >= wanted or now >= patience):
            next_harm, patience = now + chance.uniform(0.5, 4.0), now + PATIENCE_S
            wanted = job.results.checked + (0 if chance.random() < BURST else 3 * WORKERS)
            done[_harm(job, next(kinds), veteran, chance, spare_scheduler=rests)] += 1
        if now >= next_sample:
            next_sample = now + SAMPLE_S
            watched["worker"].look(veteran.process.pid)
            if job.page is not None:
                job.page.look()
            if settled and job.page is not None and job.scheduler is not None:
                watched["page"].look(job.page.pid)
                watched["scheduler"].look(job.scheduler.pid)
        if now >= next_progress:
            next_progress = now + PROGRESS_S
            _progress(job, done, began + seconds - now)
        time.sleep(0.05)
    _end(job)
    return _judge(job, done, watched)


def _progress(job: Soak, done: Counter[str], left_s: float) -> None:
    results = job.results
    harms = ", ".join(f"{count} {what}" for what, count in sorted(done.items()) if what)
    job.say(
        f"{left_s:.0f} s left: step {results.newest}, {results.checked} checked, {len(results.wrong)} wrong,"
        f" {len(results.generations)} generations, {len(job.living())} processes; {harms}"
    )


def _kinds(chance: random.Random) -> Iterator[str]:
    """Yields the next kind of harm: first each kind once, the scheduler before all, as it is later spared."""
    yield from ("scheduler", *chance.sample(sorted(HARMS.keys() - {"scheduler"}), len(HARMS) - 1))
    while True:
        yield chance.choices(list(HARMS), list(HARMS.values()))[0]


def _harm(
    job: Soak, what: str, veteran: WorkerProcess, chance: random.Random, *, spare_scheduler: bool
) -> str:
    """Does one harm; returns its name, or "" if there was nothing to harm."""
    place, seconds = chance.random(), chance.choice((0.3, 1.0, 2.0, 8.0))
    if what == "scheduler" and spare_scheduler:
        return ""
    if what in ("kill", "stop", "cut data", "bad data network", "lie"):
        done = _harm_member(job, what, veteran, place, seconds)
    else:
        done = _harm_others(job, what, place, chance.choice(NO_SPACE_S) if what == "no space" else seconds)
    return what if done else ""


def _harm_member(job: Soak, what: str, veteran: WorkerProcess, place: float, seconds: float) -> bool:
    """Harms a member of the job; returns False if the job cannot spare one."""
    holders = job.holders()
    if len(holders) <= WORKERS_MIN or (what == "stop" and job.resting) or (what == "lie" and job.liars):
        return False
    others = [each for each in holders if each is not veteran and each not in job.liars]
    victim = others[int(place * len(others))]
    job.touched.add(victim)
    if what == "kill":
        victim.kill()
    elif what == "stop":
        victim.process.send_signal(signal.SIGSTOP)
        job.resting[victim] = time.monotonic() + seconds
    else:
        job.touched.update(holders)
        if what == "lie":
            seconds = LIE_S
            job.liars[victim] = time.monotonic() + seconds
        job.harm(victim, what, seconds)
    return True


def _harm_others(job: Soak, what: str, place: float, seconds: float) -> bool:
    """Harms the scheduler, its network or disk, its page, or a clock; returns whether that was possible."""
    if what == "scheduler":
        if job.disk.full:
            return False
        job.kill_scheduler()
        time.sleep(min(seconds, 1.0) * place)
        job.start_scheduler()
    elif what == "cut control":
        job.relay.cut(seconds)
        job.touched.update(job.living())
    elif what == "bad control network":
        job.relay.trouble, job.until[what] = BAD_NETWORK, time.monotonic() + seconds
        job.touched.update(job.living())
    elif what == "no space":
        if not job.can_fill or job.disk.full:
            return False
        job.disk.fill()
        job.until[what] = time.monotonic() + seconds
    elif what == "clock":
        whose = [None, *job.living()]
        job.jump(whose[int(place * len(whose))], CLOCKS_S[int(97 * place) % len(CLOCKS_S)])
    else:
        if job.flooded or job.page is None:
            return False
        job.flood(job.port if place < 0.5 else job.page.port, FLOOD_S)
    return True


def _end(job: Soak) -> None:
    """Lets all members end in the same step, and then ends the workers that never were members."""
    job.wake(float("inf"))
    members = [worker for worker in job.living() if worker.events]
    job.stop_file.touch()
    deadline = time.monotonic() + END_TIMEOUT_S
    while job.living() and time.monotonic() < deadline:
        for worker in job.living():
            job.results.take(worker)
        job.check(may_end=True)
        if not any(worker.alive for worker in members):
            for worker in job.living():
                if not worker.events:
                    worker.kill()
        time.sleep(0.1)
    job.check(may_end=True)
    if job.living():
        names = ", ".join(worker.name for worker in job.living())
        job.reported.append(f"{END_TIMEOUT_S:g} s after the end was asked for, these still run: {names}")
    for worker in job.workers:
        job.results.take(worker)


def _judge(job: Soak, done: Counter[str], watched: dict[str, WatchedProcess]) -> dict[str, Any]:
    results = job.results
    done.pop("", None)
    flat = {name: each.summary() for name, each in watched.items()}
    rules = {
        "every step of every process is that of an undisturbed run": not results.wrong,
        "every end is explained": not job.reported,
        "the worker's memory and descriptors are flat": is_flat(flat["worker"]),
        "the page's memory and descriptors are flat": is_flat(flat["page"], floods=done["flood"]),
        "the scheduler's memory and descriptors are flat": is_flat(flat["scheduler"], floods=done["flood"]),
        "steps were made": results.newest > 0,
    }
    restored: dict[str, int] = {}
    if job.snapshots:
        restored = job.restored()
        rules["states came from the ranks' memory"] = restored["from memory"] > 0
    return {
        "harm": dict(sorted(done.items())),
        "processes": len(job.workers),
        "generations": len(results.generations),
        "steps": results.newest,
        "checked_steps": results.checked,
        "setbacks": results.setbacks[:20],
        **({"went_back_to": restored} if restored else {}),
        "wrong_steps": len(results.wrong),
        "first_wrong": results.wrong[:5],
        "unexplained_ends": job.reported[:20],
        "worker": flat["worker"],
        "scheduler": flat["scheduler"],
        "page": flat["page"] | ({"seen": job.page.seen, "missed": job.page.missed} if job.page else {}),
        "did_not_hold": [rule for rule, holds in rules.items() if not holds],
    }

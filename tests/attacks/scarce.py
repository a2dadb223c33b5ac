"""Who comes and goes at a scheduler that may open few files, and at ``muster web``; what it costs over time.

``python -m tests.attacks.scarce scheduler|web SECONDS [--slower N] [--json FILE]`` does it for so long, and
prints a line now and then. A job goes on meanwhile. Strangers connect and keep silent, send nonsense or half
of a hello; members and operators come, ask, and go; operators watch and never read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from muster.bench.report import describe_machine, write
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import rendezvous_pb2_grpc as pb_grpc
from tests.attacks.field import WORKERS, environment_of, make_pki, start_victims
from tests.attacks.flood import SAID
from tests.attacks.http2 import Http2, message, request
from tests.scheduler.processes import Pki, Scheduler, channel, scheduler
from tests.waiting import wait_for
from tests.web.processes import Visitor, web

FILES = 256
"""What the scheduler may open."""

HELD = 700
"""So many connections a stranger has at once; for each new one the oldest goes."""

PAUSE_S = 0.003
SLOW_WATCHERS = 4
WATCH = "/rendezvous.v1.Watching/Watch"
TICK_HZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """What a process held; CPU in seconds since its start."""

    at_s: float
    descriptors: int
    memory_mb: float
    cpu_s: float


@dataclass
class Crowd:
    """Threads that each do one thing again and again, and how often that went well.

    Attributes:
        slower: stretches the pauses of all.
        done: how often what went well, by name.
        failed: how often it did not.
    """

    slower: float = 1.0
    done: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def add(self, name: str, act: Callable[[], object], pause_s: float) -> None:
        """Has a thread act until the end; what fails is counted."""

        def again() -> None:
            self.done[name] = self.failed[name] = 0
            while not self._over.wait(pause_s * self.slower):
                try:
                    act()
                    self.done[name] += 1
                except (OSError, grpc.RpcError):
                    self.failed[name] += 1

        self._threads.append(threading.Thread(target=again, name=name))
        self._threads[-1].start()

    def end(self) -> None:
        """Sends all home."""
        self._over.set()
        for each in self._threads:
            each.join()


def sample(pid: int, at_s: float) -> Sample:
    """Looks at a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    memory_mb = int(status["VmRSS"].split()[0]) / 1024
    return Sample(at_s, descriptors, memory_mb, sum(map(int, ticks)) / TICK_HZ)


def watched(pid: int, seconds: float, every_s: float, say: Callable[[Sample], object]) -> list[Sample]:
    """Samples of a process over so long."""
    began, found = time.monotonic(), []
    while (now := time.monotonic() - began) < seconds:
        found.append(sample(pid, now))
        say(found[-1])
        time.sleep(min(every_s, seconds - now))
    return found


class Stranger:
    """Has many connections to a port, from many addresses of loopback, and says what nobody wants to hear."""

    def __init__(self, port: int, said: tuple[bytes, ...]) -> None:
        self._port, self._said, self._chance = port, said, random.Random(1)
        self._held: deque[socket.socket] = deque()

    def connect(self) -> None:
        """Makes one more, and lets go of the oldest."""
        if len(self._held) >= HELD:
            self._held.popleft().close()
        sock = socket.socket()
        self._held.append(sock)
        sock.setblocking(False)
        sock.bind((f"127.{self._chance.randrange(1, 255)}.{self._chance.randrange(1, 255)}.9", 0))
        with contextlib.suppress(BlockingIOError):
            sock.connect(("127.0.0.1", self._port))
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            sock.send(self._chance.choice(self._said))

    def leave(self) -> None:
        """Lets go of all."""
        while self._held:
            self._held.popleft().close()


@dataclass
class Outcome:
    """What was seen."""

    idle: Sample
    samples: list[Sample]
    after: Sample
    crowd: Crowd
    log: str = ""
    codes: list[int] = field(default_factory=list)
    losses: list[list[str]] = field(default_factory=list)


def no_words(_: Sample) -> None:
    """Says nothing."""


def at_the_scheduler(
    directory: Path,
    seconds: float,
    every_s: float = 1.0,
    say: Callable[[Sample], object] = no_words,
    slower: float = 1.0,
) -> Outcome:
    """A scheduler of few files, a job that trains, and a crowd."""
    pki = make_pki(directory / "pki")
    env = {**environment_of(directory, pki), "MS_NODE_TIMEOUT": "10", "MS_LOG_LEVEL": "INFO"}
    with scheduler(**env) as running:
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        victims = start_victims(directory, env, running.port, 1_000_000, 0.05)
        try:
            running.await_log(f"Generation 1 stands with {WORKERS} members")
            idle, crowd = sample(running.process.pid, 0.0), Crowd(slower=slower)
            stranger = Stranger(running.port, SAID)
            slow = [Slow(running, pki) for _ in range(SLOW_WATCHERS)]
            crowd.add("strangers", stranger.connect, PAUSE_S)
            crowd.add("members", lambda: ask(running, pki, "client"), 0.05)
            crowd.add("operators", lambda: ask(running, pki, "operator"), 0.05)
            for number, each in enumerate(slow):
                crowd.add(f"slow watcher {number}", each.watch, 0.5)
            try:
                samples = watched(running.process.pid, seconds, every_s, say)
            finally:
                crowd.end()
                stranger.leave()
                for each in slow:
                    each.leave()
            wait_for(lambda: asked(running, pki))
            wait_for(lambda: sample(running.process.pid, 0.0).descriptors <= idle.descriptors + 4)
            after = sample(running.process.pid, seconds)
            (directory / "stop").touch()
            codes = [victim.wait(100) for victim in victims]
            assert running.wait() == 0
        finally:
            for victim in victims:
                victim.kill()
                victim.wait()
    losses = [(directory / f"losses-{rank}").read_text().split() for rank in range(WORKERS)]
    return Outcome(idle, samples, after, crowd, running.log, codes, losses)


def ask(running: Scheduler, pki: Pki, name: str) -> None:
    """Comes, asks for the job's status, and goes."""
    with channel(running.target, pki.credentials(name)) as over:
        pb_grpc.RendezvousStub(over).Status(pb.StatusRequest(), timeout=5.0)


def asked(running: Scheduler, pki: Pki) -> bool:
    """Whether one who comes now is answered."""
    with contextlib.suppress(grpc.RpcError):
        ask(running, pki, "operator")
        return True
    return False


class Slow:
    """An operator that watches by eight streams and never reads."""

    def __init__(self, running: Scheduler, pki: Pki) -> None:
        self._port, self._credentials = running.port, pki.credentials("operator")
        self._over: Http2 | None = None

    def watch(self) -> None:
        """Begins to watch, if it has not or was hung up on."""
        if self._over is None or not self._over.send(b""):
            self.leave()
            self._over = Http2(self._port, self._credentials)
            for stream in range(1, 17, 2):
                self._over.send(request(stream, WATCH) + message(stream, b"\x0a\x07default"))

    def leave(self) -> None:
        """Hangs up."""
        if self._over is not None:
            self._over.close()
            self._over = None


def at_the_web(
    directory: Path,
    seconds: float,
    every_s: float = 1.0,
    say: Callable[[Sample], object] = no_words,
    slower: float = 1.0,
) -> Outcome:
    """``muster web`` and its owner, among other users of the host."""
    pki = Pki.make(directory / "pki")
    with scheduler("--serve", **pki.env(), MS_WORKER_NUM="") as running, web(running) as page:
        inside, crowd = Visitor(page), Crowd(slower=slower)
        assert inside.enter(page.link()).status == 303
        assert inside.ask("jobs").status == 200
        parts = urlsplit(page.origin)
        assert parts.port is not None
        host = f"Host: {parts.netloc}\r\n"
        cookie, place = f"Cookie: {inside.cookie}\r\n", page.place
        stranger = Stranger(
            parts.port,
            (
                b"",
                b"GET / HT",
                b"\0" * 500,
                f"GET {place}/jobs HTTP/1.1\r\n{host}\r\n".encode(),
                f"GET /{'x' * 9000} HTTP/1.1\r\n{host}\r\n".encode(),
                f"POST {place}/end HTTP/1.1\r\n{host}Content-Length: 5000\r\n\r\nid=".encode(),
            ),
        )
        windows = Stranger(parts.port, (f"GET {place}/events HTTP/1.1\r\n{host}{cookie}\r\n".encode(),))
        idle = sample(page.process.pid, 0.0)
        crowd.add("strangers", stranger.connect, PAUSE_S)
        crowd.add("windows that never read", windows.connect, 0.05)
        crowd.add("the owner", lambda: owner_asks(inside), 0.2)
        try:
            samples = watched(page.process.pid, seconds, every_s, say)
        finally:
            crowd.end()
            stranger.leave()
            windows.leave()
        wait_for(lambda: sample(page.process.pid, 0.0).descriptors <= idle.descriptors + 4)
        assert inside.ask("jobs").status == 200
        return Outcome(idle, samples, sample(page.process.pid, seconds), crowd, "".join(page.lines))


def owner_asks(inside: Visitor) -> None:
    """One page, within the time that a person waits."""
    if inside.ask("jobs").status != 200:
        raise ConnectionError("the page was not there")


def figures(outcome: Outcome, seconds: float) -> dict[str, Any]:
    """What is worth keeping of an outcome."""
    quarter = [each.memory_mb for each in outcome.samples if each.at_s >= 0.75 * seconds]
    second = [each.memory_mb for each in outcome.samples if 0.25 * seconds <= each.at_s < 0.5 * seconds]
    found: dict[str, Any] = {
        "seconds": seconds,
        "descriptors_allowed": FILES,
        "idle": dataclasses.asdict(outcome.idle),
        "after": dataclasses.asdict(outcome.after),
        "descriptors_most": max(each.descriptors for each in outcome.samples),
        "memory_mb_most": max(each.memory_mb for each in outcome.samples),
        "memory_mb_second_quarter": statistics.median(second),
        "memory_mb_last_quarter": statistics.median(quarter),
        "share_of_a_core": (outcome.samples[-1].cpu_s - outcome.samples[0].cpu_s) / seconds,
        "done": outcome.crowd.done,
        "failed": outcome.crowd.failed,
        "exit_codes": outcome.codes,
        "lines_of_log": outcome.log.count("\n"),
        "generation_1_is_over": "Generation 1 is over" in outcome.log,
        "tracebacks": outcome.log.count("Traceback"),
    }
    if outcome.losses:
        found["steps"] = len(outcome.losses[0])
        found["all_losses_equal"] = all(each == outcome.losses[0] for each in outcome.losses)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.scarce")
    parser.add_argument("where", choices=("scheduler", "web"))
    parser.add_argument("seconds", type=float)
    parser.add_argument("--slower", type=float, default=1.0, help="stretches the pauses of all who come")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    begin = {"scheduler": at_the_scheduler, "web": at_the_web}[args.where]
    command = " ".join(["-m tests.attacks.scarce", *sys.argv[1:]])
    facts = {"machine": describe_machine(), "command": command, "slower": args.slower}
    with tempfile.TemporaryDirectory(prefix="muster-scarce-") as scratch:
        outcome = begin(
            Path(scratch),
            args.seconds,
            min(15.0, args.seconds / 10),
            lambda each: print(each, flush=True),
            args.slower,
        )
    found = figures(outcome, args.seconds)
    for name, value in found.items():
        print(f"{name:28} {value}")
    if args.json:
        write(args.json, f"scarce {args.where}", {**facts, **found})


if __name__ == "__main__":
    main()

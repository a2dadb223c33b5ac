"""Trains a job while a stand-in for SPIRE's agent rotates all of its certificates.

The stand-in serves the SPIFFE Workload API to a scheduler and four workers on this host, and issues new
certificates every few seconds. At every third rotation a new authority signs them; at the rotation after
that the old authority is no longer trusted. Every step of every worker is compared with an undisturbed run,
and no connection to the scheduler may be lost.

Then workers lose their identity, by ``identity_map`` and by a revocation list in turns, and workers come
whose identity no rule maps. Each of them must end within five seconds and say why, and the others must train
on.

  muster bench identities --minutes 10 --every 10 --json identities.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.bench.launches import stopwatch
from muster.bench.recovery.job import MeasuredJob, WorkerProcess
from muster.bench.report import summary
from muster.bench.soak.command import Results
from muster.bench.soak.job import STOP_VARIABLE

if TYPE_CHECKING:
    from muster.bench.identities.agent import StandInAgent

WORKERS = 4
RULES = (
    {"uri": "spiffe://prod.example/{job}/scheduler", "role": "scheduler"},
    {"uri": "spiffe://prod.example/{job}/worker/{node}", "role": "worker"},
)
WANTED_END_S = 5.0
"""The time within which a worker that has lost its identity must end, in seconds."""

START_TIMEOUT_S = 120.0
TAKEN_UP_S = 60.0
PACE_S = 0.05
POLL_S = 0.02
WORDS = {"revoked": "was revoked by", "unmapped": "stands for no job and role here"}
WORDS["stranger"] = WORDS["unmapped"]

Connection = tuple[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    option = parser.add_argument
    option("--minutes", type=float, default=10.0, metavar="M", help="how long to rotate (10)")
    option("--every", type=float, default=10.0, metavar="S", help="seconds between two rotations (10)")
    option("--ends", type=int, default=3, metavar="N", help="lost identities of each kind (3)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Trains, and returns the results.

    Raises:
        RuntimeError: the job did not come up, or something that must hold did not.
    """
    from muster.bench.identities.agent import StandInAgent

    say = stopwatch()
    with (
        tempfile.TemporaryDirectory(prefix="muster-identities-") as name,
        StandInAgent() as agent,
        IdentityJob(Path(name), agent, say) as job,
    ):
        job.begin()
        result: dict[str, Any] = {"minutes": options.minutes, "every_s": options.every, "workers": WORKERS}
        result |= job.rotate(60 * options.minutes, options.every)
        result["ends"] = job.lose_identities(options.ends)
        job.end()
        result |= {"checked_steps": job.results.checked, "wrong_steps": len(job.results.wrong)}
        result["did_not_hold"] = judge(result)
        if result["did_not_hold"]:
            raise RuntimeError(f"{json.dumps(result, indent=1)}\n{job.tails()}")
        return result


def report(result: dict[str, Any]) -> None:
    """Prints the results for people."""
    for name, value in result.items():
        print(f"{name:20} {value}")


def judge(result: Mapping[str, Any]) -> list[str]:
    """Returns the requirements that the results do not meet."""
    ends = [(way, each) for way, all_of_them in result["ends"].items() for each in all_of_them]
    rules = {
        "every step is that of an undisturbed run": not result["wrong_steps"] and result["checked_steps"] > 0,
        "rotations change nobody's membership": result["generations"] == 1,
        "connections outlive rotations": result["connections_lasted"] == result["connections"] >= WORKERS,
        "every process takes up every certificate": result["not_taken_up"] == 0,
        f"who loses its identity ends within {WANTED_END_S:g} s": all(
            each["ended_s"] <= WANTED_END_S for way, each in ends if way != "stranger"
        ),
        "whoever ends says why": all(each["said_why"] and each["code"] not in (0, None) for _, each in ends),
    }
    return [rule for rule, holds in rules.items() if not holds]


class IdentityJob(MeasuredJob):
    """A job whose scheduler and workers each have a socket of the stand-in for SPIRE's agent.

    Args:
        directory: the folder for sockets, configuration, logs and records.
        agent: the stand-in for SPIRE's agent.
        say: shows progress.

    Attributes:
        results: the right result of each step, and the wrong ones that were seen.
        longest_s: the longest time between two steps of one worker, in seconds.
    """

    def __init__(self, directory: Path, agent: StandInAgent, say: Callable[[str], None]) -> None:
        self.directory, self.agent, self.results = directory, agent, Results()
        self.longest_s = 0.0
        self.stop_file, self._lists = directory / "stop", directory / "lists.pem"
        pace = directory / "pace"
        pace.write_text(str(PACE_S))
        super().__init__(
            directory,
            workers=WORKERS,
            worker_min=2,
            command=["-m", "muster.bench.identities.worker"],
            env={
                "MUSTER_BENCH_PACE": str(pace),
                STOP_VARIABLE: str(self.stop_file),
                "MS_CONFIG_FILE": str(directory / "config.json"),
                "MS_JOB_ID": "red",
                "MS_SCHED_HOST": "localhost",  # gRPC compares it with the DNS name in the certificate
                "SPIFFE_ENDPOINT_SOCKET": self._socket("scheduler", "red/scheduler", "localhost"),
                "CUDA_VISIBLE_DEVICES": "",
            },
            say=say,
        )
        self.configure(RULES)

    def configure(self, rules: tuple[dict[str, str], ...], *, revocation: bool = False) -> None:
        """Puts rules for SPIFFE IDs in force, and from then on revocation lists."""
        values: dict[str, Any] = {"spiffe_endpoint_socket": "env", "identity_map": list(rules)}
        values |= {"crl_path": self._lists.name} if revocation else {}
        _replace(self.directory / "config.json", json.dumps(values).encode())

    def begin(self) -> None:
        """Starts everything and waits until all train."""
        self.start_scheduler()
        for number in range(WORKERS):
            self.start(f"n{number}")
        self._await_training(WORKERS)
        self.say(f"{WORKERS} workers train")

    def start(self, node: str, path: str = "") -> WorkerProcess:
        """Starts a worker; its SPIFFE ID ends with ``path``."""
        socket = self._socket(f"{len(self.workers)}-{node}", path or f"red/worker/{node}")
        return self.start_worker(node, SPIFFE_ENDPOINT_SOCKET=socket)

    def rotate(self, seconds: float, every_s: float) -> dict[str, Any]:
        """Gives all processes new certificates again and again, for so long or longer; what was seen."""
        before, began = self.connections(), time.monotonic()
        first_step, self.longest_s = self.results.newest, 0.0
        authorities = late = 0
        taken_up: list[float] = []
        rotations = max(1, round(seconds / every_s))
        for number in range(1, rotations + 1):
            seen = self._certificates_said()
            authorities += self._rotate_once(number)
            at = time.monotonic()
            late += not self._taken_up(seen, at + TAKEN_UP_S)
            taken_up.append(round(time.monotonic() - at, 2))
            while time.monotonic() < began + number * every_s:
                self._look()
        after = self.connections()
        self.say(f"{rotations} rotations, {self.results.newest} steps")
        return {
            "rotations": rotations,
            "new_authorities": authorities,
            "taken_up_s": {**summary(taken_up), "worst": max(taken_up)},
            "not_taken_up": late,
            "steps": self.results.newest - first_step,
            "longest_step_s": round(self.longest_s, 2),
            "generations": len(self.results.generations),
            "connections": len(before),
            "connections_lasted": len(before & after),
        }

    def lose_identities(self, count: int) -> dict[str, list[dict[str, Any]]]:
        """Takes the identity of workers away; for each way, what became of each of them."""
        ends: dict[str, list[dict[str, Any]]] = {way: [] for way in WORDS}
        for number in range(count):
            node = f"n{WORKERS - 1}"
            ends["stranger"].append(self._lose("stranger", self.start(f"n{9 + number}", "red/stranger/x")))
            self._await_training(WORKERS)
            for way in ("unmapped", "revoked"):
                victim = next(each for each in self.living() if each.name == node)
                ends[way].append(self._lose(way, victim))
                self._await_training(WORKERS - 1)
                self.start(node)
                self._await_training(WORKERS)
            self.say(f"lost {number + 1} of {count}: {json.dumps({way: ends[way][-1] for way in ends})}")
        return ends

    def end(self) -> None:
        """Lets all workers finish in one step."""
        self.stop_file.touch()
        ended = lambda: all(each.process.poll() is not None for each in self.workers)  # noqa: E731
        self.wait("all end", ended, START_TIMEOUT_S, may_end=True)
        self._take()

    def connections(self) -> set[Connection]:
        """The connections to the scheduler's port that stand: address and port of the other end."""
        found = set()
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(table).read_text().splitlines()[1:]:
                    _, here, there, state, *_ = line.split()
                    if state == "01" and int(there.rpartition(":")[2], 16) == self.port:
                        address, _, port = here.rpartition(":")
                        found.add((address, port))
        return found

    def _lose(self, way: str, victim: WorkerProcess) -> dict[str, Any]:
        """Takes a worker's identity away; of a stranger, which never had one, waits for its end alone.

        ``ended_s`` counts from the change of the file to the end of the process; of a stranger from its
        start, with all that Python imports.
        """
        victim.killed = True  # its end is no surprise
        began = time.monotonic()
        if way == "unmapped":
            uri, others = RULES[1]["uri"], [f"n{number}" for number in range(WORKERS - 1)]
            left = [{"uri": uri.replace("{node}", node), "role": "worker", "node": node} for node in others]
            self.configure((RULES[0], *left))
        elif way == "revoked":
            _replace(self._lists, self.agent.revocation_lists())
            self.configure(RULES, revocation=True)
            self._looking(3.0)  # the lists are in force, and everybody is still there
            serials = self.agent.serials(self._socket_path(victim))
            began = time.monotonic()
            _replace(self._lists, self.agent.revocation_lists(serials))
        self.wait(f"{victim.name} ends", lambda: victim.process.poll() is not None, START_TIMEOUT_S)
        took = round(time.monotonic() - began, 2)
        self.configure(RULES, revocation=way == "revoked")
        said = WORDS[way] in victim.log.read_text(errors="replace")
        return {"ended_s": took, "code": victim.process.returncode, "said_why": said}

    def _rotate_once(self, number: int) -> bool:
        """Sends new certificates; whether a new authority signed them."""
        if number % 3 == 1:
            self.agent.rotate_authority()
        elif number % 3 == 2:
            self.agent.forget_old_authorities()
        else:
            self.agent.rotate()
        return number % 3 == 1

    def _certificates_said(self) -> list[int]:
        """Returns the number of new certificates that each process has logged."""
        logs = [self.directory / "scheduler.log", *(each.log for each in self.living())]
        return [log.read_text(errors="replace").count("new certificate spiffe://") for log in logs]

    def _taken_up(self, seen: list[int], deadline: float) -> bool:
        while not all(now > then for now, then in zip(self._certificates_said(), seen, strict=True)):
            if time.monotonic() > deadline:
                return False
            self._look()
        return True

    def _await_training(self, world: int) -> None:
        self.wait(f"{world} train", lambda: self.training(world, 2), START_TIMEOUT_S)
        self._take()

    def _looking(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look()

    def _look(self) -> None:
        self.check()
        self._take()
        time.sleep(POLL_S)

    def _take(self) -> None:
        """Checks the steps that were made since, and notes the longest time between two of one worker."""
        for worker in self.workers:
            times = [step["t"] for step in worker.steps()]  # the last one taken before is among them
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            self.longest_s = max(self.longest_s, *gaps, 0.0)
            self.results.take(worker)

    def _socket(self, name: str, path: str, *dns: str) -> str:
        from muster.bench.identities.agent import AgentEntry

        return self.agent.serve(self.directory / f"{name}.sock", AgentEntry(path, dns=dns))

    def _socket_path(self, worker: WorkerProcess) -> Path:
        return self.directory / f"{self.workers.index(worker)}-{worker.name}.sock"


def _replace(path: Path, data: bytes) -> None:
    """Writes a file so that nobody reads half of it."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)

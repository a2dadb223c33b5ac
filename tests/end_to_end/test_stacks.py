"""A job stands still: what is gathered of it, whatever its ranks hang in, and what an operator may ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.workers import Process, company
from tests.scheduler.processes import PASSWORD, Pki, scheduler

pytestmark = pytest.mark.slow

HANGS = (
    ("worker.all_reduce(np.ones(4))", "in all_reduce"),
    ("__import__('ctypes').CDLL(None).pause()", 'File "<string>", line 1 in <module>'),
    ("[0 for _ in iter(int, 1)]", "in <listcomp>"),
    ("(lambda lock: (lock.acquire(), lock.acquire()))(__import__('threading').Lock())", "in <lambda>"),
)
"""What each rank does, and what its stacks say of it."""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def main_thread(stacks: str) -> str:
    """The stack of a worker's main thread, which hangs."""
    return stacks.partition("MainThread")[2].partition("\n\n")[0]


def test_ranks_that_hang_in_a_collective_in_c_in_python_and_in_a_lock_say_where(
    pki: Pki, tmp_path: Path
) -> None:
    env = {"MS_WORKER_NUM": "4", "MS_INCIDENT_DIR": str(tmp_path / "incidents")}
    env["MS_STALL_TIMEOUT"] = "4"  # all of them hang by then
    with scheduler(**env, **pki.env()) as sched, company(tmp_path, sched, pki) as hired:
        workers = hired.form(4)
        for worker, (hang, _) in zip(workers, HANGS, strict=True):
            worker.tell(hang)
        line = sched.await_log("Evidence of the hang at")
        directory = Path(line.rpartition('"')[0].rpartition(" ")[2] or line.split()[-1])
        assert directory.parent == tmp_path / "incidents"
        bundle = {path.name: path.read_text() for path in directory.iterdir()}
        assert sorted(bundle) == ["collectives.txt", "incident.txt", "rank-1.txt", "rank-2.txt", "rank-3.txt"]
        assert "No progress for" in bundle["incident.txt"]
        assert "   0  1 world all_reduce 32 float64 not done" in bundle["collectives.txt"]
        for rank in (1, 2, 3):
            assert HANGS[rank][1] in main_thread(bundle[f"rank-{rank}.txt"])
        assert str(directory) in sched.command("status", **pki.env()).stdout.replace("\n", "")
        told = sched.command("stacks", **pki.env())
        assert told.returncode == 0, told.stderr
        answers = told.stdout.split("---- rank ")[1:]
        assert len(answers) == 4
        for answer, (_, where) in zip(answers, HANGS, strict=True):
            assert where in main_thread(answer)
        assert all(
            PASSWORD.decode() not in text and "BEGIN" not in text for text in (told.stdout, *bundle.values())
        )
        refused = sched.command("stacks", "--cert", str(pki.directory / "client.p12"), **pki.env())
        assert refused.returncode == 1 and "operator" in refused.stderr
        unknown = sched.command("stacks", "nobody", **pki.env())
        assert unknown.returncode == 1 and "There is no node 'nobody' in job 'default'." in unknown.stderr
        assert [worker.process.poll() for worker in workers] == [None] * 4, "to ask ends nobody"


def test_a_rank_of_an_elastic_loop_that_stands_still_says_where(
    tmp_path: Path,
) -> None:
    env = {"MS_WORKER_NUM": "2", "MS_STALL_TIMEOUT": "3", "MS_NODE_TIMEOUT": "60"}
    with scheduler(**env) as sched:
        blocked = {"0": "-1", "1": "5"}
        started = [
            Process(
                tmp_path / f"{node}.log", "plain_loop", str(tmp_path / node), MS_SCHED_PORT=str(sched.port),
                MS_NODE_ID=node, BLOCK_AFTER=after,
            )
            for node, after in blocked.items()
        ]  # fmt: skip
        try:
            assert "is not kept: set MS_INCIDENT_DIR" in sched.await_log("Evidence of the hang at")
            stacks = main_thread(sched.command("stacks", "1").stdout)
            assert "plain_loop.py" in stacks and "in <module>" in stacks
            assert "in all_reduce" in main_thread(sched.command("stacks", "0").stdout)
        finally:
            for each in started:
                each.process.kill()
                each.process.communicate()

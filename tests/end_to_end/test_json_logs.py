"""With MS_LOG_FORMAT=json, each line of each process is a JSON object of one schema."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.wire.json_lines import FIELDS, MOST_LINE_BYTES
from tests.launch.launching import Place, place
from tests.scheduler.processes import environment, scheduler
from tests.waiting import LIMIT_S
from tests.web.processes import web

TRAINS = """
import os, signal
import numpy as np
import muster
from muster.training.loop import ElasticLoop
from muster.training.sampler import ShardedSampler
from muster.training.state import TrainingState

session = muster.init()
state = TrainingState({"weights": np.zeros(10, np.float32)}, ShardedSampler(200, 10, seed=0))
print("a line of the program's own", flush=True)
for step in ElasticLoop(session, state, epochs=1, save=lambda: None):
    with step:
        if session.rank == 2 and state.step == 3 and session.generation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        muster.all_reduce(state.arrays["weights"])
muster.release()
"""

ADOPTS = """
import muster
session = muster.init()
print("adopted", session.rank, flush=True)
raise SystemExit(3)
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path) as made:
        yield made


def parsed(text: str) -> list[dict[str, Any]]:
    """The lines, each of which must be of the schema."""
    lines = []
    for line in text.splitlines():
        assert len(line.encode()) <= MOST_LINE_BYTES, line
        found = json.loads(line)
        assert tuple(found)[: len(FIELDS)] == FIELDS, line
        assert found["level"] in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
        assert isinstance(found["text"], str) and found["time"].endswith("Z"), line
        lines.append(found)
    assert lines
    return lines


def logs(here: Place) -> dict[str, list[dict[str, Any]]]:
    latest = here.directory / "muster-runs" / "latest"
    return {path.stem: parsed(path.read_text()) for path in latest.glob("*.log")}


@pytest.mark.slow
def test_scheduler_workers_and_launcher_write_one_schema_and_name_the_incident(here: Place) -> None:
    """A rank is killed: all processes give what follows the same name, and none afterwards."""
    here.script(TRAINS)
    options = ("-n", "3", "--min-workers", "2", "--scheduler", "--tail", "all")
    code, out, err = here.run(
        *options, command=(sys.executable, "script.py"), MS_LOG_FORMAT="json", MS_JOB_ID="mine"
    )
    assert code == 0, out + err
    told = logs(here)
    shown, said = parsed(out), parsed(err)
    assert {"scheduler", "worker_0", "worker_1", "worker_2"} <= told.keys()
    every = [*shown, *said, *(line for lines in told.values() for line in lines)]
    assert {line["job"] for line in every if line["component"] != "launcher"} == {"mine"}
    assert {line["component"] for line in said} == {"launcher"}
    assert any(line["text"].startswith("ended well") for line in said)
    own = [line for line in shown if line["text"] == "a line of the program's own"]
    assert [(line["component"], line["level"]) for line in own] == [("program", "INFO")] * 3
    assert {line["rank"] for line in own} == {0, 1, 2}

    lost = [line for line in told["scheduler"] if line["event"] == "lost"]
    assert [(line["rank"], line["generation"], line["incident"]) for line in lost] == [(2, 1, "mine-g1")]
    survivor = [line for line in told["worker_0"] if line["component"] == "worker"]
    first, *rest = (line for line in survivor if line["text"].startswith("rank "))
    assert (first["generation"], first["incident"]) == (1, None)
    assert [(line["generation"], line["incident"]) for line in rest] == [(2, "mine-g1")]
    assert told["scheduler"][-1]["incident"] is None


@pytest.mark.slow
def test_an_agent_and_its_program_write_it_too(here: Place) -> None:
    here.script(ADOPTS)
    options = ("-n", "2", "--program", "torch", "--scheduler", "--tail", "all")
    code, out, err = here.run(*options, command=(sys.executable, "script.py"), MS_LOG_FORMAT="json")
    assert code == 3, out + err
    shown, said = parsed(out), parsed(err)
    assert {line["component"] for line in shown} == {"scheduler", "agent", "program"}
    end = next(line for line in said if "lines" in line)
    assert end["level"] == "ERROR" and end["component"] == "launcher"
    logs(here)


@pytest.mark.slow
def test_the_page_writes_it_and_so_does_who_cannot_start(tmp_path: Path) -> None:
    with scheduler(MS_LOG_FORMAT="json", MS_WORKER_NUM="1") as running:
        with web(running, MS_LOG_FORMAT="json") as page:
            page.link()
            page.process.send_signal(signal.SIGINT)
            page.process.wait(LIMIT_S)
        shown = [line for line in page.lines if line.startswith("{")]
        assert all(parsed(line) for line in shown)
        running.signal(signal.SIGTERM)
        running.wait()
        assert "SIGTERM" in running.await_log("SIGTERM")
        assert {line["component"] for line in parsed(running.log)} == {"scheduler"}

    wrong = {"MS_LOG_FORMAT": "json", "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "abc"}
    for command, component in (
        (["-c", "import muster; muster.init()"], "worker"),
        (["-m", "muster", "scheduler"], "scheduler"),
        (["-m", "muster", "web", "--port", "-1"], "web"),
    ):
        wrong["MS_ROLE"] = "MS_SCHED" if component == "scheduler" else "MS_WORKER"
        done = subprocess.run(
            [sys.executable, *command],
            env=environment(**wrong),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 2, done.stderr
        (line,) = parsed(done.stderr)
        assert (line["component"], line["level"]) == (component, "ERROR")

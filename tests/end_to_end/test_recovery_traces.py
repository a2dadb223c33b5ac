"""A worker that is killed is one trace in a collector: real processes, mutual TLS."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scheduler.processes import Pki, environment
from tests.scheduler.watch.collector import Collector

JOB = """
import os, signal, time, numpy, muster
from muster import ElasticLoop, ShardedSampler, TrainingState

with muster.init() as session:
    state = TrainingState({"w": numpy.zeros(4)}, ShardedSampler(1000, 10))
    for step in ElasticLoop(session, state, epochs=1, steps=60):
        with step:
            time.sleep(0.02)
            if state.step == 10 and session.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            muster.all_reduce(state.arrays["w"])
"""


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.mark.system
def test_a_killed_worker_is_a_trace(tmp_path: Path, collector: Collector) -> None:
    pki = Pki.make(tmp_path / "pki")
    (tmp_path / "job.py").write_text(JOB)
    words = ["-n", "3", "--min-workers", "2", "--scheduler", "--", sys.executable, "job.py"]
    done = subprocess.run(
        [sys.executable, "-m", "muster", "run", *words],
        cwd=tmp_path,
        env=environment(**pki.env(), OTEL_EXPORTER_OTLP_ENDPOINT=collector.address),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    spans = {span.name: span for span in collector.spans()}
    assert set(spans) == {"muster.recovery", "forming", "building", "first step"}, done.stdout + done.stderr
    assert len(collector.spans()) == 4
    facts = {each.key: each.value for each in spans["muster.recovery"].attributes}
    assert (facts["muster.generation.ended"].int_value, facts["muster.generation.formed"].int_value) == (1, 2)
    assert facts["muster.world_size"].int_value == 2 and not facts["muster.planned"].bool_value
    assert facts["muster.step"].int_value >= 10
    assert "rank 2" in facts["muster.reason"].string_value
    assert collector.services() == {"muster-scheduler"}

"""Metrics, as Prometheus would read them."""

from __future__ import annotations

import datetime as dt
import socket
import urllib.request

from tests.scheduler.processes import Pki, Stream, channel, environment, form, join, run_scheduler, scheduler


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def read(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_a_running_job(pki: Pki) -> None:
    port = free_port()
    with (
        scheduler(**pki.env(), MS_METRICS_PORT=str(port)) as running,
        channel(running.target, pki.credentials("client")) as over,
    ):
        stream = Stream(over)
        stream.put(join(worker_num=5))
        stream.next("refused")
        stream.end()
        before = read(port)
        streams = form(over)
        after = read(port)
        for stream in streams:
            stream.call.cancel()
    assert before['muster_job_state{job="default",state="forming"}'] == 1.0
    assert 'muster_formation_seconds{job="default"}' not in before
    assert after['muster_job_state{job="default",state="running"}'] == 1.0
    assert after['muster_job_state{job="default",state="forming"}'] == 0.0
    assert after['muster_workers{job="default",state="member"}'] == 2.0
    assert after['muster_workers_wanted{job="default"}'] == 2.0
    assert after['muster_generation{job="default"}'] == 1.0
    assert after['muster_refusals_total{code="settings_differ"}'] == 1.0
    assert after["muster_sessions"] == 2.0
    assert (
        after['muster_formation_seconds{job="default"}'] >= after['muster_build_seconds{job="default"}'] > 0
    )
    left = (pki.credentials("server").not_after - dt.datetime.now(dt.UTC)).total_seconds()
    told = after['muster_certificate_expiry_seconds{what="certificate"}']
    assert left <= told < left + 600
    assert after['muster_certificate_expiry_seconds{what="authority"}'] > told
    assert not any("node-0" in name for name in after)  # series must not grow with the workers' names


def test_a_taken_metrics_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_scheduler("--port", "0", env=environment(MS_WORKER_NUM="1", MS_METRICS_PORT=port))
    assert done.returncode == 1
    assert f"metrics cannot be served on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr

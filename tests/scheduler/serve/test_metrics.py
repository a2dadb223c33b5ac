"""Metrics, as Prometheus would read them."""

from __future__ import annotations

import asyncio
import datetime as dt
import socket
import threading
import urllib.request
from collections.abc import Callable, Coroutine

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from muster.scheduler.serve import metrics
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import watch_pb2, watch_pb2_grpc
from tests.ports import free_port
from tests.scheduler.processes import Pki, Stream, channel, environment, form, join, run_scheduler, scheduler
from tests.waiting import LIMIT_S, wait_for


def read(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def read_until(port: int, name: str, value: float) -> dict[str, float]:
    """Reads until a metric has this value: a reading that took long is given out for a while."""

    def found() -> dict[str, float]:
        figures = read(port)
        return figures if figures.get(name) == value else {}

    return wait_for(found, lambda: f"no {name} of {value} in {read(port)}")


def test_a_job_that_failed_is_not_one_that_ended_well(pki: Pki) -> None:
    port = free_port()
    with (
        scheduler("--serve", **pki.env(), MS_METRICS_PORT=str(port), MS_NODE_TIMEOUT="600") as running,
        channel(running.target, pki.credentials("client")) as over,
        channel(running.target, pki.credentials("operator")) as operator,
    ):
        first, second = form(over)
        assert read(port)['muster_job_failed{job="default"}'] == 0.0
        request = watch_pb2.EndJobRequest(job_id="default", reason="enough")
        watch_pb2_grpc.WatchingStub(operator).EndJob(request, timeout=LIMIT_S)
        after = read_until(port, 'muster_job_failed{job="default"}', 1.0)
        for stream in (first, second):
            stream.call.cancel()
    assert after['muster_job_state{job="default",state="ended"}'] == 1.0


def test_a_running_job(pki: Pki) -> None:
    port = free_port()
    with (
        scheduler(**pki.env(), MS_METRICS_PORT=str(port), MS_NODE_TIMEOUT="600") as running,
        channel(running.target, pki.credentials("client")) as over,
    ):
        stream = Stream(over)
        stream.put(join(worker_num=5))
        stream.next("refused")
        stream.end()
        before = read(port)
        streams = form(over)
        after = read_until(port, 'muster_job_state{job="default",state="running"}', 1.0)
        assert not any(name.startswith("muster_nccl_sealed") for name in after)  # there is no NCCL
        kept = pb.SnapshotReport(
            generation=1, agreed=-1, taken=4, complete=True, passed=-1, size_bytes=10, seconds=0.5, age_s=2.0
        )
        written = pb.CheckpointReport(step=3, age_s=5.0)
        for stream in streams:
            beat = pb.Heartbeat(
                generation=1, step=5, snapshot=kept, checkpoint=written, numbers={"accuracy": 0.5}
            )
            stream.put(pb.WorkerMessage(heartbeat=beat))
        streams[0].next("snapshot_word")
        keeping = read_until(port, 'muster_snapshot_step{job="default"}', 4.0)
        for stream in streams:
            stream.call.cancel()
    assert before['muster_job_state{job="default",state="forming"}'] == 1.0
    assert 'muster_formation_seconds{job="default"}' not in before
    assert after['muster_job_state{job="default",state="forming"}'] == 0.0
    assert after['muster_workers{job="default",state="member"}'] == 2.0
    assert after['muster_workers_wanted{job="default"}'] == 2.0
    assert after['muster_generation{job="default"}'] == 1.0
    assert after['muster_refusals_total{code="settings_differ"}'] == 1.0
    assert after["muster_sessions"] == 2.0
    assert (
        after['muster_formation_seconds{job="default"}'] >= after['muster_build_seconds{job="default"}'] > 0
    )
    assert not any("snapshot" in name or "checkpoint" in name for name in after)
    assert keeping['muster_snapshot_bytes{job="default"}'] == 20.0
    assert keeping['muster_snapshot_seconds{job="default"}'] == 0.5
    assert 2.0 <= keeping['muster_snapshot_age_seconds{job="default"}'] < 60.0
    assert keeping['muster_checkpoint_step{job="default"}'] == 3.0
    assert 5.0 <= keeping['muster_checkpoint_age_seconds{job="default"}'] < 60.0
    assert keeping['muster_number{job="default",name="accuracy"}'] == 0.5
    assert keeping['muster_job_seconds{cause="training",job="default"}'] > 0.0
    left = (pki.credentials("server").not_after - dt.datetime.now(dt.UTC)).total_seconds()
    told = after['muster_certificate_expiry_seconds{what="certificate"}']
    assert left <= told < left + 600
    assert after['muster_certificate_expiry_seconds{what="authority"}'] > told
    assert not any("node-0" in name for name in after)  # series must not grow with the workers' names


def test_whether_nccl_s_traffic_is_encrypted(pki: Pki) -> None:
    port = free_port()
    facts = {"nccl": "2.28.9", "MS_NCCL_ENCRYPTION": "require", "nccl_traffic": "sealed"}
    with (
        scheduler(**pki.env(), MS_METRICS_PORT=str(port), MS_NODE_TIMEOUT="600") as running,
        channel(running.target, pki.credentials("client")) as over,
    ):
        stream = Stream(over)
        stream.put(join(facts=facts))
        stream.next("waiting")
        assert read(port)['muster_nccl_sealed{job="default"}'] == 1.0
        shown = running.command("status", "--json", MS_JOB_ID="default")
        assert '"nccl_traffic": "sealed"' in shown.stdout, shown.stderr
        stream.call.cancel()


def test_a_taken_metrics_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_scheduler("--port", "0", env=environment(MS_WORKER_NUM="1", MS_METRICS_PORT=port))
    assert done.returncode == 1
    assert f"metrics cannot be served on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def served(talk: Callable[[int], Coroutine[object, object, None]], made: list[int] | None = None) -> None:
    """Runs a metrics server of one gauge, and a conversation with its port."""

    def snapshot() -> list[Metric]:
        if made is not None:
            made.append(1)
        return [GaugeMetricFamily("muster_one", "One.", 1)]

    async def run() -> None:
        server, port = metrics.MetricsServer(snapshot), free_port()
        await server.start("127.0.0.1", port)
        try:
            async with asyncio.timeout(LIMIT_S):
                await talk(port)
        finally:
            server.close()

    asyncio.run(run())


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionError:
        return b""  # closed before all was read
    finally:
        writer.close()


def test_half_requests_cost_no_thread_and_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "EXCHANGE_TIMEOUT_S", 1.0)

    async def talk(port: int) -> None:
        threads = threading.active_count()
        halves = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        for _, writer in halves:
            writer.write(b"GET /metrics HTT")
        assert threading.active_count() < threads + 100  # threads of other tests may go on starting some
        ended = await asyncio.gather(*(reader.read() for reader, _ in halves), return_exceptions=True)
        assert all(each == b"" or isinstance(each, ConnectionError) for each in ended)
        monkeypatch.setattr(metrics, "EXCHANGE_TIMEOUT_S", LIMIT_S)
        assert b"muster_one 1.0" in await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        for _, writer in halves:
            writer.close()

    served(talk)


def test_who_asks_ever_again_costs_the_event_loop_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CHEAP_S", 0.0)
    monkeypatch.setattr(metrics, "SHARE", 1e-9)
    made: list[int] = []

    async def talk(port: int) -> None:
        for _ in range(50):
            assert b"muster_one 1.0" in await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")

    served(talk, made)
    assert 1 <= len(made) < 25


def test_a_slow_reader_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(metrics, "EXCHANGE_TIMEOUT_S", LIMIT_S)  # the silent one does not end by itself

    async def talk(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)  # takes the one place, and is silent
        for _ in range(1000):
            refused = await ask_quietly(port)
            if refused == b"":
                break
        assert refused == b""
        writer.close()
        answers = [await ask_quietly(port) for _ in range(200)]
        assert any(b"muster_one 1.0" in answer for answer in answers)

    async def ask_quietly(port: int) -> bytes:
        return await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")

    served(talk)


def test_what_is_no_request_for_metrics_is_answered_in_words() -> None:
    made: list[int] = []

    async def talk(port: int) -> None:
        assert (await ask(port, b"POST / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
        assert (await ask(port, b"GET /secret HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert await ask(port, b"x" * 20_000) == b""
        assert not made
        text = await ask(port, b"GET /metrics?a HTTP/1.1\r\nAccept: application/openmetrics-text\r\n\r\n")
        assert b"openmetrics" in text and text.endswith(b"# EOF\n")

    served(talk, made)


@pytest.mark.parametrize(("leads", "code"), [(True, 200), (False, 503)])
def test_a_probe_learns_who_leads(leads: bool, code: int) -> None:
    async def test() -> None:
        server = metrics.MetricsServer(list, lambda: leads)
        port = free_port()
        await server.start("127.0.0.1", port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /leader HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        writer.close()
        server.close()
        assert answer.startswith(b"HTTP/1.1 %d " % code)

    asyncio.run(asyncio.wait_for(test(), LIMIT_S))

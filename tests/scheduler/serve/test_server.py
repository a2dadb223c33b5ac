"""The scheduler as a process: a job from its first Join to the exit code, and what an operator sees."""

from __future__ import annotations

import datetime as dt
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from muster.scheduler.serve import listen
from muster.scheduler.serve.server import grpc_options
from muster.wire.settings import show_address
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.wire.v1 import rendezvous_pb2_grpc as pb_grpc
from tests.scheduler.processes import (
    Pki,
    Scheduler,
    Stream,
    channel,
    environment,
    error_of,
    form,
    join,
    leave,
    run_scheduler,
    scheduler,
)
from tests.waiting import LIMIT_S


def test_a_job_of_one_is_told_in_the_singular() -> None:
    with scheduler(MS_WORKER_NUM="1") as running:
        assert "job default, 1 worker, NO TLS" in running.ready_line


def test_a_job_from_join_to_exit(pki: Pki, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    with scheduler(**pki.env(), MS_AUDIT_LOG=str(audit)) as running:
        assert "job default, 2 workers, mutual TLS" in running.ready_line
        with channel(running.target, pki.credentials("client")) as over:
            streams = form(over)
            for stream in streams:
                stream.put(leave())
                assert stream.next("ended").ended.ok
                assert stream.end() is None
        assert running.wait() == 0
    events = [json.loads(line) for line in audit.read_text().splitlines()]
    expected = ["began", "joined", "joined", "formed", "left", "over", "left"]
    assert sorted(event["event"] for event in events) == sorted(expected)
    of_nodes = [event for event in events if "node_id" in event]
    assert {event["node_id"] for event in of_nodes} == {"node-0", "node-1"}
    for event in of_nodes:
        assert event["identity"] == "muster://default/worker"
        assert event["certificate"] == pki.credentials("client").fingerprint
        assert event["time"].endswith("+00:00")
        assert event["peer"].startswith("127.0.0.1:")
    assert audit.stat().st_mode & 0o777 == 0o600
    assert "Generation 1 stands with 2 members" in running.log
    for written in (running.log, audit.read_text()):
        assert "UNIQUE-ID" not in written
        assert "not a secret here" not in written


def test_a_job_that_does_not_form_fails_with_the_sentence() -> None:
    with scheduler(MS_TOPO_TIMEOUT="5") as running, channel(running.target) as over:
        stream = Stream(over)
        stream.put(join())
        refused = stream.next("refused").refused
        error = stream.end()
        assert running.wait() == 1
    assert refused.code == pb.REFUSAL_CODE_TOPO_TIMEOUT
    assert error is not None
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.details() == refused.sentence
    last = running.log.strip().splitlines()[-1]
    assert last.startswith("scheduler: Job default failed:")
    assert "node-0" in refused.sentence


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_tells_the_workers_and_stops(number: int, code: int) -> None:
    with scheduler() as running, channel(running.target) as over:
        streams = form(over)
        running.signal(number)
        for stream in streams:
            error = stream.end()
            assert error is not None
            assert (error.code(), error.details()) == (
                grpc.StatusCode.UNAVAILABLE,
                "The scheduler is stopping.",
            )
        assert running.wait() == code
    assert "Traceback" not in running.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_signal_takes_back_that_the_job_ended_well(number: int) -> None:
    with scheduler() as running, channel(running.target) as over:
        streams = form(over)
        for stream in streams:
            stream.put(leave())
            stream.next("ended")
        running.await_log("job default ended")
        while running.process.poll() is None:
            running.signal(number)
        assert running.wait() == 0


def test_serving_several_jobs_each_at_its_own_size() -> None:
    with scheduler("--serve", MS_WORKER_NUM="") as running, channel(running.target) as over:
        first = form(over, 2, job_id="first")
        second = form(over, 3, job_id="second")
        for stream in first:
            stream.put(leave())
            assert stream.next("ended").ended.ok
        again = form(over, 1, job_id="first")  # an ended job may start over, at another size
        reply = pb_grpc.RendezvousStub(over).Status(pb.StatusRequest(job_id="second"))
        assert (reply.state, reply.worker_num, len(reply.workers)) == ("running", 3, 3)
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        for stream in (*second, *again, *first):
            stream.end()


@pytest.mark.parametrize("serve", [(), ("--serve",)], ids=["one job", "--serve"])
def test_a_journal_that_breaks_ends_the_scheduler_to_be_started_again(
    tmp_path: Path, serve: tuple[str, ...]
) -> None:
    journal = {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(tmp_path)}
    with scheduler(*serve, **journal) as running, channel(running.target) as over:
        (tmp_path / "scheduler-default.sqlite-journal").mkdir()  # SQLite writes a file of that name first
        stream = Stream(over)
        stream.put(join())
        error = stream.end()
        assert error is not None and error.code() is grpc.StatusCode.UNAVAILABLE
        assert running.wait() == 1
    assert "Job default cannot be kept safe." in running.log.strip().splitlines()[-1]


def test_a_start_without_space_waits_and_can_be_stopped(tmp_path: Path) -> None:
    journal = {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(tmp_path / "journal")}
    program = "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
    program += "runpy.run_module('scheduler', run_name='__main__')"
    with subprocess.Popen(
        [sys.executable, "-c", program, "--port", "0"],
        env=environment(MS_WORKER_NUM="2", MS_ROLE="MS_SCHED", **journal),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert "the journal cannot be written" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "ready" not in out


def test_another_job_is_refused_where_one_is_served() -> None:
    with scheduler() as running, channel(running.target) as over:
        stream = Stream(over)
        stream.put(join(job_id="other"))
        assert "MS_JOB_ID" in stream.next("refused").refused.sentence
        stream.end()
        running.await_log("code=unknown_job")


def test_how_many_streams_one_address_may_hold_is_a_setting() -> None:
    with scheduler(MS_MAX_STREAMS_PER_HOST="1") as running, channel(running.target) as over:
        first = Stream(over)
        first.put(join())
        first.next("welcome")
        second = Stream(over)
        second.put(join("node-1"))
        error = second.end()
        assert error is not None
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "127.0.0.1 already holds 1 streams (MS_MAX_STREAMS_PER_HOST=1)" in (error.details() or "")
        first.call.cancel()


# ---------------------------------------------------------------- one scheduler for what does not end it


@pytest.fixture(scope="module")
def plain() -> Iterator[Scheduler]:
    # Silence is forgiven for longer than any test waits: what is noticed here is noticed by the stream's end.
    with scheduler("--serve", MS_WORKER_NUM="", MS_NODE_TIMEOUT="600") as running:
        yield running


@pytest.fixture
def over(plain: Scheduler) -> Iterator[grpc.Channel]:
    with channel(plain.target) as opened:
        yield opened


def test_a_lost_stream_is_known_at_once(over: grpc.Channel, plain: Scheduler) -> None:
    streams = form(over, 2, job_id="lost")
    streams[1].call.cancel()
    told = streams[0].next("suspended").suspended
    assert "node-1" in told.reason
    plain.await_log("lost job_id=lost")
    streams[0].call.cancel()


def test_a_half_close_without_goodbye_counts_as_lost(over: grpc.Channel) -> None:
    streams = form(over, 2, job_id="half")
    streams[1].half_close()
    assert "node-1" in streams[0].next("suspended").suspended.reason
    assert streams[1].end() is None
    streams[0].call.cancel()


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (join(protocol_version=9), "INVALID_ARGUMENT", "protocol version 9"),
        (join("a\nb"), "INVALID_ARGUMENT", "node_id"),
        (pb.WorkerMessage(built=pb.Built(generation=1)), "INVALID_ARGUMENT", "must be Join"),
        (pb.WorkerMessage(), "INVALID_ARGUMENT", "no body"),
    ],
)
def test_a_malformed_first_message_is_refused_in_words(
    over: grpc.Channel, message: pb.WorkerMessage, code: str, words: str
) -> None:
    stream = Stream(over)
    stream.put(message)
    refused = stream.next("refused").refused
    assert refused.code == pb.REFUSAL_CODE_MALFORMED
    assert words in refused.sentence
    error = stream.end()
    assert error is not None
    assert (error.code().name, error.details()) == (code, refused.sentence)


def test_a_second_join_on_one_stream_loses_the_place(over: grpc.Channel) -> None:
    stream = Stream(over)
    stream.put(join(job_id="twice"))
    stream.next("welcome")
    stream.put(join("node-1", job_id="twice"))
    assert "one Join only" in stream.next("refused").refused.sentence
    stream.end()


def test_a_second_process_with_the_node_id_is_refused_while_the_first_lives(
    over: grpc.Channel, plain: Scheduler
) -> None:
    streams = form(over, 2, job_id="double")
    thief = Stream(over)
    thief.put(join("node-1", job_id="double", incarnation=5))
    refused = thief.next("refused").refused
    assert refused.code == pb.REFUSAL_CODE_NODE_ID_TAKEN
    thief.end()
    plain.await_log("refused code=node_id_taken job_id=double")
    reply = pb_grpc.RendezvousStub(over).Status(pb.StatusRequest(job_id="double"))
    assert [worker.state for worker in reply.workers] == ["member", "member"]
    assert reply.reason == "Generation 1 stands with 2 members."
    for stream in streams:
        stream.call.cancel()


def test_a_message_over_the_limit_is_dropped(over: grpc.Channel) -> None:
    stream = Stream(over)
    stream.put(join(data_address="x" * 2_000_000))
    error = stream.end()
    assert error is not None
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_health(over: grpc.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(over)
    for service in ("", "rendezvous.v1.Rendezvous"):
        reply = stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    code, _ = error_of(lambda: stub.Check(health_pb2.HealthCheckRequest(service="nothing")))
    assert code == "NOT_FOUND"


def test_status_in_json_and_as_a_table(over: grpc.Channel, plain: Scheduler) -> None:
    streams = form(over, 2, job_id="shown")
    beat = pb.Heartbeat(generation=1, step=17, started_step=18, samples_per_s=1234.5)
    streams[1].put(pb.WorkerMessage(heartbeat=beat))
    streams[1].put(join("never", job_id="shown"))  # its refusal proves that the heartbeat was heard
    streams[1].end()
    done = plain.command("status", "--json", "--job", "shown")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["job_id"], shown["state"], shown["generation"]) == ("shown", "suspended", 1)
    done = plain.command("status", MS_JOB_ID="shown")
    assert done.returncode == 0, done.stderr
    assert "job shown: suspended, generation 1" in done.stdout
    assert "node-0" in done.stdout
    assert "missing:" in done.stdout
    streams[0].call.cancel()


def test_status_shows_progress(over: grpc.Channel, plain: Scheduler) -> None:
    streams = form(over, 1, job_id="progress")
    last = pb.Collective(sequence=3, name="all_reduce", group="world", dtype="float32", size_bytes=64)
    beat = pb.Heartbeat(generation=1, step=17, started_step=18, samples_per_s=1234.5, recent=[last])
    streams[0].put(pb.WorkerMessage(heartbeat=beat))
    worker: dict[str, object] = {}
    while worker.get("step") != 17:
        done = plain.command("status", "--json", "--job", "progress")
        worker = json.loads(done.stdout)["workers"][0]
    assert worker["rank"] == 0
    assert worker["samples_per_s"] == 1234.5
    assert worker["last_collective"] == {
        "sequence": 3,
        "name": "all_reduce",
        "group": "world",
        "dtype": "float32",
        "size_bytes": 64,
        "done": False,
    }
    assert worker["host"] == {"name": "host", "id": "host-id", "address": "127.0.0.1", "topology": ""}
    streams[0].call.cancel()


def test_status_of_a_job_that_is_not_there(plain: Scheduler) -> None:
    done = plain.command("status", "--job", "nothing")
    assert (done.returncode, done.stdout) == (1, "")
    why = "There is no job 'nothing' on this scheduler; its first worker opens it."
    assert done.stderr == f"scheduler: {why}\n"


def test_drain_a_node_that_is_not_there(over: grpc.Channel, plain: Scheduler) -> None:
    streams = form(over, 1, job_id="drain")
    done = plain.command("drain", "nobody", "--job", "drain")
    assert (done.returncode, done.stderr) == (1, "scheduler: There is no node 'nobody' in job 'drain'.\n")
    elsewhere = plain.command("drain", "--host", "gpu-17", "--job", "drain")
    assert "has no worker on a host 'gpu-17'; its hosts are host." in elsewhere.stderr
    both = plain.command("drain", "node-0", "--host", "127.0.0.1", "--job", "drain")
    assert both.returncode == 2 and "The scheduler's address is given by --scheduler." in both.stderr
    streams[0].call.cancel()


def test_a_worker_is_drained(over: grpc.Channel, plain: Scheduler) -> None:
    streams = form(over, 2, job_id="drained")
    done = plain.command("drain", "node-1", "--job", "drained", "--reason", "new disk")
    assert done.returncode == 0, done.stderr
    assert "node-1" in done.stdout
    assert "new disk" in plain.await_log("drained job_id=drained")
    for stream in streams:
        stream.call.cancel()


def test_a_planned_drain_outlives_a_scheduler_that_is_killed(tmp_path: Path) -> None:
    """It is shown, undone, and carried out by the scheduler that comes after."""
    journal = {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(tmp_path / "journal")}
    journal["MS_NODE_TIMEOUT"] = "600"  # its members say nothing while the commands run
    with scheduler(**journal) as first, channel(first.target) as over:
        streams = form(over, 2)
        done = first.command("drain", "--host", "host", "--at", "23:59", "--yes")
        assert "The drain of host host is planned" in done.stdout, done.stderr
        assert done.stderr.startswith("2 ranks of 2 would go, 0 would be left, and MS_WORKER_MIN is 2")
        at = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=8)  # the command may take that long to start
        done = first.command("drain", "node-1", "--at", at.isoformat(), "--reason", "new disk")
        assert done.returncode == 0, done.stderr
        first.signal(signal.SIGKILL)
        first.wait()
        for stream in streams:
            stream.call.cancel()
    with scheduler(port=str(first.port), **journal) as second:
        line = second.await_log("will leave at a step boundary")
        assert "node-1" in line and "new disk" in line and "node-0" not in line
        (plan,) = json.loads(second.command("status", "--json").stdout)["drains"]
        assert plan["hosts"] == ["host"] and plan["reason"] == "drained by an operator"
        assert "drain planned at" in second.command("status").stdout
        assert "The drain of host host is called off." in second.command("drain", "--cancel").stdout
        assert json.loads(second.command("status", "--json").stdout)["drains"] == []


def test_a_gpu_that_failed_is_refused_by_the_next_scheduler_too_until_it_is_admitted(tmp_path: Path) -> None:
    files = {
        "MS_ENABLE_RECOVERY": "1",
        "MS_RECOVERY_PATH": str(tmp_path / "journal"),
        "MS_AUDIT_LOG": str(tmp_path / "audit"),
    }

    def told(over: grpc.Channel, fault: str) -> pb.Refused:
        stream = Stream(over)
        gpu = pb.Device(kind="cuda", index=3)
        stream.put(join("node-0", device=gpu, gpu_uuid="GPU-1", gpu_fault=fault))
        refused = stream.next("refused").refused
        stream.end()
        return refused

    with scheduler(**files) as first, channel(first.target) as over:
        refused = told(over, "7 words differ")
        assert refused.code == pb.REFUSAL_CODE_GPU_FAILED and "its GPU GPU-1 has failed" in refused.sentence
        first.signal(signal.SIGKILL)
        first.wait()
    with scheduler(port=str(first.port), **files) as second, channel(second.target) as over:
        assert "its GPU GPU-1 failed a check before" in told(over, "").sentence
        shown = second.command("status").stdout.replace("\n", " ")
        assert "GPU GPU-1 of host host, number 3 (node node-0) is refused: 7 words differ." in shown
        (listed,) = json.loads(second.command("status", "--json").stdout)["refused_gpus"]
        assert (listed["gpu"], listed["node_id"], listed["device_index"]) == ("GPU-1", "node-0", 3)
        other = second.command("admit", "gpu-18")
        assert (other.returncode, other.stdout) == (1, "")
        assert (
            "refuses no GPU of a host or node 'gpu-18': those that are refused are of host." in other.stderr
        )
        done = second.command("admit", "host")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "1 GPU may be used again: GPU-1 of host host. Start the workers there.\n"
        stream = Stream(over)
        stream.put(join("node-0", device=pb.Device(kind="cuda", index=3), gpu_uuid="GPU-1", incarnation=7))
        stream.next("welcome")
        stream.call.cancel()
    (entry,) = [line for line in (tmp_path / "audit").read_text().splitlines() if '"admitted"' in line]
    assert '"name": "host"' in entry or '"name":"host"' in entry


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        done = run_scheduler("status", env=environment(MS_SCHED_PORT=str(port)))
    assert done.returncode == 1
    told = f"scheduler: No scheduler can be reached at 127.0.0.1:{port}: Connection refused. Check"
    assert done.stderr.startswith(told)


def test_an_unknown_command_is_named_with_those_there_are() -> None:
    done = run_scheduler("statsu", env=environment())
    assert done.returncode == 2
    assert "there is no command 'statsu'; there are status, jobs, health, drain" in done.stderr


# ---------------------------------------------------------------- starting


def test_a_taken_port_is_named_with_the_remedy(plain: Scheduler) -> None:
    done = run_scheduler(env=environment(MS_WORKER_NUM="2", MS_SCHED_PORT=str(plain.port)))
    assert done.returncode == 1
    assert done.stderr.startswith(f"scheduler: Another process already listens on 127.0.0.1:{plain.port}.")
    assert "MS_SCHED_PORT" in done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_plaintext_beyond_loopback_is_refused(host: str) -> None:
    done = run_scheduler("--port", "0", env=environment(MS_WORKER_NUM="2", MS_SCHED_HOST=host))
    assert done.returncode == 2
    assert f"listens on loopback only; MS_SCHED_HOST is '{host}'" in done.stderr


def test_a_host_name_listens_on_all_its_addresses() -> None:
    with scheduler(MS_SCHED_HOST="localhost") as running:
        assert running.ready_line.startswith(f"scheduler ready on localhost:{running.port} ")
        assert "NO TLS" in running.ready_line
        for address in listen.usable(listen.resolve(["localhost"]), 0):
            with channel(show_address(address, running.port)) as over:
                stub: Any = health_pb2_grpc.HealthStub(over)
                reply = stub.Check(health_pb2.HealthCheckRequest())
                assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_ipv6() -> None:
    with scheduler(MS_SCHED_HOST="::1") as running, channel(f"[::1]:{running.port}") as over:
        assert running.ready_line.startswith(f"scheduler ready on [::1]:{running.port} ")
        stream = Stream(over)
        stream.put(join())
        stream.next("welcome")
        assert "peer=[::1]:" in running.await_log("joined job_id=default")
        stream.call.cancel()


def test_the_options_that_liveness_and_limits_rest_on() -> None:
    options = dict(grpc_options(5.0))
    assert options["grpc.so_reuseport"] == 0
    assert options["grpc.keepalive_time_ms"] == 5000
    assert options["grpc.http2.ping_timeout_ms"] == 60_000  # a flooded server reads answers late
    assert options["grpc.http2.min_ping_interval_without_data_ms"] < 5000
    assert options["grpc.server_handshake_timeout_ms"] <= 10_000
    assert options["grpc.max_connection_idle_ms"] <= 60_000
    assert options["grpc.max_receive_message_length"] == 1024 * 1024
    assert "grpc.max_connection_age_ms" not in options  # it would end living streams
    assert dict(grpc_options(60.0))["grpc.http2.ping_timeout_ms"] == 120_000


HANGING = """
import atexit, os, signal, sys, threading, time
from muster.scheduler.__main__ import main
from muster.scheduler.serve import server
server.EXIT_LIMIT_S, server.EXIT_WARNING_S = 6, 5
atexit.register(time.sleep, 60)
server._say_ready = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(main(["--serve", "--port", "0"]))
"""


def test_an_end_that_hangs_is_cut_short_and_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING],
        env=environment(MS_ROLE="MS_SCHED"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGALRM
    assert "its end takes long: SIGALRM ends it in 5 s" in done.stderr

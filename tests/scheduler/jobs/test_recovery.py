"""A scheduler killed with SIGKILL and started again on its journal: nobody notices but the log."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import grpc

from muster.wire.v1 import rendezvous_pb2 as pb
from tests.ports import free_port
from tests.scheduler.processes import (
    Pki,
    Stream,
    channel,
    environment,
    form,
    join,
    leave,
    run_scheduler,
    scheduler,
)


def recovery(path: Path) -> dict[str, str]:
    return {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(path), "MS_NODE_TIMEOUT": "60"}


def come_back(over: grpc.Channel, index: int, *, rank: int, built: bool = True) -> Stream:
    stream = Stream(over)
    stream.put(join(f"node-{index}", held_generation=1, held_rank=rank, built=built, step=40))
    return stream


def test_kill_and_restart_give_the_same_generation_and_ranks(pki: Pki, tmp_path: Path) -> None:
    env = pki.env() | recovery(tmp_path / "journal")
    credentials = pki.credentials("client")
    with scheduler(**env) as running, channel(running.target, credentials) as over:
        streams = form(over)
        running.signal(signal.SIGKILL)
        running.wait()
        for stream in streams:
            assert stream.end() is not None
    with scheduler(**env) as running, channel(running.target, credentials) as over:
        assert "generation 1" in running.await_log("recovered job_id=default")
        for index in (1, 0):  # the other way round: arrival order decides nothing
            streams[index] = come_back(over, index, rank=index)
        for index, stream in enumerate(streams):
            assignment = stream.next("assignment").assignment
            assert (assignment.generation, assignment.rank) == (1, index)
            stream.next("group_built")
        done = running.command("status", "--json", **env)
        shown = json.loads(done.stdout)
        assert (shown["state"], shown["generation"]) == ("running", 1)
        assert [(w["node_id"], w["rank"]) for w in shown["workers"]] == [("node-0", 0), ("node-1", 1)]
        for stream in streams:
            stream.put(leave())
            assert stream.next("ended").ended.ok
        assert running.wait() == 0
    for file in (tmp_path / "journal").iterdir():
        assert b"UNIQUE-ID" not in file.read_bytes()


def test_killed_before_the_group_was_built_the_ids_are_published_again(tmp_path: Path) -> None:
    env = recovery(tmp_path)
    with scheduler(**env) as running, channel(running.target) as over:
        streams = [Stream(over), Stream(over)]
        for index, stream in enumerate(streams):
            stream.put(join(f"node-{index}"))
        streams[0].next("assignment")
        streams[0].put(publish())
        streams[1].next("unique_ids")
        running.signal(signal.SIGKILL)
        running.wait()
        for stream in streams:
            stream.end()
    with scheduler(**env) as running, channel(running.target) as over:
        streams = [come_back(over, index, rank=index, built=False) for index in (0, 1)]
        assert streams[0].next("assignment").assignment.generation == 1
        streams[0].put(publish())
        for stream in streams:
            stream.next("unique_ids")
            stream.put(pb.WorkerMessage(built=pb.Built(generation=1)))
        for stream in streams:
            stream.next("group_built")
            stream.call.cancel()


def publish() -> pb.WorkerMessage:
    ids = pb.PublishUniqueIds(generation=1, unique_ids=[b"UNIQUE-ID-" * 12])
    return pb.WorkerMessage(publish_unique_ids=ids)


def test_after_the_end_a_new_run_begins_again(tmp_path: Path) -> None:
    for _ in range(2):
        with scheduler(**recovery(tmp_path)) as running, channel(running.target) as over:
            for stream in form(over):
                stream.put(leave())
                stream.next("ended")
            assert running.wait() == 0


def form_and_stop(env: dict[str, str], by: signal.Signals = signal.SIGTERM) -> None:
    """Leaves the journal of a job whose scheduler was stopped."""
    with scheduler(**env) as running, channel(running.target) as over:
        streams = form(over)
        running.signal(by)
        running.wait()
        for stream in streams:
            stream.end()


def test_a_journal_of_other_settings_is_refused_with_the_remedy(tmp_path: Path) -> None:
    env = recovery(tmp_path)
    form_and_stop(env)
    done = run_scheduler("--port", "0", env=environment(**env, MS_WORKER_NUM="3"))
    assert done.returncode == 1
    assert "MS_WORKER_NUM=2" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_worker_min_is_taken_over_and_said(tmp_path: Path) -> None:
    env = recovery(tmp_path)
    form_and_stop(env)
    with scheduler(**env, MS_WORKER_MIN="1") as running:
        running.await_log("MS_WORKER_MIN is 1 from now on; it was 2.")
        running.signal(signal.SIGKILL)
        running.wait()
    with scheduler(**env, MS_WORKER_MIN="1") as running:  # it stands in the journal
        assert json.loads(running.command("status", "--json").stdout)["worker_min"] == 1
        assert "from now on" not in running.log


def test_two_schedulers_never_share_a_journal(tmp_path: Path) -> None:
    env = recovery(tmp_path)
    with scheduler(**env):
        done = run_scheduler("--port", "0", env=environment(**env, MS_WORKER_NUM="2"))
    assert done.returncode == 1
    assert "another scheduler has it open" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_port_is_free_again_after_a_kill() -> None:
    port = str(free_port())
    with scheduler(port=port) as running, channel(running.target) as over:
        streams = form(over)
        running.signal(signal.SIGKILL)
        running.wait()
        with scheduler(port=port) as again:
            assert str(again.port) == port
        for stream in streams:
            stream.end()


def test_a_damaged_journal_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    env = recovery(tmp_path)
    form_and_stop(env, signal.SIGKILL)
    file = next(path for path in tmp_path.iterdir() if path.suffix == ".sqlite")
    damaged = b"\xff" * 2048 + file.read_bytes()[2048:]
    file.write_bytes(damaged)
    done = run_scheduler("--port", "0", env=environment(**env, MS_WORKER_NUM="2"))
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
    assert file.read_bytes() == damaged


def test_the_journal_of_another_job_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    env = recovery(tmp_path)
    form_and_stop(env, signal.SIGKILL)
    for path in list(tmp_path.iterdir()):  # its own would lie beside it: somebody has put this one there
        path.rename(tmp_path / path.name.replace("default", "another"))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = run_scheduler("--port", "0", env=environment(**env, MS_WORKER_NUM="2", MS_JOB_ID="another"))
    assert done.returncode == 1
    assert "default" in done.stderr and "another" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name in before} == before


def test_workers_ahead_of_a_restored_journal_wait_until_they_are_adopted(tmp_path: Path) -> None:
    env = recovery(tmp_path)
    form_and_stop(env, signal.SIGKILL)
    ahead = {"held_generation": 5, "held_world_size": 2, "built": True, "step": 90}
    with scheduler(**env) as running, channel(running.target) as over:
        stream = Stream(over)
        stream.put(join("node-0", held_rank=0, **ahead))
        stream.next("welcome")
        assert "older than the workers" in stream.next("waiting").waiting.sentence
        running.await_log("--adopt")
        running.signal(signal.SIGKILL)
        running.wait()
    with scheduler("--adopt", **env) as running, channel(running.target) as over:
        streams = [Stream(over), Stream(over)]
        for index, stream in enumerate(streams):
            stream.put(join(f"node-{index}", held_rank=index, **ahead))
        for index, stream in enumerate(streams):
            assignment = stream.next("assignment").assignment
            assert (assignment.generation, assignment.rank) == (5, index)
        running.await_log("is adopted")
        for stream in streams:
            stream.put(leave())
            assert stream.next("ended").ended.ok
        assert running.wait() == 0

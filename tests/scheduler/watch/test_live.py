"""Operators who watch a real scheduler over mutual TLS: what they see, who may, and how many."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from muster.certs.pki.identity import Identity
from muster.wire.v1 import rendezvous_pb2 as rendezvous_pb
from muster.wire.v1 import watch_pb2 as pb
from muster.wire.v1 import watch_pb2_grpc as pb_grpc
from tests.scheduler.processes import Pki, Scheduler, Stream, channel, form, join, leave, scheduler
from tests.waiting import LIMIT_S


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki.make(tmp_path_factory.mktemp("pki"))
    made.issue("elsewhere", Identity("elsewhere", "operator"))
    return made


class Watch:
    """What a watcher knows: the latest of each part, and all that happened."""

    def __init__(self, over: grpc.Channel, job_id: str = "") -> None:
        self.call = pb_grpc.WatchingStub(over).Watch(pb.WatchRequest(job_id=job_id), timeout=LIMIT_S)
        self.overview = pb.Overview()
        self.roster = pb.Roster()
        self.progress = pb.Progress()
        self.happenings: list[pb.Happening] = []

    def until(self, true: Callable[[Watch], object]) -> Watch:
        while not true(self):
            reply = next(self.call)
            kind = reply.WhichOneof("body")
            if kind == "happenings":
                self.happenings += reply.happenings.happenings
            else:
                setattr(self, kind, getattr(reply, kind))
        return self

    def kinds(self) -> list[str]:
        return [each.kind for each in self.happenings]

    def states(self) -> dict[str, str]:
        return {seat.node_id: seat.state for seat in self.roster.seats}


def refused(over: grpc.Channel, job_id: str = "") -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        next(Watch(over, job_id).call)
    return raised.value


def beat(step: int, **more: object) -> rendezvous_pb.WorkerMessage:
    call = {"name": "all_reduce", "group": "world", "dtype": "float32", "size_bytes": 8}
    last = rendezvous_pb.Collective(sequence=step, **call)  # type: ignore[arg-type]
    return rendezvous_pb.WorkerMessage(
        heartbeat=rendezvous_pb.Heartbeat(generation=1, step=step, recent=[last], **more)  # type: ignore[arg-type]
    )


@pytest.fixture
def running(pki: Pki) -> Iterator[Scheduler]:
    with scheduler(**pki.env(), MS_NODE_TIMEOUT="600") as started:
        yield started


def test_a_job_is_seen_from_its_first_join_to_its_end(pki: Pki, running: Scheduler) -> None:
    with (
        channel(running.target, pki.credentials("client")) as workers,
        channel(running.target, pki.credentials("operator")) as operator,
    ):
        watch = Watch(operator, "default").until(lambda w: w.progress.job.state == "forming")
        first, second = form(workers)
        watch.until(lambda w: w.progress.job.state == "running" and "stands" in w.kinds())
        assert watch.states() == {"node-0": "member", "node-1": "member"}
        seat = watch.roster.seats[1]
        assert (seat.rank, seat.host_name, seat.device.kind) == (1, "host", "cpu")
        assert seat.fingerprint == pki.credentials("client").fingerprint
        assert seat.certificate_ends == pki.credentials("client").not_after.timestamp()
        [formed] = [each for each in watch.happenings if each.kind == "formed"]
        assert (formed.generation, formed.count, formed.text) == (1, 2, "all 2 workers are in")
        written = rendezvous_pb.CheckpointReport(step=3, age_s=5.0, size_bytes=9, seconds=0.5)
        kept = rendezvous_pb.SnapshotReport(
            generation=1, agreed=-1, taken=4, complete=True, passed=-1, size_bytes=10, partners=[1]
        )
        first.put(beat(6, snapshot=kept, checkpoint=written))
        second.put(beat(5, snapshot=kept))
        assert second.next("snapshot_word").snapshot_word.complete == 4
        watch.until(lambda w: w.progress.copies.snapshot_bytes == 20)
        assert watch.progress.copies.HasField("snapshot_step") and watch.progress.copies.snapshot_step == 4
        assert watch.progress.copies.checkpoint.step == 3 and watch.progress.copies.checkpoint_rank == 0
        assert [each.seat for each in watch.progress.seat_copies] == [0, 1]
        assert list(watch.progress.seat_copies[0].snapshot.partners) == [1]
        first.put(beat(7, samples_per_s=3.0, loss=0.5, learning_rate=0.25))
        second.put(beat(5, samples_per_s=2.0))
        watch.until(lambda w: w.progress.job.furthest == 7 and w.progress.job.step == 5)
        line = watch.progress.job
        assert (line.samples_per_s, line.loss, line.learning_rate) == (5.0, 0.5, 0.25)
        assert list(watch.progress.step) == [7, 5]
        call = watch.progress.calls[watch.progress.call[0] - 1]
        assert (call.name, call.group, call.size_bytes) == ("all_reduce", "world", 8)
        assert list(watch.progress.sequence) == [7, 5] and not any(watch.progress.done)
        for stream in (first, second):
            stream.put(leave())
            stream.next("ended")
        watch.until(lambda w: "ended" in w.kinds())
        assert "ok" in [each.code for each in watch.happenings]


def test_a_worker_that_is_gone_is_seen_to_be_gone(pki: Pki) -> None:
    with (
        scheduler(**pki.env(), MS_WORKER_NUM="2", MS_WORKER_MIN="1") as running,
        channel(running.target, pki.credentials("client")) as workers,
        channel(running.target, pki.credentials("operator")) as operator,
    ):
        watch = Watch(operator, "default")
        _, second = form(workers, worker_min=1)
        watch.until(lambda w: w.progress.job.state == "running")
        second.call.cancel()
        watch.until(lambda w: w.progress.job.missing == 1 and "node-1" not in w.states())
        assert "lost" in watch.until(lambda w: "lost" in w.kinds()).kinds()


def test_only_operators_of_the_job_may_watch_or_end_it(pki: Pki, running: Scheduler) -> None:
    with (
        channel(running.target, pki.credentials("client")) as worker,
        channel(running.target, pki.credentials("elsewhere")) as elsewhere,
        channel(running.target, pki.credentials("operator")) as operator,
    ):
        for job_id in ("", "default"):
            error = refused(worker, job_id)
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "has the role worker, and this needs operator" in (error.details() or "")
        assert refused(elsewhere, "default").code() is grpc.StatusCode.PERMISSION_DENIED
        for over in (worker, elsewhere):
            with pytest.raises(grpc.RpcError) as raised:
                pb_grpc.WatchingStub(over).EndJob(pb.EndJobRequest(job_id="default"), timeout=LIMIT_S)
            assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        # One of another job may look, and sees neither this job nor who was refused.
        other = Watch(elsewhere).until(lambda w: w.overview.version)
        assert not other.overview.jobs and not other.happenings
        own = Watch(operator).until(lambda w: w.overview.version and w.happenings)
        assert [line.job_id for line in own.overview.jobs] == ["default"]
        assert {each.what for each in own.overview.validities} == {"certificate", "authority"}
        assert "denied" in own.kinds()
        assert refused(operator, "nothing").code() is grpc.StatusCode.PERMISSION_DENIED


def test_an_operator_ends_a_job_and_the_audit_log_says_by_which_certificate(pki: Pki, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    with (
        scheduler(**pki.env(), MS_AUDIT_LOG=str(audit)) as running,
        channel(running.target, pki.credentials("client")) as workers,
        channel(running.target, pki.credentials("operator")) as operator,
    ):
        streams = form(workers)
        stub = pb_grpc.WatchingStub(operator)
        request = pb.EndJobRequest(job_id="default", reason="enough")
        assert "ended the job: enough" in stub.EndJob(request, timeout=LIMIT_S).sentence
        for stream in streams:
            ended = stream.next("ended").ended
            assert not ended.ok and "An operator has ended the job: enough" in ended.reason
        assert running.wait() == 1
    [entry] = [each for each in map(json.loads, audit.read_text().splitlines()) if each["event"] == "ended"]
    assert entry["certificate"] == pki.credentials("operator").fingerprint
    assert (entry["job_id"], entry["text"]) == ("default", "enough")


def test_an_operator_ends_a_job_that_has_never_formed(pki: Pki, running: Scheduler) -> None:
    with (
        channel(running.target, pki.credentials("client")) as workers,
        channel(running.target, pki.credentials("operator")) as operator,
    ):
        stream = Stream(workers)
        stream.put(join())
        stream.next("welcome")
        request = pb.EndJobRequest(reason="not today")
        pb_grpc.WatchingStub(operator).EndJob(request, timeout=LIMIT_S)
        refused = stream.next("refused").refused
        assert refused.code == rendezvous_pb.REFUSAL_CODE_JOB_ENDED and "not today" in refused.sentence


def test_there_are_so_many_watchers_and_no_more_and_one_that_does_not_read_hurts_nobody(
    pki: Pki, running: Scheduler
) -> None:
    with (
        contextlib.ExitStack() as stack,
        channel(running.target, pki.credentials("client")) as workers,
    ):
        credentials = pki.credentials("operator")
        operators = [stack.enter_context(channel(running.target, credentials)) for _ in range(5)]
        streams = form(workers)
        held = [Watch(over) for over in operators for _ in range(7)]  # 8 streams a connection
        answered = threading.Semaphore(0)
        refusals: list[grpc.RpcError] = []

        def look(watch: Watch) -> None:
            try:
                next(watch.call)
            except grpc.RpcError as error:
                refusals.append(error)
            answered.release()

        for watch in held:
            threading.Thread(target=look, args=(watch,), daemon=True).start()
        for _ in held:
            assert answered.acquire(timeout=LIMIT_S)
        assert [error.code() for error in refusals] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * (len(held) - 32)
        # None of them reads on; the job goes on, and a place that is left is free.
        for step in range(1, 4):
            for stream in streams:
                stream.put(beat(step))
        for watch in held:
            watch.call.cancel()
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                again = Watch(operators[0], "default").until(lambda w: w.progress.job.step == 3)
                break
            except grpc.RpcError:
                continue
        assert again.progress.job.state == "running"

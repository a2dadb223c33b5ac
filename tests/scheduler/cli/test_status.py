"""How a status reply is shown."""

from __future__ import annotations

import io
import json

import pytest

from muster.scheduler.cli.client import UnreachableError
from muster.scheduler.cli.status import as_json, show, show_jobs, watch
from muster.wire.v1 import rendezvous_pb2 as pb

REPLY = pb.StatusReply(
    job_id="job",
    state="running",
    generation=3,
    worker_num=4,
    worker_min=2,
    workers=[
        pb.WorkerStatus(
            node_id="node-a",
            host_name="alpha",
            host_id="id-a",
            rank=0,
            local_rank=0,
            device=pb.Device(kind="cuda", index=1, pci_bus_id="0000:1b:00.0", model="NVIDIA H200"),
            silent_s=0.25,
            step=1200,
            samples_per_s=16983.25,
            state="member",
            address="10.0.0.1",
            topology="rack1",
            pid=4711,
            loss=0.123456,
        ),
        pb.WorkerStatus(node_id="[bold]x[/bold]", host_name="beta", rank=-1, local_rank=-1, state="waiting"),
    ],
    missing=["node-c", "[red]node-d[/red]"],
    reason="node-c is lost",
    uptime_s=3725.5,
    version="1",
)


def test_json_has_null_for_what_is_not_given_yet() -> None:
    shown = json.loads(json.dumps(as_json(REPLY)))
    assert [worker["rank"] for worker in shown["workers"]] == [0, None]
    assert [worker["local_rank"] for worker in shown["workers"]] == [0, None]
    assert shown["workers"][0]["device"] == {
        "kind": "cuda",
        "index": 1,
        "pci_bus_id": "0000:1b:00.0",
        "model": "NVIDIA H200",
    }
    assert shown["workers"][1]["last_collective"] is None
    assert [(worker["pid"], worker["loss"]) for worker in shown["workers"]] == [
        (4711, 0.123456),
        (None, None),
    ]
    assert (shown["missing"][0], shown["uptime_s"], shown["worker_min"]) == ("node-c", 3725.5, 2)


def test_the_table_names_all_and_takes_names_literally() -> None:
    out = io.StringIO()
    show(REPLY, out)
    text = out.getvalue()
    assert "job job: running, generation 3, 1 of 4 ranks, at least 2, scheduler up 1:02:05" in text
    row = next(line for line in text.splitlines() if "node-a" in line)
    device = "cuda:1 0000:1b:00.0 NVIDIA H200"
    for cell in (
        "alpha (10.0.0.1), rack1",
        device,
        "member",
        "0.2 s ago",
        "1200",
        "16,983.2",
        "4711",
        "0.1235",
    ):
        assert cell in row
    assert "[bold]x[/bold]" in text
    assert "missing: [red]node-d[/red]" in text
    assert "node-c is lost" in text


@pytest.mark.parametrize(
    ("traffic", "line"),
    [
        ("sealed", "NCCL between hosts: sealed by Muster's plug-in (AES-128-GCM)"),
        ("plain", "NCCL between hosts: plain"),
        ("", ""),
        ("[red]x", ""),
    ],
)
def test_what_nccl_s_traffic_is_stands_below_the_workers(traffic: str, line: str) -> None:
    out, reply = io.StringIO(), pb.StatusReply(job_id="job", state="running", nccl_traffic=traffic)
    show(reply, out)
    assert [each.strip() for each in out.getvalue().splitlines()[1:]] == ([line] if line else [])
    assert as_json(reply)["nccl_traffic"] == (traffic or None)


COPIES = pb.JobCopies(
    snapshot_step=120,
    snapshot_age_s=12.34,
    snapshot_bytes=1_500_000_000,
    snapshot_seconds=0.81,
    checkpoint=pb.CheckpointReport(step=100, age_s=180.0, size_bytes=2_000_000, seconds=2.1),
    checkpoint_rank=1,
)


def test_the_copies_of_the_state_are_shown_for_the_job_and_each_worker() -> None:
    reply = pb.StatusReply()
    reply.CopyFrom(REPLY)
    reply.copies.CopyFrom(COPIES)
    snapshot = pb.SnapshotReport(
        generation=3, agreed=120, taken=140, age_s=12.3, size_bytes=7, partners=[2, 3]
    )
    reply.workers[0].snapshot.CopyFrom(snapshot)
    out = io.StringIO()
    show(reply, out)
    text = out.getvalue()
    row = next(line for line in text.splitlines() if "node-a" in line)
    assert row.rstrip().endswith("120 at 2, 3, 12 s")
    assert "snapshot of step 120: complete everywhere, 12 s old, 1,500.0 MB, copied and sent in 0.8 s" in text
    assert "checkpoint of step 100: 180 s old, 2.0 MB, written by rank 1 in 2.1 s" in text
    shown = as_json(reply)
    assert shown["copies"]["snapshot"]["step"] == 120 and shown["copies"]["checkpoint"]["rank"] == 1
    worker = shown["workers"][0]["snapshot"]
    assert (worker["step"], worker["under_way"], worker["partners"]) == (120, 140, [2, 3])
    assert shown["workers"][1]["snapshot"] is None and shown["workers"][1]["checkpoint"] is None


def test_where_there_are_no_copies_none_are_shown() -> None:
    out = io.StringIO()
    show(REPLY, out)
    assert "snapshot" not in out.getvalue() and "checkpoint" not in out.getvalue()
    assert as_json(REPLY)["copies"] == {"snapshot": None, "checkpoint": None}


def test_who_holds_the_others_up_is_shown_and_where_their_time_goes() -> None:
    reply = pb.StatusReply()
    reply.CopyFrom(REPLY)
    reply.workers[0].shares.CopyFrom(pb.StepShares(computed=0.25, waited=0.5, data=0.25))
    reply.stragglers.add(
        node_id="node-b", rank=1, kind="data", since_s=9.0, excess_s=0.5, slowdown=2.0, peer_rank=-1,
        sentence="Rank 1 holds the others up.",
    )  # fmt: skip
    out = io.StringIO()
    show(reply, out)
    row = next(line for line in out.getvalue().splitlines() if "node-a" in line)
    assert " 75 % " in row
    assert "Rank 1 holds the others up." in out.getvalue()
    shown = as_json(reply)
    assert shown["workers"][0]["step_seconds"] == {"computed": 0.25, "waited": 0.5, "data": 0.25}
    assert shown["workers"][1]["step_seconds"] is None
    (straggler,) = shown["stragglers"]
    assert (straggler["rank"], straggler["kind"], straggler["slowdown"]) == (1, "data", 2.0)
    assert straggler["peer_rank"] is None


def large(count: int) -> pb.StatusReply:
    """A job whose figures are as long as they get."""
    reply = pb.StatusReply(job_id="j" * 30, state="running", generation=12, worker_num=count)
    for rank in range(count):
        reply.workers.add(
            node_id=f"node-{rank:04}-of-a-large-cluster-{rank}",
            host_name="gpu-node-with-a-long-name.example.org",
            rank=rank,
            device=pb.Device(kind="cuda", index=7, model="NVIDIA H200", pci_bus_id="0000:1b:00.0"),
            silent_s=12.5,
            step=1_234_567 - 3 * rank,
            samples_per_s=123_456.7,
            state="leaving",
            pid=4_194_303,
            loss=1.234567e-05,
            shares=pb.StepShares(waited=1.0),
        )
    return reply


def test_a_table_fits_eighty_columns_and_keeps_its_figures() -> None:
    out = io.StringIO()
    show(large(2), out, width=80)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for figure in ("4194303", "1234567", "1234564", "100 %", "123,457", "1.235e-05", "silent"):
        assert any(figure in line for line in lines), out.getvalue()


def test_jobs_are_listed_with_their_scheduler() -> None:
    out = io.StringIO()
    job = pb.JobSummary(job_id="night", state="running", generation=2, members=3, worker_num=4, step=1200)
    show_jobs([("10.0.0.1:6667", job)], out)
    assert out.getvalue().split()[-8:] == ["night", "running", "2", "3", "of", "4", "1,200", "10.0.0.1:6667"]
    show_jobs([], out)
    assert out.getvalue().endswith("no jobs\n")


@pytest.mark.parametrize(
    ("last", "says"), [("ended", "ended"), ("gone", "is gone"), ("interrupt", "running")]
)
def test_watching_ends_with_the_job_or_with_ctrl_c(last: str, says: str) -> None:
    out, asked, paused = io.StringIO(), [0], [0]

    def ask() -> pb.StatusReply:
        asked[0] += 1
        if asked[0] == 3 and last == "gone":
            raise UnreachableError("gone")
        return pb.StatusReply(job_id="job", state="ended" if asked[0] == 3 and last == "ended" else "running")

    def pause() -> None:
        paused[0] += 1
        if paused[0] == 2 and last == "interrupt":
            raise KeyboardInterrupt

    assert watch(ask, out, pause=pause) == 0
    assert (asked[0], paused[0]) == ((2, 2) if last == "interrupt" else (3, 2))
    assert says in out.getvalue()


def test_where_the_time_of_a_job_went_and_what_is_planned_is_shown() -> None:
    reply = pb.StatusReply(job_id="job", state="running")
    reply.seconds_by_cause.update({"training": 90.0, "forming": 10.0})
    reply.drains.add(number=1, at_s=1_800_000_000.0, hosts=["gpu-17"], node_ids=["3"], reason="new disks")
    reply.steps, reply.remaining_s, reply.epoch, reply.epochs = 1000, 65.0, 3, 10
    reply.workers.add(node_id="0", rank=0, step=480)
    reply.numbers.update({"loss/val": 1.23456, "accuracy": 0.97})
    out = io.StringIO()
    show(reply, out)
    assert "\naccuracy 0.97, loss/val 1.235\n" in out.getvalue()
    assert as_json(reply)["numbers"] == {"accuracy": 0.97, "loss/val": 1.23456}
    assert "epoch 3 of 10, step 480 of 1,000, about 0:01:05 left at the pace of now\n" in out.getvalue()
    told = as_json(reply)
    assert (told["steps"], told["remaining_s"], told["epoch"], told["epochs"]) == (1000, 65.0, 3, 10)
    assert "time: 90 % training, 10 % forming, of " in out.getvalue()
    assert "host gpu-17 and node 3 (new disks)" in out.getvalue()
    assert told["seconds_by_cause"] == {"forming": 10.0, "training": 90.0}
    assert told["drains"] == [
        {"at": 1_800_000_000.0, "node_ids": ["3"], "hosts": ["gpu-17"], "reason": "new disks"}
    ]
    assert "time:" not in _shown(pb.StatusReply(job_id="job", state="forming"))


def _shown(reply: pb.StatusReply) -> str:
    out = io.StringIO()
    show(reply, out)
    return out.getvalue()

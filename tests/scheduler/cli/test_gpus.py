"""GPUs in words and as values."""

from __future__ import annotations

import io

from muster.scheduler.cli.gpus import gpu_in_full, gpu_in_short
from muster.scheduler.cli.status import as_json, show
from muster.wire.v1 import rendezvous_pb2 as pb

WELL = pb.GpuReport(
    state="well", busy_percent=0, used_mb=10_200, total_mb=80_000, clock_mhz=1980, celsius=61, remapped_rows=2
)
ILL = pb.GpuReport(state="ill", reasons=["Xid 79", "95 C, over 90 C"], celsius=95, xids=[79])


def test_what_is_known_is_said_and_no_more() -> None:
    assert gpu_in_short(WELL) == "0 %, 61 C"
    assert gpu_in_full(WELL) == "0 % busy, 10.2 of 80.0 GB, 1980 MHz, 61 C, 2 rows of memory remapped"
    assert gpu_in_short(ILL) == "ill"
    assert gpu_in_full(ILL) == "95 C, ill: Xid 79; 95 C, over 90 C"
    silent = pb.GpuReport(state="well")
    assert (gpu_in_short(silent), gpu_in_full(silent)) == ("-", "the driver tells nothing")


def reply() -> pb.StatusReply:
    made = pb.StatusReply(job_id="job", state="running", generation=1, worker_num=3)
    for rank, gpu in enumerate((WELL, ILL, None)):
        device = pb.Device(kind="cuda", index=rank)
        made.workers.add(node_id=f"n{rank}", host_name="gpu-17", rank=rank, device=device, gpu=gpu)
    made.workers[0].gpu_age_s = 2.5
    return made


def test_status_shows_each_rank_s_gpu_and_warns_of_one_that_is_not_well() -> None:
    out = io.StringIO()
    show(reply(), out)
    rows = {line.split()[1]: line.rstrip() for line in out.getvalue().splitlines() if " gpu-17 " in line[:30]}
    assert rows["n0"].endswith("0 %, 61 C") and rows["n1"].endswith(" ill") and rows["n2"].endswith(" -")
    warning = "Rank 1 (node n1 on host gpu-17, cuda:1): its GPU is ill: Xid 79; 95 C, over 90 C."
    assert warning in out.getvalue()
    narrow = io.StringIO()
    show(reply(), narrow, width=80)
    assert "61 C" not in narrow.getvalue() and "its GPU is ill" in narrow.getvalue()


def test_as_values_what_is_not_known_is_null() -> None:
    first, second, third = as_json(reply())["workers"]
    assert first["gpu"]["busy_percent"] == 0 and first["gpu"]["age_s"] == 2.5
    assert second["gpu"]["state"] == "ill" and second["gpu"]["busy_percent"] is None
    assert second["gpu"]["xids"] == [79] and second["gpu"]["reasons"] == ["Xid 79", "95 C, over 90 C"]
    assert third["gpu"] is None

"""How a status reply is shown."""

from __future__ import annotations

import io
import json

from muster.rendezvous.v1 import rendezvous_pb2 as pb
from muster.scheduler.cli.status import as_json, show

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
    assert (shown["missing"][0], shown["uptime_s"], shown["worker_min"]) == ("node-c", 3725.5, 2)


def test_the_table_names_all_and_takes_names_literally() -> None:
    out = io.StringIO()
    show(REPLY, out)
    text = out.getvalue()
    assert "job job: running, generation 3, 1 of 4 ranks, at least 2, scheduler up 1:02:05" in text
    row = next(line for line in text.splitlines() if "node-a" in line)
    device = "cuda:1 0000:1b:00.0 NVIDIA H200"
    for cell in ("alpha (10.0.0.1), rack1", device, "member", "0.2 s ago", "1200", "16,983.2"):
        assert cell in row
    assert "[bold]x[/bold]" in text
    assert "missing: [red]node-d[/red]" in text
    assert "node-c is lost" in text

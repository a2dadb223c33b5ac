"""The scale benchmark forms real sessions, counts what it says, and its figures can be drawn."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from muster.bench.__main__ import main
from muster.bench.scale import plot as plot_scale
from muster.bench.scale.command import scheduler_for
from muster.bench.scale.reader import slim_reader
from muster.wire.v1 import rendezvous_pb2 as pb


def test_a_sweep_measures_each_size(tmp_path: Path) -> None:
    options = ["--sweep", "4,12", "--heartbeat-s", "1", "--dying", "20", "--limit-s", "120"]
    assert main(["scale", *options, "--results", str(tmp_path)]) == 0
    reports = plot_scale.read(sorted(tmp_path.glob("scale_*.json")))
    assert [report["workers"] for report in reports] == [4, 12]
    large = reports[1]
    assert 0 <= large["last_join_to_all_assigned_s"] <= large["first_join_to_all_built_s"]
    assert large["died"] == 2
    assert large["generation_after"] in (2, 3)  # each death may be noticed by itself
    assert large["heartbeats_per_s"] > 1  # of 12
    assert large["machine"]["cores"] >= 1
    table = plot_scale.table(reports)
    assert table.splitlines()[2].startswith("| 4 | ")
    assert f"{large['first_join_to_all_built_s']:.2f}" in table.splitlines()[3]


def test_too_few_workers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--workers", "1"]) == 2
    assert "--workers must be at least 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["scale", "--sweep", "10,x"])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor cannot be shared out")
def test_a_scheduler_may_have_processors_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usable = os.sched_getaffinity(0)
    assert main(["scale", "--scheduler-cores", str(len(usable))]) == 2
    assert f"must be below {len(usable)}" in capsys.readouterr().err
    with scheduler_for(2, 5.0, tmp_path, cores=1) as (pid, _):
        assert os.sched_getaffinity(pid) == {min(usable)}
        assert os.sched_getaffinity(0) == usable - {min(usable)}
    assert os.sched_getaffinity(0) == usable


def test_a_worker_that_is_lost_ends_the_run_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    # They beat too seldom.
    options = ["--workers", "4", "--node-timeout-s", "0.5", "--beat-s", "20", "--heartbeat-s", "20"]
    assert main(["scale", *options]) == 1
    assert "bench: A load process says: " in capsys.readouterr().err


def test_workers_that_uplinks_carry_form_the_same_group_on_few_connections(tmp_path: Path) -> None:
    path = tmp_path / "uplinks.json"
    options = ["--workers", "20", "--uplinks", "--loads", "2", "--heartbeat-s", "2", "--beat-s", "0.5"]
    assert main(["scale", *options, "--dying", "10", "--limit-s", "120", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["uplinks"]
    assert report["died"] == 2 and report["generation_after"] in (2, 3)  # noticed in two processes
    assert report["heartbeats_per_s"] > 4  # of 40
    assert report["load_cpu_share_of_one_core"] > 0


def test_heartbeats_are_held_in_turns_without_and_with_what_they_carry(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    options = ["--workers", "8", "--heartbeat-s", "1", "--beat-s", "0.1", "--figures", "2"]
    assert main(["scale", *options, "--limit-s", "120", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [turn["carries_figures"] for turn in report["turns"]] == [False, True] * 2
    assert min(turn["heartbeats_per_s"] for turn in report["turns"]) > 4  # of 80
    without, carried = (turn["bytes_per_heartbeat"] for turn in report["turns"][:2])
    assert carried > without + 100
    assert report["figures_cost_percent"] > -100.0


def test_the_slim_reader_reads_what_the_scheduler_writes() -> None:
    members = [pb.Member(rank=rank, node_id=str(rank)) for rank in range(50)]
    assignment = pb.Assignment(generation=7, rank=3, members=members, unique_id_count=2)
    read = slim_reader()(pb.SchedulerMessage(assignment=assignment).SerializeToString())
    assert read.WhichOneof("body") == "assignment"
    assert (read.assignment.generation, read.assignment.rank, read.assignment.unique_id_count) == (7, 3, 2)
    refused = pb.SchedulerMessage(refused=pb.Refused(code=pb.REFUSAL_CODE_JOB_FULL, sentence="full"))
    assert slim_reader()(refused.SerializeToString()).refused.sentence == "full"


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for size in (10, 100):
        figures = dict.fromkeys(plot_scale.TIMES, size / 100)
        report: dict[str, object] = {
            "workers": size,
            "scheduler_bytes_per_worker": 1e5,
            "heartbeats_per_s": size,
            **figures,
        }
        machine = {"cores": 2, "cpu": "a CPU", "python": "3.11", "load_before": 0.5, "date": "2026-01-02T03"}
        report |= {"scheduler_cpu_share_of_one_core": 0.1, "machine": machine}
        (tmp_path / f"scale_{size}.json").write_text(json.dumps(report))
    out = tmp_path / "docs" / "scale.png"
    files = [str(path) for path in tmp_path.glob("*.json")]
    page = tmp_path / "scale.md"
    page.write_text(f"before\n{plot_scale.BEGIN}\nold\n{plot_scale.END}\nafter\n")
    assert plot_scale.main([*files, "--out", str(out), "--page", str(page)]) == 0
    assert "old" not in page.read_text()
    assert "| 100 | 1.00 |" in page.read_text() and page.read_text().endswith("\nafter\n")
    assert out.read_bytes().startswith(b"\x89PNG")

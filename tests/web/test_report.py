"""``muster report``: one file, which needs nothing else, about a run that goes on or is over."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from muster.web.past import load, scheduler_log
from muster.web.report import main, page
from muster.wire.json_lines import LineContext, json_line
from muster.wire.launches import RunRecord
from muster.wire.log_lines import bounded
from tests.scheduler.processes import environment

SCRIPT = """
import sys, numpy, muster
from muster.wire.messages import SnapshotReport
with muster.init() as session:
    for step in range(1, 6):
        muster.all_reduce(numpy.ones(4, "float32"))
        kept = SnapshotReport(1, -1, step, True, size_bytes=4096, seconds=0.5, partners=(1,))
        session.report_snapshot(kept)
        session.report_checkpoint(step, size_bytes=2048, seconds=0.25)
        session.report(loss=1 / step, samples=8, learning_rate=0.25, steps=5, epoch=2, epochs=3)
    if session.rank == 1 and "fail" in sys.argv:
        raise ValueError("</pre><script>alert(1)</script>")
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = (
        sys.executable,
        "-m",
        "muster",
        "run",
        "-n",
        "2",
        "--scheduler",
        "--",
        sys.executable,
        "script.py",
    )
    return subprocess.run(
        [*command, *arguments],
        cwd=tmp_path,
        env=environment(MS_NODE_TIMEOUT="20"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_run_that_failed_is_told_with_its_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run(tmp_path, "fail")
    assert ran.returncode == 1, ran.stderr
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    html = (tmp_path / "muster-runs/latest/report.html").read_text()
    assert "ended with exit code 1" in html and "worker 1" in html
    assert "&lt;script&gt;alert(1)" in html and "<script" not in html
    told = load(tmp_path / "muster-runs/latest")
    assert (told.job_id, told.workers, told.codes) == ("default", 2, [1])
    assert [(g.number, g.members) for g in told.generations][:1] == [(1, 2)]
    snapshot, checkpoint = told.copies["snapshot"], told.copies["checkpoint"]
    assert (snapshot.size_bytes, snapshot.seconds, snapshot.partner) == (4096, 0.5, 1)
    assert (checkpoint.size_bytes, checkpoint.seconds, checkpoint.partner) == (2048, 0.25, -1)
    assert checkpoint.step == snapshot.step == told.series.points[-1].step
    assert f"step {snapshot.step}, " in html and "before the end, 4.1 kB in 0.5 s, at rank 1" in html
    assert (told.steps, told.epoch, told.epochs, told.remaining_s) == (5, 2, 3, 0.0)
    last = told.series.points[-1]
    assert last.loss == pytest.approx(1 / last.step) and last.learning_rate == 0.25
    assert any("Generation 1 stands with 2 members." in each.text for each in told.scheduler_said)


def test_the_file_needs_nothing_else(tmp_path: Path) -> None:
    record(tmp_path)
    html = page(tmp_path)
    assert html is not None
    linked: list[str | None] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "img", "iframe", "object")
            linked.extend(value for name, value in attrs if name in ("src", "href", "style", "action"))

    Links().feed(html)
    assert not linked
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    assert "default-src &#39;none&#39;" in policy and "unsafe" not in policy
    assert len(html) < 1_000_000


LOST = "rank 2 (node 2 on host b) is lost: its stream ended (no goodbye was said)"


@pytest.mark.parametrize("scheduler_is_here", [True, False])
def test_a_rank_that_was_lost_elsewhere_is_a_fault(tmp_path: Path, scheduler_is_here: bool) -> None:
    """The launcher of this host has said nothing of it: its own workers went on."""
    kept = RunRecord(tmp_path, "a", lambda: 1769860800.0)
    kept.note("began", job_id="job", host="a", workers=3, command="python train.py")
    kept.note("group", generation=1, workers=3, reason="all 3 workers are in")
    kept.note("group", generation=2, workers=2, reason=LOST)
    kept.note("ended", code=0)
    if scheduler_is_here:
        loss = f"{LOST[0].upper()}{LOST[1:]}. Generation 2 is formed with 2 members: {LOST}."
        others = ("Node 3 on host b left: maintenance.", "Generation 2 stands with 2 members.")
        lines = (f'2026-01-31T12:00:00.000Z INFO decided job_id=j text="{x}"' for x in (loss, *others))
        (tmp_path / "scheduler.log").write_text("\n".join(lines) + "\n")
    said = [fault.text for fault in load(tmp_path).faults]
    assert said == [f"R{LOST[1:]}." if scheduler_is_here else f"Generation 2: {LOST}."]
    html = page(tmp_path)
    assert html is not None and "None were seen" not in html


def record(directory: Path) -> None:
    """A run of 100 s that loses a worker at 50 s and still goes on."""
    now = [1000.0]
    kept = RunRecord(directory, "a", lambda: now[0])
    kept.note("began", job_id="<b>job</b>", host="a", workers=3, command="python train.py")
    for second in range(100):
        now[0] = 1000.0 + second
        if second in (1, 50):
            number = 1 + (second == 50)
            kept.note("group", generation=number, workers=4 - number, reason=f"reason {number}")
        of_all = {"steps": 500, "epoch": 1 + second // 40, "epochs": 5}
        kept.figures(step=2 * second, samples_per_s=10.0, loss=1.0 / (second + 1), **of_all)
    kept.note("said", text="worker 2 was ended by SIGKILL; going on with 2", tone="warning")


def test_a_run_that_goes_on_is_told_as_far_as_it_is(tmp_path: Path) -> None:
    record(tmp_path)
    html = page(tmp_path)
    assert html is not None
    assert "not ended when this was written" in html and "&lt;b&gt;job&lt;/b&gt;" in html
    assert "Loss over 1 min 39 s: from 1 to 0.01" in html
    assert "<dt>epoch</dt><dd>3 of 5</dd>" in html and "<dt>steps</dt><dd>198 of 500</dd>" in html
    assert "<dt>left, at this pace</dt><dd>2 min 31 s</dd>" in html
    told = load(tmp_path)
    assert [(g.number, g.members, g.reason) for g in told.generations] == [
        (1, 3, "reason 1"),
        (2, 2, "reason 2"),
    ]
    assert told.generations[0].over == 1050.0
    assert [point.samples_per_s for point in told.series.points][::60] == [10.0, 20.0]
    assert [fault.text for fault in told.faults] == ["worker 2 was ended by SIGKILL; going on with 2"]


NINES = "9" * 400
HOSTILE = (
    r'{"time":2,"kind":"said","text":"\ud800 \u202e\u001b[2J"}',
    f'{{"time":2,"kind":"group","generation":{NINES},"workers":true}}',
    f'{{"time":2,"kind":"figures","step":{NINES},"samples_per_s":{NINES}}}',
    '{"time":3,"kind":"figures","step":1,"samples_per_s":1e308,"loss":1.7e308}',
    '{"time":4,"kind":"figures","step":2,"samples_per_s":1e308,"loss":-1.7e308,"learning_rate":5e-324}',
    '{"time":5,"kind":"figures","step":3,"samples_per_s":1,"loss":[],"learning_rate":0}',
    r'{"time":6,"kind":"end_of_log","name":{"a":1},"lines":[null,{"b":"\udc00"}]}',
    f'{{"time":7,"kind":"ended","code":{NINES}}}',
)


def test_a_record_that_an_enemy_has_written_is_told_as_far_as_it_makes_sense(tmp_path: Path) -> None:
    """Another user of the directory writes a record of another host, and the scheduler's log."""
    RunRecord(tmp_path, "a").note("began", job_id="j")
    (tmp_path / "record_b.jsonl").write_text("\n".join(HOSTILE) + "\n")
    (tmp_path / "scheduler.log").write_text(
        "2026-01-31T12:00:00.123Z INFO lost text=" + '"\\udc00\\u001b[2J"' + "\n"
    )
    (tmp_path / ".report.html.part").symlink_to(tmp_path / "victim")
    assert main([str(tmp_path)]) == 0
    html = (tmp_path / "report.html").read_text()
    assert "\\ud800" in html and "\\udc00" in html
    assert not set("\x1b\u202e") & set(html)
    assert not (tmp_path / "victim").exists()


def test_large_records_that_an_enemy_adds_do_not_hide_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read of all records together is bounded: the smallest come first."""
    record(tmp_path)
    monkeypatch.setattr("muster.wire.launches.MAX_READ_BYTES", 100_000)
    for name in ("0", "1"):
        (tmp_path / f"record_{name}.jsonl").write_text(5000 * '{"time":9,"kind":"said"}\n')
    assert (load(tmp_path).workers, len(load(tmp_path).said)) == (3, 1)


def test_a_link_that_an_enemy_puts_in_the_reports_place_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of the file and its writing: another user may write the folder, too."""
    record(tmp_path)
    victim, make = tmp_path / "victim", os.open

    def swapped(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        made = make(path, flags, *arguments, **more)
        if str(path).endswith(".part") and flags & os.O_CREAT:
            Path(path).unlink()
            Path(path).symlink_to(victim)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", swapped)
        main([str(tmp_path)])
    assert not victim.exists()


def test_what_is_no_regular_file_keeps_no_report_waiting(tmp_path: Path) -> None:
    record(tmp_path)
    for name in ("record_b.jsonl", "scheduler.log", "worker_0.log"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "record_c.jsonl").symlink_to("/dev/zero")
    (tmp_path / "worker_1.log").mkdir()
    (tmp_path / "worker_2.log").symlink_to("/etc/passwd")
    assert main([str(tmp_path)]) == 0
    html = (tmp_path / "report.html").read_text()
    assert "it is a FIFO" in html and "root:" not in html


def test_a_scheduler_log_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.log"
    path.write_text(
        "# muster scheduler\n"
        '2026-01-31T12:00:00.123Z INFO decided job_id=j text="Generation 1 is \\"formed\\"."\n'
        "2026-01-31T12:00:01.000Z WARNING lost job_id=j node_id=0 text=silence\n"
        "2026-01-31T12:00:02.000Z INFO certificate x\nrubbish text=1\n"
    )
    said = list(scheduler_log(path))
    assert [(each.kind, each.text) for each in said] == [
        ("decided", 'Generation 1 is "formed".'),
        ("lost", "node 0: silence"),
    ]
    assert said[0].time_s == pytest.approx(1769860800.123)


def test_a_line_of_the_scheduler_s_that_was_too_long_is_whole_and_says_who_it_is_about(
    tmp_path: Path,
) -> None:
    long = "words " * 200
    head = "2026-01-31T12:00:00.123Z INFO "
    facts = 'job_id=j peer=127.0.0.1:5 rank=2 node_id=3 host="gpu 17" host_id=abc'
    lines = bounded(head, f'drained {facts} text="{long}end"'), bounded(head, f"joined {facts}")
    (tmp_path / "scheduler.log").write_text("\n".join(lines) + f"\n{head}+ of nothing\n")
    first, second, *more = scheduler_log(tmp_path / "scheduler.log")
    assert first.text == f"rank 2, node 3 on gpu 17: {long}end"
    assert (second.kind, second.text, more) == ("joined", "rank 2, node 3 on gpu 17", [])


def test_a_scheduler_log_in_json_is_read_likewise(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.log"
    context = LineContext("scheduler", "j")
    noted = json_line("INFO", "Generation 1 is formed.", context, event="decided")
    other = json_line("INFO", "stopping", context)
    late = noted.replace('"time": "2', '"time": "x')
    path.write_text("\n".join((noted, other, late, "{", "rubbish")))
    assert [(each.kind, each.text) for each in scheduler_log(path)] == [
        ("decided", "Generation 1 is formed.")
    ]


def test_a_directory_without_a_record_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "holds no record of a run" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "No such file or directory. Name one that muster run has made" in capsys.readouterr().err
    record(tmp_path)
    assert main([str(tmp_path), "--output", str(tmp_path / "none" / "x.html")]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_where_the_time_went_is_added_up_over_schedulers_and_own_numbers_are_plotted(tmp_path: Path) -> None:
    record(tmp_path)
    html = page(tmp_path)
    assert html is not None and "does not lie in this directory" in html and "mark-change" in html
    kept = RunRecord(tmp_path, "b", lambda: 1200.0)
    kept.figures(step=300, numbers={"accuracy": 0.9, "hostile": [], "<b>": 1})
    kept = RunRecord(tmp_path, "b", lambda: 1300.0)
    kept.figures(step=400, numbers={"accuracy": 0.95}, loss=0.1)
    told = (
        ("12:00", "training 90.0 s, forming 10.0 s"),
        ("12:10", "training 190.0 s, forming 10.0 s"),
        ("12:20", "training 5.0 s, redoing 1.5 s"),  # of the next scheduler
    )
    lines = [f'2026-01-31T{at}:00.000Z INFO time job_id=job text="{text}"' for at, text in told]
    (tmp_path / "scheduler.log").write_text("\n".join(lines) + "\n")
    run_ = load(tmp_path)
    assert run_.time_by_cause == {"training": 195.0, "redoing": 1.5, "forming": 10.0}
    assert run_.scheduler_said == []
    html = page(tmp_path)
    assert html is not None and "training <b>94 %</b>" in html
    assert "<figcaption>accuracy <b>0.95</b>" in html and "&lt;b&gt; <b>1</b>" in html

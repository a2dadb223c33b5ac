"""The pages as HTML: what strangers choose is text there, and only what changes is sent."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from muster.web.app import FOLLOWED, Pages
from muster.web.guard import Browser, LoginLinks
from muster.web.live import Cell, Live
from muster.web.logs import Log, logs_of, tail
from muster.web.model import Followed
from muster.web.pages import CARDS_AT_MOST, JobPage, JobsPage, cell_id
from muster.web.past import command_of
from muster.web.report import ASSETS
from muster.wire.launches import RunRecord
from muster.wire.v1 import rendezvous_pb2 as rendezvous_pb
from muster.wire.v1 import watch_pb2 as pb

HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "' onfocus='alert(1)' autofocus='",
    "שלום-עולם",
    "{{ 7 * 7 }}{% if x %}",
    "&lt;b&gt;",
    "n" * 128,
)


class Elements(HTMLParser):
    """Which elements and attributes a page has, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def known(nodes: tuple[str, ...], *, step: int = 3) -> Followed:
    found = Followed("127.0.0.1:6667")
    text = nodes[0]
    line = pb.JobLine(
        job_id=text, state="running", generation=1, members=len(nodes), worker_num=len(nodes) + 1
    )
    line.reason, line.missing, line.step, line.furthest = text, 1, step, step
    found.take(pb.WatchReply(overview=pb.Overview(jobs=[line], started=1.0, version=text)), 10.0)
    seats = [
        pb.Seat(
            node_id=node, host_name=node, host_id=node, address=node, topology=node, rank=rank, state="member"
        )
        for rank, node in enumerate(nodes)
    ]
    roster = pb.Roster(number=1, seats=seats, missing=[text])
    events = [
        pb.Happening(number=1, time=1, kind="formed", generation=1, count=2, text=text),
        pb.Happening(number=2, time=2, kind="decided", text=text),
        pb.Happening(
            number=3, time=3, kind="lost", text=text, node_id=text, host=text, identity=text, peer=text
        ),
    ]
    columns = pb.Progress(roster=1, job=line)
    for _ in nodes:
        columns.step.append(step)
        columns.silent_s.append(0.5)
        columns.samples_per_s.append(2.0)
        columns.loss.append(0.5)
        columns.call.append(0)
        columns.sequence.append(0)
        columns.done.append(False)
    for reply in (
        pb.WatchReply(roster=roster),
        pb.WatchReply(progress=columns),
        pb.WatchReply(happenings=pb.Happenings(happenings=events)),
    ):
        found.take_of(text, reply, 11.0)
    found.take(pb.WatchReply(happenings=pb.Happenings(happenings=events)), 11.0)
    return found


@pytest.mark.parametrize(
    ("traffic", "shown"), [("sealed", True), ("plain", True), ("", False), ("<script>", False)]
)
def test_a_job_shows_whether_nccl_s_traffic_is_encrypted(traffic: str, shown: bool, tmp_path: Path) -> None:
    found = known(("0", "1"))
    found.jobs["0"].line.nccl_traffic = traffic
    page = JobPage(found, "0", logs_of(tmp_path))
    page.refresh(12.0)
    head = json.loads(page.live.since(0))["parts"]["head"]
    assert ("NCCL between hosts" in head) is shown and (f">{traffic}</dd>" in head) is shown
    assert ("Muster&#39;s plug-in (AES-128-GCM)" in head) is (traffic == "sealed")


@pytest.mark.parametrize("name", HOSTILE)
def test_what_strangers_choose_is_text_and_nothing_else(name: str, tmp_path: Path) -> None:
    (tmp_path / "worker_0.log").write_text(f"{name}\x1b[31m\n")
    found = known((name, "1"))
    plain = known(("0", "1"))
    for dense in (False, True):
        more = tuple(f"{name[:100]}{i}" for i in range(CARDS_AT_MOST)) if dense else ()
        fewer = tuple(str(i) for i in range(CARDS_AT_MOST)) if dense else ()
        found, plain = known((name, "1", *more)), known(("0", "1", *fewer))
        pages = []
        for each, job_id in ((found, name), (plain, "0")):
            page = JobPage(each, job_id, logs_of(tmp_path))
            page.refresh(12.0)
            jobs = JobsPage(each)
            jobs.refresh(12.0)
            parts = [json.loads(live.since(0)) for live in (page.live, jobs.live)]
            sent = "".join("".join(part["parts"].values()) for part in parts)
            cells = "".join(cell[3] for part in parts for cell in part["cells"])
            whole = page.html(flash=job_id) + jobs.html(flash=job_id)
            pages.append(whole + sent + cells + page.worker(job_id))
        hostile, calm = (Elements(html) for html in pages)
        assert (hostile.tags, hostile.attributes) == (calm.tags, calm.attributes)
        assert "style" not in hostile.tags | hostile.attributes
        assert any(name in text for text in hostile.texts)


def test_the_copies_of_the_state_stand_in_the_head_and_with_each_worker() -> None:
    found = known(("0", "1"))
    page = JobPage(found, "0")
    page.refresh(12.0)
    before = page.html(flash="") + page.worker("0")
    assert "snapshot" not in before and "checkpoint" not in before
    columns = pb.Progress()
    columns.CopyFrom(found.jobs["0"].progress)
    written = rendezvous_pb.CheckpointReport(step=100, age_s=180, size_bytes=2_000_000, seconds=2.1)
    columns.copies.CopyFrom(
        rendezvous_pb.JobCopies(
            snapshot_step=120,
            snapshot_age_s=12,
            snapshot_bytes=1500,
            snapshot_seconds=0.8,
            checkpoint=written,
        )
    )
    kept = rendezvous_pb.SnapshotReport(
        agreed=120, taken=-1, age_s=13, size_bytes=750, seconds=0.5, partners=[1]
    )
    columns.seat_copies.add(seat=0, snapshot=kept, checkpoint=written)
    found.take_of("0", pb.WatchReply(progress=columns), 12.0)
    page = JobPage(found, "0")
    page.refresh(12.0)
    whole, one = page.html(flash=""), page.worker("0")
    assert "step 120, 12 s ago, 1.5 kB in 0.8 s" in whole and "step 100, 3 min ago, 2 MB in 2.1 s" in whole
    assert "step 120, 13 s ago, at rank 1<" in whole, "in the worker's card"
    assert "step 120, 13 s ago, at rank 1, 750 B in 0.5 s" in one and "step 100, 3 min ago" in one


def test_a_gpu_stands_beside_its_rank_and_what_speaks_against_it_above() -> None:
    found = known(("0", "1"))
    columns = pb.Progress()
    columns.CopyFrom(found.jobs["0"].progress)
    well = rendezvous_pb.GpuReport(state="well", busy_percent=98, celsius=61, clock_mhz=1980)
    columns.gpus.add(seat=0, gpu=well)
    page = JobPage(found, "0")
    page.refresh(12.0)
    assert "GPU" not in page.html(flash="") + page.worker("0")
    found.take_of("0", pb.WatchReply(progress=columns), 12.0)
    page = JobPage(found, "0")
    page.refresh(12.0)
    assert "<dt>GPU</dt><dd>98 %, 61 C</dd>" in page.html(flash="")
    assert "98 % busy, 1980 MHz, 61 C" in page.worker("0") and "GPU" not in page.worker("1")
    columns.refused_gpus.add(gpu="GPU-1", host_name="<gpu-17>", node_id="3", device_index=3, reason="7 words")
    columns.gpus[0].gpu.MergeFrom(rendezvous_pb.GpuReport(state="ill", reasons=["<Xid 79>"]))
    found.take_of("0", pb.WatchReply(progress=columns), 12.0)
    page = JobPage(found, "0")
    page.refresh(13.0)
    whole = page.html(flash="")
    assert "<dt>GPU</dt><dd><em>ill</em></dd>" in whole and "s-member unwell" in whole
    assert "Rank 0 (node 0 on host 0): its GPU is ill: &lt;Xid 79&gt;." in whole
    assert "GPU GPU-1 of host &lt;gpu-17&gt;, number 3 (node 3) is refused: 7 words." in whole


def test_gpus_that_are_ill_stand_above_those_that_are_suspect() -> None:
    found = known(("0", "1", "2"))
    columns = pb.Progress()
    columns.CopyFrom(found.jobs["0"].progress)
    for seat, state in enumerate(("suspect", "well", "ill")):
        columns.gpus.add(seat=seat, gpu=rendezvous_pb.GpuReport(state=state, reasons=["this"]))
    found.take_of("0", pb.WatchReply(progress=columns), 12.0)
    page = JobPage(found, "0")
    page.refresh(12.0)
    whole = page.html(flash="")
    assert whole.index("its GPU is ill") < whole.index("its GPU is suspect")


def test_the_page_says_where_the_evidence_of_a_hang_lies() -> None:
    found = known(("0", "1"))
    page = JobPage(found, "0")

    def trouble(now: float) -> str:
        page.refresh(now)
        return str(json.loads(page.live.since(0))["parts"]["trouble"])

    assert "Evidence of" not in trouble(12.0)
    found.jobs["0"].line.evidence = "Evidence of the hang at noon: /runs/<1>"
    assert "Evidence of the hang at noon: /runs/&lt;1&gt;" in trouble(13.0)


def test_only_what_changes_is_sent() -> None:
    found = known(("0", "1"))
    page = JobPage(found, "0")
    page.refresh(12.0)
    seen = page.live.number
    page.refresh(12.0)
    assert page.live.since(seen) == ""
    columns = pb.Progress()
    columns.CopyFrom(found.jobs["0"].progress)
    columns.samples_per_s[1] = 7.0
    found.take_of("0", pb.WatchReply(progress=columns), 12.0)
    page.refresh(12.0)
    news = json.loads(page.live.since(seen))
    assert [cell[0] for cell in news["cells"]] == [cell_id("1")]
    assert "grid" not in news["parts"]
    found.take_of("0", pb.WatchReply(roster=pb.Roster(number=2)), 12.0)
    page.refresh(12.0)
    assert "grid" in json.loads(page.live.since(page.live.number - 1))["parts"]


def test_who_looks_from_now_on_gets_everything() -> None:
    live = Live()
    live.begin()
    live.put("a", "1")
    live.put_cells([Cell("c", "k", "", "1")], whole=True)
    live.begin()
    live.put_cells([Cell("c", "k", "", "2")], whole=False)
    assert json.loads(live.since(0)) == {"parts": {"a": "1"}, "cells": [["c", "k", "", "2"]]}
    assert json.loads(live.since(1)) == {"parts": {}, "cells": [["c", "k", "", "2"]]}
    assert live.since(2) == ""


def test_who_is_missing_stands_where_it_was() -> None:
    found = known(("0", "1"))
    seats = [each for each in found.jobs["0"].roster.seats if each.node_id == "0"]
    found.take_of("0", pb.WatchReply(roster=pb.Roster(number=2, seats=seats, missing=["node 1"])), 12.0)
    page = JobPage(found, "0")
    page.refresh(12.0)
    grid = json.loads(page.live.since(0))["parts"]["grid"]
    second = grid.partition("<bdi>1</bdi>")[2]
    assert "s-missing" in second and "node 1" in second and "Not here" not in grid


def test_a_thousand_workers_are_small_cells_that_do_not_change_with_each_step() -> None:
    nodes = tuple(str(i) for i in range(1000))
    found = known(nodes)
    page = JobPage(found, "0")
    page.refresh(12.0)
    seen = page.live.number
    columns = pb.Progress()
    columns.CopyFrom(found.jobs["0"].progress)
    columns.step[:] = [4] * 1000
    columns.job.step = columns.job.furthest = 4
    found.take_of("0", pb.WatchReply(progress=columns), 13.0)
    page.refresh(13.0)
    assert json.loads(page.live.since(seen))["cells"] == []
    assert len(page.html(flash="")) < 1_000_000


def test_the_page_with_all_that_it_needs_is_small() -> None:
    assets = Path(__file__).parents[2] / "muster" / "web" / "assets"
    assert sum(path.stat().st_size for path in assets.iterdir()) < 100_000
    assert [path.name for path in assets.glob("*.js")] == ["live.js"]
    for path in assets.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text and "url(" not in text


def test_the_end_of_a_log_is_bounded_and_harmless(tmp_path: Path) -> None:
    log = Log("worker_0.log", tmp_path / "worker_0.log")
    log.path.write_bytes(b"x" * 1_000_000 + b"\n" + b"\x1b[31mred\xff\n" * 3)
    assert tail(log, 2) == "\\x1b[31mred\ufffd\n\\x1b[31mred\ufffd\n"
    link = Log("worker_1.log", tmp_path / "worker_1.log")
    link.path.symlink_to("/etc/passwd")
    assert "root" not in tail(link, 5)
    assert [each.name for each in logs_of(tmp_path)] == ["worker_0.log"]


class Silent:
    """A connection on which the scheduler says nothing."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        self.closed.set()

    def watch(self, job_id: str) -> Iterator[object]:
        self.closed.wait()
        return iter(())


def test_addresses_that_name_no_job_or_ever_others_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job that is looked at has a thread and a connection; the list of all has one, too."""
    monkeypatch.setattr("muster.web.app.LINGER_S", 0.01)

    async def ask(pages: Pages, query: str) -> int:
        scope = {"type": "http", "query_string": query.encode(), "headers": [], "muster.browser": Browser()}
        try:
            return (await pages.job(Request(scope))).status_code
        except HTTPException as error:
            return error.status_code

    def all_is_followed() -> bool:
        return any(thread.name == "watch all" for thread in threading.enumerate())

    async def test() -> None:
        pages = Pages(Followed("s"), LoginLinks(), lambda job_id: Silent())  # type: ignore[arg-type,return-value]
        pages.feed.open()
        pages.known.overview.version = "1"
        assert await ask(pages, "") == 404
        await asyncio.sleep(0.02)  # timers run in order: the page of "" is not lingered for any more
        assert all_is_followed()
        monkeypatch.setattr("muster.web.app.LINGER_S", 60)
        assert [await ask(pages, f"id=job-{number}") for number in range(FOLLOWED + 1)] == [
            *[404] * FOLLOWED,
            503,
        ]
        assert await ask(pages, "id=job-0") == 404
        pages.feed.close()

    asyncio.run(test())


def test_the_page_shows_where_the_time_went_and_the_script_s_own_numbers() -> None:
    found = known(("0", "1"))
    columns = pb.Progress()
    columns.CopyFrom(found.jobs["0"].progress)
    page = JobPage(found, "0")
    page.refresh(12.0)
    assert "The scheduler has not said so." in page.html(flash="")
    columns.seconds_by_cause.update({"training": 90.0, "waiting for data": 10.0})
    columns.job.numbers["<accuracy>"] = 0.97
    found.take_of("0", pb.WatchReply(progress=columns), 13.0)
    page.refresh(13.0)
    whole = page.html(flash="")
    assert "waiting for data <b>10 %</b> <small>10 s</small>" in whole
    assert '<rect class="c-waiting-for-data" x="900.0" y="2" width="100.0"' in whole
    assert "left, at this pace" not in whole and "<dt>epoch" not in whole
    line = found.jobs["0"].line
    line.steps, line.remaining_s, line.epoch, line.epochs = 1000, 65.0, 3, 10
    page.refresh(14.0)
    whole = page.html(flash="")
    assert "<dt>epoch</dt><dd>3 of 10</dd>" in whole
    assert "3 of 1,000</dd>" in whole and "<dt>left, at this pace</dt><dd>1 min 5 s</dd>" in whole
    assert "<figcaption>&lt;accuracy&gt; <b>0.97</b>" in whole


def test_events_and_workers_are_never_red() -> None:
    """Nor are certificates that end soon: the job trains on."""
    style = (ASSETS / "style.css").read_text()
    red = [line.partition(" {")[0].strip() for line in style.splitlines() if "var(--bad)" in line]
    assert red == [
        ".link.off",
        ".state.s-suspended",
        ".notice.bad",
        ".c-suspended",
        ".error",
        ".button.danger",
    ]


def test_red_is_for_a_job_in_trouble_alone() -> None:
    """One that trains on with fewer workers is not."""
    found = known(("0", "1"))
    job, page = found.jobs["0"], JobPage(found, "0")

    def trouble(now: float) -> str:
        page.refresh(now)
        return str(json.loads(page.live.since(0))["parts"]["trouble"])

    job.line.reason = "Generation 1 stands with 2 members."
    assert 'class="notice warn">1 of 3 workers is missing.' in trouble(12.0)
    job.line.state, job.line.reason = "suspended", "Too few."
    assert 'class="notice bad">Too few.' in trouble(13.0)
    job.line.state, job.line.missing = "ended", 0
    assert "bad" not in trouble(14.0)
    job.events.append(pb.Happening(kind="ended", code="failed", text="Too few."))
    assert 'class="notice bad">Too few.' in trouble(15.0)


def test_planned_drains_stand_on_the_page_until_they_are_over() -> None:
    found = known(("0", "1"))
    columns = pb.Progress()
    columns.CopyFrom(found.jobs["0"].progress)
    columns.drains.add(number=1, at_s=7212.0, hosts=["gpu-17", "<b>"], node_ids=["3"], reason="new disks.")
    columns.drains.add(number=2, at_s=7212.0, node_ids=[str(i) for i in range(10)], reason="x")
    found.take_of("0", pb.WatchReply(progress=columns), 12.0)
    page = JobPage(found, "0")
    page.refresh(12.0)
    told = str(json.loads(page.live.since(0))["parts"]["trouble"])
    assert "Host gpu-17, host &lt;b&gt; and node 3 are to be drained at 1970-01-01 " in told
    assert ", in 2 h: new disks.</p>" in told and "node 7 and 2 more are to be drained" in told
    del columns.drains[:]
    found.take_of("0", pb.WatchReply(progress=columns), 13.0)
    page.refresh(13.0)
    assert "to be drained" not in str(json.loads(page.live.since(0))["parts"]["trouble"])


def test_a_launch_on_this_host_is_shown_with_its_command_and_directory(tmp_path: Path) -> None:
    RunRecord(tmp_path, "a").note("began", job_id="0", host="a", workers=2, command="python <train>.py")
    assert command_of(tmp_path) == "python <train>.py"
    assert command_of(tmp_path / "nowhere") == ""
    page = JobPage(known(("0", "1")), "0", (), None, (command_of(tmp_path), "/runs/x"))
    page.refresh(12.0)
    assert "python &lt;train&gt;.py</bdi></code> <small>in <bdi>/runs/x<" in page.html(flash="")

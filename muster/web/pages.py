"""Renders the pages as HTML from the model. Every value is escaped by the templates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import jinja2
from markupsafe import Markup

from muster.scheduler.cli.gpus import ILL, WELL, gpu_warning, refused_in_words
from muster.web import words
from muster.web.live import Cell, Live
from muster.web.logs import Log, tail
from muster.web.model import GENERATIONAL, Followed, ObservedJob, ObservedWorker, trouble, who_waits
from muster.web.plots import bars, plots, shares
from muster.wire.messages import NCCL_WORDS
from muster.wire.v1 import watch_pb2 as pb

CARDS_AT_MOST = 64
"""The largest number of workers that are shown as cards; more are shown as cells of a grid."""

EVENTS_SHOWN = 60
SILENT_S = 3.0
LOG_LINES = 40

STATES = {
    "member": "training",
    "building": "building",
    "waiting": "waiting",
    "spare": "spare",
    "leaving": "leaving",
    "lost": "lost",
}
TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("muster.web"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals.update(words=words, trouble=trouble, STATES=STATES)


def url(page: str, **query: str) -> str:
    """Returns a link relative to the pages' path."""
    return f"{page}?{urlencode(query)}" if query else page


TEMPLATES.globals["url"] = url


def render(template: str, **values: Any) -> str:
    """Renders a template with these values."""
    return TEMPLATES.get_template(template).render(**values)


def cell_id(node_id: str) -> str:
    """Returns the id of a node's HTML element, which is valid whatever characters the node id has."""
    return f"w-{hashlib.sha256(node_id.encode()).hexdigest()[:16]}"


@dataclass
class JobsPage:
    """The page of all jobs."""

    known: Followed
    live: Live = field(default_factory=Live)

    def refresh(self, now: float) -> None:
        """Renders the parts that may have changed."""
        self.live.begin()
        known = self.known
        self.live.put("absence", render("absence.html", known=known, now=now))
        self.live.put("jobs", render("jobs.html", known=known, now=now))
        self.live.put("scheduler", render("scheduler.html", known=known, now=now))
        self.live.put("refusals", _events(known.refusals, "Nobody has been refused."))

    def html(self, **values: Any) -> str:
        """Returns the whole page."""
        return render("page_jobs.html", known=self.known, live=_shown(self.live), **values)


@dataclass
class JobPage:
    """The page of a job.

    Attributes:
        known: what is known of the scheduler.
        job_id: the job.
        logs: the logs of the job's launch on this host; empty if there is none.
        own_ends: when the operator's certificate ends, in seconds since 1970; None without one.
        origin: the command of the launch on this host and the directory of its logs; empty if there is none.
        live: the changing parts of the page.
    """

    known: Followed
    job_id: str
    logs: Sequence[Log] = ()
    own_ends: float | None = None
    origin: tuple[str, str] = ("", "")
    live: Live = field(default_factory=Live)
    _grid: tuple[object, ...] = ()
    _logs: tuple[str, ...] | None = None

    def refresh(self, now: float) -> None:
        """Renders the parts that may have changed."""
        live, job = self.live, self.known.jobs.get(self.job_id)
        live.begin()
        live.put("absence", render("absence.html", known=self.known, now=now))
        if job is None:
            live.put("head", render("no_job.html", job_id=self.job_id))
            return
        workers = job.workers()
        generations = job.generations()
        nccl = NCCL_WORDS.get(job.line.nccl_traffic, "")
        copies = job.progress.copies
        live.put("head", render("head.html", job=job, line=job.line, copies=copies, now=now, nccl=nccl))
        waits = list(who_waits(workers)) if job.stands_still_s(now) else []
        still_s = job.stands_still_s(now)
        live.put(
            "trouble",
            render(
                "job_trouble.html",
                job=job,
                waits=waits,
                still_s=still_s,
                now=now,
                slow=job.progress.stragglers,
                unwell=[*gpus_unwell(workers), *map(refused_in_words, job.progress.refused_gpus)],
            ),
        )
        self._put_grid(job, workers)
        live.put("plots", render("plots.html", plots=plots(job.series, generations)))
        spent = shares(job.progress.seconds_by_cause)
        live.put("goodput", render("goodput.html", shares=spent, nothing="The scheduler has not said so."))
        shown = bars(generations, now if job.line.state != "ended" else _last(job, now))
        live.put("timeline", render("timeline.html", bars=shown, generations=generations[::-1], now=now))
        said = [event for event in job.events if event.kind == "decided"]
        live.put("said", _events(said, "Nothing yet."))
        single = [e for e in job.events if e.kind not in GENERATIONAL and e.kind != "decided"]
        live.put("trail", _events(single, "Nothing yet."))
        live.put("certificates", self._certificates(workers, now))
        self._put_logs()

    def html(self, **values: Any) -> str:
        """Returns the whole page."""
        job = self.known.jobs.get(self.job_id)
        return render("page_job.html", job_id=self.job_id, job=job, live=_shown(self.live), **values)

    def worker(self, node_id: str) -> str:
        """Renders one worker in full; returns an empty text if the job has no such worker."""
        job = self.known.jobs.get(self.job_id)
        found = [w for w in job.workers() if w.seat.node_id == node_id] if job is not None else []
        return render("worker.html", worker=found[0], job_id=self.job_id) if found else ""

    def _put_grid(self, job: ObservedJob, workers: Sequence[ObservedWorker]) -> None:
        """Renders the cells; renders the grid around them only if a worker has come, gone or moved."""
        dense = len(workers) > CARDS_AT_MOST
        template = TEMPLATES.get_template("cell_small.html" if dense else "cell.html")
        cells = [_cell(worker, template, self.job_id, dense=dense) for worker in workers]
        places = tuple((w.seat.node_id, w.seat.rank, w.seat.host_id) for w in workers)
        grid = (*places, *job.roster.missing)
        self.live.put_cells(cells, whole=grid != self._grid)
        if grid != self._grid or self.live.number == 1:
            self._grid = grid
            hosts = _by_host(job, workers, cells)
            self.live.put("grid", render("grid.html", hosts=hosts, dense=dense, job=job))

    def _certificates(self, workers: Sequence[ObservedWorker], now: float) -> str:
        ends: dict[tuple[float, str], list[int]] = {}
        for worker in workers:
            if worker.seat.certificate_ends:
                key = (worker.seat.certificate_ends, worker.seat.fingerprint)
                ends.setdefault(key, []).append(worker.seat.rank)
        rows: list[tuple[str, str, float]] = []
        rows += [
            (f"scheduler: {each.what.replace('_', ' ')}", "", each.not_after - now)
            for each in self.known.overview.validities
        ]
        if self.own_ends is not None:
            rows.append(("this page's operator", "", self.own_ends - now))
        for (end, fingerprint), held in sorted(ends.items())[:EVENTS_SHOWN]:
            ranked = [rank for rank in held if rank >= 0]
            whose = f"{len(held)} worker{'' if len(held) == 1 else 's'}"
            if len(ends) > 1 and len(ranked) == 1:
                whose = f"rank {ranked[0]}"
            rows.append((whose, fingerprint[:23], end - now))
        return render("certificates.html", rows=rows)

    def _put_logs(self) -> None:
        names = tuple(log.name for log in self.logs)
        if names != self._logs:
            self._logs = names
            self.live.put("logs", render("logs.html", logs=self.logs, origin=self.origin))
        for index, log in enumerate(self.logs):
            self.live.put(f"log-{index}", str(Markup.escape(tail(log, LOG_LINES))))


def gpus_unwell(workers: Iterable[ObservedWorker]) -> list[str]:
    """Returns a sentence for each worker whose GPU is not healthy, those with failing GPUs first."""
    found = [(w.seat, w.gpu) for w in workers if w.gpu is not None and w.gpu.state != WELL]
    return [
        gpu_warning(seat.rank, seat.node_id, seat.host_name, seat.device, gpu)
        for seat, gpu in sorted(found, key=lambda each: each[1].state != ILL)
    ]


def _shown(live: Live) -> dict[str, Markup]:
    """Returns the parts as HTML for the page that contains them."""
    return {name: Markup(html) for name, html in live.parts().items()}


def _events(events: Iterable[pb.Happening], nothing: str) -> str:
    """Renders the latest events, the newest first; if there are none, returns ``nothing``."""
    return render("events.html", events=list(events)[: -EVENTS_SHOWN - 1 : -1], nothing=nothing)


def _last(job: ObservedJob, now: float) -> float:
    return job.events[-1].time if job.events else now


def _cell(worker: ObservedWorker, template: jinja2.Template, job_id: str, *, dense: bool) -> Cell:
    seat = worker.seat
    state = STATES.get(seat.state, seat.state)
    kinds = ["cell", f"s-{seat.state}"]
    if worker.straggler is not None:
        kinds.append("straggles")
    if worker.gpu is not None and worker.gpu.state != WELL:
        kinds.append("unwell")
    if worker.silent_s >= SILENT_S:
        kinds.append("silent")
    label = ""
    if dense:  # For screen readers, only values that do not change with every step.
        name = f"rank {seat.rank}" if seat.rank >= 0 else "no rank"
        slow = ", holds the others up" if "straggles" in kinds else ""
        quiet = f", not heard for {worker.silent_s:.0f} s" if "silent" in kinds else ""
        ill = f", GPU {worker.gpu.state}" if worker.gpu is not None and "unwell" in kinds else ""
        label = f"{name}, node {seat.node_id}: {state}{slow}{ill}{quiet}"
    html = template.render(worker=worker, seat=seat, state=state, job_id=job_id)
    return Cell(cell_id(seat.node_id), " ".join(kinds), label, html.strip())


@dataclass
class _HostRow:
    name: str
    address: str
    topology: str
    cells: list[tuple[Cell, pb.Seat]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def _by_host(job: ObservedJob, workers: Sequence[ObservedWorker], cells: Sequence[Cell]) -> list[_HostRow]:
    """Groups the cells by host, ordered by device; a missing worker stays at its last host, if known."""
    hosts: dict[str, _HostRow] = {}

    def of(seat: pb.Seat) -> _HostRow:
        return hosts.setdefault(seat.host_id, _HostRow(seat.host_name, seat.address, seat.topology))

    for worker, cell in zip(workers, cells, strict=True):
        of(worker.seat).cells.append((cell, worker.seat))
    for host in hosts.values():
        host.cells.sort(key=lambda pair: (pair[1].rank < 0, pair[1].local_rank, pair[1].device.index))
    nowhere = _HostRow("", "", "")
    for sentence in job.roster.missing:
        home = job.homes.get(sentence.removeprefix("node "))
        (of(home) if home is not None else nowhere).missing.append(sentence)
    return [*hosts.values(), *([nowhere] if nowhere.missing else [])]

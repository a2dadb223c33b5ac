"""The jobs of one scheduler: opened, refused, started over, taken up from a journal."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from muster.scheduler.access import Caller
from muster.scheduler.config import load_settings
from muster.scheduler.core import events, records
from muster.scheduler.core.events import Decision
from muster.scheduler.core.ledger import Ledger
from muster.scheduler.errors import JournalUnavailableError, LimitError, NoSpaceError, NotFoundError
from muster.scheduler.jobs import jobs as jobs_module
from muster.scheduler.jobs.driver import Note
from muster.scheduler.jobs.incidents import IncidentFiles
from muster.scheduler.jobs.jobs import Jobs, UnknownJobError
from muster.scheduler.jobs.journal import InThread
from muster.scheduler.jobs.stream import OutgoingStream
from tests.scheduler.fakes import FakeClock, FakeJob, candidate, placed
from tests.waiting import go, until


class MemoryStorage:
    """A journal in memory."""

    def __init__(self, **records: list[records.Record]) -> None:
        self.records = records
        self.noted: dict[str, str] = {}
        self.closed = False
        self.error: Exception | None = None

    def append(self, job_id: str, records: Sequence[records.Record]) -> None:
        self._check()
        self.records.setdefault(job_id, []).extend(records)

    def load(self, job_id: str) -> Sequence[records.Record]:
        self._check()
        return self.records[job_id]

    def job_ids(self) -> Sequence[str]:
        return list(self.records)

    def forget(self, job_id: str) -> None:
        self._check()
        del self.records[job_id]

    def notes(self) -> Mapping[str, str]:
        return self.noted

    def note(self, name: str, text: str) -> None:
        self.noted[name] = text

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed = True


class Rig:
    """Jobs with scripted machines; remembers what they were made of."""

    def __init__(
        self,
        storage: MemoryStorage | None = None,
        *,
        serve: bool = False,
        workers: str = "2",
        incidents: IncidentFiles | None = None,
    ) -> None:
        self.made: list[tuple[str, int]] = []
        self.recovered: list[tuple[str, int]] = []
        self.notes: list[Note] = []
        self.recover_error: Exception | None = None
        self.jobs = Jobs(
            load_settings({"MS_WORKER_NUM": workers}, serve=serve),
            FakeClock(),
            self.notes.append,
            new_machine=self._new,
            recover_machine=self._recover,
            storage=InThread(lambda: storage) if storage is not None else None,
            incidents=incidents,
        )

    def _new(self, job_id: str, settings: events.CoreSettings) -> FakeJob:
        self.made.append((job_id, settings.worker_num))
        return FakeJob(_script)

    def _recover(
        self, job_id: str, settings: events.CoreSettings, records: Sequence[records.Record], now: float
    ) -> FakeJob:
        if self.recover_error is not None:
            raise self.recover_error
        self.recovered.append((job_id, len(records)))
        return FakeJob(_script)


def _script(event: events.Event) -> Decision:
    if isinstance(event, events.StacksRequested):
        return Decision(bundles=(events.Bundle(0, "Rank 1 does not come.", 1, ()),))
    if isinstance(event, events.LeftCleanly):
        return Decision((records.JobEnded(event.finished, event.reason),))
    return Decision((records.Admitted(candidate()),))


def test_the_own_job_is_there_from_the_start_and_others_are_refused() -> None:
    async def test() -> None:
        rig = Rig()
        await rig.jobs.open()
        assert rig.made == [("default", 2)]
        assert (await rig.jobs.for_join("default", fresh=True)) is rig.jobs.get("")
        with pytest.raises(UnknownJobError, match="MS_JOB_ID"):
            await rig.jobs.for_join("other", fresh=True)
        with pytest.raises(NotFoundError, match="'other'"):
            rig.jobs.get("other")
        await rig.jobs.close()

    go(test())


def test_serving_opens_also_its_own_job_with_the_first_worker() -> None:
    async def test() -> None:
        rig = Rig(serve=True)
        await rig.jobs.open()
        assert rig.made == []  # what idles must not run into MS_TOPO_TIMEOUT
        with pytest.raises(NotFoundError, match="'default' on this scheduler; its first worker opens it"):
            rig.jobs.get("")
        await rig.jobs.for_join("default", fresh=True)
        assert rig.made == [("default", 2)]
        await rig.jobs.close()

    go(test())


def test_serving_opens_jobs_of_any_size() -> None:
    async def test() -> None:
        rig = Rig(serve=True, workers="")
        await rig.jobs.open()
        assert rig.made == []
        await asyncio.gather(*(rig.jobs.for_join("a", fresh=True) for _ in range(3)))
        await rig.jobs.for_join("b", fresh=True)
        assert rig.made == [("a", 0), ("b", 0)]
        await rig.jobs.close()

    go(test())


def test_an_ended_job_begins_again_for_a_fresh_worker_only() -> None:
    async def test() -> None:
        storage = MemoryStorage()
        rig = Rig(storage, serve=True, workers="")
        await rig.jobs.open()
        first = await rig.jobs.for_join("a", fresh=True)
        await first.submit(events.LeftCleanly(1, 1, True, "done"))
        assert storage.records["a"] == [records.JobEnded(True, "done")]
        assert await rig.jobs.for_join("a", fresh=False) is first
        first.sessions[9] = OutgoingStream(9, Caller("x"))
        assert await rig.jobs.for_join("a", fresh=True) is first  # a goodbye is still being sent
        first.sessions.clear()
        second = await rig.jobs.for_join("a", fresh=True)
        assert second is not first
        assert "a" not in storage.records
        second.admit(OutgoingStream(1, Caller("x")))
        await second.submit(events.Joined(1, candidate()))
        assert storage.records["a"] == [records.Admitted(candidate())]
        await rig.jobs.close()
        assert storage.closed

    go(test())


def test_jobs_are_bounded_and_ended_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "MAX_JOBS", 2)

    async def test() -> None:
        rig = Rig(serve=True, workers="")
        await rig.jobs.open()
        first = await rig.jobs.for_join("a", fresh=True)
        await rig.jobs.for_join("b", fresh=True)
        with pytest.raises(LimitError, match="2 jobs"):
            await rig.jobs.for_join("c", fresh=True)
        await first.submit(events.LeftCleanly(1, 1, True, ""))
        await rig.jobs.for_join("c", fresh=True)
        assert [driver.job_id for driver in rig.jobs.all()] == ["b", "c"]
        await rig.jobs.close()

    go(test())


def test_the_end_of_the_own_job_is_told() -> None:
    async def test() -> None:
        rig = Rig()
        await rig.jobs.open()
        await rig.jobs.get("default").submit(events.LeftCleanly(1, 1, False, "gave up"))
        assert await rig.jobs.own_job_over == records.JobEnded(False, "gave up")
        await rig.jobs.close()

    go(test())


def test_jobs_are_taken_up_from_the_journal() -> None:
    async def test() -> None:
        storage = MemoryStorage(
            default=[records.JobOpened("default", 2, 2)], other=[records.JobOpened("other", 3, 3)]
        )
        rig = Rig(storage, serve=True)
        await rig.jobs.open()
        assert rig.recovered == [("default", 1), ("other", 1)]
        assert rig.made == []
        assert [note.kind for note in rig.notes] == ["recovered", "recovered"]
        await rig.jobs.close()

    go(test())


@pytest.mark.parametrize("over", ["", "too few are left"])
@pytest.mark.parametrize("is_compacted", [False, True])
def test_the_newest_generation_is_known_again(is_compacted: bool, over: str) -> None:
    formed = records.GenerationFormed(3, (placed(0, "node-a"), placed(1, "node-b")), -1, (), "all are in")
    journaled: list[records.Record] = [
        records.JobOpened("default", 2, 2),
        records.Admitted(candidate("node-a")),
        records.Admitted(candidate("node-b")),
        formed,
        records.GroupEstablished(3),
    ]
    ledger = Ledger()
    for record in journaled:
        ledger.apply(record)
    kept: list[records.Record] = [ledger.snapshot()] if is_compacted else journaled
    ends = [records.GenerationEnded(3, over)] if over else []

    async def test() -> None:
        rig = Rig(MemoryStorage(default=[*kept, *ends]))
        await rig.jobs.open()
        driver = rig.jobs.get("")
        assert (driver.formed, driver.formed_here, driver.generation_over) == (formed, False, over)
        await rig.jobs.close()

    go(test())


def test_an_ended_job_in_the_journal_is_a_new_run() -> None:
    async def test() -> None:
        storage = MemoryStorage(default=[records.JobOpened("default", 2, 2), records.JobEnded(True, "done")])
        rig = Rig(storage)
        await rig.jobs.open()
        assert (rig.made, rig.recovered) == ([("default", 2)], [])
        assert storage.records == {}
        await rig.jobs.close()

    go(test())


def test_records_that_do_not_fit_end_the_start_in_words() -> None:
    async def test() -> None:
        rig = Rig(MemoryStorage(default=[records.JobOpened("default", 4, 4)]))
        rig.recover_error = ValueError("the records say MS_WORKER_NUM=4")
        with pytest.raises(JournalUnavailableError, match="MS_WORKER_NUM=4"):
            await rig.jobs.open()
        await rig.jobs.close()

    go(test())


def test_a_journal_that_cannot_be_opened_ends_the_start_in_words() -> None:
    async def test() -> None:
        def broken() -> MemoryStorage:
            raise OSError("no such disk")

        rig = Rig()
        rig.jobs = Jobs(
            load_settings({"MS_WORKER_NUM": "2"}),
            FakeClock(),
            rig.notes.append,
            new_machine=rig._new,
            recover_machine=rig._recover,
            storage=InThread(broken),
        )
        with pytest.raises(JournalUnavailableError, match="no such disk"):
            await rig.jobs.open()
        await rig.jobs.close()

    go(test())


def test_a_journal_that_fails_later_ends_the_own_job() -> None:
    async def test() -> None:
        storage = MemoryStorage()
        rig = Rig(storage)
        await rig.jobs.open()
        storage.error = OSError("disk full.")
        rig.jobs.get("default").admit(OutgoingStream(1, Caller("x")))
        with pytest.raises(Exception, match="stopping"):
            await rig.jobs.get("default").submit(events.Joined(1, candidate()))
        with pytest.raises(JournalUnavailableError, match="disk full"):
            await rig.jobs.own_job_over
        await rig.jobs.close()

    go(test())


@pytest.mark.parametrize("serve", [False, True], ids=["one job", "--serve"])
def test_a_job_waits_for_space_and_goes_on(serve: bool) -> None:
    async def test() -> None:
        storage = MemoryStorage()
        rig = Rig(storage, serve=serve)
        await rig.jobs.open()
        storage.error = NoSpaceError("The disk is full.")
        driver = await rig.jobs.for_join("default", fresh=True)
        driver.admit(OutgoingStream(1, Caller("x")))
        joining = asyncio.ensure_future(driver.submit(events.Joined(1, candidate())))
        await until(lambda: rig.jobs.unwritable)
        assert rig.jobs.unwritable == "The disk is full."
        assert storage.records == {}
        storage.error = None
        await joining
        assert rig.jobs.unwritable == ""
        assert storage.records == {"default": [records.Admitted(candidate())]}
        assert not rig.jobs.own_job_over.done() and not rig.jobs.journal_lost.done()
        await rig.jobs.close()

    go(test())


def test_without_space_the_start_waits_and_can_be_given_up() -> None:
    async def test() -> None:
        storage = MemoryStorage(default=[records.JobOpened("default", 2, 2)])
        storage.error = NoSpaceError("The disk is full.")
        rig = Rig(storage)
        opening = asyncio.ensure_future(rig.jobs.open())
        await until(lambda: rig.jobs.unwritable)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert rig.jobs.unwritable == ""
        storage.error = None
        await rig.jobs.open()
        assert rig.recovered == [("default", 1)]
        await rig.jobs.close()

    go(test())


def test_a_job_begins_again_only_once_the_old_one_is_gone_from_the_journal() -> None:
    async def test() -> None:
        storage = MemoryStorage()
        rig = Rig(storage, serve=True)
        await rig.jobs.open()
        old = await rig.jobs.for_join("red", fresh=True)
        await old.submit(events.LeftCleanly(1, 0, True, "done"))
        storage.error = NoSpaceError("The disk is full.")
        joins = [asyncio.ensure_future(rig.jobs.for_join("red", fresh=True)) for _ in range(2)]
        await until(lambda: rig.jobs.unwritable)
        assert not any(each.done() for each in joins)
        storage.error = None
        one, other = [await each for each in joins]
        assert one is other is not old
        assert storage.records == {}
        await rig.jobs.close()

    go(test())


def test_who_waits_for_space_and_goes_leaves_no_old_run_in_the_journal() -> None:
    """A new run's records behind the end of the old one were taken for an ended job, and thrown away."""

    async def test() -> None:
        storage = MemoryStorage()
        rig = Rig(storage, serve=True)
        await rig.jobs.open()
        old = await rig.jobs.for_join("red", fresh=True)
        await old.submit(events.LeftCleanly(1, 0, True, "done"))
        storage.error = NoSpaceError("The disk is full.")
        joining = asyncio.ensure_future(rig.jobs.for_join("red", fresh=True))
        await until(lambda: rig.jobs.unwritable)
        joining.cancel()  # as gRPC does when the stream is gone
        with pytest.raises(asyncio.CancelledError):
            await joining
        storage.error = None
        new = await rig.jobs.for_join("red", fresh=True)
        new.admit(OutgoingStream(1, Caller("x")))
        await new.submit(events.Joined(1, candidate()))
        assert storage.records == {"red": [records.Admitted(candidate())]}
        await rig.jobs.close()

    go(test())


def test_an_old_run_that_cannot_be_forgotten_is_a_journal_that_is_lost() -> None:
    async def test() -> None:
        storage = MemoryStorage()
        rig = Rig(storage, serve=True)
        await rig.jobs.open()
        old = await rig.jobs.for_join("red", fresh=True)
        await old.submit(events.LeftCleanly(1, 0, True, "done"))
        storage.error = PermissionError("not allowed.")
        with pytest.raises(JournalUnavailableError, match="not allowed"):
            await rig.jobs.for_join("red", fresh=True)
        assert rig.jobs.get("red") is old  # nothing begins behind its records
        assert "not allowed" in str(await rig.jobs.journal_lost)
        await rig.jobs.close()

    go(test())


@pytest.mark.parametrize("serve", [False, True], ids=["one job", "--serve"])
def test_a_journal_that_is_lost_for_another_reason_is_told(serve: bool) -> None:
    async def test() -> None:
        storage = MemoryStorage()
        rig = Rig(storage, serve=serve)
        await rig.jobs.open()
        storage.error = PermissionError("not allowed.")
        driver = await rig.jobs.for_join("default", fresh=True)
        driver.admit(OutgoingStream(1, Caller("x")))
        with pytest.raises(Exception, match="stopping"):
            await driver.submit(events.Joined(1, candidate()))
        assert "not allowed" in str(await rig.jobs.journal_lost)
        assert rig.jobs.unwritable == ""
        await rig.jobs.close()

    go(test())


def test_a_job_that_ended_while_this_scheduler_stood_by_is_over() -> None:
    async def test() -> None:
        ended = records.JobEnded(True, "all done")
        storage = MemoryStorage(default=[records.JobOpened("default", 2, 2), ended])
        jobs = Jobs(
            load_settings({"MS_WORKER_NUM": "2"}),
            FakeClock(),
            lambda note: None,
            new_machine=lambda job_id, settings: FakeJob(_script),
            recover_machine=lambda *arguments: FakeJob(_script),
            storage=InThread(lambda: storage),
            stood_by=lambda: True,
        )
        await jobs.open()
        assert jobs.own_job_over.result() == ended
        assert jobs.all() == []
        assert storage.records["default"]  # the next one that stood by sees it, too
        await jobs.close()

    go(test())


@pytest.mark.parametrize("kept", ["yes", "nowhere", "not a directory"])
def test_where_the_evidence_of_a_hang_lies_is_noted_and_shown(tmp_path: Path, kept: str) -> None:
    (tmp_path / "file").touch()
    directory = tmp_path / ("file" if kept == "not a directory" else "incidents")

    async def test() -> None:
        rig = Rig(incidents=IncidentFiles(directory) if kept != "nowhere" else None)
        await rig.jobs.open()
        driver = rig.jobs.get("")
        await driver.submit(events.StacksRequested(1))
        await until(lambda: driver.evidence)
        (noted,) = [note.text for note in rig.notes if note.kind == "evidence"]
        assert noted == driver.evidence == driver.view().evidence
        await rig.jobs.close()
        if kept == "yes":
            (written,) = directory.iterdir()
            assert noted.endswith(f"Z: {written}")
            assert "Rank 1 does not come." in (written / "incident.txt").read_text()
        else:
            assert "MS_INCIDENT_DIR" in noted

    go(test())

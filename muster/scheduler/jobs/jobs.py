"""The jobs of one scheduler: opens, recovers and forgets them, and keeps a driver for each."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
from collections.abc import Awaitable, Callable, Sequence

from muster.scheduler.config import SchedulerSettings
from muster.scheduler.core import events, records
from muster.scheduler.core.ledger import Ledger
from muster.scheduler.errors import (
    DeposedError,
    JournalUnavailableError,
    LimitError,
    NotFoundError,
    RequestError,
    SchedulerError,
)
from muster.scheduler.jobs.driver import Clock, JobDriver, JobMachine, Note
from muster.scheduler.jobs.incidents import IncidentFiles
from muster.scheduler.jobs.storage import Storage, WaitingStorage

MAX_JOBS = 256

LOG = logging.getLogger("scheduler")


class UnknownJobError(RequestError):
    """This scheduler does not serve that job."""

    grpc_code = "FAILED_PRECONDITION"
    refusal = "unknown_job"


class Jobs:
    """Keeps one driver per job.

    Args:
        settings: the scheduler's settings.
        clock: the event loop.
        note: called with each event that is worth a log line.
        new_machine: makes the machine of a new job.
        recover_machine: makes a job's machine from its records.
        storage: the journal; None without recovery.
        incidents: stores evidence of hangs; None to keep none.
        stood_by: returns whether this process was a standby of another scheduler. If so, a job that ended
            under that scheduler is not started again.
        time_of_day: returns the time in seconds since 1970, which planned drains of recovered jobs need. If
            None, these drains wait.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        clock: Clock,
        note: Callable[[Note], None],
        *,
        new_machine: Callable[[str, events.CoreSettings], JobMachine],
        recover_machine: Callable[[str, events.CoreSettings, Sequence[records.Record], float], JobMachine],
        storage: Storage | None = None,
        incidents: IncidentFiles | None = None,
        stood_by: Callable[[], bool] = lambda: False,
        time_of_day: Callable[[], float] | None = None,
    ) -> None:
        self._time_of_day = time_of_day
        self._settings = settings
        self._stood_by = stood_by
        self._incidents = incidents
        self._writing: set[asyncio.Task[None]] = set()
        self._clock = clock
        self._note = note
        self._new_machine = new_machine
        self._recover_machine = recover_machine
        self._storage = WaitingStorage(storage, clock.time) if storage is not None else None
        self._opening = asyncio.Lock()
        self._drivers: dict[str, JobDriver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._followers: list[Callable[[JobDriver], None]] = []
        self.own_job_over: asyncio.Future[records.JobEnded] = asyncio.get_running_loop().create_future()
        self.journal_lost: asyncio.Future[SchedulerError] = asyncio.get_running_loop().create_future()

    @property
    def unwritable(self) -> str:
        """Why the journal cannot be written at present, as a sentence.

        Empty if nothing is known to prevent it.
        """
        return self._storage.unwritable if self._storage is not None else ""

    async def open(self) -> None:
        """Opens the journal, recovers its jobs, and opens the scheduler's own job.

        A scheduler that serves several jobs does not open its own one here. Each of its jobs begins with its
        first worker, so that an idle daemon does not run into MS_TOPO_TIMEOUT.
        """
        if self._storage is not None:
            await self._recover_all(self._storage)
        begun = self._settings.job_id in self._drivers or self.own_job_over.done()
        if not self._settings.serve and not begun:
            self._start(
                self._settings.job_id, self._new_machine(self._settings.job_id, self._settings.core())
            )

    async def for_join(self, job_id: str, *, fresh: bool) -> JobDriver:
        """Finds the job that a worker names, and opens it if that is allowed.

        Args:
            job_id: the job.
            fresh: whether the worker holds no generation yet, so that a job that has ended may start again.

        Raises:
            UnknownJobError: this scheduler serves only one job, which is not this one.
            LimitError: the scheduler already has the largest allowed number of jobs.
        """
        driver = self._drivers.get(job_id)
        if driver is not None and not self._is_to_begin_again(driver, fresh):
            return driver
        async with self._opening:  # An ended job must be gone from the journal before it starts again.
            return await self._for_join(job_id, fresh)

    def _is_to_begin_again(self, driver: JobDriver, fresh: bool) -> bool:
        return bool(driver.ended and fresh and self._settings.serve and not driver.sessions)

    async def _for_join(self, job_id: str, fresh: bool) -> JobDriver:
        driver = self._drivers.get(job_id)
        if driver is not None and not self._is_to_begin_again(driver, fresh):
            return driver  # Another stream has opened it by now.
        if driver is not None:
            await self._forget(job_id)
        if job_id != self._settings.job_id and not self._settings.serve:
            raise UnknownJobError(
                f"This scheduler serves the job {self._settings.job_id!r} alone, not {job_id!r}.",
                remedy="Set the same MS_JOB_ID everywhere, or start the scheduler with --serve.",
            )
        await self._make_room()
        settings = self._settings.core(own_job=job_id == self._settings.job_id)
        return self._start(job_id, self._new_machine(job_id, settings))

    def get(self, job_id: str) -> JobDriver:
        """Finds a job for status or drain.

        Raises:
            NotFoundError: there is no such job.
        """
        driver = self._drivers.get(job_id or self._settings.job_id)
        if driver is None:
            named = job_id or self._settings.job_id
            why = "; its first worker opens it" if self._settings.serve else ""
            raise NotFoundError(f"There is no job {named!r} on this scheduler{why}.")
        return driver

    def all(self) -> list[JobDriver]:
        """All jobs."""
        return list(self._drivers.values())

    def follow(self, follower: Callable[[JobDriver], None]) -> None:
        """Calls ``follower`` with each existing job, and with each that is opened from now on."""
        self._followers.append(follower)
        for driver in self._drivers.values():
            follower(driver)

    async def close(self) -> None:
        """Stops all jobs and closes the journal. Workers are told that the scheduler is stopping."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        storage, self._storage = self._storage, None
        if storage is not None:
            await storage.close()

    # ------------------------------------------------------------ inside

    def _start(self, job_id: str, machine: JobMachine) -> JobDriver:
        driver = JobDriver(
            job_id,
            machine,
            self._clock,
            make_durable=lambda records: self._make_durable(job_id, records),
            note=self._note,
            unwritable=lambda: self.unwritable,
            on_ended=self._ended,
            keep=self._keep,
        )
        self._drivers[job_id] = driver
        for follower in self._followers:
            follower(driver)
        task = asyncio.ensure_future(driver.run())
        task.add_done_callback(lambda done: self._stopped(driver, done))
        self._tasks[job_id] = task
        return driver

    async def _recover_all(self, storage: WaitingStorage) -> None:
        try:
            jobs = await storage.load()
        except DeposedError:
            raise
        except Exception as error:  # Without a readable journal, no decision could be kept.
            raise JournalUnavailableError(str(error)) from error
        for job_id, journaled in jobs.items():
            await self._recover(storage, job_id, journaled)

    async def _recover(
        self, storage: WaitingStorage, job_id: str, journaled: Sequence[records.Record]
    ) -> None:
        own = job_id == self._settings.job_id
        if not own and not self._settings.serve:
            LOG.warning("the journal also holds job %s, which this scheduler does not serve", job_id)
            return
        ended = next((record for record in journaled if isinstance(record, records.JobEnded)), None)
        if ended is not None and own and not self._settings.serve and self._stood_by():
            self.own_job_over.set_result(ended)
            return
        if ended is not None:  # A scheduler that is started after its job has ended begins a new run.
            await storage.forget(job_id)
            return
        settings = self._settings.core(own_job=own)
        try:
            machine = self._recover_machine(job_id, settings, journaled, self._clock.time())
        except ValueError as error:
            raise JournalUnavailableError(
                f"The journal does not fit: {error}.",
                remedy="Set the variables as they were, or move MS_RECOVERY_PATH away to start over.",
            ) from error
        driver = self._start(job_id, machine)
        ledger = Ledger()
        for record in journaled:
            ledger.apply(record)
        driver.formed, driver.generation_over = ledger.formed, ledger.suspended or ""
        if self._time_of_day is not None:
            driver.post(events.TimeOfDay(self._time_of_day()))
        generation = driver.view().generation
        self._note(Note("recovered", job_id, f"{len(journaled)} records, generation {generation}"))

    async def _make_durable(self, job_id: str, records: Sequence[records.Record]) -> None:
        if self._storage is not None:
            await self._written(job_id, self._storage.append(job_id, records))

    async def _written(self, job_id: str, write: Awaitable[None]) -> None:
        try:
            await write
        except DeposedError:
            raise
        except Exception as error:
            raise JournalUnavailableError(
                f"{error} Job {job_id} cannot be kept safe.",
                remedy="Start the scheduler again once that is repaired; training goes on until then.",
            ) from error

    async def _make_room(self) -> None:
        if len(self._drivers) < MAX_JOBS:
            return
        for job_id, driver in list(self._drivers.items()):
            if driver.ended and not driver.sessions and job_id != self._settings.job_id:
                await self._forget(job_id)
                return
        raise LimitError(f"The scheduler already holds {MAX_JOBS} jobs.", remedy="End one, or start another.")

    async def _forget(self, job_id: str) -> None:
        """Forgets a job that has ended, first in the journal.

        If the journal has no space, this waits, and its caller may give up before it succeeds. The job is
        then still known, so that the next caller tries again. A new run must not be journaled after the end
        of the old one, because a restarted scheduler would regard it as ended.
        """
        if self._storage is not None:
            try:
                await self._written(job_id, self._storage.forget(job_id))
            except (DeposedError, JournalUnavailableError) as error:
                self._lose_journal(error)
                raise
        self._drivers.pop(job_id)
        self._tasks.pop(job_id).cancel()

    def _keep(self, driver: JobDriver, bundle: events.Bundle) -> None:
        """Writes the evidence of a hang in another thread, so that a slow disk does not block the loop."""
        task = asyncio.ensure_future(self._write_evidence(driver, bundle))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write_evidence(self, driver: JobDriver, bundle: events.Bundle) -> None:
        when, files = dt.datetime.now(dt.UTC), self._incidents
        what = f"Evidence of the hang at {when:%Y-%m-%dT%H:%M:%SZ}"
        if files is None:
            driver.evidence = f"{what} is not kept: set MS_INCIDENT_DIR to a directory."
        else:
            loop = asyncio.get_running_loop()
            try:
                path = await loop.run_in_executor(None, files.write, driver.job_id, bundle, when)
                driver.evidence = f"{what}: {path}"
            except OSError as error:
                driver.evidence = f"{what} cannot be written: {error.strerror or error} (MS_INCIDENT_DIR)."
        driver.write("evidence", driver.evidence, incident=bundle.generation)

    def _ended(self, driver: JobDriver) -> None:
        if driver.job_id == self._settings.job_id and driver.ended and not self.own_job_over.done():
            self.own_job_over.set_result(driver.ended)

    def _lose_journal(self, error: SchedulerError) -> None:
        if not self.journal_lost.done():
            self.journal_lost.set_result(error)  # All jobs share the journal.

    def _stopped(self, driver: JobDriver, task: asyncio.Task[None]) -> None:
        """Handles the end of a driver's task: if it was an error, logs it and ends the job."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        text = str(error) if isinstance(error, SchedulerError) else f"fault in the scheduler: {error!r}"
        LOG.error("job %s stopped: %s", driver.job_id, text, exc_info=error)
        if isinstance(error, JournalUnavailableError | DeposedError):
            self._lose_journal(error)
        if driver.job_id == self._settings.job_id and not self.own_job_over.done():
            fault = (
                error if isinstance(error, SchedulerError) else SchedulerError(f"Job {driver.job_id}: {text}")
            )
            self.own_job_over.set_exception(fault)
            self.own_job_over.exception()  # With several jobs, nothing else waits for this task.

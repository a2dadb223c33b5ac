"""The jobs of one scheduler: opens, recovers, forgets them and runs a task for each."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

from muster.scheduler.audit.logs import LOG
from muster.scheduler.config import SchedulerSettings
from muster.scheduler.core import messages as v
from muster.scheduler.core import records as r
from muster.scheduler.errors import (
    JournalUnavailableError,
    LimitError,
    NotFoundError,
    RequestError,
    SchedulerError,
)
from muster.scheduler.jobs.driver import Clock, JobDriver, Machine, Note

MAX_JOBS = 256
P = ParamSpec("P")
T = TypeVar("T")


class Storage(Protocol):
    """What this module needs of :class:`muster.scheduler.jobs.journal.Journal`."""

    def append(self, job_id: str, records: Sequence[r.Record]) -> None:
        """Makes records durable, all or none."""

    def load(self, job_id: str) -> Sequence[r.Record]:
        """All records of a job, oldest first."""

    def job_ids(self) -> Sequence[str]:
        """The jobs that have records."""

    def forget(self, job_id: str) -> None:
        """Deletes a job's records."""

    def close(self) -> None:
        """Closes the files."""


class UnknownJobError(RequestError):
    """This scheduler does not hold that job."""

    grpc_code = "FAILED_PRECONDITION"
    refusal = "unknown_job"


class Jobs:
    """Keeps one driver per job.

    Args:
        settings: the scheduler's settings.
        clock: the event loop.
        note: told about everything worth a line.
        new_machine: makes a fresh job's machine.
        recover_machine: makes a job's machine from its records.
        storage: the journal, or None without recovery. Used in one thread only, which is opened here.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        clock: Clock,
        note: Callable[[Note], None],
        *,
        new_machine: Callable[[str, v.Settings], Machine],
        recover_machine: Callable[[str, v.Settings, Sequence[r.Record], float], Machine],
        open_storage: Callable[[], Storage] | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._note = note
        self._new_machine = new_machine
        self._recover_machine = recover_machine
        self._open_storage = open_storage
        self._storage: Storage | None = None
        self._thread = ThreadPoolExecutor(1, "journal") if open_storage else None
        self._drivers: dict[str, JobDriver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.own_job_over: asyncio.Future[r.JobEnded] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Opens the journal and takes up the jobs that it holds; opens the own job, unless it serves several.

        Then each begins with its first worker: a daemon that idles must not run into MS_TOPO_TIMEOUT.
        """
        if self._open_storage is not None:
            await self._recover_all(self._open_storage)
        if not self._settings.serve and self._settings.job_id not in self._drivers:
            self._start(
                self._settings.job_id, self._new_machine(self._settings.job_id, self._settings.core())
            )

    async def for_join(self, job_id: str, *, fresh: bool) -> JobDriver:
        """Finds the job that a worker names, and opens it where that is allowed.

        Args:
            job_id: the job.
            fresh: the worker holds no place from before, so an ended job may begin anew.

        Raises:
            UnknownJobError: this scheduler serves one other job.
            LimitError: it holds as many jobs as it can.
        """
        driver = self._drivers.get(job_id)
        if driver is not None and driver.ended and fresh and self._settings.serve and not driver.sessions:
            await self._forget(job_id)
            driver = None
        if driver is not None:
            return driver
        if job_id != self._settings.job_id and not self._settings.serve:
            raise UnknownJobError(
                f"This scheduler serves the job {self._settings.job_id!r} alone, not {job_id!r}.",
                remedy="Set the same MS_JOB_ID everywhere, or start the scheduler with --serve.",
            )
        await self._make_room()
        if job_id in self._drivers:  # another stream may have opened it meanwhile
            return self._drivers[job_id]
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

    async def close(self) -> None:
        """Stops all jobs; their workers are told that the scheduler is stopping."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        thread, self._thread = self._thread, None
        if thread is not None:
            if self._storage is not None:
                thread.submit(self._storage.close)
            thread.shutdown(wait=True)

    # ------------------------------------------------------------ inside

    def _start(self, job_id: str, machine: Machine) -> JobDriver:
        driver = JobDriver(
            job_id,
            machine,
            self._clock,
            make_durable=lambda records: self._make_durable(job_id, records),
            note=self._note,
            on_ended=self._ended,
        )
        self._drivers[job_id] = driver
        task = asyncio.ensure_future(driver.run())
        task.add_done_callback(lambda done: self._stopped(driver, done))
        self._tasks[job_id] = task
        return driver

    async def _recover_all(self, open_storage: Callable[[], Storage]) -> None:
        try:
            self._storage = storage = await self._in_thread(open_storage)
            jobs = {
                job_id: await self._in_thread(storage.load, job_id)
                for job_id in await self._in_thread(storage.job_ids)
            }
        except Exception as error:  # whatever a storage may raise: without it nothing may be promised
            raise JournalUnavailableError(str(error)) from error
        for job_id, records in jobs.items():
            await self._recover(storage, job_id, records)

    async def _recover(self, storage: Storage, job_id: str, records: Sequence[r.Record]) -> None:
        own = job_id == self._settings.job_id
        if not own and not self._settings.serve:
            LOG.warning("the journal also holds job %s, which this scheduler leaves alone", job_id)
            return
        ended = any(isinstance(record, r.JobEnded) for record in records)
        if ended:  # whoever starts the scheduler again after the end wants a new run
            await self._in_thread(storage.forget, job_id)
            return
        settings = self._settings.core(own_job=own)
        try:
            machine = self._recover_machine(job_id, settings, records, self._clock.time())
        except ValueError as error:
            raise JournalUnavailableError(
                f"The journal does not fit: {error}.",
                remedy="Set the variables as they were, or move MS_RECOVERY_PATH away to begin anew.",
            ) from error
        driver = self._start(job_id, machine)
        generation = driver.view().generation
        self._note(Note("recovered", job_id, f"{len(records)} records, generation {generation}"))

    async def _make_durable(self, job_id: str, records: Sequence[r.Record]) -> None:
        if self._storage is None:
            return
        try:
            await self._in_thread(self._storage.append, job_id, records)
        except Exception as error:
            raise JournalUnavailableError(
                f"{error} Job {job_id} cannot be kept safe.",
                remedy="Start the scheduler again once that is repaired; training goes on meanwhile.",
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
        self._drivers.pop(job_id)
        self._tasks.pop(job_id).cancel()
        if self._storage is not None:
            await self._in_thread(self._storage.forget, job_id)

    def _ended(self, driver: JobDriver) -> None:
        if driver.job_id == self._settings.job_id and driver.ended and not self.own_job_over.done():
            self.own_job_over.set_result(driver.ended)

    def _stopped(self, driver: JobDriver, task: asyncio.Task[None]) -> None:
        """A driver never ends by itself: whatever made it is fatal to its job, and never silent."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        text = str(error) if isinstance(error, SchedulerError) else f"fault in the scheduler: {error!r}"
        LOG.error("job %s stopped: %s", driver.job_id, text, exc_info=error)
        if driver.job_id == self._settings.job_id and not self.own_job_over.done():
            told = (
                error if isinstance(error, SchedulerError) else SchedulerError(f"Job {driver.job_id}: {text}")
            )
            self.own_job_over.set_exception(told)
            self.own_job_over.exception()  # serving several jobs, nobody else looks at it

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

"""A store's service on a loopback port, with a job whose generations a test makes by hand."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from muster.programs.link import StoreLink
from muster.programs.proxy import Proxy
from muster.scheduler.access import Access, Caller
from muster.scheduler.audit.logs import Recorder
from muster.scheduler.core import records
from muster.scheduler.core.views import JobView, WorkerView
from muster.scheduler.jobs.driver import JobDriver
from muster.scheduler.jobs.stream import OutgoingStream
from muster.scheduler.serve.server import grpc_options
from muster.scheduler.store.service import StoreLimits, StoreService
from muster.wire import messages
from muster.wire.v1 import store_pb2 as pb
from tests.scheduler.fakes import FakeClock, FakeJob, candidate

OPEN = "/rendezvous.v1.Store/Open"


class HandJob(FakeJob):
    """A machine whose members a test names."""

    def __init__(self) -> None:
        super().__init__()
        self.members: list[messages.Candidate] = []

    def view(self, now: float) -> JobView:
        workers = tuple(
            WorkerView(each, "member", rank, 0, 0.0, 0, 0.0) for rank, each in enumerate(self.members)
        )
        return JobView("default", "running", 1, 2, 2, workers, (), "")


class OneJob:
    """Stands for the scheduler's jobs: the job ``default``."""

    def __init__(self) -> None:
        self.machine = HandJob()
        self.driver = self._driver()

    def _driver(self) -> JobDriver:
        async def durable(records: object) -> None:
            return

        return JobDriver("default", self.machine, FakeClock(), durable, lambda note: None)

    def get(self, job_id: str) -> JobDriver:
        assert job_id == "default"
        return self.driver

    def form(self, generation: int, *node_ids: str, here: bool = True) -> None:
        """A generation of these members, whose sessions are there; ``here``: formed by this scheduler."""
        self.machine.members = [candidate(node_id) for node_id in node_ids]
        members = tuple(records.Placed(i, i, 1, each) for i, each in enumerate(self.machine.members))
        record = records.GenerationFormed(generation, members, -1, (), "the members changed")
        if here:
            self.driver.observe(record, 0.0)
        else:
            self.driver.formed, self.driver.formed_here = record, False
        for number, each in enumerate(self.machine.members, 1):
            session = OutgoingStream(number, Caller("127.0.0.1:1"), "default", each)
            self.driver.sessions[number] = session

    def suspend(self, generation: int, reason: str) -> None:
        """The generation is over, and no other has formed."""
        self.driver.observe(records.GenerationEnded(generation, reason), 0.0)

    def end(self, reason: str) -> None:
        """The job is over."""
        self.driver.observe(records.JobEnded(False, reason), 0.0)

    def restart(self, generation: int, *node_ids: str) -> None:
        """What a scheduler that was started again knows."""
        self.driver = self._driver()
        self.form(generation, *node_ids, here=False)


class Rig:
    """A served store. ``serve`` again on the same port stands for a scheduler that was started again."""

    def __init__(self, jobs: OneJob, limits: StoreLimits | None = None) -> None:
        self.jobs = jobs
        self.recorder = Recorder()
        self._limits = limits
        self._server: grpc.aio.Server | None = None
        self.port = 0
        self.links: list[StoreLink] = []

    async def serve(self) -> None:
        self.access = Access(tls=False)
        self.service = StoreService(self.jobs, self.access, self.recorder, self._limits)  # type: ignore[arg-type]
        self._server = grpc.aio.server(options=grpc_options(5.0))
        self._server.add_generic_rpc_handlers((self.service.handler(),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    def link(
        self, node_id: str, generation: int = 1, incarnation: int = 7, port: int | None = None
    ) -> StoreLink:
        async def connect() -> grpc.aio.Channel:
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
            return grpc.aio.insecure_channel(f"127.0.0.1:{port or self.port}", options)

        opening = pb.StoreOpen(
            job_id="default", node_id=node_id, incarnation=incarnation, generation=generation
        )
        link = StoreLink(opening, connect)
        self.links.append(link)
        return link


@contextlib.asynccontextmanager
async def served(*node_ids: str, limits: StoreLimits | None = None) -> AsyncIterator[Rig]:
    """A store of generation 1 with these members."""
    rig = Rig(OneJob(), limits)
    rig.jobs.form(1, *node_ids)
    await rig.serve()
    try:
        yield rig
    finally:
        for link in rig.links:
            await link.close()
        await rig.stop()


@contextlib.asynccontextmanager
async def delayed(port: int, delay_s: float) -> AsyncIterator[int]:
    """The port of a way to another one of this host; what goes there comes late, and answers at once."""
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                asyncio.get_running_loop().call_later(delay_s, writer.write, data)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, beyond = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, beyond))
        await asyncio.gather(pump(reader, beyond, delay_s), pump(there, writer, 0.0))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def _stand(count: int, delay_s: float = 0.0) -> None:
    """Serves a store, with a proxy for each of so many members, until standard input ends.

    Args:
        count: of members.
        delay_s: by which what the first one says comes late.
    """
    async with served(*(str(i) for i in range(count))) as rig, delayed(rig.port, delay_s) as slow:
        ways = [slow if delay_s and not i else rig.port for i in range(count)]
        ports = [await Proxy(rig.link(str(i), port=way)).open() for i, way in enumerate(ways)]
        print(*ports, flush=True)
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def read() -> None:
            sys.stdin.read()
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(_stand(int(sys.argv[1]), *map(float, sys.argv[2:])))

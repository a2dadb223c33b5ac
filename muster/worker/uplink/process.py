"""The uplink's process: accepts workers' streams and multiplexes them on one stream to the scheduler.

The uplink makes no decisions and keeps no state. When its stream to the scheduler ends, it tells each worker
how the stream ended. Each worker then opens its next stream by its own rules. The uplink connects at the
first message from a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from muster.errors import WorkerError
from muster.wire.json_lines import log_own_process_as_json, process_lines, say, wanted
from muster.wire.log_lines import BoundedFormatter
from muster.wire.threads import Pool, start_thread
from muster.wire.v1 import host_pb2 as pb
from muster.wire.v1 import rendezvous_pb2
from muster.worker.config import load_settings
from muster.worker.session.credentials import load_keyring
from muster.worker.session.dialing import grpc_dial
from muster.worker.session.streams import Dial, error_of
from muster.worker.uplink.batches import Batches, Item, StreamEnded
from muster.worker.uplink.door import INNER, inherited
from muster.worker.uplink.frames import (
    ALIVE_EVERY_S,
    HEAD,
    MAX_FROM_WORKER_BYTES,
    MAX_REQUEST_BYTES,
    UplinkFrameKind,
    encode_end,
    frame,
    request_of,
)

log = logging.getLogger("muster.uplink")

METHOD = "/rendezvous.v1.HostStream/Open"
MAX_UNREAD_BYTES = 16 << 20
"""If a worker has more unread bytes than this, its stream is ended, as the scheduler would do itself."""

FAREWELL_S = 2.0
"""How long the scheduler may take to receive the last messages before the uplink ends, in seconds."""

_ALIVE = frame(UplinkFrameKind.ALIVE)
_HEARTBEAT = bytes([rendezvous_pb2.WorkerMessage.DESCRIPTOR.fields_by_name["heartbeat"].number << 3 | 2])
"""The first bytes of a serialized WorkerMessage with a heartbeat."""


class Carried:
    """A worker's stream that is carried by the uplink.

    If writing to the worker fails, data that it has sent before is still read.

    Attributes:
        number: its number on the stream to the scheduler; 0 if it has sent nothing yet.
        up: the stream to the scheduler that carries it; None if there is none.
        over: whether the worker was told how its session ended.
        moved: whether the worker has reported that it continues on another stream.
    """

    def __init__(self, uplink: Uplink, end: socket.socket) -> None:
        self.number = 0
        self.up: UplinkStream | None = None
        self.over = False
        self.moved = False
        self._uplink = uplink
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._in = bytearray()
        self._out: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._paused = False
        self._watch = -1
        end.setblocking(False)
        self._loop.add_reader(end, self._read)
        # Children of the worker may have inherited its end, and may hold it open after the worker is gone.
        with contextlib.suppress(
            OSError
        ):  # The process is in another PID namespace, or is gone already; in that case the socket shows it.
            self._watch = os.pidfd_open(_peer(end)[0])
            self._loop.add_reader(self._watch, self._process_ended)
        self.say_alive()

    def put(self, *pieces: bytes) -> None:
        """Sends the worker a message, given in pieces."""
        if self.over:
            return
        self._write(HEAD.pack(sum(map(len, pieces)), UplinkFrameKind.MESSAGE), *pieces)
        if self._unsent_bytes > MAX_UNREAD_BYTES:
            log.warning("disconnected a worker: it does not read")
            self.close()

    def say_alive(self) -> None:
        """Sends the worker a sign of life, unless it has other frames to read."""
        if not self.over and not self._out:
            self._write(_ALIVE)

    def end(self, error: Exception | None) -> None:
        """Sends the worker how its session ended, as the last frame."""
        if not self.over:
            self.over = True
            self._write(frame(UplinkFrameKind.END, encode_end(error)))
            self.take_frames()  # Skips the remaining frames, up to the end of the socket.

    def close(self) -> None:
        """Closes the stream; idempotent."""
        if self._end.fileno() < 0:
            return
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._end.close()
        if self._watch >= 0:
            self._loop.remove_reader(self._watch)
            os.close(self._watch)
        if self.up is not None:
            self.up.forget(self)
        self._uplink.forget(self)

    def take_frames(self) -> None:
        """Forwards the frames that were read; stops reading while too many messages wait to be sent."""
        while len(self._in) >= HEAD.size:
            length, kind = HEAD.unpack_from(self._in)
            if length > MAX_FROM_WORKER_BYTES:
                log.warning("disconnected a worker: it sent a frame of %d bytes", length)
                self.close()
                return
            whole = HEAD.size + length
            if len(self._in) < whole:
                break
            if kind == UplinkFrameKind.MESSAGE and not self.over:
                up = self.up or self._uplink.stream()
                if not up.carry(self, bytes(self._in[HEAD.size : whole])):
                    self._paused = True
                    self._loop.remove_reader(self._end)
                    return
            self.moved = kind == UplinkFrameKind.MOVED
            del self._in[:whole]
        if self._paused:
            self._paused = False
            self._loop.add_reader(self._end, self._read)

    def _read(self) -> None:
        try:
            data = self._end.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._in += data
            self.take_frames()
        else:
            self.close()

    def _process_ended(self) -> None:
        self._loop.remove_reader(self._watch)
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RD)  # Data that the worker has already sent is still read.

    def _write(self, *pieces: bytes) -> None:
        waited = bool(self._out)
        self._out.extend(memoryview(piece) for piece in pieces if piece)
        self._unsent_bytes += sum(map(len, pieces))
        if not waited:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                sent = self._end.send(self._out[0])
                self._unsent_bytes -= sent
                if sent == len(self._out[0]):
                    self._out.popleft()
                else:
                    self._out[0] = self._out[0][sent:]
        except BlockingIOError:
            self._loop.add_writer(self._end, self._flush)
            return
        except OSError:  # The worker is gone, or its data will be read to the end.
            self._out.clear()
            self._unsent_bytes = 0
        if self._end.fileno() >= 0:
            self._loop.remove_writer(self._end)


class UplinkStream:
    """One stream to the scheduler, with its workers by number.

    One thread connects and reads, and a thread of gRPC writes.

    Args:
        dial: opens the stream.
        loop: the event loop on which everything except these threads runs.
        ended: called on the loop when the stream has ended.
    """

    def __init__(self, dial: Dial, loop: asyncio.AbstractEventLoop, ended: Any) -> None:
        self.workers: dict[int, Carried] = {}
        self.finishing = False
        self._highest = 0
        self._dial = dial
        self._loop = loop
        self._ended = ended
        self._batches = Batches()
        self._changed = threading.Condition()
        self._held_up: set[Carried] = set()
        self._closed = False
        start_thread(self._run, name="muster-host-stream")

    # ------------------------------------------------------------ on the loop

    def carry(self, worker: Carried, message: bytes) -> bool:
        """Queues a worker's message; returns False if too many of its messages wait: try again later."""
        if not worker.number:
            self._highest += 1
            worker.number, worker.up = self._highest, self
            self.workers[worker.number] = worker
        with self._changed:
            if not self._closed and not self._batches.has_room(worker.number):
                self._held_up.add(worker)
                return False
            self._batches.add(worker.number, message, heartbeat=message.startswith(_HEARTBEAT))
            self._changed.notify_all()
        return True

    def forget(self, worker: Carried) -> None:
        """Removes a worker; when the last one is removed, the stream ends."""
        self._held_up.discard(worker)
        if self.workers.pop(worker.number, None) is not None:
            with self._changed:
                if worker.over:
                    self._batches.forget(worker.number)
                else:
                    self._batches.end(worker.number, "", may_return=worker.moved)
                self._changed.notify_all()
        if not self.workers:
            self.finish()

    def finish(self) -> None:
        """Ends the stream after everything is sent."""
        self.finishing = True
        with self._changed:
            self._changed.notify_all()

    def _over(self, error: Exception | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        error = error or ConnectionError("the scheduler closed the stream")
        for worker in list(self.workers.values()):
            worker.end(error)
        self.workers.clear()
        self._ended(self)

    def _go_on(self) -> None:
        """Resumes reading from workers that had too many messages waiting, if there is room again."""
        held_up, self._held_up = self._held_up, set()
        for worker in held_up:
            worker.take_frames()

    def _deliver(self, message: pb.ToHost) -> None:
        for item in message.items:
            for index, number in enumerate(item.workers):
                worker = self.workers.get(number)
                if worker is None:
                    continue
                if item.HasField("closed"):
                    worker.end(_error_of(item.closed))
                    self.forget(worker)
                else:
                    worker.put(item.message, *item.own[index : index + 1])

    # ------------------------------------------------------------ on threads

    def _run(self) -> None:
        """Connects, and reads until the stream's end."""
        error: Exception | None = None
        try:
            messages, close = self._dial(self)  # type: ignore[arg-type]  # gRPC uses only get()
            try:
                for data in messages:
                    self._post(self._deliver, pb.ToHost.FromString(data))
            finally:
                close()
        except Exception as caught:
            if not isinstance(caught, OSError):
                log.debug("the stream ended: %r", caught)
            error = caught
        self._post(self._over, error)

    def _post(self, call: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has ended, and the process is ending.
            self._loop.call_soon_threadsafe(functools.partial(call, *args))

    def get(self) -> bytes | None:
        """Returns the next batch to send, as a serialized FromHost; None at the end. Blocks."""
        with self._changed:
            while not self._batches.due:
                if self._closed or self.finishing:
                    return None
                self._changed.wait()
            if self._closed:
                return None
            items = self._batches.take()
            held_up = bool(self._held_up)
        if held_up:
            self._post(self._go_on)
        return pb.FromHost(items=map(_encoded, items)).SerializeToString()

    def put(self, _end: None) -> None:
        """Ends the sequence of batches; called to close the stream."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _encoded(item: Item) -> pb.FromWorker:
    if isinstance(item, StreamEnded):
        return pb.FromWorker(worker=item.worker, gone=pb.Gone(detail=item.detail, may_return=item.may_return))
    return pb.FromWorker(worker=item.worker, message=item.message)


def _error_of(closed: pb.Closed) -> Exception | None:
    import grpc

    if not closed.code:
        return None
    names = {code.value[0]: code.name for code in grpc.StatusCode}
    return error_of(names.get(closed.code, "UNKNOWN"), closed.detail)


class Uplink:
    """Accepts the streams that workers pass through the door; see :mod:`muster.worker.uplink.door`.

    Args:
        door: the door's inner end.
        dial: opens a stream to the scheduler.
        request: the request that accompanies the streams of this launch's workers.
    """

    def __init__(self, door: socket.socket, dial: Dial, request: bytes) -> None:
        self._door = door
        self._dial = dial
        self._request = request
        self._up: UplinkStream | None = None
        self._ups: set[UplinkStream] = set()
        self._carried: set[Carried] = set()
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Serves until it is asked to end and its workers have ended, or until no further worker can come."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._door.setblocking(False)
        loop.add_reader(self._door, self._take_in)
        breathing = asyncio.ensure_future(self._breathe())
        await self._stop.wait()
        # A batch system asks all processes to end at the same time, but the workers must leave first.
        while self._carried:
            await self._change()
        loop.remove_reader(self._door)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._until_streams_end(), FAREWELL_S)
        breathing.cancel()

    def stream(self) -> UplinkStream:
        """Returns the stream to the scheduler for a worker that has none yet."""
        if self._up is None or self._up.finishing:
            self._up = UplinkStream(self._dial, asyncio.get_running_loop(), self._ended)
            self._ups.add(self._up)
        return self._up

    def forget(self, worker: Carried) -> None:
        """Forgets a worker whose stream has ended."""
        self._carried.discard(worker)
        self._changed.set()

    def _ended(self, up: UplinkStream) -> None:
        self._ups.discard(up)
        if self._up is up:
            self._up = None
        self._changed.set()

    async def _until_streams_end(self) -> None:
        """Waits until all messages about workers are sent."""
        while self._ups:
            await self._change()

    async def _change(self) -> None:
        """Waits until a worker, or a stream to the scheduler, has ended."""
        self._changed.clear()
        await self._changed.wait()

    async def _breathe(self) -> None:
        while True:
            for worker in self._carried:
                worker.say_alive()
            await asyncio.sleep(ALIVE_EVERY_S)

    def _shut(self) -> None:
        """Stops reading the socket, so that no further stream is accepted."""
        asyncio.get_running_loop().remove_reader(self._door)
        self._stop.set()

    def _take_in(self) -> None:
        """Accepts the streams that workers have passed through the socket."""
        while True:
            try:
                request, ends, _, _ = socket.recv_fds(self._door, MAX_REQUEST_BYTES, 4)
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("the uplink's socket failed: %s", error)
                self._shut()
                return
            if not request and not ends:  # Launcher and workers are gone.
                self._shut()
                return
            if request != self._request:
                log.info("refused a stream: it is for another scheduler: %r", request[:300])
            for descriptor in ends:
                end = _own_stream(descriptor)
                if end is None:
                    log.warning("refused a stream: it is not one of this user's processes'")
                elif request != self._request:
                    end.close()
                else:
                    self._carried.add(Carried(self, end))


def _own_stream(descriptor: int) -> socket.socket | None:
    """Checks that a process of this user created the stream; otherwise, closes it and returns None."""
    end = socket.socket(fileno=descriptor)
    with contextlib.suppress(OSError):
        if (end.family, end.type) == (socket.AF_UNIX, socket.SOCK_STREAM) and _peer(end)[1] == os.geteuid():
            return end
    end.close()
    return None


def _peer(end: socket.socket) -> tuple[int, int]:
    """Returns the process id and user id of the process that created a socket pair."""
    data = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(data[:4], sys.byteorder), int.from_bytes(data[4:8], sys.byteorder)


def main(env: Mapping[str, str] = os.environ) -> int:
    """Runs an uplink with a worker's settings; returns its exit code."""
    if wanted(env):
        log_own_process_as_json("uplink", "muster")
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(BoundedFormatter())
        logging.getLogger("muster").addHandler(handler)
    door = inherited(env, INNER)
    if door is None:
        obstacle = "no door was inherited; muster run starts uplinks."
        say(obstacle, level="ERROR", as_text=f"uplink: {obstacle}")
        return 2
    try:
        settings = load_settings(env)
        process_lines.job = settings.job_id
        logging.getLogger("muster").setLevel(settings.log_level)
        keyring = load_keyring(settings, env)
    except WorkerError as error:
        say(str(error), level="ERROR", as_text=f"uplink: {error}")
        return error.exit_code
    # Loaded before the first stream is accepted, because from then on the loop must send signs of life.
    import grpc  # noqa: F401

    import muster.certs.runtime.grpc_credentials
    import muster.certs.runtime.preflight  # noqa: F401

    async def serve() -> None:
        asyncio.get_running_loop().set_default_executor(Pool(1, "muster-uplink"))
        await Uplink(door, grpc_dial(settings, keyring, METHOD), request_of(settings)).run()

    asyncio.run(serve())
    return 0

"""A listener on loopback for torch's own TCPStore clients: speaks their protocol, and passes operations on.

Torch's client is written in C++: it does not need the interpreter's lock, and none of it runs while an
interpreter ends. Only processes of this user are served: before anything is read from a connection, the
kernel is asked which user owns its other end. An end that no process holds any more has no owner. The
operations go over mutual TLS to the generation's store. Torch's protocol has no errors, so if the store
refuses an operation, the connection is closed and the log says why.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.programs.link import StoreEndedError, StoreLink
from muster.wire.log_lines import LogBudget
from muster.wire.v1 import store_pb2 as pb

log = logging.getLogger("muster.worker")

MAGIC = 0x3C85F7CE
MAX_BYTES = 8 << 20
"""The limit for a key or value, in bytes; torch's own server has the same."""

MAX_KEYS = 65_536
MAX_CONNECTIONS = 4096
WINDOW = 1024
"""The number of unanswered operations beyond which a connection waits for the answer to its change."""

GREETING_TIMEOUT_S = 30.0
BACKLOG = 1024
AT_ONCE = 64
"""How many connections are accepted before it is the turn of the event loop's other work."""

REST_S = 0.2
"""The pause before the next accept if no file descriptor was left, in seconds."""

LINES, WINDOW_S = 3, 10.0
"""The number of log lines about refused connections in a window, and the window in seconds."""

(
    _VALIDATE, _SET, _COMPARE_SET, _GET, _ADD, _CHECK, _WAIT, _NUM_KEYS, _DELETE, _APPEND, _MULTI_GET,
    _MULTI_SET, _CANCEL_WAIT, _PING, _QUEUE_PUSH, _QUEUE_POP, _QUEUE_LEN, _LIST_KEYS,
) = range(18)  # fmt: skip

_STOP_WAITING, _WAIT_CANCELLED = b"\0", b"\1"
_READY, _NOT_READY = b"\0", b"\1"
_U64, _I64 = struct.Struct("<Q"), struct.Struct("<q")


class ConnectionEndedError(Exception):
    """The connection must be closed; the message says why."""


class Proxy:
    """One listener on 127.0.0.1.

    Args:
        link: the link to the store.
        prefix: put before all keys of this listener in the store.
        own: keys, without the prefix, that this process answers itself; clients can only get them.
        owner: returns the user id of the process at the other end; None for :func:`peer_uid`.
    """

    def __init__(
        self,
        link: StoreLink,
        *,
        prefix: bytes = b"",
        own: Mapping[bytes, bytes] | None = None,
        owner: Callable[[socket.socket], int | None] | None = None,
    ) -> None:
        self._link = link
        self._prefix = prefix
        self._own = {prefix + key: value for key, value in (own or {}).items()}
        self._owner = owner or peer_uid
        self._listener: socket.socket | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._refused = LogBudget[str](lines=LINES, window_s=WINDOW_S, max_callers=16)

    async def open(self) -> int:
        """Starts to listen; returns the port."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        port: int = self._listener.getsockname()[1]
        self._listen()
        return port

    async def close(self) -> None:
        """Closes the listener and all connections."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._take, self._listener)

    def _take(self, listener: socket.socket) -> None:
        """Accepts connections; closes another user's before it accepts the next, to save descriptors."""
        for _ in range(AT_ONCE):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionError, InterruptedError):
                return
            except OSError as error:  # no descriptor is left; an immediate retry would fail again
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(REST_S, self._listen)
                self._say_refused("", f"{error.strerror}.")
                return
            try:
                self._check_owner(connection)
            except ConnectionEndedError as error:
                connection.close()
                self._say_refused(str(error), str(error))
                continue
            task = asyncio.ensure_future(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        writer = None
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
            await _Connection(self._link, self._prefix, self._own, reader, writer).serve()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client or this process ends
        except StoreEndedError as error:
            log.info("a connection to the store ends: %s", error)
        except ConnectionEndedError as error:
            log.error("a connection to the store was closed: %s", error)
        except Exception:
            log.exception("fault in a connection to the store")
        finally:
            (writer or connection).close()

    def _check_owner(self, connection: socket.socket) -> None:
        uid = self._owner(connection)
        if uid != os.getuid():
            whose = "nobody that the kernel knows" if uid is None else f"user {uid}"
            raise ConnectionEndedError(f"it came from {whose}, and this store is of user {os.getuid()}.")
        if len(self._connections) >= MAX_CONNECTIONS:
            raise ConnectionEndedError(f"there are {MAX_CONNECTIONS} already.")

    def _say_refused(self, kind: str, why: str) -> None:
        """Logs why a connection was refused; beyond a limit, only counts it, so that nobody fills the log."""
        now = time.monotonic()
        for more in self._refused.due(now):
            log.error("%d more connections to the store were closed: %s", more.codes.total(), more.last)
        if self._refused.take(kind, "", why, now):
            log.error("a connection to the store was closed: %s", why)


class _Connection:
    """The connection of one of torch's clients, which sends one command after the other."""

    def __init__(
        self,
        link: StoreLink,
        prefix: bytes,
        own: Mapping[bytes, bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._link = link
        self._prefix = prefix
        self._own = own
        self._reader = reader
        self._writer = writer
        self._next: asyncio.Task[bytes] | None = None
        self._pushed: tuple[bytes, bytes] | None = None
        self._changes: set[asyncio.Future[pb.StoreAnswer]] = set()
        self._failed: Exception | None = None

    async def serve(self) -> None:
        try:
            hello = await asyncio.wait_for(self._reader.readexactly(5), GREETING_TIMEOUT_S)
        except TimeoutError:
            raise ConnectionEndedError("it said nothing.") from None
        if hello != bytes((_VALIDATE,)) + struct.pack("<I", MAGIC):
            raise ConnectionEndedError("it does not speak torch's TCPStore protocol.")
        try:
            while True:
                command = await self._command()
                if self._failed is not None:
                    raise self._failed
                await self._serve_one(command)
                if self._writer.transport.get_write_buffer_size() > MAX_BYTES:
                    await self._writer.drain()
        finally:
            if self._next is not None:
                self._next.cancel()

    async def _command(self) -> int:
        if self._next is not None:  # already read during a wait
            waiting, self._next = self._next, None
            return (await waiting)[0]
        return (await self._reader.readexactly(1))[0]

    # ------------------------------------------------------------ reading

    async def _u64(self, limit: int) -> int:
        (number,) = _U64.unpack(await self._reader.readexactly(8))
        if number > limit:
            raise ConnectionEndedError(f"it announces {number} bytes or keys; {limit} is the limit.")
        return int(number)

    async def _bytes(self) -> bytes:
        length = await self._u64(MAX_BYTES)
        return await self._reader.readexactly(length) if length else b""

    async def _key(self) -> bytes:
        return self._prefix + await self._bytes()

    async def _keys(self) -> list[bytes]:
        return [await self._key() for _ in range(await self._u64(MAX_KEYS))]

    # ------------------------------------------------------------ one command

    async def _serve_one(self, command: int) -> None:
        pushed, self._pushed = self._pushed, None
        if command == _WAIT:
            await self._wait()
        elif command == _GET:
            key = await self._key()
            if pushed is not None and pushed[0] == key:  # torch waits for a key and then gets it
                self._write_bytes(pushed[1])
            else:
                self._write_bytes(*(await self._ask(pb.STORE_KIND_GET, [key])).values[:1] or (b"",))
        elif command == _SET:
            await self._change(pb.STORE_KIND_SET, [await self._key()], [await self._bytes()])
        elif command == _ADD:
            key, amount = await self._key(), _I64.unpack(await self._reader.readexactly(8))[0]
            self._write_number((await self._ask(pb.STORE_KIND_ADD, [key], amount=amount)).amount)
        elif command == _CHECK:
            keys = await self._keys()
            ready = (await self._ask(pb.STORE_KIND_CHECK, keys)).amount if keys else await self._settle()
            self._writer.write(_READY if ready else _NOT_READY)
        elif command == _PING:
            self._writer.write(await self._reader.readexactly(4))
        elif command == _CANCEL_WAIT:
            self._writer.write(_WAIT_CANCELLED)
        else:
            await self._serve_rare(command)

    async def _serve_rare(self, command: int) -> None:
        if command == _COMPARE_SET:
            key, expected, desired = await self._key(), await self._bytes(), await self._bytes()
            answer = await self._ask(pb.STORE_KIND_COMPARE_SET, [key], [expected, desired])
            self._write_bytes(answer.values[0])
        elif command == _DELETE:
            self._write_number((await self._ask(pb.STORE_KIND_DELETE, [await self._key()])).amount)
        elif command == _APPEND:
            await self._change(pb.STORE_KIND_APPEND, [await self._key()], [await self._bytes()])
        elif command == _MULTI_GET:
            keys = await self._keys()
            if keys:
                self._write_bytes(*(await self._ask(pb.STORE_KIND_MULTI_GET, keys)).values)
        elif command == _MULTI_SET:
            count = await self._u64(MAX_KEYS)
            pairs = [(await self._key(), await self._bytes()) for _ in range(count)]
            if pairs:
                values = [value for _, value in pairs]
                await self._change(pb.STORE_KIND_MULTI_SET, [key for key, _ in pairs], values)
        elif command == _QUEUE_PUSH:
            await self._change(pb.STORE_KIND_QUEUE_PUSH, [await self._key()], [await self._bytes()])
        elif command == _QUEUE_POP:
            answer = await self._ask(pb.STORE_KIND_QUEUE_POP, [await self._key()])
            self._write_number(answer.amount)
            self._write_bytes(*answer.values)
        elif command == _QUEUE_LEN:
            self._write_number((await self._ask(pb.STORE_KIND_QUEUE_LEN, [await self._key()])).amount)
        elif command == _NUM_KEYS:
            self._write_number((await self._ask(pb.STORE_KIND_NUM_KEYS, [self._prefix])).amount)
        elif command == _LIST_KEYS:
            found = (await self._ask(pb.STORE_KIND_LIST_KEYS, [self._prefix])).values
            self._write_number(len(found))
            self._write_bytes(*(key[len(self._prefix) :] for key in found))
        else:
            raise ConnectionEndedError(f"it asks for {command}, which this version does not know.")

    # ------------------------------------------------------------ asking

    async def _ask(
        self, kind: pb.StoreKind, keys: Sequence[bytes], values: Sequence[bytes] = (), *, amount: int = 0
    ) -> pb.StoreAnswer:
        answer = await self._link.submit(kind, keys, values, amount=amount)
        if answer.status == pb.STORE_STATUS_REFUSED:
            raise ConnectionEndedError(answer.sentence)
        return answer

    async def _change(self, kind: pb.StoreKind, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Submits a change without waiting for its answer, as torch does not wait for one either.

        Later operations of this connection are carried out after it. A client that needs to know that its
        changes have been carried out sends a check of no keys; see :meth:`_settle`.
        """
        size = sum(map(len, keys)) + sum(map(len, values))
        if size > LARGEST_CHANGE_BYTES:
            raise ConnectionEndedError(
                f"a change has at most {LARGEST_CHANGE_BYTES} bytes; this one has {size}."
            )
        answer = self._link.submit(kind, keys, values)
        self._changes.add(answer)
        answer.add_done_callback(self._changed)
        if self._link.pending > WINDOW:
            await answer

    async def _settle(self) -> bool:
        """Answers a check of no keys: waits until all changes of this connection have been carried out.

        It costs the store nothing, because the store answers each change anyway.
        """
        if self._changes:
            await asyncio.wait(set(self._changes))
        if self._failed is not None:
            raise self._failed
        return True

    def _changed(self, done: asyncio.Future[pb.StoreAnswer]) -> None:
        self._changes.discard(done)
        if done.cancelled():
            return
        error = done.exception()
        if error is None and done.result().status == pb.STORE_STATUS_REFUSED:
            error = ConnectionEndedError(done.result().sentence)
        if error is not None and self._failed is None:
            self._failed = error if isinstance(error, Exception) else ConnectionEndedError(str(error))
            if isinstance(error, ConnectionEndedError):
                log.error("the store refused a change: %s", error)
            self._writer.close()  # the next read fails

    async def _wait(self) -> None:
        """Answers once all keys are set, unless the client cancels the wait."""
        keys = await self._keys()
        if len(keys) == 1 and keys[0] in self._own:
            self._pushed = (keys[0], self._own[keys[0]])
            keys = []
        if not keys:
            self._writer.write(_STOP_WAITING)
            return
        answer = self._link.submit(pb.STORE_KIND_WAIT, keys)
        spoken = self._next = self._next or asyncio.ensure_future(self._reader.readexactly(1))
        waited: set[asyncio.Future[Any]] = {answer, spoken}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and spoken.exception() is None and spoken.result()[0] != _CANCEL_WAIT:
                await asyncio.wait({answer})
        finally:
            if not answer.done():
                self._link.cancel(answer)
        if answer.cancelled():
            return
        result = answer.result()
        if result.status == pb.STORE_STATUS_REFUSED:
            raise ConnectionEndedError(result.sentence)
        if len(keys) == 1 and result.values:
            self._pushed = (keys[0], result.values[0])
        self._writer.write(_STOP_WAITING)

    # ------------------------------------------------------------ writing

    def _write_bytes(self, *values: bytes) -> None:
        self._writer.write(b"".join(part for value in values for part in (_U64.pack(len(value)), value)))

    def _write_number(self, number: int) -> None:
        self._writer.write(_I64.pack(number))


LARGEST_CHANGE_BYTES = 800 * 1024

# ---------------------------------------------------------------- the owner of the other end

_NETLINK_SOCK_DIAG = 4
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI2s2s16s16sIII")
_ANSWER = struct.Struct("=4x4s44x4x4x4xII")  # the ports, the other end's uid and inode
_BY_FAMILY, _REQUEST_FLAG, _ERROR = 20, 1, 2
_ANY_COOKIE = 0xFFFFFFFF


def owner_of(uid: int, inode: int) -> int | None:
    """Returns a socket's owner; None for inode 0: no process holds it, and the kernel reports root."""
    return uid if inode else None


def peer_uid(connection: socket.socket) -> int | None:
    """Returns the id of the user that owns the other end of an IPv4 loopback connection; None if unknown."""
    try:
        theirs, ours = connection.getpeername(), connection.getsockname()
    except OSError:  # it is gone
        return None
    try:
        return _ask_kernel(theirs, ours)
    except OSError:
        return _look_up(theirs, ours)


def _ask_kernel(theirs: tuple[str, int], ours: tuple[str, int]) -> int | None:
    """Asks the kernel for the owner by netlink, as ``ss`` does; see sock_diag(7).

    Raises:
        OSError: netlink does not answer, or does not know the connection.
    """
    ports = [port.to_bytes(2, "big") for _, port in (theirs, ours)]
    hosts = [socket.inet_aton(host).ljust(16, b"\0") for host, _ in (theirs, ours)]
    request = _REQUEST.pack(
        socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF, *ports, *hosts, 0, _ANY_COOKIE, _ANY_COOKIE
    )
    header = _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST_FLAG, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(header + request)
        data = kernel.recv(8192)
    _, kind, *_ = _HEADER.unpack_from(data)
    if kind == _ERROR or len(data) < _HEADER.size + _ANSWER.size:
        raise OSError("the kernel does not know this connection")
    found, uid, inode = _ANSWER.unpack_from(data, _HEADER.size)
    if found != b"".join(ports):  # the answer is about a listener on the client's port
        return None
    return owner_of(uid, inode)


def _look_up(theirs: tuple[str, int], ours: tuple[str, int]) -> int | None:
    """Reads the owner from /proc, if netlink fails; torch's clients are in tcp6, with mapped addresses."""
    ends = [f"{socket.inet_aton(host)[::-1].hex().upper()}:{port:04X}" for host, port in (theirs, ours)]
    for table, lead in (("tcp6", "0000000000000000FFFF0000"), ("tcp", "")):
        try:
            lines = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[1:3] == [lead + ends[0], lead + ends[1]]:
                return owner_of(int(fields[7]), int(fields[9]))
    return None

"""How two workers come to have a connection, and trust it: the process's listening socket, and handshakes.

Dialer and acceptor are generators that yield what they wait for and return the connection. After TLS
the dialer says hello (generation, ranks, group, nonce); each side then proves by an HMAC that it knows
the generation's unique ids. The HMAC covers both nonces and the TLS session, so it is worth nothing on
another connection, in another generation, or for another rank. These messages carry a secret of each side,
from which the keys of the data are made. Last the acceptor welcomes the dialer: one that loses its place
before that is dialed again, and not taken for connected.

One thread runs every handshake, its own dials and those that come in, over non-blocking sockets: a slow,
silent or hostile socket costs a place in a bounded table and disturbs nobody. Should the thread fail
nevertheless, it says so and begins anew on the same port.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import hmac
import ipaddress
import itertools
import logging
import math
import os
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from muster.communicators.base import Membership, Peer
from muster.communicators.tcp.connection import Connection
from muster.communicators.tcp.records import RecordLayer, application_traffic_secrets
from muster.errors import CommunicatorError, SecurityError, WorkerError
from muster.forking import not_for_children
from muster.wire.log_lines import OTHERS, Budget, one_line
from muster.wire.threads import start_thread

_LOG = logging.getLogger("muster.tcp")
_FIRST_RETRY_S = 0.02
_LAST_RETRY_S = 0.5
_LISTENER_REST_S = 0.05
_FIRST_REOPENING_S = 0.05
_LAST_REOPENING_S = 5.0
_MAX_TEXT = 200
_BACKLOG = 4096
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

HELLO_MAGIC = b"Mus2"
"""Begins a hello, and names the handshake and the records that follow it."""

HELLO = struct.Struct("!4sQII32s32s")
REPLY = struct.Struct("!32s32s32s")
"""Acceptor's nonce, its proof, its secret."""

PROOF = struct.Struct("!32s32s")
"""Dialer's proof and its secret."""

WELCOME = b"\x01"
"""The acceptor's last word: it has the connection. Without it the dialer dials again."""

PROBE = b"MusP"
"""Begins a hello that asks for nothing but an answer, which is the same with another beginning."""

PROBE_ANSWER = b"MusA"

NONCE_BYTES = 32
SECRET_BYTES = 32

_TLS_RECORD_HEAD_BYTES = 5
_MOST_HELLO_BYTES = 1 << 14


class Want(enum.Enum):
    """What a handshake waits for: its socket, its turn, its group, or the time to dial again."""

    READ = "read"
    WRITE = "write"
    TURN = "turn"
    GROUP = "group"
    PAUSE = "pause"


@dataclass(frozen=True)
class TlsPolicy:
    """How peers are authenticated.

    Args:
        server: context of accepted connections; must ask for certificates.
        client: context of dialed connections.
        job_id: the job that the peers' certificates must be for.
        refusal: given the connection after its handshake, the job, and the node id that the peer must
            have (None: any): None, or the sentence why it may not take part.
        seal: whether data goes in sealed records (:mod:`muster.communicators.tcp.records`) with keys
            exchanged inside TLS; False leaves it to TLS itself, which is slower for large arrays.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    job_id: str
    refusal: Callable[[ssl.SSLSocket, str, str | None], str | None]
    seal: bool = True


class HandshakeLimits(Protocol):
    """What an incoming handshake reports of its progress, so that their number can be bounded."""

    def hello_arrived(self) -> None:
        """The TLS hello is here."""

    def may_begin(self) -> bool:
        """Whether its TLS session may begin now: that costs a signature."""

    def certificate_shown(self, certificate: bytes) -> None:
        """The certificate with this SHA-256 digest is good for this job. Without TLS: a random number."""


class PendingGroup:
    """Where connections of one communicator arrive.

    Args:
        membership: who belongs here, and the unique ids that prove it.
        label: names the group on the wire.
    """

    def __init__(self, membership: Membership, label: bytes) -> None:
        self.membership = membership
        self.label = label
        self.closed = False
        self.changed = threading.Condition()
        self.arrived: dict[int, Connection] = {}
        self.failures: dict[int, Exception] = {}
        self.notes: dict[int, str] = {}

    def arrive(self, connection: Connection) -> None:
        """Takes a proven connection; the first one of a rank wins."""
        with self.changed:
            if self.closed or connection.peer in self.arrived:
                connection.sock.close()
                return
            self.arrived[connection.peer] = connection
            self.changed.notify_all()

    def fail(self, rank: int, error: Exception) -> None:
        """Gives up on a peer, for a reason that trying again cannot cure."""
        with self.changed:
            self.failures[rank] = error
            self.changed.notify_all()

    def note(self, rank: int, text: str) -> None:
        """Keeps why the last try to reach a peer failed."""
        self.notes[rank] = text


@dataclass(frozen=True, slots=True)
class Hello:
    """What the dialing side says first: for which group of which generation, and as which rank."""

    generation: int
    from_rank: int
    to_rank: int
    label: bytes
    nonce: bytes

    def encode(self) -> bytes:
        """The hello's fixed number of bytes."""
        return HELLO.pack(HELLO_MAGIC, self.generation, self.from_rank, self.to_rank, self.label, self.nonce)

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Reads what :meth:`encode` wrote.

        Raises:
            CommunicatorError: not a hello.
        """
        magic, generation, from_rank, to_rank, label, nonce = HELLO.unpack(data)
        if magic != HELLO_MAGIC:
            raise CommunicatorError("The connection did not begin with a hello of this version of Muster.")
        return cls(generation, from_rank, to_rank, label, nonce)


def group_label(membership: Membership, path: str) -> bytes:
    """Names a group on the wire: a digest of job, generation and the group's path."""
    text = "\0".join((membership.job_id, str(membership.generation), path))
    return hashlib.sha256(text.encode()).digest()


def membership_key(membership: Membership) -> bytes:
    """What only the members of a generation know: a digest of its unique ids."""
    return hashlib.sha256(b"".join(membership.unique_ids)).digest()


def handshake_context(membership: Membership, binding: bytes, hello: Hello, acceptor_nonce: bytes) -> bytes:
    """All that makes one handshake differ from every other.

    Args:
        membership: the group.
        binding: what ties the handshake to the TLS session (empty without TLS).
        hello: what the dialer said.
        acceptor_nonce: the acceptor's random bytes.
    """
    peers = membership.peers
    incarnations = struct.pack("!QQ", peers[hello.from_rank].incarnation, peers[hello.to_rank].incarnation)
    return incarnations + acceptor_nonce + hello.encode() + binding


def proof(membership: Membership, side: str, context: bytes) -> bytes:
    """Proves knowledge of the generation's unique ids in one handshake, without showing them.

    Args:
        membership: of the side that computes the proof; its ids are the key.
        side: "dialer" or "acceptor", so that no proof can be sent back to its maker.
        context: :func:`handshake_context`.
    """
    text = b"muster-tcp-2 proof " + side.encode() + b"\0" + context
    return hmac.new(membership_key(membership), text, hashlib.sha256).digest()


Steps = Generator[tuple[Want, socket.socket], None, tuple[PendingGroup, Connection]]
_Bytes = Generator[tuple[Want, socket.socket], None, bytes]
_Socket = Generator[tuple[Want, socket.socket], None, socket.socket]


def no_steps() -> Steps:
    """A handshake that has not begun."""
    raise CommunicatorError("The handshake has not begun.")
    yield


def dials(rank: int, peer: int) -> bool:
    """Whether ``rank`` is the one of the two that dials; shares the work evenly."""
    return (rank > peer) == bool((rank + peer) % 2)


def host_and_port(address: str) -> tuple[str, int]:
    """Splits ``host:port`` or ``[v6]:port``.

    Raises:
        ValueError: it is neither.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 1 << 16):
        raise ValueError(f"the data address {address!r} is not host:port")
    return host, int(port)


def peer_name(peer: Peer) -> str:
    """A peer as messages name it."""
    return f"rank {peer.rank} (node {peer.node_id} on {peer.host_name or peer.host_id})"


def dial(
    sock: socket.socket, address: tuple[str, int], tls: TlsPolicy | None, group: PendingGroup, rank: int
) -> Steps:
    """Connects to ``rank`` and proves who we are, and asks the same of it.

    Raises:
        SecurityError: somebody else answers at the peer's address.
        OSError, CommunicatorError: it did not work this time.
    """
    held = [sock]
    try:
        return (yield from _dial(held, address, tls, group, rank))
    except BaseException:
        held[0].close()
        raise


def _dial(
    held: list[socket.socket], address: tuple[str, int], tls: TlsPolicy | None, group: PendingGroup, rank: int
) -> Steps:
    membership = group.membership
    peer = membership.peers[rank]
    sock = held[0]
    _tune(sock)
    if sock.connect_ex(address) not in (0, 115):
        raise CommunicatorError(f"{peer_name(peer)} cannot be reached at {peer.data_address}.")
    yield Want.WRITE, sock
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, f"{os.strerror(code)} at {peer.data_address}")
    if tls is not None:
        try:
            sock = yield from _secure(held, tls.client, server=False)
        except ssl.SSLCertVerificationError as error:
            raise SecurityError(
                f"The certificate shown at {peer.data_address} for {peer_name(peer)} is refused:"
                f" {error.verify_message}.",
                remedy="All workers need certificates of the same CA.",
            ) from None
        _check_identity(sock, tls, membership.job_id, peer)
    hello = Hello(membership.generation, membership.rank, rank, group.label, os.urandom(NONCE_BYTES))
    yield from _write(sock, hello.encode())
    nonce, answer, theirs = REPLY.unpack((yield from _read(sock, REPLY.size)))
    context = handshake_context(membership, _binding(sock), hello, nonce)
    if not hmac.compare_digest(answer, proof(membership, "acceptor", context)):
        raise SecurityError(
            f"{peer_name(peer)} does not know the unique id of generation {membership.generation}."
        )
    ours = os.urandom(SECRET_BYTES)
    yield from _write(sock, PROOF.pack(proof(membership, "dialer", context), ours))
    if (yield from _read(sock, len(WELCOME))) != WELCOME:
        raise CommunicatorError(f"{peer_name(peer)} did not take the connection.")
    held[0], secrets = _bare(sock, tls, membership, ours + theirs, context)
    return group, _connection(held[0], rank, secrets)


def accept(
    sock: socket.socket,
    tls: Callable[[], TlsPolicy] | None,
    find: Callable[[bytes, int], PendingGroup | None],
    source: str,
    limits: HandshakeLimits,
) -> Steps:
    """Takes a connection if it is that of a member of a group that ``find`` knows, or will know soon.

    Role and job of the certificate are checked before anything is read inside TLS, its node as soon as the
    members are known, and that before anything is answered.

    Args:
        sock: the accepted socket.
        tls: gives the policy in force; asked for once the TLS hello is here. None for plaintext.
        find: looks the group of a hello up; None: it may come yet.
        source: the address at the other end.
        limits: bounds what one certificate may hold.

    Raises:
        OSError, CommunicatorError, SecurityError: it is not.
    """
    held = [sock]
    try:
        return (yield from _accept(held, tls, find, source, limits))
    except BaseException:
        held[0].close()
        raise


def _accept(
    held: list[socket.socket],
    tls: Callable[[], TlsPolicy] | None,
    find: Callable[[bytes, int], PendingGroup | None],
    source: str,
    limits: HandshakeLimits,
) -> Steps:
    sock = held[0]
    _tune(sock)
    policy = None
    if tls is None:
        limits.certificate_shown(os.urandom(NONCE_BYTES))
    else:
        yield from _tls_hello(sock)
        limits.hello_arrived()
        while not limits.may_begin():
            yield Want.TURN, sock
        policy = tls()
        sock = yield from _secure(held, policy.server, server=True)
        limits.certificate_shown(_check_certificate(sock, policy, source))
    data = yield from _read(sock, HELLO.size)
    if data.startswith(PROBE):
        return (yield from _answer_probe(sock, data))
    hello = Hello.decode(data)
    group = find(hello.label, hello.generation)
    while group is None:
        yield Want.GROUP, sock
        group = find(hello.label, hello.generation)
    membership = group.membership
    if hello.to_rank != membership.rank or hello.from_rank >= membership.world_size:
        raise CommunicatorError(f"A hello from {source} names ranks that do not exist here.")
    peer = membership.peers[hello.from_rank]
    if policy is not None:
        _check_identity(sock, policy, membership.job_id, peer)
    nonce = os.urandom(NONCE_BYTES)
    context = handshake_context(membership, _binding(sock), hello, nonce)
    ours = os.urandom(SECRET_BYTES)
    yield from _write(sock, REPLY.pack(nonce, proof(membership, "acceptor", context), ours))
    answer, theirs = PROOF.unpack((yield from _read(sock, PROOF.size)))
    if not hmac.compare_digest(answer, proof(membership, "dialer", context)):
        raise SecurityError(
            f"{source} claims to be {peer_name(peer)} but does not know the unique id"
            f" of generation {membership.generation}."
        )
    yield from _write(sock, WELCOME)
    held[0], secrets = _bare(sock, policy, membership, theirs + ours, context)
    return group, _connection(held[0], hello.from_rank, secrets and secrets[::-1])


def _tls_hello(sock: socket.socket) -> Generator[tuple[Want, socket.socket], None, None]:
    """Waits until the first TLS record is here in full; leaves it in the kernel.

    Who keeps silent, sends something else or only half a hello costs no TLS session and no signature.
    """
    size = _TLS_RECORD_HEAD_BYTES
    woken = False
    while True:
        try:
            there = sock.recv(size, socket.MSG_PEEK)
        except BlockingIOError:
            there = b""
        else:
            if there[:1] != b"\x16" or (len(there) > 1 and there[1] != 3):
                what = "sent what is no TLS" if there else "hung up before it said anything"
                raise CommunicatorError(f"The other side {what}.")
            if len(there) < size and woken:  # the kernel wakes us early only where nothing more will come
                raise CommunicatorError("The other side hung up amid its TLS hello.")
        if len(there) == size > _TLS_RECORD_HEAD_BYTES:
            break
        if len(there) == size:
            size += int.from_bytes(there[3:5], "big")
            if not _TLS_RECORD_HEAD_BYTES < size <= _TLS_RECORD_HEAD_BYTES + _MOST_HELLO_BYTES:
                raise CommunicatorError("The other side sent what is no TLS.")
            woken = False
            continue
        if size > 1:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
        yield Want.READ, sock
        woken = True
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def _answer_probe(sock: socket.socket, hello: bytes) -> Steps:
    """Answers with the probe's own nonce; the group that the connection goes to is closed and ends it."""
    yield from _write(sock, PROBE_ANSWER + hello[len(PROBE) :])
    nobody = PendingGroup(Membership("", 0, "", -1, ()), b"")
    nobody.closed = True
    return nobody, Connection(sock, -1)


def _bare(
    sock: socket.socket, tls: TlsPolicy | None, membership: Membership, shared_secret: bytes, context: bytes
) -> tuple[socket.socket, tuple[bytes, bytes] | None]:
    """The socket that data goes through, and the traffic secrets of dialer and acceptor.

    The secrets are None where the socket stays as it is: in plaintext, or where TLS is to carry all.

    Args:
        sock: the connection after its handshake.
        tls: how it was authenticated.
        membership: of a generation, whose unique ids are the pre-shared key.
        shared_secret: what the dialer and then the acceptor have drawn and sent inside TLS.
        context: :func:`handshake_context`, which stands where TLS has its transcript.
    """
    if tls is None or not tls.seal or not isinstance(sock, ssl.SSLSocket):
        return sock, None
    if sock.pending():
        raise CommunicatorError("The peer sent data before the handshake was over.")
    # OpenSSL reads no further than the record it is in, so all that follows is still in the kernel.
    bare = socket.socket(fileno=sock.detach())
    transcript_hash = hashlib.sha256(context).digest()
    return bare, application_traffic_secrets(membership_key(membership), shared_secret, transcript_hash)


def _connection(sock: socket.socket, rank: int, secrets: tuple[bytes, bytes] | None) -> Connection:
    """The connection to a rank, with records of our own if there are secrets: ours, then the peer's."""
    return Connection(sock, rank, None if secrets is None else RecordLayer(sock, *secrets))


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _check_identity(sock: socket.socket, tls: TlsPolicy, job_id: str, peer: Peer) -> None:
    assert isinstance(sock, ssl.SSLSocket)
    reason = tls.refusal(sock, job_id, peer.node_id)
    if reason is not None:
        raise SecurityError(
            f"{peer_name(peer)} is refused: {reason}", remedy="Check who answers at its address."
        )


def _check_certificate(sock: socket.socket, tls: TlsPolicy, source: str) -> bytes:
    """Checks role and job; returns the certificate's digest."""
    assert isinstance(sock, ssl.SSLSocket)
    reason = tls.refusal(sock, tls.job_id, None)
    if reason is not None:
        raise SecurityError(f"A connection from {source} is refused: {reason}")
    return hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest()


def _binding(sock: socket.socket) -> bytes:
    """What both ends of one TLS session, and nobody else, have in common."""
    if not isinstance(sock, ssl.SSLSocket):
        return b""
    binding = sock.get_channel_binding("tls-unique")
    if not binding:
        raise SecurityError("The TLS library gives no channel binding.")
    return binding


def _secure(held: list[socket.socket], context: ssl.SSLContext, *, server: bool) -> _Socket:
    wrapped = context.wrap_socket(held[0], server_side=server, do_handshake_on_connect=False)
    held[0] = wrapped
    while True:
        try:
            wrapped.do_handshake()
            return wrapped
        except ssl.SSLWantReadError:
            yield Want.READ, wrapped
        except ssl.SSLWantWriteError:
            yield Want.WRITE, wrapped


def _read(sock: socket.socket, size: int) -> _Bytes:
    data = b""
    while len(data) < size:
        try:
            piece = sock.recv(size - len(data))
        except (ssl.SSLWantReadError, BlockingIOError):
            yield Want.READ, sock
            continue
        except ssl.SSLWantWriteError:
            yield Want.WRITE, sock
            continue
        if not piece:
            raise CommunicatorError("The peer hung up during the handshake.")
        data += piece
    return data


def _write(sock: socket.socket, data: bytes) -> Generator[tuple[Want, socket.socket], None, None]:
    while data:
        try:
            data = data[sock.send(data) :]
        except (ssl.SSLWantWriteError, BlockingIOError):
            yield Want.WRITE, sock
        except ssl.SSLWantReadError:
            yield Want.READ, sock


# ---------------------------------------------------------------- all handshakes of a process


@dataclass(eq=False)
class _Task:
    """One handshake under way.

    Attributes:
        group: where a dial's connection goes; None for a connection from outside.
        fd: the descriptor that the selector watches; -1: none.
        over: it was dropped or has arrived, and must not be touched again. Events of the same turn may still
            name it.
    """

    steps: Steps
    sock: socket.socket | None
    expires: float
    group: PendingGroup | None = None
    rank: int = -1
    source: str = ""
    want: Want = Want.READ
    fd: int = -1
    retry_s: float = _FIRST_RETRY_S
    resume_at: float = 0.0
    over: bool = False


class Endpoint:
    """Accepts and makes authenticated connections; lives as long as its backend.

    Args:
        tls: gives the contexts and the rule about identities that are in force; None for plaintext.
        handshake_timeout_s: how long a connection may take to prove itself.
        parked_timeout_s: how long a proven worker may wait for this process to enter its generation.
        max_handshakes: handshakes under way from outside. Above that a stranger's goes before that of a
            member's address, and that before one with a certificate of this job; the oldest first.
        max_strangers_per_s: TLS sessions that begin for addresses of no member; more have to wait their turn,
            the newest first. A session costs a signature: members must not wait for those of a flood.
        max_parked: proven connections that wait for this process to enter their generation; further ones are
            turned away, and dial again. Of one certificate there may be a quarter of either kind.
    """

    def __init__(
        self,
        tls: Callable[[], TlsPolicy] | None,
        *,
        handshake_timeout_s: float = 10.0,
        parked_timeout_s: float = 60.0,
        max_handshakes: int = 512,
        max_strangers_per_s: float = 100.0,
        max_parked: int = 256,
    ) -> None:
        self._tls = tls
        self._policy_in_force = None if tls is None else tls()
        self._policy_fails = False
        self._handshake_timeout_s = handshake_timeout_s
        self.parked_timeout_s = parked_timeout_s
        self._max_handshakes = max_handshakes
        self._max_parked = max_parked
        self._max_strangers_per_s = max_strangers_per_s
        self._most_turns = max(1.0, max_strangers_per_s)
        self._groups: dict[bytes, PendingGroup] = {}
        self._groups_changed = False
        self._newest = -1
        self._neighbours: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._requests: list[_Task] = []
        self._listener: socket.socket | None = None
        self._bound: tuple[int, tuple[object, ...]] | None = None
        self._thread: threading.Thread | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._dropped = Budget[str](lines=3, window_s=10.0, max_callers=16)
        self._refused = Budget[str](lines=3, window_s=10.0, max_callers=16)
        self._begin()

    def open(self, address: str) -> str:
        """Listens on a free port of a local address and returns ``host:port``."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = _listener(family, (address, 0))
        except OSError as error:
            raise CommunicatorError(
                f"Cannot listen on {address}: {error.strerror}.",
                remedy="Set MS_WORKER_ADDRESS or MS_INTERFACE to an address of this host.",
            ) from None
        with self._lock:
            self._listener, self._bound = listener, (family, listener.getsockname())
            self._start()
        self._wake()
        port = listener.getsockname()[1]
        return f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"

    def know(self, addresses: Iterable[str]) -> None:
        """These are the members' addresses, whose connections go before those of strangers."""
        with self._lock:
            self._neighbours = frozenset(_plain_hosts(addresses))

    def gather(self, group: PendingGroup) -> None:
        """Expects the group's peers from now on, and dials those that this side has to dial."""
        hosts = frozenset(_plain_hosts(_hosts(group)))
        with self._lock:
            self._groups[group.label] = group
            self._groups_changed = True
            newer = group.membership.generation > self._newest
            self._neighbours = hosts if newer else self._neighbours | hosts
            self._newest = max(self._newest, group.membership.generation)
            self._start()
        self._wake()

    def dial(self, group: PendingGroup, rank: int, deadline: float) -> None:
        """Dials a peer until it answers or the deadline passes; the connection comes to the group."""
        task = _Task(no_steps(), None, deadline, group, rank)
        with self._lock:
            self._requests.append(task)
            self._start()
        self._wake()

    def forget(self, group: PendingGroup) -> None:
        """Expects nobody for this group any more."""
        with self._lock:
            self._groups.pop(group.label, None)
            with group.changed:  # what has arrived is the caller's to close, what comes later is closed there
                group.closed = True
            self._groups_changed = True
        self._wake()

    def close(self) -> None:
        """Stops listening and drops what is under way; idempotent."""
        self._closing.set()
        self._wake()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(5)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._wake_fd >= 0:
            self._selector.close()
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _start(self) -> None:
        """Starts the thread if there is none; the caller holds the lock."""
        if self._thread is None and not self._closing.is_set():
            self._thread = start_thread(self._run, name="muster-tcp-endpoint")

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------ in the endpoint's thread

    def _run(self) -> None:
        """Serves until the endpoint is closed; what it does not foresee makes it begin anew."""
        anew, pause_s = False, _FIRST_REOPENING_S
        while not self._closing.is_set():
            begun = time.monotonic()
            try:
                if anew:
                    self._reopen()
                self._serve()
            except BaseException as error:  # a thread that ends would leave the process unreachable
                if time.monotonic() - begun > _LAST_REOPENING_S:
                    pause_s = _FIRST_REOPENING_S
                _LOG.error(
                    "The peer endpoint failed and is opened anew in %g s. Connections stay, peers are dialed"
                    " again. Please report it: %s",
                    pause_s,
                    _short(f"{type(error).__name__}: {error}"),
                    exc_info=_LOG.isEnabledFor(logging.DEBUG),
                )
                anew = True
                self._closing.wait(pause_s)
                pause_s = min(_LAST_REOPENING_S, 2 * pause_s)
        for task in list(self.tasks):
            self._drop(task)

    def _begin(self) -> None:
        """Has no handshake under way."""
        self.tasks: dict[_Task, None] = {}
        self._parked: dict[_Task, None] = {}
        self._queued: dict[_Task, None] = {}  # those that wait for their turn
        self._turns, self._turns_at = self._most_turns, time.monotonic()
        self._admission = Admission[_Task](
            max_under_way=self._max_handshakes,
            max_under_way_each=max(1, self._max_handshakes // 4),
            max_parked=self._max_parked,
            max_parked_each=max(1, self._max_parked // 4),
        )
        self._next_due = math.inf
        self._listening = False
        self._rests_until = 0.0
        self._selector.register(self._wake_fd, selectors.EVENT_READ)

    def _reopen(self) -> None:
        """Takes nothing over but the groups, the dials and the port, which the peers know."""
        dials = []
        for task in self.tasks:
            with contextlib.suppress(Exception):
                task.steps.close()
            if task.sock is not None:
                task.sock.close()
            task.over = True
            if task.group is not None and not task.group.closed:
                dials.append(_Task(no_steps(), None, task.expires, task.group, task.rank))
        with contextlib.suppress(OSError):
            self._selector.close()
        self._selector = selectors.DefaultSelector()
        self._begin()
        with self._lock:
            self._requests += dials
        if self._bound is not None and not _listens(self._listener):
            self._listener = _listener(*self._bound)

    def _serve(self) -> None:
        while not self._closing.is_set():
            self._listen()
            incoming = False
            for key, _ in self._selector.select(self._pause()):
                if key.fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                elif key.data is None:
                    incoming = True
                else:
                    self._meet(key.data)
            if incoming:  # last: newcomers may cost others their place
                self._accept()
            self._begin_dials()
            self._tend()

    def _meet(self, task: _Task) -> None:
        """Goes on with a handshake whose socket is ready."""
        if task.want is Want.GROUP and not task.over:  # it has to wait for our answer before it says more
            self._failed(task, CommunicatorError("It hung up, or spoke, while it had to wait."))
        else:
            self._advance(task)

    def _listen(self) -> None:
        """Watches the listening socket, unless it rests because there is no room for anybody."""
        listener = self._listener
        if listener is None:
            return
        listen = time.monotonic() >= self._rests_until
        if listen and not self._listening:
            self._selector.register(listener, selectors.EVENT_READ)
        elif not listen and self._listening:
            self._selector.unregister(listener)
        self._listening = listen

    def _pause(self) -> float | None:
        times = [self._next_due]
        times += [at for budget in (self._dropped, self._refused) if (at := budget.next_s()) is not None]
        if not self._listening and self._listener is not None:
            times.append(self._rests_until)
        until = min(times)
        return max(0.0, until - time.monotonic()) if until < math.inf else None

    def _tend(self) -> None:
        now = time.monotonic()
        with self._lock:
            changed, self._groups_changed = self._groups_changed, False
        if changed:
            for task in list(self._parked):
                self._advance(task)
        if changed or now >= self._next_due:
            self._end_or_resume(now)
        self._give_turns(now, all_may_ask=changed)
        for budget, level in ((self._dropped, logging.INFO), (self._refused, logging.WARNING)):
            for untold in budget.due(now):
                who = "other addresses" if untold.caller == OTHERS else untold.caller
                count = sum(untold.codes.values())
                _LOG.log(level, "%d more connections from %s. The last: %s", count, who, untold.last)

    def _give_turns(self, now: float, *, all_may_ask: bool) -> None:
        """Lets those go on whose turn it is; where the members are others now, all may ask."""
        earned = (now - self._turns_at) * self._max_strangers_per_s
        self._turns, self._turns_at = min(self._most_turns, self._turns + earned), now
        if not self._queued:
            return
        for task in reversed(list(self._queued)):
            if self._turns < 1 and not all_may_ask:
                break
            self._advance(task)
        if self._queued:
            self._next_due = min(self._next_due, now + 1 / self._max_strangers_per_s)

    def _end_or_resume(self, now: float) -> None:
        """Ends what took too long or is not wanted any more, dials again what may be dialed again."""
        self._next_due = math.inf
        for task in list(self.tasks):
            if task.group is not None and task.group.closed:
                self._drop(task)
            elif now >= task.expires:
                _LOG.debug("A handshake was dropped: it took too long.")
                self._drop(task)
            elif task.want is Want.PAUSE and now >= task.resume_at:
                self._redial(task)
            if not task.over:
                at = task.resume_at if task.want is Want.PAUSE else task.expires
                self._next_due = min(self._next_due, at)

    def _accept(self) -> None:
        assert self._listener is not None
        neighbours = self._neighbours
        for _ in range(64):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._find_room()
                    return
                continue  # that connection is gone already
            source = str(address[0])
            task = _Task(no_steps(), sock, time.monotonic() + self._handshake_timeout_s, source=source)
            tls = None if self._tls is None else self._policy
            task.steps = accept(sock, tls, self._find_group, source, _Limits(self, task))
            self._add(task)
            goes = self._admission.admit(task, neighbour=source in neighbours)
            if goes is not None:
                self._drop(goes)
            self._advance(task)

    def _add(self, task: _Task) -> None:
        self.tasks[task] = None
        self._next_due = min(self._next_due, task.expires)

    def _expire(self, task: _Task, after_s: float) -> None:
        task.expires = time.monotonic() + after_s
        self._next_due = min(self._next_due, task.expires)

    def note_hello(self, task: _Task) -> None:
        """A handshake from outside has brought its TLS hello."""
        self._admission.hello(task)

    def may_begin(self, task: _Task) -> bool:
        """Whether a handshake's TLS session may begin now."""
        if task.source in self._neighbours:
            return True
        if self._turns < 1:
            return False
        self._turns -= 1
        return True

    def note_certificate(self, task: _Task, certificate: bytes) -> None:
        """A handshake from outside has shown a certificate that is good for this job."""
        goes = self._admission.prove(task, certificate)
        if goes is not None:
            self._drop(goes)

    def _find_room(self) -> None:
        """The process has no descriptor or memory left for a connection: one goes, or all have to wait."""
        weakest = self._admission.weakest()
        if weakest is not None:
            self._drop(weakest)
        else:
            self._rests_until = time.monotonic() + _LISTENER_REST_S

    def _policy(self) -> TlsPolicy:
        if self._tls is not None:
            try:
                self._policy_in_force, self._policy_fails = self._tls(), False
            except Exception:
                if not self._policy_fails:  # it is asked for at each connection
                    _LOG.exception("What was renewed cannot be used; the old certificate stays in force.")
                self._policy_fails = True
        assert self._policy_in_force is not None
        return self._policy_in_force

    def _find_group(self, label: bytes, generation: int) -> PendingGroup | None:
        with self._lock:
            group = self._groups.get(label)
            newest = self._newest
        if group is None and generation < newest:
            raise CommunicatorError(f"The hello is of generation {generation}, which is over (now {newest}).")
        return group

    def _begin_dials(self) -> None:
        with self._lock:
            requests, self._requests = self._requests, []
        for task in requests:
            self._add(task)
        for task in requests:
            self._redial(task)

    def _redial(self, task: _Task) -> None:
        assert task.group is not None
        try:
            host, port = host_and_port(task.group.membership.peers[task.rank].data_address)
            task.sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        except ValueError as error:
            task.group.fail(task.rank, CommunicatorError(f"Rank {task.rank} cannot be dialed: {error}"))
            self._drop(task)
            return
        except OSError as error:
            self._find_room()  # those from outside may hold all descriptors
            self._failed(task, error)
            return
        policy = None if self._tls is None else self._policy()
        task.steps = dial(task.sock, (host, port), policy, task.group, task.rank)
        task.want = Want.READ
        self._advance(task)

    def _advance(self, task: _Task) -> None:
        """Goes on with a handshake, as far as it can; nothing if it is over."""
        if task.over:  # it lost its place after its event, or its turn, was found
            return
        try:
            want, sock = next(task.steps)
        except StopIteration as end:
            self._finish(task, *end.value)
        except (OSError, CommunicatorError) as error:
            self._failed(task, error)
        except WorkerError as error:
            if task.group is not None:
                task.group.fail(task.rank, error)
            else:
                self._say(self._refused, logging.WARNING, task, f"A connection was refused: {error}")
            self._drop(task)
        except Exception as error:
            text = f"A handshake failed in a way that was not foreseen: {type(error).__name__}: {error}"
            self._say(self._refused, logging.ERROR, task, text)
            self._failed(task, error)
        else:
            self._select(task, want, sock)

    def _finish(self, task: _Task, group: PendingGroup, connection: Connection) -> None:
        self._unwatch(task)
        task.sock = None
        self._drop(task)
        group.arrive(connection)

    def _failed(self, task: _Task, error: Exception) -> None:
        if task.group is None:
            self._say(
                self._dropped, logging.INFO, task, f"A connection from {task.source} was dropped: {error}"
            )
            self._drop(task)
            return
        self._unwatch(task)
        if task.sock is not None:
            task.sock.close()
            task.sock = None
        task.group.note(task.rank, str(error))
        task.want, task.resume_at = Want.PAUSE, min(task.expires, time.monotonic() + task.retry_s)
        self._next_due = min(self._next_due, task.resume_at)
        task.retry_s = min(_LAST_RETRY_S, 2 * task.retry_s)

    def _say(self, budget: Budget[str], level: int, task: _Task, text: str) -> None:
        """Logs what became of a connection from outside, or counts it: nobody floods the log."""
        short = _short(text)
        if _LOG.isEnabledFor(level) and budget.take(task.source, "", short, time.monotonic()):
            _LOG.log(level, "%s", short, exc_info=level >= logging.ERROR and _LOG.isEnabledFor(logging.DEBUG))

    def _select(self, task: _Task, want: Want, sock: socket.socket) -> None:
        task.sock = sock
        if want is Want.GROUP:
            self._park(task, sock)
            return
        if want is Want.TURN:
            self._unwatch(task)
            task.want = want
            self._queued[task] = None
            return
        self._queued.pop(task, None)
        if task in self._parked:
            del self._parked[task]
            self._admission.resume(task)
            self._expire(task, self._handshake_timeout_s)
        task.want = want
        self._watch(task, sock, selectors.EVENT_READ if want is Want.READ else selectors.EVENT_WRITE)

    def _park(self, task: _Task, sock: socket.socket) -> None:
        """Keeps a proven connection until its group is there."""
        if task.want is Want.GROUP:
            return
        if not self._admission.park(task):
            self._failed(task, CommunicatorError("Too many wait for this process; it may try again."))
            return
        task.want = Want.GROUP
        self._expire(task, self.parked_timeout_s)
        self._parked[task] = None
        self._watch(task, sock, selectors.EVENT_READ)

    def _watch(self, task: _Task, sock: socket.socket, events: int) -> None:
        if task.fd == sock.fileno():  # TLS makes another object of a socket, with the same descriptor
            self._selector.modify(task.fd, events, task)
        else:
            task.fd = sock.fileno()
            self._selector.register(task.fd, events, task)

    def _unwatch(self, task: _Task) -> None:
        if task.fd >= 0:
            self._selector.unregister(task.fd)
            task.fd = -1

    def _drop(self, task: _Task) -> None:
        """Ends a handshake; it is not touched again."""
        self._unwatch(task)
        task.over = True
        task.steps.close()
        if task.sock is not None:
            task.sock.close()
            task.sock = None
        self.tasks.pop(task, None)
        self._parked.pop(task, None)
        self._queued.pop(task, None)
        self._admission.remove(task)


class _Limits:
    """Passes on the progress of one handshake from outside."""

    def __init__(self, endpoint: Endpoint, task: _Task) -> None:
        self._endpoint = endpoint
        self._task = task

    def hello_arrived(self) -> None:
        self._endpoint.note_hello(self._task)

    def may_begin(self) -> bool:
        return self._endpoint.may_begin(self._task)

    def certificate_shown(self, certificate: bytes) -> None:
        self._endpoint.note_certificate(self._task, certificate)


def _listener(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if address[1]:  # its port again: connections of before may still be under way
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    not_for_children(listener)
    listener.setblocking(False)
    return listener


def _listens(listener: socket.socket | None) -> bool:
    with contextlib.suppress(OSError):
        return listener is not None and bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _hosts(group: PendingGroup) -> Iterator[str]:
    """The addresses of a group's members, without their ports."""
    for peer in group.membership.peers:
        with contextlib.suppress(ValueError):
            yield host_and_port(peer.data_address)[0]


def _plain_hosts(addresses: Iterable[str]) -> Iterator[str]:
    """Addresses as ``accept`` gives them; names are none."""
    for address in addresses:
        with contextlib.suppress(ValueError):
            yield str(ipaddress.ip_address(address))


def _short(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}..."


T = TypeVar("T", bound=Hashable)


class Standing(enum.IntEnum):
    """What speaks for a handshake; the lower one goes first when room is needed."""

    STRANGER = 0
    """No member is known at its address, and it has sent nothing of use."""
    STRANGER_WITH_HELLO = 1
    """The same, but its TLS hello is here."""
    NEIGHBOUR = 2
    """A member is known at its address."""
    NEIGHBOUR_WITH_HELLO = 3
    """The same, and its TLS hello is here."""
    PROVEN = 4
    """It has shown a certificate that is good for this job."""
    PARKED = 5
    """Proven, and it waits for this process to enter its generation; in a table of its own."""


@dataclass(slots=True)
class _Entry:
    standing: Standing
    neighbour: bool
    certificate: Hashable = None


class Admission(Generic[T]):
    """Bounds the handshakes under way, those that are parked, and those of one certificate.

    A handshake under way never goes for one that is parked, nor for one of lower standing; among equals the
    oldest goes. All workers of a job may share one certificate, so the bound of one is no small number.

    Args:
        max_under_way: handshakes that are not parked.
        max_under_way_each: the same of one certificate; one of a stranger's address goes first.
        max_parked: parked ones.
        max_parked_each: parked ones of one certificate.
    """

    def __init__(
        self, *, max_under_way: int, max_under_way_each: int, max_parked: int, max_parked_each: int
    ) -> None:
        self.max_under_way = max_under_way
        self.max_under_way_each = max_under_way_each
        self.max_parked = max_parked
        self.max_parked_each = max_parked_each
        self._entries: dict[T, _Entry] = {}
        self._ranked: dict[Standing, dict[T, None]] = {standing: {} for standing in Standing}
        # By standing, too: those of a certificate that are under way, and those that are parked.
        self._of_certificate: dict[tuple[Hashable, Standing], dict[T, None]] = {}

    def admit(self, handshake: T, *, neighbour: bool) -> T | None:
        """Takes a new handshake in; returns the one that must go for it, which may be itself.

        Args:
            handshake: the new one.
            neighbour: whether a member is known at its address.
        """
        standing = Standing.NEIGHBOUR if neighbour else Standing.STRANGER
        self._entries[handshake] = _Entry(standing, neighbour)
        self._ranked[standing][handshake] = None
        under_way = len(self._entries) - len(self._ranked[Standing.PARKED])
        return self.weakest() if under_way > self.max_under_way else None

    def hello(self, handshake: T) -> None:
        """Notes that its TLS hello has come: the silent go before it."""
        standing = self._entries[handshake].standing
        if standing in (Standing.STRANGER, Standing.NEIGHBOUR):
            self._move(handshake, Standing(standing + 1))

    def prove(self, handshake: T, certificate: Hashable) -> T | None:
        """Notes whose certificate it is; returns another one of that certificate that must go for it."""
        self._entries[handshake].certificate = certificate
        others = self._of_certificate.get((certificate, Standing.PROVEN), {})
        goes = None
        if len(others) >= self.max_under_way_each:
            goes = min(others, key=lambda other: self._entries[other].neighbour)  # the oldest of equals
        self._move(handshake, Standing.PROVEN)
        return goes

    def park(self, handshake: T) -> bool:
        """Takes it out of those under way; False if as many as may be are parked already."""
        certificate = self._entries[handshake].certificate
        parked = self._of_certificate.get((certificate, Standing.PARKED), {})
        if len(parked) >= self.max_parked_each or len(self._ranked[Standing.PARKED]) >= self.max_parked:
            return False
        self._move(handshake, Standing.PARKED)
        return True

    def resume(self, handshake: T) -> None:
        """Puts a parked one back among those under way."""
        self._move(handshake, Standing.PROVEN)

    def remove(self, handshake: T) -> None:
        """Forgets a handshake; nothing if it is not known."""
        if handshake in self._entries:
            self._unlist(handshake)
            del self._entries[handshake]

    def weakest(self) -> T | None:
        """The handshake under way that goes first; None if there is none."""
        under_way = (self._ranked[standing] for standing in Standing if standing is not Standing.PARKED)
        return next(itertools.chain.from_iterable(under_way), None)

    def _move(self, handshake: T, standing: Standing) -> None:
        self._unlist(handshake)
        entry = self._entries[handshake]
        entry.standing = standing
        self._ranked[standing][handshake] = None
        if standing >= Standing.PROVEN:
            self._of_certificate.setdefault((entry.certificate, standing), {})[handshake] = None

    def _unlist(self, handshake: T) -> None:
        entry = self._entries[handshake]
        del self._ranked[entry.standing][handshake]
        if entry.standing >= Standing.PROVEN:
            key = (entry.certificate, entry.standing)
            del self._of_certificate[key][handshake]
            if not self._of_certificate[key]:
                del self._of_certificate[key]

"""The handshake by which two workers authenticate each other: identities, and the proofs of both sides.

Dialer and acceptor are generators that yield what they wait for and return the connection. After TLS
the dialer says hello (generation, ranks, group, nonce); each side then proves by an HMAC that it knows
the generation's unique ids. The HMAC covers both nonces and the TLS session, so it is not valid on
another connection, in another generation, or for another rank. The proofs also carry a secret of each side;
the keys for the data are derived from both secrets. Finally, the acceptor welcomes the dialer. A dialer that
loses its place before the welcome dials again, and does not count as connected.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import socket
import ssl
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

from muster.communicators.membership import Membership, Peer
from muster.communicators.tcp.connection import PeerConnection
from muster.communicators.tcp.pending_group import PendingGroup
from muster.communicators.tcp.records import RecordLayer, application_traffic_secrets
from muster.errors import CommunicatorError, SecurityError

HELLO_MAGIC = b"Mus2"
"""Begins a hello, and names the handshake and the records that follow it."""

HELLO = struct.Struct("!4sQII32s32s")
REPLY = struct.Struct("!32s32s32s")
"""The acceptor's nonce, proof and secret."""

PROOF = struct.Struct("!32s32s")
"""The dialer's proof and secret."""

WELCOME = b"\x01"
"""The acceptor's last message: it has the connection. Without this message the dialer dials again."""

PROBE = b"MusP"
"""Begins a hello that asks only for an answer; the answer is the same hello with another beginning."""

PROBE_ANSWER = b"MusA"

NONCE_BYTES = 32
SECRET_BYTES = 32

_TLS_RECORD_HEAD_BYTES = 5
_MOST_HELLO_BYTES = 1 << 14


class Want(enum.Enum):
    """What a handshake is waiting for: its socket, its turn, its group, or the time of the next dial."""

    READ = "read"
    WRITE = "write"
    TURN = "turn"
    GROUP = "group"
    PAUSE = "pause"


@dataclass(frozen=True)
class TlsPolicy:
    """The rules by which peers are authenticated.

    Args:
        server: context of accepted connections; must ask for certificates.
        client: context of dialed connections.
        job_id: the job that the peers' certificates must be for.
        refusal: a function of the connection after its handshake, the job, and the node id that the peer must
            have (None: any). It returns None, or a sentence why the peer may not take part.
        seal: whether data is sent in encrypted records (:mod:`muster.communicators.tcp.records`) with keys
            exchanged inside TLS; False leaves it to TLS itself, which is slower for large arrays.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    job_id: str
    refusal: Callable[[ssl.SSLSocket, str, str | None], str | None]
    seal: bool = True


class HandshakeLimits(Protocol):
    """Takes reports of an incoming handshake's progress, so that the number of handshakes can be limited."""

    def hello_arrived(self) -> None:
        """Reports that the TLS hello has arrived."""

    def may_begin(self) -> bool:
        """Whether its TLS session, which costs a signature, may begin now."""

    def certificate_shown(self, certificate: bytes) -> None:
        """Reports the SHA-256 digest of a certificate valid for this job; without TLS a random number."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of the dialing side: the generation, the group, and its rank."""

    generation: int
    from_rank: int
    to_rank: int
    label: bytes
    nonce: bytes

    def encode(self) -> bytes:
        """Returns the hello as a fixed number of bytes."""
        return HELLO.pack(HELLO_MAGIC, self.generation, self.from_rank, self.to_rank, self.label, self.nonce)

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Reads what :meth:`encode` wrote.

        Raises:
            CommunicatorError: the bytes are not a hello.
        """
        magic, generation, from_rank, to_rank, label, nonce = HELLO.unpack(data)
        if magic != HELLO_MAGIC:
            raise CommunicatorError("The connection did not begin with a hello of this version of Muster.")
        return cls(generation, from_rank, to_rank, label, nonce)


def group_label(membership: Membership, path: str) -> bytes:
    """Returns a group's name on the wire: a digest of job, generation and the group's path."""
    text = "\0".join((membership.job_id, str(membership.generation), path))
    return hashlib.sha256(text.encode()).digest()


def membership_key(membership: Membership) -> bytes:
    """Returns a key that only the members of a generation know: a digest of its unique ids."""
    return hashlib.sha256(b"".join(membership.unique_ids)).digest()


def handshake_context(membership: Membership, binding: bytes, hello: Hello, acceptor_nonce: bytes) -> bytes:
    """Returns the bytes that distinguish one handshake from all others.

    Args:
        membership: the group.
        binding: a value that binds the handshake to the TLS session (empty without TLS).
        hello: the dialer's hello.
        acceptor_nonce: the acceptor's random bytes.
    """
    peers = membership.peers
    incarnations = struct.pack("!QQ", peers[hello.from_rank].incarnation, peers[hello.to_rank].incarnation)
    return incarnations + acceptor_nonce + hello.encode() + binding


def proof(membership: Membership, side: str, context: bytes) -> bytes:
    """Proves knowledge of the generation's unique ids in one handshake, without showing them.

    Args:
        membership: the membership of the side that computes the proof; its ids are the key.
        side: "dialer" or "acceptor", so that no proof can be sent back to its maker.
        context: :func:`handshake_context`.
    """
    text = b"muster-tcp-2 proof " + side.encode() + b"\0" + context
    return hmac.new(membership_key(membership), text, hashlib.sha256).digest()


Steps = Generator[tuple[Want, socket.socket], None, tuple[PendingGroup, PeerConnection]]
_Bytes = Generator[tuple[Want, socket.socket], None, bytes]
_Socket = Generator[tuple[Want, socket.socket], None, socket.socket]


def no_steps() -> Steps:
    """Returns the steps of a handshake that has not begun."""
    raise CommunicatorError("The handshake has not begun.")
    yield


def peer_name(peer: Peer) -> str:
    """Returns the name of a peer for messages."""
    return f"rank {peer.rank} (node {peer.node_id} on {peer.host_name or peer.host_id})"


def dial(
    sock: socket.socket, address: tuple[str, int], tls: TlsPolicy | None, group: PendingGroup, rank: int
) -> Steps:
    """Connects to ``rank``; both sides prove who they are.

    Raises:
        SecurityError: another process answers at the peer's address.
        OSError, CommunicatorError: this attempt failed; another may succeed.
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
        raise CommunicatorError(f"{peer_name(peer)} did not accept the connection.")
    held[0], secrets = _bare(sock, tls, membership, ours + theirs, context)
    return group, _connection(held[0], rank, secrets)


def accept(
    sock: socket.socket,
    tls: Callable[[], TlsPolicy] | None,
    find: Callable[[bytes, int], PendingGroup | None],
    source: str,
    limits: HandshakeLimits,
) -> Steps:
    """Accepts a connection of a member of a group that ``find`` knows, or will know soon.

    The certificate's role and job are checked before anything is read inside TLS. Its node id is checked as
    soon as the members are known, and before anything is answered.

    Args:
        sock: the accepted socket.
        tls: returns the current policy; called when the TLS hello has arrived. None for plaintext.
        find: returns the group of a hello; None if it may still come.
        source: the address at the other end.
        limits: limits the number of handshakes per certificate.

    Raises:
        OSError, CommunicatorError: the connection failed, or asks for an unknown group.
        SecurityError: the peer is not a member of the group.
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
    """Waits until the first TLS record has arrived in full; leaves it in the kernel's buffer.

    A peer that stays silent, or sends something else or half a hello, costs no TLS session and no signature.
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
            if len(there) < size and woken:  # the kernel wakes us early only if nothing more will come
                raise CommunicatorError("The other side hung up during its TLS hello.")
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
    """Answers with the probe's own nonce; returns a closed group, so that the connection ends."""
    yield from _write(sock, PROBE_ANSWER + hello[len(PROBE) :])
    nobody = PendingGroup(Membership("", 0, "", -1, ()), b"")
    nobody.closed = True
    return nobody, PeerConnection(sock, -1)


def _bare(
    sock: socket.socket, tls: TlsPolicy | None, membership: Membership, shared_secret: bytes, context: bytes
) -> tuple[socket.socket, tuple[bytes, bytes] | None]:
    """Returns the socket for the data, and the traffic secrets of dialer and acceptor.

    The secrets are None if the socket stays as it is: in plaintext, or if TLS encrypts the data itself.

    Args:
        sock: the connection after its handshake.
        tls: the policy by which it was authenticated.
        membership: the membership of a generation, whose unique ids are the pre-shared key.
        shared_secret: the random bytes that dialer and acceptor have sent inside TLS, in this order.
        context: :func:`handshake_context`, which takes the place of TLS's transcript.
    """
    if tls is None or not tls.seal or not isinstance(sock, ssl.SSLSocket):
        return sock, None
    if sock.pending():
        raise CommunicatorError("The peer sent data before the handshake was over.")
    # OpenSSL reads no further than the record it is in, so all that follows is still in the kernel.
    bare = socket.socket(fileno=sock.detach())
    transcript_hash = hashlib.sha256(context).digest()
    return bare, application_traffic_secrets(membership_key(membership), shared_secret, transcript_hash)


def _connection(sock: socket.socket, rank: int, secrets: tuple[bytes, bytes] | None) -> PeerConnection:
    """Returns the connection to a rank; with secrets (ours, then the peer's) it uses Muster's records."""
    return PeerConnection(sock, rank, None if secrets is None else RecordLayer(sock, *secrets))


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
    """Checks the certificate's role and job; returns its digest."""
    assert isinstance(sock, ssl.SSLSocket)
    reason = tls.refusal(sock, tls.job_id, None)
    if reason is not None:
        raise SecurityError(f"A connection from {source} is refused: {reason}")
    return hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest()


def _binding(sock: socket.socket) -> bytes:
    """Returns a secret that only the two ends of a TLS session share."""
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

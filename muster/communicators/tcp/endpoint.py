"""This process's endpoint for connections with peers: a listening socket, and all handshakes in progress.

One thread runs all handshakes, outgoing and incoming, over non-blocking sockets. So a slow,
silent or hostile socket costs a place in a bounded table and disturbs nobody. If the thread fails
nevertheless, it logs the error and starts again on the same port.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from muster.communicators.tcp.admission import Admission
from muster.communicators.tcp.connection import PeerConnection
from muster.communicators.tcp.handshake import Steps, TlsPolicy, Want, accept, dial, no_steps
from muster.communicators.tcp.pending_group import PendingGroup
from muster.errors import CommunicatorError, WorkerError
from muster.forking import not_for_children
from muster.wire.log_lines import OTHERS, LogBudget, one_line
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


def dials(rank: int, peer: int) -> bool:
    """Whether ``rank`` is the one of the two that dials; the rule shares the work evenly."""
    return (rank > peer) == bool((rank + peer) % 2)


def host_and_port(address: str) -> tuple[str, int]:
    """Splits ``host:port`` or ``[v6]:port``.

    Raises:
        ValueError: the address has neither form, or its port is out of range.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 1 << 16):
        raise ValueError(f"the data address {address!r} is not host:port")
    return host, int(port)


@dataclass(eq=False)
class _Handshake:
    """One handshake in progress.

    Attributes:
        group: the group of a dialed connection; None for an incoming connection.
        fd: the descriptor that the selector watches; -1: none.
        over: whether it was dropped or has arrived, and must not be used again. Events of the same turn may
            still refer to it.
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
        tls: returns the current contexts and rule about identities; None for plaintext.
        handshake_timeout_s: the seconds within which a connection must prove its identity.
        parked_timeout_s: the seconds for which a proven worker may wait until this process enters its
            generation.
        max_handshakes: limit of incoming handshakes in progress. When full, evict in this order, oldest
            first: unknown address, member's address, verified certificate.
        max_strangers_per_s: limit of new TLS sessions for addresses of no member; more must wait for their
            turn, the newest first. A session costs a signature, and members must not wait for those of a
            flood.
        max_parked: limit of proven connections that wait until this process enters their generation; more are
            refused, and dial again. One certificate may have a quarter of either limit.
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
        self._requests: list[_Handshake] = []
        self._listener: socket.socket | None = None
        self._bound: tuple[int, tuple[object, ...]] | None = None
        self._thread: threading.Thread | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._dropped = LogBudget[str](lines=3, window_s=10.0, max_callers=16)
        self._refused = LogBudget[str](lines=3, window_s=10.0, max_callers=16)
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
        """Sets the members' addresses, whose connections are preferred to strangers'."""
        with self._lock:
            self._neighbours = frozenset(_plain_hosts(addresses))

    def gather(self, group: PendingGroup) -> None:
        """Starts expecting the group's peers, and dials those that this side has to dial."""
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
        """Dials a peer until it answers or the deadline passes; adds the connection to the group."""
        handshake = _Handshake(no_steps(), None, deadline, group, rank)
        with self._lock:
            self._requests.append(handshake)
            self._start()
        self._wake()

    def forget(self, group: PendingGroup) -> None:
        """Stops expecting peers for this group."""
        with self._lock:
            self._groups.pop(group.label, None)
            with group.changed:  # the caller closes what has arrived; the group closes what comes later
                group.closed = True
            self._groups_changed = True
        self._wake()

    def close(self) -> None:
        """Stops listening, and drops handshakes in progress; idempotent."""
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
        with contextlib.suppress(OSError, ValueError):  # closed: messages may outlive it a little
            os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------ in the endpoint's thread

    def _run(self) -> None:
        """Serves until the endpoint is closed; starts over after an unforeseen error."""
        failed, pause_s = False, _FIRST_REOPENING_S
        while not self._closing.is_set():
            begun = time.monotonic()
            try:
                if failed:
                    self._reopen()
                self._serve()
            except BaseException as error:  # a thread that ends would leave the process unreachable
                if time.monotonic() - begun > _LAST_REOPENING_S:
                    pause_s = _FIRST_REOPENING_S
                _LOG.error(
                    "The peer endpoint failed and is opened again in %g s. Connections stay, peers are dialed"
                    " again. Please report it: %s",
                    pause_s,
                    _short(f"{type(error).__name__}: {error}"),
                    exc_info=_LOG.isEnabledFor(logging.DEBUG),
                )
                failed = True
                self._closing.wait(pause_s)
                pause_s = min(_LAST_REOPENING_S, 2 * pause_s)
        for handshake in list(self.handshakes):
            self._drop(handshake)

    def _begin(self) -> None:
        """Sets the state of an endpoint without handshakes."""
        self.handshakes: dict[_Handshake, None] = {}
        self._parked: dict[_Handshake, None] = {}
        self._queued: dict[_Handshake, None] = {}  # those that wait for their turn
        self._turns, self._turns_at = self._most_turns, time.monotonic()
        self._admission = Admission[_Handshake](
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
        """Starts over after an error; keeps only the groups, the dials and the port, which peers know."""
        dials = []
        for handshake in self.handshakes:
            with contextlib.suppress(Exception):
                handshake.steps.close()
            if handshake.sock is not None:
                handshake.sock.close()
            handshake.over = True
            if handshake.group is not None and not handshake.group.closed:
                dials.append(_Handshake(no_steps(), None, handshake.expires, handshake.group, handshake.rank))
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

    def _meet(self, handshake: _Handshake) -> None:
        """Continues the handshake whose socket is ready."""
        if handshake.want is Want.GROUP and not handshake.over:
            # The peer has to wait for our answer before it sends more.
            self._failed(handshake, CommunicatorError("It hung up, or spoke, while it had to wait."))
        else:
            self._advance(handshake)

    def _listen(self) -> None:
        """Watches the listening socket, unless it is paused because the table is full."""
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
            for handshake in list(self._parked):
                self._advance(handshake)
        if changed or now >= self._next_due:
            self._end_or_resume(now)
        self._give_turns(now, all_may_ask=changed)
        for budget, level in ((self._dropped, logging.INFO), (self._refused, logging.WARNING)):
            for untold in budget.due(now):
                who = "other addresses" if untold.caller == OTHERS else untold.caller
                count = sum(untold.codes.values())
                _LOG.log(level, "%d more connections from %s. The last: %s", count, who, untold.last)

    def _give_turns(self, now: float, *, all_may_ask: bool) -> None:
        """Lets as many waiting TLS sessions begin as the rate allows; tries all again if members changed."""
        earned = (now - self._turns_at) * self._max_strangers_per_s
        self._turns, self._turns_at = min(self._most_turns, self._turns + earned), now
        if not self._queued:
            return
        for handshake in reversed(list(self._queued)):
            if self._turns < 1 and not all_may_ask:
                break
            self._advance(handshake)
        if self._queued:
            self._next_due = min(self._next_due, now + 1 / self._max_strangers_per_s)

    def _end_or_resume(self, now: float) -> None:
        """Ends handshakes that took too long or are no longer wanted; dials again where that is allowed."""
        self._next_due = math.inf
        for handshake in list(self.handshakes):
            if handshake.group is not None and handshake.group.closed:
                self._drop(handshake)
            elif now >= handshake.expires:
                _LOG.debug("A handshake was dropped: it took too long.")
                self._drop(handshake)
            elif handshake.want is Want.PAUSE and now >= handshake.resume_at:
                self._redial(handshake)
            if not handshake.over:
                at = handshake.resume_at if handshake.want is Want.PAUSE else handshake.expires
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
            source, expires = str(address[0]), time.monotonic() + self._handshake_timeout_s
            handshake = _Handshake(no_steps(), sock, expires, source=source)
            tls = None if self._tls is None else self._policy
            handshake.steps = accept(sock, tls, self._find_group, source, _HandshakeReports(self, handshake))
            self._add(handshake)
            goes = self._admission.admit(handshake, neighbour=source in neighbours)
            if goes is not None:
                self._drop(goes)
            self._advance(handshake)

    def _add(self, handshake: _Handshake) -> None:
        self.handshakes[handshake] = None
        self._next_due = min(self._next_due, handshake.expires)

    def _expire(self, handshake: _Handshake, after_s: float) -> None:
        handshake.expires = time.monotonic() + after_s
        self._next_due = min(self._next_due, handshake.expires)

    def note_hello(self, handshake: _Handshake) -> None:
        """Notes that the TLS hello of a handshake from outside has arrived."""
        self._admission.hello(handshake)

    def may_begin(self, handshake: _Handshake) -> bool:
        """Whether a handshake's TLS session may begin now."""
        if handshake.source in self._neighbours:
            return True
        if self._turns < 1:
            return False
        self._turns -= 1
        return True

    def note_certificate(self, handshake: _Handshake, certificate: bytes) -> None:
        """Notes that a handshake from outside has shown a certificate that is valid for this job."""
        goes = self._admission.prove(handshake, certificate)
        if goes is not None:
            self._drop(goes)

    def _find_room(self) -> None:
        """Drops a handshake when descriptors or memory run out; without one, stops accepting for a while."""
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
                if not self._policy_fails:  # logged once, because each connection asks for the policy
                    _LOG.exception("The renewed certificate cannot be used; the old one stays in force.")
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
        for handshake in requests:
            self._add(handshake)
        for handshake in requests:
            self._redial(handshake)

    def _redial(self, handshake: _Handshake) -> None:
        group, rank = handshake.group, handshake.rank
        assert group is not None
        try:
            host, port = host_and_port(group.membership.peers[rank].data_address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            handshake.sock = socket.socket(family, socket.SOCK_STREAM)
        except ValueError as error:
            group.fail(rank, CommunicatorError(f"Rank {rank} cannot be dialed: {error}"))
            self._drop(handshake)
            return
        except OSError as error:
            self._find_room()  # incoming handshakes may hold all descriptors
            self._failed(handshake, error)
            return
        policy = None if self._tls is None else self._policy()
        handshake.steps = dial(handshake.sock, (host, port), policy, group, rank)
        handshake.want = Want.READ
        self._advance(handshake)

    def _advance(self, handshake: _Handshake) -> None:
        """Continues a handshake until it has to wait; does nothing if it is over."""
        if handshake.over:  # it lost its place after its event or its turn had come
            return
        try:
            want, sock = next(handshake.steps)
        except StopIteration as end:
            self._finish(handshake, *end.value)
        except (OSError, CommunicatorError) as error:
            self._failed(handshake, error)
        except WorkerError as error:
            if handshake.group is not None:
                handshake.group.fail(handshake.rank, error)
            else:
                self._say(self._refused, logging.WARNING, handshake, f"A connection was refused: {error}")
            self._drop(handshake)
        except Exception as error:
            text = f"A handshake failed in a way that was not foreseen: {type(error).__name__}: {error}"
            self._say(self._refused, logging.ERROR, handshake, text)
            self._failed(handshake, error)
        else:
            self._select(handshake, want, sock)

    def _finish(self, handshake: _Handshake, group: PendingGroup, connection: PeerConnection) -> None:
        self._unwatch(handshake)
        handshake.sock = None
        self._drop(handshake)
        group.arrive(connection)

    def _failed(self, handshake: _Handshake, error: Exception) -> None:
        if handshake.group is None:
            text = f"A connection from {handshake.source} was dropped: {error}"
            self._say(self._dropped, logging.INFO, handshake, text)
            self._drop(handshake)
            return
        self._unwatch(handshake)
        if handshake.sock is not None:
            handshake.sock.close()
            handshake.sock = None
        handshake.group.note(handshake.rank, str(error))
        handshake.want = Want.PAUSE
        handshake.resume_at = min(handshake.expires, time.monotonic() + handshake.retry_s)
        self._next_due = min(self._next_due, handshake.resume_at)
        handshake.retry_s = min(_LAST_RETRY_S, 2 * handshake.retry_s)

    def _say(self, budget: LogBudget[str], level: int, handshake: _Handshake, text: str) -> None:
        """Logs how a connection from outside ended, or only counts it, so that nobody can flood the log."""
        short = _short(text)
        if _LOG.isEnabledFor(level) and budget.take(handshake.source, "", short, time.monotonic()):
            _LOG.log(level, "%s", short, exc_info=level >= logging.ERROR and _LOG.isEnabledFor(logging.DEBUG))

    def _select(self, handshake: _Handshake, want: Want, sock: socket.socket) -> None:
        handshake.sock = sock
        if want is Want.GROUP:
            self._park(handshake, sock)
            return
        if want is Want.TURN:
            self._unwatch(handshake)
            handshake.want = want
            self._queued[handshake] = None
            return
        self._queued.pop(handshake, None)
        if handshake in self._parked:
            del self._parked[handshake]
            self._admission.resume(handshake)
            self._expire(handshake, self._handshake_timeout_s)
        handshake.want = want
        self._watch(handshake, sock, selectors.EVENT_READ if want is Want.READ else selectors.EVENT_WRITE)

    def _park(self, handshake: _Handshake, sock: socket.socket) -> None:
        """Keeps a proven connection until its group exists, if there is room."""
        if handshake.want is Want.GROUP:
            return
        if not self._admission.park(handshake):
            self._failed(
                handshake, CommunicatorError("Too many connections wait for this process; try again.")
            )
            return
        handshake.want = Want.GROUP
        self._expire(handshake, self.parked_timeout_s)
        self._parked[handshake] = None
        self._watch(handshake, sock, selectors.EVENT_READ)

    def _watch(self, handshake: _Handshake, sock: socket.socket, events: int) -> None:
        if handshake.fd == sock.fileno():  # TLS makes another object of a socket, with the same descriptor
            self._selector.modify(handshake.fd, events, handshake)
        else:
            handshake.fd = sock.fileno()
            self._selector.register(handshake.fd, events, handshake)

    def _unwatch(self, handshake: _Handshake) -> None:
        if handshake.fd >= 0:
            self._selector.unregister(handshake.fd)
            handshake.fd = -1

    def _drop(self, handshake: _Handshake) -> None:
        """Ends a handshake, which must not be used afterwards."""
        self._unwatch(handshake)
        handshake.over = True
        handshake.steps.close()
        if handshake.sock is not None:
            handshake.sock.close()
            handshake.sock = None
        self.handshakes.pop(handshake, None)
        self._parked.pop(handshake, None)
        self._queued.pop(handshake, None)
        self._admission.remove(handshake)


class _HandshakeReports:
    """Reports the progress of one handshake from outside, as :class:`HandshakeLimits` are told."""

    def __init__(self, endpoint: Endpoint, handshake: _Handshake) -> None:
        self._endpoint = endpoint
        self._handshake = handshake

    def hello_arrived(self) -> None:
        self._endpoint.note_hello(self._handshake)

    def may_begin(self) -> bool:
        return self._endpoint.may_begin(self._handshake)

    def certificate_shown(self, certificate: bytes) -> None:
        self._endpoint.note_certificate(self._handshake, certificate)


def _listener(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if address[1]:  # the same port again: earlier connections may not have ended yet
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
    """Returns the addresses of a group's members, without ports."""
    for peer in group.membership.peers:
        with contextlib.suppress(ValueError):
            yield host_and_port(peer.data_address)[0]


def _plain_hosts(addresses: Iterable[str]) -> Iterator[str]:
    """Yields the addresses in the form of ``accept``; skips host names."""
    for address in addresses:
        with contextlib.suppress(ValueError):
            yield str(ipaddress.ip_address(address))


def _short(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}..."

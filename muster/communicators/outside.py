"""The backend ``torch``: Muster assigns ranks, and the program makes its own communicators."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NoReturn

from muster.communicators.arrays import Array
from muster.communicators.base import Backend, Communicator
from muster.communicators.membership import Membership
from muster.communicators.reduce_ops import ReduceOp
from muster.errors import CommunicatorError

UNIQUE_ID_BYTES = 128


class OutsideBackend(Backend):
    """A backend without a data plane, because processes other than this one compute."""

    name = "torch"
    may_run_nccl = True

    def open_endpoint(self, address: str) -> str:
        """Opens nothing: no peer has to reach this process."""
        return ""

    def mint_unique_ids(self, count: int) -> tuple[bytes, ...]:
        """Makes random bytes, by which the members' programs prove their membership to each other."""
        return tuple(os.urandom(UNIQUE_ID_BYTES) for _ in range(count))

    def connect(
        self, membership: Membership, *, timeout_s: float, cancelled: Callable[[], Exception | None]
    ) -> Communicator:
        """Returns a communicator that knows only ranks and size."""
        return OutsideCommunicator(membership, timeout_s)

    def close(self) -> None:
        """Does nothing: nothing is open."""


class OutsideCommunicator(Communicator):
    """Knows ranks and size, and refuses every collective."""

    name = "torch"

    def __init__(self, membership: Membership, timeout_s: float) -> None:
        self.membership = membership
        self.timeout_s = timeout_s

    def _refuse(self) -> NoReturn:
        raise CommunicatorError("This session has ranks only; the program's own groups communicate.")

    def all_reduce(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> NoReturn:
        """Raises CommunicatorError, like all collectives here: the program has communicators of its own."""
        self._refuse()

    def reduce(
        self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, async_op: bool = False
    ) -> NoReturn:
        """Raises CommunicatorError: the program has communicators of its own."""
        self._refuse()

    def broadcast(self, buffer: Array, root: int, *, async_op: bool = False) -> NoReturn:
        """Raises CommunicatorError: the program has communicators of its own."""
        self._refuse()

    def all_gather(self, send: Array, recv: Array, *, async_op: bool = False) -> NoReturn:
        """Raises CommunicatorError: the program has communicators of its own."""
        self._refuse()

    def reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, *, async_op: bool = False) -> NoReturn:
        """Raises CommunicatorError: the program has communicators of its own."""
        self._refuse()

    def gather(self, send: Array, recv: Array | None, root: int, *, async_op: bool = False) -> NoReturn:
        """Raises CommunicatorError: the program has communicators of its own."""
        self._refuse()

    def scatter(self, send: Array | None, recv: Array, root: int, *, async_op: bool = False) -> NoReturn:
        """Raises CommunicatorError: the program has communicators of its own."""
        self._refuse()

    def all_to_all(self, send: Array, recv: Array, *, async_op: bool = False) -> NoReturn:
        """Raises CommunicatorError: the program has communicators of its own."""
        self._refuse()

    def send(self, buffer: Array, peer: int, *, async_op: bool = False) -> NoReturn:
        """Raises CommunicatorError: the program has communicators of its own."""
        self._refuse()

    def recv(self, buffer: Array, peer: int, *, async_op: bool = False) -> NoReturn:
        """Raises CommunicatorError: the program has communicators of its own."""
        self._refuse()

    def barrier(self) -> NoReturn:
        """Raises CommunicatorError: the program has communicators of its own."""
        self._refuse()

    def split(self, group: str, ranks: Sequence[int]) -> NoReturn:
        """Raises CommunicatorError: the program has communicators of its own."""
        self._refuse()

    def abort(self, error: Exception) -> None:
        """Does nothing: no collective can be under way."""

    def close(self) -> None:
        """Does nothing: nothing is open."""

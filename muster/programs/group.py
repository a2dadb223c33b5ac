"""A torch process group over Muster's encrypted connections, for tensors on CPUs.

It is a subclass of ProcessGroup, because Python cannot derive from Backend in every torch from 2.5 on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from muster.communicators.arrays import describe
from muster.communicators.membership import Membership
from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.tcp.communicator import TcpCommunicator
from muster.communicators.tcp.handshake import peer_name
from muster.communicators.tcp.messages import BARRIER, USER, Message, Messages
from muster.communicators.work import WorkQueue
from muster.errors import (
    ArrayError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    FormationTimeoutError,
    WorkerError,
)
from muster.programs import BACKEND
from muster.programs.addresses import close_peer_listeners, exchange_addresses, open_peer_listener
from muster.programs.assignment import KEY, Handover
from muster.programs.callbacks import PROGRAM, Callbacks, caller
from muster.programs.named_group import NamedProcessGroup
from muster.programs.operations import operation, operation_name
from muster.programs.step_times import WAITS
from muster.programs.tensors import (
    FlatTensor,
    apart,
    check_parts,
    check_same_dtype,
    hand_out,
    split_rows,
)
from muster.programs.work import GroupWork, MessageWork

Tensor = Any
_AGENT_TIMEOUT = timedelta(seconds=60)
_MOST_TAG = (1 << 31) - 1


class MusterProcessGroup(NamedProcessGroup):
    """One group of ranks, whose collectives run one at a time, in the order of their calls.

    All ranks must call them in the same order. A synchronous collective runs in the calling thread if no
    other is queued; all others run in a thread of the group. An error other than
    :class:`~muster.errors.ArrayError` makes the group unusable on all ranks.

    Args:
        store: torch's store, with keys of this group alone.
        rank: this process's rank within the group.
        size: the group's world size.
        timeout: the limit for each collective and message.
        name: the group's name, for messages.

    Raises:
        FormationTimeoutError: not all ranks have made the group in time.
        CommunicatorError: the ranks' addresses are wrong, or the connections fail.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, name: str = "world") -> None:
        super().__init__(rank, size, name)
        self._closed = False
        self._process_id = os.getpid()
        timeout_s = timeout.total_seconds()
        handover = Handover.decode(bytes(_agent_store().get(KEY)))
        listener = open_peer_listener(handover, os.environ)
        try:
            membership, path = exchange_addresses(store, handover, listener, name or "world", rank, size)
        except dist.DistStoreError as error:
            raise FormationTimeoutError(
                f"Rank {rank} of group {name!r} has not met all of its {size} ranks: {error}",
                remedy="All ranks must make the same groups in the same order; see the others' logs.",
            ) from None
        self._open(membership, listener.backend.endpoint, path, timeout_s)
        self._store = store  # torch keeps no reference to it
        _opened[id(self)] = self  # nor to this group, which C++ still calls

    def _open(self, membership: Membership, endpoint: Any, path: str, timeout_s: float) -> None:
        self.membership = membership
        self._endpoint, self._path = endpoint, path
        self._calls_of: dict[str, _OrderedCalls] = {}
        self._calls_lock = threading.Lock()
        self._running = threading.local()
        communicator = TcpCommunicator(membership, endpoint, path=path, timeout_s=timeout_s)
        self._messages = Messages(
            membership, endpoint, path=path, timeout_s=timeout_s, others=communicator.links
        )
        try:
            communicator.bring_up(timeout_s, lambda: None)
        except BaseException:
            self._messages.close()
            raise
        self._calls_of[PROGRAM] = self._make_calls(PROGRAM, communicator)

    def _make_calls(self, of: str, communicator: TcpCommunicator) -> _OrderedCalls:
        queue = WorkQueue(f"muster-{self.membership.group}")
        return _OrderedCalls(communicator, queue, Callbacks(self._path, of), is_up=of == PROGRAM)

    def _calls_of_caller(self) -> _OrderedCalls:
        """Returns the current caller's ordered calls; makes the object at the caller's first collective."""
        of = caller()
        with self._calls_lock:
            calls = self._calls_of.get(of)
            if calls is None:
                timeout_s = self._calls_of[PROGRAM].communicator.timeout_s
                path = f"{self._path}/{of}"
                communicator = TcpCommunicator(
                    self.membership, self._endpoint, path=path, timeout_s=timeout_s
                )
                calls = self._calls_of[of] = self._make_calls(of, communicator)
            return calls

    def _all_calls(self) -> list[_OrderedCalls]:
        with self._calls_lock:
            return list(self._calls_of.values())

    @property
    def _communicator(self) -> TcpCommunicator:
        """The communicator of the collective that this thread runs."""
        communicator: TcpCommunicator = self._running.communicator
        return communicator

    # ------------------------------------------------------------ what torch asks

    def getBackendName(self) -> str:  # noqa: N802
        """See torch."""
        return BACKEND

    def name(self) -> str:
        """See torch."""
        return BACKEND

    def getRank(self) -> int:  # noqa: N802
        """See torch."""
        return self.membership.rank

    def getSize(self) -> int:  # noqa: N802
        """See torch."""
        return self.membership.world_size

    def set_timeout(self, timeout: timedelta) -> None:
        """Changes the timeout of collectives and messages that are called from now on."""
        self._messages.timeout_s = timeout.total_seconds()
        for calls in self._all_calls():
            calls.communicator.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Fails all collectives and messages in progress; the group is unusable afterwards."""
        if self._is_inherited:
            return
        error = CommunicatorAbortedError("The process group was aborted.")
        self._messages.abort(error)
        for calls in self._all_calls():
            calls.communicator.abort(error)
        _opened.pop(id(self), None)

    def shutdown(self) -> None:
        """Ends the group after all collectives that were called before, and their callbacks; idempotent."""
        if self._closed or self._is_inherited:
            return
        while not self._idle:  # callbacks may call more
            for calls in self._all_calls():
                calls.queue.close()
                calls.callbacks.drain(calls.communicator.timeout_s)
            if caller() != PROGRAM:
                break  # called in a callback, which cannot wait for its own end
        self._closed = True
        self._messages.close()
        for calls in self._all_calls():
            calls.queue.close()
            calls.callbacks.close()
            with contextlib.suppress(WorkerError):
                calls.communicator.close()
        _opened.pop(id(self), None)

    def end(self) -> None:
        """Shuts the group down if it is idle, and aborts it otherwise, so as not to wait for other ranks."""
        if self._idle:
            self.shutdown()
        else:
            self.abort()

    @property
    def _idle(self) -> bool:
        return all(calls.queue.idle and calls.callbacks.idle for calls in self._all_calls())

    # ------------------------------------------------------------ running

    @property
    def _is_inherited(self) -> bool:
        """Whether this process was forked from the one that made the group."""
        return os.getpid() != self._process_id

    def _check(self) -> None:
        """Checks that the group can be used.

        Raises:
            CommunicatorAbortedError: it was destroyed, or its connections belong to the parent process. Two
                processes on one connection would mix their records, and reuse keys and nonces.
        """
        if self._is_inherited:
            raise CommunicatorAbortedError(
                f"This process group belongs to process {self._process_id}, and this one was forked from it.",
                remedy="Make a group in the child: destroy_process_group(), then init_process_group().",
            )
        if self._closed:
            raise CommunicatorAbortedError("The process group was destroyed.")

    def _run(self, action: Callable[[], None], opts: Any, results: Sequence[Tensor]) -> GroupWork:
        """Runs a collective: at once if it is synchronous and none is queued, else in the group's thread.

        Args:
            action: carries the collective out.
            opts: torch's options of the call.
            results: the tensors that hold its results.
        """
        self._check()
        calls = self._calls_of_caller()
        work = GroupWork(results, calls.callbacks)
        mode = _mode()

        def run() -> None:
            self._running.communicator = calls.communicator
            try:
                if not calls.is_up:
                    calls.communicator.bring_up(calls.communicator.timeout_s, lambda: None)
                    calls.is_up = True
                with mode():
                    action()
            except Exception as error:
                self._fail_others(calls, error)
                work.finish(error)
            else:
                work.finish()

        if calls.queue.idle and not getattr(opts, "asyncOp", True):
            with WAITS.waiting():
                run()
            work.wait()
        else:
            calls.queue.put(run)
        return work

    def _fail_others(self, failed: _OrderedCalls, error: Exception) -> None:
        """Aborts the other callers' communicators after an error that makes the group unusable."""
        if isinstance(error, WorkerError) and not isinstance(error, ArrayError):
            for calls in self._all_calls():
                if calls is not failed:
                    calls.communicator.abort(error)

    # ------------------------------------------------------------ reductions

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> GroupWork:
        """See torch. Sparse tensors are summed."""
        opts = opts or dist.AllreduceOptions()

        def action() -> None:
            for tensor in tensors:
                if tensor.layout is not torch.strided:
                    self._sum_sparse(tensor, opts.reduceOp)
                else:
                    self._all_reduce(tensor, opts.reduceOp)

        return self._run(action, opts, tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> GroupWork:
        """See torch."""
        return self.allreduce(tensors, opts or dist.AllreduceCoalescedOptions())

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        with FlatTensor(tensor, writes=True) as flat:
            combine = operation(op, flat.array)
            if isinstance(combine, ReduceOp):
                self._communicator.all_reduce(flat.array, flat.array, combine)
                return
            everybodys = flat.array.new_empty((self.size(), flat.array.numel()))
            self._communicator.all_gather(flat.array, everybodys)
            combine.reduce(everybodys.numpy(), axis=0, out=flat.array.numpy())  # type: ignore[attr-defined]

    def _sum_sparse(self, tensor: Tensor, op: Any) -> None:
        """Replaces a sparse COO tensor by the sum over all ranks.

        Raises:
            ArrayError: the operation is not a sum, the layout is not COO, or the ranks' shapes differ.
        """
        if operation_name(op) != "SUM" or tensor.layout is not torch.sparse_coo:
            raise ArrayError("Sparse tensors can be summed only, and must be of the layout COO.")
        mine = tensor.coalesce()
        head = torch.tensor([mine._nnz(), mine.sparse_dim(), *mine.shape])
        heads = head.new_empty((self.size(), head.numel()))
        self._communicator.all_gather(head, heads)
        if not bool((heads[:, 1:] == heads[0, 1:]).all()):
            raise ArrayError("The sparse tensors of the ranks differ in shape.")
        counts = heads[:, 0].tolist()
        indices = self._gather_rows(mine.indices().t(), counts)
        values = self._gather_rows(mine.values(), counts)
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()
        tensor.copy_(total)  # detach() would have indices and values of its own

    def _gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Gathers the rows of all ranks, in the order of ranks; rank ``r`` has ``counts[r]`` rows."""
        rows = rows.contiguous()
        found = rows.new_empty((sum(counts), *rows.shape[1:]))
        pieces = list(found.split(list(counts)))
        self._exchange([rows] * self.size(), pieces)
        return found

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> GroupWork:
        """See torch; the tensors of other ranks than the root stay as they are."""

        def action() -> None:
            for tensor in tensors:
                self._reduce(tensor, opts.reduceOp, opts.rootRank)

        return self._run(action, opts, tensors)

    def _reduce(self, tensor: Tensor, op: Any, root: int) -> None:
        is_root = root == self.rank()
        with FlatTensor(tensor, writes=is_root) as flat:
            combine = operation(op, flat.array)
            if isinstance(combine, ReduceOp):
                self._communicator.reduce(flat.array, flat.array if is_root else None, combine, root)
                return
            everybodys = flat.array.new_empty((self.size(), flat.array.numel())) if is_root else None
            self._communicator.gather(flat.array, everybodys, root)
            if everybodys is not None:
                combine.reduce(everybodys.numpy(), axis=0, out=flat.array.numpy())  # type: ignore[attr-defined]

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> GroupWork:
        """See torch."""
        opts = opts or dist.ReduceScatterOptions()

        def action() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                check_parts(parts, output, self.size(), "reduce_scatter")
                self._reduce_scatter(output, torch.cat([part.reshape(-1) for part in parts]), opts.reduceOp)

        return self._run(action, opts, outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> GroupWork:
        """See torch."""
        opts = opts or dist.ReduceScatterOptions()
        return self._run(lambda: self._reduce_scatter(output, given, opts.reduceOp), opts, [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        """See torch."""
        opts = opts or dist.ReduceScatterOptions()

        def action() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, given, opts.reduceOp)

        return self._run(action, opts, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: Tensor, given: Tensor, op: Any) -> None:
        check_same_dtype(output, given, "reduce_scatter")
        with FlatTensor(output, writes=True) as target, FlatTensor(given) as source:
            sent, combine = apart(source.array, target.array), operation(op, source.array)
            if isinstance(combine, ReduceOp):
                self._communicator.reduce_scatter(sent, target.array, combine)
                return
            parts = sent.new_empty((self.size(), target.array.numel()))
            self._communicator.all_to_all(sent, parts)
            combine.reduce(parts.numpy(), axis=0, out=target.array.numpy())  # type: ignore[attr-defined]

    # ------------------------------------------------------------ moving

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> GroupWork:
        """See torch."""
        opts = opts or dist.BroadcastOptions()

        def action() -> None:
            for tensor in tensors:
                with FlatTensor(tensor, writes=opts.rootRank != self.rank()) as flat:
                    self._communicator.broadcast(flat.array, opts.rootRank)

        return self._run(action, opts, tensors)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        """See torch."""

        def action() -> None:
            for parts, given in zip(outputs, inputs, strict=True):
                check_parts(parts, given, self.size(), "all_gather")
                with FlatTensor(given) as source:
                    found = source.array.new_empty((self.size(), source.array.numel()))
                    self._communicator.all_gather(source.array, found)
                    hand_out(found, parts)

        return self._run(action, opts, [each for parts in outputs for each in parts])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        """See torch; ``outputs`` has one list of results per rank."""
        if len(outputs) != self.size() or any(len(each) != len(inputs) for each in outputs):
            raise ArrayError(f"all_gather_coalesced needs {self.size()} lists of {len(inputs)} tensors.")
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> GroupWork:
        """See torch."""
        return self._run(lambda: self._all_gather(output, given), opts, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        """See torch."""

        def action() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                self._all_gather(output, given)

        return self._run(action, opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, output: Tensor, given: Tensor) -> None:
        check_same_dtype(output, given, "all_gather")
        with FlatTensor(output, writes=True) as target, FlatTensor(given) as source:
            offset = self.rank() * source.array.numel()
            self._communicator.all_gather(apart(source.array, target.array, offset), target.array)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> GroupWork:
        """See torch."""
        is_root = opts.rootRank == self.rank()

        def action() -> None:
            for index, given in enumerate(inputs):
                with FlatTensor(given) as source:
                    found = None
                    if is_root:
                        check_parts(outputs[index], given, self.size(), "gather")
                        found = source.array.new_empty((self.size(), source.array.numel()))
                    self._communicator.gather(source.array, found, opts.rootRank)
                    if found is not None:
                        hand_out(found, outputs[index])

        return self._run(action, opts, [each for parts in outputs for each in parts])

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> GroupWork:
        """See torch."""
        is_root = opts.rootRank == self.rank()

        def action() -> None:
            for index, output in enumerate(outputs):
                with FlatTensor(output, writes=True) as target:
                    sent = None
                    if is_root:
                        parts = inputs[index]
                        check_parts(parts, output, self.size(), "scatter")
                        with FlatTensor(torch.cat([part.reshape(-1) for part in parts])) as source:
                            sent = source.array
                    self._communicator.scatter(sent, target.array, opts.rootRank)

        return self._run(action, opts, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> GroupWork:
        """See torch; the sizes count rows, and without sizes each rank gets the same number."""

        def action() -> None:
            check_same_dtype(output, given, "all_to_all")
            with FlatTensor(output, writes=True) as target, FlatTensor(given) as source:
                sent = apart(source.array, target.array, None)
                self._exchange(
                    split_rows(sent, given.shape, input_sizes, self.size(), "input"),
                    split_rows(target.array, output.shape, output_sizes, self.size(), "output"),
                )

        return self._run(action, opts, [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> GroupWork:
        """See torch; the tensors may be of different sizes."""
        if len(outputs) != self.size() or len(inputs) != self.size():
            raise ArrayError(f"all_to_all needs {self.size()} tensors to send and as many to fill.")

        def action() -> None:
            with contextlib.ExitStack() as stack:
                targets = [stack.enter_context(FlatTensor(each, writes=True)).array for each in outputs]
                sources = [stack.enter_context(FlatTensor(each)).array for each in inputs]
                self._exchange(sources, targets)

        return self._run(action, opts, outputs)

    def _exchange(self, send: Sequence[Tensor], recv: Sequence[Tensor]) -> None:
        sources, targets = [describe(each) for each in send], [describe(each) for each in recv]
        if len({each.dtype for each in (*sources, *targets)}) > 1:
            raise ArrayError("all_to_all needs tensors of one dtype.")
        flats = [each.flat for each in sources], [each.flat for each in targets]
        self._communicator.all_to_all_pieces(*flats, sources[0].dtype)

    def barrier(self, opts: Any = None) -> GroupWork:
        """See torch."""
        return self._run(lambda: self._communicator.barrier(), opts or dist.BarrierOptions(), [])

    # ------------------------------------------------------------ messages

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> GroupWork:
        """See torch; it completes once the other rank has called recv for the message."""
        self.membership.check_peer(peer)
        return self._message(self._messages.send, tensors, peer, tag, writes=False)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> GroupWork:
        """See torch."""
        self.membership.check_peer(peer)
        return self._message(self._messages.receive, tensors, peer, tag, writes=True)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> GroupWork:
        """See torch."""
        return self._message(self._messages.receive, tensors, -1, tag, writes=True)

    def _message(
        self, begin: Callable[..., Message], tensors: Sequence[Tensor], peer: int, tag: int, *, writes: bool
    ) -> GroupWork:
        self._check()
        if not 0 <= tag <= _MOST_TAG:
            raise ArrayError(f"tag must be from 0 to {_MOST_TAG}; it is {tag}.")
        flats = [FlatTensor(each, writes=writes) for each in tensors]
        views = [describe(flat.array) for flat in flats]
        messages = [begin(view.flat.view(np.uint8).data, peer, tag, view.dtype, USER) for view in views]
        mode = _mode()

        def filled() -> None:
            with mode():
                for flat in flats:
                    flat.finish()

        return MessageWork(messages, tensors, self._calls_of_caller().callbacks, filled if writes else None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Waits until all ranks have called it, and names those that have not in time.

        Args:
            timeout: how long to wait; None for the group's timeout.
            wait_all_ranks: whether to name all ranks that did not call it, rather than the first.

        Raises:
            CollectiveTimeoutError: some ranks did not call it in time; raised on every rank that did.
        """
        self._check()
        timeout_s = timeout.total_seconds() if timeout else self._messages.timeout_s
        deadline = time.monotonic() + timeout_s
        if self.size() == 1:
            return
        missing = self._count_barrier(deadline) if self.rank() == 0 else self._come_to_barrier(deadline)
        if not missing:
            return
        named = missing if wait_all_ranks else missing[:1]
        names = ", ".join(peer_name(self.membership.peers[rank]) for rank in named)
        raise CollectiveTimeoutError(
            f"monitored_barrier in group {self.membership.group!r}: {names} did not come in {timeout_s:g} s.",
            remedy="See those workers' logs.",
        )

    def _count_barrier(self, deadline: float) -> list[int]:
        """Does rank 0's part of monitored_barrier: returns the missing ranks, and tells them to the others.

        Args:
            deadline: the time on the monotonic clock until which to wait, in seconds.
        """
        here = {r: self._messages.receive(_byte(), r, 0, "uint8", BARRIER) for r in range(1, self.size())}
        missing = []
        for rank, message in here.items():
            if not message.wait(max(0.0, deadline - time.monotonic())) or message.error is not None:
                missing.append(rank)
        answer = bytes(int(rank in missing) for rank in range(self.size()))
        answers = [
            self._messages.send(memoryview(answer), rank, 1, "uint8", BARRIER)
            for rank in here
            if rank not in missing
        ]
        for message in answers:
            message.wait(max(0.1, deadline - time.monotonic()))
        return missing

    def _come_to_barrier(self, deadline: float) -> list[int]:
        answer = memoryview(bytearray(self.size()))
        self._messages.send(_byte(), 0, 0, "uint8", BARRIER)
        heard = self._messages.receive(answer, 0, 1, "uint8", BARRIER)
        # Rank 0 waits just as long and then reports the missing ranks, which takes a moment.
        if not heard.wait(max(0.0, deadline - time.monotonic()) + 1.0) or heard.error is not None:
            return [0]
        return [rank for rank, flag in enumerate(answer) if flag]


@dataclass
class _OrderedCalls:
    """One caller's collectives, which have connections and an order of their own.

    Attributes:
        communicator: the connections.
        queue: the thread that runs asynchronous collectives.
        callbacks: runs the callbacks of these collectives.
        is_up: whether the connections are established; callbacks' connections are made at the first
            collective.
    """

    communicator: TcpCommunicator
    queue: WorkQueue
    callbacks: Callbacks
    is_up: bool


class GroupNamedGloo(MusterProcessGroup):
    """Muster's group in place of torch's Gloo group, with the attributes of Gloo that torch uses."""

    class _Options:
        """Takes the options that torch sets; they have no effect."""

    options: Any = None  # before torch 2.6 the inherited attribute cannot be set

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta = timedelta(minutes=30),
        **_options: object,  # Gloo's options, of which each version of torch has more
    ) -> None:
        self.options = self._Options()
        super().__init__(store, rank, size, timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: Muster numbers the calls anyway."""


_opened: dict[int, MusterProcessGroup] = {}
"""The groups that are not shut down, kept alive because C++ may hold a group that Python does not."""


@atexit.register
def _end_all() -> None:
    """Ends the groups of a program that ends without destroy_process_group().

    Other ranks may still be in a collective to which this rank has contributed its part. They go on, because
    the connection is closed with a goodbye instead of being lost.
    """
    for group in list(_opened.values()):
        group.end()
    close_peer_listeners()


def _agent_store() -> Any:
    """Connects to the listener of this program's agent."""
    host, _, port = os.environ["MUSTER_STORE"].rpartition(":")
    return dist.TCPStore(host, int(port), None, False, timeout=_AGENT_TIMEOUT, wait_for_workers=False)


def _byte() -> memoryview:
    return memoryview(bytearray(1))


def _mode() -> Callable[[], Any]:
    """Returns the mode in which another thread may write the caller's tensors: inference_mode or no_grad."""
    modes: tuple[Callable[[], Any], ...] = torch.no_grad, torch.inference_mode
    return modes[bool(torch.is_inference_mode_enabled())]

"""From the core's values to protobuf."""

from __future__ import annotations

from dataclasses import replace

from muster.rendezvous.v1 import rendezvous_pb2 as pb
from muster.scheduler.core import messages as m
from muster.scheduler.core import messages as v
from muster.scheduler.core.members import JobView, WorkerView

# ---------------------------------------------------------------- scheduler to worker


def encode_scheduler_message(message: m.Message) -> bytes:
    """Encodes one message to a worker as a serialized SchedulerMessage."""
    return _scheduler_message(message).SerializeToString()


def _scheduler_message(message: m.Message) -> pb.SchedulerMessage:
    if isinstance(message, m.Welcome):
        return pb.SchedulerMessage(
            welcome=pb.Welcome(
                heartbeat_interval_s=message.heartbeat_interval_s,
                node_timeout_s=message.node_timeout_s,
                topo_timeout_s=message.topo_timeout_s,
                spare=message.spare,
            )
        )
    if isinstance(message, m.Waiting):
        waiting = pb.Waiting(present=message.present, needed=message.needed, sentence=message.sentence)
        return pb.SchedulerMessage(waiting=waiting)
    if isinstance(message, m.Assignment):
        return pb.SchedulerMessage(assignment=_assignment(message))
    if isinstance(message, m.UniqueIds):
        ids = pb.UniqueIds(generation=message.generation, unique_ids=message.unique_ids)
        return pb.SchedulerMessage(unique_ids=ids)
    if isinstance(message, m.GroupBuilt):
        return pb.SchedulerMessage(group_built=pb.GroupBuilt(generation=message.generation))
    if isinstance(message, m.Probe):
        targets = [pb.ProbeTarget(node_id=node_id, address=address) for node_id, address in message.targets]
        return pb.SchedulerMessage(probe=pb.Probe(round=message.round, targets=targets))
    return _change_or_end(message)


def _change_or_end(message: m.Suspended | m.Quiesce | m.Refused | m.Ended) -> pb.SchedulerMessage:
    if isinstance(message, m.Suspended):
        suspended = pb.Suspended(
            generation=message.generation,
            reason=message.reason,
            wait_s=message.wait_s,
            first_loss=_first_loss(message.first_loss),
            save=message.save,
        )
        return pb.SchedulerMessage(suspended=suspended)
    if isinstance(message, m.Quiesce):
        return pb.SchedulerMessage(quiesce=pb.Quiesce(generation=message.generation, reason=message.reason))
    if isinstance(message, m.Refused):
        return pb.SchedulerMessage(
            refused=pb.Refused(code=pb.RefusalCode.Name(message.code), sentence=message.sentence)
        )
    loss = _first_loss(message.first_loss)
    ended = pb.Ended(ok=message.ok, reason=message.reason, leave=message.leave, first_loss=loss)
    return pb.SchedulerMessage(ended=ended)


def _first_loss(loss: m.FirstLoss | None) -> pb.FirstLoss | None:
    if loss is None:
        return None
    return pb.FirstLoss(
        node_id=loss.node_id,
        incarnation=loss.incarnation,
        sentence=loss.sentence,
        exit_code=loss.exit_code,
    )


def _assignment(message: m.Assignment) -> pb.Assignment:
    """Each host stands once, however many of its devices take part."""
    hosts = list(dict.fromkeys(member.candidate.host for member in message.members))
    index = {host: i for i, host in enumerate(hosts)}
    return pb.Assignment(
        generation=message.generation,
        rank=message.rank,
        hosts=[pb.Host(id=h.id, name=h.name, address=h.address, topology=h.topology) for h in hosts],
        members=[_member(each, index[each.candidate.host]) for each in message.members],
        state_source_rank=message.state_source_rank,
        newcomer_ranks=message.newcomer_ranks,
        unique_id_count=message.unique_id_count,
        reason=message.reason,
        switch_after_step=message.switch_after_step,
        lost=message.lost,
        launch=message.launch,
        first_loss=_first_loss(message.first_loss),
    )


def _member(member: v.Member, host_index: int) -> pb.Member:
    candidate = member.candidate
    return pb.Member(
        rank=member.rank,
        node_id=candidate.node_id,
        incarnation=candidate.incarnation,
        host_index=host_index,
        device=_device_message(candidate.device),
        local_rank=member.local_rank,
        local_world_size=member.local_world_size,
        data_address=candidate.data_address,
    )


def _device_message(device: v.Device) -> pb.Device:
    return pb.Device(kind=device.kind, index=device.index, pci_bus_id=device.pci_bus_id, model=device.model)


class AssignmentEncoder:
    """Encodes a generation's assignments, which differ between receivers in the rank alone.

    Building the list of members once makes 1,000 assignments of 1,000 members a matter of
    milliseconds each thousand, not of minutes.
    """

    def __init__(self) -> None:
        self._last: m.Assignment | None = None
        self._shared = b""

    def encode(self, message: m.Message) -> bytes:
        """Encodes any message; assignments that share their members share the work."""
        return b"".join(self.encode_parts(message))

    def encode_parts(self, message: m.Message) -> tuple[bytes, ...]:
        """Encodes any message in pieces to be joined; an assignment's receivers share the large piece.

        The small piece repeats the assignment's field with the rank alone: protobuf merges the two
        (Protocol Buffers, "Encoding": last one wins, and sub-messages are merged).
        """
        if not isinstance(message, m.Assignment):
            return (encode_scheduler_message(message),)
        if self._last is None or not _same_but_rank(self._last, message):
            self._last = message
            self._shared = encode_scheduler_message(replace(message, rank=0))
        own = pb.SchedulerMessage(assignment=pb.Assignment(rank=message.rank))
        return self._shared, own.SerializeToString()


def _same_but_rank(a: m.Assignment, b: m.Assignment) -> bool:
    return a.members is b.members and (
        (a.generation, a.state_source_rank, a.newcomer_ranks, a.unique_id_count)
        == (b.generation, b.state_source_rank, b.newcomer_ranks, b.unique_id_count)
        and (a.reason, a.switch_after_step, a.lost, a.launch)
        == (b.reason, b.switch_after_step, b.lost, b.launch)
        and a.first_loss == b.first_loss
    )


# ---------------------------------------------------------------- unary replies


def encode_drain_reply(sentence: str) -> bytes:
    """Encodes the answer to an operator's Drain."""
    return pb.DrainReply(sentence=sentence).SerializeToString()


def encode_status(view: JobView, *, uptime_s: float, version: str) -> bytes:
    """Encodes a job as a serialized StatusReply."""
    return pb.StatusReply(
        job_id=view.job_id,
        state=view.state,
        generation=view.generation,
        worker_num=view.worker_num,
        worker_min=view.worker_min,
        workers=[_worker_status(w) for w in view.workers],
        missing=view.missing,
        reason=view.reason,
        uptime_s=uptime_s,
        version=version,
    ).SerializeToString()


def _worker_status(worker: WorkerView) -> pb.WorkerStatus:
    candidate = worker.candidate
    status = pb.WorkerStatus(
        node_id=candidate.node_id,
        host_name=candidate.host.name,
        host_id=candidate.host.id,
        rank=worker.rank,
        local_rank=worker.local_rank,
        device=_device_message(candidate.device),
        silent_s=worker.silent_s,
        step=worker.step,
        samples_per_s=worker.samples_per_s,
        state=worker.state,
        topology=candidate.host.topology,
        address=candidate.host.address,
    )
    last = worker.last_collective
    if last is not None:
        status.last_collective.CopyFrom(
            pb.Collective(
                sequence=last.sequence,
                name=last.name,
                group=last.group,
                dtype=last.dtype,
                size_bytes=last.size_bytes,
                done=last.done,
            )
        )
    return status

from muster.wire.v1 import rendezvous_pb2 as _rendezvous_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("overview", "roster", "progress", "happenings")
    OVERVIEW_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    HAPPENINGS_FIELD_NUMBER: _ClassVar[int]
    overview: Overview
    roster: Roster
    progress: Progress
    happenings: Happenings
    def __init__(self, overview: _Optional[_Union[Overview, _Mapping]] = ..., roster: _Optional[_Union[Roster, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., happenings: _Optional[_Union[Happenings, _Mapping]] = ...) -> None: ...

class Overview(_message.Message):
    __slots__ = ("jobs", "started", "version", "validities")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VALIDITIES_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobLine]
    started: float
    version: str
    validities: _containers.RepeatedCompositeFieldContainer[Validity]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobLine, _Mapping]]] = ..., started: _Optional[float] = ..., version: _Optional[str] = ..., validities: _Optional[_Iterable[_Union[Validity, _Mapping]]] = ...) -> None: ...

class Validity(_message.Message):
    __slots__ = ("what", "not_after")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_FIELD_NUMBER: _ClassVar[int]
    what: str
    not_after: float
    def __init__(self, what: _Optional[str] = ..., not_after: _Optional[float] = ...) -> None: ...

class JobLine(_message.Message):
    __slots__ = ("job_id", "state", "generation", "members", "worker_num", "worker_min", "missing", "step", "furthest", "samples_per_s", "loss", "learning_rate", "began", "reason", "nccl_traffic", "evidence", "numbers", "steps", "remaining_s", "epoch", "epochs")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_NUM_FIELD_NUMBER: _ClassVar[int]
    WORKER_MIN_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FURTHEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NCCL_TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    state: str
    generation: int
    members: int
    worker_num: int
    worker_min: int
    missing: int
    step: int
    furthest: int
    samples_per_s: float
    loss: float
    learning_rate: float
    began: float
    reason: str
    nccl_traffic: str
    evidence: str
    numbers: _containers.ScalarMap[str, float]
    steps: int
    remaining_s: float
    epoch: int
    epochs: int
    def __init__(self, job_id: _Optional[str] = ..., state: _Optional[str] = ..., generation: _Optional[int] = ..., members: _Optional[int] = ..., worker_num: _Optional[int] = ..., worker_min: _Optional[int] = ..., missing: _Optional[int] = ..., step: _Optional[int] = ..., furthest: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., loss: _Optional[float] = ..., learning_rate: _Optional[float] = ..., began: _Optional[float] = ..., reason: _Optional[str] = ..., nccl_traffic: _Optional[str] = ..., evidence: _Optional[str] = ..., numbers: _Optional[_Mapping[str, float]] = ..., steps: _Optional[int] = ..., remaining_s: _Optional[float] = ..., epoch: _Optional[int] = ..., epochs: _Optional[int] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("number", "seats", "missing")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    number: int
    seats: _containers.RepeatedCompositeFieldContainer[Seat]
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., seats: _Optional[_Iterable[_Union[Seat, _Mapping]]] = ..., missing: _Optional[_Iterable[str]] = ...) -> None: ...

class Seat(_message.Message):
    __slots__ = ("node_id", "host_name", "host_id", "address", "topology", "device", "rank", "local_rank", "state", "pid", "certificate_ends", "fingerprint")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    host_name: str
    host_id: str
    address: str
    topology: str
    device: _rendezvous_pb2.Device
    rank: int
    local_rank: int
    state: str
    pid: int
    certificate_ends: float
    fingerprint: str
    def __init__(self, node_id: _Optional[str] = ..., host_name: _Optional[str] = ..., host_id: _Optional[str] = ..., address: _Optional[str] = ..., topology: _Optional[str] = ..., device: _Optional[_Union[_rendezvous_pb2.Device, _Mapping]] = ..., rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., state: _Optional[str] = ..., pid: _Optional[int] = ..., certificate_ends: _Optional[float] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("roster", "job", "step", "silent_s", "samples_per_s", "loss", "call", "sequence", "done", "calls", "copies", "seat_copies", "stragglers", "computed_s", "waited_s", "data_s", "gpus", "refused_gpus", "seconds_by_cause", "drains")
    class SecondsByCauseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    SEAT_COPIES_FIELD_NUMBER: _ClassVar[int]
    STRAGGLERS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    DATA_S_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_GPUS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_BY_CAUSE_FIELD_NUMBER: _ClassVar[int]
    DRAINS_FIELD_NUMBER: _ClassVar[int]
    roster: int
    job: JobLine
    step: _containers.RepeatedScalarFieldContainer[int]
    silent_s: _containers.RepeatedScalarFieldContainer[float]
    samples_per_s: _containers.RepeatedScalarFieldContainer[float]
    loss: _containers.RepeatedScalarFieldContainer[float]
    call: _containers.RepeatedScalarFieldContainer[int]
    sequence: _containers.RepeatedScalarFieldContainer[int]
    done: _containers.RepeatedScalarFieldContainer[bool]
    calls: _containers.RepeatedCompositeFieldContainer[_rendezvous_pb2.Collective]
    copies: _rendezvous_pb2.JobCopies
    seat_copies: _containers.RepeatedCompositeFieldContainer[SeatCopies]
    stragglers: _containers.RepeatedCompositeFieldContainer[_rendezvous_pb2.Straggler]
    computed_s: _containers.RepeatedScalarFieldContainer[float]
    waited_s: _containers.RepeatedScalarFieldContainer[float]
    data_s: _containers.RepeatedScalarFieldContainer[float]
    gpus: _containers.RepeatedCompositeFieldContainer[SeatGpu]
    refused_gpus: _containers.RepeatedCompositeFieldContainer[_rendezvous_pb2.RefusedGpu]
    seconds_by_cause: _containers.ScalarMap[str, float]
    drains: _containers.RepeatedCompositeFieldContainer[_rendezvous_pb2.PlannedDrain]
    def __init__(self, roster: _Optional[int] = ..., job: _Optional[_Union[JobLine, _Mapping]] = ..., step: _Optional[_Iterable[int]] = ..., silent_s: _Optional[_Iterable[float]] = ..., samples_per_s: _Optional[_Iterable[float]] = ..., loss: _Optional[_Iterable[float]] = ..., call: _Optional[_Iterable[int]] = ..., sequence: _Optional[_Iterable[int]] = ..., done: _Optional[_Iterable[bool]] = ..., calls: _Optional[_Iterable[_Union[_rendezvous_pb2.Collective, _Mapping]]] = ..., copies: _Optional[_Union[_rendezvous_pb2.JobCopies, _Mapping]] = ..., seat_copies: _Optional[_Iterable[_Union[SeatCopies, _Mapping]]] = ..., stragglers: _Optional[_Iterable[_Union[_rendezvous_pb2.Straggler, _Mapping]]] = ..., computed_s: _Optional[_Iterable[float]] = ..., waited_s: _Optional[_Iterable[float]] = ..., data_s: _Optional[_Iterable[float]] = ..., gpus: _Optional[_Iterable[_Union[SeatGpu, _Mapping]]] = ..., refused_gpus: _Optional[_Iterable[_Union[_rendezvous_pb2.RefusedGpu, _Mapping]]] = ..., seconds_by_cause: _Optional[_Mapping[str, float]] = ..., drains: _Optional[_Iterable[_Union[_rendezvous_pb2.PlannedDrain, _Mapping]]] = ...) -> None: ...

class SeatGpu(_message.Message):
    __slots__ = ("seat", "gpu")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    seat: int
    gpu: _rendezvous_pb2.GpuReport
    def __init__(self, seat: _Optional[int] = ..., gpu: _Optional[_Union[_rendezvous_pb2.GpuReport, _Mapping]] = ...) -> None: ...

class SeatCopies(_message.Message):
    __slots__ = ("seat", "snapshot", "checkpoint")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    seat: int
    snapshot: _rendezvous_pb2.SnapshotReport
    checkpoint: _rendezvous_pb2.CheckpointReport
    def __init__(self, seat: _Optional[int] = ..., snapshot: _Optional[_Union[_rendezvous_pb2.SnapshotReport, _Mapping]] = ..., checkpoint: _Optional[_Union[_rendezvous_pb2.CheckpointReport, _Mapping]] = ...) -> None: ...

class Happenings(_message.Message):
    __slots__ = ("happenings",)
    HAPPENINGS_FIELD_NUMBER: _ClassVar[int]
    happenings: _containers.RepeatedCompositeFieldContainer[Happening]
    def __init__(self, happenings: _Optional[_Iterable[_Union[Happening, _Mapping]]] = ...) -> None: ...

class Happening(_message.Message):
    __slots__ = ("number", "time", "kind", "code", "text", "job_id", "node_id", "rank", "generation", "host", "identity", "certificate", "peer", "count")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    number: int
    time: float
    kind: str
    code: str
    text: str
    job_id: str
    node_id: str
    rank: int
    generation: int
    host: str
    identity: str
    certificate: str
    peer: str
    count: int
    def __init__(self, number: _Optional[int] = ..., time: _Optional[float] = ..., kind: _Optional[str] = ..., code: _Optional[str] = ..., text: _Optional[str] = ..., job_id: _Optional[str] = ..., node_id: _Optional[str] = ..., rank: _Optional[int] = ..., generation: _Optional[int] = ..., host: _Optional[str] = ..., identity: _Optional[str] = ..., certificate: _Optional[str] = ..., peer: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class EndJobRequest(_message.Message):
    __slots__ = ("job_id", "reason")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    reason: str
    def __init__(self, job_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EndJobReply(_message.Message):
    __slots__ = ("sentence",)
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    sentence: str
    def __init__(self, sentence: _Optional[str] = ...) -> None: ...

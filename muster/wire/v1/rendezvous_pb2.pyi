from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_CODE_UNSPECIFIED: _ClassVar[RefusalCode]
    REFUSAL_CODE_SETTINGS_DIFFER: _ClassVar[RefusalCode]
    REFUSAL_CODE_JOB_FULL: _ClassVar[RefusalCode]
    REFUSAL_CODE_NODE_ID_TAKEN: _ClassVar[RefusalCode]
    REFUSAL_CODE_NOT_IN_RANK_TABLE: _ClassVar[RefusalCode]
    REFUSAL_CODE_SUPERSEDED: _ClassVar[RefusalCode]
    REFUSAL_CODE_JOB_ENDED: _ClassVar[RefusalCode]
    REFUSAL_CODE_TOPO_TIMEOUT: _ClassVar[RefusalCode]
    REFUSAL_CODE_MALFORMED: _ClassVar[RefusalCode]
    REFUSAL_CODE_NOT_PERMITTED: _ClassVar[RefusalCode]
    REFUSAL_CODE_EXPELLED: _ClassVar[RefusalCode]
    REFUSAL_CODE_GPU_FAILED: _ClassVar[RefusalCode]
REFUSAL_CODE_UNSPECIFIED: RefusalCode
REFUSAL_CODE_SETTINGS_DIFFER: RefusalCode
REFUSAL_CODE_JOB_FULL: RefusalCode
REFUSAL_CODE_NODE_ID_TAKEN: RefusalCode
REFUSAL_CODE_NOT_IN_RANK_TABLE: RefusalCode
REFUSAL_CODE_SUPERSEDED: RefusalCode
REFUSAL_CODE_JOB_ENDED: RefusalCode
REFUSAL_CODE_TOPO_TIMEOUT: RefusalCode
REFUSAL_CODE_MALFORMED: RefusalCode
REFUSAL_CODE_NOT_PERMITTED: RefusalCode
REFUSAL_CODE_EXPELLED: RefusalCode
REFUSAL_CODE_GPU_FAILED: RefusalCode

class Host(_message.Message):
    __slots__ = ("id", "name", "address", "topology")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    address: str
    topology: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., topology: _Optional[str] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("kind", "index", "pci_bus_id", "model")
    KIND_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PCI_BUS_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    kind: str
    index: int
    pci_bus_id: str
    model: str
    def __init__(self, kind: _Optional[str] = ..., index: _Optional[int] = ..., pci_bus_id: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("rank", "node_id", "incarnation", "host_index", "device", "local_rank", "local_world_size", "data_address")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_INDEX_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node_id: str
    incarnation: int
    host_index: int
    device: Device
    local_rank: int
    local_world_size: int
    data_address: str
    def __init__(self, rank: _Optional[int] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., host_index: _Optional[int] = ..., device: _Optional[_Union[Device, _Mapping]] = ..., local_rank: _Optional[int] = ..., local_world_size: _Optional[int] = ..., data_address: _Optional[str] = ...) -> None: ...

class Collective(_message.Message):
    __slots__ = ("sequence", "name", "group", "dtype", "size_bytes", "done")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    name: str
    group: str
    dtype: str
    size_bytes: int
    done: bool
    def __init__(self, sequence: _Optional[int] = ..., name: _Optional[str] = ..., group: _Optional[str] = ..., dtype: _Optional[str] = ..., size_bytes: _Optional[int] = ..., done: bool = ...) -> None: ...

class FirstLoss(_message.Message):
    __slots__ = ("node_id", "incarnation", "sentence", "exit_code")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    sentence: str
    exit_code: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., sentence: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("join", "publish_unique_ids", "built", "heartbeat", "quiesced", "suspect_peer", "request_leave", "leave", "late", "probed", "stacks")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_UNIQUE_IDS_FIELD_NUMBER: _ClassVar[int]
    BUILT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    QUIESCED_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_PEER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_LEAVE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    join: Join
    publish_unique_ids: PublishUniqueIds
    built: Built
    heartbeat: Heartbeat
    quiesced: Quiesced
    suspect_peer: SuspectPeer
    request_leave: RequestLeave
    leave: Leave
    late: Late
    probed: Probed
    stacks: Stacks
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., publish_unique_ids: _Optional[_Union[PublishUniqueIds, _Mapping]] = ..., built: _Optional[_Union[Built, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., quiesced: _Optional[_Union[Quiesced, _Mapping]] = ..., suspect_peer: _Optional[_Union[SuspectPeer, _Mapping]] = ..., request_leave: _Optional[_Union[RequestLeave, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., late: _Optional[_Union[Late, _Mapping]] = ..., probed: _Optional[_Union[Probed, _Mapping]] = ..., stacks: _Optional[_Union[Stacks, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("protocol_version", "job_id", "node_id", "incarnation", "worker_num", "worker_min", "spare", "host", "device", "local_index", "data_address", "held_generation", "held_rank", "built", "step", "facts", "backend", "held_world_size", "last_call_s", "takes_deltas", "gives_stacks", "probe_address", "gpu_uuid", "gpu_fault")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_NUM_FIELD_NUMBER: _ClassVar[int]
    WORKER_MIN_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HELD_GENERATION_FIELD_NUMBER: _ClassVar[int]
    HELD_RANK_FIELD_NUMBER: _ClassVar[int]
    BUILT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    HELD_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAST_CALL_S_FIELD_NUMBER: _ClassVar[int]
    TAKES_DELTAS_FIELD_NUMBER: _ClassVar[int]
    GIVES_STACKS_FIELD_NUMBER: _ClassVar[int]
    PROBE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    GPU_FAULT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    job_id: str
    node_id: str
    incarnation: int
    worker_num: int
    worker_min: int
    spare: bool
    host: Host
    device: Device
    local_index: int
    data_address: str
    held_generation: int
    held_rank: int
    built: bool
    step: int
    facts: _containers.ScalarMap[str, str]
    backend: str
    held_world_size: int
    last_call_s: float
    takes_deltas: bool
    gives_stacks: bool
    probe_address: str
    gpu_uuid: str
    gpu_fault: str
    def __init__(self, protocol_version: _Optional[int] = ..., job_id: _Optional[str] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., worker_num: _Optional[int] = ..., worker_min: _Optional[int] = ..., spare: bool = ..., host: _Optional[_Union[Host, _Mapping]] = ..., device: _Optional[_Union[Device, _Mapping]] = ..., local_index: _Optional[int] = ..., data_address: _Optional[str] = ..., held_generation: _Optional[int] = ..., held_rank: _Optional[int] = ..., built: bool = ..., step: _Optional[int] = ..., facts: _Optional[_Mapping[str, str]] = ..., backend: _Optional[str] = ..., held_world_size: _Optional[int] = ..., last_call_s: _Optional[float] = ..., takes_deltas: bool = ..., gives_stacks: bool = ..., probe_address: _Optional[str] = ..., gpu_uuid: _Optional[str] = ..., gpu_fault: _Optional[str] = ...) -> None: ...

class PublishUniqueIds(_message.Message):
    __slots__ = ("generation", "unique_ids")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_IDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    unique_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, generation: _Optional[int] = ..., unique_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Built(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("generation", "step", "samples_per_s", "started_step", "recent", "entered_generation", "loss", "pid", "learning_rate", "snapshot", "checkpoint", "times", "gpu", "checkpoints_s", "numbers", "steps", "epoch", "epochs")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    STARTED_STEP_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    ENTERED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_S_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    samples_per_s: float
    started_step: int
    recent: _containers.RepeatedCompositeFieldContainer[Collective]
    entered_generation: int
    loss: float
    pid: int
    learning_rate: float
    snapshot: SnapshotReport
    checkpoint: CheckpointReport
    times: _containers.RepeatedScalarFieldContainer[float]
    gpu: GpuReport
    checkpoints_s: float
    numbers: _containers.ScalarMap[str, float]
    steps: int
    epoch: int
    epochs: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., started_step: _Optional[int] = ..., recent: _Optional[_Iterable[_Union[Collective, _Mapping]]] = ..., entered_generation: _Optional[int] = ..., loss: _Optional[float] = ..., pid: _Optional[int] = ..., learning_rate: _Optional[float] = ..., snapshot: _Optional[_Union[SnapshotReport, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointReport, _Mapping]] = ..., times: _Optional[_Iterable[float]] = ..., gpu: _Optional[_Union[GpuReport, _Mapping]] = ..., checkpoints_s: _Optional[float] = ..., numbers: _Optional[_Mapping[str, float]] = ..., steps: _Optional[int] = ..., epoch: _Optional[int] = ..., epochs: _Optional[int] = ...) -> None: ...

class GpuReport(_message.Message):
    __slots__ = ("state", "reasons", "busy_percent", "used_mb", "total_mb", "clock_mhz", "celsius", "uncorrected_errors", "nvlink_errors", "remapped_rows", "xids")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    BUSY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    USED_MB_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MB_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    CELSIUS_FIELD_NUMBER: _ClassVar[int]
    UNCORRECTED_ERRORS_FIELD_NUMBER: _ClassVar[int]
    NVLINK_ERRORS_FIELD_NUMBER: _ClassVar[int]
    REMAPPED_ROWS_FIELD_NUMBER: _ClassVar[int]
    XIDS_FIELD_NUMBER: _ClassVar[int]
    state: str
    reasons: _containers.RepeatedScalarFieldContainer[str]
    busy_percent: int
    used_mb: int
    total_mb: int
    clock_mhz: int
    celsius: int
    uncorrected_errors: int
    nvlink_errors: int
    remapped_rows: int
    xids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, state: _Optional[str] = ..., reasons: _Optional[_Iterable[str]] = ..., busy_percent: _Optional[int] = ..., used_mb: _Optional[int] = ..., total_mb: _Optional[int] = ..., clock_mhz: _Optional[int] = ..., celsius: _Optional[int] = ..., uncorrected_errors: _Optional[int] = ..., nvlink_errors: _Optional[int] = ..., remapped_rows: _Optional[int] = ..., xids: _Optional[_Iterable[int]] = ...) -> None: ...

class SnapshotReport(_message.Message):
    __slots__ = ("generation", "agreed", "taken", "complete", "passed", "age_s", "size_bytes", "seconds", "partners")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PARTNERS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    agreed: int
    taken: int
    complete: bool
    passed: int
    age_s: float
    size_bytes: int
    seconds: float
    partners: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generation: _Optional[int] = ..., agreed: _Optional[int] = ..., taken: _Optional[int] = ..., complete: bool = ..., passed: _Optional[int] = ..., age_s: _Optional[float] = ..., size_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., partners: _Optional[_Iterable[int]] = ...) -> None: ...

class CheckpointReport(_message.Message):
    __slots__ = ("step", "age_s", "size_bytes", "seconds")
    STEP_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    age_s: float
    size_bytes: int
    seconds: float
    def __init__(self, step: _Optional[int] = ..., age_s: _Optional[float] = ..., size_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Quiesced(_message.Message):
    __slots__ = ("generation", "last_started_step")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAST_STARTED_STEP_FIELD_NUMBER: _ClassVar[int]
    generation: int
    last_started_step: int
    def __init__(self, generation: _Optional[int] = ..., last_started_step: _Optional[int] = ...) -> None: ...

class SuspectPeer(_message.Message):
    __slots__ = ("generation", "rank", "detail")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    detail: str
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class Late(_message.Message):
    __slots__ = ("generation", "seconds")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    seconds: float
    def __init__(self, generation: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Probed(_message.Message):
    __slots__ = ("round", "unreached", "late", "waits", "busy", "seconds")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    round: int
    unreached: _containers.RepeatedCompositeFieldContainer[Unreached]
    late: bool
    waits: bool
    busy: str
    seconds: float
    def __init__(self, round: _Optional[int] = ..., unreached: _Optional[_Iterable[_Union[Unreached, _Mapping]]] = ..., late: bool = ..., waits: bool = ..., busy: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Unreached(_message.Message):
    __slots__ = ("node_id", "detail")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    detail: str
    def __init__(self, node_id: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Stacks(_message.Message):
    __slots__ = ("request", "text")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    request: int
    text: str
    def __init__(self, request: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class RequestLeave(_message.Message):
    __slots__ = ("generation", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("generation", "finished", "reason", "consequence", "exit_code", "gpu_fault")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CONSEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    GPU_FAULT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    finished: bool
    reason: str
    consequence: bool
    exit_code: int
    gpu_fault: str
    def __init__(self, generation: _Optional[int] = ..., finished: bool = ..., reason: _Optional[str] = ..., consequence: bool = ..., exit_code: _Optional[int] = ..., gpu_fault: _Optional[str] = ...) -> None: ...

class SchedulerMessage(_message.Message):
    __slots__ = ("welcome", "waiting", "assignment", "unique_ids", "suspended", "quiesce", "refused", "ended", "group_built", "probe", "snapshot_word", "stacks_wanted")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_IDS_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    QUIESCE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    GROUP_BUILT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_WORD_FIELD_NUMBER: _ClassVar[int]
    STACKS_WANTED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    waiting: Waiting
    assignment: Assignment
    unique_ids: UniqueIds
    suspended: Suspended
    quiesce: Quiesce
    refused: Refused
    ended: Ended
    group_built: GroupBuilt
    probe: Probe
    snapshot_word: SnapshotWord
    stacks_wanted: StacksWanted
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., unique_ids: _Optional[_Union[UniqueIds, _Mapping]] = ..., suspended: _Optional[_Union[Suspended, _Mapping]] = ..., quiesce: _Optional[_Union[Quiesce, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., group_built: _Optional[_Union[GroupBuilt, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., snapshot_word: _Optional[_Union[SnapshotWord, _Mapping]] = ..., stacks_wanted: _Optional[_Union[StacksWanted, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("heartbeat_interval_s", "node_timeout_s", "topo_timeout_s", "spare", "waiting_interval_s", "version")
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    NODE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    TOPO_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    WAITING_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval_s: float
    node_timeout_s: float
    topo_timeout_s: float
    spare: bool
    waiting_interval_s: float
    version: str
    def __init__(self, heartbeat_interval_s: _Optional[float] = ..., node_timeout_s: _Optional[float] = ..., topo_timeout_s: _Optional[float] = ..., spare: bool = ..., waiting_interval_s: _Optional[float] = ..., version: _Optional[str] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("present", "needed", "sentence", "finished_ranks", "undecided")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_RANKS_FIELD_NUMBER: _ClassVar[int]
    UNDECIDED_FIELD_NUMBER: _ClassVar[int]
    present: int
    needed: int
    sentence: str
    finished_ranks: _containers.RepeatedScalarFieldContainer[int]
    undecided: bool
    def __init__(self, present: _Optional[int] = ..., needed: _Optional[int] = ..., sentence: _Optional[str] = ..., finished_ranks: _Optional[_Iterable[int]] = ..., undecided: bool = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("generation", "rank", "members", "state_source_rank", "newcomer_ranks", "unique_id_count", "reason", "switch_after_step", "lost", "hosts", "launch", "first_loss", "packed", "base", "kept")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STATE_SOURCE_RANK_FIELD_NUMBER: _ClassVar[int]
    NEWCOMER_RANKS_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_ID_COUNT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SWITCH_AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOSS_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    state_source_rank: int
    newcomer_ranks: _containers.RepeatedScalarFieldContainer[int]
    unique_id_count: int
    reason: str
    switch_after_step: int
    lost: _containers.RepeatedScalarFieldContainer[str]
    hosts: _containers.RepeatedCompositeFieldContainer[Host]
    launch: int
    first_loss: FirstLoss
    packed: bytes
    base: int
    kept: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., state_source_rank: _Optional[int] = ..., newcomer_ranks: _Optional[_Iterable[int]] = ..., unique_id_count: _Optional[int] = ..., reason: _Optional[str] = ..., switch_after_step: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ..., hosts: _Optional[_Iterable[_Union[Host, _Mapping]]] = ..., launch: _Optional[int] = ..., first_loss: _Optional[_Union[FirstLoss, _Mapping]] = ..., packed: _Optional[bytes] = ..., base: _Optional[int] = ..., kept: _Optional[_Iterable[int]] = ...) -> None: ...

class UniqueIds(_message.Message):
    __slots__ = ("generation", "unique_ids")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_IDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    unique_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, generation: _Optional[int] = ..., unique_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Suspended(_message.Message):
    __slots__ = ("generation", "reason", "wait_s", "first_loss", "save")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOSS_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    reason: str
    wait_s: float
    first_loss: FirstLoss
    save: bool
    def __init__(self, generation: _Optional[int] = ..., reason: _Optional[str] = ..., wait_s: _Optional[float] = ..., first_loss: _Optional[_Union[FirstLoss, _Mapping]] = ..., save: bool = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("round", "targets")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    round: int
    targets: _containers.RepeatedCompositeFieldContainer[ProbeTarget]
    def __init__(self, round: _Optional[int] = ..., targets: _Optional[_Iterable[_Union[ProbeTarget, _Mapping]]] = ...) -> None: ...

class StacksWanted(_message.Message):
    __slots__ = ("request", "limit_bytes")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    request: int
    limit_bytes: int
    def __init__(self, request: _Optional[int] = ..., limit_bytes: _Optional[int] = ...) -> None: ...

class ProbeTarget(_message.Message):
    __slots__ = ("node_id", "address")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Quiesce(_message.Message):
    __slots__ = ("generation", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SnapshotWord(_message.Message):
    __slots__ = ("generation", "complete", "next")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    complete: int
    next: int
    def __init__(self, generation: _Optional[int] = ..., complete: _Optional[int] = ..., next: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "sentence")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    code: RefusalCode
    sentence: str
    def __init__(self, code: _Optional[_Union[RefusalCode, str]] = ..., sentence: _Optional[str] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("ok", "reason", "leave", "first_loss")
    OK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOSS_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    reason: str
    leave: bool
    first_loss: FirstLoss
    def __init__(self, ok: bool = ..., reason: _Optional[str] = ..., leave: bool = ..., first_loss: _Optional[_Union[FirstLoss, _Mapping]] = ...) -> None: ...

class GroupBuilt(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("node_id", "host_name", "host_id", "rank", "local_rank", "device", "silent_s", "step", "samples_per_s", "state", "last_collective", "topology", "address", "pid", "loss", "snapshot", "checkpoint", "shares", "gpu", "gpu_age_s")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAST_COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    GPU_AGE_S_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    host_name: str
    host_id: str
    rank: int
    local_rank: int
    device: Device
    silent_s: float
    step: int
    samples_per_s: float
    state: str
    last_collective: Collective
    topology: str
    address: str
    pid: int
    loss: float
    snapshot: SnapshotReport
    checkpoint: CheckpointReport
    shares: StepShares
    gpu: GpuReport
    gpu_age_s: float
    def __init__(self, node_id: _Optional[str] = ..., host_name: _Optional[str] = ..., host_id: _Optional[str] = ..., rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., device: _Optional[_Union[Device, _Mapping]] = ..., silent_s: _Optional[float] = ..., step: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., state: _Optional[str] = ..., last_collective: _Optional[_Union[Collective, _Mapping]] = ..., topology: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., loss: _Optional[float] = ..., snapshot: _Optional[_Union[SnapshotReport, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointReport, _Mapping]] = ..., shares: _Optional[_Union[StepShares, _Mapping]] = ..., gpu: _Optional[_Union[GpuReport, _Mapping]] = ..., gpu_age_s: _Optional[float] = ...) -> None: ...

class StepShares(_message.Message):
    __slots__ = ("computed", "waited", "data")
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    computed: float
    waited: float
    data: float
    def __init__(self, computed: _Optional[float] = ..., waited: _Optional[float] = ..., data: _Optional[float] = ...) -> None: ...

class Straggler(_message.Message):
    __slots__ = ("node_id", "rank", "kind", "since_s", "excess_s", "slowdown", "peer_rank", "sentence")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    EXCESS_S_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_FIELD_NUMBER: _ClassVar[int]
    PEER_RANK_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    rank: int
    kind: str
    since_s: float
    excess_s: float
    slowdown: float
    peer_rank: int
    sentence: str
    def __init__(self, node_id: _Optional[str] = ..., rank: _Optional[int] = ..., kind: _Optional[str] = ..., since_s: _Optional[float] = ..., excess_s: _Optional[float] = ..., slowdown: _Optional[float] = ..., peer_rank: _Optional[int] = ..., sentence: _Optional[str] = ...) -> None: ...

class JobCopies(_message.Message):
    __slots__ = ("snapshot_step", "snapshot_age_s", "snapshot_bytes", "snapshot_seconds", "checkpoint", "checkpoint_rank")
    SNAPSHOT_STEP_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_RANK_FIELD_NUMBER: _ClassVar[int]
    snapshot_step: int
    snapshot_age_s: float
    snapshot_bytes: int
    snapshot_seconds: float
    checkpoint: CheckpointReport
    checkpoint_rank: int
    def __init__(self, snapshot_step: _Optional[int] = ..., snapshot_age_s: _Optional[float] = ..., snapshot_bytes: _Optional[int] = ..., snapshot_seconds: _Optional[float] = ..., checkpoint: _Optional[_Union[CheckpointReport, _Mapping]] = ..., checkpoint_rank: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("job_id", "state", "generation", "worker_num", "worker_min", "workers", "missing", "reason", "uptime_s", "version", "leader", "nccl_traffic", "copies", "stragglers", "drains", "seconds_by_cause", "numbers", "steps", "remaining_s", "epoch", "epochs", "evidence", "refused_gpus")
    class SecondsByCauseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
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
    WORKER_NUM_FIELD_NUMBER: _ClassVar[int]
    WORKER_MIN_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    NCCL_TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    STRAGGLERS_FIELD_NUMBER: _ClassVar[int]
    DRAINS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_BY_CAUSE_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_GPUS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    state: str
    generation: int
    worker_num: int
    worker_min: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    missing: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    uptime_s: float
    version: str
    leader: str
    nccl_traffic: str
    copies: JobCopies
    stragglers: _containers.RepeatedCompositeFieldContainer[Straggler]
    drains: _containers.RepeatedCompositeFieldContainer[PlannedDrain]
    seconds_by_cause: _containers.ScalarMap[str, float]
    numbers: _containers.ScalarMap[str, float]
    steps: int
    remaining_s: float
    epoch: int
    epochs: int
    evidence: str
    refused_gpus: _containers.RepeatedCompositeFieldContainer[RefusedGpu]
    def __init__(self, job_id: _Optional[str] = ..., state: _Optional[str] = ..., generation: _Optional[int] = ..., worker_num: _Optional[int] = ..., worker_min: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., missing: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., uptime_s: _Optional[float] = ..., version: _Optional[str] = ..., leader: _Optional[str] = ..., nccl_traffic: _Optional[str] = ..., copies: _Optional[_Union[JobCopies, _Mapping]] = ..., stragglers: _Optional[_Iterable[_Union[Straggler, _Mapping]]] = ..., drains: _Optional[_Iterable[_Union[PlannedDrain, _Mapping]]] = ..., seconds_by_cause: _Optional[_Mapping[str, float]] = ..., numbers: _Optional[_Mapping[str, float]] = ..., steps: _Optional[int] = ..., remaining_s: _Optional[float] = ..., epoch: _Optional[int] = ..., epochs: _Optional[int] = ..., evidence: _Optional[str] = ..., refused_gpus: _Optional[_Iterable[_Union[RefusedGpu, _Mapping]]] = ...) -> None: ...

class RefusedGpu(_message.Message):
    __slots__ = ("gpu", "host_name", "host_id", "address", "node_id", "device_index", "reason")
    GPU_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    gpu: str
    host_name: str
    host_id: str
    address: str
    node_id: str
    device_index: int
    reason: str
    def __init__(self, gpu: _Optional[str] = ..., host_name: _Optional[str] = ..., host_id: _Optional[str] = ..., address: _Optional[str] = ..., node_id: _Optional[str] = ..., device_index: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class JobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JobSummary(_message.Message):
    __slots__ = ("job_id", "state", "generation", "members", "worker_num", "step")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_NUM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    state: str
    generation: int
    members: int
    worker_num: int
    step: int
    def __init__(self, job_id: _Optional[str] = ..., state: _Optional[str] = ..., generation: _Optional[int] = ..., members: _Optional[int] = ..., worker_num: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class JobsReply(_message.Message):
    __slots__ = ("jobs", "version")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobSummary]
    version: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobSummary, _Mapping]]] = ..., version: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("job_id", "node_id", "reason", "node_ids", "hosts", "at_s", "cancel", "preview")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    node_id: str
    reason: str
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    hosts: _containers.RepeatedScalarFieldContainer[str]
    at_s: float
    cancel: bool
    preview: bool
    def __init__(self, job_id: _Optional[str] = ..., node_id: _Optional[str] = ..., reason: _Optional[str] = ..., node_ids: _Optional[_Iterable[str]] = ..., hosts: _Optional[_Iterable[str]] = ..., at_s: _Optional[float] = ..., cancel: bool = ..., preview: bool = ...) -> None: ...

class PlannedDrain(_message.Message):
    __slots__ = ("number", "at_s", "node_ids", "hosts", "reason")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    at_s: float
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    hosts: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, number: _Optional[int] = ..., at_s: _Optional[float] = ..., node_ids: _Optional[_Iterable[str]] = ..., hosts: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("sentence",)
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    sentence: str
    def __init__(self, sentence: _Optional[str] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("job_id", "name")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    name: str
    def __init__(self, job_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class AdmitReply(_message.Message):
    __slots__ = ("sentence",)
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    sentence: str
    def __init__(self, sentence: _Optional[str] = ...) -> None: ...

class StacksRequest(_message.Message):
    __slots__ = ("job_id", "node_id")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    node_id: str
    def __init__(self, job_id: _Optional[str] = ..., node_id: _Optional[str] = ...) -> None: ...

class StacksReply(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStacks]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStacks, _Mapping]]] = ...) -> None: ...

class WorkerStacks(_message.Message):
    __slots__ = ("node_id", "rank", "host_name", "text", "obstacle")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    rank: int
    host_name: str
    text: str
    obstacle: str
    def __init__(self, node_id: _Optional[str] = ..., rank: _Optional[int] = ..., host_name: _Optional[str] = ..., text: _Optional[str] = ..., obstacle: _Optional[str] = ...) -> None: ...

class ProcessEndedRequest(_message.Message):
    __slots__ = ("job_id", "node_id", "incarnation", "detail")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    node_id: str
    incarnation: int
    detail: str
    def __init__(self, job_id: _Optional[str] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class ProcessEndedReply(_message.Message):
    __slots__ = ("gone",)
    GONE_FIELD_NUMBER: _ClassVar[int]
    gone: bool
    def __init__(self, gone: bool = ...) -> None: ...

from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StoreKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORE_KIND_UNSPECIFIED: _ClassVar[StoreKind]
    STORE_KIND_SET: _ClassVar[StoreKind]
    STORE_KIND_COMPARE_SET: _ClassVar[StoreKind]
    STORE_KIND_GET: _ClassVar[StoreKind]
    STORE_KIND_ADD: _ClassVar[StoreKind]
    STORE_KIND_CHECK: _ClassVar[StoreKind]
    STORE_KIND_WAIT: _ClassVar[StoreKind]
    STORE_KIND_NUM_KEYS: _ClassVar[StoreKind]
    STORE_KIND_DELETE: _ClassVar[StoreKind]
    STORE_KIND_APPEND: _ClassVar[StoreKind]
    STORE_KIND_MULTI_GET: _ClassVar[StoreKind]
    STORE_KIND_MULTI_SET: _ClassVar[StoreKind]
    STORE_KIND_QUEUE_PUSH: _ClassVar[StoreKind]
    STORE_KIND_QUEUE_POP: _ClassVar[StoreKind]
    STORE_KIND_QUEUE_LEN: _ClassVar[StoreKind]
    STORE_KIND_LIST_KEYS: _ClassVar[StoreKind]

class StoreStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORE_STATUS_OK: _ClassVar[StoreStatus]
    STORE_STATUS_TIMEOUT: _ClassVar[StoreStatus]
    STORE_STATUS_REFUSED: _ClassVar[StoreStatus]
STORE_KIND_UNSPECIFIED: StoreKind
STORE_KIND_SET: StoreKind
STORE_KIND_COMPARE_SET: StoreKind
STORE_KIND_GET: StoreKind
STORE_KIND_ADD: StoreKind
STORE_KIND_CHECK: StoreKind
STORE_KIND_WAIT: StoreKind
STORE_KIND_NUM_KEYS: StoreKind
STORE_KIND_DELETE: StoreKind
STORE_KIND_APPEND: StoreKind
STORE_KIND_MULTI_GET: StoreKind
STORE_KIND_MULTI_SET: StoreKind
STORE_KIND_QUEUE_PUSH: StoreKind
STORE_KIND_QUEUE_POP: StoreKind
STORE_KIND_QUEUE_LEN: StoreKind
STORE_KIND_LIST_KEYS: StoreKind
STORE_STATUS_OK: StoreStatus
STORE_STATUS_TIMEOUT: StoreStatus
STORE_STATUS_REFUSED: StoreStatus

class StoreOpen(_message.Message):
    __slots__ = ("job_id", "node_id", "incarnation", "generation")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    node_id: str
    incarnation: int
    generation: int
    def __init__(self, job_id: _Optional[str] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class StoreOperation(_message.Message):
    __slots__ = ("id", "kind", "keys", "values", "amount", "timeout_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    id: int
    kind: StoreKind
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    amount: int
    timeout_s: float
    def __init__(self, id: _Optional[int] = ..., kind: _Optional[_Union[StoreKind, str]] = ..., keys: _Optional[_Iterable[bytes]] = ..., values: _Optional[_Iterable[bytes]] = ..., amount: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class StoreEffect(_message.Message):
    __slots__ = ("number", "kind", "key", "value", "popped")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[StoreEffect.Kind]
        KIND_SET: _ClassVar[StoreEffect.Kind]
        KIND_APPEND: _ClassVar[StoreEffect.Kind]
        KIND_DELETE: _ClassVar[StoreEffect.Kind]
        KIND_PUSH: _ClassVar[StoreEffect.Kind]
        KIND_POP: _ClassVar[StoreEffect.Kind]
    KIND_UNSPECIFIED: StoreEffect.Kind
    KIND_SET: StoreEffect.Kind
    KIND_APPEND: StoreEffect.Kind
    KIND_DELETE: StoreEffect.Kind
    KIND_PUSH: StoreEffect.Kind
    KIND_POP: StoreEffect.Kind
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    POPPED_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: StoreEffect.Kind
    key: bytes
    value: bytes
    popped: int
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[_Union[StoreEffect.Kind, str]] = ..., key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., popped: _Optional[int] = ...) -> None: ...

class StoreReplay(_message.Message):
    __slots__ = ("effects", "count", "seen", "incomplete", "last")
    EFFECTS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    effects: _containers.RepeatedCompositeFieldContainer[StoreEffect]
    count: int
    seen: int
    incomplete: bool
    last: bool
    def __init__(self, effects: _Optional[_Iterable[_Union[StoreEffect, _Mapping]]] = ..., count: _Optional[int] = ..., seen: _Optional[int] = ..., incomplete: bool = ..., last: bool = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("open", "replay", "operations", "cancelled", "answered_below")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_BELOW_FIELD_NUMBER: _ClassVar[int]
    open: StoreOpen
    replay: StoreReplay
    operations: _containers.RepeatedCompositeFieldContainer[StoreOperation]
    cancelled: _containers.RepeatedScalarFieldContainer[int]
    answered_below: int
    def __init__(self, open: _Optional[_Union[StoreOpen, _Mapping]] = ..., replay: _Optional[_Union[StoreReplay, _Mapping]] = ..., operations: _Optional[_Iterable[_Union[StoreOperation, _Mapping]]] = ..., cancelled: _Optional[_Iterable[int]] = ..., answered_below: _Optional[int] = ...) -> None: ...

class StoreAnswer(_message.Message):
    __slots__ = ("id", "status", "values", "amount", "number", "popped", "sentence")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    POPPED_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    id: int
    status: StoreStatus
    values: _containers.RepeatedScalarFieldContainer[bytes]
    amount: int
    number: int
    popped: int
    sentence: str
    def __init__(self, id: _Optional[int] = ..., status: _Optional[_Union[StoreStatus, str]] = ..., values: _Optional[_Iterable[bytes]] = ..., amount: _Optional[int] = ..., number: _Optional[int] = ..., popped: _Optional[int] = ..., sentence: _Optional[str] = ...) -> None: ...

class StoreReply(_message.Message):
    __slots__ = ("opened", "answers", "seen")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    opened: StoreOpened
    answers: _containers.RepeatedCompositeFieldContainer[StoreAnswer]
    seen: int
    def __init__(self, opened: _Optional[_Union[StoreOpened, _Mapping]] = ..., answers: _Optional[_Iterable[_Union[StoreAnswer, _Mapping]]] = ..., seen: _Optional[int] = ...) -> None: ...

class StoreOpened(_message.Message):
    __slots__ = ("replay",)
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    replay: bool
    def __init__(self, replay: bool = ...) -> None: ...

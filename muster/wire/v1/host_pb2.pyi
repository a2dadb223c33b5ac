from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromHost(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[FromWorker]
    def __init__(self, items: _Optional[_Iterable[_Union[FromWorker, _Mapping]]] = ...) -> None: ...

class FromWorker(_message.Message):
    __slots__ = ("worker", "message", "gone")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    worker: int
    message: bytes
    gone: Gone
    def __init__(self, worker: _Optional[int] = ..., message: _Optional[bytes] = ..., gone: _Optional[_Union[Gone, _Mapping]] = ...) -> None: ...

class Gone(_message.Message):
    __slots__ = ("detail", "may_return")
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MAY_RETURN_FIELD_NUMBER: _ClassVar[int]
    detail: str
    may_return: bool
    def __init__(self, detail: _Optional[str] = ..., may_return: bool = ...) -> None: ...

class ToHost(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ToWorkers]
    def __init__(self, items: _Optional[_Iterable[_Union[ToWorkers, _Mapping]]] = ...) -> None: ...

class ToWorkers(_message.Message):
    __slots__ = ("workers", "message", "own", "closed")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[int]
    message: bytes
    own: _containers.RepeatedScalarFieldContainer[bytes]
    closed: Closed
    def __init__(self, workers: _Optional[_Iterable[int]] = ..., message: _Optional[bytes] = ..., own: _Optional[_Iterable[bytes]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("code", "detail")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    code: int
    detail: str
    def __init__(self, code: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

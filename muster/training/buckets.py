"""Plans which gradients are reduced together: a pure function from parameters to flat buckets.

One all_reduce per parameter would pay its latency hundreds of times. One all_reduce for all parameters could
only start when the backward pass is over. So gradients are packed into buckets, by this rule:

1. Parameters are taken in the order in which their gradients become ready, and never split.
2. A bucket holds one dtype. Each dtype has at most one bucket open at a time; it is closed when the next
   gradient of that dtype would take it beyond its cap. A gradient larger than the cap is alone in its bucket.
3. The first bucket of all has the small cap ``first_bytes``, so that communication starts early in the
   backward pass; all others have ``bucket_bytes``.
4. Buckets are numbered in the order in which they become full. All ranks start them in that order.

The plan depends only on the arguments, so every rank makes the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

DEFAULT_BUCKET_BYTES = 25 * 2**20
DEFAULT_FIRST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter: ``size`` counts elements, ``itemsize`` is bytes per element."""

    name: str
    size: int
    dtype: str
    itemsize: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place in its bucket; ``offset`` and ``size`` count elements."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced by one collective. ``size`` counts elements."""

    dtype: str
    slots: tuple[Slot, ...]
    size: int


def plan_buckets(
    parameters: Iterable[ParameterSpec],
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    first_bytes: int = DEFAULT_FIRST_BYTES,
) -> tuple[Bucket, ...]:
    """Packs parameters into buckets by the rule of this module.

    Args:
        parameters: in the order in which their gradients become ready.
        bucket_bytes: cap of a bucket, in bytes, > 0.
        first_bytes: cap of the first bucket, in bytes, > 0.

    Returns:
        The buckets in the order in which they become full.

    Raises:
        ValueError: a cap or a size is not positive, or a name comes twice.
    """
    if bucket_bytes <= 0 or first_bytes <= 0:
        raise ValueError(f"bucket caps must be > 0 bytes, not {bucket_bytes} and {first_bytes}")
    closed: list[_Open] = []
    open_buckets: dict[str, _Open] = {}
    for position, parameter in enumerate(_checked(parameters)):
        bucket = open_buckets.get(parameter.dtype)
        if bucket is None or not bucket.takes(parameter):
            if bucket is not None:
                closed.append(bucket)
            bucket = _Open(parameter.dtype, bucket_bytes if position else first_bytes)
            open_buckets[parameter.dtype] = bucket
        bucket.add(parameter, position)
    closed.extend(open_buckets.values())
    closed.sort(key=lambda bucket: bucket.last_position)
    return tuple(Bucket(bucket.dtype, tuple(bucket.slots), bucket.size) for bucket in closed)


@dataclass(slots=True)
class _Open:
    """A bucket while it is filled; ``last_position`` is that of the last gradient it waits for."""

    dtype: str
    cap_bytes: int
    slots: list[Slot] = field(default_factory=list)
    size: int = 0
    last_position: int = -1

    def takes(self, parameter: ParameterSpec) -> bool:
        return (self.size + parameter.size) * parameter.itemsize <= self.cap_bytes

    def add(self, parameter: ParameterSpec, position: int) -> None:
        self.slots.append(Slot(parameter.name, self.size, parameter.size))
        self.size += parameter.size
        self.last_position = position


def _checked(parameters: Iterable[ParameterSpec]) -> Iterator[ParameterSpec]:
    seen: set[str] = set()
    for parameter in parameters:
        if parameter.name in seen:
            raise ValueError(f"parameter {parameter.name!r} is given twice")
        if parameter.size < 0 or parameter.itemsize <= 0:
            sizes = f"{parameter.size} elements of {parameter.itemsize} bytes"
            raise ValueError(f"parameter {parameter.name!r} has {sizes}")
        seen.add(parameter.name)
        yield parameter

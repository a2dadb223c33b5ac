"""Immutable values without generated code.

A dataclass compiles its methods anew in every process, about half a millisecond each; with the fifty
kinds of messages and events here that would be a good part of a worker's start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Only type checkers look at it."""
        return lambda cls: cls


ValueT = TypeVar("ValueT", bound="Value")


@dataclass_transform(frozen_default=True)
class Value:
    """Base of immutable values: annotated names are fields, class attributes their defaults.

    Fields named in ``secret_fields`` do not stand in the representation.
    """

    secret_fields: ClassVar[tuple[str, ...]] = ()
    _fields: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        """Reads the fields off the annotations."""
        names = [name for name, kind in cls.__annotations__.items() if "ClassVar" not in str(kind)]
        cls._fields = tuple(names)
        cls._defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields = self._fields
        values = {**self._defaults, **dict(zip(fields, args)), **kwargs}  # noqa: B905 - checked below
        if len(values) != len(fields) or len(args) > len(fields) or not values.keys() <= set(fields):
            raise TypeError(f"{type(self).__name__} takes {', '.join(fields)}; it was given {list(values)}.")
        if kwargs and any(name in kwargs for name in fields[: len(args)]):
            raise TypeError(f"{type(self).__name__} was given a field twice.")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        """Values do not change."""
        raise AttributeError(f"{type(self).__name__}.{name} cannot be changed.")

    def __eq__(self, other: object) -> bool:
        """Same kind, same fields."""
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __hash__(self) -> int:
        """As equality."""
        return hash((type(self), *(self.__dict__[name] for name in self._fields)))

    def __repr__(self) -> str:
        """As it would be written, without the secrets."""
        shown = (f"{n}={self.__dict__[n]!r}" for n in self._fields if n not in self.secret_fields)
        return f"{type(self).__name__}({', '.join(shown)})"

    def replaced(self: ValueT, **changes: Any) -> ValueT:
        """A copy with some fields changed."""
        return type(self)(**{**self.__dict__, **changes})

"""A GPU of tests: each of its answers may be wrong, late or an error."""

from __future__ import annotations

from collections.abc import Callable

ASKED = ("wrong_words", "wrong_addresses", "wrong_sums", "wrong_copies")


class FakeGpu:
    """A GPU that is well, until a test says otherwise.

    Attributes:
        wrong: how much of each answer is wrong, by the method's name.
        errors: what each method raises.
        takes_s: how long each answer takes on the clock of the test.
        bad_pattern: the only pattern in which words differ; None: in all.
        tested_bytes: how much memory was tested.
    """

    def __init__(self, free_bytes: int = 4 << 30) -> None:
        self.wrong: dict[str, int] = {}
        self.errors: dict[str, Exception] = {}
        self.takes_s: dict[str, float] = {}
        self.bad_pattern: int | None = None
        self.tested_bytes: set[int] = set()
        self.now = 0.0
        self.asked: list[str] = []
        self._free_bytes = free_bytes

    def clock(self) -> float:
        return self.now

    def free_bytes(self) -> int:
        return self._answer("free_bytes", self._free_bytes)

    def wrong_words(self, pattern: int, size_bytes: int) -> int:
        self.tested_bytes.add(size_bytes)
        number = self._answer("wrong_words", self.wrong.get("wrong_words", 0))
        return number if self.bad_pattern in (None, pattern) else 0

    def wrong_addresses(self, size_bytes: int) -> int:
        return self._answer("wrong_addresses", self.wrong.get("wrong_addresses", 0))

    def wrong_sums(self) -> int:
        return self._answer("wrong_sums", self.wrong.get("wrong_sums", 0))

    def wrong_copies(self, size_bytes: int) -> int:
        return self._answer("wrong_copies", self.wrong.get("wrong_copies", 0))

    def _answer(self, name: str, value: int) -> int:
        self.asked.append(name)
        self.now += self.takes_s.get(name, 0.0)
        if name in self.errors:
            raise self.errors[name]
        return value


def hanging(wait: Callable[[], object]) -> FakeGpu:
    """A GPU whose first product never comes."""
    gpu = FakeGpu()

    def wrong_sums() -> int:
        wait()
        return 0

    gpu.wrong_sums = wrong_sums  # type: ignore[method-assign]
    return gpu

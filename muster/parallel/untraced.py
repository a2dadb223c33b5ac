"""What is said of a module whose forward pass is no graph."""

from __future__ import annotations

from muster.errors import WorkerError


class TraceError(WorkerError):
    """The module's forward pass is no graph that could be divided; names the line of its source.

    Attributes:
        line: such as ``model.py:12``, or "".
    """

    def __init__(self, message: str, *, line: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.line = line


class ForwardError(TraceError):
    """The module's forward pass does not even run on tensors like the example's."""


class WithoutGraph:
    """The plan of a module whose forward pass cannot be recorded: data parallelism, and why."""

    def __init__(self, verdict: str) -> None:
        self.verdict = verdict

    def __str__(self) -> str:
        """The verdict."""
        return self.verdict

    def why(self, name: str) -> str:
        """The verdict: there are no operators to ask about."""
        return self.verdict

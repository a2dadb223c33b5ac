"""The error and the plan of a module whose forward pass cannot be recorded as a graph."""

from __future__ import annotations

from muster.errors import WorkerError


class TraceError(WorkerError):
    """The forward pass cannot be recorded as a graph, so that a search could shard it.

    Attributes:
        line: the line of the source, such as ``model.py:12``, or "".
    """

    def __init__(self, message: str, *, line: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.line = line


class ForwardError(TraceError):
    """The module's forward pass fails on tensors like the example's."""


class WithoutGraph:
    """The plan of a module whose forward pass cannot be recorded: data parallelism, and the reason."""

    def __init__(self, verdict: str) -> None:
        self.verdict = verdict

    def __str__(self) -> str:
        """The verdict."""
        return self.verdict

    def why(self, name: str) -> str:
        """Returns the verdict, as the plan has no operators."""
        return self.verdict

"""Silences torch.export, as Muster reports its failures in one sentence."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

_LOGGERS = (
    "torch._export.non_strict_utils",
    "torch._subclasses.fake_tensor",
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
)


@contextlib.contextmanager
def exporter_is_quiet() -> Iterator[None]:
    """Context in which the exporter prints no warnings and no graphs from this thread.

    Messages of lower levels, which users turn on by ``TORCH_LOGS``, are kept.
    """
    thread = threading.get_ident()

    def wanted(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING or threading.get_ident() != thread

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    module: Any = importlib.import_module("torch.export._trace")  # it prints half a graph to stderr
    for logger in loggers:
        logger.addFilter(wanted)
    module.print = lambda *texts, **how: None if threading.get_ident() == thread else print(*texts, **how)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(wanted)
        del module.print

"""Keeps torch.export from writing beside the one sentence in which a failure of it is told."""

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
    """While a forward pass is recorded inside: no warnings and graphs of the exporter, from this thread.

    What it logs at lower levels, for those who set ``TORCH_LOGS``, stays.
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

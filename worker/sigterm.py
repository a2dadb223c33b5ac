"""SIGTERM within a block that has something better to do than to end the process by signal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def on_sigterm(react: Callable[[], None]) -> Iterator[None]:
    """Calls ``react`` at the first SIGTERM inside, where it would have ended the process; the second ends it.

    A script that has a handler of its own knows what to do, and only the main thread gets signals.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        react()

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

"""SIGTERM within a block that has something better to do than to end the process by signal."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

TWIN_S = 0.1
"""How long after a SIGTERM another is the same request.

GNU timeout, for one, sends it to the process and to its group, both at once.
"""


def absorb_twin() -> None:
    """Waits in a handler of SIGTERM until the signal's twin, if there is one, has come and gone.

    The caller sets the handler that is to be after it: until then there is one that does nothing.
    """
    signal.signal(signal.SIGTERM, _nothing)
    _pause()


def _pause() -> None:
    time.sleep(TWIN_S)


def _nothing(number: int, frame: FrameType | None) -> None:
    """The request is known."""


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
        absorb_twin()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        react()

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

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


def _absorb_twin() -> None:
    """Waits until the signal's twin, if there is one, has come and gone.

    The handler that is there afterwards is the caller's to set.
    """
    signal.signal(signal.SIGTERM, _nothing)
    _pause()


def _pause() -> None:
    time.sleep(TWIN_S)


def _nothing(number: int, frame: FrameType | None) -> None:
    """The request is known."""


@contextlib.contextmanager
def on_sigterm(react: Callable[[], None], *, before_own: bool = False) -> Iterator[None]:
    """Calls ``react`` at the first SIGTERM inside; the second does what it would have done outside.

    Only the main thread gets signals: in another, this does nothing.

    Args:
        react: called amid whatever the main thread is in.
        before_own: also where the script has a handler of its own. Otherwise that stays, since it knows what
            to do.
    """
    own = signal.getsignal(signal.SIGTERM)
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or own is None or (own is not signal.SIG_DFL and not before_own):
        yield  # None: it is not Python's, and could not be put back
        return

    def handler(number: int, frame: FrameType | None) -> None:
        _absorb_twin()
        signal.signal(signal.SIGTERM, own)
        react()

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, own)

"""SIGTERM within a block that has something better to do than to end the process by signal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


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
        signal.signal(signal.SIGTERM, own)
        react()

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, own)

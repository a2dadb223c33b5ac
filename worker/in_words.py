"""A script that does not catch a Muster error ends with its sentence and exit code, not with a traceback."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

from muster.worker.errors import WorkerError

_HERE = Path(__file__).parent
_BEGINNING = str(_HERE / "runtime.py"), str(_HERE / "training" / "datasets.py")
"""What is wrong there is a setting, wherever the script asks for it."""

_LIBRARIES = (f"{_HERE}{os.sep}", f"{Path(os.__file__).parent}{os.sep}", "<frozen")


def show_errors_in_words() -> None:
    """Lets the interpreter end so from now on, unless the script has an exception hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = in_words


def in_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows an error that nobody has caught: one of Muster's as a sentence, any other with its traceback.

    MS_LOG_LEVEL=DEBUG shows all of them with their tracebacks. So is one that Muster raised because of an
    error in the script's own code, which the traceback alone tells where to find.

    Raises:
        SystemExit: with the exit code of Muster's error.
    """
    if not isinstance(error, WorkerError):
        sys.__excepthook__(kind, error, trace)
        return
    if os.environ.get("MS_LOG_LEVEL", "").strip().upper() == "DEBUG" or _has_foreign_cause(error):
        sys.__excepthook__(kind, error, trace)
    else:
        print(f"muster: {_place(trace)}{error}", file=sys.stderr)
    sys.exit(error.exit_code)


def _has_foreign_cause(error: BaseException) -> bool:
    """Whether something caused it that is neither Muster's nor the system's."""
    from muster.certs.errors import CertificateError

    known = (WorkerError, CertificateError, OSError)
    cause = error.__cause__
    while cause is not None:
        if not isinstance(cause, known):
            return True
        cause = cause.__cause__
    return False


def _place(trace: TracebackType | None) -> str:
    """Where in the script it came up, for what is no setting: ``train.py, line 12: ``."""
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file in _BEGINNING:
            return ""
        if not file.startswith(_LIBRARIES) and "site-packages" not in file:
            place = f"{Path(file).name}, line {trace.tb_lineno}: "
        trace = trace.tb_next
    return place

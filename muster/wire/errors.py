"""The base of all packages' errors: a message, a remedy, an exit code."""

from __future__ import annotations


class RemediedError(Exception):
    """An error that says what happened, and what to do about it.

    Args:
        message: what happened, in one sentence.
        remedy: what the user can do about it; appended to the message.
    """

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.message = message
        self.remedy = remedy
        if remedy and not message.endswith((".", "!", "?", ":")):  # It may end with another library's words.
            message += "."
        super().__init__(f"{message} {remedy}".strip())

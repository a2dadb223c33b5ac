"""What errors have in common."""

from __future__ import annotations

import pytest

from muster.errors import ArrayError, WorkerError


@pytest.mark.parametrize(
    ("message", "remedy", "text"),
    [
        ("No module named 'nccl'", "Install it.", "No module named 'nccl'. Install it."),
        ("It is gone.", "Look for it.", "It is gone. Look for it."),
        ("Where is it?", "Look for it.", "Where is it? Look for it."),
        ("It is gone", "", "It is gone"),
    ],
)
def test_message_and_remedy_are_two_sentences(message: str, remedy: str, text: str) -> None:
    error = ArrayError(message, remedy=remedy)
    assert str(error) == text
    assert (error.message, error.remedy) == (message, remedy)
    assert isinstance(error, WorkerError)

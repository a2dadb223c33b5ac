"""The command line of ``muster run``: what is said about it before anything starts."""

from __future__ import annotations

import pytest

from muster.launch.options import parse


@pytest.mark.parametrize(
    ("command", "noted"),
    [
        (["torchrun", "ddp.py"], True),
        (["/opt/venv/bin/torchrun", "--nproc-per-node=2", "ddp.py"], True),
        (["torchrun", "--rdzv-backend=muster", "ddp.py"], False),
        (["torchrun", "--rdzv-backend", "muster", "ddp.py"], False),
        (["python", "torchrun.py"], False),
    ],
)
def test_a_launcher_within_the_launcher_is_noted(command: list[str], noted: bool) -> None:
    notes = parse(["-n", "2", "--", *command]).notes
    assert [note.startswith("torchrun starts processes") for note in notes] == [True] * noted


def test_nothing_is_noted_of_a_command_whose_kind_is_named() -> None:
    assert not parse(["-n", "2", "--program", "torch", "--", "torchrun", "ddp.py"]).notes

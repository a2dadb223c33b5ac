"""What runs of the ResNet-50 example say, and a run in which rank 0 is killed."""

from __future__ import annotations

import re


def closing(output: str) -> tuple[float, int, int]:
    """Images/s, captured steps and all steps; there must be one such line."""
    found = re.findall(
        r"([\d,.]+) (?:synthetic )?images/s on \d+ workers?.*; captured: ([\d,]+) of ([\d,]+) steps", output
    )
    assert len(found) == 1, output
    speed, captured, steps = (number.replace(",", "") for number in found[0])
    return float(speed), int(captured), int(steps)


def losses(output: str) -> dict[str, list[float]]:
    """What each rank that is shown has printed, by epoch and step."""
    found: dict[str, list[float]] = {}
    for where, loss in re.findall(r"(epoch: \d+ step: \d+), loss is (\d+\.\d{7})", output):
        found.setdefault(where, []).append(float(loss))
    return found


RANK_0_DIES = """
import os, signal
from pathlib import Path
from examples import resnet50_cifar10 as example

class Job(example.Job):
    def __init__(self, args, session, device):
        super().__init__(args, session, device)
        self.rank = session.rank

    def train_step(self, rows):
        mark = Path("rank-0-has-died")
        if self.rank == 0 and self.state.step == 8 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(rows)

example.Job = Job
example.main()
"""
"""The example as a script whose rank 0 is killed in the 9th step, once."""

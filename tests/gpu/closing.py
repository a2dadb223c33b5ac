"""Reads the line with which the ResNet-50 example ends."""

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

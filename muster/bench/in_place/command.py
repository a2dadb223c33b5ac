"""Kills ranks of torch programs whose other processes continue, and measures the time to the next good step.

The results after each loss must be those of an undisturbed run, bit for bit.

muster bench in-place --json results.json                # CPU: six kinds of programs, 20 kills each
muster bench in-place --kinds ddp fsdp2 --kills 5        # two of these kinds
muster bench in-place --gpu --kinds fsdp2 hsdp           # over NCCL, all ranks on the first GPU
muster bench in-place --kinds ddp hsdp --one-at-a-time --peer torchft --peer-python /path/to/its/python
muster bench in-place --group-cost                       # GPT-2's step time over a group that survives losses
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from muster.bench.in_place.cpu import KINDS, measure
from muster.bench.in_place.peer import PEER_KINDS, measure_peer
from muster.bench.launches import stopwatch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    option = parser.add_argument
    option("--gpu", action="store_true", help="use NCCL, with all ranks on the first GPU")
    option(
        "--group-cost", action="store_true", help="compare GPT-2 steps over torch's own group and Muster's"
    )
    option("--steps", type=int, default=30, metavar="N", help="with --group-cost: steps per turn (30)")
    option("--turns", type=int, default=6, metavar="N", help="with --group-cost: turns of each group (6)")
    option("--tiny", action="store_true", help="with --group-cost: a small net, also on a CPU")
    option("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="the programs to test (all)")
    option("--kills", type=int, default=20, metavar="N", help="kills per program (20)")
    option("--one-at-a-time", action="store_true", help="kill one rank at a time, as with a peer")
    option("--peer", choices=("torchft",), help="also test torchft, with ddp and hsdp")
    option("--peer-python", default=sys.executable, metavar="PROGRAM", help="a Python that has torchft")
    option("--every", type=int, default=10, metavar="N", help="steps between two copies (10)")
    option("--copies", type=int, default=2, metavar="N", help="copies of each rank's part (2)")
    option("--pace-ms", type=float, default=100, help="pause in each step in ms, at changing moments (100)")
    option("--seed", type=int, default=0, help="seed of the kills: which ranks, and when (0)")
    option("--keep", type=Path, metavar="DIR", help="keep logs and records there")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures and returns the results.

    Raises:
        RuntimeError: a program did not go on, or with other numbers; says how.
    """
    if options.group_cost:
        from muster.bench.in_place.group_cost import measure as measure_group

        return measure_group(steps=options.steps, turns=options.turns, tiny=options.tiny)
    say = stopwatch()
    with tempfile.TemporaryDirectory(prefix="muster-in-place-") as scratch:
        try:
            results = measure(options, Path(scratch), say)
            if options.peer:
                for kind in [each for each in options.kinds if each in PEER_KINDS]:
                    place = Path(scratch) / f"{options.peer}-{kind}"
                    results[f"{options.peer}-{kind}"] = measure_peer(kind, options, place, say)
            return results
        finally:
            if options.keep is not None:
                options.keep.mkdir(parents=True, exist_ok=True)
                for path in (*Path(scratch).rglob("*.log"), *Path(scratch).rglob("*.jsonl")):
                    shutil.copy(path, options.keep / "-".join(path.relative_to(scratch).parts))


def report(results: dict[str, Any]) -> None:
    """Prints the results for people."""
    for name, value in results.items():
        print(f"{name:12} {value.get('summary', value)}")

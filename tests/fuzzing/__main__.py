"""``python -m tests.fuzzing --seconds 1200``: fuzzes every decoder, reports cases and findings."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzzing.engine import fuzz
from tests.fuzzing.targets import all_targets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="part of a target's name")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    total, found = 0, 0
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        targets = [each for each in all_targets(Path(directory)) if options.only in each.name]
        for target in targets:
            outcome = fuzz(target, seed=options.seed, seconds=options.seconds / len(targets))
            total, found = total + outcome.cases, found + len(outcome.findings)
            print(
                f"{outcome.name:32} {outcome.cases:9} cases {outcome.seconds:7.1f} s "
                f"{outcome.accepted:8} accepted {outcome.edges:5} edges {len(outcome.findings)} findings",
                flush=True,
            )
            for finding, data in outcome.findings.items():
                print(f"    {finding}\n    {data[:2000].hex()}", flush=True)
    print(f"{total} cases, {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

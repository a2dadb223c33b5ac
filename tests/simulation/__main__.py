"""``python -m tests.simulation --seeds 20000 [--from 0] | --replay SEED | --mutants``.

With ``--schedulers``, ``--snapshots``, ``--gpus`` or ``--drains`` it plays those.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Mapping

from tests.simulation.cluster import play_cluster
from tests.simulation.cluster_mutants import CLUSTER_MUTANTS
from tests.simulation.drain_mutants import DRAIN_MUTANTS
from tests.simulation.drains import play_drains
from tests.simulation.gpu_mutants import GPU_MUTANTS
from tests.simulation.gpus import play_gpus
from tests.simulation.mutants import MUTANTS, Mutant, hunt
from tests.simulation.snapshot_mutants import SNAPSHOT_MUTANTS
from tests.simulation.snapshots import play_snapshots
from tests.simulation.world import play

Play = Callable[..., str]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds to play")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--replay", type=int, metavar="SEED", help="play one seed and print what happens")
    parser.add_argument("--mutants", action="store_true", help="prove that each planted bug is caught")
    parser.add_argument("--snapshots", action="store_true", help="with snapshots in the workers' memory")
    parser.add_argument("--schedulers", action="store_true", help="with three schedulers on a simulated etcd")
    parser.add_argument("--gpus", action="store_true", help="with GPUs that break and are refused")
    parser.add_argument("--drains", action="store_true", help="with drains that operators plan and call off")
    parser.add_argument("--only", help="with --mutants or --replay: this mutant alone")
    options = parser.parse_args()
    logging.getLogger("scheduler").setLevel(logging.CRITICAL)
    mutants, run = (CLUSTER_MUTANTS, play_cluster) if options.schedulers else (MUTANTS, play)
    if options.snapshots:
        mutants, run = SNAPSHOT_MUTANTS, play_snapshots
    if options.gpus:
        mutants, run = GPU_MUTANTS, play_gpus
    if options.drains:
        mutants, run = DRAIN_MUTANTS, play_drains
    if options.mutants:
        return _mutants(options.seeds, options.only, mutants, run)
    if options.replay is not None:
        return _replay(options.replay, options.only, mutants, run)
    return _play_all(options.first, options.seeds, run)


def _play_all(first: int, count: int, run: Play) -> int:
    began = time.perf_counter()
    broken = 0
    for seed in range(first, first + count):
        told = run(seed)
        if told:
            broken += 1
            print(f"seed {seed}: {told}", flush=True)
    took = time.perf_counter() - began
    print(f"{count} seeds, {broken} broken, {took:.1f} s, {count / took:.0f} seeds/s")
    return 1 if broken else 0


def _replay(seed: int, mutant: str | None, mutants: Mapping[str, Mutant], run: Play) -> int:
    trace: list[str] = []
    if mutant:
        with mutants[mutant].planted():
            told = run(seed, trace)
    else:
        told = run(seed, trace)
    print("\n".join(trace))
    return 1 if told else 0


def _mutants(limit: int, only: str | None, mutants: Mapping[str, Mutant], run: Play) -> int:
    missed = 0
    for name in [only] if only else mutants:
        seed, told = hunt(mutants[name], limit, run)
        missed += seed < 0
        print(f"{name:40} " + (f"seed {seed}: {told}" if seed >= 0 else "NOT CAUGHT"), flush=True)
    print(f"{len(mutants) if not only else 1} mutants, {missed} not caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

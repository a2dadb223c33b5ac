"""What one seed plays: sizes, workers, speeds, and which faults may happen."""

from __future__ import annotations

import random
from dataclasses import dataclass

from muster.scheduler.core.events import CoreSettings

NODE_TIMEOUT_S = 6.0
HEARTBEAT_S = 1.0
HEARTBEATS_PER_S = 3.5
"""Four members and more are heard less often than once in HEARTBEAT_S."""
WAITING_HEARTBEAT_S = NODE_TIMEOUT_S / 3
"""So often a worker without a place is heard."""
PAUSE_S = 4.0
"""A pause so long is shorter than MS_NODE_TIMEOUT, to which the scheduler adds 1.5 heartbeats."""
TOPO_TIMEOUT_S = 30.0
HANG_TIMEOUT_S = 20.0
LATE_S = 4.0
KINDS = (
    *("calm", "crashes", "pauses", "elastic", "trouble", "cuts", "cuts"),
    *("supervised", "supervised", "supervised", "wild", "wild"),
)


@dataclass(frozen=True)
class Scenario:
    """One seed's choices.

    Attributes:
        kind: ``calm`` (nothing happens), ``crashes`` (the scheduler's alone), ``pauses`` (short ones of
            workers, and floods that keep the scheduler from reading), ``elastic`` (planned changes alone),
            ``trouble`` (collectives fail though all live), ``cuts`` (hosts cannot reach each other,
            ranks hang), ``supervised`` (everything, and workers that end
            are started again), ``wild`` (everything).
        integers: node ids are 0, 1, ...; otherwise names, ranked by host and device.
        commit_crash: probability that the scheduler dies at a commit.
        faults: how many faults are thrown in.
        peers_notice: probability that a peer of a dead worker sees its collective fail.
        repeat: probability that a message comes twice.
        per_host: how many workers a host has.
    """

    kind: str
    worker_num: int
    worker_min: int
    spares: int
    integers: bool
    steps: int
    step_s: float
    commit_crash: float
    faults: int
    fault_end: float
    peers_notice: float
    repeat: float
    per_host: int

    @property
    def supervised(self) -> bool:
        """Workers that end before the job does are started again."""
        return self.kind not in ("wild",)

    @property
    def settings(self) -> CoreSettings:
        """What the scheduler is told."""
        return CoreSettings(
            worker_num=self.worker_num,
            worker_min=self.worker_min,
            spares=self.spares,
            topo_timeout_s=TOPO_TIMEOUT_S,
            node_timeout_s=NODE_TIMEOUT_S,
            heartbeat_interval_s=HEARTBEAT_S,
            heartbeats_per_s=HEARTBEATS_PER_S,
            waiting_report_interval_s=10.0,
            stall_timeout_s=10.0,
            hang_timeout_s=HANG_TIMEOUT_S,
            ranks_per_unique_id=2,
        )


def make_scenario(rng: random.Random) -> Scenario:
    """Draws a scenario."""
    kind = rng.choice(KINDS)
    cuts = kind == "cuts"
    worker_num = rng.choice((3, 4, 5, 6) if cuts else (1, 2, 2, 3, 3, 4))
    disturbed = kind in ("supervised", "wild")
    return Scenario(
        kind=kind,
        worker_num=worker_num,
        worker_min=rng.randint(1, worker_num),
        spares=0 if kind == "trouble" else rng.choice((0, 0, 1)),
        integers=rng.random() < 0.5,
        steps=rng.randint(3, 8) * (3 if kind == "pauses" else 1),  # long enough for a flood
        step_s=rng.choice((0.2, 0.5, 1.0)),
        commit_crash=rng.choice((0.0, 0.03, 0.15)) if disturbed else 0.15 if kind == "crashes" else 0.0,
        faults=rng.randint(1, 5 if disturbed or kind in ("elastic", "trouble", "cuts") else 3),
        fault_end=rng.uniform(3.0, 14.0),
        peers_notice=rng.choice((0.0, 0.5, 1.0)),
        repeat=rng.choice((0.0, 0.0, 0.1)),
        per_host=rng.choice((1, 1, 2)) if cuts else 2,
    )

"""Measures the scheduler's core alone: CPU seconds by kind of event, without network, disk and TLS.

``python -m muster.bench.scale.core 500 5000 --json muster/bench/results/core.json``; see docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from muster.scheduler.core import events
from muster.scheduler.core.events import Decision
from muster.scheduler.core.machine import Machine
from muster.wire import messages
from muster.wire.codec import AssignmentEncoder

WORKERS_PER_HOST = 8


def candidate(index: int, size: int) -> messages.Candidate:
    """Returns the worker with this number."""
    host, device = divmod(index, WORKERS_PER_HOST)
    return messages.Candidate(
        node_id=f"node{host}-{device}",
        incarnation=(index + 1) * 0x9E3779B97F4A7C15 % 2**64,  # as random ones, which do not compress
        host=messages.Host(f"host-{host:08x}", f"node{host}", f"127.0.{host // 256}.{host % 256}"),
        device=messages.Device("cuda", device),
        worker_num=size,
        worker_min=1,
        backend="nccl",
        local_index=device,
        data_address=f"127.0.0.1:{20_000 + index}",
    )


def measure(size: int) -> dict[str, float]:
    """Measures CPU seconds by kind of event, from the first Join to a generation without 1 % of members."""
    settings = events.CoreSettings(size, 1, 0, 300.0, 31.5, 1.0)
    machine, encoder = Machine("default", settings), AssignmentEncoder()
    streams, figures = range(1, size + 1), dict[str, float]()

    def timed(name: str, action: Callable[[], Decision | None]) -> Decision | None:
        begun = time.process_time()
        decision = action()
        figures[name] = time.process_time() - begun
        return decision

    def each(
        event_of: Callable[[int], events.Event], now: float, numbers: range | list[int]
    ) -> Decision | None:
        decision = None
        for number in numbers:
            decision = machine.step(event_of(number), now)
        return decision

    def ticks(now: float) -> None:
        for _ in range(100):
            machine.step(events.Tick(), now)

    def encode(decision: Decision | None) -> Decision | None:
        assert decision is not None
        parts = [encoder.encode_parts(message) for _, message in decision.messages]
        figures.setdefault("assignment_bytes", max(sum(map(len, each)) for each in parts))
        return decision

    joins = [events.Joined(number, candidate(number - 1, size)) for number in streams]
    timed("joins_s", lambda: each(lambda number: joins[number - 1], 1.0, streams[:-1]))
    formed = timed("last_join_s", lambda: machine.step(joins[-1], 1.0))
    timed("assignments_encoded_s", lambda: encode(formed))
    timed("all_built_s", lambda: each(lambda number: events.BuiltReported(number, 1), 1.2, streams))
    beats = [events.Heard(number, 1, 1, 1, 1.0, entered_generation=1) for number in streams]
    timed("heartbeat_of_each_s", lambda: each(lambda number: beats[number - 1], 1.3, streams))
    times = messages.StepTimes(5, (0.5, 0.1, 0.05, 0.01, 0.0, 0.0, 0.01), 1)
    timed_beats = [beat.replaced(times=times) for beat in beats]
    timed(
        "heartbeat_with_step_times_of_each_s",
        lambda: each(lambda number: timed_beats[number - 1], 1.3, streams),
    )
    timed("100_ticks_s", lambda: ticks(1.4))
    dead = list(streams[::100])
    living = [number for number in streams if number not in set(dead)]

    def lose() -> Decision:
        decision = Decision()
        for number in dead:
            decision = machine.step(events.SessionLost(number, "killed"), 2.0, more=number != dead[-1])
        return decision

    formed = timed("1_percent_lost_s", lose)
    timed("assignments_encoded_again_s", lambda: encode(formed))
    timed("all_built_again_s", lambda: each(lambda number: events.BuiltReported(number, 2), 2.2, living))
    timed("100_ticks_below_full_size_s", lambda: ticks(2.4))
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    """Measures each size and prints, or writes, the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", type=int, nargs="+", metavar="N", help="numbers of workers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    figures = {str(size): measure(size) for size in args.sizes}
    for size, measured in figures.items():
        print(size, json.dumps(measured), flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

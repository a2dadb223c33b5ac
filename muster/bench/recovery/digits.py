"""Runs ``train.py`` with an elastic loop that records each step. Started by the recovery benchmark."""

from __future__ import annotations

from muster import train
from muster.bench.recovery.loop import RecordingLoop

if __name__ == "__main__":
    vars(train)["ElasticLoop"] = RecordingLoop
    train.main()

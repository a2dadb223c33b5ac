"""A worker script of the README's lines and nothing more: the elastic loop, then a plain release.

Prints each step's number, and after the loop that it is done. The file named by the first argument gets the
step of each checkpoint. With BLOCK_AFTER set, it stands still after so many steps. The second hundred steps
take a second each until there is a file ``go`` beside that one: till then there are steps left.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import muster
from muster.training.loop import ElasticLoop
from muster.training.sampler import ShardedSampler
from muster.training.state import TrainingState

STEP_S, SLOW_STEP_S, FAST_STEPS = 0.02, 1.0, 100

session = muster.init()
weights = np.zeros(10, np.float32)
state = TrainingState({"weights": weights}, ShardedSampler(1000, 10, seed=0))
save = Path(sys.argv[1]).write_text


def pause() -> None:
    """What a step takes."""
    go = Path(sys.argv[1]).with_name("go")
    until = time.monotonic() + (STEP_S if state.step < FAST_STEPS else SLOW_STEP_S)
    while time.monotonic() < until and not (state.step >= FAST_STEPS and go.exists()):
        time.sleep(STEP_S)


for step in ElasticLoop(session, state, epochs=2, save=lambda: save(str(state.step))):
    with step:
        if state.step == int(os.environ.get("BLOCK_AFTER", "-1")):
            print("blocked", flush=True)
            time.sleep(1000)
        gradient = muster.all_reduce(np.ones(10, np.float32), op="mean")
        pause()
        weights -= 0.1 * gradient
    assert np.allclose(weights, -0.1 * state.step), "these are not the weights of this step"
    print(state.step, flush=True)
print("end", state.step, "done", flush=True)
muster.release()

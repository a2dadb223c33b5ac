"""What is measured of torchft's replica groups, with a stand-in for its program."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from muster.bench.in_place.peer import measure_peer

STAND_IN = """#!{python}
# Makes a step in each 20 ms; in the first two after another group has gone it says that they are dropped.
import json, os, sys, time
from pathlib import Path
said = dict(each[2:].split("=") for each in sys.argv[2:] if "=" in each)
if "--lighthouse" in sys.argv:
    print("http://somewhere:1", flush=True)
    time.sleep(1000)
record, replica, rank = Path(said["record"]), int(said["replica"]), int(said["rank"])
(record.parent / f"lives_{{replica}}_{{rank}}").write_text(str(os.getpid()))
number, dropping, before = replica * int(said["size"]) + rank, 0, 0


def living():
    found = set()
    for path in record.parent.glob("lives_*"):
        try:
            state = Path(f"/proc/{{path.read_text()}}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.add(path.name[6])
    return len(found)


with record.open("a", buffering=1) as file:
    def note(what, **more):
        facts = {{"what": what, "t": time.monotonic(), "pid": os.getpid(), "rank": number, **more}}
        file.write(json.dumps(facts) + "\\n")
    note("built")
    while True:
        time.sleep(0.02)
        step, now = int(time.monotonic() * 50), living()
        dropping = 2 if now < before else dropping
        before = now
        if dropping:
            dropping -= 1
            if said["pace-ms"] == "1":
                raise SystemExit("it could not go on")
            note("dropped", step=step)
        else:
            note("step", step=step, replicas=now, digest=str(step))
"""


def test_steps_dropped_and_the_times_until_the_others_and_all_go_on_are_found(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    options = argparse.Namespace(kills=2, seed=1, pace_ms=0, peer_python=str(program))
    found = measure_peer("hsdp", options, tmp_path / "job", print)
    assert found["steps_at_which_replicas_differ"] == 0
    assert len(found["kills"]) == 2
    for kill in found["kills"]:
        assert kill["steps_dropped"] == 2
        assert kill["next_step_s"] > 0
        assert 0 < kill["newcomer_builds_s"] < kill["all_back_s"]


def test_a_rank_that_ends_by_itself_when_another_is_lost_is_a_result_too(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    options = argparse.Namespace(kills=2, seed=1, pace_ms=1, peer_python=str(program))
    found = measure_peer("ddp", options, tmp_path / "job", print)
    assert found["kills"] == []
    assert "ended\nit could not go on" in found["failed"]

"""What is measured of torchft's replica groups, with a stand-in for its program."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from muster.bench.in_place.peer import measure_peer

STAND_IN = """#!{python}
# Makes a step in each 20 ms; in the first two after another group has gone it says that they are dropped.
# Who was slow to look sees by its new processes that a group has gone, and makes some steps without it, too.
import json, os, sys, time
from pathlib import Path
said = dict(each[2:].split("=") for each in sys.argv[2:] if "=" in each)
if "--lighthouse" in sys.argv:
    print("http://somewhere:1", flush=True)
    time.sleep(1000)
record, replica, rank, size = Path(said["record"]), *(int(said[each]) for each in ("replica", "rank", "size"))
mine = record.parent / f"lives_{{replica}}_{{rank}}"
mine.with_name(f"new_{{mine.name}}").write_text(str(os.getpid()))
mine.with_name(f"new_{{mine.name}}").rename(mine)
number, dropping, without, whole = replica * size + rank, 0, 0, {{}}


def living():
    found = {{}}
    for path in record.parent.glob("lives_*"):
        pids, pid = found.setdefault(path.name[6], set()), path.read_text()
        try:
            state = Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            pids.add(pid)
    return found


with record.open("a", buffering=1) as file:
    def note(what, **more):
        facts = {{"what": what, "t": time.monotonic(), "pid": os.getpid(), "rank": number, **more}}
        file.write(json.dumps(facts) + "\\n")
    note("built")
    while True:
        time.sleep(0.02)
        step = int(time.monotonic() * 50)
        for group, pids in living().items():
            if group in whole and whole[group] != pids:
                del whole[group]
                dropping, without = 2, 5
            elif group not in whole and len(pids) == size and not without:
                whole[group] = pids
        if dropping:
            dropping -= 1
            if said["pace-ms"] == "1":
                raise SystemExit("it could not go on")
            note("dropped", step=step)
        else:
            without = max(0, without - 1)
            note("step", step=step, replicas=len(whole), digest=str(step))
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

"""What torch programs do that has ended stores and groups before; ``python torch_survival.py NAME``."""

import collections
import datetime
import gc
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist

torch.set_num_threads(1)
TIMES = 25  # of plain torch, without what the plug-in waits for, every third process aborts


def say(*what: object) -> None:
    # One write for the line: processes that share a pipe would mix the pieces.
    sys.stdout.write(f"said {os.environ['RANK']} {' '.join(map(str, what))}\n")
    sys.stdout.flush()


def total() -> float:
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return float(x)


def starve_gloo() -> None:
    """Lets Gloo's threads run when nobody else wants to: as on a busy machine, they are late."""
    one = {min(os.sched_getaffinity(0))}
    for thread in pathlib.Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), one)
        if "gloo" in (thread / "comm").read_text():
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


def exits() -> None:
    """Processes, one after the other, that end without destroy_process_group()."""
    ends: collections.Counter[int] = collections.Counter()
    gc.freeze()  # at each end all of torch's objects would be looked through, for two thirds of its time
    for _ in range(TIMES):
        child = os.fork()
        if child == 0:
            dist.init_process_group("gloo")
            extra = dist.new_group()
            dist.barrier(extra)
            assert total() == 3.0  # its threads have begun
            starve_gloo()
            assert total() == 3.0
            return  # the interpreter ends as that of a script does
        ends[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] += 1
    say("ends", dict(ends))


def timeout() -> None:
    """A collective that one rank is late for, torch's record of it, and a group after it."""
    dist.init_process_group("gloo")  # the limit that follows is not for how late one of them begins
    dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
    store = dist.distributed_c10d._get_default_store()
    assert total() == 3.0
    if dist.get_rank() == 0:
        try:
            total()
        except Exception as error:
            say("raised", type(error).__name__, str(error).replace("\n", " "))
        trace = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
        entries = trace.get("entries", ())  # torch notes the collectives of its own backends alone
        say("recorded", [(entry["profiling_name"], entry["state"]) for entry in entries][-1:])
        store.set("dumped", "1")
    else:
        store.wait(["dumped"], datetime.timedelta(seconds=60))
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    say("after", total())
    dist.destroy_process_group()


class Squares(torch.utils.data.Dataset):  # type: ignore[misc]  # torch has no types here
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * index


def forks() -> None:
    """Children that inherit a group: those of a DataLoader, and one that uses and destroys it."""
    dist.init_process_group("gloo")
    loader = torch.utils.data.DataLoader(Squares(), num_workers=2, multiprocessing_context="fork")
    say("loaded", sum(int(each) for each in loader))
    child = os.fork()
    if child == 0:
        try:
            total()
        except Exception as error:
            say("child", type(error).__name__, str(error).replace("\n", " "))
        dist.destroy_process_group()
        return
    say("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    say("after", total())
    dist.destroy_process_group()


{"exits": exits, "timeout": timeout, "forks": forks}[sys.argv[1]]()

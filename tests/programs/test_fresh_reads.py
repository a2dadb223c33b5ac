"""What one process writes to the store another one reads at once, though the writer's link is slow."""

from __future__ import annotations

import subprocess
import sys

import pytest

DELAY_S = 0.2

READS = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
variable, slow, quick = sys.argv[1:]
os.environ[variable] = f"127.0.0.1:{slow}"
import torch, torch.distributed as dist

def client(port):
    store = dist.TCPStore("127.0.0.1", int(port), None, False, wait_for_workers=False)
    return dist.PrefixStore("outer", dist.PrefixStore("inner", store))

writer, reader = client(slow), client(quick)
for name, write in {
    "set": lambda value: writer.set("set", value),
    "append": lambda value: writer.append("append", value),
    "multi_set": lambda value: writer.multi_set(["multi_set", "beside"], [value, value]),
    "clone": lambda value: getattr(writer, "clone", lambda: writer)().set("clone", value),  # since torch 2.6
}.items():
    found = []
    for value in ("a", "b"):
        write(value)
        found.append(reader.get(name).decode() if reader.check([name]) else "nothing")
    print(name, *found)
if hasattr(writer, "queue_push"):  # since torch 2.8
    writer.queue_push("queue", "a")
    print("queue_push", reader.queue_len("queue"))
else:
    print("queue_push 1")

from muster.communicators.tcp.backend import TcpBackend
from muster.programs.addresses import PeerListener, exchange_addresses
from muster.programs.assignment import Handover, HeldPlace

def meet(rank):
    places = tuple(HeldPlace(f"node-{each}", "h", "h") for each in range(2))
    handover = Handover("job", 3, rank, places, "127.0.0.1", "", False, (b"u" * 128,))
    listener = PeerListener(1, TcpBackend(tls=None), f"127.0.0.1:{4 + rank}", 10 + rank)
    return exchange_addresses((writer, reader)[rank], handover, listener, "world", rank, 2)

waits, check = [], dist.Store.check
dist.Store.check = lambda store, keys: waits.append(keys) or check(store, keys)
writer.set("set", "c")
print("a write waits", len(waits))
with ThreadPoolExecutor(2) as ranks:
    (group, name), (same, also) = ranks.map(meet, range(2))
print("a meeting waits", len(waits) - 1, group.peers == same.peers, name == also)
own = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
own.set("of the program's own", "a")
print("own", own.get("of the program's own").decode())
"""


@pytest.mark.parametrize("variable", ["MUSTER_STORE", "MUSTER_TORCHRUN_STORE"])
def test_what_python_writes_is_there_when_the_write_returns(variable: str) -> None:
    """All but a meeting's: nobody has written its keys before, and who reads them waits for them."""
    pytest.importorskip("torch.distributed")
    rig = [sys.executable, "-m", "tests.scheduler.store.rig", "2", str(DELAY_S)]
    with subprocess.Popen(rig, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stands:
        assert stands.stdout is not None
        ports = stands.stdout.readline().split()
        said = subprocess.run(
            [sys.executable, "-c", READS, variable, *ports], capture_output=True, text=True, timeout=200
        )
        stands.communicate("")
    assert said.stdout.splitlines() == [
        "set a b",
        "append a ab",
        "multi_set a b",
        "clone a b",
        "queue_push 1",
        "a write waits 1",
        "a meeting waits 0 True True",
        "own a",
    ], said.stderr

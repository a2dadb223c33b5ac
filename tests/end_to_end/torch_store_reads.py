"""Counts stale reads: rank 0 writes to torch's store, all pass a barrier of Gloo's, the others read.

By hand, with other processes that want the processors too:

    muster run -n 2 --scheduler ... -- python tests/end_to_end/torch_store_reads.py 1000
"""

import os
import sys
from collections.abc import Callable

import torch.distributed as dist


def main() -> None:
    count = int(sys.argv[1])
    dist.init_process_group("gloo")
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    writes: dict[str, Callable[[str], None]] = {
        "set": lambda value: store.set("set", value),
        "append": lambda value: store.append("append", value),
        "multi_set": lambda value: store.multi_set(["multi_set", "beside"], [value, value]),
    }
    for name, write in writes.items():
        stale, expected = 0, b""
        for turn in range(count):
            value = f"{turn};"
            expected = expected + value.encode() if name == "append" else value.encode()
            if rank == 0:
                write(value)
            dist.barrier()
            if rank:
                stale += store.get(name) != expected
            dist.barrier()
        if rank:
            os.write(1, f"rank {rank}: {name}: {stale} of {count} stale\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

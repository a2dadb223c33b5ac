"""One process of an AllReduce by torch's own gloo, for comparison. Needs torch and NumPy only.

    python allreduce_peer.py RANK WORLD_SIZE PORT SIZE:ROUNDS ...

Prints the seconds of each round as JSON, by size.
"""

import datetime
import json
import sys
import time

import torch
import torch.distributed as dist


def measure(rank: int, world_size: int, size: int, rounds: int) -> list[float]:
    """Measures the seconds of each AllReduce of ``size`` bytes of float32; checks the values."""
    tensor = torch.empty(size // 4)
    samples = []
    for _ in range(rounds + 3):
        tensor.fill_(rank + 1)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        samples.append(time.perf_counter() - start)
        if not bool((tensor == world_size * (world_size + 1) / 2).all()):
            sys.exit("torch's gloo gave a wrong sum")
    return samples[3:]


def main() -> None:
    """Joins the group, measures each size, prints."""
    rank, world_size, port = (int(text) for text in sys.argv[1:4])
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {}
    for plan in sys.argv[4:]:
        size, rounds = (int(text) for text in plan.split(":"))
        results[size] = measure(rank, world_size, size, rounds)
    dist.barrier()
    print(json.dumps({"torch": torch.__version__, "samples": results}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

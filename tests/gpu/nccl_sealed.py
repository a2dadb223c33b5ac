"""torch over NCCL, sealed by the plug-in and by NCCL's own sockets: same results, and what is sent.

    python tests/gpu/nccl_sealed.py --ranks 2 --json FILE

Ranks share one GPU; each says that it is on a host of its own (NCCL_HOSTID), so that NCCL takes its
network. The runs, each in processes of its own: "off" (NCCL's sockets), "sealed", "sealed-LL", "sealed-
LL128", "another-secret" (the last rank has one), "no-secret". A library preloaded into each rank looks in
what is given to TCP sockets for a pattern that fills one broadcast. Prints a line of JSON a run; exits with
1 where one is not as it should be. With --backend gloo and --runs off it tries itself out where there is no
GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import secrets
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "muster" / "communicators" / "nccl" / "sealed"
PATTERN = "gradient that nobody else reads."
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
RUNS = ("off", "sealed", "sealed-LL", "sealed-LL128", "another-secret", "no-secret")
REFUSED = ("another-secret", "no-secret")
LIBRARY_FLAGS = ("-std=c11", "-O2", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2", "-fvisibility=hidden")
SHARED_FLAGS = ("-shared", "-fPIC", "-Wl,-z,nodelete", "-Wl,-z,relro", "-Wl,-z,now")


# ---------------------------------------------------------------- a rank


def rank_main(rank: int, ranks: int, store: str, backend: str) -> None:
    """Runs collectives, and prints a line of JSON: hashes of all results, times, or the error."""
    result: dict[str, Any] = {"rank": rank, "ok": False}
    began = time.monotonic()
    try:
        _collectives(rank, ranks, store, backend, result)
        result["ok"] = True
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[-600:]
        result["error_after_s"] = round(time.monotonic() - began, 2)
    library = os.environ.get("NCCL_NET_PLUGIN", "")
    if library.endswith(".so"):
        result["reason"] = _reason(library)
    print(json.dumps(result), flush=True)
    os._exit(0 if result["ok"] else 3)  # what ends with an error may hang in NCCL's destructors


def _reason(library: str) -> str:
    import ctypes

    text = ctypes.create_string_buffer(600)
    ctypes.CDLL(library).muster_nccl_reason(text, 600)
    return text.value.decode()


def _collectives(rank: int, ranks: int, store: str, backend: str, result: dict[str, Any]) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    cuda = backend == "nccl"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(0)
        result["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    where, limit = f"file://{store}", datetime.timedelta(seconds=50)
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=ranks, timeout=limit)
    hashes: dict[str, str] = {}

    def keep(name: str, value: torch.Tensor) -> None:
        hashes[name] = hashlib.sha256(value.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]

    def drawn(count: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1000 + rank)
        return torch.randn(count, generator=generator).to(dtype).to(device)

    for count in (1, 3, 1000, 65537, (1 << 20) + 7, 1 << 24):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            value = (
                drawn(count, count, dtype) if dtype != torch.int32 else drawn(count, 1, torch.float32).int()
            )
            dist.all_reduce(value)
            keep(f"all_reduce {dtype} {count}", value)
    value = drawn(600_002, 5, torch.float32)
    dist.broadcast(value, ranks - 1)
    keep("broadcast", value)
    gathered = [torch.empty(100_003, device=device) for _ in range(ranks)]
    dist.all_gather(gathered, drawn(100_003, 6, torch.float32))
    keep("all_gather", torch.cat(gathered))
    if cuda:
        part = torch.empty(50_001, device=device)
        dist.reduce_scatter_tensor(part, drawn(50_001 * ranks, 7, torch.float32))
        keep("reduce_scatter", part)
        out = torch.empty(4096 * ranks, device=device)
        dist.all_to_all_single(out, drawn(4096 * ranks, 8, torch.float32))
        keep("all_to_all", out)
    _pattern(torch, dist, device)
    result["hashes"] = hashes
    value = torch.ones(16 << 20, device=device)
    dist.all_reduce(value)
    began = time.monotonic()
    for _ in range(3):
        dist.all_reduce(value)
    if cuda:
        torch.cuda.synchronize()
    result["all_reduce_64_mib_ms"] = round((time.monotonic() - began) / 3 * 1e3, 1)
    dist.barrier()
    dist.destroy_process_group()


def _pattern(torch: Any, dist: Any, device: Any) -> None:
    """Sends 16 MiB of the pattern as they are: of a broadcast nothing is summed."""
    raw = bytearray(PATTERN.encode() * ((16 << 20) // len(PATTERN)))
    value = torch.frombuffer(raw, dtype=torch.int32).to(device)
    dist.broadcast(value, 0)
    assert value.cpu().numpy().tobytes() == bytes(raw)


# ---------------------------------------------------------------- all of them


def build(folder: Path) -> tuple[Path, Path]:
    """The plug-in and the recorder."""
    plugin, recorder = folder / "libmuster-nccl.so", folder / "recorder.so"
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    recorded = str(Path(__file__).with_name("wire_recorder.c"))
    for output, files, libraries in (
        (plugin, [*LIBRARY_FLAGS, *sources], ["-lcrypto", "-lpthread"]),
        (recorder, ["-O2", recorded], ["-ldl", "-lpthread"]),
    ):
        command = ["cc", *SHARED_FLAGS, "-o", str(output), *files, *libraries]
        subprocess.run(command, check=True, timeout=120)
    return plugin, recorder


@contextmanager
def secret_descriptor(secret: bytes) -> Iterator[int]:
    """A sealed memfd, as a rank inherits it."""
    descriptor = os.memfd_create("muster-nccl", os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, b"MSNCCLK1" + struct.pack("<Q", 1) + secret)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        yield descriptor
    finally:
        os.close(descriptor)


def environment(run: str, rank: int, plugin: Path, recorder: Path, record: Path) -> dict[str, str]:
    """A rank's, without its secret."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("NCCL_", "MS_"))}
    env |= dict.fromkeys(
        ("NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_RAS_ENABLE"), "0"
    )
    env |= {"NCCL_HOSTID": f"sealed{rank}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"NCCL_IB_DISABLE": "1", "NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "WARN"}
    # Beside what the tests were started with: another NCCL than torch's comes in that way.
    preloaded = f"{recorder} {os.environ.get('LD_PRELOAD', '')}".rstrip()
    env |= {"LD_PRELOAD": preloaded, "WIRE_RECORD": str(record), "WIRE_PATTERN": PATTERN}
    env["NCCL_PROTO"] = run.removeprefix("sealed-") if run.startswith("sealed-") else "Simple"
    if run == "off":
        return env | {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}
    env |= {"NCCL_NET": "MusterSealed", "NCCL_NET_PLUGIN": str(plugin), "MS_NCCL_ACCEPT_TIMEOUT": "15"}
    return env


def execute(
    run: str, ranks: int, backend: str, folder: Path, plugin: Path, recorder: Path, limit_s: float
) -> dict[str, Any]:
    """Runs all ranks to their end; what they said, and what was on the wire."""
    record = folder / f"{run}.record"
    record.write_bytes(bytes(24))
    secret, other = secrets.token_bytes(32), secrets.token_bytes(32)
    processes, began = [], time.monotonic()
    for rank in range(ranks):
        env = environment(run, rank, plugin, recorder, record)
        with secret_descriptor(
            other if run == "another-secret" and rank == ranks - 1 else secret
        ) as descriptor:
            kept = [] if run in ("off", "no-secret") else [descriptor]
            command = [sys.executable, __file__, "--rank", str(rank), "--ranks", str(ranks)]
            processes.append(
                subprocess.Popen(
                    [*command, "--store", str(folder / f"{run}.store"), "--backend", backend],
                    env=env | ({"MS_NCCL_SECRET_FD": str(descriptor)} if kept else {}),
                    pass_fds=kept,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
    heard = []
    ends_after_s = min(limit_s, 40.0) if run in REFUSED else limit_s
    for rank, process in enumerate(processes):
        try:
            out, _ = process.communicate(timeout=max(1.0, began + ends_after_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            out += "\nHANGS"
        lines = [line for line in out.splitlines() if line.startswith("{")]
        said: dict[str, Any] = json.loads(lines[-1]) if lines else {"rank": rank, "ok": False}
        heard.append(said | {"code": process.returncode, "hangs": out.endswith("HANGS"), "log": out[-1500:]})
    wire = struct.unpack("<QQQ", record.read_bytes())
    names = ("bytes", "calls", "calls_with_pattern")
    return {
        "run": run,
        "ranks": heard,
        "wire": dict(zip(names, wire, strict=True)),
        "s": time.monotonic() - began,
    }


def _chosen(rank: dict[str, Any], word: str) -> dict[str, str]:
    return {name: value for name, value in rank["hashes"].items() if word in name}


def judge(result: dict[str, Any], off: dict[str, Any] | None) -> list[str]:
    """What is not as it should be."""
    run, ranks, wire = result["run"], result["ranks"], result["wire"]
    hanging = [f"rank {rank['rank']} hangs" for rank in ranks if rank["hangs"]]
    if run in REFUSED:
        # Whose own neighbours hold the secret waits in NCCL for ranks that are gone; its launcher ends it.
        wrong = hanging if len(hanging) > max(0, len(ranks) - 3) else []
        wrong += [f"rank {rank['rank']} went on" for rank in ranks if rank["ok"]]
        if wire["calls_with_pattern"]:
            wrong.append("the pattern was sent")
        return wrong
    wrong = hanging + [f"rank {rank['rank']} failed" for rank in ranks if not rank["ok"]]
    if wire["bytes"] < 100_000_000:
        wrong.append(
            f"only {wire['bytes']} bytes were seen: the network was not used, or the recorder not there"
        )
    if (wire["calls_with_pattern"] > 0) != (run == "off"):
        wrong.append(f"the pattern was in {wire['calls_with_pattern']} of {wire['calls']} calls")
    if off is not None and not wrong:
        # Another protocol cuts arrays elsewhere, and so adds floats in another order.
        exact = "" if run == "sealed" else "int32"
        same = [
            _chosen(one, exact) == _chosen(other, exact)
            for one, other in zip(ranks, off["ranks"], strict=True)
        ]
        wrong += [
            f"rank {rank} has other bits than without sealing" for rank, good in enumerate(same) if not good
        ]
    return wrong


def main() -> int:
    """Runs what was asked for; 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--limit", type=float, default=75.0, metavar="S", help="a run is ended then")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, options.ranks, options.store, options.backend)
    results, failed, off = [], 0, None
    with tempfile.TemporaryDirectory(prefix="muster-nccl-sealed-") as folder:
        plugin, recorder = build(Path(folder))
        for run in options.runs:
            result = execute(
                run, options.ranks, options.backend, Path(folder), plugin, recorder, options.limit
            )
            wrong = judge(result, off)
            off = result if run == "off" else off
            failed += bool(wrong)
            results.append(result | {"wrong": wrong})
            first = result["ranks"][0]
            shown = {key: first.get(key) for key in ("nccl", "all_reduce_64_mib_ms", "error", "reason")}
            print(
                json.dumps(
                    {"run": run, "wrong": wrong, "wire": result["wire"], "s": round(result["s"], 1), **shown}
                )
            )
            if wrong:
                print("\n".join(rank["log"] for rank in result["ranks"]), file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.ranks, "results": results}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

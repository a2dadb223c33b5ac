"""Collects reports of torch, NCCL and the GPU's driver about a process; a line says which are missing."""

from __future__ import annotations

import contextlib
import importlib
import socket
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from muster.worker.gpu_health.judgement import describe_gpu, judge_gpu
from muster.worker.gpu_health.nvml import NvmlGpus

RAS_PORT = 28028
RAS_LIMIT_S = 2.0
MOST_BYTES = 32 * 1024
_RAS_REQUEST = b"TIMEOUT 2\nVERBOSE STATUS\n"
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def torch_recorder() -> str:
    """Torch's flight recorder of this process as JSON, or why there is none."""
    if "torch" not in sys.modules:
        return "none: this process has not imported torch"
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = next((found for name in _RECORDERS if (found := getattr(c10d, name, None)) is not None), None)
    if dump is None:
        return "none: this torch is built without it"
    try:
        said = dump()
    except Exception as error:
        return f"none: {error!r}"
    text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
    return text[:MOST_BYTES] or "empty: TORCH_FR_BUFFER_SIZE is 0"


def nccl_ras(pid: int, env: Mapping[str, str]) -> str:
    """Returns the answer of NCCL's RAS service, which listens on loopback, or why there is none.

    Args:
        pid: the process, to check whether it has loaded NCCL.
        env: the environment with NCCL_RAS_ADDR.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        maps = ""
    if "libnccl" not in maps:
        return "none: NCCL is not loaded"
    host, _, port = env.get("NCCL_RAS_ADDR", "").rpartition(":")
    address = (host or "localhost", int(port) if port.isdecimal() else RAS_PORT)
    return ras_answer(address)


def ras_answer(address: tuple[str, int]) -> str:
    """Returns the answer of RAS at an address within :data:`RAS_LIMIT_S` seconds, or why there is none."""
    deadline, said = time.monotonic() + RAS_LIMIT_S, b""
    try:
        with socket.create_connection(address, RAS_LIMIT_S) as line:
            line.sendall(_RAS_REQUEST)
            while len(said) < MOST_BYTES and (left_s := deadline - time.monotonic()) > 0:
                line.settimeout(left_s)
                chunk = line.recv(MOST_BYTES)
                if not chunk:
                    break
                said += chunk
    except TimeoutError:
        pass
    except OSError as error:
        return f"none: {address[0]}:{address[1]}: {error.strerror or error} (NCCL 2.24 and later have RAS)"
    text = said[:MOST_BYTES].decode(errors="replace").strip()
    return text or f"none: no answer within {RAS_LIMIT_S:g} s"


def gpus(library: str = "pynvml") -> str:
    """Returns the driver's readings of this host's GPUs and their faults, or why nothing is known."""
    if find_spec(library) is None:
        return "none: nvidia-ml-py is not installed here"
    try:
        nvml: Any = importlib.import_module(library)
        nvml.nvmlInit()
    except Exception as error:
        return f"none: {error}"
    found = NvmlGpus(nvml)
    try:
        return "\n".join(_gpu(found, index) for index in range(found.count())) or "none"
    except Exception as error:
        return f"none: {error}"
    finally:
        found.close()
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def _gpu(found: NvmlGpus, index: int) -> str:
    try:
        reading = found.read(index)
    except Exception as error:  # One GPU that does not answer must not hide the others.
        return f"GPU {index}: none: {error}"
    return describe_gpu(reading, judge_gpu(reading))

"""Processes with a process group of the backend "muster", under TLS, without scheduler and agents."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.scheduler.processes import Pki

TIMEOUT_S = 300.0
WAIT_S = float(os.environ.get("MS_TEST_WAIT_S", "110"))
AFTER_FAILURE_S = 30.0
"""The others may wait for what a rank that failed would have called."""

PRELOADED = ("muster.programs.group", "tests.programs.bodies")
PASSED = ("MS_TORCH_GLOO", "GLOO_SOCKET_IFNAME")


def start(
    size: int,
    pki: Pki | None,
    folder: Path,
    function: Callable[..., Any],
    *arguments: Any,
    backend: str = "muster",
    unique_ids: tuple[bytes, ...] = (),
    timeout_s: float = TIMEOUT_S,
) -> list[tuple[BaseProcess, Connection]]:
    """Starts ``function(rank, *arguments)`` on all ranks, each in a process with a default group."""
    context = multiprocessing.get_context("forkserver")  # it has imported torch once
    context.set_forkserver_preload(["torch.distributed", *PRELOADED])
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    unique_ids = unique_ids or (os.urandom(128),) * size
    started: list[tuple[BaseProcess, Connection]] = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        place = (
            rank,
            size,
            str(folder / "store"),
            passed | (pki.env() if pki is not None else {}),
            unique_ids[rank],
            backend,
            timeout_s,
        )
        process = context.Process(target=_main, args=(theirs, place, function, arguments), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    return started


def finish(started: list[tuple[BaseProcess, Connection]], timeout_s: float = WAIT_S) -> list[Any]:
    """What each rank has returned; its exception; None where it ended without a word."""
    found: list[Any] = [None] * len(started)
    pipes: dict[Any, int] = {ours: rank for rank, (_, ours) in enumerate(started)}
    while pipes:
        failed = any(isinstance(each, _Failure) for each in found)
        ready: list[Any] = wait(list(pipes), min(timeout_s, AFTER_FAILURE_S) if failed else timeout_s)
        if not ready:
            break
        for pipe in ready:
            rank = pipes.pop(pipe)
            try:
                found[rank] = pipe.recv()
            except EOFError:
                continue
    for process, _ in started:
        process.join(10)
        process.kill()
    assert not pipes, f"ranks {sorted(pipes.values())} hang; the others: {found}"
    return found


def run(
    size: int, pki: Pki | None, folder: Path, function: Callable[..., Any], *arguments: Any, **more: Any
) -> list[Any]:
    """Both; what a rank raises is raised."""
    found = finish(start(size, pki, folder, function, *arguments, **more))
    for each in found:
        if isinstance(each, _Failure):
            raise AssertionError(each.text)
    return found


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _main(
    pipe: Connection, place: tuple[Any, ...], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    try:
        rank, size, file, env, unique_id, backend, timeout_s = place
        os.environ.update(env)
        init(rank, size, file, unique_id, backend, timeout_s)
        result = function(rank, *arguments)
        pipe.send(result)
    except BaseException:
        pipe.send(_Failure(traceback.format_exc()))
    finally:
        pipe.close()


def init(rank: int, size: int, file: str, unique_id: bytes, backend: str, timeout_s: float) -> None:
    """Stands for agent and plug-in: hands the assignment over, and makes the default group."""
    import torch
    import torch.distributed as dist

    from muster.programs import assignment, registration

    torch.set_num_threads(1)
    handover = assignment.Handover(
        job_id="default",
        generation=1,
        member=rank,
        members=tuple(assignment.HeldPlace(f"n{each}", "h", "here") for each in range(size)),
        address="127.0.0.1",
        config_path=os.environ.get("MS_CONFIG_FILE", ""),
        allow_insecure=False,
        unique_ids=(unique_id,),
    )
    agent = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    agent.set(assignment.KEY, handover.encode())
    os.environ["MUSTER_STORE"] = f"127.0.0.1:{agent.port}"
    _kept.append(agent)
    registration.register(os.environ.get("MS_TORCH_GLOO", ""))
    store = dist.FileStore(file, size)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


_kept: list[Any] = []

"""``python -m scheduler status``, ``health`` and ``drain``: ask a running scheduler, and show the answer."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from muster.scheduler.config import Address, canonical_address, load_address
from muster.scheduler.errors import SettingsError

if TYPE_CHECKING:
    from muster.rendezvous.v1 import rendezvous_pb2 as pb


def command(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Runs ``status``, ``health`` or ``drain``.

    Returns:
        The exit code; of ``health``, 1 when the scheduler does not serve.

    Raises:
        SchedulerError: a setting is wrong, or the scheduler is not there or refuses.
        certs.errors.CertificateError: TLS failed on either side; says how.
    """
    options = parser().parse_args(list(arguments))
    address = load_address(env, config_path=options.config, job_id=options.job)
    if options.host:
        address = dataclasses.replace(address, host=canonical_address(options.host))
    from muster.scheduler.cli.client import Client

    certificate, role = _certificate(options, address), _role(options, env)
    with Client(address, env, certificate=certificate, role=role) as client:
        if options.command == "drain":
            print(client.drain(options.node, options.reason))
            return 0
        if options.command == "health":
            answer = client.health()
            print(answer)
            return 0 if answer == "SERVING" else 1
        reply = client.status()
    if options.json:
        print(json.dumps(as_json(reply), indent=2))
    else:
        show(reply, sys.stdout)
    return 0


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the commands."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--config", type=Path, metavar="FILE", help="config.json with the certificates (or MS_CONFIG_FILE)"
    )
    common.add_argument("--job", default="", metavar="ID", help="the job (default: MS_JOB_ID, or 'default')")
    common.add_argument(
        "--cert", type=Path, metavar="FILE", help="the .p12 file to use instead of client_cert_path"
    )
    common.add_argument("--host", default="", metavar="ADDRESS", help="ask here instead of at MS_SCHED_HOST")
    made = argparse.ArgumentParser(prog="python -m scheduler")
    commands = made.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", parents=[common], description="Shows a job and its workers.")
    status.add_argument("--json", action="store_true", help="print JSON instead of a table")
    commands.add_parser(
        "health",
        parents=[common],
        description="For probes: exits with 0 if the scheduler serves, with 1 if not. If MS_ROLE=MS_SCHED, it"
        " uses the scheduler's own certificate and password.",
    )
    drain = commands.add_parser(
        "drain", parents=[common], description="Lets a worker finish its step and leave; the others go on."
    )
    drain.add_argument("node", metavar="NODE", help="the worker's node id")
    drain.add_argument("--reason", default="drained by an operator", help="why, for the log and the workers")
    return made


def _role(options: argparse.Namespace, env: Mapping[str, str]) -> str:
    """A probe beside the scheduler has nothing but the scheduler's own certificate and password."""
    return "scheduler" if options.command == "health" and env.get("MS_ROLE") == "MS_SCHED" else "operator"


def _certificate(options: argparse.Namespace, address: Address) -> Path | None:
    """Draining takes the operator's certificate, which ``muster certs init`` puts beside config.json."""
    if options.cert is not None:
        if address.config_path is None:
            raise SettingsError("--cert needs a config.json, by --config or MS_CONFIG_FILE.")
        return Path(os.path.abspath(options.cert))  # noqa: PTH100 - resolve() would follow links
    if options.command == "drain" and address.config_path is not None:
        beside = address.config_path.parent / "operator.p12"
        return beside if beside.exists() else None
    return None


# ---------------------------------------------------------------- showing


def as_json(reply: pb.StatusReply) -> dict[str, Any]:
    """The reply as plain values; ranks that are not given yet are null."""
    return {
        "job_id": reply.job_id,
        "state": reply.state,
        "generation": reply.generation,
        "worker_num": reply.worker_num,
        "worker_min": reply.worker_min,
        "workers": [_worker_json(worker) for worker in reply.workers],
        "missing": list(reply.missing),
        "reason": reply.reason,
        "uptime_s": round(reply.uptime_s, 3),
        "version": reply.version,
    }


def _worker_json(worker: pb.WorkerStatus) -> dict[str, Any]:
    device, last = worker.device, worker.last_collective
    return {
        "node_id": worker.node_id,
        "host": {
            "name": worker.host_name,
            "id": worker.host_id,
            "address": worker.address,
            "topology": worker.topology,
        },
        "rank": worker.rank if worker.rank >= 0 else None,
        "local_rank": worker.local_rank if worker.local_rank >= 0 else None,
        "state": worker.state,
        "device": {
            "kind": device.kind,
            "index": device.index if device.index >= 0 else None,
            "pci_bus_id": device.pci_bus_id,
            "model": device.model,
        },
        "silent_s": round(worker.silent_s, 3),
        "step": worker.step,
        "samples_per_s": round(worker.samples_per_s, 3),
        "last_collective": {
            "sequence": last.sequence,
            "name": last.name,
            "group": last.group,
            "dtype": last.dtype,
            "size_bytes": last.size_bytes,
            "done": last.done,
        }
        if worker.HasField("last_collective")
        else None,
    }


def show(reply: pb.StatusReply, out: TextIO) -> None:
    """Shows the reply as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = None if out.isatty() else 140
    console = Console(file=out, width=width, highlight=False)
    formed = sum(1 for worker in reply.workers if worker.rank >= 0)
    size = str(reply.worker_num) if reply.worker_num else "?"
    least = f", at least {reply.worker_min}" if reply.worker_min not in (0, reply.worker_num) else ""
    console.print(
        Text(
            f"job {reply.job_id}: {reply.state}, generation {reply.generation}, "
            f"{formed} of {size} ranks{least}, scheduler up {_duration(reply.uptime_s)}"
        )
    )
    table = Table()
    for title in ("rank", "node id", "host", "device", "state"):
        table.add_column(title, overflow="fold")
    for title in ("heard", "step", "samples/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for worker in reply.workers:
        table.add_row(*(Text(cell) for cell in _row(worker)))
    console.print(table)
    for missing in reply.missing:
        console.print(Text(f"missing: {missing}", style="bold red"))
    if reply.reason:
        console.print(Text(reply.reason))


def _row(worker: pb.WorkerStatus) -> list[str]:
    return [
        str(worker.rank) if worker.rank >= 0 else "-",
        worker.node_id,
        _host(worker),
        _device(worker.device),
        worker.state,
        f"{worker.silent_s:.1f} s ago",
        str(worker.step),
        f"{worker.samples_per_s:,.1f}",
    ]


def _device(device: pb.Device) -> str:
    index = f":{device.index}" if device.index >= 0 else ""
    return " ".join(filter(None, (f"{device.kind}{index}", device.pci_bus_id, device.model)))


def _host(worker: pb.WorkerStatus) -> str:
    address = f" ({worker.address})" if worker.address else ""
    topology = f", {worker.topology}" if worker.topology else ""
    return f"{worker.host_name}{address}{topology}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"

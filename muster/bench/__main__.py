"""``muster bench NAME``: runs one benchmark, which is imported when named."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from muster.bench.report import describe_machine, write

COMMANDS = {
    "allreduce": "AllReduce: time and bandwidth, on the CPU or, with --backend nccl, on GPUs",
    "formation": "time of a short CPU job: from its start command through one AllReduce to its end",
    "train": "training speed of ResNet-50 or GPT-2 on GPUs, against DistributedDataParallel",
    "train-cpu": "time of a training step on CPUs, against DistributedDataParallel",
    "loss-curve": "loss of ResNet-50 by step, against DistributedDataParallel",
    "parallel": "sharded models on GPUs, against data parallelism, FSDP2 and hand-written code",
    "step-times": "what the measurement of steps costs a torch program on a GPU",
    "sharded": "GPU memory and step time with sharded optimizer state (ZeRO-1), and without",
    "start": "time from the start command of a GPU job to the end of its first AllReduce",
    "torch-start": "time to a torch program's first AllReduce: over Muster's store, and by a file",
    "torch-groups": "AllReduce of torch.distributed on CPUs: encrypted, and Gloo in plain text",
    "nccl-plugin": "what encryption costs NCCL's network plug-in, over loopback",
    "blame": "whether a launch names the worker that failed first, for each way to fail on each rank",
    "recovery": "time from the loss of a worker to the next good step",
    "in-place": "torch programs whose processes survive the loss of ranks: results, time to the next step",
    "snapshots": "state in other ranks' memory: killed hosts, or what it costs a step on a GPU",
    "failover": "three schedulers on etcd: leaders killed and stopped, etcd without a quorum",
    "flood": "a job during a flood of TLS handshakes: lost members, joins, memory",
    "soak": "hours of kills, stops, disconnections and floods, with every step checked",
    "identities": "SPIFFE identities that rotate while a job trains, and workers that lose theirs",
    "scale": "how many workers one scheduler can serve",
    "watch": "what watchers cost a scheduler, and what the page of 1,000 workers costs",
    "member-loss": "time until the scheduler reports a killed worker, directly and by an uplink",
    "stopped-uplink": "time until a host's workers are connected again after their uplink was stopped",
    "store": "the store of torch programs: rendezvous of 1,000 members over mutual TLS",
}

MODULES = {
    "allreduce": "allreduce.command",
    "torch-start": "start.torch_store",
    "torch-groups": "torch_groups",
    "nccl-plugin": "nccl_plugin.command",
    "blame": "blame",
    "formation": "start.formation",
    "train": "training.command",
    "train-cpu": "training.cpu",
    "loss-curve": "training.loss_curve",
    "parallel": "parallel.command",
    "step-times": "training.step_times",
    "sharded": "training.sharded",
    "start": "start.command",
    "recovery": "recovery.command",
    "in-place": "in_place.command",
    "snapshots": "snapshots.command",
    "failover": "failover.command",
    "flood": "flood.command",
    "soak": "soak.command",
    "identities": "identities.command",
    "scale": "scale.command",
    "watch": "watch",
    "member-loss": "scale.member_loss",
    "stopped-uplink": "scale.stopped_uplink",
    "store": "store",
}


def module_name(command: str) -> str:
    """Returns the name of a benchmark's module."""
    return f"muster.bench.{MODULES[command]}"


def available() -> dict[str, str]:
    """Returns the installed benchmarks, each with a line of help."""
    return {
        name: text
        for name, text in COMMANDS.items()
        if importlib.util.find_spec(module_name(name)) is not None
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark named first; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = available()
    if not arguments or arguments[0] not in commands:
        return _help(commands, arguments)
    name, rest = arguments[0], arguments[1:]
    try:
        module = importlib.import_module(module_name(name))
    except ModuleNotFoundError as error:
        return _lacks(name, error)
    parser = argparse.ArgumentParser(
        prog=f"muster bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(rest)
    try:
        machine = describe_machine()
        result = module.run(options)
    except KeyboardInterrupt:
        print("bench: interrupted, nothing was written", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        return _lacks(name, error)
    if not isinstance(result, dict):
        return int(result or 0)
    if hasattr(module, "report"):
        module.report(result)
    if options.json is not None:
        write(options.json, name, {"machine": machine, **result})
    return int(module.check(result, options.check)) if getattr(options, "check", None) else 0


def _lacks(name: str, error: ModuleNotFoundError) -> int:
    """Names the package that a benchmark lacks; returns the exit code."""
    lacking = (error.name or str(error)).partition(".")[0]
    print(f"bench: {name} needs {lacking}, which this Python does not have", file=sys.stderr)
    return 1


def _help(commands: dict[str, str], arguments: Sequence[str]) -> int:
    wanted = not arguments or arguments[0] in ("-h", "--help")
    stream = sys.stdout if wanted else sys.stderr
    if not wanted:
        print(f"bench: there is no benchmark {arguments[0]!r}", file=stream)
    print("usage: muster bench NAME [options]\n\nEach has its own --help.\n", file=stream)
    for name, text in commands.items():
        print(f"  {name:16} {text}", file=stream)
    return 0 if wanted else 2


if __name__ == "__main__":
    sys.exit(main())

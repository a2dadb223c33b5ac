"""The command line of ``muster run``."""

from __future__ import annotations

import argparse
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.errors import SettingsError
from muster.launch.parsing import HostShare, parse_addresses, parse_hostfile, parse_hosts
from muster.launch.worker_counts import Request
from muster.wire.files import read_regular
from muster.wire.variables import LAUNCHER, TABLE, WORKER, option_help, variables_help
from muster.worker.config import node_rank

_MAX_HOSTFILE_BYTES = 16 << 20
_PROGRAMS = ("auto", "muster", "torch", "jax")

DESCRIPTION = """\
Starts the workers of a training job on this host, and the scheduler if asked, and sees them to their end.
Each worker gets its environment (MS_ROLE, MS_WORKER_NUM, MS_LOCAL_INDEX, MS_NODE_ID, the scheduler's
address, its device) and a log of its own, worker_<rank>.log in muster-runs/<job>-<time>, to which the link
muster-runs/latest leads. Where the rank is not known beforehand (--nnodes without --node-rank, or a node id
of one's own) that is worker_<host>_<index>.log. When one fails, the others are ended and the launch ends with
exit code and last lines of the one that failed first. No ssh: on several hosts, type the same command on
each."""

EXAMPLES = """\
examples:
  certificates, once; then two workers and a scheduler on this machine, mutual TLS:
    muster certs init --dir keys --password-file keys/password
    muster run -n 2 --scheduler --config keys/config.json \\
      --password-file keys/password -- python train.py
  one worker per GPU, only GPUs 4 to 7, output of all ranks:
    muster run --devices 4-7 --tail all --scheduler --config c.json -- python train.py
  two hosts with 8 GPUs each, the same line on both; the scheduler runs on the first:
    muster run -H node1:8,node2:8 --scheduler --config c.json -- python train.py
  eight workers for a job whose scheduler runs elsewhere:
    muster run --nnodes 2 --nproc-per-node 8 --join 10.0.0.1:6667 --config c.json -- python train.py

exit code: 0 when all workers ended well; otherwise that of the first that failed (128 + number for a
signal); 143 when all left because of SIGTERM; 2 for a mistake in the options."""


def parser() -> argparse.ArgumentParser:
    """Makes the parser of ``muster run``."""
    made = argparse.ArgumentParser(
        prog="muster run",
        description=DESCRIPTION,
        epilog=f"{variables_help(WORKER, LAUNCHER)}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="muster run [options] -- COMMAND [ARGUMENT...]",
        allow_abbrev=False,
    )
    _add_counts(made.add_argument_group("how many, and where"))
    _add_job(made.add_argument_group("the job"))
    _add_running(made.add_argument_group("running"))
    _add_mpirun(made.add_argument_group("taken from mpirun's command lines, with a note of what serves here"))
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what each worker runs")
    return made


def _add_counts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-n",
        "-np",
        dest="workers",
        type=count,
        default=0,
        metavar="N",
        help=option_help("MS_WORKER_NUM", default="one per GPU"),
    )
    group.add_argument(
        *_both_ways("--nproc-per-node"), type=count, default=0, metavar="N", help="workers of each host"
    )
    group.add_argument("--nnodes", type=count, default=0, metavar="N", help="hosts of the job")
    group.add_argument(
        *_both_ways("--node-rank"),
        type=int,
        metavar="I",
        help="number of this host, from 0 (srun and indexed jobs set it)",
    )
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument(
        "-H", "--hosts", metavar="HOST:N,...", help="the hosts and how many workers each takes"
    )
    hosts.add_argument(
        "--hostfile", type=Path, metavar="FILE", help="the same from a file: HOST slots=N a line"
    )
    group.add_argument(
        "--devices",
        default="all",
        metavar="LIST",
        help="GPUs to use, such as 4-7 or 0,2; none for CPU workers (default: all in CUDA_VISIBLE_DEVICES)",
    )
    group.add_argument(
        "--share-gpus",
        action="store_true",
        help="let several workers share a GPU where there are more workers than GPUs, for trying: "
        "results hold, speeds mean nothing",
    )
    group.add_argument(
        "--oversubscribe",
        action="store_true",
        help="start more workers on this host than 8 for each core (and more than 32)",
    )
    group.add_argument(
        "--bind",
        choices=("none", "cores", "numa"),
        default="none",
        help="cores: give each worker its own part of the cores; numa: of the cores of its GPU's NUMA node, "
        "and memory of that node first, and propose to NCCL the InfiniBand adapters next to the GPUs; "
        "none (default): leave both to the kernel",
    )
    group.add_argument(
        "--bind-cores", dest="bind", action="store_const", const="cores", help="the same as --bind cores"
    )


def _add_job(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--scheduler",
        action="store_true",
        help="start the scheduler too (of several hosts on the first; without numbers, where --join leads)",
    )
    group.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="where the scheduler runs; of several with commas between (MS_SCHED_HOST, MS_SCHED_PORT)",
    )
    group.add_argument("--job-id", metavar="ID", help=option_help("MS_JOB_ID"))
    group.add_argument("--config", type=Path, metavar="FILE", help=option_help("MS_CONFIG_FILE"))
    group.add_argument(
        "--password-file",
        type=Path,
        metavar="FILE",
        help="file that holds the password of the .p12 files (MS_CLIENT_PASSWORD_FILE, and with --scheduler"
        " MS_SERVER_PASSWORD_FILE)",
    )
    group.add_argument(
        "--encrypt-nccl",
        nargs="?",
        const="require",
        choices=TABLE["MS_NCCL_ENCRYPTION"].choices,
        metavar="require|prefer",
        help=option_help("MS_NCCL_ENCRYPTION"),
    )
    group.add_argument(
        "--min-workers",
        type=count,
        default=0,
        metavar="N",
        help=option_help("MS_WORKER_MIN"),
    )
    group.add_argument(
        "--spares",
        type=count,
        default=0,
        metavar="N",
        help="start N more workers on each host, which wait and take the places of workers that are lost; "
        "a scheduler that is not started here needs a place for each (MS_SPARES)",
    )
    group.add_argument(
        "--drain-stragglers",
        metavar="1.5x:60s",
        default="",
        help=option_help("MS_DRAIN_STRAGGLERS"),
    )
    group.add_argument(
        *_both_ways("--max-restarts"),
        type=int,
        default=0,
        metavar="N",
        help="restart a worker that failed, up to N times each (0)",
    )


def _add_running(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        *_both_ways("--log-dir"),
        type=Path,
        metavar="DIR",
        help="directory of the logs (default: a new one in muster-runs); a log that is there is continued",
    )
    group.add_argument(
        "--tail",
        metavar="LIST",
        help="whose output to show here, with all that Muster logs: all, none, or ranks such as "
        "0,3,scheduler; where ranks are not known beforehand, indices on this host (default: what rank 0's "
        "script prints, and warnings)",
    )
    group.add_argument(
        "--program",
        choices=_PROGRAMS,
        default="auto",
        help="torch: the command makes its process groups by torch.distributed and knows nothing of Muster; "
        "jax: it calls jax.distributed.initialize() and knows nothing of Muster; "
        "muster: it calls muster.init(); auto (default): by what its script imports, "
        "or modules beside it",
    )
    group.add_argument(
        "--uplink",
        choices=("auto", "on", "off"),
        default="auto",
        help="on: one process of this host carries the streams of all its workers to the scheduler; off: "
        "each worker has its own; auto (default): on for jobs of 1,000 workers and more on several hosts",
    )
    group.add_argument("--in-place", action="store_true", help=option_help("MS_IN_PLACE"))
    group.add_argument("--timestamps", action="store_true", help="put the time before every line")
    group.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds between asking to end and killing (10)",
    )
    group.add_argument(
        "--start",
        choices=("auto", "fork", "exec"),
        default="auto",
        help="fork: import NumPy and gRPC once and fork the workers; exec: a fresh interpreter each; "
        "auto (default): fork where it helps, which is CPU workers run by this Python",
    )


def _add_mpirun(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--allow-run-as-root", action="store_true", help="not needed")
    group.add_argument(
        "--mca", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="passed over"
    )
    group.add_argument(
        "-x",
        dest="exports",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for workers",
    )


def _mpirun_notes(options: argparse.Namespace) -> list[str]:
    notes = []
    if options.allow_run_as_root:
        notes.append("--allow-run-as-root is not needed: any user may run this")
    for key, value in options.mca:
        if key.endswith("_if_include"):
            instead = f"MS_INTERFACE={value} chooses the network interface"
        else:
            instead = "settings are MS_* variables (muster run --help), NCCL's are NCCL_*"
        notes.append(f"--mca {key} {value} is passed over: {instead}")
    inherited = [name for name in options.exports if "=" not in name]
    if inherited:
        notes.append(f"-x {' '.join(inherited)} is not needed: workers inherit the whole environment")
    return notes


def _both_ways(name: str) -> tuple[str, str]:
    """Returns both spellings that torchrun accepts for an option: with hyphens and with underscores."""
    return name, "--" + name[2:].replace("-", "_")


def count(text: str) -> int:
    """A number of workers or hosts, as argparse reads it."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 0 < int(text) <= 65_536):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number from 1 to 65536")
    return int(text)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the options and checks them as far as that is possible without looking at the machine.

    Raises:
        SettingsError: the command is missing, or an option has a value that is not allowed.
    """
    options = parser().parse_args(argv)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        raise SettingsError(
            "No command to run: put it after --, as in muster run -n 2 --scheduler -- python train.py."
        )
    if not 0 <= options.grace <= 3600:
        raise SettingsError(f"--grace is {options.grace:g}; it must be from 0 to 3600 seconds.")
    if options.in_place and options.program in ("muster", "jax"):
        raise SettingsError(f"--in-place is for torch programs, and --program is {options.program}.")
    if not 0 <= options.max_restarts <= 1000:
        raise SettingsError(f"--max-restarts is {options.max_restarts}; it must be from 0 to 1000.")
    _check_file("--config", options.config, "; muster certs init makes one")
    _check_file("--password-file", options.password_file)
    for export in options.exports:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(=.*)?", export, re.DOTALL):
            raise SettingsError(f"-x is {export[:80]!r}; write NAME or NAME=VALUE.")
    options.notes = [*_mpirun_notes(options), *_torchrun_note(options)]
    return options


def _torchrun_note(options: argparse.Namespace) -> list[str]:
    """Notes that torchrun starts workers of its own, unless they meet by its rendezvous ``muster``."""
    command = options.command
    meets_here = any(word == "muster" or word.endswith("=muster") for word in command)
    if Path(command[0]).name != "torchrun" or options.program != "auto" or meets_here:
        return []
    return [
        "torchrun starts processes that are no workers of this job: give muster run its script, without it"
    ]


def _check_file(option: str, path: Path | None, remedy: str = "") -> None:
    try:
        if path is None or stat.S_ISREG(path.stat().st_mode):
            return
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # for example, this user may not enter a directory
        raise SettingsError(f"{option} names {path}, which cannot be read: {error.strerror}.") from error
    raise SettingsError(f"{option} names {path}, which is not a file{remedy}.")


def request(options: argparse.Namespace, env: Mapping[str, str]) -> Request:
    """Computes which workers start where, from the options and the host number of srun or Kubernetes."""
    rank = options.node_rank
    if rank is None and options.nnodes > 1:
        rank = node_rank(env)
    hosts = _hosts(options)
    by_address = options.scheduler and options.nnodes > 1 and rank is None and not hosts
    return Request(
        workers=options.workers,
        per_node=options.nproc_per_node,
        nodes=options.nnodes,
        node_rank=rank,
        hosts=hosts,
        meeting=_scheduler_host(options, env) if by_address else "",
        oversubscribe=options.oversubscribe,
        share_gpus=options.share_gpus,
        spares=options.spares,
    )


def _scheduler_host(options: argparse.Namespace, env: Mapping[str, str]) -> str:
    if options.join is not None:
        return parse_addresses(options.join)[0]
    return env.get("MS_SCHED_HOST", "").strip("[]")


def _hosts(options: argparse.Namespace) -> tuple[HostShare, ...]:
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if options.hostfile is None:
        return ()
    try:
        text = read_regular(options.hostfile, _MAX_HOSTFILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise SettingsError(f"--hostfile {options.hostfile} cannot be read: {reason}.") from error
    if "max" in text and re.search(r"\bmax[-_]slots\s*=", text):
        options.notes.append(
            f"{options.hostfile}: max_slots is passed over: a host takes the slots that it says"
        )
    return parse_hostfile(text, str(options.hostfile))

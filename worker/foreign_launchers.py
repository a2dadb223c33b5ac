"""What the environment of other launchers says in Muster's own variables.

``mpirun``, ``srun``, ``torchrun`` and Kubernetes indexed jobs all tell a process its number and the number
of processes, each in words of its own. :func:`translate` turns them into ``MS_*`` variables, so that a
worker which one of them started needs nothing else than the scheduler's address; of an indexed job, which
does not tell the number of processes, also MS_WORKER_NUM.
"""

from __future__ import annotations

from collections.abc import Mapping

from muster.rendezvous.value import Value
from muster.worker.launch.rank_table_file import table_file


class ForeignLauncher(Value):
    """The variables of one launcher; an empty name means that it says nothing of the kind.

    The presence of ``marker`` shows that this launcher started the process.
    """

    name: str
    rank: str
    size: str
    local_index: str
    marker: str


# The innermost first: a pod of an indexed job may run torchrun, a Slurm step may run mpirun.
LAUNCHERS = (
    ForeignLauncher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
    ForeignLauncher(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_RANK",
    ),
    ForeignLauncher("mpirun (MPICH)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALRANKID"),
    ForeignLauncher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID"),
    ForeignLauncher("Kubernetes indexed job", "JOB_COMPLETION_INDEX", "", "", "JOB_COMPLETION_INDEX"),
)

# The step of the shell that salloc opens on a node. Its variables say "task 0 of all", but it is no task.
INTERACTIVE_STEP = "4294967290"


def detect(env: Mapping[str, str]) -> ForeignLauncher | None:
    """Finds the launcher that started this process, or None. Muster's own launcher comes before all."""
    if "MS_LOCAL_INDEX" in env:
        return None
    return next((one for one in LAUNCHERS if _marked(env, one.marker) and env.get(one.rank)), None)


def _marked(env: Mapping[str, str], marker: str) -> bool:
    value = env.get(marker)
    return bool(value) and (marker, value) != ("SLURM_STEP_ID", INTERACTIVE_STEP)


def translate(env: Mapping[str, str]) -> dict[str, str]:
    """Says in Muster's variables what another launcher's environment says.

    Args:
        env: the process's environment.

    Returns:
        Only variables that ``env`` lacks: MS_ROLE, MS_NODE_ID (the launcher's rank), MS_WORKER_NUM and
        MS_LOCAL_INDEX. Empty when no known launcher is there, or when the process is not a worker.
        Values are handed on as they stand; whoever parses the variables judges them.
    """
    launcher = detect(env)
    if launcher is None or env.get("MS_ROLE", "MS_WORKER") != "MS_WORKER":
        return {}
    found = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": env[launcher.rank]}
    for name, source in (("MS_WORKER_NUM", launcher.size), ("MS_LOCAL_INDEX", launcher.local_index)):
        if source and env.get(source):
            found[name] = env[source]
    if table_file(env):
        del found["MS_NODE_ID"]  # the table gives the ranks, by host and device
    return {name: value for name, value in found.items() if not env.get(name)}


def node_rank(env: Mapping[str, str]) -> int | None:
    """The number of this host, where one launcher process per host was started by srun or an indexed job."""
    for variable, marker in (
        ("SLURM_NODEID", "SLURM_STEP_ID"),
        ("JOB_COMPLETION_INDEX", "JOB_COMPLETION_INDEX"),
    ):
        value = env.get(variable, "")
        if _marked(env, marker) and value.isascii() and value.isdigit() and len(value) <= 9:
            return int(value)
    return None

"""Decides what the nodes of a Slurm allocation do, and what the batch script does at the end. Pure.

Slurm's variables: https://slurm.schedmd.com/sbatch.html, OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.errors import SettingsError

FIRST_PORT, PORTS = 20_000, 10_000
"""A job's port is the first port plus the job's number modulo the number of ports."""

TOPO_TIMEOUT_S = 300
"""How long workers wait for others, in seconds: in an allocation all start at once, and no others come."""

ASK_EVERY_S, ASK_FOR_S = 20.0, 2.0 * TOPO_TIMEOUT_S
"""How often Slurm is asked for lost nodes, and for how long after the log last grew, in seconds."""

_LOST_STATES = ("down", "fail", "unknown", "reboot", "no_respond", "power")
# "drain" is not among them: a drained node runs on, and only takes no new jobs.


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes of a job of Slurm.

    Attributes:
        job_id: Slurm's number of the job.
        nodes: how many nodes it has.
        tasks_per_node: how many workers each of them runs.
        cpus_per_task: how many CPUs each worker has; 0: not known.
        node: the node of the batch script, which is the first one.
        restarts: how often the job was put back into the queue.
    """

    job_id: int
    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    node: str
    restarts: int

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Allocation:
        """Reads it from the environment of a batch script.

        Raises:
            SettingsError: this is not a batch script of Slurm, or nodes have different numbers of tasks.
        """
        job_id, node = _number(env, "SLURM_JOB_ID"), env.get("SLURMD_NODENAME", "")
        nodes = _number(env, "SLURM_JOB_NUM_NODES") or _number(env, "SLURM_NNODES")
        if not job_id or not nodes or not node:
            raise SettingsError(
                "muster slurm runs in a batch script of Slurm: SLURM_JOB_ID, SLURM_JOB_NUM_NODES or"
                " SLURMD_NODENAME is not set.",
                remedy="Submit deploy/slurm/muster.sbatch by sbatch.",
            )
        tasks = _number(env, "SLURM_NTASKS") or nodes * (_number(env, "SLURM_NTASKS_PER_NODE") or 1)
        if tasks % nodes:
            raise SettingsError(
                f"{nodes} nodes cannot share {tasks} tasks evenly.",
                remedy="Ask for --ntasks-per-node instead of --ntasks.",
            )
        cpus = _number(env, "SLURM_CPUS_PER_TASK")
        return cls(job_id, nodes, tasks // nodes, cpus, node, _number(env, "SLURM_RESTART_COUNT"))


@dataclass(frozen=True, slots=True)
class Division:
    """The division of an allocation's nodes into training, spare and unused ones.

    Attributes:
        allocation: the nodes.
        spares: how many nodes wait to take the place of a lost one.
        left_out: names of nodes that are not used.
    """

    allocation: Allocation
    spares: int
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuses spares that leave no node to train on.

        Raises:
            SettingsError: the number of spares is negative, or not below the number of nodes.
        """
        if not 0 <= self.spares < self.allocation.nodes:
            raise SettingsError(
                f"--spare-nodes {self.spares} leaves none of {self.allocation.nodes} nodes to train on.",
                remedy="Ask Slurm for more nodes (--nodes), or for fewer spare ones.",
            )

    @property
    def training_nodes(self) -> int:
        """Number of nodes that train at the same time: as requested, even if nodes are left out."""
        return self.allocation.nodes - self.spares

    @property
    def used_nodes(self) -> int:
        """Number of nodes with workers, including spare nodes."""
        return self.allocation.nodes - len(self.left_out)

    @property
    def can_start(self) -> bool:
        """Whether the nodes that are used are enough."""
        return self.used_nodes >= self.training_nodes

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Returns variables for scheduler and workers; the batch script's environment overrides most."""
        each = self.allocation.tasks_per_node
        own = {
            "MS_SCHED_HOST": ".".join(filter(None, (self.allocation.node, env.get("MUSTER_DOMAIN")))),
            "MS_SCHED_PORT": str(FIRST_PORT + self.allocation.job_id % PORTS),
            "MS_TOPO_TIMEOUT": str(TOPO_TIMEOUT_S),
            "MS_JOB_ID": "default",
        }
        spares = (self.used_nodes - self.training_nodes) * each
        fixed = {"MS_WORKER_NUM": str(self.training_nodes * each)}
        # Always set, because the variable of the submitter's shell may be for another job.
        fixed["MS_SPARES"] = str(spares)
        return {name: value for name, value in own.items() if not env.get(name)} | fixed

    def srun(self, *command: str, tasks_per_node: int = 0) -> tuple[str, ...]:
        """Returns a command line of srun for the used nodes; 0 tasks: one per worker."""
        each = tasks_per_node or self.allocation.tasks_per_node
        cpus = self.allocation.cpus_per_task
        return (
            # --unbuffered is not used: it gives each task a terminal, on which programs draw progress bars.
            *("srun", "--kill-on-bad-exit=0", "--no-kill"),
            *(f"--nodes={self.used_nodes}", f"--ntasks={self.used_nodes * each}"),
            f"--ntasks-per-node={each}",
            *((f"--exclude={','.join(self.left_out)}",) if self.left_out else ()),
            # Repeated here, because since Slurm 22.05 srun does not take them from the batch script.
            *((f"--cpus-per-task={cpus}",) if cpus and not tasks_per_node else ()),
            *(() if tasks_per_node else ("--label",)),  # prefixes each line with the worker's number
            *command,
        )

    def is_spare(self, node_number: int) -> bool:
        """Whether a node's workers are spares; ``node_number``: SLURM_NODEID in the step of the workers."""
        return node_number >= self.training_nodes


def lost_nodes(states: str) -> tuple[str, ...]:
    """Returns the nodes that Slurm has lost, from lines ``NAME STATE`` as ``sinfo`` writes them.

    A star after a state means that the node does not answer. A drained node that answers is not lost.
    """
    pairs = (line.split(maxsplit=1) for line in states.splitlines() if len(line.split()) > 1)
    return tuple(
        name for name, state in pairs if "*" in state or any(word in state.lower() for word in _LOST_STATES)
    )


@dataclass(slots=True)
class Questions:
    """Decides when Slurm is asked for lost nodes.

    A controller serves thousands of jobs, and each question costs it a list of all nodes. So none is asked
    while training goes on: the scheduler's log grows only when something happens, such as the loss of a
    worker. Slurm itself takes up to ``SlurmdTimeout`` (300 s by default) to notice a lost node, so asking
    goes on for a while.

    Attributes:
        log_bytes: size of the scheduler's log when it was last looked at.
        news_at: when it had grown, in seconds; None: never yet.
        asked_at: when Slurm was last asked, or the first news came.
    """

    log_bytes: int = 0
    news_at: float | None = None
    asked_at: float = 0.0

    def is_due(self, now: float, log_bytes: int) -> bool:
        """Whether to ask now; if so, the caller must."""
        if log_bytes != self.log_bytes:
            if self.news_at is None or now - self.news_at > ASK_FOR_S:
                self.asked_at = now  # Slurm does not know the cause of the news at once
            self.log_bytes, self.news_at = log_bytes, now
        if self.news_at is None or now - self.news_at > ASK_FOR_S or now - self.asked_at < ASK_EVERY_S:
            return False
        self.asked_at = now
        return True


@dataclass(frozen=True, slots=True)
class Sequel:
    """The batch script's next action when the workers of a job have ended.

    Attributes:
        code: the batch script's exit code.
        requeue: whether the job goes back into the queue instead.
        why: the reason, as a sentence.
    """

    code: int
    requeue: bool
    why: str


def decide(
    workers: int, scheduler: int, *, time_is_up: bool, lost: Sequence[str], requeues_left: int, minimum: bool
) -> Sequel:
    """Decides what follows.

    Args:
        workers: exit code of srun: the highest one of the workers, over 128 if one was killed.
        scheduler: the scheduler's exit code.
        time_is_up: Slurm has said that the time limit is near.
        lost: names of nodes that were lost.
        requeues_left: how often the job may still go back into the queue.
        minimum: MS_WORKER_MIN is set, so that workers may be lost.
    """
    if scheduler == 0 and (workers == 0 or workers > 128 or minimum) and not time_is_up:
        return Sequel(0, False, "the training is complete")
    if scheduler == 0 and workers == 0:
        return Sequel(0, False, "the training is complete")
    why = "its time is up" if time_is_up else f"lost: {', '.join(lost)}" if lost else ""
    code = workers or scheduler or 1
    if why and requeues_left > 0:
        return Sequel(code, True, f"{why}; the job goes back into the queue, and resumes from its checkpoint")
    return Sequel(code, False, why or f"the workers ended with {workers}, the scheduler with {scheduler}")


def _number(env: Mapping[str, str], name: str) -> int:
    """Returns the number in a variable of Slurm; 0 if it is not set."""
    value = env.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 9 else 0

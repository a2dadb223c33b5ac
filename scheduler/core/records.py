"""What the scheduler's state machine writes down: a job is what its records make of it."""

from __future__ import annotations

from dataclasses import dataclass

from muster.scheduler.core.values import Candidate, Member


@dataclass(frozen=True, slots=True)
class JobOpened:
    """The job's sizes, once known; again when the scheduler is restarted with another ``worker_min``."""

    job_id: str
    worker_num: int
    worker_min: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A worker process has a claim on a place (incarnations are durable, heartbeats are not)."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class LeavePlanned:
    """This worker is to leave at the next step boundary: it asked to, or an operator drains it."""

    node_id: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A worker process has lost its claim: finished, left, dead, superseded, expelled.

    Who has been a member never comes back under this incarnation.
    """

    node_id: str
    incarnation: int
    reason: str
    finished: bool = False


@dataclass(frozen=True, slots=True)
class GenerationFormed:
    """The membership of a generation, in order of rank."""

    generation: int
    members: tuple[Member, ...]
    state_source_rank: int
    newcomer_ranks: tuple[int, ...]
    reason: str
    switch_after_step: int = -1


@dataclass(frozen=True, slots=True)
class GroupEstablished:
    """All members of the generation have built their communicator."""

    generation: int


@dataclass(frozen=True, slots=True)
class GenerationEnded:
    """Too few members are left; the job is suspended."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobEnded:
    """Nobody may join any more."""

    ok: bool
    reason: str


Record = (
    JobOpened
    | Admitted
    | LeavePlanned
    | Removed
    | GenerationFormed
    | GroupEstablished
    | GenerationEnded
    | JobEnded
)

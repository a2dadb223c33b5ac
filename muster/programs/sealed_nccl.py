"""Hands the generation's NCCL secret from an agent to its programs; has the code of both sides.

An agent passes a file descriptor of a sealed memory file to each program that it starts. A program that
outlives generations gets the next secret over its connection to the agent, in place of the previous one.
torchrun closes all descriptors in the workers that it starts, so these open the file through /proc, which
only processes of this user can do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from muster.communicators.nccl.generation_secret import (
    DESCRIPTOR_VARIABLE,
    HandedSecret,
    derive_secret,
    read_secret_file,
)
from muster.errors import CommunicatorError
from muster.worker.program_environment import NCCL_SECRET_VARIABLE

if TYPE_CHECKING:
    from muster.worker.session.session import Session


def hand_over(session: Session, handed: HandedSecret) -> Mapping[str, str]:
    """Replaces the handed secret by the secret of this worker's current generation.

    Args:
        session: the agent's session.
        handed: holds the secret for the agent's programs.

    Returns:
        Further environment variables for the programs' NCCL; empty if NCCL's traffic is not sealed.

    Raises:
        MembershipChanged: the generation is over.
    """
    if not session.nccl.sealed:
        return {}
    membership = session.communicator.membership
    generation = membership.generation
    secret = derive_secret(membership.unique_ids, job_id=membership.job_id, generation=generation)
    handed.replace(generation, secret)
    return session.nccl.environment


def path_for_workers(handed: HandedSecret) -> str:
    """Returns the path at which this process's children open the secret that it holds."""
    return f"/proc/{os.getpid()}/fd/{handed.descriptor}"


def take_new_secret(descriptor: int, env: MutableMapping[str, str]) -> None:
    """Takes a new generation's secret in the program, under the descriptor number of the previous one.

    Args:
        descriptor: a descriptor of the new secret, owned by this process; the function closes or keeps it.
        env: the program's environment variables.
    """
    with contextlib.suppress(KeyError, ValueError, CommunicatorError, OSError):
        held = int(env[DESCRIPTOR_VARIABLE])
        read_secret_file(held)  # fails if the program has closed it and opened another file
        os.dup2(descriptor, held)
        os.close(descriptor)
        return
    os.set_inheritable(descriptor, True)
    env[DESCRIPTOR_VARIABLE] = str(descriptor)


def take_secret_of_torchrun(env: MutableMapping[str, str]) -> None:
    """Opens the secret in a worker of torchrun, before NCCL is loaded; does nothing if NCCL is not sealed.

    Raises:
        CommunicatorError: the secret cannot be opened; without it NCCL would end the process.
    """
    path = env.get(NCCL_SECRET_VARIABLE, "")
    if not path:
        return
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        read_secret_file(descriptor)
    except (OSError, CommunicatorError) as error:
        if descriptor >= 0:
            os.close(descriptor)
        if DESCRIPTOR_VARIABLE in env:  # a child of a worker, which has the secret already
            return
        raise CommunicatorError(
            "this worker of torchrun cannot open the secret of NCCL's encrypted connections, which its agent"
            f" holds: {getattr(error, 'strerror', None) or error}",
            remedy="Its generation may be over. Otherwise let workers see their agent's process in /proc.",
        ) from error
    os.set_inheritable(descriptor, True)
    env[DESCRIPTOR_VARIABLE] = str(descriptor)

"""How a program's NCCL gets the secret of its generation: an agent's side, and the program's.

An agent gives a program that it starts a descriptor of a sealed file of memory; a program that lives through
generations gets the next one over its line to the agent, in place of the one before. torchrun closes all
descriptors in the workers that it starts, so these open the file in /proc, which this user's processes alone
can.
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
    """Puts the secret of this worker's present generation in place of the one before.

    Args:
        session: the agent's.
        handed: what its programs get.

    Returns:
        What NCCL is to find in their environment besides; empty, without a secret: nothing is sealed.

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
    """Where children of this process open the secret that it holds."""
    return f"/proc/{os.getpid()}/fd/{handed.descriptor}"


def take_new_secret(descriptor: int, env: MutableMapping[str, str]) -> None:
    """Takes a generation's secret in the program, in place of the one before, whose number it gets.

    Args:
        descriptor: of the new one, which is this process's own; it is closed or kept.
        env: the program's environment.
    """
    with contextlib.suppress(KeyError, ValueError, CommunicatorError, OSError):
        held = int(env[DESCRIPTOR_VARIABLE])
        read_secret_file(held)  # the program may have closed it, and opened something else
        os.dup2(descriptor, held)
        os.close(descriptor)
        return
    os.set_inheritable(descriptor, True)
    env[DESCRIPTOR_VARIABLE] = str(descriptor)


def take_secret_of_torchrun(env: MutableMapping[str, str]) -> None:
    """Opens the secret in a worker of torchrun, before NCCL is loaded; nothing where nothing is sealed.

    Raises:
        CommunicatorError: it is not there, so that NCCL would find no secret, and end the process.
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
        if DESCRIPTOR_VARIABLE in env:  # a process of a worker's: the worker has it
            return
        raise CommunicatorError(
            "this worker of torchrun cannot open the secret of NCCL's encrypted connections, which its agent"
            f" holds: {getattr(error, 'strerror', None) or error}",
            remedy="Its generation may be over; else let /proc show the agent's process to its workers.",
        ) from error
    os.set_inheritable(descriptor, True)
    env[DESCRIPTOR_VARIABLE] = str(descriptor)

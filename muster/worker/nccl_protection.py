"""Looks at this process before NCCL is loaded, and carries out what was decided about its encryption.

The decision is :mod:`muster.communicators.nccl.encryption`'s. Where NCCL runs in this process, its
environment is set here; an agent hands it to the program that it starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, NamedTuple

from muster.communicators.nccl.encryption import (
    OFF,
    PREFER,
    NcclFacts,
    NcclProtection,
    SealingPlugin,
    decide,
    obstacle_before_build,
)
from muster.errors import SettingsError
from muster.wire.messages import NCCL_FACT, PLAIN, SEALED

if TYPE_CHECKING:
    from muster.communicators.base import Backend, NetPlugin
    from muster.worker.config import Settings

log = logging.getLogger("muster.worker")

SETTING = "MS_NCCL_ENCRYPTION"


class NcclHost(NamedTuple):
    """What this host has.

    Attributes:
        version: of NCCL; empty: not known.
        infiniband: whether it has devices for it.
        nvlink_between_hosts: whether it is in an NVLink domain of several hosts.
        look: finds or builds the plug-in.
        load: loads it into this process.
    """

    version: str
    infiniband: bool
    nvlink_between_hosts: bool
    look: Callable[[Mapping[str, str]], SealingPlugin]
    load: Callable[[str], NetPlugin]


def look_at_host() -> NcclHost:
    """What there is here, without loading a GPU library."""
    from muster.communicators.nccl import library
    from muster.worker.host import package_versions

    return NcclHost(
        package_versions(("nccl",)).get("nccl", ""),
        library.has_infiniband(),
        library.has_nvlink_between_hosts(),
        library.plugin_of_this_host,
        library.load,
    )


def decide_here(mode: str, env: Mapping[str, str], host: NcclHost, *, tls: bool) -> NcclProtection:
    """Decides for this host; the plug-in is looked for, or built, where nothing else is in the way.

    Args:
        mode: MS_NCCL_ENCRYPTION.
        env: what the user has set.
        host: what there is.
        tls: whether the generations' secrets come over mutual TLS.
    """
    facts = NcclFacts(tls, env, host.version, host.infiniband, host.nvlink_between_hosts)
    hindered = mode == OFF or obstacle_before_build(mode, facts) is not None
    return decide(mode, facts, SealingPlugin() if hindered else host.look(env))


def protect_nccl(
    settings: Settings,
    plane: Backend,
    env: Mapping[str, str],
    process_env: MutableMapping[str, str],
    *,
    tls: bool,
    look_at_host: Callable[[], NcclHost] = look_at_host,
) -> NcclProtection:
    """Decides, and sees to it that NCCL in this process finds what it needs; before it is loaded.

    Args:
        settings: MS_NCCL_ENCRYPTION.
        plane: the data plane; one that never runs NCCL has nothing to decide.
        env: what the user has set.
        process_env: this process's environment, which NCCL reads.
        tls: whether the generations' secrets come over mutual TLS.
        look_at_host: what there is.

    Raises:
        SettingsError: encryption is required and cannot be had; says why and what to do.
    """
    mode = settings.nccl_encryption
    if mode == OFF or not plane.may_run_nccl:
        return NcclProtection(mode)
    host = look_at_host()
    host = host._replace(version=plane.facts.get("nccl") or host.version)
    decided = decide_here(mode, dict(env), host, tls=tls)
    if decided.refusal is not None:
        raise SettingsError(
            f"{SETTING} is {mode!r}. {decided.refusal.sentence}", remedy=decided.refusal.remedy
        )
    if mode == PREFER:
        log.log(logging.INFO if decided.sealed else logging.WARNING, "NCCL between hosts: %s", decided.words)
    if decided.sealed and plane.on_device:
        process_env.update(decided.environment)
        plane.seal(host.load(decided.environment["NCCL_NET_PLUGIN"]))
    return decided


def encryption_facts(protection: NcclProtection, plane: Backend) -> dict[str, str]:
    """What all workers of a job must have alike of it; nothing where it is off."""
    if protection.mode == OFF:
        return {}
    effective = {NCCL_FACT: SEALED if protection.sealed else PLAIN} if plane.may_run_nccl else {}
    return {SETTING: protection.mode, **effective}

"""Examines this process before NCCL is loaded, and applies what was decided about NCCL's encryption.

:mod:`muster.communicators.nccl.encryption` decides. If NCCL runs in this process, its environment is set
here; an agent passes it to the program that it starts.
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
    """The relevant facts of this host.

    Attributes:
        version: version of NCCL; empty if not known.
        infiniband: whether it has InfiniBand devices.
        nvlink_between_hosts: whether it is in an NVLink domain of several hosts.
        look: a function that finds or builds the plug-in.
        load: a function that loads it into this process.
    """

    version: str
    infiniband: bool
    nvlink_between_hosts: bool
    look: Callable[[Mapping[str, str]], SealingPlugin]
    load: Callable[[str], NetPlugin]


def look_at_host() -> NcclHost:
    """Collects these facts without loading a GPU library."""
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
    """Decides for this host; finds or builds the plug-in only if nothing else prevents encryption.

    Args:
        mode: MS_NCCL_ENCRYPTION.
        env: the user's environment.
        host: the facts of this host.
        tls: whether the generations' secrets are received over mutual TLS.
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
    """Decides about NCCL's encryption, and prepares its environment in this process before NCCL is loaded.

    Args:
        settings: the worker's settings, with MS_NCCL_ENCRYPTION.
        plane: the data plane; if it never runs NCCL, there is nothing to decide.
        env: the user's environment.
        process_env: this process's environment, which NCCL reads.
        tls: whether the generations' secrets are received over mutual TLS.
        look_at_host: collects the facts of this host.

    Raises:
        SettingsError: encryption is required but not possible; the message says why and what to do.
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
    """Returns the facts about encryption that all workers of a job must share; empty if it is off."""
    if protection.mode == OFF:
        return {}
    effective = {NCCL_FACT: SEALED if protection.sealed else PLAIN} if plane.may_run_nccl else {}
    return {SETTING: protection.mode, **effective}

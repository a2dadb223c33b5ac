"""Decides whether Muster's plug-in seals NCCL's traffic between hosts, and which settings NCCL gets for it.

Pure: the input is the setting, the facts of this process and the plug-in, if there is one. The result is
the variables to set before NCCL is loaded, and a sentence, or a refusal. NCCL does not end in good order when
its network cannot be used (2.28.9 was seen to crash), so all that can be known is decided before it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from muster.wire.messages import NCCL_NET, NCCL_WORDS, PLAIN, SEALED

OFF, PREFER, REQUIRE = "off", "prefer", "require"
"""The values of MS_NCCL_ENCRYPTION."""

OLDEST_NCCL = (2, 19)
"""The oldest series of NCCL that accepts the plug-in's table of functions."""

SEALED_WORDS, PLAIN_WORDS = NCCL_WORDS[SEALED], NCCL_WORDS[PLAIN]

_OTHER_WAYS_OFF = {
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_GIN_ENABLE": "0",
    "NCCL_RMA_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
}
"""Variables that switch off the other ways out of the host: NVLink between hosts, CollNet, GPUs' own
transfers, RAS, verbs, and one-sided transfers, for which NCCL 2.32 has sockets of its own."""

_CHOSEN_WAYS = {
    ("NCCL_MNNVL_ENABLE", "1"): "NVLink between hosts",
    ("NCCL_COLLNET_ENABLE", "1"): "CollNet",
    ("NCCL_GIN_ENABLE", "1"): "GPU-initiated transfers",
    ("NCCL_RMA_DISABLE", "0"): "one-sided transfers",
}
"""Ways past the plug-in that a user who only prefers encryption may choose, by the variable and value."""

_OFF_UNLESS_CHOSEN = ("NCCL_GIN_ENABLE", "NCCL_RMA_DISABLE", "NCCL_RAS_ENABLE")


class SealingPlugin(NamedTuple):
    """The plug-in as this host has it; with an obstacle it cannot be used.

    Attributes:
        path: the library; empty: there is none.
        obstacle: why it cannot be used, as a sentence.
        remedy: what to do about that.
    """

    path: str = ""
    obstacle: str = ""
    remedy: str = ""


class NcclObstacle(NamedTuple):
    """Why NCCL's traffic cannot be sealed, as a sentence, and what to do about it."""

    sentence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class NcclFacts:
    """The facts about a process and its host from which :class:`NcclProtection` is decided.

    Attributes:
        tls: whether the secrets of generations are received over mutual TLS.
        env: the process's environment.
        version: the version of NCCL, such as "2.28.9"; empty: unknown.
        infiniband: whether this host has network devices that NCCL uses by verbs.
        nvlink_between_hosts: whether this host is in an NVLink domain of several hosts.
    """

    tls: bool
    env: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    infiniband: bool = False
    nvlink_between_hosts: bool = False


@dataclass(frozen=True, slots=True)
class NcclProtection:
    """The decision whether and how NCCL's traffic is encrypted.

    Attributes:
        mode: the setting MS_NCCL_ENCRYPTION: off, prefer or require.
        sealed: whether NCCL's traffic between hosts goes through the plug-in that encrypts.
        environment: variables to set in the environment of NCCL's process.
        plain_ways: transports that NCCL may use all the same and that are not encrypted.
        words: a text for people that says what is encrypted and what is not.
        refusal: with ``require``, the reason why this worker must not start; None: it may.
    """

    mode: str = OFF
    sealed: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    plain_ways: tuple[str, ...] = ()
    words: str = PLAIN_WORDS
    refusal: NcclObstacle | None = None


def obstacle_before_build(mode: str, facts: NcclFacts) -> NcclObstacle | None:
    """Finds what prevents encryption whether or not there is a plug-in; None if nothing does."""
    if not facts.tls:
        return NcclObstacle(
            "NCCL's traffic cannot be encrypted without certificates: its secret would travel in plain text.",
            "Give --config (MS_CONFIG_FILE); muster certs init makes certificates.",
        )
    if is_too_old(facts.version):
        return NcclObstacle(
            f"NCCL {facts.version} cannot load the plug-in that encrypts; NCCL 2.19 and later can.",
            "Install a newer NCCL, or the torch that brings one.",
        )
    return _chosen_net(facts.env) or (_chosen_way(facts) if mode == REQUIRE else _verbs(facts))


def is_too_old(version: str) -> bool:
    """Whether this NCCL lacks the plug-in's interface; False if its version is unknown: NCCL will tell."""
    numbers = version.split(".")[:2]
    return len(numbers) == 2 and all(map(str.isdigit, numbers)) and tuple(map(int, numbers)) < OLDEST_NCCL


def _chosen_net(env: Mapping[str, str]) -> NcclObstacle | None:
    plugin, net = env.get("NCCL_NET_PLUGIN", ""), env.get("NCCL_NET", "")
    if plugin and net != NCCL_NET:
        return NcclObstacle(
            f"NCCL_NET_PLUGIN is {plugin[:80]!r}, and NCCL takes one network plug-in: yours or the one that"
            " encrypts.",
            "Unset NCCL_NET_PLUGIN, or leave NCCL's encryption off (MS_NCCL_ENCRYPTION=off).",
        )
    if net not in ("", NCCL_NET):
        return NcclObstacle(
            f"NCCL_NET is {net[:80]!r}, a network that Muster does not encrypt.",
            "Unset NCCL_NET, or leave NCCL's encryption off (MS_NCCL_ENCRYPTION=off).",
        )
    if env.get("NCCL_ENV_PLUGIN", "") not in ("", "none"):
        return NcclObstacle(
            f"NCCL_ENV_PLUGIN is {env['NCCL_ENV_PLUGIN'][:80]!r}; it could take back what switches NCCL's"
            " encryption on.",
            "Unset NCCL_ENV_PLUGIN, or leave NCCL's encryption off (MS_NCCL_ENCRYPTION=off).",
        )
    return None


def _chosen_way(facts: NcclFacts) -> NcclObstacle | None:
    """Finds a way around the plug-in that the user has chosen; None if there is none."""
    env = facts.env
    if env.get("NCCL_IB_DISABLE") == "0" or env.get("NCCL_IB_HCA"):
        name = "NCCL_IB_HCA" if env.get("NCCL_IB_HCA") else "NCCL_IB_DISABLE"
        return NcclObstacle(
            f"{name} is {env[name][:80]!r}: it chooses InfiniBand or RoCE, which Muster cannot encrypt.",
            f"Unset {name} to send over TCP, encrypted, or take MS_NCCL_ENCRYPTION=prefer and a network that"
            " is protected by itself.",
        )
    if env.get("NCCL_MNNVL_ENABLE") == "1":
        return NcclObstacle(
            "NCCL_MNNVL_ENABLE is 1: NVLink between hosts goes past the plug-in that encrypts.",
            "Unset NCCL_MNNVL_ENABLE, or take MS_NCCL_ENCRYPTION=prefer.",
        )
    if env.get("NCCL_COLLNET_ENABLE") == "1":
        return NcclObstacle(
            "NCCL_COLLNET_ENABLE is 1: CollNet lets switches add numbers up, which they cannot do encrypted.",
            "Unset NCCL_COLLNET_ENABLE, or take MS_NCCL_ENCRYPTION=prefer.",
        )
    return None


def _verbs(facts: NcclFacts) -> NcclObstacle | None:
    """Finds InfiniBand that is not switched off: a job that only prefers encryption keeps using it."""
    if facts.infiniband and facts.env.get("NCCL_IB_DISABLE", "0") == "0":
        return NcclObstacle(
            "This host has InfiniBand or RoCE, over which NCCL is faster and not encrypted.",
            "MS_NCCL_ENCRYPTION=require sends over TCP instead, encrypted; so does NCCL_IB_DISABLE=1.",
        )
    return None


def decide(mode: str, facts: NcclFacts, plugin: SealingPlugin) -> NcclProtection:
    """Decides what is sealed.

    Args:
        mode: what MS_NCCL_ENCRYPTION says.
        facts: the facts of this process.
        plugin: the plug-in of this host; ignored if something else prevents encryption.
    """
    if mode == OFF:
        return NcclProtection()
    hindered = obstacle_before_build(mode, facts)
    if hindered is None and (plugin.obstacle or not plugin.path):
        hindered = NcclObstacle(
            plugin.obstacle or "The plug-in that encrypts NCCL's traffic is not built on this host.",
            plugin.remedy or "Run muster nccl-plugin build on it.",
        )
    if hindered is not None:
        refusal = hindered if mode == REQUIRE else None
        return NcclProtection(mode, words=f"{PLAIN_WORDS}: {hindered.sentence}", refusal=refusal)
    environment = {"NCCL_NET_PLUGIN": plugin.path, "NCCL_NET": NCCL_NET}
    if mode == REQUIRE:
        return NcclProtection(mode, True, {**environment, **_OTHER_WAYS_OFF}, words=SEALED_WORDS)
    quiet = {name: _OTHER_WAYS_OFF[name] for name in _OFF_UNLESS_CHOSEN if not facts.env.get(name)}
    plain = [words for (name, chosen), words in _CHOSEN_WAYS.items() if _is_taken(name, chosen, facts)]
    words = f"{SEALED_WORDS}, {', '.join(plain)} {PLAIN_WORDS}" if plain else SEALED_WORDS
    return NcclProtection(mode, True, {**environment, **quiet}, tuple(plain), words)


def _is_taken(name: str, chosen: str, facts: NcclFacts) -> bool:
    """Whether NCCL may bypass the plug-in in this way; it uses NVLink between hosts without being asked."""
    value = facts.env.get(name, "")
    return value == chosen or (name == "NCCL_MNNVL_ENABLE" and value != "0" and facts.nvlink_between_hosts)

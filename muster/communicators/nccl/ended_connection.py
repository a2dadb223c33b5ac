"""Says, in the plug-in's words, why an encrypted NCCL connection ended, and which rank was its peer."""

from __future__ import annotations

import re

from muster.communicators.base import NetPlugin
from muster.communicators.membership import Membership, Peer


def why_ended(plugin: NetPlugin | None, membership: Membership) -> str:
    """Returns the plug-in's reason, to follow NCCL's own error text; empty: the plug-in knows none.

    Args:
        plugin: the network plug-in that NCCL uses; None: NCCL's own network.
        membership: the members of the broken communicator.
    """
    reason = "" if plugin is None else plugin.reason()
    if not reason:
        return ""
    others = [peer for peer in membership.peers if peer.rank != membership.rank and _is_named(peer, reason)]
    names = ", ".join(f"rank {peer.rank} ({peer.node_id} on {peer.host_name})" for peer in others)
    where = f" That address is of {names}." if names else ""
    return f"; the plug-in that encrypts says: {reason}{'' if reason.endswith('.') else '.'}{where}"


def _is_named(peer: Peer, reason: str) -> bool:
    """Whether the peer's address occurs in the sentence, other than as part of a longer address."""
    host = peer.data_address.rpartition(":")[0].strip("[]")
    return bool(host) and re.search(rf"(?<![\w.:]){re.escape(host)}(?![\w.]\w|\w)", reason) is not None

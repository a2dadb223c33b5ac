"""SPIFFE IDs, and their mapping to Muster's identities by ``identity_map`` of config.json. Pure.

Rules of SPIFFE IDs: https://github.com/spiffe/spiffe/blob/main/standards/SPIFFE-ID.md, section 2. Imports the
standard library alone, as :mod:`muster.certs.config` must.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.certs.errors import IdentityError
from muster.certs.pki.identity import Identity

SPIFFE_SCHEME = "spiffe://"
MAX_URI_BYTES = 2048
MAX_DOMAIN_LENGTH = 255
MAX_RULES = 256

_DOMAIN = re.compile(r"[a-z0-9._-]+", re.ASCII)
_SEGMENT = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_PLACES = ("{job}", "{node}", "{}")
_KEYS = ("uri", "role", "job", "node")
_MAPPED_ROLES = ("scheduler", "worker", "operator")
_FORM = (
    'As in {"uri": "spiffe://prod.example/ns/{job}/worker/{node}", "role": "worker"}: {job} and {node} stand'
    " for a path segment each, {} for one that does not matter."
)


def split_spiffe_id(uri: str) -> tuple[str, tuple[str, ...]]:
    """Parses a SPIFFE ID; only the canonical spelling is accepted.

    Returns:
        The trust domain, and the segments of the path.

    Raises:
        IdentityError: the text is not a SPIFFE ID in canonical spelling.
    """
    domain, *path = uri.removeprefix(SPIFFE_SCHEME).split("/")
    wrong = ""
    if not uri.startswith(SPIFFE_SCHEME):
        wrong = f"it does not begin with {SPIFFE_SCHEME}"
    elif len(uri.encode()) > MAX_URI_BYTES:
        wrong = f"it is longer than {MAX_URI_BYTES} bytes"
    elif not _DOMAIN.fullmatch(domain) or len(domain) > MAX_DOMAIN_LENGTH:
        wrong = "a trust domain has 1 to 255 of a-z, 0-9, dots, hyphens and underscores"
    elif not path:
        wrong = "it has no path, and so names a trust domain and no workload"
    elif not all(_SEGMENT.fullmatch(segment) and segment not in (".", "..") for segment in path):
        wrong = "a path segment has A-Z, a-z, 0-9, dots, hyphens and underscores, and is not empty, . or .."
    if wrong:
        raise IdentityError(f"{uri[:300]!r} is not a SPIFFE ID: {wrong}.")
    return domain, tuple(path)


@dataclass(frozen=True, slots=True)
class IdentityRule:
    """A map of SPIFFE IDs to identities.

    Attributes:
        domain: the trust domain.
        path: the path's segments; ``{job}``, ``{node}`` and ``{}`` match any segment.
        role: the role of the holders.
        job: the job that all of them have; empty: the segment in the place of ``{job}``.
        node: the node that all of them have; empty: the segment in the place of ``{node}``, or bound to none.
    """

    domain: str
    path: tuple[str, ...]
    role: str
    job: str = ""
    node: str = ""

    def identity_of(self, uri: str, domain: str, path: tuple[str, ...]) -> Identity | None:
        """Returns the identity of a parsed SPIFFE ID; None where the rule does not match.

        Raises:
            IdentityError: a segment is no valid name of a job or a node.
        """
        if domain != self.domain or len(path) != len(self.path):
            return None
        found: dict[str, str] = {}
        for pattern, segment in zip(self.path, path, strict=True):
            if pattern in _PLACES:
                found[pattern] = segment
            elif pattern != segment:
                return None
        node = self.node or found.get("{node}")
        return Identity(self.job or found["{job}"], self.role, node, spiffe_id=uri)


@dataclass(frozen=True, slots=True)
class IdentityMap:
    """All rules of a config.json."""

    rules: tuple[IdentityRule, ...] = ()

    def identity_of(self, uri: str) -> Identity:
        """Returns the identity to which a SPIFFE ID is mapped.

        Raises:
            IdentityError: it is not a SPIFFE ID, no rule fits, or rules give different identities.
        """
        domain, path = split_spiffe_id(uri)
        found = [rule.identity_of(uri, domain, path) for rule in self.rules]
        fitting = {identity.uri(): identity for identity in found if identity is not None}
        if not fitting:
            raise IdentityError(
                f"{uri[:300]} stands for no job and role here.",
                remedy="Add a rule to identity_map in config.json, or give the workload another SPIFFE ID.",
            )
        if len(fitting) > 1:
            raise IdentityError(
                f"{uri[:300]} fits several rules of identity_map: {' and '.join(sorted(fitting)[:4])}.",
                remedy="Make the rules tell them apart.",
            )
        return next(iter(fitting.values()))


def read_identity_map(value: object) -> IdentityMap:
    """Reads ``identity_map``: a list of objects with ``uri``, ``role``, and perhaps ``job`` and ``node``.

    Raises:
        IdentityError: the map cannot be used; the message says which rule, and why.
    """
    if not isinstance(value, list) or len(value) > MAX_RULES:
        raise IdentityError(f"it must be a list of at most {MAX_RULES} rules.", remedy=_FORM)
    rules = []
    for number, each in enumerate(value, start=1):
        try:
            rules.append(_read_rule(each))
        except IdentityError as error:
            raise IdentityError(f"rule {number}: {error.message}", remedy=error.remedy or _FORM) from None
    return IdentityMap(tuple(rules))


def _read_rule(value: object) -> IdentityRule:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        raise IdentityError("it must be an object whose values are strings.")
    given: Mapping[Any, str] = value
    if given.keys() - set(_KEYS) or not {"uri", "role"} <= given.keys():
        raise IdentityError(f"its keys are {', '.join(_KEYS)}, of which uri and role are needed.")
    if given["role"] not in _MAPPED_ROLES:
        raise IdentityError(f"role is {given['role'][:60]!r}; legal are {', '.join(_MAPPED_ROLES)}.")
    start, *path = given["uri"].removeprefix(SPIFFE_SCHEME).split("/")
    scheme = SPIFFE_SCHEME if given["uri"].startswith(SPIFFE_SCHEME) else ""
    domain, _ = split_spiffe_id(
        "/".join([scheme + start, *("x" if part in _PLACES else part for part in path)])
    )
    for name in ("job", "node"):
        if path.count(f"{{{name}}}") + (name in given) > 1:
            raise IdentityError(f"{name} is given twice.")
    if "{job}" not in path and "job" not in given:
        raise IdentityError("it says no job.", remedy='Name it: {job} in uri, or "job": "*" for any job.')
    Identity(given.get("job", "x"), given["role"], given.get("node"))  # refuses names that nobody may have
    return IdentityRule(domain, tuple(path), given["role"], given.get("job", ""), given.get("node", ""))


def why_not_mapped(identity: Identity, identity_map: IdentityMap | None) -> str | None:
    """Returns why an accepted SPIFFE ID is not mapped to the same identity any more; None if it is."""
    if not identity.spiffe_id:
        return None
    try:
        now = (identity_map or IdentityMap()).identity_of(identity.spiffe_id)
    except IdentityError as error:
        return error.message
    return (
        None if now == identity else f"{identity.spiffe_id} stands for {now.uri()} now, not {identity.uri()}."
    )

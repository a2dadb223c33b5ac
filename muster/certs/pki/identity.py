"""The identity in a certificate: a job, a role and, if bound, node ids.

The identity is a URI in the subject alternative name, ``muster://<job>/<role>[/<node>]``, each part
percent-encoded. The job ``*`` stands for any job. The certificate of a host lists all of its node ids in
ascending order, ``muster://<job>/host/<node>/...``; its holder may act as a worker with any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

from muster.certs.errors import IdentityError

SCHEME = "muster://"
ROLES = ("scheduler", "worker", "operator", "host")
ANY_JOB = "*"
MAX_NAME_LENGTH = 128
MAX_NODES = 256


@dataclass(frozen=True, slots=True)
class Identity:
    """What a certificate says about its holder.

    Args:
        job: the job's id, or ``*`` for any job.
        role: ``scheduler``, ``worker``, ``operator`` or ``host``; ``*`` for a legacy certificate.
        node: the only node id that the holder may take; None if it is not bound to one.
        legacy: whether the certificate has no identity, and the configuration accepts such certificates.
        nodes: for the role ``host``, all node ids that its workers may take, in ascending order.
        spiffe_id: the SPIFFE ID that is mapped to this identity; empty: the certificate has the URI itself.

    Raises:
        IdentityError: a part is empty, too long, or has characters that are not allowed; a host names no
            node, one twice or too many.
    """

    job: str
    role: str
    node: str | None = None
    legacy: bool = False
    nodes: tuple[str, ...] = ()
    spiffe_id: str = ""

    def __post_init__(self) -> None:
        """Checks the parts."""
        if self.legacy:
            return
        if self.role not in ROLES:
            raise IdentityError(
                f"The role {self.role!r} does not exist.", remedy=f"Roles: {', '.join(ROLES)}."
            )
        check_name("job", self.job)
        for node in self.bound_to:
            check_name("node", node)
        self._check_nodes()

    def _check_nodes(self) -> None:
        if (self.role == "host") != bool(self.nodes) or (self.nodes and self.node is not None):
            raise IdentityError(
                "A certificate of role host must name at least one node; only that role may name several.",
                remedy="Name each node with --node.",
            )
        if len(self.nodes) > MAX_NODES or list(self.nodes) != sorted(set(self.nodes)):
            raise IdentityError(f"A host names at most {MAX_NODES} nodes, each once, in ascending order.")

    @property
    def bound_to(self) -> tuple[str, ...]:
        """The node ids that the holder may take; empty: any."""
        return self.nodes if self.node is None else (self.node,)

    def uri(self) -> str:
        """The identity in the form in which a certificate contains it."""
        parts = [self.job, self.role, *self.bound_to]
        return SCHEME + "/".join(quote(part, safe="*") for part in parts)

    def __str__(self) -> str:
        """The URI, with the SPIFFE ID if it comes from one; words for a legacy certificate."""
        if self.legacy:
            return "a certificate without an identity"
        return f"{self.spiffe_id} ({self.uri()})" if self.spiffe_id else self.uri()

    def may(
        self, *, role: str | Sequence[str] | None = None, job: str | None = None, node: str | None = None
    ) -> str | None:
        """Checks whether the holder may act in a role, in a job and as a node; None is not checked.

        A holder with the role ``host`` may act as a worker with any of its node ids.

        Args:
            role: the role needed, or several of which one is enough.
            job: the job concerned.
            node: the node id that the holder claims to have.

        Returns:
            None if it may, otherwise one sentence that says why not.
        """
        if self.legacy:
            return None
        roles = (role,) if isinstance(role, str) else role
        own = ("host", "worker") if self.role == "host" else (self.role,)
        if roles is not None and not set(own) & set(roles):
            return f"The certificate {self} has the role {self.role}, and this needs {' or '.join(roles)}."
        if job is not None and self.job not in (ANY_JOB, job):
            return f"The certificate {self} is for the job {self.job!r}, not {job!r}."
        if node is not None and self.bound_to and node not in self.bound_to:
            return f"The certificate {self} is bound to {self._whom()}, not {node!r}."
        return None

    def _whom(self) -> str:
        named = ", ".join(repr(node) for node in self.bound_to[:8])
        more = f" and {len(self.bound_to) - 8} more" if len(self.bound_to) > 8 else ""
        return f"the node {named}" if len(self.bound_to) == 1 else f"the nodes {named}{more}"


LEGACY = Identity(job=ANY_JOB, role="*", legacy=True)
"""Identity of a certificate that names none, where ``require_identity`` is false."""


def check_name(kind: str, name: str) -> None:
    """Refuses a job or node name that could be mistaken for another one.

    Raises:
        IdentityError: the name is empty, longer than 128 characters, unprintable, ``.`` or ``..``.
    """
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise IdentityError(f"A {kind} name has 1 to {MAX_NAME_LENGTH} characters, not {len(name)}.")
    if not name.isprintable() or name != name.strip() or name in (".", ".."):
        raise IdentityError(f"The {kind} name {name!r} has characters or a form that is not allowed.")
    if kind == "node" and name == ANY_JOB:
        raise IdentityError("The node name '*' is not allowed.", remedy="Leave the node out to bind to none.")


def parse_uri(uri: str) -> Identity:
    """Reads an identity URI. Only the canonical spelling is accepted, so that each identity has one URI.

    Raises:
        IdentityError: the URI is not a well-formed identity.
    """
    parts = uri.removeprefix(SCHEME).split("/")
    of_host = parts[1:2] == ["host"] and len(parts) > 2
    if not uri.startswith(SCHEME) or (len(parts) not in (2, 3) and not of_host):
        raise IdentityError(
            f"{uri[:300]!r} is not an identity.",
            remedy="Form: muster://<job>/<role>[/<node>], or muster://<job>/host/<node>/...",
        )
    try:
        names = [unquote(part, errors="strict") for part in parts]
    except UnicodeDecodeError:
        raise IdentityError(f"{uri[:300]!r} is not an identity: it is not UTF-8.") from None
    if of_host:
        identity = Identity(names[0], names[1], nodes=tuple(names[2:]))
    else:
        identity = Identity(names[0], names[1], names[2] if len(names) == 3 else None)
    if identity.uri() != uri:
        raise IdentityError(f"{uri[:300]!r} is not an identity: its canonical form is {identity.uri()}.")
    return identity

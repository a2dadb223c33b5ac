"""Removes secrets from text that is kept or shown: values of secret variables, keys, long runs of digits.

Stacks contain names of files and functions but no values, so there is seldom anything to remove. But output
of other programs is mixed with them, so the whole text is searched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

REMOVED = "(removed)"
SECRET_WORDS = ("PASS", "PWD", "SECRET", "TOKEN", "KEY", "CRED", "JWT", "AUTH")
"""Words in the name of a variable whose value is secret."""

NO_SECRETS = ("_FILE", "_PATH", "_DIR", "_SOCK", "OLDPWD")
"""Endings of names whose values are paths and not secrets, even if the name contains such a word."""

SHORTEST = 4
"""The least length in characters of a value that is searched for; shorter ones occur in ordinary words."""

_PATTERNS = (
    re.compile(r"-----BEGIN [A-Z0-9 ]{1,40}-----.*?(?:-----END [A-Z0-9 ]{1,40}-----|\Z)", re.DOTALL),
    re.compile(r"(?<![0-9A-Za-z])(?:[0-9A-Fa-f]{2}[: ]?){24,}(?![0-9A-Za-z])"),  # a key, a unique id
    re.compile(r"(?:\\x[0-9a-f]{2}){8,}"),  # the same as Python writes bytes
    re.compile(r"(?<![0-9A-Za-z+/=])(?=[^\s]*[0-9])(?=[^\s]*[+=])[0-9A-Za-z+/]{40,}={0,2}"),
)
_ASSIGNED = re.compile(
    r"(?i)\b([a-z_]*(?:password|passwd|secret|token|api_?key|unique_?ids?)[a-z_]*\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|\S+)"
)


def secrets_of(env: Mapping[str, str]) -> list[str]:
    """Returns the values of the variables whose names mark them as secret, the longest first."""
    found = {
        value
        for name, value in env.items()
        if len(value) >= SHORTEST
        and name != "PWD"
        and any(word in name.upper() for word in SECRET_WORDS)
        and not name.upper().endswith(NO_SECRETS)
    }
    return sorted(found, key=len, reverse=True)


def without_secrets(text: str, env: Mapping[str, str]) -> str:
    """Returns a text in which everything that may be secret is replaced.

    Args:
        text: any number of lines.
        env: the environment with the values of secret variables.
    """
    for secret in secrets_of(env):
        text = text.replace(secret, REMOVED)
    for pattern in _PATTERNS:
        text = pattern.sub(REMOVED, text)
    return _ASSIGNED.sub(lambda found: found[1] + REMOVED, text)

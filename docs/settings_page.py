"""Writes docs/settings.md from the tables that the code reads: ``python docs/settings_page.py``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from muster.certs.config import KEYS  # noqa: E402
from muster.wire.variables import TABLE  # noqa: E402
from muster.worker.config import LAUNCHERS  # noqa: E402

PAGE = ROOT / "docs" / "settings.md"
HEAD = """# Settings

Names and meanings are MindSpore's where it has them. A wrong value ends the process at once, with exit code 2
and a sentence that names the variable, the value and the legal range. This page is made of the tables that
the code reads (`wire/variables.py`, `certs/config.py`); `muster run --help` and
`muster scheduler --help` show the variables on a terminal. An option goes before its variable; those of
`muster status` are also those of `jobs`, `health`, `drain`, `stacks` and `web`.

| variable | read by | value | meaning | default | option |
|---|---|---|---|---|---|
"""
KEYS_HEAD = """
## config.json

`python -m muster certs init` writes one. Paths are relative to it. A change counts at once in processes that
run; of `cipher_list` only at the next start.

| key | meaning | default |
|---|---|---|
"""
LAUNCHERS_HEAD = """
## Variables of others

A worker that another launcher has started takes from its variables what is not set above:

| launcher | `MS_NODE_ID` | `MS_WORKER_NUM` | `MS_LOCAL_INDEX` | known by |
|---|---|---|---|---|
"""
END = """
Of systemd, `NOTIFY_SOCKET`, `WATCHDOG_USEC`, `JOURNAL_STREAM` and `CREDENTIALS_DIRECTORY` count; of
terminals `NO_COLOR`, `TERM` and `COLUMNS`; of gRPC `GRPC_VERBOSITY` and `GRPC_TRACE`; `XDG_RUNTIME_DIR` or
`TMPDIR` say where `muster status` finds what runs.
"""


def page() -> str:
    """The whole page."""
    rows = (
        f"| `{name}` | {row.side} | {row.values_in_words()} | {row.meaning} | {row.default_in_words()} |"
        f" {', '.join(f'`muster {option}`' for option in row.options)} |\n"
        for name, row in TABLE.items()
    )
    keys = (f"| `{key}` | {meaning} | {default} |\n" for key, (meaning, default) in KEYS.items())
    launchers = (
        f"| {each.name} | "
        + " | ".join(
            f"`{name}`" if name else "" for name in (each.rank, each.size, each.local_index, each.marker)
        )
        + " |\n"
        for each in LAUNCHERS
    )
    return HEAD + "".join(rows) + KEYS_HEAD + "".join(keys) + LAUNCHERS_HEAD + "".join(launchers) + END


if __name__ == "__main__":
    PAGE.write_text(page())

"""A worker of the recovery benchmark whose default of MS_RECONNECT_TIMEOUT is one second."""

from __future__ import annotations

import runpy

from muster.wire.variables import TABLE

if __name__ == "__main__":
    TABLE["MS_RECONNECT_TIMEOUT"] = TABLE["MS_RECONNECT_TIMEOUT"]._replace(default=1.0)
    runpy.run_module("muster.bench.recovery.digits", run_name="__main__")

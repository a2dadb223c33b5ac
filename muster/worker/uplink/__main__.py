"""``python -m muster.worker.uplink``: the uplink's process, as the launcher starts it."""

from __future__ import annotations

import os
import sys

from muster.worker.uplink.process import main

if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # gRPC's threads may still be in their last call.

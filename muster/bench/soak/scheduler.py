"""A scheduler whose wall clock the soak can shift."""

from __future__ import annotations

import os
import sys

from muster.bench.soak.clock import CLOCK_VARIABLE, follow

if __name__ == "__main__":
    follow(os.environ[CLOCK_VARIABLE])
    from muster.scheduler.__main__ import main

    sys.exit(main())

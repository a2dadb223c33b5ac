"""``python -m scheduler``: the scheduler of Muster."""

import sys

from muster.scheduler.__main__ import main

if __name__ == "__main__":
    sys.exit(main())

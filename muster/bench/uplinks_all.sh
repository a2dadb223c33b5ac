#!/bin/sh
# All figures of hosts' uplinks: how soon a death is reported, 1,000 to 10,000 workers, ten minutes at MS_NODE_TIMEOUT=5.
# Needs: PYTHON (default: .venv/bin/python of this checkout), made by `python3 -m venv .venv` and
# `.venv/bin/pip install .`; about 20 minutes on a quiet machine.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c 'import numpy, grpc' 2> /dev/null; then
    sed -n '2,4s/^# \{0,1\}//p' "$0" >&2
    echo "$python lacks them, or is not there." >&2
    exit 2
fi
"$python" -m muster bench member-loss --json muster/bench/results/member-loss.json
"$python" -m muster bench scale --uplinks --sweep 1000,5000,10000 --limit-s 600 --results muster/bench/results
"$python" -m muster bench scale --uplinks --workers 5000 --beat-s 1 --limit-s 600 \
    --json muster/bench/results/uplinks_5000_1hz.json
"$python" -m muster bench scale --uplinks --workers 5000 --node-timeout-s 5 --heartbeat-s 600 --limit-s 900 \
    --json muster/bench/results/uplinks_5000_held.json

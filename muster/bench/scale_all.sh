#!/bin/sh
# All figures of docs/scale.md: measures 10 to 5,000 workers, draws the plot, fills the table in.
# Needs: PYTHON (default: .venv/bin/python of this checkout), made by `python3 -m venv .venv` and
# `.venv/bin/pip install '.[plot]'`; about ten minutes on a quiet machine.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c 'import matplotlib, grpc' 2> /dev/null; then
    sed -n '2,4s/^# \{0,1\}//p' "$0" >&2
    echo "$python lacks them, or is not there." >&2
    exit 2
fi
"$python" -m muster bench scale --sweep 10,30,100,300,1000,2000,5000 --results muster/bench/results
"$python" -m muster.bench.scale.plot muster/bench/results/scale_*.json --out docs/scale.png --page docs/scale.md

#!/bin/sh
# All figures of docs/scale.md: measures 10 to 5,000 workers, draws the plot, fills the table in.
# Needs: pip install 'muster[plot]'; about ten minutes on a quiet machine.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -m muster bench scale --sweep 10,30,100,300,1000,2000,5000 --results bench/results
"$python" -m muster.bench.scale.plot bench/results/scale_*.json --out docs/scale.png --page docs/scale.md

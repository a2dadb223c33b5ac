#!/bin/sh
# One host, one worker per GPU, scheduler included: what "mpirun -n 8" did.
#
#   sh examples/run_gpu.sh DATA_PATH [ARGUMENT...]
#
# DATA_PATH    folder with the CIFAR-10 binary files (cifar-10-batches-bin)
# ARGUMENT...  handed to the training script
# Environment: WORKERS (default: one per GPU), SCRIPT (default: -m examples.resnet50_cifar10),
#              KEYS (folder of the certificates, made if it is not there), PYTHON. A folder made here holds the
#              authority too: good for this host alone, not to be copied to others (run_gpu_cluster.sh).
# Logs: muster-runs/latest/worker_<rank>.log; rank 0 is shown here.
set -eu

if [ $# -lt 1 ] || [ ! -d "$1" ]; then
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
DATA_PATH=$(cd "$1" && pwd)
export DATA_PATH
shift
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
if ! "$python" -c 'import muster.scheduler.serve.server, muster.certs.cli.commands' 2> /dev/null; then
    echo "${0##*/}: $python cannot run Muster: install its requirements there (pip install .[cuda13])," >&2
    echo "or name another Python with PYTHON." >&2
    exit 2
fi
if [ -z "${WORKERS:-}" ] && ! "$python" -c 'import sys
from muster.launch.command import count_gpus
sys.exit(not count_gpus())'; then
    echo "${0##*/}: this host has no GPU: say with WORKERS how many workers are to train on its CPU." >&2
    exit 2
fi
keys=${KEYS:-.muster}
if [ ! -f "$keys/config.json" ]; then
    "$python" -m muster certs init --dir "$keys" --password-file "$keys/password" > /dev/null
fi

echo "start training"
# shellcheck disable=SC2086 # SCRIPT may be several words
exec "$python" -m muster run ${WORKERS:+-n "$WORKERS"} --scheduler \
    --config "$keys/config.json" --password-file "$keys/password" \
    -- "$python" ${SCRIPT:--m examples.resnet50_cifar10} "$@"

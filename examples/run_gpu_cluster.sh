#!/bin/sh
# Workers and a scheduler without launcher, ssh or OpenMPI: nothing but the MS_* variables, as in MindSpore.
#
#   sh examples/run_gpu_cluster.sh DATA_PATH                       one host: scheduler, workers and their keys
#   sh examples/run_gpu_cluster.sh DATA_PATH SCHED_HOST            several: on every host
#   sh examples/run_gpu_cluster.sh DATA_PATH SCHED_HOST scheduler  on the one that also runs the scheduler
#
# DATA_PATH    folder with the CIFAR-10 binary files (cifar-10-batches-bin)
# SCHED_HOST   the scheduler's address, the same on every host
# Environment: MS_WORKER_NUM (workers of all hosts together; on one host as many as it has GPUs, without any two
#              on its CPU), LOCAL_WORKERS (of this host: the same number),
#              MS_SCHED_PORT (6667), SCRIPT (-m examples.resnet50_cifar10), ARGS, PYTHON, and
#              KEYS (.muster), the folder with config.json, ca.crt, crl.pem, client.p12 and password; on the
#              scheduler's host also server.p12. For one host they are made there. For several they
#              are made, on a machine of yours that does not train, by:
#              python -m muster certs init --dir KEYS --hosts SCHED_HOST --password-file KEYS/password
#              Copy no others: one who has ca.key can be anybody. deploy/README.md: a password for each role.
# Logs: device/worker_<number on this host>.log and device/scheduler.log.
set -eu

if [ $# -lt 1 ] || [ ! -d "$1" ]; then
    sed -n '2,20s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
DATA_PATH=$(cd "$1" && pwd)
export DATA_PATH
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
if ! "$python" -c 'import muster.scheduler.serve.server, muster.certs.cli.commands' 2> /dev/null; then
    echo "${0##*/}: $python cannot run Muster: install its requirements there (pip install .[cuda13])," >&2
    echo "or name another Python with PYTHON." >&2
    exit 2
fi
if [ $# -gt 1 ] && [ -z "${MS_WORKER_NUM:-}" ]; then
    echo "${0##*/}: MS_WORKER_NUM is not set: it must be the number of workers of all hosts together." >&2
    exit 2
fi
keys=${KEYS:-.muster}
if [ ! -f "$keys/config.json" ]; then
    if [ $# -gt 1 ]; then
        echo "${0##*/}: '$keys' holds no config.json: name the folder of the certificates with KEYS." >&2
        echo "On a machine of yours that does not train, this makes it:" >&2
        echo "python -m muster certs init --dir KEYS --hosts $2 --password-file KEYS/password" >&2
        exit 2
    fi
    "$python" -m muster certs init --dir "$keys" --password-file "$keys/password" > /dev/null
fi
keys=$(cd "$keys" && pwd)
devices=$("$python" -c 'import os, sys
from muster.errors import SettingsError
from muster.launch.command import count_gpus, offered_devices
try:
    print(len(offered_devices(os.environ, "all", count_gpus())) or 2)
except SettingsError as error:
    sys.exit(str(error))') || exit 2

export MS_WORKER_NUM="${MS_WORKER_NUM:-$devices}" MS_SCHED_HOST="${2:-127.0.0.1}"
export MS_SCHED_PORT="${MS_SCHED_PORT:-6667}" MS_CONFIG_FILE="$keys/config.json"
# On several hosts each starts as many as it has devices, and no more than there are to be.
[ $# -gt 1 ] && [ "$devices" -lt "$MS_WORKER_NUM" ] || devices=$MS_WORKER_NUM
# One password for all files, or one for each role.
password_of() {
    if [ -f "$keys/$1-password" ]; then echo "$keys/$1-password"; else echo "$keys/password"; fi
}
umask 077 # the logs are for nobody else
rm -rf device
mkdir device
echo "start training"

if [ $# -eq 1 ] || [ "${3:-}" = scheduler ]; then
    MS_ROLE=MS_SCHED MS_SERVER_PASSWORD_FILE="$(password_of server)" \
        "$python" -m scheduler > device/scheduler.log 2>&1 &
    started=$!
fi
i=0
while [ "$i" -lt "${LOCAL_WORKERS:-$devices}" ]; do
    # shellcheck disable=SC2086 # SCRIPT and ARGS may be several words
    MS_ROLE=MS_WORKER MS_LOCAL_INDEX=$i MS_CLIENT_PASSWORD_FILE="$(password_of client)" \
        "$python" ${SCRIPT:--m examples.resnet50_cifar10} ${ARGS:-} > "device/worker_$i.log" 2>&1 &
    started="${started:-} $!"
    i=$((i + 1))
done

trap 'kill $started 2> /dev/null || true' INT TERM
status=0
for process in $started; do
    wait "$process" || status=$?
done
[ "$status" -eq 0 ] || echo "a process ended with code $status; see device/*.log" >&2
exit "$status"

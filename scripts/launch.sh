#!/usr/bin/env bash
# Start train.py on this node; run it on each node of the job, with the flags of train.py.
#
#   NNODES          nodes in all (1)
#   NPROC_PER_NODE  processes on this node (its GPUs, else 1)
#   NODE_RANK       this node, from 0 to NNODES - 1 (0)
#   MASTER_ADDR     name or address of node 0, needed with several nodes
#   MASTER_PORT     a free port of node 0 (29500)
#
# --dry-run prints the torchrun line and starts nothing. Exits 0 completed, 2 refused, 75 preempted, else 1.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then PATH=$PWD/.venv/bin:$PATH; fi

refuse() {
    echo "launch.sh: $1" >&2
    exit 2
}
whole() { # name, value, lowest
    if ! [[ $2 =~ ^[0-9]+$ ]] || ((10#$2 < $3)); then refuse "$1=$2: is no whole number of at least $3; give one"; fi
}

dry_run=
flags=()
for word in "$@"; do
    case $word in
    --dry-run) dry_run=1 ;;
    -h | --help)
        sed -n '2,/^set /{ /^set /d; s/^# \{0,1\}//; p; }' "$0"
        exec python3 train.py --help
        ;;
    *) flags+=("$word") ;;
    esac
done
nnodes=${NNODES:-1} node_rank=${NODE_RANK:-0} port=${MASTER_PORT:-29500}
nproc=${NPROC_PER_NODE:-$(python3 -c 'import torch; print(torch.cuda.device_count() or 1)')}
whole NNODES "$nnodes" 1
whole NODE_RANK "$node_rank" 0
whole NPROC_PER_NODE "$nproc" 1
whole MASTER_PORT "$port" 1
((node_rank < nnodes)) || refuse "NODE_RANK=$node_rank: is outside NNODES=$nnodes; give 0 to $((nnodes - 1))"
if ((nnodes == 1)); then
    where=(--standalone)
else
    [ -n "${MASTER_ADDR:-}" ] || refuse "MASTER_ADDR: is not set, with NNODES=$nnodes; give the name or address of node 0"
    where=("--nnodes=$nnodes" "--node-rank=$node_rank" "--master-addr=$MASTER_ADDR" "--master-port=$port")
fi
command=(torchrun "${where[@]}" "--nproc-per-node=$nproc" train.py "${flags[@]}")
if [ -n "$dry_run" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi

command -v torchrun >/dev/null || refuse "torchrun: is not on the PATH; activate the environment that has torch (source .venv/bin/activate)"
resolved=$(python3 train.py "${flags[@]}" --print-config) # a bad flag is refused here, once, before any process is started
run_dir=$(sed -n 's/^run_dir = "\(.*\)"$/\1/p' <<<"$resolved")
LAUNCH_ID=${LAUNCH_ID:-$(hostname)-$$-$(date +%s)} # common to all attempts of this launch
TORCHELASTIC_ERROR_FILE=$(mktemp) # torchrun copies the first failing rank's error here
export LAUNCH_ID TORCHELASTIC_ERROR_FILE
status_before=$(cat "$run_dir/status.json" 2>/dev/null || true)
"${command[@]}" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null || true' TERM INT USR1
code=0
while
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null # a trapped signal ends the wait, not the child
do code=0; done
error=$(cat "$TORCHELASTIC_ERROR_FILE") status=$(cat "$run_dir/status.json" 2>/dev/null || true)
rm -f "$TORCHELASTIC_ERROR_FILE"
if [[ $error == *'"message": "Refused: '* ]]; then exit 2; fi
if [[ $status == *'"state": "preempted"'* && $status != "$status_before" ]]; then exit 75; fi
((code == 0)) && exit 0
if [[ $status == *'"state": "failed"'* && $status != "$status_before" ]]; then
    # the first failure, after all that followed it
    python3 -c 'import json, sys; s = json.load(open(sys.argv[1])); print("launch.sh: failed: rank", s["rank"], "on", s["host"] + ":", s["error"])' \
        "$run_dir/status.json" >&2
fi
exit 1

#!/usr/bin/env bash
# Start train.py on this node; run it on each node of the job, with the flags of train.py and these (or the variables beside them):
#
#@flags
#   --retries N starts a launch that failed or was preempted anew, up to N times, until it is completed; refused ones it does not.
#   --preflight checks the nodes instead of training (scripts/preflight.py). --debug records collectives into the run's folder.
#   --scaling FILE.json measures speed by number of ranks instead, on these (scripts/scaling.py).
#   --detach lives on when the terminal closes. --dry-run prints what would be started, and starts nothing.
#
# One node: a private port. Several: NODE_RANK makes the rendezvous static; MAX_RESTARTS or NNODES=MIN:MAX make it torchrun's c10d,
# which takes its orders from whoever reaches the port: keep it in a private network.
# A stop signal (SIGTERM, SIGINT, SIGUSR1) saves and stops; a second SIGINT ends all at once.
# Exits 0 completed, 2 refused, 75 preempted (saved; start it again), else 1.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then PATH=$PWD/.venv/bin:$PATH; fi
tool=(python3 scripts/launching.py)

for word in "$@"; do
    if [ "$word" = --help ] || [ "$word" = -h ]; then
        sed -n '2,/^set /{ /^set /d; s/^# \{0,1\}//; p; }' "$0" | while IFS= read -r text; do
            if [ "$text" = @flags ]; then "${tool[@]}" help; else echo "$text"; fi
        done
        exec python3 train.py --help
    fi
done
plan=$("${tool[@]}" plan "$@") # what is wrong is said here, before anything is started
eval "$plan"
# set by the plan, of this script: PLAN_RUN_DIR PLAN_LOGS PLAN_RETRIES PLAN_MEETING PLAN_DRY_RUN PLAN_DETACH PLAN_PREFLIGHT; said; command
# shellcheck disable=SC2154
if [ -n "$PLAN_DRY_RUN" ]; then
    echo "launch.sh: sets $said" >&2
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
if [ -n "$PLAN_DETACH" ]; then
    mkdir -p "$PLAN_LOGS"
    log=$PLAN_LOGS/$(hostname)-$(date +%Y%m%dT%H%M%S).log words=()
    for word in "$@"; do [ "$word" = --detach ] || words+=("$word"); done
    setsid nohup scripts/launch.sh "${words[@]}" >"$log" 2>&1 </dev/null &
    echo "launch.sh: process $! goes on by itself; tail -f $log shows it, kill -TERM $! saves and stops it"
    exit 0
fi
echo "launch.sh: sets $said" >&2

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export LAUNCH_ID=${LAUNCH_ID:-$(hostname)-$$-$(date +%s)} # common to all attempts of this launch, on all nodes
export TORCHELASTIC_ERROR_FILE=$work/error.json           # torchrun copies the first failing rank's error here
export PLAN_RUN_DIR PLAN_MEETING PLAN_ATTEMPT=1 STATUS_BEFORE=
child='' signals=0
# under slurm.sbatch, which keeps USR1 from here, a preempted run is not started again in the job that ends: the job is requeued
is_requeued=$(trap -p USR1)

stop() { # the ranks are asked, and torchrun ends after them; whoever asks again means torchrun
    signals=$((signals + 1))
    [ -n "$child" ] || return 0
    if ((signals > 1)) && [ "$1" = INT ]; then
        kill -KILL "$child" 2>/dev/null || true # its ranks end with it
    elif ((signals > 1)); then
        kill -TERM "$child" 2>/dev/null || true
    else
        "${tool[@]}" pass_on "$child" || true
    fi
}
for name in TERM INT QUIT USR1 HUP; do
    # shellcheck disable=SC2064
    trap "stop $name" "$name" # a SIGHUP that nohup had ignored stays so
done

run() { # a program to its end, in a process group of its own: a terminal's Ctrl-C comes to this script alone. Sets code
    set -m
    "$@" &
    child=$!
    set +m
    ((signals == 0)) || kill -TERM "$child" 2>/dev/null || true # it came a moment before
    local watcher=
    if [ -n "$PLAN_MEETING" ] && [ "$1" = torchrun ]; then
        "${tool[@]}" watch "$child" &
        watcher=$!
    fi
    code=0
    while
        wait "$child" || code=$?
        kill -0 "$child" 2>/dev/null # a trapped signal ends the wait, not the child
    do code=0; done
    child=
    if [ -n "$watcher" ]; then
        kill "$watcher" 2>/dev/null || true
        wait "$watcher" 2>/dev/null || true
    fi
}

pause=5
while true; do
    code=0
    rm -f "$TORCHELASTIC_ERROR_FILE"
    if [ -n "$PLAN_MEETING" ]; then run "${tool[@]}" meet "$work/id"; fi
    if ((signals > 0)); then exit 75; fi # nothing was begun
    if ((code == 0)); then
        if [ -n "$PLAN_MEETING" ]; then LAUNCH_ID=$(<"$work/id"); fi
        STATUS_BEFORE=$(cat "$PLAN_RUN_DIR/status.json" 2>/dev/null || true)
        run "${command[@]}"
        if [ -n "$PLAN_PREFLIGHT" ]; then exit "$code"; fi
        result=0
        "${tool[@]}" judge "$code" || result=$?
        code=$result
    fi
    if [ "$code" = 75 ] && [ -n "$is_requeued" ]; then exit 75; fi
    if ((signals > 0 || code == 0 || code == 2 || PLAN_ATTEMPT > PLAN_RETRIES)); then exit "$code"; fi
    echo "launch.sh: ended with $code; start $((PLAN_ATTEMPT + 1)) of $((PLAN_RETRIES + 1)) follows in $pause s" >&2
    run sleep "$pause"
    pause=$((pause * 2 > 60 ? 60 : pause * 2)) PLAN_ATTEMPT=$((PLAN_ATTEMPT + 1))
done

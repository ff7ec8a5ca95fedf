#!/usr/bin/env bash
# Runs the tests:  scripts/test.sh [--quick | --all | --fork | --mutations] [arguments of pytest]
#
#   (default)      ruff, shellcheck and the tests that are not marked slow: about six minutes on two cores
#   --quick        ruff, shellcheck and tests/unit, which need no ranks: at most 90 seconds
#   --all          the slow tests too: every fault, every misconfiguration, Slurm, nodes, pods, recipes
#   --fork         what must hold in a fork whatever its model.py and dataset.py are: all but tests/builtin
#   --mutations    puts one-line faults into a copy of the code, one at a time: each must make a default test fail
#
# Arguments of pytest choose among them: scripts/test.sh tests/faults -k SIGTERM
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

mode=default
case "${1:-}" in
    --quick | --all | --fork | --mutations) mode=${1#--} && shift ;;
    --help | -h) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" && exit ;;
esac
find_python

skip_or_fail() { # what a check needs and does not find: a skip on a laptop, a failure in CI
    echo "$1"
    [ -z "${CI:-}" ] || exit 1
}

lint() {
    if "$PYTHON" -m ruff --version >/dev/null 2>&1; then
        "$PYTHON" -m ruff check .
        "$PYTHON" -m ruff format --check .
    else
        skip_or_fail "ruff: skipped, it is not installed (pip install ruff)"
    fi
    if command -v shellcheck >/dev/null; then
        shellcheck -x scripts/*.sh scripts/*.sbatch .ci/run
    else
        skip_or_fail "shellcheck: skipped, it is not installed (apt-get install shellcheck)"
    fi
}

# what the tests need and a run does not
if ! "$PYTHON" -c 'import ruff, xdist, kubernetes_validate, kubeflow_trainer_api' 2>/dev/null; then
    "$PYTHON" -m pip install --quiet --disable-pip-version-check ruff pytest-xdist kubernetes-validate kubeflow-trainer-api \
        -c constraints.txt || true
fi

if [ "$mode" = mutations ]; then
    exec "$PYTHON" tests/mutations.py "$@"
fi
[ "$mode" = fork ] || lint

options=(--durations=20)
has_path=
for word in "$@"; do
    [ ! -e "${word%%::*}" ] || has_path=1
done
if [ -z "$has_path" ]; then
    case "$mode" in # the longest files first
        quick) options+=(tests/unit) ;;
        fork) options+=(tests/faults tests/distributed tests/unit) ;;
        *) options+=(tests/faults tests/builtin tests/distributed tests/unit) ;;
    esac
    # ranks wait for each other much of the time, so one more process than there are cores; a file's tests share its fixtures
    if "$PYTHON" -c 'import xdist' 2>/dev/null; then
        cores=$("$PYTHON" -c 'import os; print(min(8, os.cpu_count() or 1))')
        options+=(-n "$((cores + 1))" --dist loadfile --no-loadscope-reorder)
    fi
fi
[ "$mode" != all ] || options+=(--all)
if [ "$mode" = all ] && [ -z "$has_path" ]; then # first what may run side by side, then what is marked alone
    shared=0 alone=0
    "$PYTHON" -m pytest "${options[@]}" --alone no "$@" || shared=$?
    "$PYTHON" -m pytest --all --alone only -o faulthandler_timeout=1800 tests/builtin "$@" || alone=$?
    [ "$shared" != 5 ] || shared=$alone # 5: the arguments choose none of these
    [ "$alone" != 5 ] || alone=$shared
    exit "$((shared > alone ? shared : alone))"
fi
exec "$PYTHON" -m pytest "${options[@]}" "$@"

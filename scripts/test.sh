#!/usr/bin/env bash
# Run the tests:  scripts/test.sh [--quick | --all | ...] [pytest arguments]
#
#   (default)      ruff, mypy, shellcheck and all tests that are not marked slow (minutes)
#   --quick        ruff, mypy, shellcheck and tests/unit, which need no ranks (at most 90 seconds)
#   --all          the slow tests too
# ---- extra: template ----
#   --fork         in a fork, tests/unit and the tests in tests/distributed of the guarantees and of what a fork defines
#                  (at most three minutes on two cores)
#   --fork --all   in a fork, all tests that hold for any model.py and dataset.py, also slow ones and tests/faults
#   --mutations    one-line faults in a copy of the code, one at a time, for each of which a default test must fail
# ---- end of template ----
# ---- extra: benchmark and template ----
#   --cuda         what only a GPU can show, in two calls of a few minutes that install nothing (--cuda --help)
# ---- end of benchmark and template ----
#
# pytest arguments select tests: scripts/test.sh tests/unit -k loader
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib/env.sh

# ---- extra: benchmark and template ----
if [ "${1:-}" = --cuda ]; then # a bare machine gets the first interpreter that has what is needed
    for PYTHON in python python3 .venv/bin/python ""; do
        [ -n "$PYTHON" ] || { echo "--cuda needs a Python with torch, torchvision, pytest and tensorboard. Install them." >&2 && exit 1; }
        ! "$PYTHON" -c 'import pytest, tensorboard, torch, torchvision' 2>/dev/null || break
    done
    exec "$PYTHON" tests/comparison/gpu.py "${@:2}"
fi
# ---- end of benchmark and template ----

mode=default
case "${1:-}" in
    --mutations) mode=mutations && shift ;; # extra: template
    --quick | --all | --fork) mode=${1#--} && shift ;;
    --help | -h) sed -n '2,/^set/{/^set/!{/^# ----/!s/^# \{0,1\}//p}}' "$0" && exit ;;
esac
find_python

install() { # install MODULE:PACKAGE... installs what only tests need. Without it tests are skipped, and in CI they fail
    local missing
    missing=$("$PYTHON" -c '
import importlib.util, sys
print(*(pair.split(":")[1] for pair in sys.argv[1:] if not importlib.util.find_spec(pair.split(":")[0])))' "$@")
    [ -n "$missing" ] || return 0
    echo "Installing what only the tests need: $missing. Ctrl-C stops the installation."
    # shellcheck disable=SC2086 # one word per package
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -c constraints.txt $missing || true
}

install xdist:pytest-xdist
if [ "$mode" != fork ] || [ -n "${CI:-}" ]; then
    install hypothesis:hypothesis mypy:mypy ruff:ruff
    install kubernetes_validate:kubernetes-validate kubeflow_trainer_api:kubeflow-trainer-api # extra: kubernetes
fi
# ---- extra: template or companions ----
if [ "$mode" = all ]; then # recipes, exports and storage have tests here
    install datasets:datasets fuse:fusepy 'moto:moto[server]' onnx:onnx onnxruntime:onnxruntime onnxscript:onnxscript \
        optuna:optuna peft:peft pytorch_optimizer:pytorch-optimizer s3fs:s3fs safetensors:safetensors \
        timm:timm torch_geometric:torch_geometric transformers:transformers trl:trl uv:uv
    trackers=.venv-trackers # trackers need other versions of packages that tests use
    if [ ! -d "$trackers" ]; then
        echo "Making $trackers with wandb, mlflow and trackio, which only tests need. Ctrl-C stops the installation."
        "$PYTHON" -m venv "$trackers"
        "$trackers/bin/pip" install --quiet 'wandb>=0.31' 'mlflow>=3.17' 'trackio>=0.43' || rm -rf "$trackers"
    fi
fi
# ---- end of template or companions ----
[ "$mode" != mutations ] || exec "$PYTHON" tests/mutations.py "$@" # extra: template

lint() { # lint TOOL COMMAND... A tool that is not installed is skipped on a laptop, and is an error in CI
    if "$1" --version >/dev/null 2>&1 || "$PYTHON" -m "$1" --version >/dev/null 2>&1; then
        "${@:2}"
    else
        echo "$1 is not installed, so its check is skipped."
        [ -z "${CI:-}" ] || exit 1
    fi
}
if [ "$mode" != fork ]; then
    lint ruff "$PYTHON" -m ruff check .
    lint ruff "$PYTHON" -m ruff format --check .
    lint mypy "$PYTHON" -m mypy
    lint shellcheck shellcheck -x scripts/*.sh scripts/lib/*.sh .ci/run
    lint shellcheck shellcheck scripts/*.sbatch # extra: slurm and launcher
fi

options=(--durations=20)
has_path=
for word in "$@"; do
    [ ! -e "${word%%::*}" ] || has_path=1
done
add() { # add the files that exist
    local path
    for path in "$@"; do [ ! -e "$path" ] || options+=("$path"); done
}
if [ -z "$has_path" ]; then
    case "$mode" in # the longest files come first
        quick) options+=(tests/unit) ;;
        # ---- extra: template ----
        fork)
            if [[ " $* " = *" --all "* ]]; then
                add tests/faults tests/extras tests/distributed tests/unit
                options+=(--ignore=tests/extras/images) # they are about the built-in data # extra: images
            else
                add tests/distributed/test_{exact_*,other_ranks,kernel,oracle,fork*,*hooks,resume,refusals}.py
                add tests/distributed/test_{predict*,terms,summarize}.py tests/unit
                for name in run_lock rendezvous processes; do # they are about the machine, and take long
                    [ ! -e "tests/unit/test_$name.py" ] || options+=("--ignore=tests/unit/test_$name.py")
                done
            fi
            ;;
        # ---- end of template ----
        *) for folder in faults builtin extras distributed comparison unit; do add "tests/$folder"; done ;;
    esac
    # There are more processes than cores, because ranks often wait for each other. Tests in a file share fixtures.
    if "$PYTHON" -c 'import xdist' 2>/dev/null; then
        processes=$("$PYTHON" -c 'import os; print(min(8, os.cpu_count() or 1) + 2)')
        options+=(-n "$processes" --dist loadfile --no-loadscope-reorder)
    fi
fi
[ "$mode" != all ] || set -- --all "$@"
# ---- extra: template ----
if [ "$mode" = all ] && [ -z "$has_path" ]; then # tests marked alone follow those that may run in parallel
    shared=0 alone=0
    "$PYTHON" -m pytest "${options[@]}" --alone no "$@" || shared=$?
    "$PYTHON" -m pytest --alone only -o faulthandler_timeout=1800 tests/builtin "$@" || alone=$?
    [ "$shared" != 5 ] || shared=$alone # 5 means that the arguments select none of these
    [ "$alone" != 5 ] || alone=$shared
    exit "$((shared > alone ? shared : alone))"
fi
# ---- end of template ----
exec "$PYTHON" -m pytest "${options[@]}" "$@"

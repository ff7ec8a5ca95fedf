#!/usr/bin/env bash
# Everything that has to hold: ruff, shellcheck, pytest. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
find_python

skip_or_fail() { # what a test needs and does not find: a skip on a laptop, a failure in CI
    echo "$1"
    [ -z "${CI:-}" ] || exit 1
}

if ! "$PYTHON" -c 'import ruff, kubernetes_validate, kubeflow_trainer_api' 2>/dev/null; then # what the checks need and a run does not
    "$PYTHON" -m pip install --quiet --disable-pip-version-check ruff kubernetes-validate kubeflow-trainer-api -c constraints.txt || true
fi
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
exec "$PYTHON" -m pytest --durations=15 "$@"

# Sourced by quickstart.sh and test.sh from the root of the repository: finds the Python environment, or makes one, and leaves
# its interpreter in $PYTHON. The active environment is taken where it satisfies requirements.txt, else .venv.
# shellcheck shell=bash

satisfies() {
    command -v "$1" >/dev/null && "$1" - requirements.txt 2>/dev/null <<'PY'
import importlib.metadata, re, sys
if sys.version_info < (3, 11):
    sys.exit(1)
for line in open(sys.argv[1]):
    name, low = line.strip().split(">=")
    numbers = [[int(n) for n in re.findall(r"\d+", v.split("+")[0])[:3]] for v in (importlib.metadata.version(name), low)]
    if numbers[0] < numbers[1]:
        sys.exit(1)
PY
}

find_python() {
    local candidate
    for candidate in python python3 .venv/bin/python; do
        if satisfies "$candidate"; then
            PYTHON=$(command -v "$candidate")
            echo "environment: $PYTHON"
            return
        fi
    done
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "environment: installing requirements.txt into .venv (about 5 GB with CUDA, a minute or two) ..."
            rm -rf .venv
            "$candidate" -m venv .venv
            PYTHON=$PWD/.venv/bin/python
            # the versions that the suite last passed with; where one of them is not to be had here, any that requirements.txt allows
            "$PYTHON" -m pip install --quiet --disable-pip-version-check -r requirements.txt -c constraints.txt ||
                "$PYTHON" -m pip install --quiet --disable-pip-version-check -r requirements.txt
            echo "environment: $PYTHON"
            return
        fi
    done
    echo "no Python of 3.11 or newer was found; install one (python.org, or your system's package manager) and start again" >&2
    exit 1
}

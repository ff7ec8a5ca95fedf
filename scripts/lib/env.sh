# Set $PYTHON to the first interpreter that satisfies requirements.txt, and create .venv if there is none. The scripts
# quickstart.sh and test.sh source this file in the root of the repository.
# shellcheck shell=bash

satisfies() {
    command -v "$1" >/dev/null && "$1" - requirements.txt 2>/dev/null <<'PY'
import importlib.metadata, re, sys
assert sys.version_info >= (3, 11)
for line in open(sys.argv[1]):
    name, required = line.strip().split(">=")
    installed = importlib.metadata.version(name).split("+")[0]
    installed, required = ([int(n) for n in re.findall(r"\d+", version)[:3]] for version in (installed, required))
    assert installed >= required
PY
}

find_python() {
    for PYTHON in python python3 .venv/bin/python; do
        if satisfies "$PYTHON"; then
            PYTHON=$(command -v "$PYTHON")
            echo "environment: $PYTHON"
            return
        fi
    done
    local base
    for base in python3 python3.14 python3.13 python3.12 python3.11; do
        "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        echo "environment: No Python here has what requirements.txt lists. Installing torch, torchvision, tensorboard and"
        echo "pytest, with what they need, into $PWD/.venv: about 5.5 GB with CUDA on Linux. Ctrl-C stops the installation."
        rm -rf .venv
        "$base" -m venv .venv
        PYTHON=$PWD/.venv/bin/python
        # install the tested versions, or newer ones if this platform does not have them
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -r requirements.txt -c constraints.txt ||
            "$PYTHON" -m pip install --quiet --disable-pip-version-check -r requirements.txt
        echo "environment: $PYTHON"
        return
    done
    echo "No Python 3.11 or newer was found. Install one (python.org or the package manager) and start again." >&2
    exit 1
}

#!/usr/bin/env bash
# extra: launcher
# Start train.py on this node, or on each of several nodes. `scripts/launch.sh --help` shows its flags. The program
# itself is scripts/lib/launching.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then PATH=$PWD/.venv/bin:$PATH; fi
exec python3 -m scripts.lib.launching "$@"

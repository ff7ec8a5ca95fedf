#!/usr/bin/env bash
# Every fault of the table in tests/faults, injected into real runs; the scoreboard, and a failure when a row does not hold.
# Arguments go to pytest: -k storage, say.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
find_python
exec "$PYTHON" -m pytest tests/test_faults.py -m fault --drills "$@"

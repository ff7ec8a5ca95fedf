#!/usr/bin/env bash
# Delete parts of the template that this fork does not use (docs/extras.md):
#
#   scripts/remove_extras.sh NAME...             delete these extras: code, flags, tests and docs
#   scripts/remove_extras.sh --all-but NAME...   delete all others
#   scripts/remove_extras.sh --list              the extras, with the lines of each
#   scripts/remove_extras.sh --merge REF         merge a newer template, without the extras that this fork has deleted
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:---help}" in --help | -h) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" && exit ;; esac
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then PATH=$PWD/.venv/bin:$PATH; fi
exec python3 scripts/lib/remove_extras.py "$@"

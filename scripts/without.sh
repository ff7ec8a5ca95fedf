#!/usr/bin/env bash
# Delete parts of the template that this fork does not use (docs/extras.md):
#
#   scripts/without.sh NAME...             delete these extras: code, flags, tests and docs
#   scripts/without.sh --all-but NAME...   delete all others
#   scripts/without.sh --list              the extras, with the lines of each
#   scripts/without.sh --merge REF         merge a newer template, without the extras that this fork has deleted
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:---help}" in --help | -h) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" && exit ;; esac
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then PATH=$PWD/.venv/bin:$PATH; fi
exec python3 scripts/lib/without.py "$@"

#!/usr/bin/env bash
# The old name of remove_extras.sh. It goes with the next version.
exec "$(dirname "$0")/remove_extras.sh" "$@"

#!/usr/bin/env bash
# Runs what can be built and run here of the other platforms, and prints a table.   run.sh [windows|arm64|musl|macos…]
# KILN_CARGO_ARGS holds further arguments of cargo, such as `-Zbuild-std` without `rustup target add`. Takes an hour or more.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
(($#)) || set -- windows arm64 musl macos
log=$(mktemp)
trap 'rm "$log"' EXIT
failed=0
for name; do
    if [[ -x $here/$name.sh ]]; then
        "$here/$name.sh" | tee -a "$log" || failed=1
    else
        printf '%s | all | not run | exceptions: there is no script for it\n' "$name" | tee -a "$log"
    fi
done
printf '\n| platform | suite | result | exceptions |\n|---|---|---|---|\n'
sed -n 's/^\(.*\) | \(.*\) | \(.*\) | exceptions: \(.*\)$/| \1 | \2 | \3 | \4 |/p' "$log"
exit "$failed"

#!/usr/bin/env bash
# Writes docs/errors.md anew from the errors that the command line's tests provoke.
set -euo pipefail
cd "$(dirname "$0")/.."
rows=$(mktemp)
KILN_WRITE_ERRORS=$rows cargo test --workspace --test cli
{
    sed '/^| message |/,$d' docs/errors.md
    echo '| message | while | hint |'
    echo '|---|---|---|'
    LC_ALL=C sort -u "$rows"
} > docs/errors.md.new
rm "$rows"
mv docs/errors.md.new docs/errors.md

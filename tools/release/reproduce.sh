#!/usr/bin/env bash
# Builds the commit a second time, in another folder and with another target folder, and compares the archives' bytes:
#
#     tools/release/reproduce.sh x86_64-unknown-linux-gnu       # after run.py build x86_64-unknown-linux-gnu
set -euo pipefail
cd "$(dirname "$0")/../.."
first=${KILN_RELEASE_OUT:-$PWD/target/release-artefacts}

folder=$(mktemp -d)/elsewhere
trap 'git worktree remove --force "$folder"' EXIT
git worktree add --quiet --detach "$folder"
if [[ -d crates/kiln-cuda/compiled ]]; then
    cp -r crates/kiln-cuda/compiled "$folder/crates/kiln-cuda/"
fi
env -u CARGO_TARGET_DIR KILN_RELEASE_OUT="$folder/artefacts" "$folder/tools/release/run.py" build "$@"

for file in "$folder"/artefacts/*; do
    if cmp "$first/$(basename "$file")" "$file"; then
        echo "$(basename "$file"): same bytes, sha256 $(sha256sum "$file" | cut -d ' ' -f 1)"
    else
        different=1
    fi
done
exit "${different:-0}"

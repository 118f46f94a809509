# shellcheck shell=bash disable=SC2034,SC2154
# Sourced by the scripts beside it, which print one line for every suite: `platform | suite | N passed | exceptions: …`.
# KILN_CARGO_ARGS holds further arguments of cargo: `-Zbuild-std` where the standard library of a target is not installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
read -ra cargo_args <<<"${KILN_CARGO_ARGS:-}"
# Nobody debugs these builds, and they are many.
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=false CARGO_PROFILE_TEST_DEBUG=false
target_folder=${CARGO_TARGET_DIR:-target}
failed=0

# row SUITE RESULT EXCEPTIONS, of $platform
row() {
    printf '%s | %s | %s | exceptions: %s\n' "$platform" "$1" "$2" "${3:-none}"
}

# Ends the script with one line if a program or a target of Rust is missing: need PROGRAM…
need() {
    local program
    for program; do
        if ! command -v "$program" >/dev/null; then
            row "all" "not run" "$program is not installed"
            exit 0
        fi
    done
}
need_target() {
    if [[ " ${cargo_args[*]} " != *" -Zbuild-std"* && ! -d $(rustc --print sysroot)/lib/rustlib/$1/lib ]]; then
        row "all" "not run" "the target is missing: rustup target add $1"
        exit 0
    fi
}

# Runs a command and prints what it does; on failure its errors, else its last lines: suite NAME EXCEPTIONS COMMAND…
# Counts the tests of all test binaries; a command without tests has passed or failed.
suite() {
    local name=$1 exceptions=$2 log code=0 result
    shift 2
    log=$(mktemp)
    "$@" >"$log" 2>&1 || code=$?
    result=$(awk '/^test result:/ { passed += $4; failed += $6 }
        END { if (passed + failed) printf "%d passed%s", passed, failed ? ", " failed " failed" : "" }' "$log")
    if ((code)); then
        failed=1
        grep -aE "FAILED$|panicked at|^error|^FAIL " -A1 "$log" | cut -c1-300 >&2 || tail -n 40 "$log" >&2
        result=${result:-failed}
    fi
    row "$name" "${result:-passed}" "$exceptions"
    rm "$log"
}

# The image that every platform must give byte for byte: in f32, instruction sets with fused multiply-adds add up alike.
ember=(generate "a lighthouse on a cliff above the sea at sunset, long shadows, warm light" -S 42 -W 256 -H 256
    --dtype f32 --no-recipe --no-ai-mark)

# The SHA-256 of that image's file, on x86-64 Linux and everywhere else.
ember_sha256=a98d739f7f3064fe27c77e9c42c7e88b77e816c1fd410400b924fe21f2d4bf3a

# same_image NOTE PROGRAM…: whether the program gives the same file
same_image() {
    local note=$1 folder code=0 found
    shift
    folder=$(mktemp -d)
    "$@" "${ember[@]}" -q -o "$folder/ember.png" || code=$?
    found=$(sha256sum <"$folder/ember.png" | cut -d' ' -f1)
    rm -r "$folder"
    if ((code == 0)) && [[ $found == "$ember_sha256" ]]; then
        row "Ember's f32 PNG ($note)" "same bytes as x86-64"
    else
        failed=1
        row "Ember's f32 PNG ($note)" "failed: $found"
    fi
}

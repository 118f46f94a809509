#!/usr/bin/env bash
# Builds wheels of the Python package, one a platform for all versions of Python from 3.9 on, and checks them:
#
#   tools/release/wheels.sh OUT [TRIPLE…]     # without a platform: all whose standard library is installed
#
# Names, tags and metadata are checked by auditwheel and twine. This machine's wheel is installed into an empty environment,
# where the package's tests run. Needs Python with venv, and cargo; the rest comes from PyPI.
# KILN_CARGO_ARGS: arguments of cargo for platforms whose standard library is not installed, such as -Zbuild-std.
set -euo pipefail
cd "$(dirname "$0")/../.."

all=(
    x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu x86_64-unknown-linux-musl aarch64-unknown-linux-musl
    x86_64-pc-windows-msvc x86_64-pc-windows-gnu aarch64-apple-darwin
)
out=${1:?usage: tools/release/wheels.sh OUT [TRIPLE…]}
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
host=$(rustc -vV | sed -n 's/^host: //p')
tools=${CARGO_TARGET_DIR:-target}/wheel-tools

# The folder of an environment's programs has two names.
programs() {
    if [[ -d $1/Scripts ]]; then echo "$1/Scripts"; else echo "$1/bin"; fi
}

if [[ ! -d $tools ]]; then
    "${PYTHON:-python3}" -m venv "$tools"
    "$(programs "$tools")/python" -m pip install --quiet 'maturin>=1.16,<2' ziglang auditwheel twine
fi
bin=$(cd "$(programs "$tools")" && pwd)
# maturin looks for zig in the Python that is first.
export PATH="$bin:$PATH"
# Git's bash on Windows takes the /crates of compilers' flags for a file of its own, and replaces it by a full path.
export MSYS2_ENV_CONV_EXCL=CARGO_ENCODED_RUSTFLAGS

has_std() {
    [[ -d $(rustc --print target-libdir --target "$1") ]]
}

# Builds the wheel of a platform. zig links against an old libc, and for other systems than this one.
build() {
    local target=$1 arguments=() features=(--features verify) extra=() variables
    case $target in
        *-linux-gnu) arguments=(--zig --compatibility manylinux_2_28) ;;
        *-linux-musl) arguments=(--zig --compatibility musllinux_1_2) ;;
        *-apple-darwin) [[ $host == *-apple-darwin ]] || arguments=(--zig) ;;
    esac
    if [[ $target != *-linux-gnu && $target != *-windows-* ]]; then
        # NVIDIA's driver needs glibc, and Macs have none.
        features=(--no-default-features --features 'ember,serve,verify')
    fi
    if ! has_std "$target"; then
        read -ra extra <<<"${KILN_CARGO_ARGS:-}"
        if [[ ${#extra[@]} == 0 ]]; then
            echo "the standard library for $target is not installed: rustup target add $target" >&2
            return 1
        fi
    fi
    variables=$(python tools/release/targets.py "$target" ${extra[@]+"${extra[@]}"}) || return 1
    eval "$variables"
    # pyproject.toml names the licences. maturin's own bill of materials has the paths of this machine.
    PYTHONUTF8=1 python tools/release/crates.py kiln-python "$target" target/wheel-licences ${features[@]+"${features[@]}"} || return 1
    mv target/wheel-licences/kiln.cdx.json target/ || return 1
    if [[ $target == *-linux-musl ]]; then
        # A library that Python loads uses Python's libc.
        CARGO_ENCODED_RUSTFLAGS+=$'\x1f'-Ctarget-feature=-crt-static
    fi
    maturin build --profile dist --locked --strip --out "$out" \
        --sbom-include target/kiln.cdx.json --target "$target" \
        ${arguments[@]+"${arguments[@]}"} ${features[@]+"${features[@]}"} ${extra[@]+"${extra[@]}"}
}

# Installs a wheel into an empty environment and runs the package's tests there.
test_wheel() {
    local folder
    folder=$(mktemp -d)
    "${PYTHON:-python3}" -m venv "$folder/env"
    local python
    python=$(programs "$folder/env")/python
    "$python" -m pip install --quiet "$1"
    (cd "$folder" && "$(programs env)/kiln" generate "a red apple" --seed 1 -o apple.png && test -s apple.png)
    "$python" crates/kiln-python/tests/run.py
    rm -rf "$folder"
}

chosen=$#
[[ $chosen -gt 0 ]] || set -- "${all[@]}"
failed=()
for target in "$@"; do
    if [[ $chosen == 0 ]] && ! has_std "$target" && [[ -z ${KILN_CARGO_ARGS:-} ]]; then
        continue
    fi
    printf '\n== wheel for %s\n' "$target"
    marker=$(mktemp)
    if ! (build "$target"); then
        failed+=("$target")
        continue
    fi
    wheel=$(find "$out" -name 'kiln-*.whl' -newer "$marker")
    rm "$marker"
    twine check --strict "$wheel"
    if [[ $target == *-linux-* ]]; then
        auditwheel show "$wheel"
    fi
    if [[ $target == "$host" ]]; then
        test_wheel "$wheel"
    fi
done
if [[ ${#failed[@]} -gt 0 ]]; then
    printf '\nnot built: %s\n' "${failed[*]}" >&2
    exit 1
fi

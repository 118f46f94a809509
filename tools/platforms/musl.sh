#!/usr/bin/env bash
# The static program for x86-64 Linux: in an empty root folder, and on an emulated CPU without AVX2.   musl.sh [PROGRAM]
# PROGRAM is one that tools/release built; without it, one is built here in the same way, and the CPU's tests run, too.
# Building needs cargo-zigbuild (`pip install cargo-zigbuild ziglang`), the second part qemu-user.
platform="linux x86-64, musl"
source "$(dirname "$0")/common.sh"
target=x86_64-unknown-linux-musl
need unshare
program=${1:-$target_folder/$target/debug/kiln}
if (($# == 0)); then
    need cargo-zigbuild
    need_target "$target"
    if [[ " ${cargo_args[*]} " == *" -Zbuild-std"* ]]; then
        # rustup's library brings the objects that a program starts with; without it they are zig's.
        export CARGO_ENCODED_RUSTFLAGS=-Clink-self-contained=no
    fi
    suite "build" "without CUDA, as it is released" cargo-zigbuild zigbuild "${cargo_args[@]}" --target "$target" -p kiln \
        --no-default-features --features ember,fleet,serve
    suite "unit, kiln-cpu; conformance" "full-size cases left out, as on the emulated platforms" \
        cargo-zigbuild test "${cargo_args[@]}" --target "$target" -p kiln-cpu -p kiln-tests --lib --test conformance -- --quiet --skip full_size
fi
same_image "outside" "$program"

# A folder with the program and nothing else, as root of the file system.
root=$(mktemp -d)
trap 'rm -r "$root"' EXIT
mkdir "$root/tmp"
cp "$program" "$root/kiln"
inside() {
    unshare --map-root-user --root="$root" --wd=/tmp /kiln "$@"
}
# The functions below are called by `suite`.
# shellcheck disable=SC2317
no_cuda() {
    inside doctor | grep -F "linked statically" &&
        ! inside generate "an apple" --device cuda -o apple.png 2>"$root/tmp/words" &&
        grep -F "linked statically" "$root/tmp/words"
}
# shellcheck disable=SC2317
image_inside() {
    inside "${ember[@]}" -q -o ember.png && [[ $(sha256sum <"$root/tmp/ember.png") == "$ember_sha256 "* ]]
}
# shellcheck disable=SC2317
says_slow() {
    local words
    words=$(qemu-x86_64 -cpu Nehalem "$program" generate "an apple" -W 64 -H 64 -s 1 -o "$root/tmp/slow.png" 2>&1) &&
        [[ -s $root/tmp/slow.png ]] &&
        [[ $(grep -c "no AVX2" <<<"$words") == 1 ]]
}
if inside --version >/dev/null 2>&1; then
    suite "Ember's f32 PNG, in an empty root folder" "" image_inside
    suite "doctor and --device cuda say why there is no CUDA" "no GPU: a static program can't load NVIDIA's driver" \
        no_cuda
else
    row "in an empty root folder" "not run" "this system lets users make no namespaces"
fi

platform="linux x86-64 without AVX2"
if command -v qemu-x86_64 >/dev/null; then
    suite "generates, and says once what is slow" "" says_slow
else
    row "all" "not run" "qemu-x86_64 is not installed"
fi
exit "$failed"

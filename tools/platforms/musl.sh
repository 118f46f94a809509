#!/usr/bin/env bash
# The static program for x86-64 Linux: in an empty root folder, and on an emulated CPU without AVX2.   musl.sh
# Needs Debian's musl-tools, and qemu-user for the second part.
platform="linux x86-64, musl"
source "$(dirname "$0")/common.sh"
target=x86_64-unknown-linux-musl
need musl-gcc unshare
need_target "$target"
export CC_x86_64_unknown_linux_musl=musl-gcc
program=$target_folder/$target/debug/kiln
suite "build" "" cargo build "${cargo_args[@]}" --target "$target" -p kiln
suite "unit, kiln-cpu; conformance" "full-size cases left out, as on the emulated platforms" \
    cargo test "${cargo_args[@]}" --target "$target" -p kiln-cpu -p kiln-tests --lib --test conformance -- --quiet --skip full_size
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

#!/usr/bin/env bash
# ARM64 Linux under qemu, on two processors: one with every extension that has kernels, one with plain NEON. The last rows
# say how many instructions a product takes, beside a plain loop.   arm64.sh
# Needs Debian's qemu-user and gcc-aarch64-linux-gnu. Leaves out the `full_size` cases, each of which takes qemu minutes.
platform="linux arm64"
source "$(dirname "$0")/common.sh"
target=aarch64-unknown-linux-gnu
need qemu-aarch64 aarch64-linux-gnu-gcc
need_target "$target"
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export QEMU_LD_PREFIX=/usr/aarch64-linux-gnu CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=qemu-aarch64

cargo=(cargo test "${cargo_args[@]}" --target "$target" -p kiln-cpu -p kiln-tests -p kiln-golden)
left_out="full-size cases left out: each takes qemu minutes"
suite "build" "" "${cargo[@]}" --no-run
for cpu in max cortex-a72; do
    export QEMU_CPU=$cpu
    suite "unit, kiln-cpu ($cpu)" "" "${cargo[@]}" --lib
    suite "conformance ($cpu)" "$left_out" "${cargo[@]}" --test conformance -- --quiet --skip full_size
    suite "consistency ($cpu)" "" "${cargo[@]}" --test consistency
    suite "golden ($cpu)" "" "${cargo[@]}" --test cpu
done
suite "build of the program" "without server and fleet, which nothing here runs" \
    cargo build "${cargo_args[@]}" --target "$target" -p kiln -p kiln-cpu --bin kiln --example multiply \
    --no-default-features --features kiln/ember
program=$target_folder/$target/debug/kiln
for cpu in max cortex-a72; do
    QEMU_CPU=$cpu same_image "$cpu" qemu-aarch64 "$program"
done

# qemu's seconds mean nothing; its count of executed instructions does. Of whole products, packing included: the difference
# between three and one, so that what a program does besides does not count.
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
executed() {
    QEMU_CPU=max qemu-aarch64 -plugin "$work/instructions.so" "$target_folder/$target/debug/examples/multiply" "$@" 2>&1 |
        sed -n 's/^instructions: //p'
}
per_multiply_add() {
    local format=$1 isa line=
    shift
    for isa; do
        line+=", $isa $(awk -v one="$(executed "$isa" "$format" 1)" -v three="$(executed "$isa" "$format" 3)" \
            'BEGIN { printf "%.3f", (three - one) / 2 / (256 * 1024 * 256) }')"
    done
    row "instructions per multiply-add, $format" "${line#, }"
}
if cc -shared -fPIC -O1 tools/platforms/instructions.c -o "$work/instructions.so" 2>/dev/null; then
    per_multiply_add f32 loop portable neon
    per_multiply_add bf16 loop portable neon neon-bf16
    per_multiply_add int8 loop portable neon neon-dotprod neon-i8mm
else
    row "instructions per multiply-add" "not run" "there is no C compiler"
fi
exit "$failed"

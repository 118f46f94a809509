#!/usr/bin/env bash
# Builds the emulator into a folder (target/emulator unless named) that KILN_CUDA_PATH can point to:
#
#     tools/cuda/emulator/build.sh
#     KILN_CUDA_PATH=target/emulator cargo test -p kiln-cuda
#
# Needs a C++ compiler on x86-64 Linux. What passes here computes the right numbers; speed, registers and races that only
# a real GPU shows are another matter.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/../../../target/emulator}
mkdir -p "$out"
"${CXX:-c++}" -std=c++17 -O2 -shared -fPIC -fno-strict-aliasing -ffp-contract=fast -w -I "$here/../../../crates/kiln-cuda/kernels" \
    "$here/gpu.cpp" "$here/kernels.cpp" -o "$out/libcuda.so.1"
for name in libnvrtc.so.13 libcublasLt.so.13; do
    cp "$out/libcuda.so.1" "$out/$name"
done

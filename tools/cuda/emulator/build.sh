#!/usr/bin/env bash
# Builds the emulator into a folder (default target/emulator) for KILN_CUDA_PATH:
#
#     tools/cuda/emulator/build.sh
#     KILN_CUDA_PATH=target/emulator cargo test -p kiln-cuda
#
# Needs a C++ compiler on x86-64 Linux. It checks results only; performance, register use and most races need a real GPU.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/../../../target/emulator}
mkdir -p "$out"
"${CXX:-c++}" -std=c++17 -O2 -shared -fPIC -fno-strict-aliasing -ffp-contract=fast -w -I "$here/../../../crates/kiln-cuda/kernels" \
    "$here/gpu.cpp" "$here/kernels.cpp" -o "$out/libcuda.so.1"
for name in libnvrtc.so.13 libcublasLt.so.13; do
    cp "$out/libcuda.so.1" "$out/$name"
done

#!/usr/bin/env bash
# Builds the emulator into a folder (default target/emulator) for KILN_CUDA_PATH:
#
#     tools/cuda/emulator/build.sh
#     KILN_CUDA_PATH=target/emulator cargo test -p kiln-cuda
#     KILN_CUDA_PATH=target/emulator KILN_EMULATOR_CAPABILITY=12.0 cargo test -p kiln-cuda    # another than 9.0
#
# Needs a C++ compiler on x86-64 Linux. It checks results only; performance, register use and most races need a real GPU.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/../../../target/emulator}
kernels=$here/../../../crates/kiln-cuda/kernels
generated=$out/generated
mkdir -p "$generated"

# What kernels.cpp includes. Headers are included once, before all files.
for file in "$kernels"/*.cuh; do
    [[ $file == */common.cuh ]] || echo "#include \"$(basename "$file")\""
done >"$generated/headers.inc"
for file in "$kernels"/*.cu; do
    name=$(basename "$file" .cu)
    printf 'namespace %s_ {\n#line 1 "%s.cu"\n' "$name" "$name"
    sed 's/^#include.*//' "$file"
    # Other files have macros of the same names.
    sed -n 's/^#define \([A-Z_]*\).*/#undef \1/p' "$file"
    echo '}'
done >"$generated/sources.inc"
for file in "$kernels"/*.cu; do
    "${CXX:-c++}" -E -P -x c++ -DKILN_EMULATED -D'__launch_bounds__(...)=' "$file" | tr '\n' ' ' |
        grep -o '__global__ void *[a-z0-9_]*' |
        sed "s/.* \(.*\)/K($(basename "$file" .cu)_, \1)/"
done >"$generated/kernels.inc"

"${CXX:-c++}" -std=c++17 -O2 -shared -fPIC -fno-strict-aliasing -ffp-contract=fast -w -I "$kernels" -I "$generated" \
    "$here/gpu.cpp" "$here/kernels.cpp" -o "$out/libcuda.so.1"
for name in libnvrtc.so.13 libcublasLt.so.13; do
    cp "$out/libcuda.so.1" "$out/$name"
done

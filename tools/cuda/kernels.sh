#!/usr/bin/env bash
# Compiles the CUDA kernels that the next build of Kiln has inside, so that it needs nothing of CUDA but the driver:
#
#     tools/cuda/kernels.sh                # for every GPU, about 5 minutes on a core; unchanged kernels are kept
#     tools/cuda/kernels.sh sm_90a         # for one architecture only
#     cargo build --release
#
# Needs Python with venv, and PyPI. The result is crates/kiln-cuda/compiled/kernels.packed.
set -euo pipefail
cd "$(dirname "$0")/../.."

# The newest compiler of CUDA 12: drivers from 525 on load its machine code. Those of CUDA 12 refuse that of CUDA 13.
version=12.9.86
nvrtc=target/nvrtc-$version
if [[ ! -e $nvrtc/done ]]; then
    python3 -m venv "$nvrtc"
    "$nvrtc/bin/pip" install --quiet --disable-pip-version-check "nvidia-cuda-nvrtc-cu12==$version"
    touch "$nvrtc/done"
fi
KILN_CUDA_PATH=$(dirname "$(find "$nvrtc" -name 'libnvrtc.so.12')")
export KILN_CUDA_PATH

cargo run --quiet --release -p kiln-cuda --example compile_kernels -- crates/kiln-cuda/compiled/kernels.packed "$@"

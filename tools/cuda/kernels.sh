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

KILN_CUDA_PATH=$(tools/cuda/nvrtc.sh)
export KILN_CUDA_PATH

cargo run --quiet --release -p kiln-cuda --example compile_kernels -- crates/kiln-cuda/compiled/kernels.packed "$@"

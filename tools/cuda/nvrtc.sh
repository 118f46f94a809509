#!/usr/bin/env bash
# Prints the folder of an NVRTC under target/, which it installs first; needs Python with venv, and PyPI:
#
#     tools/cuda/nvrtc.sh                  # installs it
#     tools/cuda/nvrtc.sh --installed      # prints nothing if it is not installed
set -euo pipefail
cd "$(dirname "$0")/../.."

# The newest compiler of CUDA 12: drivers from 525 on load its machine code. Those of CUDA 12 refuse that of CUDA 13.
version=12.9.86
nvrtc=$PWD/target/nvrtc-$version
if [[ ! -e $nvrtc/done && ${1:-} == --installed ]]; then
    exit
fi
if [[ ! -e $nvrtc/done ]]; then
    python3 -m venv "$nvrtc"
    "$nvrtc/bin/pip" install --quiet --disable-pip-version-check "nvidia-cuda-nvrtc-cu12==$version" >&2
    touch "$nvrtc/done"
fi
dirname "$(find "$nvrtc" -name 'libnvrtc.so.12')"

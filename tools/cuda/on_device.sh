#!/usr/bin/env bash
# Tests and times the CUDA backend on a machine with a GPU but without Rust, using programs built elsewhere.
#
#   here:   tools/cuda/on_device.sh build FOLDER       builds and strips the programs
#   there:  tools/cuda/on_device.sh run FOLDER [LOGS]  runs tests, then timings
#           tools/cuda/on_device.sh memcheck FOLDER [CASES]  runs conformance cases under compute-sanitizer
#
# `run` needs the repository (for testdata/), the NVIDIA driver, and cuBLASLt from a CUDA toolkit or from the `nvidia`
# packages of the Python in PATH; also NVRTC, unless tools/cuda/kernels.sh was run before the programs were built.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
command=${1:?build, run or memcheck}
folder=${2:?a folder for the programs}

build() {
    cd "$root"
    mkdir -p "$folder"
    # Smaller files to transfer.
    export CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_PROFILE_RELEASE_DEBUG=0
    "${CARGO:-cargo}" test --no-run --release -p kiln-cuda --test conformance --message-format=json >"$folder/built.json"
    "${CARGO:-cargo}" test --no-run --release -p kiln-cuda --test replay --test download --test stream --message-format=json >>"$folder/built.json"
    "${CARGO:-cargo}" test --no-run --release -p kiln-golden --test cuda --test replayed --message-format=json >>"$folder/built.json"
    "${CARGO:-cargo}" build --release -p kiln-cuda --example klein_shapes --message-format=json >>"$folder/built.json"
    python3 - "$folder" <<'PY'
import json, shutil, sys
names = {("conformance", "test"): "conformance", ("cuda", "test"): "golden", ("klein_shapes", "example"): "klein_shapes"}
names |= {(name, "test"): name for name in ("replay", "download", "stream", "replayed")}
for line in open(sys.argv[1] + "/built.json"):
    built = json.loads(line)
    target = built.get("target", {})
    name = names.get((target.get("name"), (target.get("kind") or [""])[0]))
    if built.get("executable") and name:
        shutil.copy(built["executable"], f"{sys.argv[1]}/{name}")
PY
    rm "$folder/built.json"
    strip "$folder"/* 2>/dev/null || true
    ls -l "$folder"
}

set_paths() {
    # Python's packages, in case the toolkit lacks libraries.
    local packages
    packages=$(python3 -c 'import site; print("\n".join(site.getsitepackages()))' 2>/dev/null || true)
    for lib in $(for p in $packages; do ls -d "$p"/nvidia/*/lib 2>/dev/null; done); do
        export KILN_CUDA_PATH="${KILN_CUDA_PATH:+$KILN_CUDA_PATH:}$lib"
    done
    export KILN_TESTDATA="$root/testdata" XDG_CACHE_HOME="${XDG_CACHE_HOME:-$1/cache}"
}

memcheck() {
    set_paths "$folder/logs"
    local tool
    tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
    "${tool:?compute-sanitizer is not installed}" --tool memcheck --error-exitcode 9 "$folder/conformance" ${1:+"$1"} --skip full_size
}

run() {
    local logs=${1:-$folder/logs} failed=0 threads
    mkdir -p "$logs"
    set_paths "$logs"
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.used --format=csv,noheader || true
    # A kernel that hangs or crashes must not stop the rest.
    for program in conformance replay download stream golden replayed; do
        echo "== $program"
        # Concurrent captures in one process disturb each other.
        threads=$(nproc)
        [[ $program == replay* ]] && threads=1
        timeout "${LIMIT:-200}" "$folder/$program" --test-threads "$threads" >"$logs/$program.log" 2>&1 || failed=1
        grep -vE '\.\.\. ok$' "$logs/$program.log" | head -n 150 || true
    done
    echo "== klein-4B at 1024x1024"
    timeout "${LIMIT:-200}" "$folder/klein_shapes" 2>&1 | tee "$logs/klein_shapes.log" || failed=1
    return $failed
}

case $command in
    build) build ;;
    run) run "${3:-}" ;;
    memcheck) memcheck "${3:-}" ;;
    *) echo "unknown command $command: use build, run or memcheck" >&2; exit 2 ;;
esac

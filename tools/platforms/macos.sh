#!/usr/bin/env bash
# macOS on ARM64, from any system: compiles; tools/release links, and nothing runs.   macos.sh
# Needs zig as C compiler and linker (`pip install ziglang`).
platform="macos arm64"
source "$(dirname "$0")/common.sh"
target=aarch64-apple-darwin
python=${PYTHON:-python3}
if ! command -v zig >/dev/null && ! "$python" -c 'import ziglang' 2>/dev/null; then
    row "all" "not run" "zig is not installed"
    exit 0
fi
need_target "$target"
zig=$(command -v zig || printf '%s -m ziglang' "$python")
tools=$(mktemp -d)
trap 'rm -r "$tools"' EXIT
# Zig has its own names for targets, and takes no others.
cat >"$tools/cc" <<SCRIPT
#!/usr/bin/env bash
arguments=()
for argument; do
    case \$argument in
        --target=* | -mmacosx-version-min=* | -arch | arm64) ;;
        *) arguments+=("\$argument") ;;
    esac
done
exec $zig cc -target aarch64-macos "\${arguments[@]}"
SCRIPT
printf '#!/bin/sh\nexec %s ar "$@"\n' "$zig" >"$tools/ar"
chmod +x "$tools/cc" "$tools/ar"
export CC_aarch64_apple_darwin=$tools/cc AR_aarch64_apple_darwin=$tools/ar CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER=$tools/cc
suite "cargo check" "not run: there is no macOS" cargo check "${cargo_args[@]}" --target "$target" --workspace
exit "$failed"

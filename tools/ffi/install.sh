#!/usr/bin/env bash
# Builds the C library and installs it: tools/ffi/install.sh PREFIX, with DESTDIR before it if that is set.
#   lib/libkiln.so.1, lib/libkiln.so, lib/libkiln.a, lib/pkgconfig/kiln.pc, include/kiln.h, include/kiln.hpp
# KILN_FFI_FEATURES: options of cargo, such as "--no-default-features". KILN_FFI_PROFILE: its profile, `release` if unset.
# KILN_FFI_LIBRARY: a shared library that is built already; nothing is built then, and no static library installed.
set -euo pipefail
if [[ $# -ne 1 || $1 != /* ]]; then
    echo "usage: $0 PREFIX, an absolute path such as /usr/local" >&2
    exit 2
fi
prefix=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
crate=$root/crates/kiln-ffi
to=${DESTDIR:-}$prefix
version=$(sed -n '/^\[workspace.package\]/,/^\[/ s/^version = "\(.*\)"/\1/p' "$root/Cargo.toml")

shared=${KILN_FFI_LIBRARY:-}
static=
if [[ -z $shared ]]; then
    profile=${KILN_FFI_PROFILE:-release}
    # One call for both: with another list of crate types cargo would compile the crate again.
    # shellcheck disable=SC2086
    (cd "$root" && cargo rustc --profile "$profile" -p kiln-ffi --lib ${KILN_FFI_FEATURES:-} --crate-type cdylib,staticlib)
    target=${CARGO_TARGET_DIR:-$root/target}/${profile/#dev/debug}
    shared=$target/libkiln_ffi.so static=$target/libkiln_ffi.a
fi

install -d "$to/lib/pkgconfig" "$to/include"
install -m 755 "$shared" "$to/lib/libkiln.so.1"
ln -sf libkiln.so.1 "$to/lib/libkiln.so"
if [[ -n $static ]]; then
    install -m 644 "$static" "$to/lib/libkiln.a"
fi
install -m 644 "$crate/include/kiln.h" "$crate/include/kiln.hpp" "$to/include"
cat >"$to/lib/pkgconfig/kiln.pc" <<PC
prefix=$prefix
libdir=\${prefix}/lib
includedir=\${prefix}/include

Name: Kiln
Description: Images from text with FLUX.2
Version: $version
Libs: -L\${libdir} -lkiln
Libs.private: -lgcc_s -lutil -lrt -lpthread -lm -ldl
Cflags: -I\${includedir}
PC
echo "installed Kiln $version in $to" >&2

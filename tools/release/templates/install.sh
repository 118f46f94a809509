#!/bin/sh
# Installs Kiln for one user, without root, on Linux and macOS:
#
#     curl -fsSL @REPOSITORY@/releases/latest/download/install.sh | sh
#     sh install.sh --version 0.1.0      another version than the one this script belongs to
#     sh install.sh --prefix /usr/local  elsewhere than in ~/.local (KILN_PREFIX)
#     sh install.sh --uninstall          removes what it installed
#
# KILN_RELEASES replaces the address of the releases, for a mirror.
set -eu

version=@VERSION@
releases=${KILN_RELEASES:-@REPOSITORY@/releases}
prefix=${KILN_PREFIX:-}
# minisign's public key; empty for a release that is not signed.
public_key='@PUBLIC_KEY@'

say() { printf '%s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }

usage() {
    say "usage: install.sh [--version VERSION] [--prefix FOLDER] [--uninstall]"
    say "Installs Kiln $version into ~/.local, or FOLDER."
}

fetch() { # URL FILE
    if has curl; then
        curl -fsSL --retry 2 -o "$2" "$1"
    elif has wget; then
        wget -q -O "$2" "$1"
    else
        fail "neither curl nor wget is installed"
    fi || fail "can't download $1"
}

sha256() { # FILE
    if has sha256sum; then
        sha256sum "$1"
    elif has shasum; then
        shasum -a 256 "$1"
    elif has openssl; then
        openssl dgst -sha256 -r "$1"
    else
        fail "can't check the download: none of sha256sum, shasum and openssl is installed"
    fi | cut -d ' ' -f 1
}

# Whether glibc is 2.28 or newer. Without it, or with an older one, the static program runs.
has_glibc() {
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d ' ' -f 2) || return 1
    case $glibc in
        2.*) [ "${glibc#2.}" -ge 28 ] ;;
        *) return 1 ;;
    esac
}

platform() {
    machine=$(uname -m)
    case $(uname -s)-$machine in
        Linux-x86_64 | Linux-amd64)
            if has_glibc; then say x86_64-unknown-linux-gnu; else say x86_64-unknown-linux-musl; fi ;;
        Linux-aarch64 | Linux-arm64)
            has_glibc || fail "on ARM64, Kiln needs glibc 2.28 or newer"
            say aarch64-unknown-linux-gnu ;;
        Darwin-arm64) say aarch64-apple-darwin ;;
        Darwin-x86_64)
            # A shell that runs translated on an ARM Mac says x86_64.
            [ "$(sysctl -n sysctl.proc_translated 2>/dev/null)" = 1 ] || fail "there is no build for Intel Macs: build Kiln from source"
            say aarch64-apple-darwin ;;
        MINGW* | MSYS* | CYGWIN*) fail "on Windows, run install.ps1 in PowerShell" ;;
        *) fail "there is no build for $(uname -s) on $machine: build Kiln from source" ;;
    esac
}

# Checks the list of checksums with its signature, and the file with the list.
verify() { # FOLDER FILE
    if [ -n "$public_key" ] && ! has minisign; then
        say "minisign is not installed: the checksum is checked, the signature is not"
    elif [ -n "$public_key" ]; then
        fetch "$releases/download/v$version/SHA256SUMS.minisig" "$1/SHA256SUMS.minisig"
        minisign -Vqm "$1/SHA256SUMS" -P "$public_key" >&2 || fail "the signature of SHA256SUMS is wrong"
    fi
    expected=$(while read -r sum listed; do [ "${listed#\*}" != "$2" ] || say "$sum"; done <"$1/SHA256SUMS")
    case $expected in
        '') fail "SHA256SUMS does not list $2" ;;
        *"
"*) fail "SHA256SUMS lists $2 more than once" ;;
    esac
    found=$(sha256 "$1/$2")
    [ "$found" = "$expected" ] || fail "$2 is damaged: its sha256 is $found, expected $expected"
}

# The files of the unpacked archive with their places below the prefix.
places() { # FOLDER
    for page in "$1"/man/*; do say "man/${page##*/} share/man/man1/${page##*/}"; done
    say "completions/kiln.bash share/bash-completion/completions/kiln"
    say "completions/_kiln share/zsh/site-functions/_kiln"
    say "completions/kiln.fish share/fish/vendor_completions.d/kiln.fish"
    for document in README.md LICENSE-MIT LICENSE-APACHE NOTICE THIRD-PARTY.txt kiln.cdx.json; do say "$document share/doc/kiln/$document"; done
    say "kiln bin/kiln"
}

install_kiln() {
    triple=$(platform) || exit 1
    name=kiln-$version-$triple
    # Not in /tmp, where a system may forbid programs to run, and from where files can't be renamed to their places.
    { mkdir -p "$prefix" && folder=$(mktemp -d "$prefix/.kiln.XXXXXX"); } 2>/dev/null ||
        fail "can't write to $prefix: choose another folder with --prefix"
    trap 'rm -rf "$folder"' EXIT
    trap 'exit 1' HUP INT TERM
    say "downloading $name.tar.gz"
    fetch "$releases/download/v$version/SHA256SUMS" "$folder/SHA256SUMS"
    fetch "$releases/download/v$version/$name.tar.gz" "$folder/$name.tar.gz"
    verify "$folder" "$name.tar.gz"
    tar -xzf "$folder/$name.tar.gz" -C "$folder" || fail "can't unpack $name.tar.gz into $prefix"
    "$folder/$name/kiln" --version >/dev/null || fail "the program does not run on this machine"
    put_in_place "$folder" "$folder/$name"
    say "installed $("$prefix/bin/kiln" --version): $prefix/bin/kiln"
    advise
}

# Renames the files to their places, the program last: one that is interrupted leaves the old program, or can be repeated and
# uninstalled. A program that is running keeps its old file.
put_in_place() { # FOLDER UNPACKED
    places "$2" >"$1/places"
    while read -r from to; do
        { [ -f "$2/$from" ] && [ ! -L "$2/$from" ]; } || fail "the archive has no file $from"
        { mkdir -p "$prefix/${to%/*}" && [ -w "$prefix/${to%/*}" ] && [ ! -d "$prefix/$to" ]; } || fail "can't write $prefix/$to"
    done <"$1/places"
    cut -d ' ' -f 2 "$1/places" >"$1/new"
    cat "$prefix/$list" >"$1/old" 2>/dev/null || true
    cat "$1/old" "$1/new" >"$1/both"
    mv -f "$1/both" "$prefix/$list" || fail "can't write $prefix/$list"
    while read -r from to; do
        mv -f "$2/$from" "$prefix/$to" || fail "can't write $prefix/$to"
    done <"$1/places"
    # What only the version before had.
    while read -r file; do grep -qxF "$file" "$1/new" || rm -f "$prefix/$file"; done <"$1/old"
    mv -f "$1/new" "$prefix/$list"
}

# What is left to do for the shell to find the program.
advise() {
    found=$(command -v kiln) || found=
    case :$PATH: in
        *":$prefix/bin:"*)
            # POSIX has -ef since 2024; dash, busybox, bash and zsh have had it for long.
            # shellcheck disable=SC3013
            if [ -x "$found" ] && ! [ "$found" -ef "$prefix/bin/kiln" ]; then
                say "warning: \`kiln\` starts $found, which comes earlier in the PATH: remove it, or put $prefix/bin before it" >&2
            else
                say "try it: kiln generate \"a red apple\""
            fi ;;
        *)
            say "add it to the PATH, in the file that your shell reads (~/.profile, ~/.zshrc):"
            say "    export PATH=\"$prefix/bin:\$PATH\"" ;;
    esac
}

uninstall_kiln() {
    [ -f "$prefix/$list" ] || fail "$prefix/$list is not there: this script did not install Kiln into $prefix"
    while read -r file; do rm -f "$prefix/$file"; done <"$prefix/$list"
    rm -f "$prefix/$list"
    # Of installations that were killed.
    rm -rf "$prefix"/.kiln.??????
    rmdir "$prefix/share/doc/kiln" 2>/dev/null || true
    say "removed Kiln from $prefix; models, images and settings stay in your folders"
}

main() {
    action=install_kiln
    while [ $# -gt 0 ]; do
        case $1 in
            --version) version=${2:?"--version needs a version"}; shift ;;
            --version=*) version=${1#*=} ;;
            --prefix) prefix=${2:?"--prefix needs a folder"}; shift ;;
            --prefix=*) prefix=${1#*=} ;;
            --uninstall) action=uninstall_kiln ;;
            -h | --help) usage; exit ;;
            *) usage >&2; exit 2 ;;
        esac
        shift
    done
    version=${version#v}
    case $version in '' | *[!0-9A-Za-z.+-]*) fail "'$version' is not a version" ;; esac
    prefix=${prefix:-${HOME:?"HOME is not set: give --prefix"}/.local}
    case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
    list=share/doc/kiln/installed.txt
    $action
}

# All of the script is read before anything runs.
main "$@"

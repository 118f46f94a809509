#!/usr/bin/env bash
# Installs what `run.py` made into clean systems, from a server on this machine, generates an image there and uninstalls:
#
#     sudo tools/release/check_install.sh [SYSTEM…]      # all of bookworm, rpm and busybox
#
# `bookworm`, or another of Debian's suites: install.sh by wget and by curl, and the .deb. `rpm`: a Debian whose package manager
# is dnf, with an rpm database of its own, for the .rpm. `busybox`: busybox alone, for the static program, as on Alpine.
# Needs root, debootstrap, busybox-static, rpmbuild and Python. The systems are kept in target/systems.
set -euo pipefail
cd "$(dirname "$0")/../.."
artefacts=${KILN_RELEASE_OUT:-$PWD/target/release-artefacts}
systems=$PWD/target/systems
version=$(cat "$artefacts/VERSION")

# The server has the layout of a release's address, and copies whose archives are damaged and cut off, or listed twice.
served=$(mktemp -d)
mkdir -p "$served"/{releases/latest,releases/download,{damaged,short,twice}/download/"v$version"}
ln -s "$artefacts" "$served/releases/download/v$version"
ln -s "$artefacts" "$served/releases/latest/download"
for copy in damaged short; do cp "$artefacts/SHA256SUMS" "$served/$copy/download/v$version/"; done
for file in "$artefacts"/*.tar.gz; do
    echo damaged >"$served/damaged/download/v$version/$(basename "$file")"
    head -c 100000 "$file" >"$served/short/download/v$version/$(basename "$file")"
done
cat "$artefacts"/SHA256SUMS "$artefacts"/SHA256SUMS >"$served/twice/download/v$version/SHA256SUMS"
cp "$artefacts"/*.tar.gz "$served/twice/download/v$version/"
chmod -R a+rX "$served"
python3 -u -m http.server --bind 127.0.0.1 --directory "$served" 0 >"$served/log" 2>&1 &
server=$!
trap 'kill $server; rm -rf "$served"' EXIT
until port=$(grep -o 'port [0-9]*' "$served/log" | cut -d ' ' -f 2) && [[ -n $port ]]; do sleep 0.1; done
address=http://127.0.0.1:$port

step() { printf '\n== %s\n' "$*"; }

# A script inside a system, without this shell's environment: as root, or as a user whose home is empty.
inside() { # SYSTEM SCRIPT [USER]
    chroot ${3:+--userspec="$3"} "$1" /usr/bin/env -i HOME=/home/user PATH=/home/user/.local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        KILN_RELEASES="$address/releases" ADDRESS="$address" VERSION="$version" sh -euc "$2"
}
as_user() { # SYSTEM SCRIPT
    rm -rf "$1/home/user"
    mkdir -p "$1/home/user"
    chown 1000:1000 "$1/home/user"
    chmod 1777 "$1/tmp"
    inside "$1" "$2" 1000:1000
}

# shellcheck disable=SC2016
script_works='
cd $HOME
wget -q -O- $KILN_RELEASES/latest/download/install.sh | sh
kiln --version
kiln generate "a red apple" -S 7 -W 128 -H 128 --dtype f32 --no-recipe -q -o apple.png && sha256sum apple.png
test -f .local/share/man/man1/kiln.1
wget -q $KILN_RELEASES/latest/download/install.sh
echo "-- once more, over the one that is there, which runs"
XDG_DATA_HOME=$HOME/data kiln serve --port 0 >serve.log 2>&1 & running=$!
sh install.sh --version $VERSION
kill $running; wait $running || true
echo "-- behind another program of its name"
mkdir other && ln -s /bin/true other/kiln
PATH=$HOME/other:$PATH sh install.sh 2>&1 | grep "^warning: .kiln. starts $HOME/other/kiln"
echo "-- uninstalled"
sh install.sh --uninstall
test -z "$(find .local -type f)"
echo "-- into a folder whose name has spaces"
sh install.sh --prefix "$HOME/my programs"
"$HOME/my programs/bin/kiln" --version
sh install.sh --prefix "$HOME/my programs" --uninstall
test -z "$(find "my programs" -type f)"
echo "-- what it must refuse"
refuse() { if "$@" 2>refusal; then echo "not refused: $*"; exit 1; fi; cat refusal; grep -q "^error: " refusal; }
refuse sh install.sh --uninstall
refuse sh install.sh --version 9.9.9
refuse env KILN_RELEASES=$ADDRESS/damaged sh install.sh
refuse env KILN_RELEASES=$ADDRESS/short sh install.sh
refuse env KILN_RELEASES=$ADDRESS/twice sh install.sh
mkdir locked && chmod 555 locked
refuse sh install.sh --prefix "$HOME/locked"
refuse sh install.sh --prefix "$HOME/locked/deeper"
test -z "$(find .local locked -type f)"
test -z "$(find . -name ".kiln.*")"'

bootstrap() { # SYSTEM SUITE PACKAGES
    [[ -e $systems/$1/etc/debian_version ]] || debootstrap --variant=minbase --include="$3" "$2" "$systems/$1" >"$systems.log"
}

check_debian() { # SUITE
    local system=$systems/$1
    bootstrap "$1" "$1" wget
    step "install.sh in Debian $1, by wget"
    as_user "$system" "$script_works"
    step "the .deb in Debian $1"
    cp "$artefacts"/kiln_*_amd64.deb "$system/tmp/kiln.deb"
    inside "$system" 'dpkg -i /tmp/kiln.deb && kiln --version && test ! -e /etc/systemd/system/multi-user.target.wants/kiln.service && dpkg -r kiln && test ! -e /usr/bin/kiln'
}

# Debian's glibc is no rpm package: an empty one says that it is there, once dnf has refused to install without it.
check_rpm() {
    local system=$systems/rpm built
    bootstrap rpm bookworm wget,curl,dnf,rpm
    built=$(mktemp -d)
    printf '%s\n' 'Name: glibc' 'Version: 2.36' 'Release: 1' 'Summary: The glibc of this system' 'License: LGPL' 'BuildArch: x86_64' \
        'Provides: libc.so.6(GLIBC_2.28)(64bit)' '%description' 'Of another package manager.' '%files' >"$built/glibc.spec"
    rpmbuild --quiet --define "_topdir $built" -bb "$built/glibc.spec"
    cp "$built"/RPMS/x86_64/glibc-*.rpm "$system/tmp/glibc.rpm"
    cp "$artefacts"/kiln-*.x86_64.rpm "$system/tmp/kiln.rpm"
    rm -rf "$built"
    step "the .rpm by dnf, in a system with an rpm database"
    # shellcheck disable=SC2016
    inside "$system" '
dnf="dnf --assumeyes --quiet --releasever=1 --disablerepo=* --setopt=install_weak_deps=0"
$dnf remove kiln glibc
if $dnf install /tmp/kiln.rpm 2>refusal; then echo "dnf installs kiln without a glibc"; exit 1; fi
grep "nothing provides libc" refusal
$dnf install /tmp/glibc.rpm /tmp/kiln.rpm
rpm -qi kiln | head -n 12
rpm -V kiln
cd /tmp && kiln --version && kiln generate "a red apple" -q -o apple.png
$dnf remove kiln
test ! -e /usr/bin/kiln'
    step "install.sh by curl"
    as_user "$system" "${script_works//wget -q -O-/curl -fsSL}"
}

check_busybox() {
    local system=$systems/busybox
    step "install.sh in a system of busybox alone"
    rm -rf "$system"
    mkdir -p "$system"/{bin,dev,usr/bin,tmp,proc}
    mknod -m 666 "$system/dev/null" c 1 3
    cp "$(command -v busybox)" "$system/bin/busybox"
    "$system/bin/busybox" --list | grep -vx busybox | xargs -I NAME ln -s /bin/busybox "$system/bin/NAME"
    ln -s /bin/env "$system/usr/bin/env"
    as_user "$system" "$script_works"
}

[[ $# -gt 0 ]] || set -- bookworm rpm busybox
mkdir -p "$systems"
for name; do
    case $name in
        rpm) check_rpm ;;
        busybox) check_busybox ;;
        *) check_debian "$name" ;;
    esac
done

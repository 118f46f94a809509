#!/usr/bin/env bash
# Installs what `run.py` made into clean systems, from a server on this machine, generates an image there and uninstalls:
#
#     sudo tools/release/check_install.sh [SUITE…]      # Debian's suites for debootstrap; bookworm
#
# Each is a Debian with wget, where install.sh, its refusals, and the .deb and .rpm packages are tried; and a system of busybox
# alone, where the static program is. Needs root, debootstrap, busybox-static and Python. The systems are kept in target/systems.
set -euo pipefail
cd "$(dirname "$0")/../.."
artefacts=${KILN_RELEASE_OUT:-$PWD/target/release-artefacts}
systems=$PWD/target/systems
version=$(cat "$artefacts/VERSION")

# The server has the layout of a release's address, and a copy with a damaged archive.
served=$(mktemp -d)
mkdir -p "$served"/{releases,damaged}/download "$served/releases/latest"
ln -s "$artefacts" "$served/releases/download/v$version"
ln -s "$artefacts" "$served/releases/latest/download"
mkdir "$served/damaged/download/v$version"
for file in "$artefacts"/*.tar.gz; do echo damaged >"$served/damaged/download/v$version/$(basename "$file")"; done
cp "$artefacts/SHA256SUMS" "$served/damaged/download/v$version/"
python3 -u -m http.server --bind 127.0.0.1 --directory "$served" 0 >"$served/log" 2>&1 &
server=$!
trap 'kill $server; rm -rf "$served"' EXIT
until port=$(grep -o 'port [0-9]*' "$served/log" | cut -d ' ' -f 2) && [[ -n $port ]]; do sleep 0.1; done
address=http://127.0.0.1:$port

step() { printf '\n== %s\n' "$*"; }

# A command inside a system, as its own user with an empty home, without this shell's environment.
inside() { # SYSTEM SCRIPT
    chroot "$1" /usr/bin/env -i HOME=/home/user PATH=/home/user/.local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        KILN_RELEASES="$address/releases" ADDRESS="$address" VERSION="$version" sh -euc "$2"
}

script_works='
mkdir -p $HOME; cd $HOME
wget -q -O- $KILN_RELEASES/latest/download/install.sh | sh
kiln --version
kiln generate "a red apple" -S 1 -o apple.png && sha256sum apple.png
test -f .local/share/man/man1/kiln.1
wget -q $KILN_RELEASES/latest/download/install.sh
# Once more, over the one that is there.
sh install.sh --version $VERSION >/dev/null
sh install.sh --uninstall
test -z "$(find .local -type f)"
# What it must refuse.
refuse() { if "$@" 2>refusal; then echo "not refused: $*"; exit 1; fi; cat refusal; }
refuse sh install.sh --uninstall
refuse sh install.sh --version 9.9.9
refuse env KILN_RELEASES=$ADDRESS/damaged sh install.sh
test ! -e .local/bin/kiln'

for suite in "${@:-bookworm}"; do
    system=$systems/$suite
    if [[ ! -e $system/etc/debian_version ]]; then
        debootstrap --variant=minbase --include=wget "$suite" "$system" >"$systems.log"
    fi
    step "install.sh in Debian $suite"
    rm -rf "$system/home/user"
    inside "$system" "$script_works"
    step "the .deb in Debian $suite"
    cp "$artefacts"/kiln_*_amd64.deb "$system/tmp/kiln.deb"
    inside "$system" 'dpkg -i /tmp/kiln.deb && kiln --version && test ! -e /etc/systemd/system/multi-user.target.wants/kiln.service && dpkg -r kiln && test ! -e /usr/bin/kiln'
    step "the .rpm unpacked into Debian $suite"
    rpm --root "$system" --dbpath /var/lib/rpm -i --nodeps "$artefacts"/kiln-*.x86_64.rpm
    inside "$system" 'kiln --version'
    rpm --root "$system" --dbpath /var/lib/rpm -V kiln --nodeps
    rpm --root "$system" --dbpath /var/lib/rpm -e kiln
    inside "$system" 'test ! -e /usr/bin/kiln'
done

step "install.sh in a system of busybox alone"
system=$systems/busybox
rm -rf "$system"
mkdir -p "$system"/{bin,dev,usr/bin,tmp,proc}
mknod -m 666 "$system/dev/null" c 1 3
cp "$(command -v busybox)" "$system/bin/busybox"
"$system/bin/busybox" --list | grep -vx busybox | xargs -I NAME ln -s /bin/busybox "$system/bin/NAME"
ln -s /bin/env "$system/usr/bin/env"
inside "$system" "$script_works"

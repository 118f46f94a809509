#!/usr/bin/env bash
# Builds deploy/Dockerfile with the program that `run.py` made, without a daemon, and runs its server as the image's user:
#
#     sudo tools/release/check_image.sh [BASE]        # an image, or a folder with a root file system (debootstrap's)
#
# Needs root and buildah. Images are kept in target/containers.
set -euo pipefail
cd "$(dirname "$0")/../.."
base=${1:-docker.io/library/debian:trixie-slim}
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
buildah() { command buildah --root "$PWD/target/containers" --runroot "$PWD/target/containers/run" "$@"; }

if [[ -d $base ]]; then
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$base" / >/dev/null
    buildah commit --quiet --rm "$container" localhost/base >/dev/null
    base=localhost/base
fi
buildah build --quiet --format docker --build-arg "BASE=$base" --build-arg PROGRAM=release -f deploy/Dockerfile -t kiln .
buildah inspect --type image --format 'user {{.Docker.Config.User}}, healthcheck {{.Docker.Config.Healthcheck.Test}}{{"\n"}}' kiln

container=$(buildah from --pull-never kiln)
trap 'buildah rm "$container" >/dev/null' EXIT
# shellcheck disable=SC2016
buildah run "$container" -- sh -euc '
    test "$(id -u)" = 10001
    for file in LICENSE-MIT LICENSE-APACHE NOTICE THIRD-PARTY.txt kiln.cdx.json; do test -s "/usr/share/doc/kiln/$file"; done
    if healthcheck; then exit 1; fi
    KILN_DATA=$(mktemp -d) kiln serve & server=$!
    for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; if healthcheck; then break; fi; done
    healthcheck && echo "the server answers"
    kill $server
    wait $server
    if healthcheck; then exit 1; fi
    kiln generate "a red apple" -S 1 -o /tmp/apple.png && sha256sum /tmp/apple.png'

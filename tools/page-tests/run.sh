#!/usr/bin/env bash
# Tests the page of `kiln serve` in Chromium: tools/page-tests/run.sh KILN [SCREENSHOTS [PATTERN]]
# Skips the tests if Node.js or Chromium is missing. `--install` in place of KILN only installs what they need.
set -euo pipefail
kiln=$(realpath -m -- "$1")
shots=$(realpath -m "${2:-target/page-tests/screenshots}")
here=$(cd "$(dirname "$0")" && pwd)
work=$(realpath -m target/page-tests)

skip() {
    printf 'page tests: skipped, %s\n' "$1"
    exit 0
}

command -v node >/dev/null && command -v npm >/dev/null || skip "Node.js is missing"
browser=
find_browser() {
    for name in chromium chromium-browser google-chrome; do
        browser=$(command -v "$name") && return 0
    done
    return 1
}
if ! find_browser; then
    # In CI, install Debian's package.
    if [[ ${CI:-} == true && $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        (apt-get update && apt-get install -y --no-install-recommends chromium) >/dev/null 2>&1 || true
    fi
    find_browser || skip "Chromium is missing"
fi
mkdir -p "$work" "$shots"
cp "$here/package.json" "$here"/*.mjs "$work/"
(cd "$work" && npm install --silent --no-audit --no-fund) || skip "npm install failed"
[[ $1 == --install ]] && exit
cd "$work"
BROWSER="$browser" KILN="$kiln" SHOTS="$shots" TESTDATA="$(realpath "$here/../../testdata")" exec node page.mjs "${3:-}"

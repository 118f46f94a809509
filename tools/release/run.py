#!/usr/bin/env python3
"""Makes a release: everything that can be built on this machine, and a line for what can't.

    tools/release/run.py                   # all platforms, then `finish`
    tools/release/run.py build [TRIPLE…]   # programs, archives and packages of some platforms
    tools/release/run.py finish            # manifests, installers, checksums and signature for what lies in the folder

Artefacts go to target/release-artefacts (KILN_RELEASE_OUT). tools/release/README.md says what each needs.
"""

import shutil
import subprocess
import sys

import contents
import finish
import packages
from project import OUT, ROOT, WORK, NotBuilt, output, version
from targets import OLDEST_GLIBC, TARGETS, build, host, needed_glibc

KERNELS = ROOT / "crates/kiln-cuda/compiled/kernels.packed"


def make(target, report):
    """Builds one platform's artefacts; what can't be built is a line of the report. Returns whether there is a program."""
    try:
        program = build(target)
    except NotBuilt as reason:
        report.append(f"{target.triple}: not built: {reason}")
        return False
    glibc = needed_glibc(program)
    if glibc and glibc > tuple(map(int, OLDEST_GLIBC.split("."))):
        report.append(f"{target.triple}: needs glibc {glibc[0]}.{glibc[1]}, not {OLDEST_GLIBC}: cargo-zigbuild is not installed")
    folder = contents.folder_for(target, program)
    contents.pack(target, folder)
    for kind, package in [("deb", packages.deb), ("rpm", packages.rpm)]:
        if getattr(target, kind):
            try:
                package(target, folder, glibc)
            except NotBuilt as reason:
                report.append(f"{target.triple}: no .{kind}: {reason}")
    return True


def wheels(report):
    """Builds the wheels of the Python package, and tests this machine's."""
    if subprocess.run([ROOT / "tools/release/wheels.sh", OUT], check=False).returncode != 0:
        report.append("wheels: not all were built, or a test of one failed")


def main(arguments):
    command, chosen = (arguments[0], arguments[1:]) if arguments else ("all", [])
    unknown = set(chosen) - {target.triple for target in TARGETS}
    if command not in ("all", "build", "finish") or unknown or (chosen and command != "build"):
        sys.exit(__doc__)
    report, built = [], True
    if command != "finish":
        shutil.rmtree(WORK, ignore_errors=True)
        if output("git", "status", "--porcelain"):
            report.append("the working tree has changes that are not committed: other machines will build other bytes")
        if not KERNELS.is_file():
            report.append("no CUDA kernels inside (tools/cuda/kernels.sh makes them): a GPU needs NVRTC beside the driver")
        # The machine's own first: its program writes the manual pages.
        for target in sorted(TARGETS, key=lambda target: target.triple != host()):
            if not chosen or target.triple in chosen:
                built &= make(target, report)
    if command == "all":
        wheels(report)
    if command != "build":
        finish.run(report)
    print(f"\nKiln {version()}: {OUT}")
    for path in sorted(OUT.glob("*")):
        print(f"{path.stat().st_size:>12}  {path.name}")
    print("\n".join(["", *report]))
    # A platform that was asked for by name must be there.
    if chosen and not built:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])

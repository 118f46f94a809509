#!/usr/bin/env python3
"""Makes a release: everything that can be built on this machine, and a line for what can't.

    tools/release/run.py                   # all platforms, then `finish`
    tools/release/run.py build [TRIPLE…]   # programs, archives and packages of some platforms
    tools/release/run.py finish            # manifests, installers, checksums and signature for what lies in the folder

The exit status is 1 if something failed, or a platform that was named has no program. A tool that is not installed is a line
alone; with `--strict` it is an error, too. Artefacts go to target/release-artefacts (KILN_RELEASE_OUT).
tools/release/README.md says what each needs.
"""

import shutil
import subprocess
import sys

import contents
import finish
import packages
from project import OUT, ROOT, WORK, Missing, NotBuilt, Report, output, version
from targets import OLDEST_GLIBC, TARGETS, build, host, needed_glibc

KERNELS = ROOT / "crates/kiln-cuda/compiled/kernels.packed"


def make(target, report):
    """Builds one platform's artefacts; what can't be built is a line of the report. Returns whether there is a program."""
    try:
        program = build(target)
    except NotBuilt as reason:
        report.not_built(f"{target.triple}: not built", reason)
        return False
    glibc = needed_glibc(program)
    if glibc and glibc > tuple(map(int, OLDEST_GLIBC.split("."))):
        newer = f"it needs glibc {glibc[0]}.{glibc[1]}, not {OLDEST_GLIBC} (cargo-zigbuild links against the older one)"
        report.not_built(f"{target.triple}: not for other machines", NotBuilt(newer))
    try:
        folder = contents.folder_for(target, program)
        contents.pack(target, folder)
    except (OSError, subprocess.CalledProcessError) as reason:
        report.not_built(f"{target.triple}: no archive", reason)
        return True
    for kind, package in [("deb", packages.deb), ("rpm", packages.rpm)]:
        if getattr(target, kind):
            try:
                package(target, folder, glibc)
            except (NotBuilt, OSError) as reason:
                report.not_built(f"{target.triple}: no .{kind}", reason)
    return True


def wheels(report):
    """Builds the wheels of the Python package, and tests this machine's."""
    if subprocess.run([ROOT / "tools/release/wheels.sh", OUT], check=False).returncode != 0:
        report.not_built("wheels", NotBuilt("not all were built, or a test of one failed"))


def main(arguments):
    strict = "--strict" in arguments
    command, *chosen = [argument for argument in arguments if argument != "--strict"] or ["all"]
    unknown = set(chosen) - {target.triple for target in TARGETS}
    if command not in ("all", "build", "finish") or unknown or (chosen and command != "build"):
        sys.exit(__doc__)
    report, built = Report(), True
    if command != "finish":
        shutil.rmtree(WORK, ignore_errors=True)
        if output("git", "status", "--porcelain"):
            report.note("the working tree has changes that are not committed: other machines will build other bytes")
        if not KERNELS.is_file():
            report.not_built("no CUDA kernels inside", Missing("a GPU needs NVRTC beside the driver (tools/cuda/kernels.sh makes them)"))
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
    print("\n".join(["", *report.lines]))
    # A platform that was asked for by name must be there.
    if report.failed or (strict and report.missing) or (chosen and not built):
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])

"""The platforms of a release, and building the program for one.

    targets.py TRIPLE [ARGUMENT OF CARGO…]    # prints the environment of a build as a shell reads it, for wheels.sh
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import frameworks
from project import ROOT, Missing, NotBuilt, commit, epoch, last_error, output

# Enterprise Linux 8, Debian 10 and Ubuntu 18.10 have this one or a newer one.
OLDEST_GLIBC = "2.28"
# The first one for ARM64.
OLDEST_MACOS = "11.0"


@dataclass(frozen=True)
class Target:
    """A platform: Rust's name for it, and what packages call it."""

    triple: str
    deb: str = ""
    rpm: str = ""
    # A static program can't load NVIDIA's driver, and Macs have none.
    cuda: bool = True

    @property
    def program(self):
        return "kiln.exe" if "windows" in self.triple else "kiln"

    @property
    def features(self):
        """The arguments of cargo that choose the features."""
        return ("--features", "verify") if self.cuda else ("--no-default-features", "--features", "ember,fleet,serve,verify")


TARGETS = [
    Target("x86_64-unknown-linux-gnu", deb="amd64", rpm="x86_64"),
    Target("aarch64-unknown-linux-gnu", deb="arm64", rpm="aarch64"),
    Target("x86_64-unknown-linux-musl", cuda=False),
    Target("x86_64-pc-windows-gnu"),
    Target("aarch64-apple-darwin", cuda=False),
]


def host():
    return re.search(r"host: (\S+)", output("rustc", "-vV")).group(1)


def build(target):
    """Builds the program and returns its path. Raises `Missing` where a tool is, and `NotBuilt` where the build fails."""
    extra = []
    if not Path(output("rustc", "--print", "target-libdir", "--target", target.triple)).is_dir():
        extra = os.environ.get("KILN_CARGO_ARGS", "").split()
        if not extra:
            raise Missing(f"its standard library is not installed (rustup target add {target.triple})")
    command = ["cargo", *cargo_command(target), "--locked", "--profile", "dist", "-p", "kiln", "--bin", "kiln"]
    command += [*target.features, *extra]
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment(target.triple, extra)}, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        log = ROOT / f"target/release-{target.triple}.log"
        log.write_text(done.stderr)
        raise NotBuilt(f"{last_error(done.stderr)} ({log.relative_to(ROOT)})")
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return folder / target.triple / "dist" / target.program


def cargo_command(target):
    """`cargo zigbuild` links against an old glibc, and for other systems. Without it, what this machine's linkers can do."""
    if "windows" in target.triple:
        if "windows" not in host() and not shutil.which("x86_64-w64-mingw32-gcc"):
            raise Missing("x86_64-w64-mingw32-gcc is not installed (mingw-w64)")
        return "build", "--target", target.triple
    if "apple" in target.triple and "apple" in host():
        return "build", "--target", target.triple
    if shutil.which("cargo-zigbuild"):
        glibc = f".{OLDEST_GLIBC}" if target.triple.endswith("linux-gnu") else ""
        return "zigbuild", "--target", target.triple + glibc
    if target.triple == host():
        return "build", "--target", target.triple
    raise Missing("cargo-zigbuild is not installed (pip install cargo-zigbuild ziglang)")


def environment(triple, arguments):
    """Adds to the build's environment: nothing in the program depends on the folder or the time. `arguments` are those of cargo
    for a platform whose standard library is built from its source."""
    output("cargo", "fetch", "--locked")
    cargo_home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    folders = [(source, "/crates") for source in sorted(cargo_home.glob("registry/src/*"))]
    folders += [(Path(output("rustc", "--print", "sysroot")) / "lib/rustlib/src/rust", "/rust"), (ROOT, "/kiln")]
    rust_flags = [f"--remap-path-prefix={folder}={name}" for folder, name in folders]
    if triple.endswith("windows-gnu"):
        rust_flags.append("-Clink-arg=-Wl,--no-insert-timestamp")
    if "musl" in triple and arguments:
        # rustup's library brings the objects that a program starts with; without it they are zig's.
        rust_flags.append("-Clink-self-contained=no")
    c_flags = [f"-ffile-prefix-map={folder}={name}" for folder, name in folders]
    macos = {}
    if "apple" in triple:
        macos["MACOSX_DEPLOYMENT_TARGET"] = OLDEST_MACOS
        if "apple" not in host():
            macos["SDKROOT"] = os.environ.get("SDKROOT") or str(frameworks.stubs())
    return {
        **macos,
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(rust_flags),
        "CFLAGS_" + triple.replace("-", "_"): "" if triple.endswith("msvc") else " ".join(c_flags),
        "KILN_COMMIT": commit(),
        "SOURCE_DATE_EPOCH": str(epoch()),
        "ZERO_AR_DATE": "1",
    }


def needed_glibc(program):
    """The oldest glibc that the program starts with, or nothing for one that does not use it."""
    versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", program.read_bytes())
    return max(((int(major), int(minor)) for major, minor in versions), default=None)


if __name__ == "__main__":
    # A shell takes the \r of Windows for a part of the value.
    sys.stdout.reconfigure(newline="\n")
    for name, value in environment(sys.argv[1], sys.argv[2:]).items():
        print(f"export {name}={shlex.quote(value)}")

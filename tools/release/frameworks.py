"""Stubs of Apple's frameworks, to link a program for macOS on another system: zig has those of the C library alone.

A stub is a text that says which names a library exports. The crates that call a framework declare them, and link it by name.
"""

import re
from pathlib import Path

from project import WORK, metadata

FRAMEWORK = re.compile(r'link\(name = "(\w+)", kind = "framework"\)')
# Functions and constants of C, which begin with a capital, or with `k` and one.
DECLARED = re.compile(r"\b(?:fn\s+([A-Z]\w*)\s*[(<]|static\s+(k?[A-Z]\w*)\s*:)")
STUB = """--- !tapi-tbd
tbd-version: 4
targets: [ arm64-macos ]
install-name: '/System/Library/Frameworks/{name}.framework/Versions/A/{name}'
exports:
  - targets: [ arm64-macos ]
    symbols: [ {symbols} ]
...
"""


def stubs():
    """Writes a folder that stands for the SDK's, and returns it."""
    exported = {}
    for package in metadata("--filter-platform", "aarch64-apple-darwin")["packages"]:
        sources = [path.read_text() for path in Path(package["manifest_path"]).parent.glob("src/**/*.rs")]
        frameworks = {name for text in sources for name in FRAMEWORK.findall(text)}
        for framework in frameworks:
            names = exported.setdefault(framework, set())
            names.update(f"_{function or constant}" for text in sources for function, constant in DECLARED.findall(text))
    folder = WORK / "macos-sdk"
    (folder / "usr/lib").mkdir(parents=True, exist_ok=True)
    for name, symbols in exported.items():
        stub = folder / f"System/Library/Frameworks/{name}.framework/{name}.tbd"
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(STUB.format(name=name, symbols=", ".join(sorted(symbols))))
    return folder

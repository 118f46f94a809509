"""What every part of a release asks for: version, address, time, folders, and the graph of crates."""

import functools
import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TEMPLATES = Path(__file__).resolve().parent / "templates"
OUT = Path(os.environ.get("KILN_RELEASE_OUT", ROOT / "target/release-artefacts")).resolve()
# What is put together here and goes into an artefact.
WORK = ROOT / "target/release-work"


class NotBuilt(Exception):
    """An artefact that was not made; the text says why."""


class Missing(NotBuilt):
    """An artefact that can't be made on this machine, for lack of a tool or a file."""


class Report:
    """What a run says at its end. A failure is an error; what is missing is one if everything has to be there."""

    def __init__(self):
        self.lines, self.missing, self.failed = [], False, False

    def note(self, line):
        self.lines.append(line)

    def not_built(self, what, reason):
        self.lines.append(f"{what}: {reason}")
        if isinstance(reason, Missing):
            self.missing = True
        else:
            self.failed = True


def output(*command, **options):
    """What a command prints, without the last line's end."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, **options)
    return done.stdout.strip()


@functools.lru_cache(maxsize=None)
def metadata(*arguments, package="kiln"):
    """What cargo tells of the workspace; the arguments choose a platform and the package's features."""
    manifest = str(ROOT / "crates" / package / "Cargo.toml")
    return json.loads(output("cargo", "metadata", "--format-version", "1", "--locked", "--manifest-path", manifest, *arguments))


def program_package():
    """The crate of the program: it owns the version, and the workspace's `repository` is where releases are published."""
    return next(p for p in metadata("--no-deps")["packages"] if p["name"] == "kiln")


def version():
    return program_package()["version"]


def package_version():
    """The version as Debian's and Red Hat's packages have it: `~` sorts a pre-release before its release."""
    release, hyphen, pre_release = version().partition("-")
    return release + "~" * len(hyphen) + pre_release.replace("-", ".")


def repository():
    return program_package()["repository"]


def download_url():
    """Where the files of this release lie once it is published."""
    return f"{repository()}/releases/download/v{version()}"


@functools.lru_cache(maxsize=None)
def epoch():
    """The time that every file and archive carries: that of the commit."""
    return int(os.environ.get("SOURCE_DATE_EPOCH") or output("git", "log", "-1", "--format=%ct"))


@functools.lru_cache(maxsize=None)
def commit():
    return output("git", "rev-parse", "--short=12", "HEAD")


def last_error(log):
    """The line of a build's output that says why it failed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no output"])[0]


def fill(template, values):
    """A template's text with every `@NAME@` replaced."""
    text = (TEMPLATES / template).read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text

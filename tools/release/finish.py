"""The last step: installers and manifests with the release's version and checksums, then SHA256SUMS and its signature."""

import hashlib
import os
import re
import shutil
import subprocess
from datetime import datetime, timezone

from packages import RELEASE
from project import OUT, TEMPLATES, Missing, NotBuilt, download_url, epoch, fill, repository, version
from targets import TARGETS

# What is filled in, and which archives it needs; other tools read these names, so they stay as they are.
MANIFESTS = {
    "kiln.rb": ["x86_64-unknown-linux-gnu.tar.gz", "aarch64-unknown-linux-gnu.tar.gz", "aarch64-apple-darwin.tar.gz"],
    "PKGBUILD": ["x86_64-unknown-linux-gnu.tar.gz", "aarch64-unknown-linux-gnu.tar.gz"],
    # The AUR's .SRCINFO: GitHub renames files that begin with a dot.
    "SRCINFO": ["x86_64-unknown-linux-gnu.tar.gz", "aarch64-unknown-linux-gnu.tar.gz"],
    "kiln.json": ["x86_64-pc-windows-gnu.zip"],
    "Kiln.Kiln.yaml": ["x86_64-pc-windows-gnu.zip"],
    "Kiln.Kiln.installer.yaml": ["x86_64-pc-windows-gnu.zip"],
    "Kiln.Kiln.locale.en-US.yaml": ["x86_64-pc-windows-gnu.zip"],
}
INSTALLERS = ["install.sh", "install.ps1"]
# As minisign writes it: a comment and the key. The installers check signatures once it is there.
PUBLIC_KEY = TEMPLATES.parent / "minisign.pub"


def run(report):
    write_manifests(report)
    public_key = PUBLIC_KEY.read_text().splitlines()[1] if PUBLIC_KEY.is_file() else ""
    for name in INSTALLERS:
        values = {"VERSION": version(), "REPOSITORY": repository(), "PUBLIC_KEY": public_key}
        (OUT / name).write_text(fill(name, values))
        (OUT / name).chmod(0o755)
    (OUT / "VERSION").write_text(f"{version()}\n")
    sums = OUT / "SHA256SUMS"
    files = sorted(path for path in OUT.iterdir() if not path.name.startswith("SHA256SUMS"))
    sums.write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files))
    stale = [path.name for path in files if path.name.startswith(("kiln-", "kiln_")) and not path.name.startswith(names())]
    if stale:
        report.note(f"of another version, and among the checksums: {', '.join(stale)}")
    sign(sums, report)
    if repository().split("/")[2].endswith(".example"):
        report.note(f"installers and manifests point to {repository()}, where nobody is: `repository` in Cargo.toml")


def names():
    """How the names of this version's programs, packages and wheels begin. Python has no hyphen in a version: 1.0.0rc1."""
    wheel = re.sub(r"-(a|b|rc)(?:lpha|eta)?\.?(\d+)$", r"\1\2", version())
    programs = [f"kiln-{version()}-{target.triple}." for target in TARGETS]
    return (*programs, f"kiln_{version()}-{RELEASE}_", f"kiln-{version()}-{RELEASE}.", f"kiln-{wheel}-cp")


def write_manifests(report):
    """Fills in the manifests whose archives are here; one with a missing checksum would install nothing."""
    values = {
        "VERSION": version(),
        # Without a hyphen; pacman sorts 1.0.0rc.1 before 1.0.0.
        "PKGVER": version().replace("-", "", 1).replace("-", "."),
        "REPOSITORY": repository(),
        "DOWNLOAD": download_url(),
        "DATE": datetime.fromtimestamp(epoch(), timezone.utc).strftime("%Y-%m-%d"),
    }
    for path in OUT.glob(f"kiln-{version()}-*"):
        values[path.name.removeprefix(f"kiln-{version()}-")] = sha256(path)
    for name, archives in MANIFESTS.items():
        missing = [archive for archive in archives if archive not in values]
        if missing:
            (OUT / name).unlink(missing_ok=True)
            report.not_built(f"{name}: not written", Missing(f"{', '.join(missing)} is not here"))
        else:
            (OUT / name).write_text(fill(name, values))


def sha256(path):
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for part in iter(lambda: file.read(1 << 20), b""):
            digest.update(part)
    return digest.hexdigest()


def sign(sums, report):
    """Signs the checksums with minisign's key, and says so or why not. Who has installers with a public key expects it."""
    signature = OUT / f"{sums.name}.minisig"
    signature.unlink(missing_ok=True)
    key = os.environ.get("KILN_SIGN_KEY")
    if not key:
        reason = "KILN_SIGN_KEY names no secret key (minisign -G makes one)"
        if PUBLIC_KEY.is_file():
            report.not_built("not signed", Missing(f"{reason}, and the installers expect a signature"))
        else:
            report.note(f"not signed: {reason}")
        return
    program = shutil.which("minisign") or shutil.which("rsign")
    if not program:
        report.not_built("not signed", Missing("neither minisign nor rsign is installed"))
        return
    name = os.path.basename(program).removesuffix(".exe")
    comment = f"kiln {version()}"
    command = {
        "minisign": [program, "-S", "-s", key, "-m", str(sums), "-x", str(signature), "-t", comment],
        "rsign": [program, "sign", "-s", key, "-x", str(signature), "-t", comment, str(sums)],
    }[name]
    password = os.environ.get("KILN_SIGN_PASSWORD", "")
    done = subprocess.run(command, input=password + "\n", text=True, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode != 0 or not signature.is_file():
        signature.unlink(missing_ok=True)
        # The question for the password comes first.
        said = done.stderr.strip().splitlines() or ["no output"]
        report.not_built("not signed", NotBuilt(f"{name}: {said[-1]}"))
    else:
        report.note(f"signed: {signature.name}")

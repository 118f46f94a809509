"""Packages for Debian and Red Hat's families, by their own tools: dpkg-deb and rpmbuild."""

import gzip
import os
import shutil
import subprocess
from email.utils import formatdate
from urllib.parse import urlparse

from archive import sorted_files
from project import OUT, ROOT, WORK, Missing, NotBuilt, epoch, fill, last_error, package_version, repository, version

SUMMARY = "Text to image with FLUX.2, on a CPU or an NVIDIA GPU"
# The release of the package, not of the program.
RELEASE = 1


def deb(target, folder, glibc):
    root = system_folders(folder, WORK / "deb" / target.deb, zsh="zsh/vendor-completions")
    documents = root / "usr/share/doc/kiln"
    values = values_for(target, glibc, size=sum(path.stat().st_size for path in sorted_files(root)) // 1024)
    (documents / "copyright").write_text(fill("copyright", {**values, "MIT": indented(ROOT / "LICENSE-MIT")}))
    (documents / "changelog.Debian").write_text(fill("changelog.Debian", values))
    (documents / "CHANGELOG.md").rename(documents / "changelog")
    for name in ["changelog", "changelog.Debian", "THIRD-PARTY.txt"]:
        compress(documents / name)
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN/control").write_text(fill("control", values))
    set_modes(root)
    # Not the package's version: GitHub renames files with a `~`, which would no longer be those of SHA256SUMS.
    to = OUT / f"kiln_{version()}-{RELEASE}_{target.deb}.deb"
    tool("dpkg-deb", "--root-owner-group", "-Zxz", "-z2", "--build", root, to)


def rpm(target, folder, glibc):
    top = WORK / "rpm" / target.rpm
    root = system_folders(folder, top / "files", zsh="zsh/site-functions")
    licences = root / "usr/share/licenses/kiln"
    licences.mkdir(parents=True)
    for name in ["LICENSE-MIT", "LICENSE-APACHE", "NOTICE", "THIRD-PARTY.txt"]:
        source = folder / name
        shutil.copyfile(source, licences / name)
        (root / "usr/share/doc/kiln" / name).unlink(missing_ok=True)
    set_modes(root)
    spec = top / "kiln.spec"
    spec.write_text(fill("kiln.spec", {**values_for(target, glibc), "ROOT": root}))
    tool("rpmbuild", "-bb", "--target", f"{target.rpm}-linux", "--define", f"_topdir {top}", spec)
    name = f"{RELEASE}.{target.rpm}.rpm"
    shutil.copyfile(top / f"RPMS/{target.rpm}/kiln-{package_version()}-{name}", OUT / f"kiln-{version()}-{name}")


def values_for(target, glibc, size=0):
    return {
        "VERSION": version(),
        "PACKAGE_VERSION": package_version(),
        "RELEASE": RELEASE,
        "SUMMARY": SUMMARY,
        "REPOSITORY": repository(),
        "MAINTAINER": f"Kiln's developers <releases@{urlparse(repository()).hostname}>",
        "DATE": formatdate(epoch()),
        "GLIBC": ".".join(map(str, glibc)),
        "DEB": target.deb,
        "SIZE": size,
    }


def system_folders(folder, root, zsh):
    """Lays the files of the archive out as they lie on an installed system."""
    shutil.rmtree(root, ignore_errors=True)
    share = root / "usr/share"
    places = {
        "kiln": root / "usr/bin/kiln",
        "completions/kiln.bash": share / "bash-completion/completions/kiln",
        "completions/_kiln": share / zsh / "_kiln",
        "completions/kiln.fish": share / "fish/vendor_completions.d/kiln.fish",
        **{f"man/{page.name}": share / "man/man1" / page.name for page in (folder / "man").iterdir()},
        **{name: share / "doc/kiln" / name for name in ["README.md", "CHANGELOG.md", "NOTICE", "THIRD-PARTY.txt", "kiln.cdx.json"]},
    }
    for source, to in places.items():
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / source, to)
    service = root / "usr/lib/systemd/system/kiln.service"
    service.parent.mkdir(parents=True)
    shutil.copyfile(ROOT / "deploy/kiln.service", service)
    for page in (share / "man/man1").iterdir():
        compress(page)
    return root


def set_modes(root):
    """The modes that a package wants, whatever this user's umask, and the release's time."""
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() or path.name == "kiln" and path.parent.name == "bin" else 0o644)
        os.utime(path, (epoch(), epoch()))


def compress(path):
    with open(f"{path}.gz", "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as zipped:
        zipped.write(path.read_bytes())
    path.unlink()


def indented(path):
    """A text as a field of Debian's files: an empty line is a dot."""
    return "\n".join(f" {line}" if line.strip() else " ." for line in path.read_text().strip().splitlines())


def tool(name, *arguments):
    if not shutil.which(name):
        raise Missing(f"{name} is not installed")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch())}
    done = subprocess.run([name, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise NotBuilt(f"{name}: {last_error(done.stdout)}")

"""The folder of files that is unpacked on a user's machine, and its archive."""

import os
import shutil
import subprocess

import archive
import crates
from project import OUT, ROOT, WORK, version

DOCUMENTS = ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE", "assets/ember/NOTICE"]
SHELLS = {"bash": "kiln.bash", "zsh": "_kiln", "fish": "kiln.fish", "powershell": "kiln.ps1"}


def folder_for(target, program):
    """Puts together what the archive and the packages of a platform hold."""
    folder = WORK / f"kiln-{version()}-{target.triple}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    copy(program, folder / target.program, 0o755)
    for document in DOCUMENTS:
        copy(ROOT / document, folder / os.path.basename(document), 0o644)
    (folder / "THIRD-PARTY.txt").write_text(crates.third_party(target))
    (folder / "kiln.cdx.json").write_text(crates.bill_of_materials(target))
    shutil.copytree(pages(target, program), folder, dirs_exist_ok=True)
    return folder


def copy(source, to, mode):
    shutil.copyfile(source, to)
    to.chmod(mode)


def pages(target, program):
    """Manual pages and completion scripts, from the first program that this machine can run; they are the same for all."""
    folder = WORK / f"pages-{version()}"
    if not (folder / "completions").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        command = runnable(target, program)
        subprocess.run([*command, "man", str(folder / "man")], check=True)
        scripts = {name: subprocess.run([*command, "completions", shell], stdout=subprocess.PIPE, check=True) for shell, name in SHELLS.items()}
        (folder / "completions").mkdir()
        for name, script in scripts.items():
            (folder / "completions" / name).write_bytes(script.stdout.replace(b"\r\n", b"\n"))
    return folder


def runnable(target, program):
    """A command that starts the program here: itself, with the emulator that cargo's variable names, or a build for tests."""
    runner = os.environ.get(f"CARGO_TARGET_{target.triple.upper().replace('-', '_')}_RUNNER", "").split()
    try:
        subprocess.run([*runner, program, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        return [*runner, program]
    except (OSError, subprocess.CalledProcessError):
        return ["cargo", "run", "--quiet", "--locked", "--manifest-path", ROOT / "Cargo.toml", "--"]


def pack(target, folder):
    """Writes the platform's archive and returns its path."""
    OUT.mkdir(parents=True, exist_ok=True)
    if "windows" in target.triple:
        packed = OUT / f"{folder.name}.zip"
        archive.zip_file(folder, packed)
    else:
        packed = OUT / f"{folder.name}.tar.gz"
        archive.tar_gz(folder, packed)
    return packed

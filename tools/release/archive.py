"""Archives with the same bytes for the same files: sorted, one time, one owner."""

import gzip
import io
import tarfile
import time
import zipfile

from project import epoch


def sorted_files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def mode(path):
    return 0o755 if path.stat().st_mode & 0o100 else 0o644


def tar_gz(folder, to):
    """Packs a folder, which becomes the archive's only entry at the top."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted_files(folder):
            entry = tarfile.TarInfo(path.relative_to(folder.parent).as_posix())
            entry.size, entry.mtime, entry.mode = path.stat().st_size, epoch(), mode(path)
            with path.open("rb") as file:
                tar.addfile(entry, file)
    with to.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as zipped:
        zipped.write(packed.getvalue())


def zip_file(folder, to):
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted_files(folder):
            entry = zipfile.ZipInfo(path.relative_to(folder.parent).as_posix(), time.gmtime(epoch())[:6])
            entry.compress_type, entry.external_attr, entry.create_system = zipfile.ZIP_DEFLATED, mode(path) << 16, 3
            archive.writestr(entry, path.read_bytes(), compresslevel=9)

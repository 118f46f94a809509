"""Measures startup time: from the start of the process to the first layer of the text encoder.

    python3 start.py --kiln ../target/release/kiln --model DIR [--times 5] [--cold]

DIR is any model in diffusers' layout; `make_model.py DIR --sparse` writes one of klein 4B's size as sparse files. Its
files are read once before, so that they are in the page cache, or with --cold evicted from it.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time


def files(model):
    return [path for path in sorted(model.rglob("*")) if path.is_file()]


def warm(model):
    for path in files(model):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def cool(model):
    for path in files(model):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def once(args):
    """Returns the seconds until the program has planned the request, has loaded, and begins to compute."""
    # Never written: the program is killed when it begins to compute.
    image = pathlib.Path(tempfile.gettempdir()) / "kiln-start.png"
    command = [args.kiln, "generate", "a red fox", "-m", args.model, "--json", "-v", "--no-cache", "-o", image]
    began, seen = time.perf_counter(), {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout:
            event = json.loads(line)
            name = (event["event"], event.get("phase"))
            seen.setdefault(name, time.perf_counter() - began)
            if name == ("phase", "text"):
                break
        process.kill()
    return [seen["phase", "load"], seen["phase_done", "load"], seen["phase", "text"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", required=True)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    if not args.cold:
        warm(args.model)
    runs = []
    for _ in range(args.times):
        if args.cold:
            cool(args.model)
        runs.append(once(args))
    for what, times in zip(["order checked", "model loaded", "first kernel"], zip(*runs)):
        print(f"{what:14} {statistics.median(times):.3f} s   ({', '.join(f'{t:.3f}' for t in times)})")


main()

#!/usr/bin/env python3
"""Times `kiln quantize` on a model, next to `cp`: prints seconds, bytes read per second and peak memory.

    python make_model.py random-4b --part transformer
    python quantize.py --kiln ../target/release/kiln --model random-4b/transformer --to q8_0 --to fp8 --to q4_k

The memory is the process's private memory: pages of the mapped model don't count, as the system can reclaim them.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time


def own_memory(pid):
    """Returns the private memory of a process, without mapped files, in bytes; 0 if it has ended."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def run(command):
    start, most = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None:
        most = max(most, own_memory(process.pid))
        time.sleep(0.02)
    if process.returncode != 0:
        sys.exit(f"{command}\nfailed with {process.returncode}:\n{process.stderr.read().decode()[-2000:]}")
    return time.perf_counter() - start, most


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", required=True)
    parser.add_argument("--model", required=True, type=pathlib.Path, help="a folder of safetensors files")
    parser.add_argument("--to", action="append", required=True, help="a type of `kiln quantize`; repeatable")
    parser.add_argument("--work", help="folder for the results, which are removed again")
    args = parser.parse_args()

    files = sorted(args.model.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files)} files, {size / 1e9:.2f} GB")
    for file in files:
        # Read the files once, so that all runs find them in the page cache.
        subprocess.run(["cat", file], stdout=subprocess.DEVNULL, check=True)
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        start = time.perf_counter()
        for file in files:
            shutil.copyfile(file, pathlib.Path(folder, file.name))
        os.sync()
        seconds = time.perf_counter() - start
        print(f"{'cp':8} {seconds:6.1f} s {size / seconds / 1e9:6.2f} GB/s")
        for file in files:
            os.remove(pathlib.Path(folder, file.name))
        for to in args.to:
            # int8 is written to a folder.
            out = pathlib.Path(folder, f"out{'' if to == 'int8' else '.gguf' if to[0] == 'q' else '.safetensors'}")
            seconds, most = run([args.kiln, "quantize", args.model, out, "--to", to])
            print(f"{to:8} {seconds:6.1f} s {size / seconds / 1e9:6.2f} GB/s {most / 2**30:6.2f} GiB")
            shutil.rmtree(out) if out.is_dir() else os.remove(out)


if __name__ == "__main__":
    main()

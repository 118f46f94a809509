#!/usr/bin/env python3
"""Runs Kiln and its peers alternately on the same work and prints medians and ratios.

    python compare.py --kiln ../target/release/kiln --python .venv/bin/python --row step-256 --row decode-512
    python compare.py --kiln … --row flux2.c --flux2c ./flux --folder /models/random-4b
    python compare.py --kiln … --row sd.cpp --sdcpp ./sd-cli --sdcpp-args "--diffusion-model … --vae … --llm …"

Every round runs each program once, in a new process that creates or maps its weights, runs the work once to warm
up and then `--repeat` times. Nothing else should run on the machine meanwhile.
"""

import argparse
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
# name: (phase, size, dtype of Kiln)
ROWS = {
    "step-256": ("step", "256x256", "bf16"),
    "step-512": ("step", "512x512", "bf16"),
    "step-512-int8": ("step", "512x512", "int8"),
    "decode-512": ("decode", "512x512", "bf16"),
    "text-512": ("text", "512x512", "bf16"),
}
PEERS = ["flux2.c", "sd.cpp"]


def output(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(map(str, command))}\nfailed with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def kiln(args, phase, size, dtype):
    """Returns the seconds of each run of a phase."""
    command = [args.kiln, "bench", "--json", "--synthetic", args.model, "--phase", phase, "--size", size]
    command += ["--dtype", dtype, "--repeat", str(args.repeat)]
    command += ["--threads", str(args.threads)] if args.threads else []
    return json.loads(output(command))["phases"][-1]["seconds"]


def torch(args, phase, size):
    command = [args.python, HERE / "peer_torch.py", phase, "--model", args.model, "--size", size]
    command += ["--repeat", str(args.repeat)]
    command += ["--threads", str(args.threads)] if args.threads else []
    return json.loads(output(command).splitlines()[-1])["seconds"]


def one_step(command, steps_flag):
    """Returns the time of a step of a program that only generates whole images: half the difference between three steps and one."""
    seconds = {}
    for steps in (1, 3):
        start = time.perf_counter()
        output(command + [steps_flag, str(steps)])
        seconds[steps] = time.perf_counter() - start
    return [(seconds[3] - seconds[1]) / 2]


def flux2c(args, out):
    command = [args.flux2c, "-d", args.folder, "-p", "a red fox", "-W", "256", "-H", "256", "-S", "1", "-o", out]
    return one_step(command, "-s")


def sdcpp(args, out):
    command = [args.sdcpp, *shlex.split(args.sdcpp_args), "-p", "a red fox", "-W", "256", "-H", "256"]
    return one_step(command + ["--cfg-scale", "1", "-s", "1", "-o", out], "--steps")


def middle(seconds):
    return statistics.median(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", type=pathlib.Path, required=True, help="Kiln's program")
    parser.add_argument("--python", default=sys.executable, help="a Python with torch, diffusers and transformers")
    parser.add_argument("--row", action="append", choices=[*ROWS, *PEERS], help="what to compare; repeatable")
    parser.add_argument("--model", default="4b", help="size of the model")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds")
    parser.add_argument("--repeat", type=int, default=2, help="measured runs per round")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--flux2c", type=pathlib.Path, help="flux2.c's program")
    parser.add_argument("--folder", type=pathlib.Path, help="a model for flux2.c (see make_model.py)")
    parser.add_argument("--sdcpp", type=pathlib.Path, help="stable-diffusion.cpp's program")
    parser.add_argument("--sdcpp-args", default="", help="its options for the weights")
    args = parser.parse_args()
    rows = args.row or list(ROWS)
    if ("flux2.c" in rows and not (args.flux2c and args.folder)) or ("sd.cpp" in rows and not args.sdcpp):
        parser.error("flux2.c needs --flux2c and --folder, sd.cpp needs --sdcpp and --sdcpp-args")
    out = pathlib.Path(tempfile.mkdtemp()) / "out.png"
    print("| work | Kiln, s | peer, s | ratio | rounds |\n|---|---|---|---|---|", flush=True)
    for row in rows:
        phase, size, dtype = ROWS.get(row, ("step", "256x256", "bf16"))
        peer = {"flux2.c": lambda: flux2c(args, out), "sd.cpp": lambda: sdcpp(args, out)}
        run_peer = peer.get(row, lambda: torch(args, phase, size))
        ours, theirs, ratios = [], [], []
        for _ in range(args.rounds):
            ours.append(middle(kiln(args, phase, size, dtype)))
            theirs.append(middle(run_peer()))
            ratios.append(theirs[-1] / ours[-1])
        all_ratios = ", ".join(f"{r:.2f}" for r in ratios)
        print(
            f"| {row} ({dtype}) | {middle(ours):.3f} | {middle(theirs):.3f} | **{middle(ratios):.2f}×** | {all_ratios} |",
            flush=True,
        )


main()

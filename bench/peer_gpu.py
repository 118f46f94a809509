"""Times a phase with PyTorch, diffusers and transformers in bf16 on a GPU; prints a line of JSON per measurement.

    peer_gpu.py step --size 1024x1024                 # eager, then under torch.compile
    peer_gpu.py step --kind compiled --regional       # compiles each repeated block once, which is faster
    peer_gpu.py decode --kind compiled --turns DIR    # compiles, then measures whenever DIR/NAME.go appears, until DIR/quit

With --turns, several processes can compile at the same time, and then be measured alternately.
"""

import argparse
import json
import pathlib
import time

import torch

import phases

CUDA = "cuda"


def measure(run, repeat):
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    times.sort()
    return dict(median=times[len(times) // 2], best=times[0])


def first_run(run):
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def turns(folder, name):
    """Yields whenever this process is to measure."""
    if not folder:
        yield
        return
    folder = pathlib.Path(folder)
    go = folder / f"{name}.go"
    (folder / f"{name}.ready").touch()
    while not (folder / "quit").exists():
        if go.exists():
            yield
            go.unlink()
        time.sleep(0.02)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    phases.arguments(parser, (1024, 1024), 15)
    parser.add_argument("--refs", type=int, default=0)
    parser.add_argument("--kind", choices=["eager", "compiled"], action="append")
    parser.add_argument("--regional", action="store_true")
    parser.add_argument("--turns", metavar="DIR")
    parser.add_argument("--name", default="peer")
    args = parser.parse_args()
    torch.manual_seed(0)
    # The first setting that diffusers' documentation recommends.
    torch.backends.cudnn.benchmark = True
    what = f"{args.phase} {args.model} {args.size[0]}x{args.size[1]} refs {args.refs}"
    with torch.inference_mode():
        model, entry, call = phases.ALL[args.phase](args, CUDA)
        runs = {}
        for kind in args.kind or ["eager", "compiled"]:
            run = entry
            if kind == "compiled" and args.regional:
                model.compile_repeated_blocks()
            elif kind == "compiled":
                run = torch.compile(entry)
            runs[kind] = lambda run=run: call(run)
        first = {kind: first_run(run) for kind, run in runs.items()}
        for _ in turns(args.turns, args.name):
            for kind, run in runs.items():
                torch.cuda.reset_peak_memory_stats()
                result = dict(first=first[kind], **measure(run, args.repeat))
                memory = torch.cuda.max_memory_allocated()
                line = dict(name=what, kind=kind, regional=args.regional, torch=torch.__version__, memory=memory, **result)
                print(json.dumps(line), flush=True)


main()

"""Times one phase with PyTorch, diffusers and transformers in bf16 on the CPU; prints JSON."""

import argparse
import json
import time

import torch

import phases


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    phases.arguments(parser, (512, 512), 2)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    _, entry, call = phases.ALL[args.phase](args, "cpu")
    seconds = []
    with torch.inference_mode():
        call(entry)
        for _ in range(args.repeat):
            start = time.perf_counter()
            call(entry)
            seconds.append(time.perf_counter() - start)
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "seconds": seconds}))


main()

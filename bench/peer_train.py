"""Times a LoRA training step of diffusers' transformer with PEFT in bf16 on a GPU; prints a line of JSON per measurement.

    peer_train.py step --size 1024x1024                       # eager
    peer_train.py step --size 1024x1024 --kind compiled       # with compiled blocks
    peer_train.py step --size 1024x1024 --checkpointing

Rank 16 on all linear layers of the blocks, batch 1, adapters in bf16 (the fastest choice), fused AdamW.
"""

import argparse
import json
import time

import torch
from peft import LoraConfig, inject_adapter_in_model

import phases

CUDA = "cuda"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    phases.arguments(parser, (1024, 1024), 10)
    parser.add_argument("--kind", choices=["eager", "compiled"], default="eager")
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model, _, call = phases.step(args, CUDA)
    model.requires_grad_(False).train()
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "transformer_blocks." in n]
    inject_adapter_in_model(LoraConfig(r=16, lora_alpha=16, target_modules=names), model)
    model.to(torch.bfloat16)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    if args.checkpointing:
        model.enable_gradient_checkpointing()
    if args.kind == "compiled":
        model.compile_repeated_blocks()

    def step():
        out = call(model)[0]
        loss = out.float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    times.sort()
    size = f"{args.size[0]}x{args.size[1]}"
    result = dict(size=size, kind=args.kind, checkpointing=args.checkpointing, first=first, median=times[len(times) // 2], best=times[0])
    memory = dict(memory=torch.cuda.max_memory_allocated(), reserved=torch.cuda.max_memory_reserved())
    print(json.dumps(dict(result, **memory, torch=torch.__version__)), flush=True)


main()

"""Trains writer and reader together.   train.py --out FOLDER [--minutes N] [--start FILE.pt]"""

import argparse
import math
import os
import random
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from attacks import attack, blur
from networks import BITS, LIMIT, SIDE, Reader, Writer, detail, load, luma, resize, watermark
from pictures import pictures

BATCH = 64
POOL, POOL_SIDE = 8000, 512
RATE = 6e-4
# At the start marks are so much stronger.
STRONGEST = 7 / LIMIT
# Steps with a reader that keeps up until marks and attacks are at their final strength.
STEPS = 2000


def picture_pool(device):
    generator = torch.Generator(device=device)
    generator.manual_seed(11)
    batches = ((pictures(32, POOL_SIDE, generator) * 255).round().byte() for _ in range(POOL // 32))
    return torch.cat(list(batches))


def take(pool):
    """A batch of pictures at a random size, shrunk or cut out."""
    size = random.choice([256, 256, 256, 256, 320, 384])
    image = pool[torch.randint(len(pool), (BATCH,), device=pool.device)].float() / 255
    if random.random() < 0.5:
        image = resize(image, size)
    else:
        top, left = (random.randint(0, POOL_SIDE - size) for _ in range(2))
        image = image[..., top : top + size, left : left + size]
    return image.flip(3) if random.random() < 0.5 else image


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--start")
    args = parser.parse_args()
    torch.manual_seed(5)
    random.seed(5)
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    device = "cuda"
    pool = picture_pool(device)
    writer, reader = load(args.start, device) if args.start else (Writer().to(device), Reader().to(device))
    parameters = [*writer.parameters(), *reader.parameters()]
    averages = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, weight_decay=1e-4, betas=(0.9, 0.98), fused=True)
    write, read = torch.compile(writer), torch.compile(reader)
    # 0: strong marks and no attacks; from 0.6 on final marks; from 1 on all attacks.
    level, right, step, start = 1.0 if args.start else 0.0, 0.5, 0, time.time()
    while (done := (time.time() - start) / (args.minutes * 60)) < 1:
        if right > 0.93 + 0.03 * min(level, 1):
            level += 1 / STEPS
        if done > 0.4:
            level = max(level, 1.0)
        strength = STRONGEST ** max(0, 1 - level / 0.6)
        hard = min(1, max(0, (level - 0.15) / 0.85))
        rate = RATE * min(1, (step + 1) / 300) * (0.5 + 0.5 * math.cos(math.pi * max(0, done - 0.3) / 0.7)) + 1e-6
        for group in optimizer.param_groups:
            group["lr"] = rate
        image = take(pool)
        bits = (torch.rand(BATCH, BITS, device=device) < 0.5).float() * 2 - 1
        with torch.autocast("cuda", torch.bfloat16):
            marked, change = watermark(write, image, bits, LIMIT * strength, strength)
        # A third of what the reader sees is unmarked, after the same attacks.
        state = random.getstate()
        seen = [resize(attack(luma(marked.float()), hard), SIDE)]
        random.setstate(state)
        seen.append(resize(attack(luma(image[: BATCH // 2]), hard), SIDE))
        with torch.autocast("cuda", torch.bfloat16):
            logits = read(detail(torch.cat(seen))).float()
        known, unknown = logits[:BATCH, :BITS], logits[BATCH:, :BITS]
        is_marked = (torch.arange(len(logits), device=device) < BATCH).float()
        wrong = F.binary_cross_entropy_with_logits(known, (bits + 1) / 2)
        presence = F.binary_cross_entropy_with_logits(logits[:, BITS], is_marked)
        # Unmarked, no bit is known; what the eye sees best, coarse changes, costs.
        others = (0.01 * unknown.pow(2).mean() + (0.1 + 0.3 * done) * presence) * min(1, level * 3)
        loss = wrong + others + 0.03 * blur(change, 25).pow(2).mean() * min(1, level)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        if step % 50 == 0 and not math.isfinite(norm.item()):
            sys.exit(f"step {step}: the gradient is not finite")
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, parameters, 0.002 if step > 2000 or args.start else 0.02)
        if step % 10 == 0:
            right = 0.9 * right + 0.1 * ((known > 0) == (bits > 0)).float().mean().item()
        if step % 500 == 0:
            enough = (((known > 0) == (bits > 0)).sum(1) >= 29).float().mean()
            print(
                f"{step:6d} {time.time() - start:4.0f} s, level {level:.2f}: bits {right:.4f}, images {enough:.3f}, "
                f"loss {wrong:.4f}, presence {presence:.4f}",
                flush=True,
            )
            if step == 2000 and level < 0.02:
                sys.exit("it learns nothing")
        step += 1
    for p, average in zip(parameters, averages):
        p.data.copy_(average)
    os.makedirs(args.out, exist_ok=True)
    torch.save({"writer": writer.state_dict(), "reader": reader.state_dict()}, f"{args.out}/watermark.pt")


if __name__ == "__main__":
    main()

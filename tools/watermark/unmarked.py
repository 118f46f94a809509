"""How often pictures without a watermark are taken for marked, by random parts of files.   unmarked.py FILE.pt FOLDER [COUNT]"""

import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch
from PIL import Image

from networks import BITS, SIDE, detail, is_present, load, luma

# Of each file at once.
PARTS = 50


def parts(file, seed):
    """Parts of a picture, turned and mirrored, as bytes of 256²."""
    chance = random.Random(seed)
    image = Image.open(file).convert("RGB")
    found = []
    for _ in range(PARTS):
        share = chance.uniform(0.25, 1)
        width, height = (max(1, int(n * min(1, share * chance.uniform(0.8, 1.25)))) for n in image.size)
        left, top = chance.randint(0, image.width - width), chance.randint(0, image.height - height)
        part = image.resize((SIDE, SIDE), Image.BILINEAR, box=(left, top, left + width, top + height))
        found.append(numpy.asarray(part.transpose(chance.choice(list(Image.Transpose)))))
    return torch.from_numpy(numpy.stack(found)).permute(0, 3, 1, 2)


@torch.no_grad()
def main(checkpoint, folder, count=100_000):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reader = load(checkpoint, device)[1]
    names = sorted(os.listdir(folder))
    jobs = [(f"{folder}/{names[i % len(names)]}", i) for i in range(int(count) // PARTS)]
    presence, certainty, found = [], [], 0
    with ThreadPoolExecutor() as threads:
        # A few files ahead at a time: all at once would not fit the memory.
        for start in range(0, len(jobs), 64):
            for images in threads.map(lambda job: parts(*job), jobs[start : start + 64]):
                logits = reader(detail(luma(images.to(device).float() / 255)))
                presence += logits[:, BITS].tolist()
                certainty += logits[:, :BITS].abs().mean(1).tolist()
                found += is_present(logits).sum().item()
            print(f"{len(presence)} parts: {found} taken for marked", flush=True)
    for name, values in ("presence", presence), ("certainty", certainty):
        values.sort(reverse=True)
        tail = [f"{values[len(values) // n]:.2f} of one in {n}" for n in (10, 100, 1000, 10_000) if n < len(values)]
        print(f"{name}: at most {values[0]:.2f}; exceeded: " + ", ".join(tail))


if __name__ == "__main__":
    main(*sys.argv[1:])

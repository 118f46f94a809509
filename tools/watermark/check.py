"""Tests networks on files of pictures, with Pillow's JPEG and WebP.   check.py FILE.pt FOLDER"""

import io
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch
from PIL import Image

from networks import BITS, SIDE, detail, is_present, load, luma, resize, watermark

ENOUGH = 29


def tensor(image, device):
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)[None].to(device).float() / 255


def picture(values):
    return Image.fromarray((values[0] * 255).round().byte().permute(1, 2, 0).cpu().numpy())


def coded(image, kind, quality):
    file = io.BytesIO()
    image.save(file, kind, quality=quality)
    return Image.open(file).convert("RGB")


def changed(image):
    """What happens to an image, by name."""
    width, height = image.size
    w, h = int(width * 0.9), int(height * 0.9)
    left, top = random.randint(0, width - w), random.randint(0, height - h)
    crop = image.crop((left, top, left + w, top + h))
    return {
        "nothing": image,
        "JPEG 75": coded(image, "JPEG", 75),
        "JPEG 50": coded(image, "JPEG", 50),
        "WebP 80": coded(image, "WEBP", 80),
        "half": image.resize((max(1, width // 2), max(1, height // 2)), Image.BICUBIC),
        "crop to 90 %": crop,
        "crop, JPEG 75": coded(crop, "JPEG", 75),
    }


@torch.no_grad()
def main(checkpoint, folder):
    random.seed(3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    writer, reader = load(checkpoint, device)
    generator = torch.Generator().manual_seed(3)
    decibels, jobs = [], []
    with ThreadPoolExecutor() as threads:
        names = sorted(os.listdir(folder))
        opened = threads.map(lambda name: Image.open(f"{folder}/{name}").convert("RGB"), names)
        for name, original in zip(names, opened):
            image = tensor(original, device)
            bits = torch.randint(0, 2, (1, BITS), generator=generator).to(device).float() * 2 - 1
            marked, _ = watermark(writer, image, bits)
            decibels.append(-10 * (marked - image).pow(2).mean().clamp_min(1e-12).log10().item())
            jobs.append((name, bits, image, threads.submit(changed, picture(marked))))
        right, present, unmarked = {}, {}, []
        for name, bits, image, job in jobs:
            kinds = job.result()
            seen = [tensor(kind, device) for kind in kinds.values()] + [image]
            logits = reader(detail(luma(torch.cat([resize(x, SIDE) for x in seen]))))
            counts = ((logits[:, :BITS] > 0) == (bits > 0)).sum(1).tolist()
            is_found = is_present(logits).tolist()
            for kind, count, found in zip(kinds, counts, is_found):
                right.setdefault(kind, []).append(count if found else 0)
                present.setdefault(kind, []).append(found)
            unmarked.append(is_found[-1])
            if min(counts[:-1]) < 26:
                print(f"{name}: {counts[:-1]} of {BITS} bits")
    print(f"{len(names)} images, {numpy.mean(decibels):.1f} dB, least {min(decibels):.1f} dB")
    for kind, counts in right.items():
        share = numpy.mean([count >= ENOUGH for count in counts])
        found = numpy.mean(present[kind])
        print(f"{kind:14s} {ENOUGH} bits and more in {share:.2%}, least {min(counts)}; found in {found:.2%}")
    print(f"unmarked: found in {numpy.mean(unmarked):.2%}")


if __name__ == "__main__":
    main(*sys.argv[1:])

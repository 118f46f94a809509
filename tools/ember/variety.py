"""Measures how much images change with the seed: `variety.py KILN OUT MODEL [MODEL …]`.

Generates six seeds of eight prompts with each model, shrinks the images to 64×64, and prints the standard deviation over the seeds, in levels of 255,
averaged over pixels: per prompt, and the median of the prompts. Needs numpy and Pillow.
"""

import argparse
import subprocess
from pathlib import Path

import numpy as np
from PIL import Image

SEEDS = 6
PROMPTS = (
    "a red apple on a white background",
    "a cat face",
    "a house with a tree",
    "a rocket in the night sky",
    "a green frog",
    "a wooden chair",
    "a bowl of soup",
    "a mountain landscape at sunset",
)


def deviation(kiln, model, prompt, folder):
    folder.mkdir(parents=True, exist_ok=True)
    command = [kiln, "generate", prompt, "-m", model, "-b", str(SEEDS), "-S", "100", "-q", "-o", f"{folder}/{{seed}}.png"]
    subprocess.run(command, check=True)
    small = [Image.open(file).convert("RGB").resize((64, 64), Image.Resampling.BOX) for file in sorted(folder.glob("*.png"))]
    return np.stack([np.asarray(image, float) for image in small]).std(0).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kiln")
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+")
    args = parser.parse_args()
    for number, model in enumerate(args.models):
        values = [deviation(args.kiln, model, prompt, args.out / f"{number}-{i}") for i, prompt in enumerate(PROMPTS)]
        print(model, "median %.1f:" % np.median(values), " ".join("%.1f" % value for value in values))


main()

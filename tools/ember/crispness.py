"""Measures how crisp a model's single things are: `crispness.py DATA OUT KILN model.safetensors…`.

The images of `WORDS` in both styles on white, 256×256, by the program, next to the source pictures as the renderer draws them. Three figures, medians over the images:
outline energy (squared gradients on the source's outlines, a band of nine pixels, over the source's own there; 1 is as crisp), edge error (mean absolute difference of
the two gradient maps in that band, over the mean of the source's) and PSNR. Writes OUT/crispness.webp: source, then the models.
"""

import argparse
import os
import statistics
import subprocess

import torch
import torch.nn.functional as F

from captions import MIDDLE, NO_OBJECT, OBJECTS, WHITE
from data import Library
from evaluate import from_file, save_grid
from scenes import render

WORDS = (
    "cat face", "dog face", "fox", "owl", "hot beverage", "guitar", "castle", "bicycle", "rocket", "house", "octopus", "penguin", "red apple", "pizza", "hamburger", "automobile",
    "sailboat", "helicopter", "butterfly", "honeybee", "snail", "tiger", "horse", "unicorn", "robot", "ghost", "smiling face with sunglasses", "crying face", "astronaut", "cook",
    "crown", "key", "camera", "umbrella", "violin", "trophy", "cactus", "sunflower", "palm tree", "birthday cake",
)  # fmt: skip
STYLES = ("3d", "flat")


def slope(x):
    """Returns the length of the gradient of the luma, `[batch, h, w]`."""
    grey = (x * torch.tensor([.3, .59, .11]).view(3, 1, 1)).sum(1)
    down, right = grey[:, 1:, :-1] - grey[:, :-1, :-1], grey[:, :-1, 1:] - grey[:, :-1, :-1]
    return (down.square() + right.square()).sqrt()


def measure(images, sources):
    made, true = slope(images), slope(sources)
    band = F.max_pool2d((true > .08).float()[:, None], 9, 1, 4)[:, 0]
    total = lambda x: (x * band).flatten(1).sum(1)
    energy, error = total(made.square()) / total(true.square()), total((made - true).abs()) / total(true)
    psnr = -10 * torch.log10((images - sources).square().flatten(1).mean(1).clamp_min(1e-10))
    return [statistics.median(v.tolist()) for v in (energy, error, psnr)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out")
    parser.add_argument("kiln")
    parser.add_argument("models", nargs="+")
    args = parser.parse_args()
    library = Library(args.data)
    items = {item["label"]: item for item in library.items}
    asked = [(style, word) for style in STYLES for word in WORDS if style in items[word]["ids"]]
    # only the asked pictures are decoded
    library.pictures = [library.pictures[items[word]["ids"][style]] for style, word in asked]
    pictures = torch.from_numpy(library.load_pictures(workers=2))
    rows = torch.tensor([[k, 0, 0, MIDDLE["scale"], 0, 0, 0] + NO_OBJECT * (OBJECTS - 1) + WHITE for k in range(len(asked))])
    sources, shown = render(pictures, rows, 256, 256), []
    prompts = [f"a {style} {word} on a white background" for style, word in asked]
    for number, model in enumerate(args.models):
        folder = os.path.join(args.out, f"crisp-{number}")
        os.makedirs(folder, exist_ok=True)
        subprocess.run([args.kiln, "generate", *prompts, "-m", model, "-S", "1", "-q", "-o", os.path.join(folder, "{seed}.png")], check=True)
        shown.append(torch.stack([from_file(os.path.join(folder, f"{1 + k}.png")) for k in range(len(prompts))]))
        for style in STYLES:
            of = [k for k, (s, _) in enumerate(asked) if s == style]
            print(f"{model} {style}: outline energy {{:.2f}}, edge error {{:.2f}}, {{:.1f}} dB".format(*measure(shown[-1][of], sources[of])), flush=True)
    small = [F.avg_pool2d(x, 2) for x in (sources, *shown)]
    save_grid(torch.stack(small, 1).flatten(0, 1), 4 * len(small), os.path.join(args.out, "crispness.webp"))


if __name__ == "__main__":
    main()

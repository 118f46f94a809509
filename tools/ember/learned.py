"""Measures what the LoRA of docs/training.md has learned: orange backgrounds and black silhouettes, on prompts that were not trained.

    python learned.py KILN dusk.safetensors sheet.webp

For every prompt an image of Ember without and with the LoRA, and of Ember base with it. An image shows the style as far as its border is orange
and what is not orange is black. Needs numpy and Pillow.
"""
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

THINGS = ("rocket", "crown", "guitar", "frog", "butterfly", "teapot", "umbrella", "horse")
COLUMNS = (("Ember", "ember", False), ("Ember with LoRA", "ember", True), ("base with LoRA", "ember-base", True))


def shares(image):
    """Share of the border that is orange, and of everything that is not orange, what is black."""
    hsv = np.asarray(image.convert("HSV"), dtype=float) * (360 / 255, 1 / 255, 1 / 255)
    orange = (hsv[..., 0] > 15) & (hsv[..., 0] < 45) & (hsv[..., 1] > .6) & (hsv[..., 2] > .6)
    border = np.concatenate([orange[:8].ravel(), orange[-8:].ravel(), orange[:, :8].ravel(), orange[:, -8:].ravel()])
    rest = hsv[..., 2][~orange]
    return border.mean(), (rest < .25).mean() if rest.size else 0.0


def main(kiln, lora, sheet):
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, model, has_lora in COLUMNS:
            prompts = [f"a {thing} on a dusk background" for thing in THINGS]
            options = ["-m", model, "-S", "1", "-q", "-o", f"{folder}/{len(rows)}.png"] + (["--lora", lora] if has_lora else [])
            subprocess.run([kiln, "generate", *prompts, *options], check=True)
            images = [Image.open(f"{folder}/{len(rows)}-{i + 1}.png").convert("RGB") for i in range(len(THINGS))]
            orange, black = np.mean([shares(image) for image in images], axis=0)
            print(f"{name}: border orange {orange:.2f}, object black {black:.2f}", flush=True)
            rows.append([image.resize((128, 128), Image.LANCZOS) for image in images])
    out = Image.new("RGB", (132 * len(THINGS) - 4, 132 * len(rows) - 4), "white")
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            out.paste(image, (132 * x, 132 * y))
    out.save(Path(sheet), quality=85)


if __name__ == "__main__":
    main(*sys.argv[1:])

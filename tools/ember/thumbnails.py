"""Thumbnails that the program's tests compare generated images with: `thumbnails.py DATA OUT`, with DATA from `fetch.py`.

Writes OUT/emoji.webp, a grid of 3D images on white as in `evaluate.py` (0.85 of the side, centred), SIDE pixels each,
eight per row, and OUT/emoji.txt with their names in that order.
"""

import argparse
import io
import json
import os

from PIL import Image

SIDE, COLUMNS, LARGE = 16, 8, 256
NAMES = (
    "red apple", "green apple", "tangerine", "lemon", "banana", "strawberry", "cherries", "peach",
    "pear", "watermelon", "tomato", "avocado", "pizza", "hamburger", "doughnut", "birthday cake",
    "cat face", "dog face", "panda", "frog", "penguin", "octopus", "butterfly", "lady beetle",
    "rocket", "automobile", "airplane", "sailboat", "red heart", "star", "crescent moon", "sun",
    "soccer ball", "balloon", "guitar", "crown", "house", "evergreen tree", "sunflower", "ghost",
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out")
    args = parser.parse_args()
    with open(os.path.join(args.data, "meta.json")) as file:
        places = {meta["label"]: meta["img"].get("3d") for meta in json.load(file)}
    with open(os.path.join(args.data, "3d.bin"), "rb") as file:
        blob = file.read()
    sheet = Image.new("RGB", (COLUMNS * SIDE, len(NAMES) // COLUMNS * SIDE))
    inner = round(0.85 * LARGE)
    for i, name in enumerate(NAMES):
        offset, length = places[name]
        emoji = Image.open(io.BytesIO(blob[offset:offset + length])).convert("RGBA").resize((inner, inner), Image.Resampling.BICUBIC)
        large = Image.new("RGBA", (LARGE, LARGE), "white")
        large.alpha_composite(emoji, ((LARGE - inner) // 2,) * 2)
        small = large.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
        sheet.paste(small, (i % COLUMNS * SIDE, i // COLUMNS * SIDE))
    sheet.save(os.path.join(args.out, "emoji.webp"), quality=85, method=6)
    with open(os.path.join(args.out, "emoji.txt"), "w") as file:
        file.write("\n".join(NAMES) + "\n")


if __name__ == "__main__":
    main()

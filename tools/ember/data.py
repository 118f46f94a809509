"""The packed images, their names, and the tokenizer."""

import io
import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from config import PAD_TOKEN, STYLES, TEMPLATE, TEXT_TOKENS
from names import EXTRA_NAMES


class Library:
    """Every item (an emoji) with its names, and a flat list of images: `pictures[k] = (style, offset, length)`."""

    def __init__(self, folder, only=None):
        self.folder = folder
        self.items, self.pictures = [], []
        with open(os.path.join(folder, "meta.json")) as file:
            metas = json.load(file)
        tags = Counter(tag for meta in metas for tag in set(meta["tags"]))
        labels = {meta["label"] for meta in metas}
        for meta in metas:
            if only and meta["hex"] not in only:
                continue
            ids = {}
            for style in STYLES:
                if style in meta["img"]:
                    ids[style] = len(self.pictures)
                    self.pictures.append((style, *meta["img"][style]))
            if not ids:
                continue
            # a name that is another item's label is used for that item only: "tiger" is never the tiger face
            own = lambda names: [name for name in names if name == meta["label"] or name not in labels]
            plain = own(EXTRA_NAMES.get(meta["label"], []))
            rare = own(t for t in meta["tags"] if tags[t] <= 2 and len(t) > 2 and t.isascii() and t not in plain)
            self.items.append(dict(meta, ids=ids, alt=own(meta["alt"]), plain=plain, rare=rare))
        self.by_hex = {item["hex"]: k for k, item in enumerate(self.items)}
        weights = np.array([self._weight(item) for item in self.items])
        self.cumulative = np.cumsum(weights / weights.sum())

    @staticmethod
    def _weight(item):
        """Sampling weight of an item. Higher for people and signs, which have many near-duplicates, and for objects with plain names, which users ask for most."""
        weight = {1: 1.3, 8: 1.3}.get(item["group"], 1.0)
        return weight * (1.3 if item["plain"] else 1.0)

    def with_style(self, style):
        return [k for k, item in enumerate(self.items) if style in item["ids"]]

    def load_pictures(self, size=256, workers=1):
        """Returns uint8 `[images, size, size, 4]`, straight alpha."""
        from PIL import Image

        blobs = {}
        for style in STYLES:
            with open(os.path.join(self.folder, style + ".bin"), "rb") as file:
                blobs[style] = file.read()

        def decode(entry):
            style, offset, length = entry
            picture = Image.open(io.BytesIO(blobs[style][offset:offset + length])).convert("RGBA")
            return np.asarray(picture if picture.size == (size, size) else picture.resize((size, size), Image.LANCZOS))

        with ThreadPoolExecutor(workers) as pool:
            return np.stack(list(pool.map(decode, self.pictures)))


def load_tokenizer(folder):
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    return Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))


def token_ids(tokenizer, captions, length=TEXT_TOKENS):
    """Returns int16 `[captions, length]`, with the template applied, padded on the right."""
    out = np.full((len(captions), length), tokenizer.token_to_id(PAD_TOKEN), np.int16)
    encoded = tokenizer.encode_batch([TEMPLATE.format(c) for c in captions], add_special_tokens=False)
    for row, encoding in zip(out, encoded):
        ids = encoding.ids[:length]
        row[:len(ids)] = ids
    return out

"""The packed images, their names, and the tokenizer."""

import io
import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from config import PAD_TOKEN, STYLES, TEMPLATE, TEXT_TOKENS
from names import EXTRA_NAMES, SYNONYMS


class Library:
    """Every item (an emoji) with its names, and a flat list of images: `pictures[k] = (style, offset, length)`."""

    def __init__(self, folder, only=None):
        self.folder = folder
        self.items, self.pictures = [], []
        with open(os.path.join(folder, "meta.json")) as file:
            metas = json.load(file)
        tags = Counter(tag for meta in metas for tag in set(meta["tags"]))
        owners = self._owners(metas, tags)
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
            own = lambda names: [name for name in dict.fromkeys(names) if owners.get(name) == meta["label"]]
            plain = own(EXTRA_NAMES.get(meta["label"], []) + SYNONYMS.get(meta["label"], []))
            alt = own(name for name in meta["alt"] if name not in plain)
            rare = own(tag for tag in meta["tags"] if tag not in plain + alt)
            self.items.append(dict(meta, ids=ids, alt=alt, plain=plain, rare=rare))
        self.by_hex = {item["hex"]: k for k, item in enumerate(self.items)}
        weights = np.array([self._weight(item) for item in self.items])
        self.cumulative = np.cumsum(weights / weights.sum())

    @staticmethod
    def _owners(metas, tags):
        """Returns name -> label, so that no name stands for two images, which a model would average: labels first, then everyday words, other names, and tags of one item."""
        owners = {meta["label"]: meta["label"] for meta in metas}
        for words in (EXTRA_NAMES, SYNONYMS):
            for label, names in words.items():
                for name in names:
                    owners.setdefault(name, label)
        for names in (lambda m: m["alt"], lambda m: [t for t in m["tags"] if tags[t] == 1 and len(t) > 2 and t.isascii()]):
            for meta in metas:
                for name in names(meta):
                    owners.setdefault(name, meta["label"])
        return owners

    @staticmethod
    def _weight(item):
        """Sampling weight of an item. Lower for people and signs, whose many near-duplicates few ask for; higher for things with plain names, which users ask for most."""
        weight = {1: .8, 8: .8}.get(item["group"], 1.0)
        return weight * (1.7 if item["plain"] else 1.0)

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


def load_tokenizer(path):
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def token_ids(tokenizer, captions, length=TEXT_TOKENS):
    """Returns int16 `[captions, length]`, with the template applied, padded on the right."""
    out = np.full((len(captions), length), tokenizer.token_to_id(PAD_TOKEN), np.int16)
    encoded = tokenizer.encode_batch([TEMPLATE.format(c) for c in captions], add_special_tokens=False)
    for row, encoding in zip(out, encoded):
        ids = encoding.ids[:length]
        row[:len(ids)] = ids
    return out

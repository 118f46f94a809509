"""Downloads the images and their names from the package registry, and packs them for training.

    fetch.py OUT            download, rasterise, pack, describe, train the tokenizer
    fetch.py OUT --words    only describe again and train the tokenizer (after changing the captions)

Sources (all MIT): npm `@lobehub/fluent-emoji-3d` and `@lobehub/fluent-emoji-flat` 1.1.0 (Microsoft's Fluent emoji) and
`emojibase-data` 17.0.0. Needs Pillow, numpy, tokenizers, and `resvg_py` for the flat style's SVGs.
Writes `3d.bin`, `flat.bin` (concatenated WebP images), `meta.json`, `tokenizer.json`.
"""

import argparse
import io
import json
import os
import tarfile
import urllib.request

import numpy as np

from config import SPECIAL_TOKENS, STYLES, TEMPLATE, TEXT_TOKENS, VOCAB
from names import COLOUR_WORDS, EXTRA_NAMES

REGISTRY = "https://registry.npmjs.org"
PACKAGES = {"3d": ("@lobehub/fluent-emoji-3d", "1.1.0"), "flat": ("@lobehub/fluent-emoji-flat", "1.1.0"), "names": ("emojibase-data", "17.0.0")}
SIZE = 256
SKIPPED_GROUPS = (None, 2, 9)  # components and flags
# Qwen's pre-tokenizer split
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def download(name, version):
    """Downloads a package and returns its files: path without the leading folder -> bytes."""
    url = f"{REGISTRY}/{name}/-/{name.split('/')[-1]}-{version}.tgz"
    with urllib.request.urlopen(url, timeout=180) as answer:
        archive = tarfile.open(fileobj=io.BytesIO(answer.read()), mode="r:gz")
    return {m.name.split("/", 1)[1]: archive.extractfile(m).read() for m in archive.getmembers() if m.isfile()}


def spellings(code):
    """Returns the possible file names of a code point: with or without the variation selector."""
    code = code.lower()
    head, *tail = code.split("-")
    return code, code.replace("-fe0f", ""), code + "-fe0f", "-".join([head, "fe0f", *tail])


def rasterise(name, content):
    from PIL import Image

    if name.endswith(".svg"):
        import resvg_py

        content = bytes(resvg_py.svg_to_bytes(svg_string=content.decode(), width=SIZE, height=SIZE))
    picture = Image.open(io.BytesIO(content)).convert("RGBA")
    return picture if picture.size == (SIZE, SIZE) else picture.resize((SIZE, SIZE), Image.LANCZOS)


def pack(out):
    names = download(*PACKAGES["names"])
    records = json.loads(names["en/data.json"])
    groups = {s["order"]: s["message"] for s in json.loads(names["en/messages.json"])["subgroups"]}
    short = [json.loads(names[f"en/shortcodes/{s}.json"]) for s in ("github", "joypixels", "emojibase")]
    files = {}
    for style in STYLES:
        content = download(*PACKAGES[style])
        files[style] = {os.path.splitext(os.path.basename(p))[0].lower(): (p, b) for p, b in content.items() if p.startswith("assets/")}
    metas, blobs = [], {style: bytearray() for style in STYLES}
    for record in records:
        if record.get("group") in SKIPPED_GROUPS:
            continue
        code = record["hexcode"]
        label = record["label"].lower().replace(": ", " ").replace("’", "'")
        label = "".join(c for c in label if c not in ",“”")
        alt = set()
        for table in short:
            found = table.get(code, [])
            alt |= {a.replace("_", " ").lower() for a in ([found] if isinstance(found, str) else found)}
        meta = dict(
            label=label, hex=code, tags=[t.lower() for t in record.get("tags", [])][:10], group=record["group"],
            sub=groups.get(record.get("subgroup"), ""), alt=sorted(a for a in alt if len(a) > 2 and a != label and a.isascii()), img={})
        for style in STYLES:
            entry = next((files[style][s] for s in spellings(code) if s in files[style]), None)
            if not entry:
                continue
            picture = rasterise(*entry)
            if picture.getchannel("A").getextrema()[1] < 200:
                continue
            buffer = io.BytesIO()
            picture.save(buffer, "WEBP", quality=88, method=4, alpha_quality=95)
            meta["img"][style] = [len(blobs[style]), buffer.tell()]
            blobs[style] += buffer.getvalue()
        if meta["img"]:
            metas.append(meta)
    for style in STYLES:
        with open(os.path.join(out, style + ".bin"), "wb") as file:
            file.write(blobs[style])
    return metas


def dominant(picture):
    """Returns the strongest hue of an image, its colour name, and whether the object can be recoloured by rotating the hue."""
    from PIL import Image

    a = np.asarray(picture.resize((64, 64), Image.BILINEAR)).astype(float) / 255
    alpha, (r, g, b) = a[..., 3], np.moveaxis(a[..., :3], -1, 0)
    top, low = a[..., :3].max(-1), a[..., :3].min(-1)
    chroma = np.maximum(top - low, 1e-6)
    saturation = np.where(top > 0, (top - low) / np.maximum(top, 1e-6), 0)
    hue = np.where(top == r, ((g - b) / chroma) % 6, np.where(top == g, (b - r) / chroma + 2, (r - g) / chroma + 4)) * 60
    strong = (saturation > .25) & (top > .2)
    weight = alpha * saturation * strong
    if alpha.sum() < 50 or weight.sum() < 1:
        return dict(ok=False, h=0, name="")
    histogram, _ = np.histogram(hue, 72, (0, 360), weights=weight)
    smooth = sum(np.roll(histogram, k) for k in range(-5, 6))
    peak = int(smooth.argmax())
    near = weight * (np.abs((hue - (peak * 5 + 2.5) + 180) % 360 - 180) < 30)
    angle = np.deg2rad(hue)
    mean = float(np.rad2deg(np.arctan2((np.sin(angle) * near).sum(), (np.cos(angle) * near).sum())) % 360)
    value, depth = (top * near).sum() / near.sum(), (saturation * near).sum() / near.sum()
    limits = ((14, "red"), (42, "orange"), (68, "yellow"), (163, "green"), (192, "teal"), (248, "blue"), (292, "purple"), (336, "pink"), (361, "red"))
    name = next(n for limit, n in limits if mean < limit)
    if 5 < mean < 48 and value < .68:
        name = "brown"
    if name == "red" and value > .8 and depth < .5:
        name = "pink"
    share, coloured = smooth[peak] / histogram.sum(), (strong * alpha).sum() / alpha.sum()
    return dict(ok=bool(share > .62 and coloured > .5), h=round(mean, 1), name=name)


def describe(out, metas):
    from PIL import Image

    blobs = {style: open(os.path.join(out, style + ".bin"), "rb").read() for style in STYLES}
    for meta in metas:
        meta["dom"] = {}
        first = meta["label"].split()[0]
        for style, (offset, length) in meta["img"].items():
            meta["dom"][style] = dominant(Image.open(io.BytesIO(blobs[style][offset:offset + length])).convert("RGBA"))
            if first in COLOUR_WORDS:
                meta["dom"][style]["name"] = first
    with open(os.path.join(out, "meta.json"), "w") as file:
        json.dump(metas, file)
    known = {m["label"] for m in metas}
    print(len(metas), "items;", {s: sum(s in m["img"] for m in metas) for s in STYLES}, "images; without an image:", [n for n in EXTRA_NAMES if n not in known])


def train_tokenizer(out):
    """Trains a byte-level BPE tokenizer in Qwen's format on the captions; the template's tokens get the last ids."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    from captions import Writer
    from data import Library

    library = Library(out)
    writer = Writer(library, 0)
    corpus = [writer.text_to_image()[-1] for _ in range(50_000)] + [writer.edit()[-1] for _ in range(14_000)] + [writer.edit_two()[-1] for _ in range(8_000)]
    for item in library.items:
        corpus += [item["label"]] * 4 + item["alt"] + item["plain"] * 2 + item["tags"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder, tokenizer.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=2, show_progress=False)
    tokenizer.train_from_iterator(corpus + ["user\nassistant\n\n"] * 2000, trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL_TOKENS[:3]])
    tokenizer.add_tokens([AddedToken(s, normalized=False) for s in SPECIAL_TOKENS[3:]])
    tokenizer.save(os.path.join(out, "tokenizer.json"))
    lengths = [len(tokenizer.encode(TEMPLATE.format(c)).ids) for c in corpus[:72_000:9]]
    print("vocabulary", tokenizer.get_vocab_size(), "tokens: mean", np.mean(lengths), "longest", max(lengths), f"cut at {TEXT_TOKENS}: {np.mean(np.array(lengths) > TEXT_TOKENS):.5f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--words", action="store_true", help="keep the downloaded images")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    if args.words:
        with open(os.path.join(args.out, "meta.json")) as file:
            metas = json.load(file)
    else:
        metas = pack(args.out)
    describe(args.out, metas)
    train_tokenizer(args.out)


if __name__ == "__main__":
    main()

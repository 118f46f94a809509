"""Metrics and image grids: retrieval, unseen colour–object pairs, edits, other sizes."""

import json
import random

import numpy as np
import torch
import torch.nn.functional as F

from captions import NO_OBJECT, OBJECTS, WHITE, Writer
from config import STYLES
from names import COLOUR_WORDS, COLOURS, HELD_OUT, HUES
from scenes import render

with open(__file__.replace("evaluate.py", "prompts.json")) as _file:
    PROMPTS = json.load(_file)


def to_uint8(rgb):
    return (rgb.permute(0, 2, 3, 1).cpu().numpy() * 255).round().astype("uint8")


def from_file(path):
    """Reads an image as `[3, h, w]` in 0..1."""
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1).float() / 255


def save_grid(rgb, columns, path, quality=90):
    from PIL import Image

    x = to_uint8(rgb)
    count, h, w = x.shape[:3]
    grid = np.full((-(-count // columns) * h, columns * w, 3), 255, "uint8")
    for k in range(count):
        r, c = divmod(k, columns)
        grid[r * h:r * h + h, c * w:c * w + w] = x[k]
    Image.fromarray(grid).save(path, quality=quality)


def dominant_hue(rgb):
    """Returns the strongest hue of an image `[3, h, w]` in 0..1, in degrees, or None if hardly any pixel is coloured."""
    top, low = rgb.max(0)[0], rgb.min(0)[0]
    chroma = (top - low).clamp_min(1e-6)
    saturation = chroma / top.clamp_min(1e-6)
    r, g, b = rgb
    hue = torch.where(top == r, ((g - b) / chroma) % 6, torch.where(top == g, (b - r) / chroma + 2, (r - g) / chroma + 4)) * 60
    weight = saturation * (saturation > .25) * (top > .2)
    if weight.sum() < 10:
        return None
    histogram = torch.zeros(72, device=rgb.device).scatter_add_(0, (hue.flatten() / 5).long() % 72, weight.flatten())
    smooth = sum(torch.roll(histogram, k) for k in range(-5, 6))
    return float(smooth.argmax()) * 5 + 2.5


class Evaluation:
    def __init__(self, session, model, text, guidance=1.0, steps=4):
        self.s, self.model, self.text, self.guidance, self.steps = session, model, text, guidance, steps
        self.banks = {}

    def pictures(self, prompts, height=256, width=256, seed=0, references=None):
        s = self.s
        tokens = s.sample(self.model, self.text, s.tokens(prompts), height, width, self.steps, self.guidance, seed, references)
        return s.decode(tokens, height // 16, width // 16)

    def bank(self, style):
        """Returns every image of a style on white, 32×32, to compare generated images with."""
        if style not in self.banks:
            s, items = self.s, self.s.library.with_style(style)
            rows = [[s.library.items[k]["ids"][style], 0, 0, .85, 0, 0, 0] + NO_OBJECT * (OBJECTS - 1) + WHITE for k in items]
            small = [F.avg_pool2d(render(s.pictures, part, 128, 128), 4) for part in torch.tensor(rows, device=s.device).split(256)]
            self.banks[style] = items, torch.cat(small).flatten(1)
        return self.banks[style]

    def retrieval(self, size=256, count=None, seed=5):
        """Measures how often the generated image is closest to the prompted one among all images of the style."""
        out, generator = {}, random.Random(77)
        for style in STYLES:
            items, bank = self.bank(style)
            asked = generator.sample(items, min(count, len(items))) if count else items
            prompts = [f"a {style} {self.s.library.items[k]['label']} on a white background" for k in asked]
            made = F.adaptive_avg_pool2d(self.pictures(prompts, size, size, seed), 32).flatten(1)
            distance = torch.cdist(made, bank)
            place = {k: n for n, k in enumerate(items)}
            own = distance.gather(1, torch.tensor([place[k] for k in asked], device=self.s.device)[:, None])
            rank = (distance < own).sum(1)
            out[style] = dict(
                top1=round((rank < 1).float().mean().item(), 4), top5=round((rank < 5).float().mean().item(), 4),
                mse=round(own.square().mean().item() / 3072, 5), pictures=len(asked),
                missed=[self.s.library.items[k]["label"] for k, r in zip(asked, rank.tolist()) if r > 0][:60])
        return out

    def held_out(self, path, seeds=4):
        """Measures pairs never seen in training: the share of images with the right object hue, and with the right background colour."""
        s = self.s
        hues, grounds = [], []
        for code, kind, colour in sorted(HELD_OUT):
            if code not in s.library.by_hex:
                continue
            item = s.library.items[s.library.by_hex[code]]
            words = item["label"].split()
            name = " ".join(words[1:] if len(words) > 1 and words[0] in COLOUR_WORDS and kind == "hue" else words)
            for style in item["ids"]:
                # objects without one clear hue are not recoloured in training either
                if kind == "hue" and item["dom"][style]["ok"]:
                    hues.append((f"a {style} {colour} {name} on a white background", colour))
                elif kind == "bg":
                    grounds.append((f"a {style} {name} on a {colour} background", colour))
        result, shown = {}, []
        for label, pairs in (("hue", hues), ("background", grounds)):
            right, per_pair = 0, {}
            for seed in range(seeds):
                made = self.pictures([p for p, _ in pairs], seed=100 + seed)
                shown.append(made) if seed == 0 else None
                for (prompt, colour), rgb in zip(pairs, made):
                    if label == "hue":
                        found = dominant_hue(rgb)
                        good = found is not None and abs((found - HUES[colour] + 180) % 360 - 180) <= 30
                    else:
                        border = torch.cat([rgb[:, :8].flatten(1), rgb[:, -8:].flatten(1)], 1).median(1)[0] * 255
                        nearest = min(COLOURS, key=lambda c: (border.cpu() - torch.tensor(COLOURS[c]).float()).square().sum())
                        good = nearest == colour
                    right += good
                    per_pair[prompt] = per_pair.get(prompt, 0) + int(good)
            result[label] = dict(right=round(right / max(1, len(pairs) * seeds), 4), pictures=len(pairs) * seeds, per_pair=per_pair)
        save_grid(torch.cat(shown), 8, path)
        return result

    def edits(self, kind, size, path, count=96, shown=24):
        """Measures the error against the true target, in latents relative to their variance and in pixels; saves a grid of references, output, target."""
        s, h = self.s, size // 16
        writer = Writer(s.library, 4242)
        made = [writer.edit() if kind == "edit" else writer.edit_two() for _ in range(count)]
        scenes = torch.tensor([m[:-1] for m in made], device=s.device)
        latents = [s.encode(scenes[:, k], size, size) for k in range(scenes.shape[1])]
        references = torch.cat(latents[:-1], 1)
        out = s.sample(self.model, self.text, s.tokens([m[-1] for m in made]), size, size, self.steps, self.guidance, 9, references)
        truth = latents[-1].float()
        error = (F.mse_loss(out.float(), truth) / truth.var()).item()
        pixels = [s.decode(x, h, h) for x in (*latents[:-1], out, truth)]
        psnr = (-10 * torch.log10((pixels[-2] - pixels[-1]).square().flatten(1).mean(1))).mean().item()
        rows = [p[i:min(i + 12, shown)] for i in range(0, shown, 12) for p in pixels]
        if path:
            save_grid(torch.cat(rows), 12, path, 85)
            with open(path.rsplit(".", 1)[0] + ".json", "w") as file:
                json.dump([m[-1] for m in made[:shown]], file, indent=1)
        return dict(latent_error=round(error, 4), psnr=round(psnr, 2), pictures=count)

    def grids(self, stem):
        save_grid(self.pictures(PROMPTS["grid"], seed=1), 8, stem + "_prompts.webp")
        save_grid(self.pictures(PROMPTS["words"], seed=2), 8, stem + "_words.webp")

    def sizes(self, stem):
        for height, width in ((128, 128), (192, 320), (320, 192), (256, 384), (384, 384), (512, 512), (256, 512)):
            save_grid(self.pictures(PROMPTS["grid"][:8], height, width, seed=3), 4, f"{stem}_{width}x{height}.webp", 80)

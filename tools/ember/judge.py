"""Judges packed models on the 120 prompts of `judge.json`: `judge.py DATA OUT old.safetensors new.safetensors`.

An image is right if every thing that the prompt names is nearer to its place in the image than any other picture of the library, both drawn on the image's
own background and compared at 32×32 (see `Judge.nearest`). Writes OUT/judge.json with the counts per group, OUT/judge.webp with the images of all models side by side (a green or
red bar below each says what was found), and prints the table. With `--kiln PROGRAM` that program makes the images, so that what ships is judged.
"""

import argparse
import hashlib
import json
import os
import subprocess

import torch
import torch.nn.functional as F

import variety
from captions import CHECKERS, DIAGONAL, DOTS, MIDDLE, NO_OBJECT, OBJECTS, STRIPES, VERTICAL
from evaluate import save_grid, to_uint8
from groups import HALF, HORIZONS, LAND, NIGHT, PYRAMID, QUARTERS, SIDE_BY_SIDE, STACKED
from names import COLOURS
from scenes import MOST_ROOM, render

SIDE = 32
KINDS = {"gradient": VERTICAL, "diagonal": DIAGONAL, "stripes": STRIPES, "dots": DOTS, "checkers": CHECKERS, "land": LAND, "night": NIGHT}
ALONE = {"one": (MIDDLE["scale"], (0, 0)), "silhouette": (MIDDLE["scale"], (0, 0)), "land": (.62, (0, .0625))}
GROUPED = {"row": SIDE_BY_SIDE, "stack": STACKED, "pyramid": PYRAMID, "quarters": QUARTERS}
# where a lone thing may also be if the prompt names no style: sizes, shifts in sixteenths of the sides
FREE = [(scale, x / 16, y / 16) for scale in (.7, .85, 1.0) for x in (-1, 0, 1) for y in (-1, 0, 1)]

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "judge.json")) as _file:
    CASES = json.load(_file)


def crop(image, centre, side):
    """Returns a square of `side` pixels around `centre` (fractions of the shifts), as `[3, SIDE, SIDE]`; outside, the border repeats."""
    _, h, w = image.shape
    matrix = torch.tensor([[[side / w, 0, 2 * centre[0]], [0, side / h, 2 * centre[1]]]], device=image.device, dtype=torch.float32)
    fine = F.affine_grid(matrix, (1, 3, 4 * SIDE, 4 * SIDE), align_corners=False)
    return F.avg_pool2d(F.grid_sample(image[None], fine, padding_mode="border", align_corners=False), 4)[0]


def luma(x):
    return (x * torch.tensor([.3, .59, .11], device=x.device).view(3, 1, 1)).sum(-3, keepdim=True)


class Judge:
    def __init__(self, session):
        self.s, self.tables = session, {}
        pictures = session.pictures.permute(0, 3, 1, 2)
        small = []
        for part in pictures.split(256):
            x = part.float() / 255
            small.append(F.avg_pool2d(torch.cat([x[:, :3] * x[:, 3:], x[:, 3:]], 1), x.shape[-1] // SIDE))
        self.bank = torch.cat(small)
        self.owner, self.style = [0] * len(self.bank), [""] * len(self.bank)
        self.labels = {item["label"]: k for k, item in enumerate(session.library.items)}
        for k, item in enumerate(session.library.items):
            for style, picture in item["ids"].items():
                self.owner[picture], self.style[picture] = k, style

    def background(self, case, image):
        """Returns the background behind the things: a named pattern as it should be, with the horizon that fits best, anything else as a blend of the image's four corners."""
        _, h, w = image.shape
        if isinstance(case["background"], list):
            kind, *colours = case["background"]
            values = [v / 255 for colour in colours for v in COLOURS[colour]]
            rows = [NO_OBJECT * OBJECTS + [KINDS[kind] + horizon] + values for horizon in (HORIZONS if KINDS[kind] in (LAND, NIGHT) else (0,))]
            drawn = render(self.s.pictures, torch.tensor(rows, device=image.device), h, w)
            return drawn[(drawn - image).square().flatten(1).sum(1).argmin()]
        n = max(4, min(h, w) // 32)
        corners = [image[:, y, x].flatten(1).median(1)[0] for y in (slice(0, n), slice(h - n, h)) for x in (slice(0, n), slice(w - n, w))]
        return F.interpolate(torch.stack(corners, 1).view(1, 3, 2, 2), (h, w), mode="bilinear", align_corners=True)[0]

    def boxes(self, case):
        """Returns for each thing the places (scale, x, y) where it may be."""
        width, height = case["size"]
        if case["layout"] in GROUPED:
            ratio, spots = width / height, GROUPED[case["layout"]]
            along = case["layout"] == "row" and ratio > 1 or case["layout"] == "stack" and ratio < 1
            room = min(max(ratio, 1 / ratio), MOST_ROOM) if along else 1
            # an earlier model keeps the size that it has in a square
            return [[(HALF * k, x, y) for k in sorted({1, room})] for x, y in spots]
        scale, (x, y) = ALONE[case["layout"]]
        return [[(scale, x, y)] + ([] if case["style"] else FREE)]

    def gains(self, seen, ground, grey, silhouette):
        """Returns `[pictures, n]`: how much the squared error of `seen` `[n, 3, SIDE, SIDE]` falls when a picture is drawn on `ground`: |g − s|² − |p + (1 − a)·g − s|², multiplied out."""
        key = grey, silhouette
        if key not in self.tables:
            rgb, clear = self.bank[:, 3:] * .07 if silhouette else self.bank[:, :3], 1 - self.bank[:, 3:]
            rgb = rgb.expand(-1, 3, -1, -1)
            rgb = luma(rgb) if grey else rgb
            clear = clear.expand_as(rgb)
            self.tables[key] = tuple(t.flatten(1).contiguous() for t in (rgb, rgb * clear, clear, clear.square())) + (rgb.square().flatten(1).sum(1),)
        p, pc, c, cc, pp = self.tables[key]
        s, g = ((luma(t) if grey else t).flatten(1).T for t in (seen, ground))
        return (g.square() - 2 * s * g).sum(0) - pp[:, None] - 2 * (pc @ g - p @ s - c @ (s * g)) - cc @ g.square()

    @torch.no_grad()
    def nearest(self, case, image):
        """Returns for each thing the label of the most similar picture: of every picture of the style in every place that the thing may have, the one that brings the background nearest to the image.

        Places of different sizes compare by the error of the whole image, so gains count by area: inside a small place, a plain disc fits the middle of nearly everything.
        """
        behind, side, found = self.background(case, image), min(case["size"]), []
        allowed = torch.tensor([case["style"] in (None, s) for s in self.style], device=image.device)
        for places in self.boxes(case):
            seen, ground = (torch.stack([crop(t, (x, y), scale * side) for scale, x, y in places]) for t in (image, behind))
            area = torch.tensor([scale for scale, _, _ in places], device=image.device).square()
            if case["style"] is None:
                # a mirrored picture on its ground is as far away as the picture on the mirrored ground
                seen, ground, area = torch.cat([seen, seen.flip(-1)]), torch.cat([ground, ground.flip(-1)]), area.repeat(2)
            best = (self.gains(seen, ground, bool(case["colour"]), case["layout"] == "silhouette") * area).amax(1)
            best[~allowed] = -float("inf")
            found.append(self.s.library.items[self.owner[int(best.argmax())]]["label"])
        return found

    def images(self, generate, seed=0):
        """Returns one image per case; cases of one size are generated together."""
        out, sizes = [None] * len(CASES), {}
        for k, case in enumerate(CASES):
            sizes.setdefault(tuple(case["size"]), []).append(k)
        for (width, height), cases in sizes.items():
            for k, image in zip(cases, generate([CASES[k]["prompt"] for k in cases], width, height, seed)):
                out[k] = image
        return out

    def report(self, generate):
        images = self.images(generate)
        found = [self.nearest(case, image) for case, image in zip(CASES, images)]
        right = [all(f in t for f, t in zip(names, case["things"])) for names, case in zip(found, CASES)]
        groups = {}
        for case, good in zip(CASES, right):
            entry = groups.setdefault(case["group"], [0, 0])
            entry[0] += good
            entry[1] += 1
        seeds = variety.draw(generate)
        return dict(images=images, found=found, right=right, groups=groups, variety=variety.deviation(seeds), seeds=seeds)


def with_networks(session, model, text):
    """Returns a function (prompts, width, height, seed) -> images that runs the networks here."""
    def generate(prompts, width, height, seed):
        # never a batch of one: the compiler would make kernels for it alone
        tokens = session.sample(model, text, session.tokens(prompts + prompts[:1]), height, width, seed=seed)
        return list(session.decode(tokens, height // 16, width // 16)[:len(prompts)])

    return generate


def with_kiln(program, path, device, out):
    """Returns the same function for the program and a packed file. The images stay in `out`; the same program, file, prompts, size and seed use them again."""
    from evaluate import from_file

    made_with = hashlib.sha256()
    for name in (program, path):
        with open(name, "rb") as file:
            made_with.update(file.read())

    def generate(prompts, width, height, seed):
        key = made_with.copy()
        key.update(json.dumps(prompts).encode())
        folder = os.path.join(out, f"{width}x{height}-{seed}-{key.hexdigest()[:12]}")
        if not os.path.exists(folder):
            made = folder + ".part"
            os.makedirs(made, exist_ok=True)
            subprocess.run([program, "generate", *prompts, "-m", path, "-W", str(width), "-H", str(height), "-S", str(seed), "-q", "-o", os.path.join(made, "{seed}.png")], check=True)
            os.rename(made, folder)
        return [from_file(os.path.join(folder, f"{seed + k}.png")).to(device) for k in range(len(prompts))]

    return generate


def sheet(reports, path, side=112, columns=8, quality=80):
    """Every case with the images of all models side by side."""
    from PIL import Image, ImageDraw

    count, gap, line = len(reports), 6, 13
    cell = count * side + gap
    rows = -(-len(CASES) // columns)
    page = Image.new("RGB", (columns * cell, rows * (side + line + gap)), "white")
    draw = ImageDraw.Draw(page)
    for k, case in enumerate(CASES):
        left, top = k % columns * cell, k // columns * (side + line + gap)
        for n, report in enumerate(reports):
            image = Image.fromarray(to_uint8(report["images"][k][None])[0])
            image.thumbnail((side - 4, side - 4), Image.LANCZOS)
            page.paste(image, (left + n * side + (side - image.width) // 2, top + (side - image.height) // 2))
            draw.rectangle((left + n * side + 2, top + side - 3, left + (n + 1) * side - 4, top + side - 1), "green" if report["right"][k] else "red")
        words = f"{k + 1} {case['prompt']}".encode("ascii", "ignore").decode()
        draw.text((left + 2, top + side), words[:count * side // 6], "black")
    page.save(path, quality=quality, method=6)


def load(session, path):
    """Loads the two networks of a packed file."""
    import net
    from pack import read_packed

    state = read_packed(path, "transformer")
    model, text = net.build(session.pad, session.device, state)
    model.load_state_dict(state)
    text.load_state_dict(read_packed(path, "text_encoder"))
    return model, text


def main():
    from run import place
    from pack import read_packed
    from session import Session
    import vae

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out")
    parser.add_argument("models", nargs="+", help="packed files; without --kiln all use the first one's autoencoder")
    parser.add_argument("--kiln", metavar="PROGRAM")
    parser.add_argument("--complete", action="store_true", help="judge the last model on prompts completed by complete.py")
    args = parser.parse_args()
    session = Session(args.data, args.out, {}, 1, start=args.models[0])
    if args.kiln:
        models = [with_kiln(args.kiln, path, session.device, args.out) for path in args.models]
    else:
        autoencoder = vae.Autoencoder().to(session.device)
        autoencoder.load_state_dict(read_packed(args.models[0], "vae"))
        place(session, autoencoder)
        models = [with_networks(session, *load(session, path)) for path in args.models]
    names = list(args.models)
    if args.complete:
        from complete import Completer

        completer, generate = Completer(session.library), models[-1]
        models[-1] = lambda prompts, *rest: generate([completer(p) for p in prompts], *rest)
        names[-1] += ", completed"
    write(Judge(session), dict(zip(names, models)), args.out, session.log)


def write(judge, models, out, log):
    reports = {name: judge.report(generate) for name, generate in models.items()}
    sheet(list(reports.values()), os.path.join(out, "judge.webp"))
    kept = {name: {k: r[k] for k in ("groups", "variety", "right", "found")} for name, r in reports.items()}
    with open(os.path.join(out, "judge.json"), "w") as file:
        json.dump(kept, file, ensure_ascii=False)
    for group in next(iter(reports.values()))["groups"]:
        log(f"{group:36}", *("{:3} of {:3}".format(*r["groups"][group]) for r in reports.values()))
    log(f"{'all':36}", *("{:3} of {:3}".format(sum(r["right"]), len(CASES)) for r in reports.values()))
    log(f"{'deviation over the seeds, in levels':36}", *("{:.1f} ({:.1f} to {:.1f})".format(middle, min(values), max(values)) for middle, values in (r["variety"] for r in reports.values())))
    for name, report in zip(("seeds-old.webp", "seeds.webp")[-len(reports):], reports.values()):
        save_grid(report["seeds"].flatten(0, 1), variety.SEEDS, os.path.join(out, name))
    return reports


if __name__ == "__main__":
    main()

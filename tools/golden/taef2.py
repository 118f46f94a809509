"""Creates a tiny autoencoder of TAEF2's architecture with random weights, and its results on an image.

    cd tools/golden && python taef2.py ../../testdata

Real weights are not part of the repository, and random ones of this size would be 5 MB. So only their recipe is stored:
every tensor is `mean + std * randn(seed)` in f32, rounded to f16. torch's CPU generator is reproduced bit for bit by
`kiln_tensor::rng`, so a test can create the file itself; `sha256` (of all tensors' bytes, in the order of the list)
verifies it.

Writes `taef2/recipe.json` and `taef2/reference.safetensors` (images in [0, 1]; latents as in the transformer).
The network below is written from its description: the names are those of the numbered layout (`decoder.1.weight` is
the first convolution, because 0 is the soft clamp). In the other layout, layer N of the encoder is `encoder.layers.N`
and layer N of the decoder `decoder.layers.(N-1)`.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from common import draw, save_json_rows, save_tensors, seed_of, versions

WIDTH, LATENT, POOL = 64, 32, 256
COMMAND = "cd tools/golden && python taef2.py ../../testdata"


class Recipe:
    """Names, shapes and statistics of all tensors, in file order."""

    def __init__(self):
        self.entries = []

    def add(self, name, shape, mean, std):
        mean, std = (float(np.float32(v)) for v in (mean, std))
        self.entries.append(dict(name=name, shape=list(shape), mean=mean, std=std, seed=seed_of(f"taef2/{name}")))

    def conv(self, name, inputs, outputs, size=3, gain=1.0, bias=0.0):
        self.add(f"{name}.weight", (outputs, inputs, size, size), 0.0, gain * (2.0 / (inputs * size * size)) ** 0.5)
        if bias is not None:
            self.add(f"{name}.bias", (outputs,), bias, 0.05)

    def block(self, name, pool=False):
        if pool:
            self.conv(f"{name}.pool.0", WIDTH, POOL, 1, bias=None)
            self.add(f"{name}.pool.1.weight", (POOL,), 1.0, 0.1)
            self.add(f"{name}.pool.1.bias", (POOL,), 0.0, 0.1)
            self.conv(f"{name}.pool.3", POOL, WIDTH, 1, gain=0.3, bias=None)
        for layer, gain in ((0, 1.0), (2, 1.0), (4, 0.4)):
            self.conv(f"{name}.conv.{layer}", WIDTH, WIDTH, gain=gain)

    def tensors(self):
        out = {}
        for e in self.entries:
            mean, std = torch.tensor(e["mean"]), torch.tensor(e["std"])
            out[e["name"]] = (mean + std * draw(f"taef2/{e['name']}", e["shape"])).to(torch.float16)
        return out


def recipe():
    r = Recipe()
    r.conv("encoder.0", 3, WIDTH)
    r.block("encoder.1")
    for down, blocks in ((2, (3, 4, 5)), (6, (7, 8, 9)), (10, (11, 12, 13))):
        r.conv(f"encoder.{down}", WIDTH, WIDTH, gain=0.7, bias=None)
        for b in blocks:
            r.block(f"encoder.{b}", pool=down == 10)
    r.conv("encoder.14", WIDTH, LATENT)
    r.conv("decoder.1", LATENT, WIDTH)
    for blocks, up in (((3, 4, 5), 7), ((8, 9, 10), 12), ((13, 14, 15), 17)):
        for b in blocks:
            r.block(f"decoder.{b}", pool=up == 7)
        r.conv(f"decoder.{up}", WIDTH, WIDTH, gain=0.7, bias=None)
    r.block("decoder.18")
    r.conv("decoder.19", WIDTH, 3, gain=0.1, bias=0.5)
    return r


class Taef2:
    def __init__(self, tensors, dtype):
        self.w = {k: v.to(dtype) for k, v in tensors.items()}

    def conv(self, name, x, stride=1):
        w = self.w[f"{name}.weight"]
        return F.conv2d(x, w, self.w.get(f"{name}.bias"), stride=stride, padding=w.shape[-1] // 2)

    def block(self, name, x):
        if f"{name}.pool.0.weight" in self.w:
            g = F.group_norm(self.conv(f"{name}.pool.0", x), 4, self.w[f"{name}.pool.1.weight"], self.w[f"{name}.pool.1.bias"], 1e-5)
            x = x + self.conv(f"{name}.pool.3", F.relu(g))
        h = F.relu(self.conv(f"{name}.conv.0", x))
        h = F.relu(self.conv(f"{name}.conv.2", h))
        return F.relu(self.conv(f"{name}.conv.4", h) + x)

    def encode(self, x):
        x = self.block("encoder.1", self.conv("encoder.0", x))
        for down, blocks in ((2, (3, 4, 5)), (6, (7, 8, 9)), (10, (11, 12, 13))):
            x = self.conv(f"encoder.{down}", x, stride=2)
            for b in blocks:
                x = self.block(f"encoder.{b}", x)
        return self.conv("encoder.14", x)

    def decode(self, z):
        x = F.relu(self.conv("decoder.1", 3 * torch.tanh(z / 3)))
        for blocks, up in (((3, 4, 5), 7), ((8, 9, 10), 12), ((13, 14, 15), 17)):
            for b in blocks:
                x = self.block(f"decoder.{b}", x)
            x = self.conv(f"decoder.{up}", F.interpolate(x, scale_factor=2, mode="nearest"))
        return self.conv("decoder.19", self.block("decoder.18", x))


def main(data):
    out = data / "taef2"
    out.mkdir(exist_ok=True)
    r = recipe()
    tensors = r.tensors()
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors.values())).hexdigest()
    picture = Image.open(data / "reference" / "inputs" / "ref_a_80x70.png").convert("RGB").crop((8, 4, 72, 52))
    x = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)[None].float().contiguous() / 255
    z = 1.3 * draw("taef2/latents", (1, LATENT, 6, 8))
    results = {}
    for dtype in (torch.float32, torch.float64):
        net = Taef2(tensors, dtype)
        latents = net.encode(x.to(dtype))
        results[dtype] = {"encoded": latents, "decoded": net.decode(z.to(dtype)), "round_trip": net.decode(latents)}
    f32, f64 = results[torch.float32], results[torch.float64]
    for k, v in f32.items():
        print(k, list(v.shape), "std %.3f" % v.std(), "range %.2f..%.2f" % (v.min(), v.max()), "f32 error %.1e" % ((v - f64[k]).norm() / f64[k].norm()))
    save_tensors({"picture": x, "latents": z, **f32}, out / "reference.safetensors")
    shapes = {k: "x".join(map(str, v.shape)) for k, v in {"picture": x, "latents": z, **f32}.items()}
    head = dict(command=COMMAND, versions=versions(), dtype="f16", sha256=digest, shapes=shapes,
                tolerance="rel. L2 1e-5: torch in f32 is itself about 1e-6 from f64")  # fmt: skip
    save_json_rows(head, "tensors", r.entries, out / "recipe.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

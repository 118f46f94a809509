"""What all phases share: device, images, scenes with captions, latent pools, checkpoints, sampling."""

import glob
import json
import math
import multiprocessing
import os
import time
from dataclasses import dataclass

import numpy as np
import torch

import captions
from config import PAD_TOKEN, TEXT_TOKENS
from data import Library, load_tokenizer, token_ids
from scenes import render, textures

PART_BYTES = 15 * 2**20
CHUNK = 2500
SEEDS = {"text": 1_000, "plain": 100_000, "edit": 200_000, "edit2": 400_000}
VAE_HELD_OUT_EVERY = 40


@dataclass(frozen=True)
class Shape:
    """The shape of a batch: kind of scene, image size, samples per step, samples in the pool."""
    kind: str
    height: int
    width: int
    batch: int
    pool: int

    @property
    def grid(self):
        return self.height // 16, self.width // 16

    @property
    def tokens(self):
        return self.grid[0] * self.grid[1]

    @property
    def references(self):
        return {"text": 0, "plain": 0, "edit": 1, "edit2": 2}[self.kind]


def shape(kind, width, height, pool, tokens):
    """A shape whose steps cost the same at every size: about `tokens` tokens of text and images together."""
    references = {"edit": 1, "edit2": 2}.get(kind, 0)
    batch = tokens // (TEXT_TOKENS + width * height // 256 * (1 + references))
    return Shape(kind, height, width, max(8, batch // 8 * 8), pool)


def sigmas(tokens, steps):
    """The klein schedule: `steps` noise levels for an image of `tokens` tokens, and the final 0."""
    high = 0.00016927 * tokens + 0.45666666
    slope = (high - (8.73809524e-05 * tokens + 1.89833333)) / 190.0
    factor = math.exp(slope * steps + high - 200.0 * slope)
    return [factor / (factor + 1 / s - 1) for s in np.linspace(1, 1 / steps, steps)] + [0.0]


class Session:
    def __init__(self, data, out, counts, workers=1, compile_kernels=True, graphs=True, only=None, pictures_later=False, start=None):
        """`start`: packed model whose tokenizer is used; without one, that of the data."""
        self.begin, self.out, self.data = time.time(), out, data
        os.makedirs(out, exist_ok=True)
        words = os.path.join(data, "tokenizer.json")
        if start:
            # another tokenizer's ids would mean other words to the model
            words = extract_tokenizer(start, os.path.join(out, "tokenizer.json"))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.graphs = graphs and self.device == "cuda"
        self.compile = compile_kernels and self.device == "cuda"
        # Fork the workers before the first CUDA call; they write captions while the autoencoder trains.
        self.workers = multiprocessing.get_context("fork").Pool(workers)
        self.jobs = {}
        for kind, count in counts.items():
            parts = [(data, words, kind, SEEDS[kind] + k, min(CHUNK, count - k * CHUNK)) for k in range(math.ceil(count / CHUNK))]
            self.jobs[kind] = self.workers.map_async(captions.write_chunk, parts, chunksize=1)
        self.scenes, self.ids, self.pools, self.rows, self.vae = {}, {}, {}, {}, None
        self.start = {}  # weights that training begins with: "base", "text"
        self.library = Library(data, only)
        self.tokenizer = load_tokenizer(words)
        self.pad = self.tokenizer.token_to_id(PAD_TOKEN)
        if self.device == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark = True
            self.log(torch.cuda.get_device_name(0), torch.__version__)
        self.null = self.tokens([""])
        if not pictures_later:
            self.load_pictures(workers)

    def load_pictures(self, workers):
        self.pictures = torch.from_numpy(self.library.load_pictures(workers=max(1, workers))).to(self.device)
        self.log("images", tuple(self.pictures.shape))

    def log(self, *words):
        line = f"[{time.time() - self.begin:7.1f}] " + " ".join(map(str, words))
        print(line, flush=True)
        with open(os.path.join(self.out, "log.txt"), "a") as file:
            file.write(line + "\n")

    def tokens(self, prompts):
        return torch.from_numpy(token_ids(self.tokenizer, prompts)).to(self.device)

    def need(self, kind):
        """Returns scenes and token ids of one kind; waits for the workers if necessary."""
        if kind not in self.scenes:
            made = self.jobs[kind].get()
            self.scenes[kind] = torch.from_numpy(np.concatenate([m[0] for m in made])).to(self.device)
            self.ids[kind] = torch.from_numpy(np.concatenate([m[1] for m in made])).to(self.device)
            self.log("scenes", kind, tuple(self.scenes[kind].shape))
        return self.scenes[kind], self.ids[kind]

    def vae_draws(self):
        """Returns the autoencoder's sampling functions: training, scenes only, held out. One image in forty is held out."""
        scenes = self.need("text")[0][:, 0]
        kept = lambda c: (scenes[:, c] >= 0) & (scenes[:, c].long() % VAE_HELD_OUT_EVERY == 7)
        held = kept(0) | kept(7)
        single = kept(0) & (scenes[:, 7] < 0)
        training, measured = scenes[~held], scenes[single]

        def draw(size, count):
            rows = training[torch.randint(len(training), (count,), device=self.device)]
            plain = max(1, count // 8)
            shown = textures(plain, size, size, self.device)
            rows = rows[plain:]
            if size >= 256:
                return torch.cat([render(self.pictures, rows, size, size), shown])
            half = len(rows) // 2
            x, y = np.random.randint(0, 129, 2)
            crops = render(self.pictures, rows[:half], 256, 256)[:, :, y:y + size, x:x + size]
            return torch.cat([crops, render(self.pictures, rows[half:], size, size), shown])

        def scenes_only(size, count):
            rows = scenes[torch.randint(len(scenes), (count,), device=self.device)]
            return render(self.pictures, rows, size, size)

        def held_out(size, count):
            return render(self.pictures, measured[:count], size, size)

        return draw, scenes_only, held_out

    @torch.no_grad()
    def encode(self, scenes, height, width, seconds=1e9):
        """Encodes scenes to tokens; stops early after `seconds`. Returns the encoded ones."""
        step = max(1, 512 * 128 * 128 // (height * width))
        begin, out = time.time(), []
        for part in scenes.split(step):
            out.append(self.vae.latents(render(self.pictures, part, height, width), self.dtype).to(self.dtype))
            if len(out) % 20 == 0:
                self.sync()
                if time.time() - begin > seconds:
                    break
        return torch.cat(out)

    @torch.no_grad()
    def decode(self, tokens, h, w):
        return torch.cat([self.vae.pixels(part, h, w, self.dtype) for part in tokens.split(64)])

    def pool(self, shape, seconds=1e9):
        """Returns (latents `[images, n, tokens, 128]` with the target last, ids) of one shape, created on first use."""
        key = (shape.kind, shape.height, shape.width)
        if key not in self.pools:
            begin = time.time()
            scenes, ids = self.need(shape.kind)
            # later shapes start elsewhere in the list, so that they add new scenes
            start = (hash((shape.height, shape.width)) % 7) * max(1, (len(scenes) - shape.pool) // 7)
            rows, ids = scenes[start:start + shape.pool], ids[start:start + shape.pool]
            images = [self.encode(rows[:, k], shape.height, shape.width, seconds / rows.shape[1]) for k in range(rows.shape[1])]
            count = min(map(len, images))
            self.pools[key] = torch.stack([i[:count] for i in images]), ids[:count]
            self.rows[key] = rows[:count, -1]
            self.sync()
            self.log(f"pool {key}: {count} in {time.time() - begin:.1f} s, std {self.pools[key][0][-1, :512].float().std():.3f}")
        return self.pools[key]

    def sync(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def velocity(self, model, x, sigma, context, null, guidance, grid, references):
        """Evaluates the model once; guidance 1 skips the unconditional half. `references`: `[batch, refs·tokens, 128]` or None."""
        h, w = grid
        count = 0 if references is None else references.shape[1] // (h * w)
        t = torch.full((len(x),), float(sigma), device=x.device) if not torch.is_tensor(sigma) else sigma.expand(len(x))
        if guidance != 1:
            x, context, t = torch.cat([x, x]), torch.cat([context, null]), torch.cat([t, t])
            references = None if references is None else torch.cat([references, references])
        v = model(x if references is None else torch.cat([x, references], 1), context, t, h, w, count).float()
        if guidance != 1:
            v, u = v.chunk(2)
            v = u + guidance * (v - u)
        return v

    @torch.no_grad()
    def sample(self, model, text, ids, height, width, steps=4, guidance=1.0, seed=0, references=None, chunk=256):
        """Returns the tokens of generated images; noise from the CPU generator, one draw for the whole batch."""
        h, w = height // 16, width // 16
        noise = torch.randn(len(ids), h * w, 128, generator=torch.Generator().manual_seed(seed))
        schedule, out = sigmas(h * w, steps), []
        for i in range(0, len(ids), chunk):
            context = text(ids[i:i + chunk].long(), self.dtype)
            null = text(self.null.long().expand(2, -1), self.dtype)[:1].expand_as(context)
            x = noise[i:i + chunk].to(self.device)
            refs = None if references is None else references[i:i + chunk].float()
            for a, b in zip(schedule[:-1], schedule[1:]):
                x = x + (b - a) * self.velocity(model, x, a, context, null, guidance, (h, w), refs)
            out.append(x)
        return torch.cat(out)

    def path(self, name):
        return os.path.join(self.out, name)

    def progress(self, **new):
        path, old = self.path("progress.json"), {}
        if os.path.exists(path):
            with open(path) as file:
                old = json.load(file)
        if new:
            old.update(new)
            with open(path, "w") as file:
                json.dump(old, file)
        return old


def extract_tokenizer(packed, path):
    """Writes the tokenizer of a packed model to `path`, and returns that."""
    from safetensors import safe_open

    with safe_open(packed, "pt") as file, open(path, "w") as out:
        out.write(file.metadata()["tokenizer/tokenizer.json"])
    return path


def save_parts(state, folder, stem, half=True):
    """Saves tensors, floats in 16 bits if `half`, in files of at most 15 MiB: `stem-0.safetensors`, …"""
    from safetensors.torch import save_file

    parts, size = [{}], 0
    for name, value in state.items():
        value = value.detach()
        # batch-norm statistics stay f32, counters stay integers
        if half and value.is_floating_point() and ".bn." not in "." + name:
            value = value.half()
        value = value.cpu().contiguous().clone()
        if size + value.nbytes > PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = value
        size += value.nbytes
    for old in glob.glob(os.path.join(folder, stem + "-*.safetensors")):
        os.remove(old)
    for k, part in enumerate(parts):
        save_file(part, os.path.join(folder, f"{stem}-{k}.safetensors"))


def load_parts(folder, stem):
    """Loads the tensors written by `save_parts`, converted to f32; None if there are none."""
    from safetensors.torch import load_file

    from pack import unpacked

    files = sorted(glob.glob(os.path.join(folder, stem + "-*.safetensors")))
    if not files:
        return None
    state = {name: value for file in files for name, value in load_file(file).items()}
    return unpacked(state)

"""Compares Kiln with diffusers on random models and random requests.

    cd tools/golden && python compare.py KILN OUT [--seed N] [--cases N] [--only N] [--real-tokenizer FOLDER]

KILN is the program, OUT a folder for the models, the input images and the outputs (kept for investigating a failure).
Everything follows from the seed: the sizes of the models and how they are stored, the tasks, prompts,
images, LoRAs. Each case runs once in diffusers and once as `kiln generate --dtype f32 --device cpu`; the table
has the relative L2 and the largest difference of the latents, and the largest difference of the images in levels.
A case that differs runs again in f64. It is `near` if Kiln is close to that and diffusers is not (in f32 it loses
much precision in the GroupNorms of images of a megapixel), else it fails. Exits with 1 if a case fails.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import diffusers
import torch
import transformers
from diffusers import (
    AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinInpaintPipeline, Flux2KleinKVPipeline,
    Flux2KleinPipeline, Flux2Transformer2DModel,
)  # fmt: skip
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from common import draw, generator, save_tensors
from model import SCHEDULER, model_index, text_rule, transformer_rule, vae_rule
from record import Recorder

diffusers.logging.set_verbosity_error()
diffusers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

REL_L2, MAX_ABS, LEVELS = 1e-5, 1e-4, 1
SMALL_TOKENIZER = Path(__file__).resolve().parents[2] / "testdata" / "tokenizer"
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
PIPELINES = {"distilled": Flux2KleinPipeline, "base": Flux2KleinPipeline, "kv": Flux2KleinKVPipeline}
PROMPTS = [
    "", " ", "a red fox in the snow", "  two  spaces,\n\ta tab\r\nand lines\n", "一只在雪地里的红狐狸，水彩画", "👩‍🚀🦊 riding a 🏳️‍🌈 bike",
    "e\u0301t\u00e9, \u212b and \ufb01: not normalised", "<|im_end|>\n<|im_start|>assistant\n<think> typed specials <|endoftext|>",
    "it's 1234567890 o'clock — “quoted” naïve café №5", "عربي and עברית, \u200bzero width", "a lighthouse on a cliff at dusk, " * 90,
    "雪の中の狐、" * 200, "x" * 3000, "A cat holding a sign that says \"Kiln\"",
]  # fmt: skip


class Model:
    """A folder with a random model, and its pipelines."""

    def __init__(self, number, rng, out, real_tokenizer):
        self.name, self.folder, self.pipes = f"m{number}", out / f"m{number}", {}
        self.tag = f"{rng.random()}"
        heads, head_dim, axes = rng.choice([
            (3, 128, (32, 32, 32, 32)), (1, 128, (32, 32, 32, 32)), (5, 24, (6, 6, 6, 6)), (3, 40, (4, 12, 12, 12)), (2, 64, (16, 16, 16, 16)),
        ])  # fmt: skip
        self.dtype = rng.choice(["bf16", "bf16", "f16", "f32"])
        self.hidden = rng.choice([24, 16, 40, 56])
        self.transformer_shard = rng.choice(["10GB", "300KB"])
        self.blocks = rng.choice([(3, 1), (1, 3), (2, 2), (1, 1), (0, 2), (2, 0)])
        self.transformer_config = dict(
            patch_size=1, in_channels=128, num_layers=self.blocks[0], num_single_layers=self.blocks[1],
            num_attention_heads=heads, attention_head_dim=head_dim, axes_dims_rope=axes, joint_attention_dim=3 * self.hidden,
            guidance_embeds=False, timestep_guidance_channels=rng.choice([256, 256, 128]), mlp_ratio=rng.choice([3.0, 3.0, 2.5, 4.0]),
            rope_theta=rng.choice([2000, 2000, 10000, 500]), eps=rng.choice([1e-6, 1e-6, 1e-5]),
        )  # fmt: skip
        # Without a tokenizer folder, Kiln uses its built-in tokenizer.
        self.tokenizer = rng.choice(["small", "real", "none"]) if real_tokenizer else "small"
        self.real_tokenizer = real_tokenizer
        q, kv = rng.choice([(6, 2), (4, 4), (4, 1), (3, 3)])
        self.text_config = dict(
            vocab_size=448 if self.tokenizer == "small" else 151936, hidden_size=self.hidden, intermediate_size=rng.choice([37, 65, 96]),
            num_hidden_layers=rng.choice([28, 29, 36]), num_attention_heads=q, num_key_value_heads=kv, head_dim=rng.choice([16, 32, 10]),
            max_position_embeddings=40960, rms_norm_eps=rng.choice([1e-6, 1e-5]), tie_word_embeddings=rng.random() < 0.7,
            rope_theta=rng.choice([1000000, 10000, 5000000]), bos_token_id=416, eos_token_id=418, pad_token_id=None,
        )  # fmt: skip
        self.flat_config = rng.random() < 0.5
        self.text_shard = rng.choice(["10GB", "200KB"])
        self.vae_config = dict(
            block_out_channels=rng.choice([(32, 64, 64, 96), (32, 32, 64, 64), (64, 32, 32, 32), (32, 32, 32, 32)]),
            layers_per_block=rng.choice([1, 1, 2]), latent_channels=32, norm_num_groups=rng.choice([32, 32, 16]),
            decoder_block_out_channels=rng.choice([None, None, (32, 32, 64, 96), (64, 32, 32, 32)]),
            batch_norm_eps=rng.choice([1e-4, 1e-4, 1e-5]),
        )  # fmt: skip
        self.make()

    def make(self):
        dtype = DTYPES[self.dtype]
        shutil.rmtree(self.folder, ignore_errors=True)
        shared = self.folder / "parts"
        t = Flux2Transformer2DModel(**self.transformer_config)
        self.fill(t, "transformer", transformer_rule)
        t.to(dtype).save_pretrained(shared / "transformer", max_shard_size=self.transformer_shard)
        rope = self.text_config.pop("rope_theta")
        e = Qwen3ForCausalLM(Qwen3Config(rope_parameters=dict(rope_type="default", rope_theta=rope), **self.text_config))
        self.fill(e, "text_encoder", text_rule)
        e.to(dtype).save_pretrained(shared / "text_encoder", max_shard_size=self.text_shard)
        if self.flat_config:
            self.flatten(shared / "text_encoder" / "config.json", rope)
        v = AutoencoderKLFlux2(**self.vae_config)
        self.fill(v, "vae", vae_rule)
        v.bn.running_mean.copy_(0.5 * draw(f"{self.tag}/mean", (128,)))
        v.bn.running_var.copy_(3.1 * torch.exp(0.35 * draw(f"{self.tag}/var", (128,))))
        v.bn.num_batches_tracked.fill_(123456)
        v.to(dtype).save_pretrained(shared / "vae")
        FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_pretrained(shared / "scheduler")
        for variant, index in {
            "distilled": model_index("Flux2KleinPipeline", is_distilled=True), "kv": model_index("Flux2KleinKVPipeline"),
            "base": model_index("Flux2KleinPipeline", is_distilled=False),
        }.items():  # fmt: skip
            folder = self.folder / variant
            folder.mkdir()
            (folder / "model_index.json").write_text(index)
            for part in shared.iterdir():
                os.symlink(part.resolve(), folder / part.name)
            if self.tokenizer != "none":
                source = SMALL_TOKENIZER if self.tokenizer == "small" else self.real_tokenizer
                os.symlink(source.resolve(), folder / "tokenizer")

    def fill(self, model, component, rule):
        for name, p in model.named_parameters():
            mean, std = rule(name, p)
            p.copy_(mean + std * draw(f"{self.tag}/{component}/{name}", p.shape))

    @staticmethod
    def flatten(file, rope):
        """The configuration in the style of the published Qwen3 repositories."""
        new_style = ("rope_parameters", "layer_types", "dtype", "transformers_version", "pad_token_id")
        flat = {k: v for k, v in json.loads(file.read_text()).items() if k not in new_style}
        file.write_text(json.dumps(flat | dict(rope_theta=rope, rope_scaling=None, sliding_window=None, torch_dtype="bfloat16")))

    def pipe(self, variant, inpaint, dtype):
        cls = Flux2KleinInpaintPipeline if inpaint else PIPELINES[variant]
        source = SMALL_TOKENIZER if self.tokenizer == "small" else self.real_tokenizer
        pipe = cls.from_pretrained(self.folder / variant, tokenizer=AutoTokenizer.from_pretrained(source), dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def linear_layers(self):
        t = Flux2Transformer2DModel(**self.transformer_config)
        return {n: m.weight.shape for n, m in t.named_modules() if isinstance(m, torch.nn.Linear)}

    def __str__(self):
        c, t, v = self.transformer_config, self.text_config, self.vae_config
        return (f"{self.name}: {self.dtype}, blocks {self.blocks}, {c['num_attention_heads']} heads x {c['attention_head_dim']}, mlp {c['mlp_ratio']}, "
                f"theta {c['rope_theta']}, time {c['timestep_guidance_channels']}, eps {c['eps']}, shards {self.transformer_shard}/{self.text_shard}, text {t['num_hidden_layers']} x "
                f"{self.hidden}, {t['num_attention_heads']}/{t['num_key_value_heads']} heads x {t['head_dim']}, mlp {t['intermediate_size']}, "
                f"{'flat' if self.flat_config else 'new'} config, tied {t['tie_word_embeddings']}, tokenizer {self.tokenizer}, vae {v['block_out_channels']} / "
                f"{v['decoder_block_out_channels']} x {v['layers_per_block']}, {v['norm_num_groups']} groups")  # fmt: skip


def make_image(path, rng, size, mode):
    """A smooth random image with some edges."""
    w, h = size
    g = np.random.default_rng(rng.getrandbits(32))
    small = Image.fromarray(g.integers(0, 256, (7, 9, 4), dtype=np.uint8), "RGBA").resize(size, Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(small)
    for _ in range(5):
        x, y = g.integers(0, w), g.integers(0, h)
        pen.ellipse([x, y, x + w // 4, y + h // 4], fill=tuple(int(c) for c in g.integers(0, 256, 4)))
    image = small if mode == "RGBA" else small.convert("RGB")
    if mode == "P":
        image = image.quantize(37)
        image.info["transparency"] = 3
    elif mode in ("L", "1"):
        image = image.convert(mode)
    elif mode == "LA":
        image = small.convert("LA")
    image.save(path)


def make_mask(path, rng, size, mode, tiny):
    w, h = size
    mask = Image.new("L", size, 0)
    pen = ImageDraw.Draw(mask)
    for _ in range(1 if tiny else 3):
        a, b = (w // 5, h // 5) if tiny else (w // 2, h // 2)
        x, y = rng.randrange(w - a), rng.randrange(h - b)
        pen.ellipse([x, y, x + a, y + b], fill=rng.choice([255, 255, 200, 130]))
    mask.convert(mode).save(path)


def make_lora(path, rng, model, tag):
    """A LoRA on some layers: plain, with alpha in the metadata, with several ranks and alphas, or rank stabilised."""
    style = rng.choice(["plain", "plain-ranks", "alpha", "patterns", "rslora"])
    layers = model.linear_layers()
    chosen = sorted(rng.sample(sorted(layers), max(1, int(len(layers) * rng.choice([0.3, 0.7, 1.0])))))
    rank, ranks, alphas, tensors = rng.choice([1, 3, 8]), {}, {}, {}
    for layer in chosen:
        out, into = layers[layer]
        r = rng.choice([2, 5]) if style in ("plain-ranks", "patterns") and rng.random() < 0.4 else rank
        if r != rank:
            ranks[layer] = r
        if style == "patterns" and rng.random() < 0.4:
            alphas[layer] = rng.choice([1, 6, 11])
        tensors[f"transformer.{layer}.lora_A.weight"] = (draw(f"{tag}/{layer}/A", (r, into)) / into**0.5).to(DTYPES[model.dtype])
        tensors[f"transformer.{layer}.lora_B.weight"] = (0.3 * draw(f"{tag}/{layer}/B", (out, r))).to(DTYPES[model.dtype])
    metadata = {"format": "pt"}
    if not style.startswith("plain"):
        config = dict(r=rank, lora_alpha=rng.choice([1, 4, 7]), target_modules=chosen, lora_bias=False, use_rslora=style == "rslora", use_dora=False,
                      alpha_pattern=alphas, rank_pattern=ranks, lora_dropout=0.0, bias="none", init_lora_weights=True)  # fmt: skip
        metadata["lora_adapter_metadata"] = json.dumps({f"transformer.{k}": v for k, v in config.items()}, sort_keys=True)
    save_tensors(tensors, path, metadata)
    return style


class Case:
    """One request. `call` is diffusers' half, `args` Kiln's."""

    def __init__(self, number, rng, model, out):
        self.number, self.model, self.out, self.rng = number, model, out / f"case{number}", rng
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        self.variant = rng.choice(["distilled", "distilled", "base", "kv"])
        self.inpaint = self.variant != "kv" and rng.random() < 0.3
        self.call, self.args, self.notes, self.loras, self.images = {}, [], [self.variant], [], {}
        self.negative = None
        self.words()
        if self.inpaint:
            self.masked()
        else:
            self.size_and_references()
        self.sampling()
        if rng.random() < 0.35:
            for i in range(rng.choice([1, 1, 2])):
                self.lora(i)

    def words(self):
        rng = self.rng
        count = rng.choice([1, 1, 1, 2])
        self.prompts = [rng.choice(PROMPTS) for _ in range(count)]
        self.per_prompt = rng.choice([1, 1, 1, 2])
        self.tokens = rng.choice([512, 128, 64, 77, 21, 512])
        self.call |= dict(prompt=self.prompts if count > 1 else self.prompts[0], max_sequence_length=self.tokens, num_images_per_prompt=self.per_prompt)
        self.args += ["--max-tokens", str(self.tokens), "-b", str(self.per_prompt), "--one-generator"]
        self.notes.append(f"{count}x{self.per_prompt} prompts of {self.tokens}")
        if self.variant == "base":
            guidance = rng.choice([4.0, 2.5, 1.0, 7.0])
            self.call["guidance_scale"] = guidance
            self.args += ["-g", str(guidance)]
            self.notes.append(f"g {guidance}")
            if rng.random() < 0.5:
                self.negative = rng.choice(PROMPTS)
                self.args += [f"--negative={self.negative}"]
                self.notes.append("negative")
        elif self.variant == "distilled":
            self.call["guidance_scale"] = 1.0

    def image(self, key, size, mode, maker=make_image, **kw):
        path = self.out / f"{key}.png"
        maker(path, self.rng, size, mode, **kw)
        self.images[key] = path
        return path

    def size_and_references(self):
        rng = self.rng
        count = rng.choice([0, 0, 1, 1, 2, 3]) if self.variant != "kv" else rng.choice([0, 1, 2])
        for i in range(count):
            large = self.number % 12 == 5 and i == 0
            size = rng.choice([(1300, 900), (700, 1700)]) if large else (rng.randrange(64, 150), rng.randrange(64, 150))
            mode = rng.choice(["RGB", "RGB", "RGBA", "P", "L", "1", "LA"])
            self.args += ["-r", str(self.image(f"ref{i}", size, mode))]
            self.notes.append(f"ref {size[0]}x{size[1]} {mode}")
        if not count or rng.random() < 0.7 or "ref 1300x900" in str(self.notes) or "ref 700x1700" in str(self.notes):
            w, h = (rng.choice([16, 31, 48, 64, 90, 112, 130]) for _ in range(2))
            self.call |= dict(width=w, height=h)
            self.args += ["-W", str(w), "-H", str(h)]
            self.notes.append(f"{w}x{h}")

    def masked(self):
        rng = self.rng
        size = rng.randrange(64, 150), rng.randrange(64, 150)
        crop = rng.choice([None, None, 4, 16])
        self.args += ["--init", str(self.image("image", size, rng.choice(["RGB", "RGB", "RGBA", "P"])))]
        self.args += ["--mask", str(self.image("mask_image", size, rng.choice(["L", "L", "RGB", "1"]), make_mask, tiny=crop is not None))]
        strength = rng.choice([0.3, 0.6, 0.8, 0.85, 1.0])
        self.call["strength"] = strength
        self.args += ["--strength", str(strength)]
        self.notes.append(f"inpaint {size[0]}x{size[1]} strength {strength}")
        if crop is not None:
            self.call["padding_mask_crop"] = crop
            self.args += ["--mask-padding", str(crop)]
            self.notes.append(f"crop {crop}")
        if rng.random() < 0.4:
            size = rng.randrange(64, 150), rng.randrange(64, 150)
            self.args += ["-r", str(self.image("image_reference", size, "RGB"))]
            self.notes.append(f"ref {size[0]}x{size[1]}")

    def sampling(self):
        rng = self.rng
        steps = rng.choice([1, 2, 3, 4, 7]) + (4 if self.inpaint else 0)
        if not self.inpaint and rng.random() < 0.2:
            sigmas = sorted((round(rng.uniform(0.05, 1.0), 3) for _ in range(rng.randrange(1, 5))), reverse=True)
            steps = rng.choice([len(sigmas), steps])
            self.call["sigmas"] = sigmas
            self.args += ["--sigmas", ",".join(map(str, sigmas))]
            self.notes.append(f"{len(sigmas)} sigmas")
        self.call["num_inference_steps"] = steps
        self.args += ["-s", str(steps)]
        batch = len(self.prompts) * self.per_prompt
        several = batch > 1 and rng.random() < 0.4
        self.seeds = [rng.choice([rng.getrandbits(31), rng.getrandbits(48) + 2**33, rng.getrandbits(63)]) for _ in range(batch if several else 1)]
        self.args += ["-S", ",".join(map(str, self.seeds))]
        self.notes.append(f"{steps} steps, {len(self.seeds)} seeds")

    def lora(self, i):
        path, weight = self.out / f"lora{i}.safetensors", self.rng.choice([1.0, 0.5, -0.4, 1.3])
        style = make_lora(path, self.rng, self.model, f"{self.number}/{i}")
        self.loras.append((path, weight))
        self.args += ["--lora", str(path) if weight == 1.0 else f"{path}:{weight}"]
        self.notes.append(f"lora {style} {weight}")

    def diffusers(self, dtype):
        pipe = self.model.pipe(self.variant, self.inpaint, dtype)
        for i, (path, _) in enumerate(self.loras):
            pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=f"lora{i}")
        if self.loras:
            pipe.set_adapters([f"lora{i}" for i in range(len(self.loras))], [weight for _, weight in self.loras])
        # As `load_image` does.
        opened = {k: Image.open(v).convert("RGB") for k, v in self.images.items()}
        call = self.call | {k: v for k, v in opened.items() if not k.startswith("ref")}
        if references := [v for k, v in opened.items() if k.startswith("ref")]:
            call["image"] = references
        if self.variant == "base" and self.negative is not None:
            call["negative_prompt_embeds"], _ = pipe.encode_prompt([self.negative] * len(self.prompts), max_sequence_length=self.tokens)
        generators = [generator(s) for s in self.seeds]
        call["generator"] = generators if len(generators) > 1 else generators[0]
        last = {}
        recorder = Recorder(pipe, "light") if dtype == torch.float64 else None
        try:
            images = pipe(**call, callback_on_step_end=lambda _p, _i, _t, state: last.update(state) or state, output_type="pil").images
        finally:
            if recorder:
                recorder.close()
        return last["latents"].double(), [np.asarray(i.convert("RGB"), dtype=np.int32) for i in images]

    def kiln(self, program):
        image, latents = self.out / "kiln.png", self.out / "kiln.safetensors"
        command = [program, "generate", "-m", str(self.model.folder / self.variant), "-q", "--dtype", "f32", "--device", "cpu", "-o", str(image),
                   "--latents-out", str(latents), *self.args, "--", *self.prompts]  # fmt: skip
        (self.out / "command.json").write_text(json.dumps(command, ensure_ascii=False))
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"kiln ended with {done.returncode}: {done.stderr.strip()}")
        count = len(self.prompts) * self.per_prompt
        files = [image] if count == 1 else [self.out / f"kiln-{i + 1}.png" for i in range(count)]
        return load_file(latents)["latents"].double(), [np.asarray(Image.open(f).convert("RGB"), dtype=np.int32) for f in files]

    def compare(self, program):
        """Returns the outcome in a word, and its numbers."""
        try:
            theirs = self.diffusers(torch.float32)
        except Exception as e:  # requests that diffusers rejects don't count
            return "skip", f"diffusers refuses: {type(e).__name__}: {str(e)[:150]}"
        try:
            ours = self.kiln(program)
        except RuntimeError as e:
            return "FAIL", str(e)
        if ours[0].shape != theirs[0].shape:
            return "FAIL", f"latents {tuple(ours[0].shape)}, diffusers has {tuple(theirs[0].shape)}"
        off = distance(ours, theirs)
        line = f"rel {off[0]:.1e} max {off[1]:.1e} png {off[2]}"
        if small(off):
            return "ok", line
        exact = self.diffusers(torch.float64)
        ours, theirs = distance(ours, exact), distance(theirs, exact)
        for who, d in (("kiln", ours), ("diffusers", theirs)):
            line += f" | {who} to f64: rel {d[0]:.1e} max {d[1]:.1e} png {d[2]}"
        return "near" if small(ours) else "FAIL", line


def small(off):
    return off[0] < REL_L2 and off[1] < MAX_ABS and off[2] <= LEVELS


def distance(a, b):
    """Returns the relative L2 and the largest difference of the latents, and the largest difference of the images."""
    if [x.shape for x in a[1]] != [x.shape for x in b[1]]:
        return float((a[0] - b[0]).norm() / b[0].norm()), float((a[0] - b[0]).abs().max()), 999
    return (float((a[0] - b[0]).norm() / b[0].norm()), float((a[0] - b[0]).abs().max()),
            int(max(np.abs(x - y).max() for x, y in zip(a[1], b[1]))))  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kiln")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--only", type=int, help="run only the case with this number")
    parser.add_argument("--real-tokenizer", type=Path, help="folder of Qwen3's tokenizer, for models with its vocabulary")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    failed = ran = 0
    for number in range(options.cases):
        # Four cases per model. Each has its own random numbers, so that it can be run alone.
        group = number // 4
        if options.only is not None and number != options.only:
            continue
        if number % 4 == 0 or options.only is not None:
            model = Model(group, random.Random(f"{options.seed}/model/{group}"), out, options.real_tokenizer)
            print(model, flush=True)
        case = Case(number, random.Random(f"{options.seed}/case/{number}"), model, out)
        outcome, line = case.compare(options.kiln)
        ran += outcome != "skip"
        failed += outcome == "FAIL"
        print(f"{number:4} {outcome:4}  {line}  [{', '.join(case.notes)}]", flush=True)
        if outcome != "FAIL":
            shutil.rmtree(case.out)
    print(f"{ran - failed} of {ran} cases agree")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Compares a LoRA trained by Kiln in Kiln and in diffusers, on a small FLUX.2 model.

    python tools/lora/check_trained.py MODEL_FOLDER KILN_BINARY

`kiln train` trains a LoRA, a LoKr and a DoRA in a few large steps; `kiln generate --lora` and diffusers' own loader
(`load_lora_weights`; for a LoKr the update's definition) give an image each, which must not differ by more than one level. The
LoRA is also written under ComfyUI's and kohya's names. MODEL_FOLDER is as for check.py. Needs torch, diffusers, transformers,
peft, safetensors and Pillow. Made with torch 2.15, diffusers 0.42.1, peft 0.21.2.
"""
import copy
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from diffusers import Flux2KleinPipeline
from PIL import Image
from safetensors.torch import load_file

MODEL, KILN = Path(sys.argv[1]), sys.argv[2]
PROMPT, SEED, SIZE, STEPS, TOKENS = "a red fox", 7, 64, 2, 64
pipe = Flux2KleinPipeline.from_pretrained(MODEL, torch_dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
plain = copy.deepcopy(pipe.transformer)


def kiln(*args):
    subprocess.run([KILN, *map(str, args)], check=True, capture_output=True)


def kiln_image(folder, lora):
    kiln("generate", PROMPT, "-m", MODEL, "-S", SEED, "-W", SIZE, "-H", SIZE, "-s", STEPS, "--max-tokens", TOKENS, "--dtype",
         "f32", "-o", folder / "x.png", *(["--lora", lora] if lora else []))  # fmt: skip
    return np.asarray(Image.open(folder / "x.png"), dtype=int)


def diffusers_image():
    generator = torch.Generator("cpu").manual_seed(SEED)
    out = pipe(prompt=PROMPT, height=SIZE, width=SIZE, num_inference_steps=STEPS, generator=generator,
               max_sequence_length=TOKENS)  # fmt: skip
    return np.asarray(out.images[0], dtype=int)


def load(path):
    """Puts a LoRA into the pipeline's transformer."""
    pipe.transformer = copy.deepcopy(plain)
    if not any("lokr" in key for key in load_file(path)):
        pipe.load_lora_weights(path)
        return "load_lora_weights"
    state = {key.removeprefix("transformer."): value for key, value in load_file(path).items()}
    layers = sorted({key.split(".lokr_")[0].removesuffix(".alpha") for key in state})
    changed = dict(pipe.transformer.named_modules())
    for layer in layers:
        part = {key.removeprefix(layer + "."): value.float() for key, value in state.items() if key.startswith(layer + ".")}
        left = part.get("lokr_w1", None)
        left = part["lokr_w1_a"] @ part["lokr_w1_b"] if left is None else left
        low_rank = "lokr_w2_a" in part
        right = part["lokr_w2_a"] @ part["lokr_w2_b"] if low_rank else part["lokr_w2"]
        rank = part["lokr_w2_a"].shape[1] if low_rank else 1
        scale = float(part["alpha"]) / rank if low_rank else 1.0
        changed[layer].weight.data += scale * torch.kron(left, right)
    return "the definition"


def main():
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "images").mkdir()
        for i, caption in enumerate(("a fox", "a hen")):
            Image.effect_noise((SIZE, SIZE), 40 + 60 * i).convert("RGB").save(folder / f"images/{i}.png")
            (folder / f"images/{i}.txt").write_text(caption)
        before = kiln_image(folder, None)
        for kind, layout in (("lora", "diffusers"), ("lora", "comfyui"), ("lora", "kohya"), ("dora", "diffusers"), ("lokr", "diffusers")):
            lora = folder / f"{kind}-{layout}.safetensors"
            kiln("train", folder / "images", "-m", MODEL, "-o", lora, "--resolution", SIZE, "--steps", 20, "--lr", 2e-2, "--rank",
                 3, "--alpha", 5, "--kind", kind, "--layout", layout, "--dtype", "f32", "--distilled-anyway", "--cache-dir",
                 folder / "cache", "-q")  # fmt: skip
            how, ours = load(lora), kiln_image(folder, lora)
            theirs = diffusers_image()
            largest, effect = np.abs(ours - theirs).max(), np.abs(ours - before).max()
            good = largest <= 1 and effect > 5
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {kind}, {layout} ({how}): {largest} levels apart; the LoRA changes {effect}")
    sys.exit(bool(failed))


main()

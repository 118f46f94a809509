#!/usr/bin/env python3
"""Compares Kiln's LoRAs with PEFT and diffusers on a small FLUX.2 model.

    python tools/lora/check.py MODEL_FOLDER KILN_BINARY

Every case is a file in one trainer's layout. Kiln generates with it (`--latents-out`); the expected latents come from the
diffusers pipeline, with weights changed by one of
  merge   the update's definition, written here in torch, added to the weights in f32
  peft    PEFT's own layers, injected into the transformer
  load    diffusers' own LoRA loader (`load_lora_weights`), if it supports the layout
Needs torch, diffusers, peft, safetensors. Made with torch 2.15, diffusers 0.42.1, peft 0.21.
"""
import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from diffusers import Flux2KleinPipeline
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file

MODEL, KILN = Path(sys.argv[1]), sys.argv[2]
PROMPT, SEED, SIZE, STEPS, TOKENS = "a red fox", 7, 64, 2, 64
LIMIT = 1e-5
torch.manual_seed(0)

pipe = Flux2KleinPipeline.from_pretrained(MODEL, torch_dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
plain = copy.deepcopy(pipe.transformer.state_dict())
dim = pipe.transformer.x_embedder.weight.shape[0]


def generate():
    """Returns the packed latents after the last step, as Kiln writes them; the pipeline's result is unpacked already."""
    last = {}

    def keep(_pipe, _step, _time, tensors):
        last.update(tensors)
        return {}

    generator = torch.Generator("cpu").manual_seed(SEED)
    pipe(prompt=PROMPT, height=SIZE, width=SIZE, num_inference_steps=STEPS, generator=generator,
         max_sequence_length=TOKENS, output_type="latent", callback_on_step_end=keep)
    return last["latents"]


def kiln(lora, weight):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "latents.safetensors"
        subprocess.run([KILN, "generate", PROMPT, "-m", MODEL, "-S", str(SEED), "-W", str(SIZE), "-H", str(SIZE), "-s",
                        str(STEPS), "--max-tokens", str(TOKENS), "--dtype", "f32", "--no-cache", "-q", "--lora",
                        f"{lora}:{weight}", "-o", f"{folder}/x.png", "--latents-out", out], check=True)
        return load_file(out)["latents"]


def fused_modules():
    """Returns the modules of Black Forest Labs' naming, each with the diffusers layers whose rows it stacks."""
    out = {"img_in": ["x_embedder"], "txt_in": ["context_embedder"], "final_layer.linear": ["proj_out"],
           "final_layer.adaLN_modulation.1": ["norm_out.linear"],
           "time_in.in_layer": ["time_guidance_embed.timestep_embedder.linear_1"],
           "double_stream_modulation_img.lin": ["double_stream_modulation_img.linear"],
           "single_stream_modulation.lin": ["single_stream_modulation.linear"]}
    for i in range(len(pipe.transformer.transformer_blocks)):
        to, bfl = f"transformer_blocks.{i}.", f"double_blocks.{i}."
        out[bfl + "img_attn.qkv"] = [to + "attn.to_" + x for x in "qkv"]
        out[bfl + "txt_attn.qkv"] = [to + f"attn.add_{x}_proj" for x in "qkv"]
        out[bfl + "img_attn.proj"] = [to + "attn.to_out.0"]
        out[bfl + "txt_mlp.0"] = [to + "ff_context.linear_in"]
        out[bfl + "img_mlp.2"] = [to + "ff.linear_out"]
    for i in range(len(pipe.transformer.single_transformer_blocks)):
        to, bfl = f"single_transformer_blocks.{i}.attn.", f"single_blocks.{i}."
        out[bfl + "linear1"], out[bfl + "linear2"] = [to + "to_qkv_mlp_proj"], [to + "to_out"]
    return out


def swap(name, x):
    return torch.cat([x[len(x) // 2:], x[:len(x) // 2]]) if "adaLN" in name else x


def weight_of(name, layers):
    """Returns a module's weight, with rows in Black Forest Labs' order."""
    return swap(name, torch.cat([plain[layer + ".weight"] for layer in layers]))


def set_weight(state, name, layers, value):
    for layer, part in zip(layers, swap(name, value).chunk(len(layers))):
        state[layer + ".weight"] = part.contiguous()


def random(*shape, scale=0.1):
    return torch.randn(*shape) * scale


def cases():
    """Yields the name, the tensors of the file, and the changed weights."""
    modules = fused_modules()
    flat = lambda name: name.replace(".", "_")

    def low_rank(stem, ends, rank, alpha):
        tensors, changed = {}, dict(plain)
        for name, layers in modules.items():
            w = weight_of(name, layers)
            a, b = random(rank, w.shape[1]), random(w.shape[0], rank)
            tensors |= {stem(name) + ends[0]: a, stem(name) + ends[1]: b}
            if alpha is not None:
                tensors[stem(name) + ".alpha"] = torch.tensor(float(alpha))
            set_weight(changed, name, layers, w + (1 if alpha is None else alpha / rank) * b @ a)
        return tensors, changed

    ab, ud = (".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight")
    yield "ai-toolkit, rank 5", *low_rank(lambda n: "diffusion_model." + n, ab, 5, None)
    yield "kohya, rank 3, alpha 7", *low_rank(lambda n: "lora_unet_" + flat(n), ud, 3, 7)
    yield "PEFT, rank 1", *low_rank(lambda n: "base_model.model." + n, ab, 1, None)

    def full(stem, update):
        tensors, changed = {}, dict(plain)
        for name, layers in modules.items():
            w = weight_of(name, layers)
            mine, new = update(w)
            tensors |= {stem(name) + key: value for key, value in mine.items()}
            set_weight(changed, name, layers, new)
        return tensors, changed

    def lokr(w):
        c, d = next(k for k in (3, 2, 1) if w.shape[0] % k == 0), 2
        left, a, b = random(c, d, scale=1), random(w.shape[0] // c, 4), random(4, w.shape[1] // d)
        tensors = {".lokr_w1": left, ".lokr_w2_a": a, ".lokr_w2_b": b, ".alpha": torch.tensor(2.0)}
        return tensors, w + 2 / 4 * torch.kron(left, a @ b)

    def loha(w):
        a, b, c, d = (random(*s, scale=0.4) for s in ((w.shape[0], 3), (3, w.shape[1])) * 2)
        tensors = {".hada_w1_a": a, ".hada_w1_b": b, ".hada_w2_a": c, ".hada_w2_b": d, ".alpha": torch.tensor(6.0)}
        return tensors, w + 6 / 3 * (a @ b) * (c @ d)

    def dora(w):
        a, b, m = random(4, w.shape[1]), random(w.shape[0], 4), w.norm(dim=1, keepdim=True) * 1.1
        new = w + b @ a
        tensors = {".lora_down.weight": a, ".lora_up.weight": b, ".dora_scale": m}
        return tensors, m * new / new.norm(dim=1, keepdim=True)

    yield "LoKr over fused layers", *full(lambda n: "diffusion_model." + n, lokr)
    yield "LoHa", *full(lambda n: "lora_unet_" + flat(n), loha)
    yield "DoRA", *full(lambda n: "lora_unet_" + flat(n), dora)


def compare(name, how, expected, found):
    error = ((found.flatten() - expected.flatten()).norm() / expected.norm()).item()
    changed = ((expected - BEFORE).norm() / BEFORE.norm()).item()
    print(f"{'ok  ' if error < LIMIT else 'FAIL'} {how:6} {name}: off by {error:.1e}, changed by {changed:.1e}")
    return error < LIMIT


def with_peft(file, use_dora, use_rslora):
    """Saves a LoRA made by PEFT itself to `file`, and returns the latents with it."""
    layers = [name for name, m in pipe.transformer.named_modules() if isinstance(m, torch.nn.Linear)]
    config = LoraConfig(r=4, lora_alpha=6, target_modules=layers, use_dora=use_dora, use_rslora=use_rslora,
                        init_lora_weights=False)
    model = inject_adapter_in_model(config, copy.deepcopy(pipe.transformer))
    tensors = {}
    for key, value in model.state_dict().items():
        if ".lora_" in key:
            name = key.replace(".default", "")
            if "magnitude" in name:
                value.mul_(1.05)
                name = name.removesuffix(".weight")
            elif "lora_B" in name:
                value.mul_(0.2)
            tensors["base_model.model." + name] = value.clone().contiguous()
    settings = {"r": 4, "lora_alpha": 6, "use_dora": use_dora, "use_rslora": use_rslora}
    save_file(tensors, file, metadata={"lora_adapter_metadata": json.dumps(settings)})
    original, pipe.transformer = pipe.transformer, model
    latents = generate()
    pipe.transformer = original
    return latents


BEFORE = generate()
good = True
with tempfile.TemporaryDirectory() as folder:
    for name, tensors, changed in cases():
        file = Path(folder) / "lora.safetensors"
        save_file({key: value.contiguous() for key, value in tensors.items()}, file)
        pipe.transformer.load_state_dict(changed)
        expected = generate()
        pipe.transformer.load_state_dict(plain)
        good &= compare(name, "merge", expected, kiln(file, 1))
    for use_dora, use_rslora in ((False, False), (False, True), (True, False)):
        file = Path(folder) / "peft.safetensors"
        expected = with_peft(file, use_dora, use_rslora)
        good &= compare(f"dora {use_dora}, rslora {use_rslora}", "peft", expected, kiln(file, 1))
    for file in sorted((MODEL.parent / "lora").glob("*.safetensors")):
        for weight in (1.0, -0.5):
            pipe.load_lora_weights(file, adapter_name="x")
            pipe.set_adapters(["x"], [weight])
            expected = generate()
            pipe.unload_lora_weights()
            good &= compare(f"{file.name}, weight {weight}", "load", expected, kiln(file, weight))
sys.exit(0 if good else 1)

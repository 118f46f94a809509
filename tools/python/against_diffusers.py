"""Runs the same calls on diffusers and on Kiln, with tiny models of every pipeline, and compares the images.

    python against_diffusers.py TESTDATA

Needs torch, diffusers, transformers, peft and kiln; without them it says so and succeeds. Images must be within one level,
latents and embeddings within 1e-3 of their largest value. The tiny models of TESTDATA are assembled in a temporary folder.
"""

import os
import pathlib
import shutil
import sys
import tempfile

try:
    import diffusers
    import numpy as np
    import peft  # noqa: F401
    import torch
    from PIL import Image
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(0)
import kiln

SMALL = dict(prompt="a red fox", height=64, width=64, num_inference_steps=2, max_sequence_length=64)


def assemble(testdata, name, folder):
    """Completes `tiny/NAME` with the parts of klein."""
    own = testdata / "tiny" / name
    shutil.copytree(own, folder, dirs_exist_ok=True)
    # dev has no text encoder here: its text comes as embeddings.
    parts = ["transformer", "vae", "scheduler"] + ["text_encoder"] * (name != "dev")
    for part in parts:
        if not (folder / part).exists():
            shutil.copytree(testdata / "tiny/klein" / part, folder / part)
    if name != "dev":
        shutil.copytree(testdata / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    return folder


def seeded(seed=3):
    return torch.Generator("cpu").manual_seed(seed)


def image(width, height, seed=0):
    values = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height))


def mask(width, height):
    result = Image.new("L", (width, height), 0)
    result.paste(255, (width // 4, height // 4, width, height))
    return result


def klein_cases(pipe):
    yield "text", pipe(generator=seeded(), guidance_scale=1.0, **SMALL).images
    yield "two images", pipe(generator=seeded(), guidance_scale=1.0, num_images_per_prompt=2, **SMALL).images
    pair = [seeded(1), seeded(2)]
    yield "generators", pipe(generator=pair, guidance_scale=1.0, num_images_per_prompt=2, **SMALL).images
    used = seeded()
    pipe(generator=used, guidance_scale=1.0, **SMALL)
    yield "the same generator again", pipe(generator=used, guidance_scale=1.0, **SMALL).images
    call = dict(SMALL, height=None, width=None)
    yield "edit", pipe(image=image(96, 64), generator=seeded(), guidance_scale=1.0, **call).images
    two = [image(80, 70), image(64, 112, 1)]
    yield "two references", pipe(image=two, generator=seeded(), guidance_scale=1.0, **SMALL).images
    call = {name: value for name, value in SMALL.items() if name != "num_inference_steps"}
    yield "sigmas", pipe(sigmas=[1.0, 0.6, 0.2], generator=seeded(), guidance_scale=1.0, **call).images
    noise = torch.randn((1, 128, 4, 4), generator=seeded(9))
    yield "latents", pipe(latents=noise, guidance_scale=1.0, **SMALL).images
    yield "np", pipe(generator=seeded(), guidance_scale=1.0, output_type="np", **SMALL).images
    yield "pt", pipe(generator=seeded(), guidance_scale=1.0, output_type="pt", **SMALL).images
    yield "latent", pipe(generator=seeded(), guidance_scale=1.0, output_type="latent", **SMALL).images
    embeds, ids = pipe.encode_prompt("a red fox", num_images_per_prompt=2, max_sequence_length=64)
    yield "embeds", embeds
    yield "ids", ids
    call = dict(SMALL, prompt=None)
    yield "embeds given", pipe(prompt_embeds=embeds[:1], generator=seeded(), guidance_scale=1.0, **call).images
    seen = []

    def look(pipe, step, timestep, kwargs):
        seen.append(float(timestep))
        return {"latents": kwargs["latents"] * 0.9}

    yield "callback", pipe(generator=seeded(), guidance_scale=1.0, callback_on_step_end=look, **SMALL).images
    yield "timesteps", torch.tensor(seen)

    def stop(pipe, step, timestep, kwargs):
        pipe._interrupt = True
        return kwargs

    yield "interrupt", pipe(generator=seeded(), guidance_scale=1.0, callback_on_step_end=stop, **SMALL).images


def lora_cases(pipe, testdata):
    lora = testdata / "tiny/lora"
    pipe.load_lora_weights(str(lora / "lora_diffusers.safetensors"), adapter_name="one")
    yield "lora", pipe(generator=seeded(), guidance_scale=1.0, **SMALL).images
    pipe.load_lora_weights(str(lora / "lora_diffusers_alpha8.safetensors"), adapter_name="two")
    yield "a second lora", pipe(generator=seeded(), guidance_scale=1.0, **SMALL).images
    yield "active", sorted(pipe.get_active_adapters())
    pipe.set_adapters(["one", "two"], [0.5, 0.25])
    yield "two loras", pipe(generator=seeded(), guidance_scale=1.0, **SMALL).images
    pipe.unload_lora_weights()
    yield "no lora", pipe(generator=seeded(), guidance_scale=1.0, **SMALL).images


def base_cases(pipe):
    yield "guidance", pipe(generator=seeded(), guidance_scale=4.0, **SMALL).images
    negative, _ = pipe.encode_prompt("grey", max_sequence_length=64)
    yield "negative", pipe(generator=seeded(), guidance_scale=3.0, negative_prompt_embeds=negative, **SMALL).images
    call = dict(SMALL, prompt=["a fox", "a cat"])
    yield "two prompts", pipe(generator=seeded(), guidance_scale=3.0, **call).images


def inpaint_cases(pipe):
    call = dict(prompt="a red fox", num_inference_steps=4, max_sequence_length=64, guidance_scale=1.0)
    source, area = image(96, 64), mask(96, 64)
    yield "inpaint", pipe(image=source, mask_image=area, generator=seeded(), **call).images
    yield "strength", pipe(image=source, mask_image=area, strength=0.5, generator=seeded(), **call).images
    reference = image(64, 64, 5)
    yield "reference", pipe(
        image=source, mask_image=area, image_reference=reference, strength=1.0, generator=seeded(), **call
    ).images
    yield "crop", pipe(image=image, mask_image=area, padding_mask_crop=8, generator=seeded(), **call).images


def kv_cases(pipe):
    yield "text", pipe(generator=seeded(), **SMALL).images
    yield "reference", pipe(image=image(80, 64), generator=seeded(), **SMALL).images


def dev_cases(pipe, dim):
    embeds = torch.randn((1, 24, dim), generator=seeded(4))
    call = dict(SMALL, prompt=None, prompt_embeds=embeds)
    yield "text", pipe(generator=seeded(), guidance_scale=4.0, **call).images
    yield "reference", pipe(image=image(80, 64), generator=seeded(), guidance_scale=2.5, **call).images
    yield "latent", pipe(generator=seeded(), output_type="latent", **call).images


def compare(name, theirs, ours):
    """Returns what is wrong, or nothing."""
    if isinstance(theirs, list) and theirs and isinstance(theirs[0], Image.Image):
        theirs, ours = [np.stack([np.asarray(i) for i in images]).astype(int) for images in (theirs, ours)]
        limit = 1.0
    elif isinstance(theirs, list):
        return "" if theirs == ours else f"{ours}, expected {theirs}"
    else:
        theirs, ours = np.asarray(theirs), np.asarray(ours)
        limit = 1.01 / 255 if name in ("np", "pt") else 1e-3 * max(np.abs(theirs).max(), 1e-9)
    if theirs.shape != ours.shape:
        return f"shape {ours.shape}, expected {theirs.shape}"
    difference = np.abs(theirs - ours).max()
    return "" if difference <= limit else f"differs by {difference}, at most {limit}"


def main():
    torch.set_grad_enabled(False)
    testdata = pathlib.Path(sys.argv[1]).resolve()
    failed = count = 0
    diffusers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            name: assemble(testdata, name, pathlib.Path(scratch) / name)
            for name in ("klein", "klein-base", "klein-kv", "dev")
        }
        dim = __import__("json").loads((folders["dev"] / "transformer/config.json").read_text())["joint_attention_dim"]
        jobs = [
            ("Flux2KleinPipeline", "klein", klein_cases),
            ("Flux2KleinPipeline", "klein", lambda pipe: lora_cases(pipe, testdata)),
            ("Flux2KleinPipeline", "klein-base", base_cases),
            ("Flux2KleinInpaintPipeline", "klein", inpaint_cases),
            ("Flux2KleinKVPipeline", "klein-kv", kv_cases),
            ("Flux2Pipeline", "dev", lambda pipe: dev_cases(pipe, dim)),
        ]
        for kind, name, cases in jobs:
            pipes = []
            for module in (diffusers, kiln):
                extra = {"device": "cpu"} if module is kiln else {}
                if kind == "Flux2Pipeline":
                    pipe = dev_pipeline(module, folders[name], extra)
                else:
                    pipe = getattr(module, kind).from_pretrained(folders[name], torch_dtype=torch.float32, **extra)
                pipe.set_progress_bar_config(disable=True)
                pipes.append(pipe)
            for (case, theirs), (_, ours) in zip(cases(pipes[0]), cases(pipes[1])):
                problem = compare(case, theirs, ours)
                count += 1
                failed += bool(problem)
                print(f"{kind} {case}: {problem or 'ok'}", flush=True)
    print(f"{count} cases, {failed} failed; diffusers {diffusers.__version__}, torch {torch.__version__}")
    sys.exit(1 if failed else 0)


def dev_pipeline(module, folder, extra):
    """dev without its text encoder, which the tiny model lacks."""
    if module is kiln:
        return kiln.Flux2Pipeline.from_pretrained(folder, torch_dtype=torch.float32, **extra)
    part = lambda kind, name: kind.from_pretrained(os.path.join(folder, name), torch_dtype=torch.float32)
    return diffusers.Flux2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(os.path.join(folder, "scheduler")),
        vae=part(diffusers.AutoencoderKLFlux2, "vae"),
        text_encoder=None,
        tokenizer=None,
        transformer=part(diffusers.Flux2Transformer2DModel, "transformer"),
    )


if __name__ == "__main__":
    main()

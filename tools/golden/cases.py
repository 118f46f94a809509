"""The cases of the golden set: models and requests. `reference.py` runs them."""

PROMPTS = {
    "P0": 'A cat holding a sign that says "Gifu AI Study Group"',
    "P1": "a watercolor of \u685c trees by a river, soft light \U0001f338",
    "P2": "blurry, low quality, jpeg artifacts",
    "P3": "replace the background with a snowy mountain",
    "P4": "a highly detailed photograph of a lighthouse on a cliff at dusk, waves crashing below, " * 4,
    "EMPTY": "",
}
# Length to which each prompt is encoded in prompts.safetensors. P4 is longer than its limit and gets truncated.
PROMPT_TOKENS = {"P0": 512, "P1": 128, "P2": 128, "P3": 128, "P4": 64, "EMPTY": 128}

A, B, SOURCE = "ref_a_80x70.png", "ref_b_64x112.png", "inpaint_100x72.png"
MASK, SMALL_MASK = "mask_100x72.png", "mask_small_100x72.png"
S64, S48 = dict(height=64, width=64), dict(height=48, width=48)


def klein(name, prompts, seed, steps, model="klein", level="light", first_calls=(0,), tokens=128, **call):
    """A case of a klein pipeline. `tokens=None` keeps the pipeline's default of 512. Keys of `call` that start with `_`
    are for `reference.py`; images are named by their file in `inputs/`."""
    call |= dict(num_inference_steps=steps)
    if tokens:
        call["max_sequence_length"] = tokens
    if model != "klein-kv":
        call.setdefault("guidance_scale", 1.0)
    return dict(name=name, model=model, prompts=prompts, seed=seed, level=level, first_calls=first_calls, call=call)


def dev(name, **call):
    call |= dict(S48, num_inference_steps=2, guidance_scale=4.0)
    return dict(name=name, model="dev", prompts=None, seed=42, level="mid", first_calls=(0,), call=call)


def base(name, *a, **kw):
    return klein(name, *a, model="klein-base", guidance_scale=4.0, **kw)


def kv(name, *a, **kw):
    return klein(name, *a, model="klein-kv", **kw)


LORA, LORA8 = "lora/lora_diffusers.safetensors", "lora/lora_diffusers_alpha8.safetensors"
CASES = [
    klein("t2i_64x64", "P0", 42, 4, level="full", tokens=None, **S64),
    klein("t2i_96x64", "P1", 7, 2, height=64, width=96),
    klein("t2i_80x112", "P1", 8, 2, height=112, width=80),
    klein("t2i_90x75_rounded", "P2", 3, 1, height=75, width=90),
    klein("t2i_batch2", ["P0", "P1"], 3, 2, **S48),
    klein("t2i_2images_generator_list", "P0", [11, 12], 2, num_images_per_prompt=2, **S48),
    klein("t2i_2prompts_2images", ["P0", "P3"], 21, 1, num_images_per_prompt=2, **S48),
    klein("t2i_custom_sigmas", "P0", 42, 3, sigmas=[1.0, 0.75, 0.3], **S48),
    klein("t2i_seq64", "P0", 42, 1, tokens=64, **S48),
    klein("t2i_truncated_prompt", "P4", 42, 1, tokens=64, **S48),
    klein("t2i_empty_prompt", "EMPTY", 1, 1, **S48),
    klein("t2i_seed_above_2p32", "P0", 2**32 + 5, 1, **S48),
    klein("edit_1ref", "P3", 5, 3, level="mid", tokens=None, image=A, _encoder_stages=True),
    klein("edit_2ref", "P3", 5, 2, image=[A, B], **S48),
    klein("edit_3ref", "P3", 6, 2, image=[A, B, SOURCE], height=48, width=64),
    klein("edit_1ref_batch2", ["P0", "P3"], 9, 2, image=A, **S48),
    klein("edit_small_decoder", "P3", 5, 2, model="klein-small-decoder", image=A, _encoder_stages=True),
    base("base_cfg4_empty_negative", "P0", 42, 2, level="mid", first_calls=(0, 1), **S48),
    base("base_cfg4_negative_P2", "P0", 42, 2, _negative="P2", **S48),
    base("base_cfg4_edit_1ref", "P3", 5, 2, image=A, **S48),
    base("base_cfg4_batch2", ["P0", "P1"], 4, 2, **S48),
    base("base_cfg4_inpaint", "P3", 5, 3, image=SOURCE, mask_image=MASK, strength=0.7),
    klein("lora_scale1", "P0", 42, 2, level="mid", _loras=[(LORA, 1.0, 1.0)], **S48),
    klein("lora_scale0.5", "P0", 42, 2, _loras=[(LORA, 0.5, 0.5)], **S48),
    klein("lora_alpha8", "P0", 42, 2, _loras=[(LORA8, 1.0, 2.0)], **S48),
    klein("lora_two", "P0", 42, 1, _loras=[(LORA, 0.7, 0.7), (LORA8, -0.25, -0.5)], **S48),
    kv("kv_1ref", "P3", 5, 3, level="mid", first_calls=(0, 1), image=A, **S48),
    kv("kv_2ref", "P3", 5, 3, image=[A, B], **S48),
    kv("kv_no_ref", "P0", 42, 2, **S48),
    klein("inpaint_strength0.6", "P3", 5, 5, image=SOURCE, mask_image=MASK, strength=0.6),
    klein("inpaint_ref_strength1", "P3", 5, 2, image=SOURCE, mask_image=MASK, image_reference=B, strength=1.0),
    klein("inpaint_padding_mask_crop8", "P3", 5, 3, image=SOURCE, mask_image=SMALL_MASK, padding_mask_crop=8, strength=0.8),
    dev("dev_t2i"),
    dev("dev_edit_1ref", image=A),
]

"""Tests `kiln serve` with `webuiapi`, the Python client of A1111's API.

Usage: webuiapi_client.py http://127.0.0.1:7860 [KEY]
"""

import sys
from urllib.parse import urlsplit

import webuiapi
from PIL import Image

address, key = urlsplit(sys.argv[1]), (sys.argv + ["none"])[2]
api = webuiapi.WebUIApi(host=address.hostname, port=address.port, username="me", password=key)

names = api.util_get_model_names()
assert names and api.util_get_current_model() == names[0]
api.util_set_model(names[0])
assert api.util_get_sampler_names() == ["Euler"] and "automatic" in api.util_get_scheduler_names()
assert isinstance(api.get_sd_vae(), list) and isinstance(api.get_loras(), list)
assert api.get_upscalers()[0]["name"] == "None" and api.get_latent_upscale_modes() == []
assert api.get_cmd_flags()["api"] and api.get_scripts()["txt2img"] == []
api.refresh_checkpoints()

generated = api.txt2img(prompt="a red apple", seed=5, steps=2, width=128, height=96, cfg_scale=1, batch_size=2)
assert [image.size for image in generated.images] == [(128, 96)] * 2
assert generated.info["all_seeds"] == [5, 6] and "Steps: 2" in generated.info["infotexts"][0]
assert generated.image.text["parameters"] == generated.info["infotexts"][0]
assert api.png_info(generated.image).info == generated.info["infotexts"][0]
second = api.txt2img(prompt="a red apple", seed=6, steps=2, width=128, height=96, cfg_scale=1)
assert second.image.tobytes() == generated.images[1].tobytes(), "the second image's seed gives it alone"

mask = Image.new("L", (128, 96), 0)
mask.paste(255, (0, 0, 64, 96))
source = Image.new("RGB", (128, 96), "red")
options = dict(images=[source], mask_image=mask, prompt="a blue whale", steps=4, seed=1, denoising_strength=1.0, width=128, height=96)


def change(image, box):
    """How far a part of the image is from the red it was."""
    part = image.convert("RGB").crop(box).tobytes()
    return sum(abs(value - (255, 0, 0)[i % 3]) for i, value in enumerate(part)) / len(part)


left, right = (8, 8, 40, 88), (88, 8, 120, 88)
normal = api.img2img(inpainting_mask_invert=0, inpaint_full_res=False, **options).image
inverted = api.img2img(inpainting_mask_invert=1, inpaint_full_res=False, **options).image
assert change(normal, left) > change(normal, right), "white is repainted"
assert change(inverted, left) < change(inverted, right), "inverted, black is repainted"
api.interrupt()
api.skip()
assert api.get_progress()["state"]["job_count"] == 0

print("webuiapi client: passed")

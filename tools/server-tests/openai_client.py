"""Tests `kiln serve --model-alias gpt-image-1=ember` with OpenAI's Python client: generate, edit with two images and a
mask, stream, models, errors.

Usage: openai_client.py http://127.0.0.1:7860 [KEY]
"""

import base64
import io
import sys
import urllib.request

from openai import BadRequestError, NotFoundError, OpenAI
from PIL import Image

address, key = sys.argv[1], (sys.argv + ["none"])[2]
client = OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def decode(b64):
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def png(name, size, colour):
    """A PNG file with a name, which the client sends along."""
    file = io.BytesIO()
    Image.new("RGBA", size, colour).save(file, "PNG")
    file.seek(0)
    file.name = name
    return file


models = [model.id for model in client.models.list()]
assert models, "no models"
model = models[0]

# Text to image, with Kiln's own parameters beside OpenAI's.
generated = client.images.generate(
    model=model, prompt="a red apple", n=2, size="128x128", extra_body={"seed": 7, "steps": 2}
)
assert len(generated.data) == 2 and [decode(d.b64_json).size for d in generated.data] == [(128, 128)] * 2
again = client.images.generate(
    model=model, prompt="a red apple", n=2, size="128x128", extra_body={"seed": 7, "steps": 2}
)
assert generated.data[0].b64_json[:4000] == again.data[0].b64_json[:4000], "the same seed gives the same image"

# Another format, as a URL.
generated = client.images.generate(
    model=model, prompt="a red apple", size="128x128", response_format="url", output_format="jpeg",
    output_compression=80, extra_body={"steps": 2},
)
assert generated.data[0].b64_json is None
request = urllib.request.Request(generated.data[0].url, headers={"Authorization": f"Bearer {key}"})
assert Image.open(io.BytesIO(urllib.request.urlopen(request).read())).format == "JPEG"

# Models by name and by another name.
assert client.models.retrieve(model).id == model
assert client.models.retrieve("gpt-image-1").id == "gpt-image-1"
assert client.images.generate(model="gpt-image-1", prompt="an apple", size="64x64", extra_body={"steps": 1}).data

# Two images and a mask that is transparent in the area to change.
mask = Image.new("RGBA", (128, 128), (0, 0, 0, 255))
mask.paste((0, 0, 0, 0), (32, 32, 96, 96))
file = io.BytesIO()
mask.save(file, "PNG")
file.seek(0)
file.name = "mask.png"
edited = client.images.edit(
    model=model, prompt="a blue whale",
    image=[png("a.png", (128, 128), "red"), png("b.png", (96, 96), "yellow")], mask=file,
    extra_body={"steps": 2, "seed": 1},
)
edited = decode(edited.data[0].b64_json).convert("RGB")
assert edited.size == (128, 128)
corner = edited.getpixel((4, 4))
assert corner[0] > 150 and corner[1] < 110 and corner[2] < 110, f"the image changed outside the mask: {corner}"

# A stream with previews.
events = list(client.images.generate(
    model=model, prompt="a red apple", size="128x128", stream=True, partial_images=2, extra_body={"steps": 4}
))
types = [event.type for event in events]
# On a busy machine a preview may be skipped.
assert set(types[:-1]) == {"image_generation.partial_image"} and len(types) <= 3, types
assert types[-1] == "image_generation.completed", types
assert [event.partial_image_index for event in events[:-1]] == list(range(len(events) - 1))
assert decode(events[-1].b64_json).size == (128, 128)
events = list(client.images.edit(
    model=model, prompt="a whale", image=png("a.png", (128, 128), "red"), stream=True, partial_images=1,
    extra_body={"steps": 2},
))
assert {event.type for event in events} == {"image_edit.partial_image", "image_edit.completed"}

# Errors in OpenAI's format.
try:
    client.images.generate(model="../etc", prompt="a red apple")
    raise SystemExit("a model outside the folder was accepted")
except NotFoundError as error:
    assert error.code == "model_not_found", error
try:
    client.images.generate(model=model, prompt="a red apple", size="17")
    raise SystemExit("an invalid size was accepted")
except BadRequestError as error:
    assert "size" in str(error) and error.param == "size"
try:
    client.images.create_variation(image=png("a.png", (64, 64), "red"))
    raise SystemExit("variations were accepted")
except BadRequestError as error:
    assert error.code == "not_supported" and "edits" in str(error)

print("openai client: passed")

"""OpenAI's own Python client against `kiln serve`: generate, edit with two pictures and a mask, stream.

Usage: openai_client.py http://127.0.0.1:7860 [KEY]
"""

import base64
import io
import sys

from openai import BadRequestError, NotFoundError, OpenAI
from PIL import Image

address, key = sys.argv[1], (sys.argv + ["none"])[2]
client = OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def picture(b64):
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def png(name, size, colour):
    """A file as `open` gives it: the client sends its name along."""
    file = io.BytesIO()
    Image.new("RGBA", size, colour).save(file, "PNG")
    file.seek(0)
    file.name = name
    return file


models = [model.id for model in client.models.list()]
assert models, "no models"
model = models[0]

# Words to pictures, with parameters of our own beside OpenAI's.
made = client.images.generate(
    model=model, prompt="a red apple", n=2, size="128x128", extra_body={"seed": 7, "steps": 2}
)
assert len(made.data) == 2 and [picture(d.b64_json).size for d in made.data] == [(128, 128)] * 2
again = client.images.generate(
    model=model, prompt="a red apple", n=2, size="128x128", extra_body={"seed": 7, "steps": 2}
)
assert made.data[0].b64_json[:4000] == again.data[0].b64_json[:4000], "a seed stands for a picture"

# Another format, by address.
made = client.images.generate(
    model=model, prompt="a red apple", size="128x128", response_format="url", output_format="jpeg",
    output_compression=80, extra_body={"steps": 2},
)
assert made.data[0].url and made.data[0].b64_json is None

# Two pictures and a mask, see-through where to paint.
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
edited = picture(edited.data[0].b64_json).convert("RGB")
assert edited.size == (128, 128)
corner = edited.getpixel((4, 4))
assert corner[0] > 150 and corner[1] < 110 and corner[2] < 110, f"outside the mask it stays red: {corner}"

# A stream with previews.
events = list(client.images.generate(
    model=model, prompt="a red apple", size="128x128", stream=True, partial_images=2, extra_body={"steps": 4}
))
kinds = [event.type for event in events]
# On a busy machine a preview may be overtaken by the next one.
assert set(kinds[:-1]) == {"image_generation.partial_image"} and len(kinds) <= 3, kinds
assert kinds[-1] == "image_generation.completed", kinds
assert [event.partial_image_index for event in events[:-1]] == list(range(len(events) - 1))
assert picture(events[-1].b64_json).size == (128, 128)
events = list(client.images.edit(
    model=model, prompt="a whale", image=png("a.png", (128, 128), "red"), stream=True, partial_images=1,
    extra_body={"steps": 2},
))
assert {event.type for event in events} == {"image_edit.partial_image", "image_edit.completed"}

# Errors as OpenAI's.
try:
    client.images.generate(model="../etc", prompt="a red apple")
    raise SystemExit("a model outside the folder was taken")
except NotFoundError as error:
    assert error.code == "model_not_found", error
try:
    client.images.generate(model=model, prompt="a red apple", size="17")
    raise SystemExit("a size that is none was taken")
except BadRequestError as error:
    assert "size" in str(error)

print("openai client: all well")

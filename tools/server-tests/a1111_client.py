"""Tests `kiln serve` as clients of A1111's API use it: txt2img, img2img, progress, interrupt, lists.

Usage: a1111_client.py http://127.0.0.1:7860 [KEY]
"""

import base64
import io
import json
import sys
import threading
import time
import urllib.error
import urllib.request

address, key = sys.argv[1], (sys.argv + ["none"])[2]


def call(path, body=None):
    request = urllib.request.Request(f"{address}/sdapi/v1/{path}")
    request.add_header("Authorization", "Basic " + base64.b64encode(f"me:{key}".encode()).decode())
    if body is not None:
        request.add_header("Content-Type", "application/json")
        request.data = json.dumps(body).encode()
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def size(b64):
    """Width and height in a PNG's header."""
    header = base64.b64decode(b64)[:24]
    assert header.startswith(b"\x89PNG")
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


models = call("sd-models")
assert models and models[0]["model_name"]
assert call("samplers")[0]["name"] == "Euler"
assert isinstance(call("loras"), list)
assert call("options")["sd_model_checkpoint"] == models[0]["model_name"]
call("options", {"sd_model_checkpoint": models[0]["model_name"]})

generated = call("txt2img", {
    "prompt": "a red apple", "negative_prompt": "", "steps": 2, "width": 128, "height": 128, "seed": 5, "batch_size": 2,
    "cfg_scale": 1, "sampler_name": "Euler",
})
assert [size(image) for image in generated["images"]] == [(128, 128)] * 2
info = json.loads(generated["info"])
assert info["seed"] == 5 and info["sd_model_name"] == models[0]["model_name"]

edited = call("img2img", {
    "prompt": "a blue whale", "init_images": ["data:image/png;base64," + generated["images"][0]], "denoising_strength": 0.7,
    "steps": 4, "width": 128, "height": 128,
})
assert size(edited["images"][0]) == (128, 128)

# A long job, watched and interrupted.
response = {}
thread = threading.Thread(target=lambda: response.update(call("txt2img", {"prompt": "a red apple", "steps": 150})))
thread.start()
previews = 0
deadline = time.time() + 60
while time.time() < deadline and previews < 3:
    progress = call("progress")
    previews += progress["progress"] > 0 and progress["current_image"] is not None
    time.sleep(0.1)
assert previews >= 3, "no progress was reported"
interrupted = time.time()
call("interrupt", {})
thread.join(30)
assert size(response["images"][0]) == (256, 256), "the unfinished image"
assert json.loads(response["info"])["interrupted"]
assert time.time() - interrupted < 10

try:
    call("txt2img", {"prompt": "a red apple", "width": 1 << 20})
    raise SystemExit("an image a million pixels wide was accepted")
except urllib.error.HTTPError as error:
    assert error.code == 400 and "width" in json.load(error)["detail"]

print("a1111 client: passed")

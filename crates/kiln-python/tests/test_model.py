"""Kiln's own API: requests, inputs and outputs, errors, threads, processes."""

import asyncio
import inspect
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import kiln
import numpy as np
from common import SMALL, model, path, raises
from PIL import Image


def pixels(image):
    return np.asarray(image).copy()


def test_every_kind_of_error_raises_the_documented_exception():
    docs = os.path.join(os.path.dirname(__file__), "../../../docs/errors.md")
    with open(docs, encoding="utf-8") as table:
        rows = [line.strip("| \n").split(" | ") for line in table]
    documented = {row[0]: row[5] for row in rows if len(row) == 7}
    raised = {kind: type(error).__name__ for kind, error in kiln._kiln.exceptions()}
    assert raised == {kind: documented[kind] for kind in raised} and "Device" in raised


def test_an_image_has_pixels_latents_seed_and_recipe():
    [image] = model().generate("a fox", **SMALL)
    assert (image.width, image.height, image.seed, image.index) == (64, 64, 1, 0)
    assert image.numpy().shape == (64, 64, 3) and image.numpy().dtype == np.uint8
    assert image.latents().shape == (16, 128) and image.latents().dtype == np.float32
    assert image.recipe["prompt"] == "a fox"
    assert (pixels(image.pil()) == pixels(image)).all()
    again = Image.open(__import__("io").BytesIO(image.encode("png")))
    assert (pixels(again) == pixels(image)).all()
    image.save("fox.webp")
    raises(kiln.RequestError, ".png, .jpg or .webp", image.save, "fox.bmp")
    assert image._repr_png_().startswith(b"\x89PNG")


def test_files_are_signed_with_a_key_of_ones_own():
    [image] = model().generate("a fox", **SMALL)
    before = os.environ.get("XDG_DATA_HOME")
    os.environ["XDG_DATA_HOME"] = os.path.abspath("data")
    try:
        raises(kiln.RequestError, "there is no key to sign with", image.encode, "png", sign=True)
        made = [sys.executable, "-m", "kiln", "credentials", "new", "--name", "Ada"]
        subprocess.run(made, check=True, capture_output=True)
        image.save("signed.webp", sign=True)
    finally:
        os.environ.pop("XDG_DATA_HOME")
        os.environ.update({"XDG_DATA_HOME": before} if before else {})
    with open("signed.webp", "rb") as file:
        assert b"c2pa.claim" in file.read()
    key, certificate = "data/kiln/credentials/key.pem", "data/kiln/credentials/certificate.pem"
    signer = kiln.Signer(key, certificate, producer="A Service")
    assert signer.name == "Ada" and signer.valid_until > "2030" and "Ada" in repr(signer)
    signed = image.encode("png", sign=signer)
    assert b"A Service" in signed and b"A Service" not in image.encode("png")
    assert (pixels(Image.open(__import__("io").BytesIO(signed))) == pixels(image)).all()
    raises(kiln.RequestError, "a key needs its certificate", kiln.Signer, key)
    raises(kiln.RequestError, "has no private key", kiln.Signer, certificate, certificate)
    raises(kiln.RequestError, "no time stamp", kiln.Signer, key, certificate, timestamp_url="http://127.0.0.1:1/")


def test_files_say_where_they_come_from():
    [image] = kiln.load("ember").generate("a red apple on a blue background", seed=1)
    image.save("apple.png", watermark=True)
    report = kiln.verify("apple.png")
    assert report["state"] == "none" and report["ai_mark"]["is_ai"], report
    assert report["watermark"]["bits"] == "4b494c4e" and report["watermark"]["owner"] == "Kiln", report
    own = kiln.verify(image.encode("jpeg", quality=80, watermark="0123abcd"))
    assert own["watermark"]["bits"] == "0123abcd" and own["watermark"]["owner"] is None, own
    plain = image.encode("png", ai_mark=False)
    assert kiln.verify(plain)["watermark"] is None and kiln.verify(plain)["ai_mark"] is None
    raises(kiln.RequestError, "8 hexadecimal digits", image.encode, "png", watermark="secret")
    raises(kiln.KilnError, "missing.png", kiln.verify, "missing.png")
    raises(kiln.KilnError, "has no certificate", kiln.verify, plain, trust=["apple.png"])


def test_arrays_are_views_without_copies():
    [image] = model().generate("a fox", **SMALL)
    a, b = image.numpy(), np.asarray(image)
    assert a.__array_interface__["data"][0] == b.__array_interface__["data"][0]
    assert not a.flags.writeable
    before = a.copy()
    del image
    assert (a == before).all()


def test_images_in_every_form_give_the_same():
    image = Image.effect_noise((64, 64), 80).convert("RGB")
    image.save("image.png")
    with open("image.png", "rb") as file:
        data = file.read()
    forms = [image, "image.png", __import__("pathlib").Path("image.png"), data, np.asarray(image)]
    forms += [np.asarray(image).astype(np.float32) / 255, np.asarray(image)[None]]
    results = [pixels(model().generate("a fox", references=form, **SMALL)[0]) for form in forms]
    assert all((result == results[0]).all() for result in results)
    plain = pixels(model().generate("a fox", **SMALL)[0])
    assert not (plain == results[0]).all()


def test_noise_and_embeddings_from_arrays():
    [image] = model().generate("a fox", **SMALL)
    embeds = model().encode_prompt("a fox", max_tokens=32)
    assert embeds.shape[:2] == (1, 32)
    request = {name: value for name, value in SMALL.items() if name not in ("max_tokens",)}
    [same] = model().generate(prompt_embeds=embeds, **request)
    assert (pixels(same) == pixels(image)).all()
    request.pop("seed")
    noise = np.random.default_rng(0).standard_normal((1, 128, 4, 4)).astype(np.float32)
    [first] = model().generate("a fox", noise=noise, max_tokens=32, **request)
    [second] = model().generate("a fox", noise=noise.astype(np.float64), max_tokens=32, **request)
    assert (pixels(first) == pixels(second)).all() and first.seed is None
    assert not (pixels(first) == pixels(image)).all()


def test_negative_embeddings_one_for_each_prompt():
    base = model("klein-base")
    request = {**SMALL, "guidance": 3.0}
    request.pop("max_tokens")
    both = base.encode_prompt(["a fox", "a cat"], max_tokens=32)
    negative = base.encode_prompt(["grey", "red"], max_tokens=32)
    together = base.generate(prompt_embeds=both, negative_prompt_embeds=negative, one_generator=True, **request)
    text = base.generate(
        ["a fox", "a cat"], negative_prompt=["grey", "red"], max_tokens=32, one_generator=True, **request
    )
    assert all((pixels(a) == pixels(b)).all() for a, b in zip(together, text))
    three = np.concatenate([negative, negative[:1]])
    raises(
        kiln.RequestError, "negative", base.generate, prompt_embeds=both, negative_prompt_embeds=three, **request
    )


def test_encoded_images_are_decoded():
    gradient = Image.linear_gradient("L").resize((64, 32)).convert("RGB")
    latents = model().encode_image(gradient)
    assert latents.shape == (1, 128, 2, 4)
    [decoded] = model().decode_latents(latents)
    assert decoded.numpy().shape == (32, 64, 3)
    [image] = model().generate("a fox", **SMALL)
    tokens = image.latents().reshape(4, 4, 128).transpose(2, 0, 1)[None]
    [same] = model().decode_latents(tokens)
    assert (same.numpy() == image.numpy()).all()
    raises(kiln.RequestError, "multiples of 16", model().encode_image, gradient.resize((60, 32)))
    raises(kiln.RequestError, "NaN", model().decode_latents, tokens * np.nan)
    raises(kiln.RequestError, "shape", model().decode_latents, tokens[0])


def test_wrong_arguments_raise_what_they_should():
    generate = model().generate
    raises(TypeError, "'widht'", generate, "a fox", widht=64)
    raises(ValueError, "prompt", generate, 7)
    raises(kiln.RequestError, "is missing", generate)
    raises(kiln.RequestError, "width", generate, "a fox", width=1 << 30)
    raises(kiln.RequestError, "width", generate, "a fox", width=-16)
    raises(kiln.OutOfMemoryError, "needs about", generate, "a fox", width=1 << 17, height=1 << 17)
    raises(kiln.RequestError, "not finite", generate, "a fox", guidance=float("nan"))
    raises(TypeError, "", generate, "a fox", seed=1.5)
    raises(kiln.RequestError, "seed", generate, "a fox", seed=-1)
    raises(kiln.RequestError, "seed", generate, "a fox", seed=1 << 64)
    raises(kiln.RequestError, "shape", generate, "a fox", noise=np.zeros((1, 128, 3, 3), np.float32))
    raises(kiln.RequestError, "noise", generate, "a fox", width=64, height=64, noise=np.full((1, 128, 4, 4), np.nan))
    raises(kiln.RequestError, "floats", generate, "a fox", noise=np.zeros((1, 128, 4, 4), int))
    raises(kiln.RequestError, "outside of 0 to 1", generate, "a fox", references=np.full((64, 64, 3), np.nan))
    raises(kiln.RequestError, "shape", generate, "a fox", references=np.zeros((64, 64, 7), np.uint8))
    raises(TypeError, "PIL image", generate, "a fox", references=7)
    raises(kiln.RequestError, "python:references", generate, "a fox", references=b"not an image")
    raises(kiln.RequestError, "embeds", generate, prompt_embeds=np.zeros((1, 4, 5), np.float32))
    raises(kiln.RequestError, "prompt_embeds", generate, "a", prompt_embeds=np.zeros((1, 4, 48), np.float32))
    raises(kiln.ModelError, "no-such-model", kiln.load, "no-such-model")
    raises(kiln.RequestError, "device", kiln.load, path("klein"), device="tpu")
    raises(kiln.KilnError, "", generate, "a fox", loras="no-such-file.safetensors")
    error = raises(kiln.RequestError, "hint", generate, "a fox", strength=0.5)
    assert error.hint and issubclass(kiln.RequestError, ValueError) and issubclass(kiln.OutOfMemoryError, MemoryError)


def test_every_field_of_a_request_is_an_argument():
    parameters = inspect.signature(kiln.Model.generate).parameters
    assert {"guidance", "lora_partial", "noise", "negative_prompt_embeds"} <= parameters.keys()
    assert "`guidance`: Guidance scale" in kiln.Model.generate.__doc__
    raises(TypeError, "unexpected argument 'png'", model().generate, "a fox", png="small")


def test_a_stream_tells_progress_previews_and_images():
    events = list(model().stream("a fox", previews=True, **{**SMALL, "width": 72}))
    kinds = {type(event).__name__ for event in events}
    assert kinds == {"Progress", "Note", "Preview", "Image"}, kinds
    assert events[-1].__class__ is kiln.Image or any(isinstance(event, kiln.Image) for event in events[-2:])
    fractions = [event.fraction for event in events if isinstance(event, kiln.Progress)]
    assert fractions == sorted(fractions) and fractions[-1] <= 1
    with model().stream("a fox", **{**SMALL, "steps": 500}) as stream:
        next(stream)
    # The model is free again.
    assert len(model().generate("a fox", **SMALL)) == 1


def test_callbacks_see_the_steps_and_may_change_them():
    seen = []
    [plain] = model().generate("a fox", **SMALL)

    def look(step):
        seen.append((step.step, step.steps, step.latents.shape))

    [same] = model().generate("a fox", on_step_end=look, **SMALL)
    assert seen == [(0, 2, (1, 16, 128)), (1, 2, (1, 16, 128))] and (pixels(same) == pixels(plain)).all()

    def change(step):
        step.latents[:] = 0

    [changed] = model().generate("a fox", on_step_end=change, **SMALL)
    assert not changed.latents().any()

    def stop(step):
        seen.append(step.step)
        step.stop()

    seen.clear()
    model().generate("a fox", on_step_end=stop, **{**SMALL, "steps": 50})
    assert seen == [0]

    def wrong(step):
        step.latents = np.zeros((1, 3, 128), np.float32)

    raises(kiln.RequestError, "shape", model().generate, "a fox", on_step_end=wrong, **SMALL)
    raises(ZeroDivisionError, "", model().generate, "a fox", on_step_end=lambda step: 1 / 0, **SMALL)
    nested = lambda step: model().generate("a cat", **SMALL)
    raises(kiln.KilnError, "callback", model().generate, "a fox", on_step_end=nested, **SMALL)
    two = []
    model().generate("a fox", n=2, on_step_end=lambda step: two.append(len(step.latents)), **SMALL)
    assert two == [2, 2]


def test_async_generation_leaves_the_loop_free():
    async def run():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticker = asyncio.ensure_future(tick())
        images = await model().generate_async("a fox", **{**SMALL, "steps": 20})
        ticker.cancel()
        task = asyncio.ensure_future(model().generate_async("a fox", **{**SMALL, "steps": 5000}))
        await asyncio.sleep(0.1)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return images, ticks
        raise AssertionError("not cancelled")

    images, ticks = asyncio.run(run())
    assert len(images) == 1 and ticks > 1


def test_eight_threads_share_a_model():
    expected = [pixels(model().generate("a fox", **{**SMALL, "seed": seed})[0]) for seed in range(8)]
    wrong = []

    def work(seed):
        for _ in range(2):
            [image] = model().generate("a fox", **{**SMALL, "seed": seed})
            if not (pixels(image) == expected[seed]).all():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def _in_child(queue, given, seed):
    queue.put(pixels(given.generate("a fox", **{**SMALL, "seed": seed})[0]))


def test_a_model_is_opened_again_in_other_processes():
    expected = pixels(model().generate("a fox", **SMALL)[0])
    same = pickle.loads(pickle.dumps(model()))
    assert (pixels(same.generate("a fox", **SMALL)[0]) == expected).all()
    if "fork" not in multiprocessing.get_all_start_methods():
        return
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    start = time.perf_counter()
    children = [context.Process(target=_in_child, args=(queue, model(), 1)) for _ in range(2)]
    [child.start() for child in children]
    results = [queue.get(timeout=60) for _ in children]
    [child.join(timeout=60) for child in children]
    assert all((result == expected).all() for result in results)
    assert all(child.exitcode == 0 for child in children)
    assert time.perf_counter() - start < 30


def run_script(text, **kwargs):
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs
    )


LONG = f"model.generate('a fox', **{dict(SMALL, steps=9000)})"


def test_ctrl_c_cancels_within_a_step():
    # A shell that starts the tests in the background makes them ignore Ctrl-C.
    script = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import kiln
model = kiln.load({path("klein")!r}, device="cpu", dtype="f32").load()
print("ready", flush=True)
try:
    {LONG}
except KeyboardInterrupt:
    images = model.generate("a fox", **{SMALL})
    print("interrupted", len(images), flush=True)
"""
    child = run_script(script)
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=20)
    assert (child.returncode, output) == (0, "interrupted 1\n"), output


def test_the_interpreter_ends_while_a_thread_generates():
    script = f"""
import kiln, threading, time
model = kiln.load({path("klein")!r}, device="cpu", dtype="f32").load()
threading.Thread(target=lambda: {LONG}, daemon=True).start()
stream = model.stream('a fox', **{dict(SMALL, steps=9000)})
time.sleep(0.2)
"""
    start = time.perf_counter()
    child = run_script(script)
    output, _ = child.communicate(timeout=20)
    assert child.returncode == 0 and time.perf_counter() - start < 15, output


def test_importing_needs_neither_numpy_nor_pillow():
    script = """
import sys
for name in ("numpy", "PIL"):
    sys.modules[name] = None
import kiln
assert not {"numpy", "PIL", "torch", "asyncio"} & {name for name, module in sys.modules.items() if module}
print(sorted(kiln.__all__) == dir(kiln))
"""
    output, _ = run_script(script).communicate(timeout=20)
    assert output == "True\n", output


def test_memory_stays_the_same():
    if not os.path.exists("/proc/self/statm"):
        return
    resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    request = {**SMALL, "steps": 1}
    for count in (15, int(os.environ.get("KILN_TEST_IMAGES", 30))):
        before = resident()
        for seed in range(count):
            model().generate("a fox", **{**request, "seed": seed})
    assert resident() - before < 8 << 20, resident() - before


def test_ember_is_inside():
    [image] = kiln.load("ember").generate("a red apple on a blue background", seed=7, steps=1, width=64, height=64)
    assert image.recipe["model"]["path"] == "ember"
    assert json.loads(json.dumps(image.recipe)) == image.recipe

"""Training."""

import kiln
from common import SMALL, path, raises
from PIL import Image

TINY = {"steps": 4, "rank": 4, "lr": 1e-2, "resolution": 64, "device": "cpu", "dtype": "f32", "trigger": "a blob"}


def images():
    import pathlib

    folder = pathlib.Path("images")
    folder.mkdir(exist_ok=True)
    for index, colour in enumerate([(200, 30, 40), (20, 160, 60)]):
        Image.new("RGB", (64, 64), colour).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text("a plain image")
    return folder


def test_a_lora_is_trained_stopped_resumed_and_used():
    events = []
    whole = {"distilled_anyway": True, "overwrite": True, **TINY}
    summary = kiln.train(images(), path("klein"), "whole.safetensors", progress=events.append, **whole)
    assert summary["steps"] == 4 and not summary["changes_nothing"]
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert steps == [1, 2, 3, 4] and all(event["loss"] > 0 for event in events if event["kind"] == "step")

    def stop(event):
        if event["kind"] == "step" and event["step"] == 2:
            raise ZeroDivisionError("stop")

    raises(ZeroDivisionError, "stop", kiln.train, images(), path("klein"), "parts.safetensors", progress=stop, **whole)
    kiln.train(images(), path("klein"), "parts.safetensors", resume=True, **{**whole, "overwrite": False})
    assert open("whole.safetensors", "rb").read() == open("parts.safetensors", "rb").read()
    model = kiln.load(path("klein"), dtype="f32", device="cpu")
    [plain] = model.generate("a blob", **SMALL)
    [changed] = model.generate("a blob", loras=["whole.safetensors"], **SMALL)
    assert plain.encode("png", recipe=False) != changed.encode("png", recipe=False)


def test_wrong_trainings_are_refused():
    train = lambda **options: kiln.train(images(), path("klein"), "no.safetensors", **{**TINY, **options})  # noqa: E731
    raises(kiln.KilnError, "distilled", train)
    anyway = {"distilled_anyway": True}
    raises(kiln.RequestError, "optimizer", train, optimizer="sgd", **anyway)
    raises(kiln.RequestError, "names", train, names="mine", **anyway)
    raises(kiln.RequestError, "full", lambda: train(kind="full", **anyway))
    raises(kiln.RequestError, "device", train, device="tpu")
    raises(kiln.RequestError, "LoKr", lambda: train(kind="lokr", names="kohya", **anyway))
    raises(kiln.RequestError, ".safetensors", kiln.train, images(), path("klein"), "no.png", **anyway, **TINY)
    for count in ["steps", "save_every", "batch", "accumulate"]:
        raises(kiln.RequestError, f"{count}= must be", lambda: train(**{**anyway, count: 0}))
    raises(kiln.RequestError, "unknown field `stpes`", train, stpes=3, **anyway)
    raises(kiln.KilnError, "no-images", kiln.train, "no-images", path("klein"), "no.safetensors", **anyway)


def test_the_arguments_are_those_of_the_request():
    import inspect

    parameters = inspect.signature(kiln.train).parameters
    assert {"learning_rate", "warmup", "ranks", "cache_dir", "resume", "sample_prompts"} <= parameters.keys()
    assert "`warmup`: Steps over which the learning rate rises" in kiln.train.__doc__

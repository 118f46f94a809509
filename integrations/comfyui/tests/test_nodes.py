"""Runs the nodes as ComfyUI does, on torch tensors and tiny models.

`crates/kiln-python/tests/test_comfyui.py` starts it where torch is installed, with the models in KILN_TEST_KLEIN and
KILN_TESTDATA; it also runs with pytest.
"""

import functools
import importlib.util
import inspect
import json
import os
import pathlib
import sys
import tempfile
import types

import kiln
import numpy
import torch

PACK = pathlib.Path(__file__).resolve().parents[1]
MODEL = os.environ["KILN_TEST_KLEIN"]


class Interrupted(Exception):
    """ComfyUI's exception of the button *Cancel*."""


class Comfy:
    """What the nodes use of ComfyUI: its progress bar, its cancel button, its folders."""

    def __init__(self):
        self.updates = []
        self.cancelled = False
        self.output = tempfile.mkdtemp()
        self.loras = pathlib.Path(os.environ["KILN_TESTDATA"]) / "tiny" / "lora"
        comfy = self

        class ProgressBar:
            def __init__(self, total):
                self.total = total

            def update_absolute(self, value, total=None, preview=None):
                comfy.updates.append((value, total, preview))

        def throw_exception_if_processing_interrupted():
            if comfy.cancelled:
                raise Interrupted

        def get_full_path(kind, name):
            file = comfy.loras / name
            return str(file) if kind == "loras" and file.is_file() else None

        self.modules = {
            "comfy": types.ModuleType("comfy"),
            "comfy.utils": types.SimpleNamespace(ProgressBar=ProgressBar),
            "comfy.model_management": types.SimpleNamespace(
                throw_exception_if_processing_interrupted=throw_exception_if_processing_interrupted
            ),
            "folder_paths": types.SimpleNamespace(
                get_filename_list=lambda kind: sorted(os.listdir(comfy.loras)) if kind == "loras" else [],
                get_full_path=get_full_path,
                get_output_directory=lambda: comfy.output,
                get_save_image_path=lambda prefix, folder, width, height: (folder, prefix, 1, "", prefix),
            ),
        }
        self.modules["comfy"].utils = self.modules["comfy.utils"]
        self.modules["comfy"].model_management = self.modules["comfy.model_management"]


def load_pack():
    """Imports the pack as ComfyUI does."""
    if "kiln_nodes" not in sys.modules:
        comfy = Comfy()
        sys.modules.update(comfy.modules)
        spec = importlib.util.spec_from_file_location(
            "kiln_nodes", PACK / "__init__.py", submodule_search_locations=[str(PACK)]
        )
        pack = importlib.util.module_from_spec(spec)
        sys.modules["kiln_nodes"] = pack
        spec.loader.exec_module(pack)
        pack.comfy = comfy
    return sys.modules["kiln_nodes"]


PACK_MODULE = load_pack()


def node(name, **inputs):
    """Runs a node as ComfyUI does. Loaded models are shared, as ComfyUI caches what nodes return."""
    kind = PACK_MODULE.NODE_CLASS_MAPPINGS[name]
    return getattr(kind(), kind.FUNCTION)(**inputs)


def defaults(name):
    """The values that a new node has."""
    required = PACK_MODULE.NODE_CLASS_MAPPINGS[name].INPUT_TYPES()["required"]
    with_default = {key: spec for key, spec in required.items() if len(spec) > 1 and "default" in spec[1]}
    return {key: spec[1]["default"] for key, spec in with_default.items()}


@functools.cache
def model():
    return node("KilnLoadModel", model=MODEL, device="cpu", dtype="f32", vram_limit=0.0)[0]


@functools.cache
def engine():
    return kiln.load(MODEL, device="cpu", dtype="f32")


def raises(kind, text, call):
    """Checks that a call raises, with a text in its message."""
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def small(**inputs):
    return {**defaults("KilnGenerate"), "seed": 1, "width": 64, "height": 64, "steps": 2, **inputs}


def text(prompt="a fox"):
    return node("KilnText", prompt=prompt)[0]


def sample_image(width=96, height=80):
    rows, columns = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    return torch.stack([rows, columns, rows * columns], dim=-1).unsqueeze(0)


def expected(**request):
    return engine().generate("a fox", **{"seed": 1, "width": 64, "height": 64, "steps": 2, **request})


def test_nodes_follow_the_conventions():
    classes, names = PACK_MODULE.NODE_CLASS_MAPPINGS, PACK_MODULE.NODE_DISPLAY_NAME_MAPPINGS
    assert classes.keys() == names.keys() and len(classes) == 10
    for name, kind in classes.items():
        types_of = kind.INPUT_TYPES()
        assert set(types_of) <= {"required", "optional"}, name
        inputs = {**types_of["required"], **types_of.get("optional", {})}
        parameters = inspect.signature(getattr(kind, kind.FUNCTION)).parameters
        if name == "KilnSettings":
            continue
        assert set(parameters) - {"self"} == set(inputs), name
        for key in types_of.get("optional", {}):
            assert parameters[key].default is not inspect.Parameter.empty, (name, key)
        assert isinstance(kind.RETURN_TYPES, tuple) and kind.CATEGORY == "Kiln"
        assert len(getattr(kind, "RETURN_NAMES", kind.RETURN_TYPES)) == len(kind.RETURN_TYPES)


def test_an_image_has_the_bytes_of_the_engine():
    image, latent, images, recipe = node("KilnGenerate", model=model(), text=text(), **small(batch_size=2))
    assert tuple(image.shape) == (2, 64, 64, 3) and 0 <= image.min() and image.max() <= 1
    assert latent["samples"].shape[0] == 2 and tuple(latent["samples"].shape[2:]) == (4, 4)
    assert json.loads(recipe)["prompt"] == "a fox"
    saved = node("KilnSaveImage", kiln_images=images, filename_prefix="fox")["ui"]["images"]
    assert [one["filename"] for one in saved] == ["fox_00001_.png", "fox_00002_.png"]
    own = expected(n=2)
    for file, one, pixels in zip(saved, own, image):
        data = (pathlib.Path(PACK_MODULE.comfy.output) / file["filename"]).read_bytes()
        assert data == one.encode("png")
        assert numpy.array_equal((pixels * 255).round().to(dtype=torch.uint8).numpy(), one.numpy())


def test_settings_are_the_fields_that_other_nodes_lack():
    inputs = PACK_MODULE.NODE_CLASS_MAPPINGS["KilnSettings"].INPUT_TYPES()["optional"]
    assert inputs["schedule"][0] == ["default", "shifted", "power"] and inputs["max_tokens"][0] == "INT"
    left = {name: spec[0][0] if isinstance(spec[0], list) else spec[1]["default"] for name, spec in inputs.items()}
    assert node("KilnSettings", **left) == ({},)
    [settings] = node("KilnSettings", **{**left, "schedule": "power", "rho": 1.5, "text_layers": "1, 2"})
    assert settings == {"schedule": "power", "rho": 1.5, "text_layers": [1, 2]}
    [settings] = node("KilnSettings", **{**left, "sigmas": "1, 0.5"})
    _, _, images, _ = node("KilnGenerate", model=model(), text=text(), **small(settings=settings, steps=0))
    assert numpy.array_equal(images[0].numpy(), expected(sigmas=[1, 0.5], steps=None)[0].numpy())


def test_references_inpainting_and_loras_reach_the_request():
    pixels = (sample_image() * 255).round().to(torch.uint8)[0].numpy()
    [references] = node("KilnReference", image=sample_image())
    [references] = node("KilnReference", image=sample_image(), references=references)
    [loras] = node("KilnLora", lora="lora_diffusers.safetensors", weight=0.5)
    _, _, images, _ = node(
        "KilnGenerate", model=model(), text=text(), **small(references=references, loras=loras)
    )
    file = PACK_MODULE.comfy.loras / "lora_diffusers.safetensors"
    [own] = expected(references=[pixels, pixels], loras=[(file, 0.5)])
    assert numpy.array_equal(images[0].numpy(), own.numpy())
    mask = torch.zeros(1, 80, 96)
    mask[:, 16:64, 16:64] = 1
    [init] = node("KilnInpaint", image=sample_image(), strength=0.9, mask_padding=-1, mask=mask)
    _, latent, images, _ = node(
        "KilnGenerate", model=model(), text=text(), **small(init=init, width=0, height=0)
    )
    white = (mask[0] * 255).to(torch.uint8).numpy()
    [own] = expected(init=pixels, mask=white, strength=0.9, width=None, height=None)
    assert numpy.array_equal(images[0].numpy(), own.numpy()) and own.numpy().shape == (80, 96, 3)
    assert tuple(latent["samples"].shape[2:]) == (5, 6)
    two = sample_image().repeat(2, 1, 1, 1)
    raises(ValueError, "batch of 2", lambda: node("KilnInpaint", image=two, strength=1, mask_padding=-1))


def test_progress_previews_and_cancel():
    comfy = PACK_MODULE.comfy
    comfy.updates.clear()
    node("KilnGenerate", model=model(), text=text(), **small(steps=3))
    assert comfy.updates[-1][:2] == (3, 3)
    kind, preview, size = next(update[2] for update in comfy.updates if update[2])
    assert kind == "JPEG" and preview.size[0] > 0 and size == 512
    comfy.cancelled = True
    try:
        raises(Interrupted, "", lambda: node("KilnGenerate", model=model(), text=text(), **small()))
    finally:
        comfy.cancelled = False


def test_latents_are_those_of_comfyui():
    one = model()
    [latent] = node("KilnVAEEncode", model=one, image=sample_image(100, 80).repeat(2, 1, 1, 1))
    samples = latent["samples"]
    assert samples.shape[0] == 2 and tuple(samples.shape[2:]) == (5, 6), samples.shape
    [image] = node("KilnVAEDecode", model=one, latent=latent)
    assert tuple(image.shape) == (2, 80, 96, 3)
    # What was generated is decoded to itself.
    generated, latent, _, _ = node("KilnGenerate", model=one, text=text(), **small())
    [decoded] = node("KilnVAEDecode", model=one, latent=latent)
    assert (decoded - generated).abs().max() <= 1.5 / 255


def test_workflows_run():
    for file in sorted((PACK / "workflows").glob("*.json")):
        graph, done = json.loads(file.read_text()), {}

        def run(key):
            if key not in done:
                kind, inputs = graph[key]["class_type"], dict(graph[key]["inputs"])
                for name, value in inputs.items():
                    if isinstance(value, list):
                        inputs[name] = run(value[0])[value[1]]
                if kind == "LoadImage":
                    mask = torch.zeros(1, 80, 96)
                    mask[:, 16:, 16:] = 1
                    done[key] = (sample_image(), mask)
                elif kind == "SaveImage":
                    done[key] = inputs["images"].shape
                else:
                    if kind == "KilnLoadModel":
                        inputs.update(model=MODEL, device="cpu", dtype="f32")
                    if kind == "KilnGenerate" and "init" not in inputs:
                        inputs.update(width=64, height=64)
                    required = PACK_MODULE.NODE_CLASS_MAPPINGS[kind].INPUT_TYPES()["required"]
                    assert required.keys() <= inputs.keys(), (file.name, kind)
                    done[key] = node(kind, **inputs)
            return done[key]

        for key in graph:
            run(key)


if __name__ == "__main__":
    for name, test in sorted(dict(globals()).items()):
        if name.startswith("test_"):
            test()

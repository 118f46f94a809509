"""info, convert and quantize."""

import os

import kiln
import numpy as np
from common import SMALL, model, path, raises


def test_info_describes_models_files_and_images():
    described = kiln.info(path("klein"))
    assert described["kind"] == "model folder" and described["transformer"]["double_blocks"] == 1
    assert kiln.info("ember")["kind"] == "built-in model"
    [image] = model().generate("a fox", **SMALL)
    image.save("info.png")
    assert kiln.info("info.png")["recipe"]["prompt"] == "a fox"
    raises(kiln.ModelError, "no-such", kiln.info, "no-such")


def test_models_are_quantized_and_converted():
    report = kiln.quantize(path("klein"), "klein-int8", "int8")
    assert report["bytes_after"] < report["bytes_before"]
    [image] = kiln.load("klein-int8", device="cpu").generate("a fox", **SMALL)
    assert image.width == 64
    raises(kiln.ModelError, "exists already", kiln.quantize, path("klein"), "klein-int8", "int8")
    raises(kiln.RequestError, "q4_k_m", kiln.quantize, path("klein"), "other", "q99")
    kiln.convert(path("klein"), "transformer.safetensors", dtype="f32")
    transformer = kiln.load(path("klein"), transformer="transformer.safetensors", device="cpu", dtype="f32")
    [same] = transformer.generate("a fox", **SMALL)
    [plain] = model().generate("a fox", **SMALL)
    assert (np.asarray(same) == np.asarray(plain)).all()
    assert os.path.getsize("transformer.safetensors") > 0
    raises(kiln.RequestError, "part", kiln.convert, path("klein"), "x.safetensors", part="head")

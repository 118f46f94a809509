"""Every case of the golden data, with the arguments that diffusers got: its images within one level."""

import json
import os
import pathlib

import numpy as np
from common import pipeline
from PIL import Image

DATA = pathlib.Path(os.environ["KILN_TESTDATA"])


def texts(reference):
    found = json.loads((reference / "prompts.json").read_text())
    found = found.get("prompts", found)
    return {name: value["prompt"] for name, value in found.items() if isinstance(value, dict) and "prompt" in value}


def safetensors(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = data[8 + length + begin : 8 + length + end]
        if entry["dtype"] == "F32":
            tensors[name] = np.frombuffer(raw, np.float32).reshape(entry["shape"])
        elif entry["dtype"] == "BF16":
            wide = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
            tensors[name] = wide.view(np.float32).reshape(entry["shape"])
    return tensors


def run_case(data, file):
    reference = data / "reference"
    case = json.loads(file.read_text())
    kind, call = case["pipeline"], dict(case["call_kwargs"])
    if call.pop("caption_upsample_temperature", None) is not None:
        return False
    guided = (call.get("guidance_scale") or 0) > 1
    name = case.get("model") or {"Flux2Pipeline": "dev", "Flux2KleinKVPipeline": "klein-kv"}.get(
        kind, "klein-base" if guided else "klein"
    )
    if data.name == "dev":
        name = "dev-text"
    # What only the script that made the data knows.
    known = {
        "height", "width", "num_inference_steps", "sigmas", "guidance_scale", "num_images_per_prompt",
        "max_sequence_length", "strength", "padding_mask_crop",
    }  # fmt: skip
    call = {key: value for key, value in call.items() if key in known and value is not None}
    opened = lambda field: Image.open(reference / field.split()[0]).convert("RGB")
    if case.get("prompts"):
        names = case["prompts"]
        all_texts = texts(reference)
        call["prompt"] = [all_texts[n] for n in names] if isinstance(names, list) else all_texts[names]
    elif case.get("prompt_embeds"):
        _, tensor = case["prompt_embeds"][0].split(": ")
        embeds = safetensors(reference / "prompts.safetensors")[tensor]
        call["prompt_embeds"] = embeds if embeds.ndim == 3 else embeds[None]
    else:
        call["prompt_embeds"] = safetensors(file.with_suffix(".safetensors"))["prompt_embeds"]
    if case.get("negative_prompt") and guided:
        call["negative_prompt"] = texts(reference)[case["negative_prompt"].split()[0]]
    call["generator"] = case["seed"]
    if case.get("reference_images"):
        call["image"] = [opened(field) for field in case["reference_images"]]
    if case.get("source_image"):
        call["image"] = opened(case["source_image"])
        call["mask_image"] = Image.open(reference / case["mask"].split()[0])
        if case.get("image_reference"):
            call["image_reference"] = opened(case["image_reference"])
    pipe = pipeline(kind, name)
    pipe.unload_lora_weights()
    if case.get("lora"):
        loras = case["lora"] if isinstance(case["lora"], list) else [case["lora"]]
        weights = case["lora_weight"] if isinstance(case["lora_weight"], list) else [case["lora_weight"]]
        names = [f"lora{i}" for i in range(len(loras))]
        for lora, adapter in zip(loras, names):
            pipe.load_lora_weights(data / "tiny" / lora, adapter_name=adapter)
        pipe.set_adapters(names, weights)
    images = pipe(**call).images
    assert len(images) == len(case["images"]), file.name
    for image, expected in zip(images, case["images"]):
        expected = np.asarray(Image.open(reference / expected).convert("RGB")).astype(int)
        difference = np.abs(np.asarray(image).astype(int) - expected).max()
        assert difference <= 1, f"{file.name}: {difference} levels"
    return True


def run_set(data):
    done = 0
    for file in sorted((data / "reference").glob("*.json")):
        if file.with_suffix(".safetensors").is_file() and "pipeline" in json.loads(file.read_text()):
            done += run_case(data, file)
    return done


def test_klein_gives_diffusers_images():
    assert run_set(DATA) > 30


def test_dev_gives_diffusers_images():
    assert run_set(DATA / "dev") > 0

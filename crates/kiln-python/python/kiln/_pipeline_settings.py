"""Settings of a pipeline: what diffusers' `from_pretrained` and `to` take, as settings of a model."""

from __future__ import annotations

import os
from typing import Any

DTYPES = {
    "f32": "f32",
    "float32": "f32",
    "torch.float32": "f32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "int8": "int8",
    "fp8": "fp8",
}


def dtype(value: Any) -> str:
    if str(value) not in DTYPES:
        raise NotImplementedError(f"Kiln computes in bf16, f32, int8 or fp8, not in {value}")
    return DTYPES[str(value)]


def device(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"cuda:{value}"
    name = str(value)
    if name not in ("auto", "cpu") and name.split(":")[0] != "cuda":
        raise NotImplementedError(f"Kiln runs on cpu and cuda, not on {name!r}")
    return name


def settings(kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Converts the keywords of `from_pretrained` to settings of a model, and the torch dtype."""
    chosen: dict[str, Any] = {}
    torch_dtype = kwargs.pop("torch_dtype", None)
    torch_dtype = kwargs.pop("dtype", torch_dtype)
    if torch_dtype is not None:
        chosen["dtype"] = dtype(torch_dtype)
    place = kwargs.pop("device", kwargs.pop("device_map", None))
    if place is not None:
        chosen["device"] = device("auto" if place == "balanced" else place)
    for name in ("threads", "vram_limit"):
        if name in kwargs:
            chosen[name] = kwargs.pop(name)
    for name in ("transformer", "text_encoder", "vae", "tokenizer"):
        if name in kwargs:
            path = kwargs.pop(name)
            if not isinstance(path, (str, os.PathLike)):
                raise NotImplementedError(f"{name} must be the path of a file or folder, found {type(path).__name__}")
            chosen[name] = path
    # What Kiln does anyway.
    for name, value in (("use_safetensors", True), ("low_cpu_mem_usage", True), ("local_files_only", True)):
        if kwargs.get(name) == value:
            kwargs.pop(name)
    if kwargs:
        name, value = next(iter(kwargs.items()))
        raise NotImplementedError(f"from_pretrained does not support {name}={value!r}")
    return chosen, torch_dtype

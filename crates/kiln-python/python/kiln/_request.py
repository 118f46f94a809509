"""Requests: keyword arguments as the JSON of a request, and what it refers to."""

from __future__ import annotations

import json
import operator
import os
from typing import Any

from ._inputs import Inputs
from ._kiln import RequestError


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _lora(value: Any) -> dict[str, Any]:
    if isinstance(value, tuple):
        path, weight = value
        return {"name": os.fspath(path), "weight": float(weight)}
    return {"name": os.fspath(value)}


def _plain(value: Any) -> Any:
    """Converts numpy scalars to Python numbers."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"expected a number or a text, found {type(value).__name__}")


FIELDS = frozenset(
    "prompt negative_prompt width height n seed steps guidance references init mask strength mask_padding upscale "
    "tile_size loras lora_partial dora_rule vae sigmas schedule rho rng one_generator max_tokens text_layers cache noise "
    "prompt_embeds negative_prompt_embeds".split()
)


def to_json(fields: dict[str, Any]) -> tuple[str, Inputs]:
    """Converts the fields of a request to JSON, and what it refers to."""
    unknown = fields.keys() - FIELDS
    if unknown:
        raise TypeError(f"unexpected argument {sorted(unknown)[0]!r}; expected {', '.join(sorted(FIELDS))}")
    for name in ("prompt", "negative_prompt"):
        texts = _list(fields.get(name) or "")
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f"{name} must be a text or a list of texts, found {fields[name]!r:.60}")
    inputs = Inputs()
    request = {name: value for name, value in fields.items() if value is not None}
    embeds: dict[str, Any] = {name: request.pop(name) for name in ("prompt_embeds", "negative_prompt_embeds") if name in request}
    if embeds:
        if "prompt_embeds" not in embeds:
            raise RequestError("negative_prompt_embeds needs prompt_embeds")
        if "prompt" in request:
            raise RequestError("prompt and prompt_embeds can't be combined")
        request["embeds"] = inputs.arrays("embeds", embeds)
    noise = request.get("noise")
    if noise is not None and not isinstance(noise, (str, os.PathLike)):
        request["noise"] = inputs.arrays("noise", {"noise": noise})
    if "references" in request:
        request["references"] = [inputs.image(image, "references") for image in _list(request["references"])]
    for name in ("init", "mask"):
        if name in request:
            request[name] = inputs.image(request[name], name)
    if "loras" in request:
        loras = request["loras"] if isinstance(request["loras"], list) else [request["loras"]]
        request["loras"] = [_lora(lora) for lora in loras]
    if "seed" in request:
        request["seed"] = [operator.index(seed) for seed in _list(request["seed"])]
        if not all(0 <= seed < 1 << 64 for seed in request["seed"]):
            raise RequestError(f"seed must be from 0 to 2**64 - 1, found {fields['seed']}")
    for name in ("vae", "noise"):
        if name in request:
            request[name] = os.fspath(request[name])
    for name in ("sigmas", "text_layers"):
        if name in request:
            request[name] = [value for value in request[name]]
    try:
        return json.dumps(request, allow_nan=False, default=_plain), inputs
    except ValueError as error:
        raise RequestError(f"a number of the request is not finite: {error}") from None

"""Requests: keyword arguments as the JSON of a request, and what it refers to."""

from __future__ import annotations

import copy
import inspect
import json
import operator
import os
from typing import Any

from . import _kiln
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


def _fields() -> dict[str, dict[str, Any]]:
    """The arguments of a request, as JSON schemas."""
    fields: dict[str, dict[str, Any]] = json.loads(_kiln.request_fields())
    # A `Model` is the model, an `Image` is saved in any format, and embeddings are arrays.
    for name in ("model", "original_prompt", "embeds", "output_format", "output_compression", "png"):
        del fields[name]
    array = "array `[prompts, tokens, dim]` instead of a"
    fields["prompt_embeds"] = {"description": f"An {array} prompt"}
    fields["negative_prompt_embeds"] = {"description": f"An {array} negative prompt"}
    return fields


FIELDS = _fields()


def request_fields() -> dict[str, dict[str, Any]]:
    """The arguments of `Model.generate` by name, each a JSON schema: `type`, `description`, `enum`, `minimum`, `maximum`."""
    return copy.deepcopy(FIELDS)


def describe(function: Any, fields: dict[str, dict[str, Any]]) -> None:
    """Adds fields to the signature and the documentation of a function that takes them as keywords."""
    signature = inspect.signature(function)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    lines = []
    for name, field in fields.items():
        if name not in signature.parameters:
            own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
            lines.append(f"`{name}`: {' '.join(field['description'].split())}")
    function.__signature__ = signature.replace(parameters=own)
    function.__doc__ = f"{inspect.getdoc(function)}\n\n" + "\n".join(lines) + "\n"


def to_json(fields: dict[str, Any]) -> tuple[str, Inputs]:
    """Converts the fields of a request to JSON, and what it refers to."""
    unknown = fields.keys() - FIELDS.keys()
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
    for name, value in request.items():
        if FIELDS.get(name, {}).get("type") == "array":
            request[name] = [element for element in value]
    try:
        return json.dumps(request, allow_nan=False, default=_plain), inputs
    except ValueError as error:
        raise RequestError(f"a number of the request is not finite: {error}") from None

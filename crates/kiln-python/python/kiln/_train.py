"""Training a LoRA, as `kiln train` does."""

from __future__ import annotations

import json
import os
from typing import Any, Callable, Optional

from . import _kiln
from ._request import _plain, describe


def train(
    data: Any,
    model: Any,
    output: Any,
    *,
    device: str = "auto",
    dtype: str = "auto",
    threads: Optional[int] = None,
    vram_limit: Optional[int] = None,
    progress: Optional[Callable[[dict[str, Any]], Any]] = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains a LoRA on a folder of images with captions (or of edit pairs) and writes it to `output`, a .safetensors file.

    `model` is a base model, such as klein-base-4b. `progress` is called with a dictionary for every step and for what happens in
    between; an exception in it, or Ctrl-C, stops the training after a step, and `resume=True` continues it. Returns a summary.

    Further arguments, those of `kiln train`:
    """
    request = {name: value for name, value in options.items() if value is not None}
    request.update(data=os.fspath(data), model=os.fspath(model), output=os.fspath(output))
    written = _kiln.train(json.dumps(request, default=_value), device, dtype, threads, vram_limit, progress)
    summary: dict[str, Any] = json.loads(written)
    return summary


def _value(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else _plain(value)


describe(train, {name: field for name, field in json.loads(_kiln.train_fields()).items() if name != "name"})

"""Training a LoRA, as `kiln train` does."""

from __future__ import annotations

import json
import os
from typing import Any, Callable, Optional, Union

from . import _kiln


def train(
    data: Any,
    model: Any,
    output: Any,
    *,
    steps: int = 1000,
    rank: int = 16,
    alpha: Optional[float] = None,
    kind: str = "lora",
    targets: Union[str, list[str]] = "full",
    lr: Optional[float] = None,
    optimizer: str = "adamw",
    weight_decay: float = 0.01,
    batch: int = 1,
    accumulate: int = 1,
    resolution: Union[int, list[int], None] = None,
    trigger: Optional[str] = None,
    caption_dropout: Optional[float] = None,
    allow_empty_captions: bool = False,
    seed: int = 0,
    ema_decay: Optional[float] = None,
    checkpointing: Optional[bool] = None,
    save_every: int = 250,
    resume: bool = False,
    overwrite: bool = False,
    names: str = "diffusers",
    save_dtype: str = "bf16",
    distilled_anyway: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    threads: Optional[int] = None,
    vram_limit: Optional[int] = None,
    progress: Optional[Callable[[dict[str, Any]], Any]] = None,
) -> dict[str, Any]:
    """Trains a LoRA on a folder of pictures with captions (or of edit pairs) and writes it to `output`, a .safetensors file.

    `model` is a base model, such as klein-base-4b. `kind` is lora, lokr or dora; `targets` is full, style, identity or a list of
    layers. `progress` is called with a dictionary for every step and for what happens in between; an exception in it, or Ctrl-C,
    stops the training after a step, and `resume=True` continues it. Returns a summary.
    """
    presets = ("full", "style", "identity")
    if isinstance(targets, str):
        targets = [targets]
    preset = len(targets) == 1 and targets[0] in presets
    chosen = {"preset": targets[0]} if preset else {"patterns": list(targets)}
    pictures: dict[str, Any] = {"trigger": trigger, "allow_empty_captions": allow_empty_captions}
    if resolution is not None:
        pictures["resolutions"] = [resolution] if isinstance(resolution, int) else list(resolution)
    if caption_dropout is not None:
        pictures["caption_dropout"] = caption_dropout
    options = {
        "steps": steps,
        "batch": batch,
        "accumulate": accumulate,
        "save_every": save_every,
        "resume": resume,
        "overwrite": overwrite,
        "checkpointing": checkpointing,
        "distilled_anyway": distilled_anyway,
        "names": names,
        "dtype": save_dtype,
        "optimizer": optimizer,
        "weight_decay": weight_decay,
        "lr": lr,
        "data": pictures,
        "settings": {
            "adapter": {"kind": kind, "rank": rank, "alpha": alpha, "targets": chosen},
            "seed": seed,
            "ema_decay": ema_decay,
        },
    }
    written = _kiln.train(
        os.fspath(data),
        os.fspath(model),
        os.fspath(output),
        json.dumps(options),
        device,
        dtype,
        threads,
        vram_limit,
        progress,
    )
    summary: dict[str, Any] = json.loads(written)
    return summary

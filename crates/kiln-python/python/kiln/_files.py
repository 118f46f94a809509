"""Work on files: `pull`, `info`, `convert` and `quantize`, as on the command line."""

from __future__ import annotations

import json
import os
from typing import Any, Callable, Optional

from . import _kiln
from ._progress_bar import download_progress


def pull(
    name: str,
    *,
    accept_license: bool = False,
    progress: Optional[Callable[[str, int, int], Any]] = None,
) -> dict[str, Any]:
    """Downloads a model from Hugging Face into its cache and returns a summary; cached files are not downloaded again.

    `name` is one that `kiln models` knows (`klein-4b`) or `owner/repo`. A licence with conditions must be read and accepted.
    `progress` is called with the file, the bytes so far and the total; an exception in it cancels the download. Without it, a
    terminal shows how far the download is.
    """
    summary: dict[str, Any] = json.loads(_kiln.pull(name, accept_license, progress or download_progress()))
    return summary


def info(path: Any) -> dict[str, Any]:
    """Describes a model, a weight file or an image: a path, or the name of a model."""
    described: dict[str, Any] = json.loads(_kiln.info(os.fspath(path)))
    return described


def verify(file: Any, *, trust: Any = ()) -> dict[str, Any]:
    """Says where an image file comes from: signed credentials (C2PA), AI mark and watermark, with the keys of `kiln verify --json`.

    `file` is a path, or the bytes of a file. `trust` are paths of root certificates (PEM) to trust besides those of C2PA's list
    and one's own. `state` is `trusted`, `valid` (of a signer that is not known here), `invalid`, `none`, or `not_checked` in
    builds that can't check.
    """
    roots = [os.fspath(root) for root in trust]
    if isinstance(file, (bytes, bytearray, memoryview)):
        found = _kiln.verify("image", bytes(file), roots)
    else:
        found = _kiln.verify(os.fspath(file), None, roots)
    report: dict[str, Any] = json.loads(found)
    return report


def quantize(
    model: Any, out: Any, to: str = "int8", *, part: Optional[str] = None, threads: Optional[int] = None
) -> dict[str, Any]:
    """Quantizes a model and returns a report.

    `out` is a new folder for the whole model, or a .safetensors or .gguf file for one component. `to` is int8, fp8, nvfp4 or a
    GGUF type such as q8_0 or q4_k_m. `part` is transformer or text_encoder.
    """
    report: dict[str, Any] = json.loads(_kiln.quantize(os.fspath(model), os.fspath(out), to, part, threads))
    return report


def convert(
    model: Any,
    out: Any,
    *,
    part: Optional[str] = None,
    dtype: Optional[str] = None,
    names: Optional[str] = None,
    shard_size: Optional[int] = None,
    threads: Optional[int] = None,
) -> dict[str, Any]:
    """Writes a component of a model with other tensor names, another type or in another format, and returns a report.

    `out` is a .safetensors or .gguf file, or a new folder. `dtype` is f32, bf16 or f16; `names` is diffusers or original.
    """
    written = _kiln.convert(os.fspath(model), os.fspath(out), part, dtype, names, shard_size, threads)
    report: dict[str, Any] = json.loads(written)
    return report

"""Kiln: text to image with FLUX.2, on a CPU or an NVIDIA GPU.

>>> import kiln
>>> pipe = kiln.Flux2KleinPipeline.from_pretrained("ember")
>>> image = pipe("a red apple on a blue background", generator=7).images[0]

`kiln.load` opens a model for Kiln's own API; the pipelines have the arguments of diffusers'.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any

from . import _kiln
from ._files import convert, info, pull, quantize, verify
from ._image import Image, Note, Preview, Progress
from ._kiln import (
    Cancelled,
    DeviceError,
    KilnError,
    ModelError,
    OutOfMemoryError,
    RequestError,
    Signer,
    __version__,
)
from ._model import Model, load
from ._request import request_fields
from ._step import Step
from ._stream import Stream
from ._train import train

if TYPE_CHECKING:
    from ._pipelines import (
        Flux2KleinInpaintPipeline,
        Flux2KleinKVPipeline,
        Flux2KleinPipeline,
        Flux2Pipeline,
        Flux2PipelineOutput,
    )

__all__ = [
    "Cancelled",
    "DeviceError",
    "Flux2KleinInpaintPipeline",
    "Flux2KleinKVPipeline",
    "Flux2KleinPipeline",
    "Flux2Pipeline",
    "Flux2PipelineOutput",
    "Image",
    "KilnError",
    "Model",
    "ModelError",
    "Note",
    "OutOfMemoryError",
    "Preview",
    "Progress",
    "RequestError",
    "Signer",
    "Step",
    "Stream",
    "__version__",
    "convert",
    "info",
    "load",
    "pull",
    "quantize",
    "request_fields",
    "train",
    "verify",
]

# A job that still runs when the interpreter ends is cancelled.
atexit.register(_kiln.shutdown)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_kiln.after_fork)


def __getattr__(name: str) -> Any:
    # The pipelines are imported on first use, which keeps `import kiln` fast.
    if name.startswith("Flux2") and name in __all__:
        from . import _pipelines

        return getattr(_pipelines, name)
    raise AttributeError(f"module 'kiln' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

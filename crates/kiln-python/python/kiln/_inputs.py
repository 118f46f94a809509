"""Images and arrays as the Rust part takes them: bytes with their size."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ._kiln import RequestError

if TYPE_CHECKING:
    import numpy as np

    NumpyArray = np.ndarray[Any, Any]
    ArrayBytes = tuple[tuple[int, ...], str, bytes]


def numpy_module() -> Any:
    """Returns numpy, which is imported on first use."""
    try:
        import numpy
    except ImportError:
        raise ImportError("this needs numpy: pip install numpy") from None
    return numpy


def torch_module() -> Any:
    """Returns torch if the program has imported it."""
    return sys.modules.get("torch")


def is_torch_tensor(value: Any) -> bool:
    torch = torch_module()
    return torch is not None and isinstance(value, torch.Tensor)


def asarray(value: Any) -> NumpyArray:
    """Returns an array that uses the memory of `value` if it can."""
    array: NumpyArray = numpy_module().asarray(value)
    return array


def stack(arrays: Any) -> NumpyArray:
    """Copies arrays of one shape into one."""
    stacked: NumpyArray = numpy_module().stack([asarray(array) for array in arrays])
    return stacked


def like_program(array: NumpyArray) -> Any:
    """Returns a torch tensor if the program has imported torch, otherwise the array."""
    torch = torch_module()
    return array if torch is None else torch.from_numpy(array)


def to_numpy(value: Any) -> Any:
    """Converts a torch tensor, or what has `__array_interface__`, `__array__` or `__dlpack__`."""
    np = numpy_module()
    if is_torch_tensor(value):
        value = value.detach().cpu()
        if value.is_floating_point():
            value = value.float()
        return np.asarray(value.numpy())
    if not hasattr(value, "__array__") and not hasattr(value, "__array_interface__") and hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    return np.asarray(value)


def array_bytes(value: Any, what: str) -> ArrayBytes:
    """Converts an array of floats to shape, dtype and bytes."""
    array = to_numpy(value)
    if array.dtype.kind != "f":
        raise RequestError(f"{what} must be an array of floats, found {array.dtype}")
    np = numpy_module()
    array = np.ascontiguousarray(array, dtype=np.float32)
    return tuple(array.shape), "float32", array.tobytes()


def tokens_of(latents: Any) -> Any:
    """Converts latents `[images, channels, h, w]` to tokens `[images, h * w, channels]`."""
    array = to_numpy(latents)
    images, channels = array.shape[:2]
    return array.reshape(images, channels, -1).transpose(0, 2, 1)


class Inputs:
    """The images and tensors of a request, by the names that the request gives them."""

    def __init__(self) -> None:
        self.images: dict[str, Any] = {}
        self.tensors: dict[str, dict[str, ArrayBytes]] = {}

    def image(self, value: Any, what: str) -> str:
        """Adds an image and returns its name: a path, or that of an image in memory."""
        if isinstance(value, (str, os.PathLike)):
            return os.fsdecode(value)
        name = f"python:{what}"
        if name in self.images:
            name = f"{name}:{len(self.images)}"
        if isinstance(value, (bytes, bytearray, memoryview)):
            self.images[name] = bytes(value)
        else:
            self.images[name] = pixels(value, what)
        return name

    def arrays(self, name: str, arrays: dict[str, Any]) -> str:
        """Adds tensors under one name and returns it."""
        name = f"python:{name}"
        self.tensors[name] = {key: array_bytes(value, key) for key, value in arrays.items()}
        return name


def is_pil(value: Any) -> bool:
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def pixels(value: Any, what: str) -> tuple[int, int, bytes]:
    """Converts an image to width, height and RGB bytes.

    Arrays are `[height, width, 3]` or `[height, width]`, torch tensors `[3, height, width]`, both also with a first
    dimension of 1; bytes from 0 to 255, or floats from 0 to 1.
    """
    if is_pil(value):
        image = value.convert("RGB")
        return image.width, image.height, image.tobytes()
    if not any(hasattr(value, name) for name in ("__array_interface__", "__array__", "__dlpack__")):
        kind = type(value).__name__
        raise TypeError(f"{what} must be a PIL image, an array, bytes of a file or a path, found {kind}")
    np = numpy_module()
    given = array = to_numpy(value)
    if array.ndim == 4 and array.shape[0] == 1:
        array = array[0]
    if is_torch_tensor(value) and array.ndim == 3:
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3) or 0 in array.shape:
        raise RequestError(f"{what} has shape {list(given.shape)}, expected [height, width, 3]")
    if array.shape[2] == 1:
        array = np.repeat(array, 3, axis=2)
    if array.dtype.kind == "f":
        # NaN fails both comparisons.
        if not ((array >= -1e-3) & (array <= 1.001)).all():
            raise RequestError(f"{what} has values outside of 0 to 1")
        array = (array.clip(0, 1) * 255).round().astype(np.uint8)
    elif array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    elif array.dtype != np.uint8:
        raise RequestError(f"{what} must have bytes or floats, found {array.dtype}")
    return array.shape[1], array.shape[0], np.ascontiguousarray(array).tobytes()

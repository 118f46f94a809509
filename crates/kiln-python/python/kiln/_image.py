"""Generated images, and what a running request reports."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Optional, Union

from ._inputs import asarray
from ._kiln import RequestError, Signer

if TYPE_CHECKING:
    import PIL.Image

    from . import _kiln
    from ._inputs import NumpyArray

# The watermark of images of Kiln, unless another is given: its name in ASCII.
KILN_WATERMARK = "4b494c4e"


class Image:
    """A generated image: pixels, latents and the recipe to generate it again.

    `numpy.asarray(image)` uses its pixels without a copy.
    """

    def __init__(self, image: _kiln.Image) -> None:
        self._image = image
        self._pixels = image.pixels

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._pixels.__array_interface__

    @property
    def height(self) -> int:
        """Height in pixels."""
        return self._pixels.shape[0]

    @property
    def width(self) -> int:
        """Width in pixels."""
        return self._pixels.shape[1]

    @property
    def index(self) -> int:
        """Its index in the request, from 0; images of one prompt are consecutive."""
        return self._image.index

    @property
    def seed(self) -> Optional[int]:
        """Its seed, if its noise was drawn from one."""
        return self._image.seed

    @property
    def steps(self) -> tuple[int, int]:
        """Steps computed, and steps that reused the step cache."""
        return self._image.steps

    @property
    def recipe(self) -> dict[str, Any]:
        """How it was generated."""
        import json

        recipe: dict[str, Any] = json.loads(self._image.recipe)
        return recipe

    def numpy(self) -> NumpyArray:
        """Returns the pixels as a read-only array `[height, width, 3]` of bytes, without a copy."""
        return asarray(self._pixels)

    def latents(self) -> NumpyArray:
        """Returns the final normalized latents as a read-only array `[height/16 * width/16, channels]`, without a copy."""
        return asarray(self._image.latents)

    def pil(self) -> PIL.Image.Image:
        """Returns a PIL image."""
        return pil(self._pixels)

    def encode(
        self,
        format: str = "png",
        *,
        quality: Optional[int] = None,
        small: bool = False,
        recipe: bool = True,
        ai_mark: bool = True,
        sign: Union[bool, Signer] = False,
        watermark: Union[bool, str] = False,
    ) -> bytes:
        """Encodes it as the bytes of a file, with its recipe inside unless `recipe` is false.

        The file is marked as made by a model (IPTC's properties as XMP) unless `ai_mark` is false.

        `sign` adds signed credentials (C2PA): a `Signer`, or True for the key of `kiln credentials new`.

        `watermark` changes the pixels of the file invisibly, so that 32 bits can be read from it after compression, resizing
        and small crops: 8 hexadecimal digits, or True for Kiln's own.

        The bytes are those of the file that the command line writes. `quality` is that of JPEG and WebP, from 0 to 100;
        `small` takes more time for a smaller PNG.
        """
        signer = Signer() if sign is True else sign or None
        payload = KILN_WATERMARK if watermark is True else watermark or None
        return self._image.encode(format, quality, small, recipe, ai_mark, signer, payload)

    def save(
        self,
        path: Any,
        *,
        quality: Optional[int] = None,
        small: bool = False,
        recipe: bool = True,
        ai_mark: bool = True,
        sign: Union[bool, Signer] = False,
        watermark: Union[bool, str] = False,
    ) -> None:
        """Writes it to a .png, .jpg or .webp file, with what `encode` puts into it."""
        name = os.fspath(path)
        extension = os.path.splitext(name)[1].lower().lstrip(".")
        if extension not in ("png", "jpg", "jpeg", "webp"):
            raise RequestError(f"can't write {name!r}: expected a name that ends in .png, .jpg or .webp")
        data = self.encode(
            extension,
            quality=quality,
            small=small,
            recipe=recipe,
            ai_mark=ai_mark,
            sign=sign,
            watermark=watermark,
        )
        with open(name, "wb") as file:
            file.write(data)

    def _repr_png_(self) -> bytes:
        return self.encode("png")

    def __repr__(self) -> str:
        return f"<kiln.Image {self.width}x{self.height}, seed {self.seed}>"


def pil(pixels: _kiln.Array) -> PIL.Image.Image:
    """Converts pixels `[height, width, 3]` to a PIL image."""
    try:
        import PIL.Image
    except ImportError:
        raise ImportError("PIL images need Pillow: pip install pillow") from None
    height, width, _ = pixels.shape
    return PIL.Image.frombytes("RGB", (width, height), pixels.tobytes())


class Progress:
    """Progress of a request: `phase` is load, text, encode, steps, decode or save; `fraction` is of the whole request."""

    def __init__(self, phase: str, image: int, images: int, step: int, steps: int, fraction: float) -> None:
        self.phase = phase
        self.image = image
        self.images = images
        self.step = step
        self.steps = steps
        self.fraction = fraction

    def __repr__(self) -> str:
        return f"<kiln.Progress {self.phase}, step {self.step} of {self.steps}, {self.fraction:.0%}>"


class Preview:
    """A small approximation of the image in progress."""

    def __init__(self, pixels: _kiln.Array) -> None:
        self._pixels = pixels

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._pixels.__array_interface__

    def numpy(self) -> NumpyArray:
        """Returns the pixels as a read-only array `[height, width, 3]` of bytes, without a copy."""
        return asarray(self._pixels)

    def pil(self) -> PIL.Image.Image:
        """Returns a PIL image."""
        return pil(self._pixels)

    def __repr__(self) -> str:
        height, width, _ = self._pixels.shape
        return f"<kiln.Preview {width}x{height}>"


class Note:
    """Something to know: an option without effect, a size that was rounded."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"<kiln.Note {self.text!r}>"

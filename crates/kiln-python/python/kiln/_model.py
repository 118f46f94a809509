"""Kiln's own API: a model, its requests, and what they report."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Callable, Optional

from . import _kiln
from ._image import Image, Note, Preview, Progress
from ._inputs import array_bytes, asarray, pixels, stack, tokens_of
from ._kiln import KilnError, RequestError
from ._request import FIELDS, describe, to_json
from ._step import Step
from ._stream import Stream, event_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ._inputs import NumpyArray
    from ._stream import Event


def load(model: Any = "ember", **settings: Any) -> Model:
    """Opens a model: a folder, a file, a name that `kiln models` lists, or one downloaded from the Hugging Face hub.

    Takes the settings of `Model`. The weights are loaded on first use, or with `Model.load`.
    """
    return Model(model, **settings)


class Model:
    """A model on a device.

    - `device`: "auto" (a GPU that can hold the model, else the CPU), "cpu", "cuda" or "cuda:1".
    - `dtype`: "auto", "f32", "bf16", "int8" or "fp8".
    - `threads`: CPU threads; as many as the machine runs at once if absent.
    - `vram_limit`: maximum GPU memory in bytes; weights that don't fit are streamed.
    - `text_encoder`, `vae`, `tokenizer`, `transformer`: paths of components that replace the model's own.

    A model may be used by several threads, which take turns. It can be pickled and used after a fork: another process opens
    it again.
    """

    def __init__(
        self,
        model: Any = "ember",
        *,
        device: str = "auto",
        dtype: str = "auto",
        threads: Optional[int] = None,
        vram_limit: Optional[int] = None,
        text_encoder: Any = None,
        vae: Any = None,
        tokenizer: Any = None,
        transformer: Any = None,
    ) -> None:
        self._name = os.fspath(model)
        self._settings = {
            "device": device,
            "dtype": dtype,
            "threads": threads,
            "vram_limit": vram_limit,
            "text_encoder": text_encoder,
            "vae": vae,
            "tokenizer": tokenizer,
            "transformer": transformer,
        }
        self._model = _kiln.Model(self._name, **self._settings)
        # The thread whose callback runs: it can't generate meanwhile.
        self._in_callback: Optional[int] = None

    def __reduce__(self) -> Any:
        return _open, (type(self), self._name, self._settings)

    def __repr__(self) -> str:
        info = self.info
        return f"<kiln.Model {info['name']!r}, {info['variant']}>"

    @property
    def info(self) -> dict[str, Any]:
        """Name, path, variant and defaults; once loaded, also device, backend and dtype."""
        return self._model.info

    def load(self) -> Model:
        """Loads the weights now, instead of on first use."""
        self._model.load()
        return self

    def unload(self) -> None:
        """Drops the loaded weights; the next use loads them again."""
        self._model.unload()

    def generate(
        self,
        prompt: Any = None,
        *,
        on_progress: Optional[Callable[[Progress], Any]] = None,
        on_preview: Optional[Callable[[Preview], Any]] = None,
        on_note: Optional[Callable[[Note], Any]] = None,
        on_step_end: Optional[Callable[[Step], Any]] = None,
        **request: Any,
    ) -> list[Image]:
        """Generates images and returns them in order.

        `prompt` is a text, or a list of texts that give an image each. The other arguments are the fields of a request, as in
        `/v1/jobs` and on the command line; they are listed below.

        - Images are PIL images, arrays, bytes of a file or paths.
        - `noise` is a file, or an array `[n, channels, height/16, width/16]`.
        - `loras`: paths, or pairs of a path and a weight.
        - `on_progress`, `on_preview`, `on_note`: called with `Progress`, `Preview` and `Note`.
        - `on_step_end`: called with a `Step`, whose latents it may change, after every step.

        An exception in a callback, and Ctrl-C, cancel the request within a step.

        Fields of a request:
        """
        job = self._start(
            prompt,
            request,
            progress=on_progress is not None or on_note is not None,
            previews=on_preview is not None,
            steps=on_step_end is not None,
        )
        images = []
        try:
            while True:
                message = job.next()
                if message is None:
                    break
                kind, fields = message
                if kind == "image":
                    images.append(Image(fields["image"]))
                    continue
                self._in_callback = threading.get_ident()
                try:
                    if kind == "progress":
                        on_progress and on_progress(Progress(**fields))
                    elif kind == "preview":
                        on_preview and on_preview(Preview(fields["pixels"]))
                    elif kind == "note":
                        on_note and on_note(Note(fields["text"]))
                    elif on_step_end:
                        step = Step(**fields)
                        on_step_end(step)
                        job.reply(step._changed(), step._stop)
                finally:
                    self._in_callback = None
        except BaseException:
            job.close()
            raise
        return sorted(images, key=lambda image: image.index)

    def stream(self, prompt: Any = None, *, previews: bool = False, **request: Any) -> Stream:
        """Generates images and iterates over what happens: `Progress`, `Note`, `Preview` if wanted, and `Image`.

        Takes the arguments of `generate`. Leaving the loop and closing the stream cancels the request.
        """
        return Stream(self._start(prompt, request, progress=True, previews=previews))

    async def generate_async(self, prompt: Any = None, **arguments: Any) -> list[Image]:
        """`generate` without blocking the event loop. Cancelling the task cancels the request within a step.

        Callbacks are called in the event loop's thread, except for `on_step_end`, which needs `generate`.
        """
        callbacks = {name: arguments.pop(name, None) for name in ("on_progress", "on_preview", "on_note")}
        if arguments.pop("on_step_end", None) is not None:
            raise TypeError("generate_async has no on_step_end: call generate in a thread")
        images = []
        async for event in self.stream_async(prompt, previews=callbacks["on_preview"] is not None, **arguments):
            if isinstance(event, Image):
                images.append(event)
                continue
            callback = callbacks[f"on_{type(event).__name__.lower()}"]
            if callback:
                callback(event)
        return sorted(images, key=lambda image: image.index)

    async def stream_async(self, prompt: Any = None, *, previews: bool = False, **request: Any) -> AsyncIterator[Event]:
        """`stream` without blocking the event loop: `async for event in model.stream_async(...)`."""
        import asyncio

        loop = asyncio.get_running_loop()
        job = await loop.run_in_executor(
            None, lambda: self._start(prompt, request, progress=True, previews=previews)
        )
        try:
            while not job.ended:
                message = await loop.run_in_executor(None, job.next, 0.5)
                if message is not None:
                    yield event_of(*message)
        finally:
            job.cancel()

    def encode_prompt(
        self,
        prompt: Any,
        *,
        max_tokens: Optional[int] = None,
        text_layers: Optional[Any] = None,
    ) -> NumpyArray:
        """Encodes prompts to an array `[prompts, tokens, dim]`, as `prompt_embeds` takes it."""
        fields = {"prompt": prompt, "max_tokens": max_tokens, "text_layers": text_layers, "guidance": 1.0, "seed": 0}
        text, inputs = to_json(fields)
        count = 1 if isinstance(prompt, str) else len(prompt)
        arrays = self._model.encode_prompts(text, inputs.images, inputs.tensors)
        return stack(arrays[:count])

    def upsample_prompt(
        self, prompt: Any, *, references: Any = None, temperature: float = 0.15, seed: int = 0
    ) -> list[str]:
        """Rewrites prompts with dev's own language model, which also sees the references."""
        self._check_callback()
        text, inputs = to_json({"prompt": prompt, "references": references, "seed": seed})
        return self._model.upsample_prompts(text, inputs.images, float(temperature))

    def encode_image(self, image: Any) -> NumpyArray:
        """Encodes an image, whose sides must be multiples of 16, to normalized latents `[1, channels, h/16, w/16]`."""
        self._check_callback()
        if isinstance(image, Image):
            image = image.numpy()
        width, height, data = pixels(image, "image")
        tokens = asarray(self._model.encode_image(width, height, data))
        unit = self.info["unit"]
        return tokens.T.reshape(1, -1, height // unit, width // unit)

    def decode_latents(self, latents: Any) -> list[Preview]:
        """Decodes normalized latents `[images, channels, h/16, w/16]` to images without recipes."""
        self._check_callback()
        shape, _, _ = array_bytes(latents, "latents")
        if len(shape) != 4:
            raise RequestError(f"latents have shape {list(shape)}, expected [images, channels, height/16, width/16]")
        decoded = []
        for tokens in tokens_of(latents):
            height, width = (self.info["unit"] * side for side in shape[2:])
            pixels_of = self._model.decode_latents(array_bytes(tokens, "latents"), height, width)
            decoded.append(Preview(pixels_of))
        return decoded

    def _unpack_latents(self, tokens: Any, height: int, width: int) -> NumpyArray:
        latent = asarray(self._model.unpack_latents(array_bytes(tokens, "latents"), height, width))
        return latent.transpose(2, 0, 1)

    def _check_callback(self) -> None:
        if self._in_callback == threading.get_ident():
            raise KilnError("a callback can't use the model that is generating: do it after the request")

    def _plan(self, request: dict[str, Any]) -> dict[str, Any]:
        text, inputs = to_json(request)
        return self._model.plan(text, inputs.images, inputs.tensors)

    def _start(self, prompt: Any, request: dict[str, Any], **wanted: bool) -> _kiln.Job:
        self._check_callback()
        text, inputs = to_json({"prompt": prompt, **request})
        return self._model.start(text, inputs.images, inputs.tensors, **wanted)


def _open(kind: type[Model], name: str, settings: dict[str, Any]) -> Model:
    return kind(name, **settings)


describe(Model.generate, FIELDS)

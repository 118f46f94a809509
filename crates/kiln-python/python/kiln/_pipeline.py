"""What all pipelines share: loading, devices, progress bars, prompts, requests and outputs."""

from __future__ import annotations

import contextlib
import logging
import operator
import threading
from typing import TYPE_CHECKING, Any, Callable, Optional

from ._inputs import asarray, like_program, numpy_module, to_numpy, torch_module
from ._lora import Adapters
from ._model import Model
from ._noise import Noise
from ._pipeline_settings import DTYPES, device, dtype
from ._pipeline_settings import settings as pipeline_settings
from ._progress_bar import progress_bar
from ._step import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("kiln")


class Flux2PipelineOutput:
    """The result of a pipeline: `images` is a list of PIL images, or an array or tensor of images or latents."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __getitem__(self, key: Any) -> Any:
        return self.images if key in (0, "images") else (self.images,)[key]

    def to_tuple(self) -> tuple[Any]:
        """Returns what a pipeline returns with `return_dict=False`."""
        return (self.images,)

    def __repr__(self) -> str:
        return f"Flux2PipelineOutput(images={self.images!r})"


class Pipeline(Adapters):
    """What all pipelines share: loading, LoRAs, devices, progress bars, prompts and outputs."""

    # Variants of models that the pipeline is for, and what to use for others.
    _variants: tuple[str, ...] = ()
    _callback_tensor_inputs = ["latents", "prompt_embeds"]
    # Decides on the noise levels of custom sigmas if no number of steps is given, as in diffusers.
    _steps_of_sigmas = 50
    vae_scale_factor = 8
    default_sample_size = 128
    tokenizer_max_length = 512

    def __init__(self, model: Model, torch_dtype: Any = None) -> None:
        super().__init__()
        variant = model.info["variant"]
        if variant not in self._variants:
            others = [kind.__name__ for kind in _kinds() if variant in kind._variants]
            raise ValueError(
                f"{type(self).__name__} is for {' and '.join(self._variants)} models, {model.info['name']!r} is {variant}: "
                f"use {' or '.join(others)}"
            )
        self.model = model
        self._torch_dtype = torch_dtype
        self._progress_bar_config: dict[str, Any] = {}
        self._interrupt = False
        self._guidance_scale: Optional[float] = None
        self._num_timesteps = 0
        self._current_timestep: Any = None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Opens a model: a folder, a file (safetensors or GGUF), a name, or a model downloaded from the hub.

        `torch_dtype` or `dtype` is "bf16", "f32", "int8", "fp8", `torch.bfloat16` or `torch.float32`; `device`, `threads` and
        `vram_limit` are those of `kiln.Model`. `transformer`, `text_encoder`, `vae` and `tokenizer` are paths of components.
        """
        settings, torch_dtype = pipeline_settings(kwargs)
        return cls(Model(pretrained_model_name_or_path, **settings), torch_dtype)

    @classmethod
    def from_single_file(cls, pretrained_model_link_or_path: Any, **kwargs: Any) -> Any:
        """Opens a model in one file, or a transformer whose other components are found next to it."""
        return cls.from_pretrained(pretrained_model_link_or_path, **kwargs)

    def __reduce__(self) -> Any:
        return _reopen, (type(self), self.model, self._torch_dtype, self._adapters)

    def __getattr__(self, name: str) -> Any:
        if name in ("transformer", "vae", "text_encoder", "tokenizer", "scheduler", "image_processor"):
            raise AttributeError(f"Kiln's pipelines don't have {name!r} as a module: the engine holds it")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moves the pipeline to a device ("cpu", "cuda", "cuda:1", `torch.device`) or to a dtype."""
        settings = dict(self.model._settings)
        given = list(args) + [kwargs.pop(name) for name in ("device", "torch_device", "dtype", "torch_dtype") if name in kwargs]
        kwargs.pop("silence_dtype_warnings", None)
        if kwargs:
            raise TypeError(f"unexpected argument {next(iter(kwargs))!r}")
        for value in given:
            if value is None:
                continue
            if str(value) in DTYPES or str(value).startswith("torch.") and "device" not in type(value).__name__:
                settings["dtype"] = dtype(value)
                self._torch_dtype = value
            else:
                settings["device"] = device(value)
        if settings != self.model._settings:
            self.model = Model(self.model._name, **settings)
        return self

    def enable_model_cpu_offload(self, gpu_id: Optional[int] = None, device: Any = None) -> None:
        """Uses a GPU that can hold a part of the model, and streams the weights that don't fit, as Kiln always does."""
        if device is not None:
            self.to(device)
        elif gpu_id is not None:
            self.to(f"cuda:{operator.index(gpu_id)}")
        else:
            self.to("auto")

    enable_sequential_cpu_offload = enable_model_cpu_offload

    def enable_vae_tiling(self) -> None:
        """Does nothing: Kiln tiles large images by itself."""

    def enable_vae_slicing(self) -> None:
        """Does nothing: Kiln decodes images one by one."""

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Not supported."""
        raise NotImplementedError("Kiln does not save pipelines; `kiln convert` and `kiln quantize` write models")

    @property
    def device(self) -> str:
        """The device: that of the loaded model, else the one asked for."""
        return str(self.model.info["device"] or self.model._settings["device"])

    @property
    def dtype(self) -> str:
        """The precision: that of the loaded model, else the one asked for."""
        return str(self.model.info["dtype"] or self.model._settings["dtype"])

    @property
    def guidance_scale(self) -> Optional[float]:
        """The guidance scale of the current call."""
        return self._guidance_scale

    @property
    def num_timesteps(self) -> int:
        """The number of steps of the current call."""
        return self._num_timesteps

    @property
    def current_timestep(self) -> Any:
        """The timestep of the current step."""
        return self._current_timestep

    @property
    def interrupt(self) -> bool:
        """Whether a callback has set `_interrupt`, which skips the remaining steps."""
        return self._interrupt

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """Sets the arguments of tqdm, such as `disable=True`."""
        self._progress_bar_config = kwargs

    def progress_bar(self, iterable: Any = None, total: Optional[int] = None) -> Any:
        """Returns a progress bar: tqdm's if it is installed."""
        return progress_bar(iterable, total, self._progress_bar_config)

    def encode_prompt(
        self,
        prompt: Any,
        device: Any = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: Any = None,
        max_sequence_length: Optional[int] = None,
        text_encoder_out_layers: Any = None,
    ) -> tuple[Any, Any]:
        """Encodes prompts. Returns embeddings `[prompts * images, tokens, dim]` and text ids `[prompts * images, tokens, 4]`."""
        np = numpy_module()
        if prompt_embeds is None:
            prompt = "" if prompt is None else prompt
            embeds = self.model.encode_prompt(
                prompt, max_tokens=max_sequence_length, text_layers=text_encoder_out_layers
            )
        else:
            embeds = to_numpy(prompt_embeds)
        embeds = np.repeat(embeds, num_images_per_prompt, axis=0)
        ids = np.zeros((*embeds.shape[:2], 4), dtype=np.int64)
        ids[:, :, 3] = np.arange(embeds.shape[1])
        return like_program(embeds), like_program(ids)

    def _check_prompt(self, prompt: Any, prompt_embeds: Any) -> None:
        if prompt is not None and prompt_embeds is not None:
            raise ValueError("give either `prompt` or `prompt_embeds`, not both")
        if prompt is None and prompt_embeds is None:
            raise ValueError("give either `prompt` or `prompt_embeds`")
        if prompt is not None and not isinstance(prompt, (str, list)):
            raise ValueError(f"`prompt` has to be of type `str` or `list` but is {type(prompt)}")

    def _run(
        self,
        request: dict[str, Any],
        *,
        prompt: Any,
        prompt_embeds: Any,
        negative_prompt: Any,
        negative_prompt_embeds: Any,
        num_images_per_prompt: int,
        generator: Any,
        latents: Any,
        num_inference_steps: Optional[int],
        sigmas: Any,
        guidance_scale: Optional[float],
        output_type: Optional[str],
        return_dict: bool,
        attention_kwargs: Any,
        callback: Optional[Callable[..., Any]],
        callback_inputs: list[str],
        max_sequence_length: Optional[int],
        text_layers: Any,
    ) -> Any:
        self._check_prompt(prompt, prompt_embeds)
        if output_type not in ("pil", "np", "latent", "pt"):
            raise ValueError(f"output_type must be pil, np, pt or latent, found {output_type!r}")
        if attention_kwargs:
            raise NotImplementedError("attention_kwargs are not supported; set_adapters sets the weights of LoRAs")
        unknown = [name for name in callback_inputs or [] if name not in self._callback_tensor_inputs]
        if unknown:
            raise ValueError(
                f"`callback_on_step_end_tensor_inputs` has to be in {self._callback_tensor_inputs}, but found {unknown}"
            )
        self._interrupt = False
        self._guidance_scale = guidance_scale
        encode = {"max_sequence_length": max_sequence_length, "text_encoder_out_layers": text_layers}
        guided = self.model.info["variant"] == "base" and (guidance_scale is None or guidance_scale > 1)
        if negative_prompt is not None and negative_prompt_embeds is not None:
            raise ValueError("give either `negative_prompt` or `negative_prompt_embeds`, not both")
        wants_embeds = callback is not None and "prompt_embeds" in callback_inputs
        if prompt_embeds is None and (negative_prompt_embeds is not None or wants_embeds):
            prompt_embeds, _ = self.encode_prompt(prompt, **encode)
            prompt = None
        if prompt_embeds is not None and guided and negative_prompt_embeds is None and negative_prompt is not None:
            negative_prompt_embeds, _ = self.encode_prompt(negative_prompt, **encode)
        if prompt_embeds is not None and negative_prompt is not None:
            negative_prompt = None
        request = dict(
            request,
            prompt=prompt,
            negative_prompt=negative_prompt,
            prompt_embeds=prompt_embeds,
            negative_prompt_embeds=negative_prompt_embeds if prompt_embeds is not None else None,
            n=operator.index(num_images_per_prompt),
            steps=num_inference_steps if num_inference_steps or sigmas is None else self._steps_of_sigmas,
            sigmas=None if sigmas is None else [float(sigma) for sigma in sigmas],
            guidance=guidance_scale,
            max_tokens=max_sequence_length,
            text_layers=text_layers,
            loras=self._active_loras() or None,
        )
        if latents is not None:
            request["noise"] = latents
        else:
            noise = Noise(generator, self._torch_dtype)
            count = (1 if isinstance(prompt, str) else len(prompt if prompt is not None else prompt_embeds)) * request["n"]
            noise.check(count)
            if noise.is_advanced:
                # A generator that has drawn already: torch draws what diffusers would.
                plan = self.model._plan(request)
                request["noise"] = noise.draw((count, *plan["latent"]))
            else:
                request.update(noise.fields())
        job = self.model._start(request.pop("prompt"), request, progress=True, steps=callback is not None)
        plan = job.plan
        for note in plan["notes"]:
            # With sigmas alone, the caller gave no number of steps: a note about it would confuse.
            if num_inference_steps or sigmas is None or "sigmas decide" not in note:
                logger.warning(note)
        self._num_timesteps = plan["steps"]
        if latents is None and not noise.is_advanced:
            noise.advance((plan["images"], *plan["latent"]))
        images = self._collect(job, plan, callback, callback_inputs, prompt_embeds)
        self._current_timestep = None
        result = self._output(images, plan, output_type)
        return Flux2PipelineOutput(result) if return_dict else (result,)

    def _collect(
        self, job: Any, plan: dict[str, Any], callback: Any, callback_inputs: list[str], prompt_embeds: Any
    ) -> list[Any]:
        """Waits for the images of a job, and calls the callback after each step."""
        images: list[Any] = []
        with _closing(job), self.progress_bar(total=plan["steps"]) as bar:
            done = 0
            while True:
                message = job.next()
                if message is None:
                    break
                kind, fields = message
                if kind == "image":
                    images.append(fields["image"])
                elif kind == "progress" and fields["phase"] in ("steps", "decode") and fields["image"] == 0:
                    bar.update(max(fields["step"] - done, 0))
                    done = max(done, fields["step"])
                elif kind == "step":
                    self.model._in_callback = threading.get_ident()
                    try:
                        job.reply(*self._step_end(fields, callback, callback_inputs, prompt_embeds))
                    finally:
                        self.model._in_callback = None
        return sorted(images, key=lambda image: image.index)

    def _step_end(
        self, fields: dict[str, Any], callback: Any, callback_inputs: list[str], prompt_embeds: Any
    ) -> tuple[Any, bool]:
        step = Step(**fields)
        latents = like_program(step.latents)
        timestep: Any = step.sigma * 1000
        torch = torch_module()
        self._current_timestep = timestep = timestep if torch is None else torch.tensor(timestep)
        values = {"latents": latents, "prompt_embeds": prompt_embeds}
        outputs = callback(self, step.step, timestep, {name: values[name] for name in callback_inputs})
        if not isinstance(outputs, dict):
            raise TypeError(f"callback_on_step_end must return its callback_kwargs, a dict, found {type(outputs).__name__}")
        if outputs.get("prompt_embeds", prompt_embeds) is not prompt_embeds:
            raise NotImplementedError("a callback can't change prompt_embeds in Kiln; it can change latents")
        new = outputs.get("latents", latents)
        if new is not latents:
            step.latents = to_numpy(new)
        return step._changed(), self._interrupt

    def _output(self, images: list[Any], plan: dict[str, Any], output_type: Optional[str]) -> Any:
        from ._image import Image

        if output_type == "pil":
            return [Image(image).pil() for image in images]
        if output_type == "latent":
            return like_program(self._latents([asarray(image.latents) for image in images], plan))
        np = numpy_module()
        array = np.stack([asarray(image.pixels) for image in images]).astype(np.float32) / 255
        if output_type == "np":
            return array
        try:
            import torch
        except ImportError:
            raise ImportError("output_type='pt' needs torch: pip install torch") from None
        return torch.from_numpy(array).permute(0, 3, 1, 2)

    def _latents(self, tokens: list[Any], plan: dict[str, Any]) -> Any:
        """The VAE's own latents, `[images, channels/4, height/8, width/8]`."""
        size = plan["height"], plan["width"]
        return numpy_module().stack([self.model._unpack_latents(array, *size) for array in tokens])


def _kinds() -> tuple[Any, ...]:
    from . import _pipelines

    return _pipelines.PIPELINES


def _reopen(kind: Any, model: Model, torch_dtype: Any, adapters: Any) -> Any:
    pipeline = kind(model, torch_dtype)
    pipeline._adapters = adapters
    return pipeline


@contextlib.contextmanager
def _closing(job: Any) -> Iterator[None]:
    """Cancels a job if the block raises."""
    try:
        yield
    except BaseException:
        job.close()
        raise

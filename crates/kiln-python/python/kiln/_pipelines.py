"""Pipelines with the arguments and meanings of diffusers' FLUX.2 pipelines.

What Kiln does not support raises `NotImplementedError`, `TypeError` or `ValueError`; nothing is ignored silently.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

from ._inputs import is_pil, is_torch_tensor, numpy_module
from ._pipeline import Flux2PipelineOutput as Flux2PipelineOutput
from ._pipeline import Pipeline, logger


class Flux2KleinPipeline(Pipeline):
    """Text to image and editing with FLUX.2 [klein], distilled or base."""

    _variants = ("distilled", "base")

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the current call has guidance."""
        return self.model.info["variant"] == "base" and (self._guidance_scale or 0) > 1

    def __call__(
        self,
        image: Any = None,
        prompt: Any = None,
        height: Optional[int] = None,
        width: Optional[int] = None,
        num_inference_steps: Optional[int] = None,
        sigmas: Any = None,
        guidance_scale: Optional[float] = None,
        num_images_per_prompt: int = 1,
        generator: Any = None,
        latents: Any = None,
        prompt_embeds: Any = None,
        negative_prompt_embeds: Any = None,
        output_type: Optional[str] = "pil",
        return_dict: bool = True,
        attention_kwargs: Optional[dict[str, Any]] = None,
        callback_on_step_end: Optional[Callable[..., Any]] = None,
        callback_on_step_end_tensor_inputs: list[str] = ["latents"],
        max_sequence_length: Optional[int] = None,
        text_encoder_out_layers: Any = None,
        negative_prompt: Any = None,
    ) -> Any:
        """Generates images; the arguments are those of diffusers' `Flux2KleinPipeline`.

        Defaults come from the model: its steps, guidance, size and number of tokens. A text as the first argument is the prompt.
        `generator` is a seed, a list of seeds, a `torch.Generator` or a list of them. `negative_prompt` is a text or one for
        each prompt.
        """
        image, prompt = _text_first(image, prompt)
        return self._run(
            {"references": _references(image), "height": height, "width": width},
            prompt=prompt,
            prompt_embeds=prompt_embeds,
            negative_prompt=negative_prompt,
            negative_prompt_embeds=negative_prompt_embeds,
            num_images_per_prompt=num_images_per_prompt,
            generator=generator,
            latents=latents,
            num_inference_steps=num_inference_steps,
            sigmas=sigmas,
            guidance_scale=guidance_scale,
            output_type=output_type,
            return_dict=return_dict,
            attention_kwargs=attention_kwargs,
            callback=callback_on_step_end,
            callback_inputs=callback_on_step_end_tensor_inputs,
            max_sequence_length=max_sequence_length,
            text_layers=text_encoder_out_layers,
        )


class Flux2KleinKVPipeline(Pipeline):
    """Text to image and editing with FLUX.2 [klein] KV, which computes references once."""

    _variants = ("kv",)
    _steps_of_sigmas = 4

    def __call__(
        self,
        image: Any = None,
        prompt: Any = None,
        height: Optional[int] = None,
        width: Optional[int] = None,
        num_inference_steps: Optional[int] = None,
        sigmas: Any = None,
        num_images_per_prompt: int = 1,
        generator: Any = None,
        latents: Any = None,
        prompt_embeds: Any = None,
        output_type: Optional[str] = "pil",
        return_dict: bool = True,
        attention_kwargs: Optional[dict[str, Any]] = None,
        callback_on_step_end: Optional[Callable[..., Any]] = None,
        callback_on_step_end_tensor_inputs: list[str] = ["latents"],
        max_sequence_length: Optional[int] = None,
        text_encoder_out_layers: Any = None,
    ) -> Any:
        """Generates images; the arguments are those of diffusers' `Flux2KleinKVPipeline`."""
        image, prompt = _text_first(image, prompt)
        return self._run(
            {"references": _references(image), "height": height, "width": width},
            prompt=prompt,
            prompt_embeds=prompt_embeds,
            negative_prompt=None,
            negative_prompt_embeds=None,
            num_images_per_prompt=num_images_per_prompt,
            generator=generator,
            latents=latents,
            num_inference_steps=num_inference_steps,
            sigmas=sigmas,
            guidance_scale=None,
            output_type=output_type,
            return_dict=return_dict,
            attention_kwargs=attention_kwargs,
            callback=callback_on_step_end,
            callback_inputs=callback_on_step_end_tensor_inputs,
            max_sequence_length=max_sequence_length,
            text_layers=text_encoder_out_layers,
        )


class Flux2KleinInpaintPipeline(Pipeline):
    """Inpainting with FLUX.2 [klein], distilled or base."""

    _variants = ("distilled", "base")

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the current call has guidance."""
        return self.model.info["variant"] == "base" and (self._guidance_scale or 0) > 1

    def __call__(
        self,
        prompt: Any = None,
        image: Any = None,
        image_reference: Any = None,
        mask_image: Any = None,
        height: Optional[int] = None,
        width: Optional[int] = None,
        padding_mask_crop: Optional[int] = None,
        strength: float = 0.8,
        num_inference_steps: Optional[int] = None,
        sigmas: Any = None,
        guidance_scale: Optional[float] = None,
        num_images_per_prompt: int = 1,
        generator: Any = None,
        latents: Any = None,
        prompt_embeds: Any = None,
        negative_prompt_embeds: Any = None,
        output_type: Optional[str] = "pil",
        return_dict: bool = True,
        attention_kwargs: Optional[dict[str, Any]] = None,
        callback_on_step_end: Optional[Callable[..., Any]] = None,
        callback_on_step_end_tensor_inputs: list[str] = ["latents"],
        max_sequence_length: Optional[int] = None,
        text_encoder_out_layers: Any = None,
        negative_prompt: Any = None,
    ) -> Any:
        """Regenerates the white areas of `mask_image`; the arguments are those of diffusers' `Flux2KleinInpaintPipeline`.

        The image has the size of `image`.
        """
        if image is None:
            raise ValueError("`image` has to be provided for inpainting.")
        if mask_image is None:
            raise ValueError("`mask_image` has to be provided for inpainting.")
        if not 0 < strength <= 1:
            raise ValueError(f"strength must be above 0 and at most 1, found {strength}")
        if padding_mask_crop is not None:
            for name, value in (("image", image), ("mask_image", mask_image)):
                if not is_pil(value):
                    raise ValueError(f"`{name}` must be a PIL image with padding_mask_crop, found {type(value)}")
            if output_type != "pil":
                raise ValueError(f"output_type must be pil with padding_mask_crop, found {output_type!r}")
        if latents is not None and strength < 1:
            raise NotImplementedError("latents need strength=1 here: Kiln adds them to the image as noise")
        if height is not None or width is not None:
            logger.warning("height and width have no effect: an inpainted image has the size of `image`")
        request = {
            "init": _one(image, "image"),
            "mask": _one(mask_image, "mask_image"),
            "references": None if image_reference is None else [_one(image_reference, "image_reference")],
            "strength": float(strength),
            "mask_padding": padding_mask_crop,
        }
        return self._run(
            request,
            prompt=prompt,
            prompt_embeds=prompt_embeds,
            negative_prompt=negative_prompt,
            negative_prompt_embeds=negative_prompt_embeds,
            num_images_per_prompt=num_images_per_prompt,
            generator=generator,
            latents=latents,
            num_inference_steps=num_inference_steps,
            sigmas=sigmas,
            guidance_scale=guidance_scale,
            output_type=output_type,
            return_dict=return_dict,
            attention_kwargs=attention_kwargs,
            callback=callback_on_step_end,
            callback_inputs=callback_on_step_end_tensor_inputs,
            max_sequence_length=max_sequence_length,
            text_layers=text_encoder_out_layers,
        )


class Flux2Pipeline(Pipeline):
    """Text to image and editing with FLUX.2 [dev]."""

    _variants = ("dev",)

    def __call__(
        self,
        image: Any = None,
        prompt: Any = None,
        height: Optional[int] = None,
        width: Optional[int] = None,
        num_inference_steps: Optional[int] = None,
        sigmas: Any = None,
        guidance_scale: Optional[float] = None,
        num_images_per_prompt: int = 1,
        generator: Any = None,
        latents: Any = None,
        prompt_embeds: Any = None,
        output_type: Optional[str] = "pil",
        return_dict: bool = True,
        attention_kwargs: Optional[dict[str, Any]] = None,
        callback_on_step_end: Optional[Callable[..., Any]] = None,
        callback_on_step_end_tensor_inputs: list[str] = ["latents"],
        max_sequence_length: Optional[int] = None,
        text_encoder_out_layers: Any = None,
        caption_upsample_temperature: Optional[float] = None,
    ) -> Any:
        """Generates images; the arguments are those of diffusers' `Flux2Pipeline`."""
        image, prompt = _text_first(image, prompt)
        if caption_upsample_temperature:
            self._check_prompt(prompt, prompt_embeds)
            if prompt is None:
                raise ValueError("caption_upsample_temperature needs `prompt`")
            prompt = self.upsample_prompt(prompt, image, caption_upsample_temperature)
        return self._run(
            {"references": _references(image), "height": height, "width": width},
            prompt=prompt,
            prompt_embeds=prompt_embeds,
            negative_prompt=None,
            negative_prompt_embeds=None,
            num_images_per_prompt=num_images_per_prompt,
            generator=generator,
            latents=latents,
            num_inference_steps=num_inference_steps,
            sigmas=sigmas,
            guidance_scale=guidance_scale,
            output_type=output_type,
            return_dict=return_dict,
            attention_kwargs=attention_kwargs,
            callback=callback_on_step_end,
            callback_inputs=callback_on_step_end_tensor_inputs,
            max_sequence_length=max_sequence_length,
            text_layers=text_encoder_out_layers,
        )

    def upsample_prompt(
        self, prompt: Any, images: Any = None, temperature: float = 0.15, device: Any = None
    ) -> list[str]:
        """Rewrites prompts with the model's own language model, which also sees the images.

        Kiln samples the tokens with its own generator; those of diffusers depend on the state of torch.
        """
        return self.model.upsample_prompt(prompt, references=_references(images), temperature=temperature)

    def _latents(self, tokens: list[Any], plan: dict[str, Any]) -> Any:
        """Normalized latents as tokens, as this pipeline returns them."""
        return numpy_module().stack(tokens)


PIPELINES = (Flux2KleinPipeline, Flux2KleinKVPipeline, Flux2KleinInpaintPipeline, Flux2Pipeline)


def _text_first(image: Any, prompt: Any) -> tuple[Any, Any]:
    """A text in the place of the image is the prompt: `pipe("a fox")`."""
    if prompt is None and (isinstance(image, str) or isinstance(image, list) and image and isinstance(image[0], str)):
        return None, image
    return image, prompt


def _references(image: Any) -> Any:
    if image is None:
        return None
    return image if isinstance(image, list) else [image]


def _one(value: Any, name: str) -> Any:
    """Returns the single image of an argument that may be a batch."""
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise NotImplementedError(f"{name} must be one image, found {len(value)}")
        value = value[0]
    if is_torch_tensor(value) and value.ndim == 4 and value.shape[1] > 3:
        raise NotImplementedError(f"{name} must be an image, latents are not supported")
    return value

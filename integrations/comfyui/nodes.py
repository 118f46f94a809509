"""The nodes: load a model, stack LoRAs, text, references, inpainting, settings, generate, encode, decode, save."""

import json
import os

import kiln

from . import tensors
from .progress import Watcher

try:
    import folder_paths
except ImportError:
    folder_paths = None

CATEGORY = "Kiln"


def _files(kind):
    """The files in one of ComfyUI's folders of models."""
    return folder_paths.get_filename_list(kind) if folder_paths else []


def _path(kind, name):
    """A file in one of ComfyUI's folders of models, or a path."""
    found = folder_paths.get_full_path(kind, name) if folder_paths else None
    return found or name


class LoadModel:
    """Opens a model. Its weights are loaded with the first image and stay loaded."""

    DESCRIPTION = "A FLUX.2 model: ember (built in), a name that `kiln models` lists, a folder, or a file."
    CATEGORY = CATEGORY
    FUNCTION = "load"
    RETURN_TYPES = ("KILN_MODEL",)
    RETURN_NAMES = ("model",)

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": ("STRING", {"default": "ember", "tooltip": "name, folder, or file of diffusion_models"}),
                "device": (["auto", "cpu", "cuda"],),
                "dtype": (["auto", "f32", "bf16", "int8", "fp8"],),
                "vram_limit": (
                    "FLOAT",
                    {"default": 0.0, "min": 0.0, "max": 1024.0, "step": 0.5, "tooltip": "GiB; 0: all that is free"},
                ),
            },
        }

    def load(self, model, device, dtype, vram_limit):
        limit = int(vram_limit * 2**30) or None
        return (kiln.load(_path("diffusion_models", model), device=device, dtype=dtype, vram_limit=limit),)


class Lora:
    """Adds a LoRA to a stack."""

    DESCRIPTION = "A LoRA for Kiln: Generate. Connect several in a row."
    CATEGORY = CATEGORY
    FUNCTION = "add"
    RETURN_TYPES = ("KILN_LORAS",)
    RETURN_NAMES = ("loras",)

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "lora": (_files("loras"),),
                "weight": ("FLOAT", {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.05}),
            },
            "optional": {"loras": ("KILN_LORAS",)},
        }

    def add(self, lora, weight, loras=()):
        return ([*loras, (_path("loras", lora), weight)],)


class Text:
    """The prompt, and what to avoid."""

    CATEGORY = CATEGORY
    FUNCTION = "text"
    RETURN_TYPES = ("KILN_TEXT",)
    RETURN_NAMES = ("text",)

    @classmethod
    def INPUT_TYPES(cls):
        multiline = {"multiline": True, "dynamicPrompts": True}
        return {
            "required": {"prompt": ("STRING", multiline)},
            "optional": {"negative_prompt": ("STRING", {**multiline, "tooltip": "on models with guidance"})},
        }

    def text(self, prompt, negative_prompt=""):
        return ({"prompt": prompt, "negative_prompt": negative_prompt or None},)


class Reference:
    """Adds reference images: each image of the batch is one."""

    DESCRIPTION = "Images to edit or combine as the prompt says. Connect several in a row."
    CATEGORY = CATEGORY
    FUNCTION = "add"
    RETURN_TYPES = ("KILN_REFERENCES",)
    RETURN_NAMES = ("references",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"image": ("IMAGE",)}, "optional": {"references": ("KILN_REFERENCES",)}}

    def add(self, image, references=()):
        return ([*references, *tensors.from_images(image)],)


class Inpaint:
    """An initial image, to start from instead of noise alone; with a mask, only its white area changes."""

    CATEGORY = CATEGORY
    FUNCTION = "inpaint"
    RETURN_TYPES = ("KILN_INIT",)
    RETURN_NAMES = ("init",)

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "image": ("IMAGE",),
                "strength": ("FLOAT", {"default": 0.8, "min": 0.0, "max": 1.0, "step": 0.01}),
                "mask_padding": (
                    "INT",
                    {"default": -1, "min": -1, "max": 4096, "tooltip": "generate only the masked region; -1: the whole"},
                ),
            },
            "optional": {"mask": ("MASK",)},
        }

    def inpaint(self, image, strength, mask_padding, mask=None):
        images = tensors.from_images(image)
        if len(images) != 1:
            raise ValueError(f"the initial image has a batch of {len(images)}, expected one image")
        init = {"init": images[0], "strength": strength}
        if mask is not None:
            init["mask"] = tensors.from_mask(mask)
            if mask_padding >= 0:
                init["mask_padding"] = mask_padding
        return (init,)


class Settings:
    """The other fields of a request: what is left as it is, is left to the model."""

    DESCRIPTION = "Rarely used settings for Kiln: Generate."
    CATEGORY = CATEGORY
    FUNCTION = "settings"
    RETURN_TYPES = ("KILN_SETTINGS",)
    RETURN_NAMES = ("settings",)
    # What other nodes have, and what comes from files.
    LEFT_OUT = frozenset(
        "prompt negative_prompt prompt_embeds negative_prompt_embeds seed width height n steps guidance cache references "
        "init mask strength mask_padding upscale tile_size loras noise".split()
    )

    @classmethod
    def INPUT_TYPES(cls):
        fields = kiln.request_fields()
        return {"required": {}, "optional": {name: _input(fields[name]) for name in fields if name not in cls.LEFT_OUT}}

    def settings(self, **values):
        fields = kiln.request_fields()
        settings = {name: _value(value, fields[name]) for name, value in values.items()}
        return ({name: value for name, value in settings.items() if value is not None},)


def _input(field):
    """The input of a field: -1, an empty text or "default" leave it out."""
    kind, tooltip = _kind(field), " ".join(field["description"].split())
    if "enum" in field:
        return (["default", *field["enum"]], {"tooltip": tooltip})
    if kind == "boolean":
        return ("BOOLEAN", {"default": False, "tooltip": tooltip})
    if kind in ("integer", "number"):
        widget = {"default": -1, "min": -1, "max": field.get("maximum", 2**31), "tooltip": f"{tooltip}; -1: default"}
        return ("INT", widget) if kind == "integer" else ("FLOAT", {**widget, "step": 0.01})
    return ("STRING", {"default": "", "tooltip": tooltip})


def _value(value, field):
    if value in ("default", "") or value is False:
        return None
    kind = _kind(field)
    if kind in ("integer", "number"):
        return None if value < 0 else value
    return json.loads(f"[{value}]") if kind == "array" else value


def _kind(field):
    """The type of a field, without that it may be absent."""
    kind = field.get("type", "string")
    return kind if isinstance(kind, str) else kind[0]


class Generate:
    """Generates images, with a live preview. *Cancel* ends it within a step."""

    CATEGORY = CATEGORY
    FUNCTION = "generate"
    RETURN_TYPES = ("IMAGE", "LATENT", "KILN_IMAGES", "STRING")
    RETURN_NAMES = ("image", "latent", "kiln_images", "recipe")

    @classmethod
    def INPUT_TYPES(cls):
        side = {"default": 0, "min": 0, "max": 16384, "step": 16, "tooltip": "0: the reference's, else the model's"}
        return {
            "required": {
                "model": ("KILN_MODEL",),
                "text": ("KILN_TEXT",),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**64 - 1, "control_after_generate": True}),
                "width": ("INT", side),
                "height": ("INT", side),
                "steps": ("INT", {"default": 0, "min": 0, "max": 1000, "tooltip": "0: the model's"}),
                "guidance": (
                    "FLOAT",
                    {"default": 0.0, "min": 0.0, "max": 100.0, "step": 0.1, "tooltip": "0: the model's"},
                ),
                "batch_size": ("INT", {"default": 1, "min": 1, "max": 64}),
            },
            "optional": {
                "loras": ("KILN_LORAS",),
                "references": ("KILN_REFERENCES",),
                "init": ("KILN_INIT",),
                "settings": ("KILN_SETTINGS",),
                "cache": (
                    "FLOAT",
                    {"default": 0.0, "min": 0.0, "max": 1.0, "step": 0.01, "tooltip": "step cache; 0: off, 0.1 is good"},
                ),
            },
        }

    def generate(
        self, model, text, seed, width, height, steps, guidance, batch_size,
        loras=(), references=(), init=None, settings=None, cache=0.0,
    ):  # fmt: skip
        watcher = Watcher()
        images = model.generate(
            **text,
            **(init or {}),
            **(settings or {}),
            seed=seed,
            width=width or None,
            height=height or None,
            steps=steps or None,
            guidance=guidance or None,
            n=batch_size,
            loras=list(loras) or None,
            references=list(references) or None,
            cache=cache or None,
            on_progress=watcher.progress,
            on_preview=watcher.preview,
        )
        latents = [_latent(image, model.info["unit"]) for image in images]
        # An image that was pasted into a larger one has latents of its region.
        latent = tensors.to_latent([array for array in latents if array.shape == latents[0].shape])
        recipe = json.dumps(images[0].recipe, indent=1)
        return (tensors.to_images(image.numpy() for image in images), latent, images, recipe)


def _latent(image, unit):
    """The final latents of an image as `[channels, height/unit, width/unit]`."""
    tokens = image.latents()
    recipe = image.recipe
    height, width = recipe["height"] // unit, recipe["width"] // unit
    if height * width != tokens.shape[0]:
        raise ValueError(f"{tokens.shape[0]} latent tokens don't fit an image of {recipe['width']}x{recipe['height']}")
    return tokens.T.reshape(tokens.shape[1], height, width)


class VAEEncode:
    """Encodes images to latents, as ComfyUI's own nodes for FLUX.2 use them. Sides are cut to whole tokens."""

    CATEGORY = CATEGORY
    FUNCTION = "encode"
    RETURN_TYPES = ("LATENT",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("KILN_MODEL",), "image": ("IMAGE",)}}

    def encode(self, model, image):
        arrays = []
        for pixels in tensors.from_images(image):
            height, width = (side - side % model.info["unit"] for side in pixels.shape[:2])
            arrays.append(model.encode_image(pixels[:height, :width])[0])
        return (tensors.to_latent(arrays),)


class VAEDecode:
    """Decodes latents of FLUX.2 to images."""

    CATEGORY = CATEGORY
    FUNCTION = "decode"
    RETURN_TYPES = ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("KILN_MODEL",), "latent": ("LATENT",)}}

    def decode(self, model, latent):
        decoded = model.decode_latents(tensors.from_latent(latent))
        return (tensors.to_images(image.numpy() for image in decoded),)


class SaveImage:
    """Saves images with the recipe to generate them again: the files that `kiln generate` writes."""

    CATEGORY = CATEGORY
    FUNCTION = "save"
    RETURN_TYPES = ()
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"kiln_images": ("KILN_IMAGES",), "filename_prefix": ("STRING", {"default": "kiln"})}}

    def save(self, kiln_images, filename_prefix):
        first = kiln_images[0]
        output = folder_paths.get_output_directory()
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, output, first.width, first.height
        )
        saved = []
        for image in kiln_images:
            file = f"{name}_{counter:05}_.png"
            image.save(os.path.join(folder, file))
            saved.append({"filename": file, "subfolder": subfolder, "type": "output"})
            counter += 1
        return {"ui": {"images": saved}}


NODE_CLASS_MAPPINGS = {
    "KilnLoadModel": LoadModel,
    "KilnLora": Lora,
    "KilnText": Text,
    "KilnReference": Reference,
    "KilnInpaint": Inpaint,
    "KilnSettings": Settings,
    "KilnGenerate": Generate,
    "KilnVAEEncode": VAEEncode,
    "KilnVAEDecode": VAEDecode,
    "KilnSaveImage": SaveImage,
}

NODE_DISPLAY_NAME_MAPPINGS = {
    "KilnLoadModel": "Kiln: Load Model",
    "KilnLora": "Kiln: LoRA",
    "KilnText": "Kiln: Text",
    "KilnReference": "Kiln: Reference Images",
    "KilnInpaint": "Kiln: Initial Image and Mask",
    "KilnSettings": "Kiln: Settings",
    "KilnGenerate": "Kiln: Generate",
    "KilnVAEEncode": "Kiln: VAE Encode",
    "KilnVAEDecode": "Kiln: VAE Decode",
    "KilnSaveImage": "Kiln: Save Image with Recipe",
}

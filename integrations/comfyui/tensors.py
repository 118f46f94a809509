"""ComfyUI's tensors and Kiln's arrays.

ComfyUI's images are `[batch, height, width, 3]`, its masks `[batch, height, width]`, floats from 0 to 1; its latents of
FLUX.2 are `[batch, 128, height/16, width/16]`, normalized, which are Kiln's, too.
"""

import numpy
import torch


def to_images(arrays):
    """Converts arrays `[height, width, 3]` of bytes to an image batch. They have one size."""
    arrays = [torch.from_numpy(numpy.array(array)) for array in arrays]
    return torch.stack(arrays).float() / 255.0


def from_images(images):
    """Converts an image batch to arrays `[height, width, 3]` of bytes, without alpha."""
    if images.ndim == 3:
        images = images.unsqueeze(0)
    pixels = (images[..., :3].detach().cpu().float().clamp(0, 1) * 255).round().to(torch.uint8)
    return [image.contiguous().numpy() for image in pixels]


def from_mask(mask):
    """Converts a mask, of which one is used, to an array `[height, width]` of bytes; white is 255."""
    if mask.ndim == 3:
        if mask.shape[0] != 1:
            raise ValueError(f"the mask has a batch of {mask.shape[0]}, expected one mask")
        mask = mask[0]
    return (mask.detach().cpu().float().clamp(0, 1) * 255).round().to(torch.uint8).contiguous().numpy()


def to_latent(arrays):
    """Converts arrays `[channels, height/16, width/16]` to ComfyUI's latents."""
    return {"samples": torch.stack([torch.from_numpy(numpy.array(array, dtype=numpy.float32)) for array in arrays])}


def from_latent(latent):
    """Converts ComfyUI's latents to an array `[images, channels, height/16, width/16]`."""
    samples = latent["samples"]
    if samples.ndim != 4:
        raise ValueError(f"the latents have shape {list(samples.shape)}, expected [images, channels, height/16, width/16]")
    return samples.detach().cpu().float().contiguous().numpy()

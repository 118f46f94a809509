"""Measures how much images change with the seed: six seeds of eight prompts at 256×256, shrunk to 64×64.

The measure is the standard deviation over the seeds, in levels of 255, averaged over pixels and channels: one value per prompt, and their median. `judge.py` prints it.
"""

import statistics

import torch
import torch.nn.functional as F

SEEDS, FIRST = 6, 100
PROMPTS = (
    "a red apple on a white background",
    "a cat face",
    "a house with a tree",
    "a rocket in the night sky",
    "a green frog",
    "a wooden chair",
    "a bowl of soup",
    "a mountain landscape at sunset",
)


def draw(generate):
    """Returns the images `[prompts, seeds, 3, 256, 256]` of a function (prompts, width, height, seed) -> images that draws other noise for each image of a call."""
    return torch.stack([torch.stack(generate([prompt] * SEEDS, 256, 256, FIRST)) for prompt in PROMPTS])


def deviation(images):
    """Returns the median over the prompts, and the value of every prompt."""
    small = F.avg_pool2d(images.flatten(0, 1), 4).unflatten(0, images.shape[:2])
    values = (small.std(1, correction=0).mean((1, 2, 3)) * 255).tolist()
    return statistics.median(values), values

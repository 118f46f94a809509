"""What happens to images on their way, so that gradients pass."""

import math
import random

import torch
import torch.nn.functional as F

from networks import luma, resize

# The tables of JPEG's annex K.
LUMA_TABLE = [
    [16, 11, 10, 16, 24, 40, 51, 61],
    [12, 12, 14, 19, 26, 58, 60, 55],
    [14, 13, 16, 24, 40, 57, 69, 56],
    [14, 17, 22, 29, 51, 87, 80, 62],
    [18, 22, 37, 56, 68, 109, 103, 77],
    [24, 35, 55, 64, 81, 104, 113, 92],
    [49, 64, 78, 87, 103, 121, 120, 101],
    [72, 92, 95, 98, 112, 100, 103, 99],
]
COLOUR_TABLE = [[17, 18, 24, 47], [18, 21, 26, 66], [24, 26, 56, 99], [47, 66, 99, 99]]


def rounded(x):
    """Rounded, with the gradient of what is not."""
    return x + (x.round() - x).detach()


def blur(x, window):
    channels, deviation = x.shape[1], window / 4
    taps = torch.exp(-((torch.arange(window, device=x.device) - window // 2).float() ** 2) / (2 * deviation**2))
    taps = taps / taps.sum()
    reach = window // 2
    across = taps.view(1, 1, 1, window).expand(channels, 1, 1, window)
    x = F.conv2d(F.pad(x, (reach, reach, 0, 0), "reflect"), across, groups=channels)
    return F.conv2d(F.pad(x, (0, 0, reach, reach), "reflect"), across.transpose(2, 3), groups=channels)


def jpeg(x, quality):
    """Baseline JPEG with halved colours."""
    scale = (5000 / quality if quality < 50 else 200 - 2 * quality) / 100
    k = torch.arange(8, device=x.device).float()
    dct = torch.cos((2 * k[None] + 1) * k[:, None] * math.pi / 16) / 2
    dct[0] /= 2**0.5
    colours = torch.full((8, 8), 99.0, device=x.device)
    colours[:4, :4] = torch.tensor(COLOUR_TABLE, device=x.device)

    def plane(p, table):
        table = (table * scale + 0.5).floor().clamp(1, 255)
        n, _, height, width = p.shape
        blocks = p.reshape(n, height // 8, 8, width // 8, 8).transpose(2, 3)
        blocks = rounded(dct @ blocks @ dct.T / table) * table
        return (dct.T @ blocks @ dct).transpose(2, 3).reshape(n, 1, height, width)

    height, width = x.shape[-2:]
    x = F.pad(x, (0, -width % 16, 0, -height % 16), "replicate") * 255
    y = luma(x)
    blue, red = (x[:, 2:] - y) * 0.564, (x[:, :1] - y) * 0.713
    y = plane(y - 128, torch.tensor(LUMA_TABLE, device=x.device).float()) + 128
    blue, red = (
        F.interpolate(plane(F.avg_pool2d(p, 2), colours), scale_factor=2, mode="bilinear") for p in (blue, red)
    )
    x = torch.cat([y + 1.402 * red, y - 0.344 * blue - 0.714 * red, y + 1.772 * blue], 1)
    return rounded(x.clamp(0, 255))[..., :height, :width] / 255


def crop(x, least):
    height, width = x.shape[-2:]
    h, w = (max(8, int(n * random.uniform(least, 1))) for n in (height, width))
    if random.random() < 0.5:
        w = max(8, width * h // height)
    top, left = random.randint(0, height - h), random.randint(0, width - w)
    return x[..., top : top + h, left : left + w]


def rotate(x, degrees):
    a = math.radians(degrees)
    turn = x.new_tensor([[math.cos(a), -math.sin(a), 0], [math.sin(a), math.cos(a), 0]]).expand(len(x), 2, 3)
    grid = F.affine_grid(turn, x.shape, align_corners=False)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def attack(x, hard):
    """Up to four of these, one after the other. `hard`: 0 for hardly any change, 1 for all."""
    chance = random.random
    if chance() < 0.08:
        return x
    if chance() < 0.6:
        x = crop(x, 1 - 0.16 * hard)
    if chance() < 0.4:
        scale = random.uniform(1 - 0.65 * hard, 1.1)
        size = (max(16, int(n * scale)) for n in x.shape[-2:])
        x = resize(x, size, random.choice(["bilinear", "bicubic"])).clamp(0, 1)
    one = chance()
    if one < 0.15:
        x = (x + torch.randn_like(x) * random.uniform(0, 0.03) * hard).clamp(0, 1)
    elif one < 0.25:
        x = blur(x, random.choice([3, 5]))
    elif one < 0.4:
        contrast, shift = random.uniform(-0.25, 0.25) * hard, random.uniform(-0.12, 0.12) * hard
        x = ((x - 0.5) * (1 + contrast) + 0.5 + shift).clamp(0, 1)
    elif one < 0.45:
        x = luma(x).expand_as(x)
    elif one < 0.5:
        x = rotate(x, random.uniform(-2.5, 2.5) * hard)
    if chance() < 0.6:
        x = jpeg(x, int(100 - random.uniform(2, 65) * hard))
    return x

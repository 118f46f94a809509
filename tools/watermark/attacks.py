"""What happens to the luma of images on their way, so that gradients pass."""

import math
import random

import torch
import torch.nn.functional as F

from networks import resize

# That of JPEG's annex K.
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
    """What baseline JPEG does to luma."""
    scale = (5000 / quality if quality < 50 else 200 - 2 * quality) / 100
    k = torch.arange(8, device=x.device).float()
    dct = torch.cos((2 * k[None] + 1) * k[:, None] * math.pi / 16) / 2
    dct[0] /= 2**0.5
    table = (torch.tensor(LUMA_TABLE, device=x.device) * scale + 0.5).floor().clamp(1, 255)
    height, width = x.shape[-2:]
    x = F.pad(x, (0, -width % 8, 0, -height % 8), "replicate") * 255 - 128
    whole = [torch.kron(torch.eye(n // 8, device=x.device), dct) for n in x.shape[-2:]]
    table = table.repeat(x.shape[-2] // 8, x.shape[-1] // 8)
    x = rounded(whole[0] @ x @ whole[1].T / table) * table
    x = whole[0].T @ x @ whole[1] + 128
    return rounded(x.clamp(0, 255))[..., :height, :width] / 255


def crop(x, least):
    """Most pictures cut to a box of their own and enlarged again."""
    n = len(x)
    size = 1 - (1 - least) * torch.rand(n, 2, device=x.device)
    same = torch.rand(n, 1, device=x.device) < 0.5
    size = torch.where(same, size[:, :1], size)
    offset = (torch.rand(n, 2, device=x.device) - 0.5) * (1 - size)
    none = torch.rand(n, 1, device=x.device) < 0.3
    size, offset = torch.where(none, torch.ones_like(size), size), torch.where(none, torch.zeros_like(offset), offset)
    down, across = (cubic(x.shape[2 + i], size[:, i], offset[:, i]) for i in (0, 1))
    return (down[:, None] @ x @ across[:, None].transpose(2, 3)).clamp(0, 1)


def cubic(length, size, offset):
    """Matrices [n, length, length] that enlarge the middle `size` of lines, `offset` off it, as bicubic filters do."""
    k = torch.arange(length, device=size.device)
    at = ((k + 0.5) / length - 0.5) * size[:, None] + offset[:, None] + 0.5
    d = ((at * length - 0.5).clamp(0, length - 1)[:, :, None] - k).abs()
    a = -0.5
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    weights = torch.where(d <= 1, near, torch.where(d < 2, far, torch.zeros_like(d)))
    return weights / weights.sum(2, keepdim=True)


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
    if chance() < 0.8:
        x = crop(x, 1 - 0.14 * hard)
    if chance() < 0.4:
        scale = random.uniform(1 - 0.56 * hard, 1.1)
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
        x = rotate(x, random.uniform(-2.5, 2.5) * hard)
    if chance() < 0.6:
        x = jpeg(x, int(100 - random.uniform(2, 58) * hard))
    return x

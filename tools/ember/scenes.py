"""Renders scene vectors to pixels, on the GPU.

Layout of the 35 numbers: for each of four objects `image (−1: none), hue turn 0..1, effect, scale, x, y, flip`, then
`background kind, rgb, rgb`. `scale` is relative to the shorter side; `x`, `y` are shifts as fractions of width and height. Things in a row along the
longer side are larger by the ratio of the sides.
"""

import torch
import torch.nn.functional as F

from captions import CHECKERS, DIAGONAL, DOTS, OBJECTS, STRIPES, VERTICAL
from groups import LAND, NIGHT, PIXELS, SILHOUETTE

MOST_ROOM = 1.8


def render(pictures, scenes, height, width):
    """`pictures`: uint8 `[n, s, s, 4]`; `scenes`: `[batch, 35]` -> rgb `[batch, 3, height, width]` in 0..1."""
    factor = 2 if min(height, width) < 224 else 1
    h, w = height * factor, width * factor
    canvas = _background(scenes[:, 7 * OBJECTS:], h, w)
    scenes = _fill_row(scenes, w / h)
    for k in range(OBJECTS):
        values = scenes[:, 7 * k:7 * k + 7]
        chosen = (values[:, 0] >= 0).nonzero()[:, 0]
        if len(chosen):
            canvas[chosen] = _paste(canvas[chosen], pictures, values[chosen])
    if factor > 1:
        canvas = F.avg_pool2d(canvas, factor)
    coarse = (scenes[:, 2] == PIXELS).nonzero()[:, 0]
    if len(coarse):
        block = 8 if min(height, width) >= 192 else 4
        canvas[coarse] = F.interpolate(F.avg_pool2d(canvas[coarse], block), scale_factor=float(block), mode="nearest")
    return canvas.clamp(0, 1)


def _fill_row(scenes, ratio):
    """Two things side by side in a wide image, or above each other in a tall one, use its length."""
    if ratio == 1:
        return scenes
    scenes = scenes.clone()
    pair = (scenes[:, 7] >= 0) & (scenes[:, 14] < 0)
    along, across = (4, 5) if ratio > 1 else (5, 4)
    row = pair & (scenes[:, across] == scenes[:, 7 + across]) & (scenes[:, along] != scenes[:, 7 + along])
    room = min(max(ratio, 1 / ratio), MOST_ROOM)
    for k in range(2):
        scenes[:, 7 * k + 3] *= torch.where(row, room, 1.0)
    return scenes


def _background(values, h, w):
    device, batch, short = values.device, len(values), min(h, w)
    y, x = torch.meshgrid(torch.arange(h, device=device) + .5, torch.arange(w, device=device) + .5, indexing="ij")
    kind = values[:, 0].long().view(batch, 1, 1)
    first, second = values[:, 1:4].view(batch, 3, 1, 1), values[:, 4:7].view(batch, 3, 1, 1)
    mix = torch.zeros(batch, h, w, device=device)
    mix = torch.where(kind == VERTICAL, y / h, mix)
    mix = torch.where(kind == DIAGONAL, (x / w + y / h) / 2, mix)
    # pattern cells are square at any aspect ratio
    u, v = x / short, y / short
    mix = torch.where(kind == STRIPES, (u * 6).floor() % 2, mix)
    du, dv = (u * 5 + .5 * ((v * 5).floor() % 2)) % 1 - .5, (v * 5) % 1 - .5
    mix = torch.where(kind == DOTS, torch.sigmoid((.26 - torch.sqrt(du * du + dv * dv)) * 60), mix)
    mix = torch.where(kind == CHECKERS, ((u * 6).floor() + (v * 6).floor()) % 2, mix)
    variation = (values[:, 0] - kind[:, 0, 0]).view(batch, 1, 1)
    hills = .60 + .15 * variation + .05 * torch.sin(6.28 * (x / w + 2 * variation))
    land = (kind == LAND) | (kind == NIGHT)
    mix = torch.where(land, torch.sigmoid((y / h - hills) * short), mix)[:, None]
    ground = first * (1 - mix) + second * mix
    # one star in each cell of the sky, at a place that depends on the cell alone
    cell = (u * 7).floor() * 12.9898 + (v * 7).floor() * 78.233
    place = lambda salt: (torch.sin(cell + salt) * 43758.5453) % 1 * .6 + .2
    far = torch.sqrt(((u * 7) % 1 - place(0)) ** 2 + ((v * 7) % 1 - place(1.7)) ** 2)
    dark = (second.sum(1) > .4) & (y / h > hills)  # no stars in front of the ground; space has none
    star = (torch.sigmoid((.09 - far) * 60) * (kind == NIGHT) * ~dark)[:, None]
    return ground * (1 - star) + star


def _paste(canvas, pictures, values):
    count, _, h, w = canvas.shape
    short = min(h, w)
    image = pictures[values[:, 0].long()].permute(0, 3, 1, 2).float() / 255
    image = torch.cat([image[:, :3] * image[:, 3:], image[:, 3:]], 1)
    matrix = torch.zeros(count, 2, 3, device=canvas.device)
    scale, mirror = values[:, 3], 1 - 2 * values[:, 6]
    matrix[:, 0, 0] = mirror * (w / short) / scale
    matrix[:, 0, 2] = -2 * values[:, 4] * mirror * (w / short) / scale
    matrix[:, 1, 1] = (h / short) / scale
    matrix[:, 1, 2] = -2 * values[:, 5] * (h / short) / scale
    grid = F.affine_grid(matrix, (count, 4, h, w), align_corners=False)
    image = F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    rgb, alpha = image[:, :3], image[:, 3:]
    painted = ((values[:, 1] != 0) | (values[:, 2] != 0)).nonzero()[:, 0]
    if len(painted):
        rgb = rgb.clone()
        rgb[painted] = _turn_hue(rgb[painted], values[painted, 1].view(-1, 1, 1), (values[painted, 2] == 1).float().view(-1, 1, 1, 1))
    rgb = torch.where((values[:, 2] == SILHOUETTE).view(-1, 1, 1, 1), alpha * .07, rgb)
    return canvas * (1 - alpha) + rgb


def _turn_hue(rgb, turn, grey):
    """Rotates the HSV hue (valid for premultiplied colour: a factor changes neither hue nor saturation)."""
    top, which = rgb.max(1)
    chroma = top - rgb.min(1)[0]
    d, (r, g, b) = chroma.clamp_min(1e-6), rgb.unbind(1)
    hue = torch.where(which == 0, ((g - b) / d) % 6, torch.where(which == 1, (b - r) / d + 2, (r - g) / d + 4))
    hue = (hue / 6 + turn) % 1 * 6

    def channel(n):
        k = (n + hue) % 6
        return top - chroma * torch.minimum(k, 4 - k).clamp(0, 1)

    turned = torch.stack([channel(5), channel(3), channel(1)], 1)
    luma = (.3 * rgb[:, :1] + .59 * rgb[:, 1:2] + .11 * rgb[:, 2:3]).expand_as(rgb)
    return turned * (1 - grey) + luma * grey


def textures(count, height, width, device):
    """Random images other than emoji: smooth noise at several scales, waves and hard-edged bands in random colours."""
    out = torch.rand(count, 3, 1, 1, device=device).expand(-1, -1, height, width).clone()
    for cells in (2, 5, 12, 40):
        noise = torch.randn(count, 3, cells, cells, device=device) * torch.rand(count, 1, 1, 1, device=device) * .3
        out += F.interpolate(noise, (height, width), mode="bicubic", align_corners=False)
    y, x = torch.meshgrid(torch.linspace(0, 1, height, device=device), torch.linspace(0, 1, width, device=device), indexing="ij")
    angle, rate = torch.rand(2, count, 1, 1, 1, device=device)
    phase = (x * torch.cos(angle * 6.28) + y * torch.sin(angle * 6.28)) * (2 + rate * 30)
    wave = torch.where(torch.rand(count, 1, 1, 1, device=device) < .5, torch.sin(phase * 6.28), torch.sign(torch.sin(phase * 6.28)))
    out += wave * torch.randn(count, 3, 1, 1, device=device) * .2
    return out.clamp(0, 1)

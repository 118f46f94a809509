"""The networks, and how they see and change pictures: as crates/kiln-nn/src/watermark.rs and crates/kiln-engine/src/watermark.rs."""

import torch
import torch.nn.functional as F
from torch import nn

BITS = 32
SIDE = 256
CARRIERS = 8
WIDTH, DEEP = 64, 128
# Largest change, the root of the mean square in levels; 45.8 dB, and 45.7 after rounding.
LIMIT = 1.3
# How sure the reader must be that there is a watermark, and on average of its bits. Tiled textures have reached 17 and 3.6.
PRESENT, CERTAIN = 8, 4


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.second.weight.data.mul_(0.3)

    def forward(self, x):
        return F.relu(self.second(F.relu(self.first(x))) + x)


class Writer(nn.Module):
    """Luma of 256² in -1 to 1, and bits of -1 and 1, to a pattern of 128²."""

    def __init__(self):
        super().__init__()
        self.message = nn.Linear(BITS, CARRIERS * 32 * 32)
        self.message.weight.data.normal_(0, 0.3)
        self.spread = nn.Conv2d(CARRIERS, 16, 3, padding=1)
        self.input = nn.Conv2d(16 + 16, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.output = nn.Conv2d(WIDTH, 4, 3, padding=1)

    def forward(self, luma, bits):
        carriers = self.message(bits).view(-1, 32, 32, CARRIERS).permute(0, 3, 1, 2)
        carriers = self.spread(F.interpolate(carriers, scale_factor=2, mode="nearest"))
        x = F.relu(self.input(torch.cat([F.pixel_unshuffle(luma, 4), carriers], 1)))
        for block in self.blocks:
            x = block(x)
        return F.pixel_shuffle(self.output(x), 2)


class Reader(nn.Module):
    """Detail of 256² to the logits of the bits and of there being any."""

    def __init__(self):
        super().__init__()
        down = {"stride": 2, "padding": 1}
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(16, WIDTH, 3, padding=1),
                Block(WIDTH),
                Block(WIDTH),
                nn.Conv2d(WIDTH, DEEP, 3, **down),
                Block(DEEP),
                Block(DEEP),
                nn.Conv2d(DEEP, DEEP, 3, **down),
                Block(DEEP),
            ]
        )
        self.output = nn.Linear(DEEP * 16, BITS + 1)

    def forward(self, detail):
        x = F.pixel_unshuffle(detail, 4)
        for layer in self.layers:
            x = layer(x) if isinstance(layer, Block) else F.relu(layer(x))
        return self.output(F.adaptive_avg_pool2d(x, 4).flatten(1).float())


def matrix(size, new, device, mode="bilinear"):
    """What takes lines of `size` pixels to lines of `new`."""
    eye = torch.eye(size, device=device)[None, None]
    return F.interpolate(eye, size=(new, size), mode=mode, antialias=True)[0, 0]


def resize(x, size, mode="bilinear"):
    """As Pillow does it."""
    size = (size, size) if isinstance(size, int) else tuple(size)
    if tuple(x.shape[-2:]) == size:
        return x
    if not x.is_cuda:
        return F.interpolate(x, size=size, mode=mode, antialias=True)
    with torch.autocast("cuda", enabled=False):
        down, across = (matrix(n, new, x.device, mode) for n, new in zip(x.shape[-2:], size))
        return down @ x.float() @ across.T


def luma(x):
    return (x * x.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)


def window_means(y, window):
    y = F.pad(y, (window // 2,) * 4, "replicate")
    return F.avg_pool2d(F.avg_pool2d(y, (1, window), 1), (window, 1), 1)


def strengths(y):
    """How much a pattern of 1 may change each place, in levels: more where the picture is busy."""
    y = y * 255
    variance = window_means((y - window_means(y, 9)) ** 2, 9)
    return F.avg_pool2d((0.8 + 0.25 * variance.clamp_min(0).sqrt()).clamp(max=3.5), 2)


def detail(y):
    """What the reader sees of the luma of 256²: it without its coarse parts, and weaker where it is busy."""
    y = (y - window_means(y, 33)) * 8
    return y.sign() * ((1 + 2 * y.abs()).sqrt() - 1)


def is_present(logits):
    """Which of the reader's answers say that there is a watermark: sure that there is one, and of its bits."""
    return (logits[:, BITS] > PRESENT) & (logits[:, :BITS].abs().mean(1) > CERTAIN)


def watermark(writer, image, bits, limit=LIMIT, strength=1.0):
    """Images in 0 to 1, of any size, with a watermark and rounded to bytes; and their changes in levels."""
    small = luma(resize(image, SIDE))
    pattern = writer(small * 2 - 1, bits).float()
    pattern = pattern / pattern.pow(2).mean((1, 2, 3), keepdim=True).sqrt().clamp_min(1e-4)
    # The strengths depend on the picture alone.
    pattern = 2.5 * torch.tanh(pattern / 2.5) * strengths(small).detach() * strength
    change = F.interpolate(pattern, size=image.shape[-2:], mode="bilinear")
    power = change.pow(2).mean((1, 2, 3), keepdim=True).sqrt()
    change = change * (limit / power.clamp_min(1e-3)).clamp(max=1)
    marked = (image + change / 255).clamp(0, 1)
    # Rounded, with the gradient of what is not.
    return marked + ((marked * 255).round() / 255 - marked).detach(), change


def load(path, device):
    """Both networks of a checkpoint."""
    writer, reader = Writer().to(device), Reader().to(device)
    states = torch.load(path, map_location=device)
    writer.load_state_dict(states["writer"])
    reader.load_state_dict(states["reader"])
    return writer, reader

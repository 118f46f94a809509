"""Pictures that are computed: batches in 0 to 1, with many kinds of edges, textures and plain parts."""

import math
import random

import torch
import torch.nn.functional as F

from attacks import blur


class Canvas:
    """Random numbers and coordinates for a batch of square pictures."""

    def __init__(self, count, size, generator):
        self.count, self.size, self.generator = count, size, generator
        self.device = generator.device
        line = torch.linspace(0, 1, size, device=self.device)
        self.y, self.x = torch.meshgrid(line, line, indexing="ij")

    def uniform(self, channels=1):
        """A number for each picture and channel."""
        return torch.rand(self.count, channels, 1, 1, device=self.device, generator=self.generator)

    def turned(self):
        """Coordinates around a random point, in a random direction."""
        angle = self.uniform() * math.pi
        x, y = self.x - self.uniform(), self.y - self.uniform()
        return x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()

    def fractal(self, least=0.6, more=0.9, channels=3):
        """Noise whose power falls with the frequency, as in clouds or gravel."""
        size = self.size
        f = torch.fft.rfftfreq(size, device=self.device)[None] ** 2
        f = (f + torch.fft.fftfreq(size, device=self.device)[:, None] ** 2).clamp_min(size**-2.0)
        noise = torch.randn(self.count, 3, size, size, device=self.device, generator=self.generator)
        image = torch.fft.irfft2(torch.fft.rfft2(noise) * f ** -(least + self.uniform() * more), s=(size, size))
        mix = torch.rand(self.count, 3, 3, device=self.device, generator=self.generator)
        image = torch.einsum("nij,njhw->nihw", mix + 0.4 * torch.eye(3, device=self.device), image)
        image = (image - image.mean((2, 3), keepdim=True)) / image.std((1, 2, 3), keepdim=True).clamp_min(1e-6)
        image = (0.5 + image * (0.05 + 0.25 * self.uniform()) + (self.uniform(3) - 0.5) * 0.6).clamp(0, 1)
        return image if channels == 3 else image.mean(1, keepdim=True)


def leaves(c):
    """Discs, boxes and bands that cover one another, some with gradients and textures."""
    image = c.fractal() if random.random() < 0.5 else c.uniform(3).expand(-1, 3, c.size, c.size).clone()
    smallest = random.choice([0.005, 0.02, 0.06])
    for _ in range(random.choice([5, 20, 60, 120])):
        u, v = c.turned()
        radius = smallest * (0.5 / smallest) ** (c.uniform() ** 1.7)
        stretched, kind = v * (0.3 + c.uniform() * 1.4), c.uniform()
        round_or_box = torch.where(kind < 0.5, (u * u + stretched**2).sqrt(), torch.maximum(u.abs(), stretched.abs()))
        distance = torch.where(kind < 0.8, round_or_box, v.abs() * 4)
        cover = ((radius - distance) * c.size * (0.3 + c.uniform() * 1.5)).clamp(0, 1)
        gradient = (c.uniform(3) - 0.5) * u / radius.clamp_min(0.05)
        wave = torch.sin(u * 6 * 10 ** (c.uniform() * 2) + v * 20 * c.uniform())
        texture = wave * (c.uniform() - 0.6).clamp_min(0) * 0.6
        image = image * (1 - cover) + (c.uniform(3) + gradient * 0.5 + texture).clamp(0, 1) * cover
    if random.random() < 0.5:
        grain = torch.rand(image.shape, device=c.device, generator=c.generator)
        image = image + (grain - 0.5) * c.uniform() ** 3 * 0.25
    if random.random() < 0.4:
        image = image + (c.fractal() - 0.5) * c.uniform() * 0.6
    if random.random() < 0.3:
        image = blur(image, random.choice([3, 5, 7, 9]))
    return (0.5 + (image - 0.5) * (0.3 + c.uniform() * 0.9) + (c.uniform() - 0.5) * 0.4).clamp(0, 1)


def drawing(c):
    """Flat shapes, sharp edges and lines of writing on a plain ground, often white or black."""
    kind, colour = c.uniform(), c.uniform(3)
    plain = torch.where(kind < 0.4, torch.ones_like(colour), torch.where(kind < 0.55, torch.zeros_like(colour), colour))
    image = plain.expand(-1, 3, c.size, c.size).clone()
    if random.random() < 0.3:
        image = image + (c.uniform(3) - 0.5) * (c.y - 0.5) * c.uniform()
    for _ in range(random.choice([1, 3, 8, 25])):
        u, v = c.turned()
        radius, kind = 0.01 + 0.3 * c.uniform() ** 2, c.uniform()
        stretched, round_ = v * (0.2 + c.uniform() * 2), (u * u + v * v).sqrt()
        shape = torch.where(kind < 0.4, (u * u + stretched**2).sqrt(), torch.maximum(u.abs(), stretched.abs()))
        distance = torch.where(kind < 0.8, shape, (round_ - radius * 0.8).abs() * 8)
        cover = ((radius - distance) * c.size * 1.5).clamp(0, 1)
        colour = c.uniform(3)
        colour = torch.where(c.uniform() < 0.3, colour.round(), colour)
        shade = (c.uniform() - 0.5) * c.uniform().round() * u / radius
        image = image * (1 - cover) + (colour + shade).clamp(0, 1) * cover
    if random.random() < 0.4:
        image = writing(c, image)
    return image.clamp(0, 1)


def writing(c, image):
    """Rows of random strokes within words."""
    cell, size = random.choice([2, 3, 4, 6]), c.size

    def random_cells(height, width):
        return torch.rand(c.count, 1, height, width, device=c.device, generator=c.generator)

    strokes = (random_cells(size // cell // 2 + 1, size // cell + 1) < 0.5).float()
    strokes = F.interpolate(strokes, scale_factor=(2 * cell, cell), mode="nearest")[..., :size, :size]
    words = F.interpolate(random_cells(1, size // (6 * cell) + 1), size=(1, size)) < 0.75
    rows = (c.y * size / (5 * cell)) % 1 < 0.55
    area = (c.y > c.uniform() * 0.8) & (c.x > c.uniform() * 0.7)
    return image + (c.uniform(3).round() - image) * strokes * words * rows * area


def texture(c):
    """Gravel, stripes and grids, with hard contrast."""
    kind = random.random()
    if kind < 0.35:
        t = c.fractal(0.15, 0.7, channels=1)
        t = (t - t.mean((2, 3), keepdim=True)) / t.std((2, 3), keepdim=True).clamp_min(1e-6)
        t = torch.sigmoid(t * (0.5 + c.uniform() * 4))
    elif kind < 0.8:
        warp, angle = c.fractal(1.3, 0.5, channels=1) * 2 * c.uniform(), c.uniform() * math.pi
        phase = c.x * angle.cos() + c.y * angle.sin() * (1 + c.uniform()) + warp
        t = torch.sin(phase * 2 * math.pi * 10 ** (0.5 + c.uniform() * 1.4))
        t = torch.sigmoid(t * 10 ** (c.uniform() * 1.5) + (c.uniform() - 0.5) * 2)
    else:
        per_side = 8 + c.uniform() * 50
        u, v = (c.x * per_side) % 1 - 0.5, (c.y * per_side * (0.6 + c.uniform())) % 1 - 0.5
        t = ((c.uniform() * 0.5 - (u * u + v * v).sqrt()) * c.size / per_side * 1.5).clamp(0, 1)
        t = t * (c.fractal(0.5, 0.5, channels=1) * 2 - 0.5).clamp(0, 1)
    one, other = c.uniform(3), c.uniform(3)
    grey = c.uniform() < 0.3
    one = torch.where(grey, c.uniform().round(), one)
    other = torch.where(grey, 1 - one, other)
    return (one * t + other * (1 - t) + (c.fractal() - 0.5) * c.uniform() * 0.4).clamp(0, 1)


def pictures(count, size, generator):
    """A batch of one kind, chosen at random."""
    c, kind = Canvas(count, size, generator), random.random()
    if kind < 0.3:
        image = texture(c)
        if random.random() < 0.4:
            mask = (blur(c.fractal(0.8, 0.6, channels=1), 33) > 0.5).float()
            image = image * mask + random.choice([leaves, texture])(c) * (1 - mask)
        return image
    if kind < 0.5:
        image = drawing(c)
        return (image + (c.fractal() - 0.5) * 0.3).clamp(0, 1) if random.random() < 0.2 else image
    image = leaves(c)
    if kind < 0.65:
        # Burnt out or black in parts, as photographs often are.
        return (0.5 + (image - 0.5) * random.uniform(1.2, 3) + random.uniform(-0.4, 0.4)).clamp(0, 1)
    if kind < 0.75:
        # A thing cut out on white or black.
        mask = (blur(c.fractal(channels=1), 33) > 0.5 + random.uniform(-0.05, 0.05)).float()
        return image * mask + random.choice([0.0, 1.0, 1.0]) * (1 - mask)
    return image

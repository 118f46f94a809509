"""A critic that tells real images or latents from generated ones, and how its gradient is mixed with that of a regression.

A regression draws what it is unsure of as the mean of what it may be, which is soft. The critic's part of the gradient is kept at a fixed ratio to the
regression's, so neither has to be weighted by hand, and the image stays the one that was asked for.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

RATE, SMOOTH, SMOOTH_WEIGHT = 4e-4, .1, 10.0


class Critic(nn.Module):
    """Patches `[batch, channels, h, w]` -> one score per patch. `widths`: channels of the layers; `strides`: their steps."""

    def __init__(self, channels, widths, strides, device):
        super().__init__()
        layers, inner = [], channels
        for width, stride in zip(widths, strides):
            layers += [nn.Conv2d(inner, width, 3, stride, 1), nn.GroupNorm(8, width), nn.LeakyReLU(.2)]
            inner = width
        self.body = nn.Sequential(*layers, nn.Conv2d(inner, 1, 3, 1, 1))
        self.to(device)
        if device == "cuda":
            self.to(memory_format=torch.channels_last)
        cuda = device == "cuda"
        self.optimiser = torch.optim.AdamW(self.parameters(), lr=RATE, betas=(0.0, .99), weight_decay=0.0, fused=cuda, capturable=cuda)
        for p in self.parameters():
            p.grad = torch.zeros_like(p)

    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
            return self.body(x).float()

    def learn(self, real, fake):
        """One step: the real one of each pair should score higher. The scores must not change with a little noise, which keeps the critic's slope small."""
        real, fake = real.detach(), fake.detach()
        torch._foreach_zero_([p.grad for p in self.parameters()])
        near = lambda x: x + SMOOTH * torch.randn_like(x)
        scores = self(torch.cat([real, fake, near(real), near(fake)]))
        real_score, fake_score, near_real, near_fake = scores.chunk(4)
        steep = (real_score - near_real).square().mean() + (fake_score - near_fake).square().mean()
        (F.softplus(fake_score - real_score).mean() + SMOOTH_WEIGHT * steep).backward()
        self.optimiser.step()
        return (real_score > fake_score).float().mean().detach()

    def gradient(self, real, fake):
        """Returns how `fake` should change to score like `real`."""
        fake = fake.detach().requires_grad_(True)
        loss = F.softplus(self(real.detach()).detach() - self(fake)).mean()
        return torch.autograd.grad(loss, fake)[0].float()


def mixed(regression, critic, share):
    """Returns the sum of both gradients, the critic's brought to `share` of the other's length."""
    return regression + critic * (share * regression.norm() / critic.norm().clamp_min(1e-20))


def for_latents(device):
    return Critic(32, (128, 192, 256, 256), (1, 2, 2, 1), device)


def for_pixels(device):
    return Critic(3, (32, 64, 128, 192), (2, 2, 2, 1), device)

"""AutoencoderKLFlux2 with small channels, and its training.

Parameter names and arithmetic are those of diffusers' class, so `state_dict()` is the checkpoint (`check.py` compares the two).
Images are in −1..1; `latents` returns latents patchified 2×2 and normalised by the batch-norm statistics.
"""

import copy
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import critic
from config import VAE

BATCH_NORM_EPS = 1e-4
LATENT_NOISE = 0.4  # highest level, latents having variance 1
POLISH_NOISE = 0.2
SPREAD_WEIGHT = 0.01
POLISH_CRITIC_FROM, POLISH_CRITIC = .2, .4


def norm_silu(x, weight, bias, groups: int):
    """Group norm and SiLU in one kernel once compiled; statistics in f32."""
    b, c, h, w = x.shape
    y = x.float().reshape(b, groups, c // groups, h, w)
    mean = y.mean((2, 3, 4), keepdim=True)
    var = (y - mean).square().mean((2, 3, 4), keepdim=True)
    y = ((y - mean) * torch.rsqrt(var + 1e-6)).reshape(b, c, h, w)
    return F.silu(y * weight.float()[None, :, None, None] + bias.float()[None, :, None, None]).to(x.dtype)


KERNELS = {"norm_silu": norm_silu}


def native_norm_silu(x, weight, bias, groups: int):
    """The same without compiling, for short runs."""
    return F.silu(F.group_norm(x, groups, weight.to(x.dtype), bias.to(x.dtype), 1e-6))


def enable_native():
    KERNELS["norm_silu"] = native_norm_silu


def enable_compile():
    KERNELS["norm_silu"] = torch.compile(norm_silu, dynamic=True)


class Norm(nn.GroupNorm):
    def forward(self, x):
        return KERNELS["norm_silu"](x, self.weight, self.bias, self.num_groups)


class Conv(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight.to(x.dtype), self.bias.to(x.dtype), self.stride, self.padding)


def conv3(i, o, stride=1, padding=1):
    return Conv(i, o, 3, stride, padding)


class Resnet(nn.Module):
    def __init__(self, i, o, groups):
        super().__init__()
        self.norm1, self.conv1 = Norm(groups, i, 1e-6), conv3(i, o)
        self.norm2, self.conv2 = Norm(groups, o, 1e-6), conv3(o, o)
        if i != o:
            self.conv_shortcut = Conv(i, o, 1)
        with torch.no_grad():
            self.conv2.weight.mul_(0.2)

    def forward(self, x):
        h = self.conv2(self.norm2(self.conv1(self.norm1(x))))
        return (self.conv_shortcut(x) if hasattr(self, "conv_shortcut") else x) + h


class Attention(nn.Module):
    def __init__(self, dim, groups):
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, dim, 1e-6)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])

    def forward(self, x):
        b, c, h, w = x.shape
        y = self.group_norm(x.float()).to(x.dtype).flatten(2).transpose(1, 2)
        lin = lambda m, t: F.linear(t, m.weight.to(t.dtype), m.bias.to(t.dtype))
        q, k, v = (lin(m, y)[:, None] for m in (self.to_q, self.to_k, self.to_v))
        y = lin(self.to_out[0], F.scaled_dot_product_attention(q, k, v)[:, 0])
        return x + y.transpose(1, 2).reshape(b, c, h, w)


class Mid(nn.Module):
    def __init__(self, dim, groups):
        super().__init__()
        self.resnets = nn.ModuleList([Resnet(dim, dim, groups), Resnet(dim, dim, groups)])
        self.attentions = nn.ModuleList([Attention(dim, groups)])

    def forward(self, x):
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Down(nn.Module):
    def __init__(self, i, o, layers, groups, last):
        super().__init__()
        self.resnets = nn.ModuleList(Resnet(i if k == 0 else o, o, groups) for k in range(layers))
        if not last:
            self.downsamplers = nn.ModuleList([nn.ModuleDict({"conv": conv3(o, o, 2, 0)})])

    def forward(self, x):
        for block in self.resnets:
            x = block(x)
        return self.downsamplers[0]["conv"](F.pad(x, (0, 1, 0, 1))) if hasattr(self, "downsamplers") else x


class Up(nn.Module):
    def __init__(self, i, o, layers, groups, last):
        super().__init__()
        self.resnets = nn.ModuleList(Resnet(i if k == 0 else o, o, groups) for k in range(layers + 1))
        if not last:
            self.upsamplers = nn.ModuleList([nn.ModuleDict({"conv": conv3(o, o)})])

    def forward(self, x):
        for block in self.resnets:
            x = block(x)
        return self.upsamplers[0]["conv"](F.interpolate(x, scale_factor=2.0, mode="nearest")) if hasattr(self, "upsamplers") else x


class Encoder(nn.Module):
    def __init__(self, channels, layers, groups, latent):
        super().__init__()
        self.conv_in = conv3(3, channels[0])
        self.down_blocks = nn.ModuleList(
            Down(channels[max(k - 1, 0)], c, layers, groups, k == len(channels) - 1) for k, c in enumerate(channels))
        self.mid_block = Mid(channels[-1], groups)
        self.conv_norm_out = Norm(groups, channels[-1], 1e-6)
        self.conv_out = conv3(channels[-1], 2 * latent)

    def forward(self, x):
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(self.conv_norm_out(self.mid_block(x)))


class Decoder(nn.Module):
    def __init__(self, channels, layers, groups, latent):
        super().__init__()
        channels = channels[::-1]
        self.conv_in = conv3(latent, channels[0])
        self.mid_block = Mid(channels[0], groups)
        self.up_blocks = nn.ModuleList(
            Up(channels[max(k - 1, 0)], c, layers, groups, k == len(channels) - 1) for k, c in enumerate(channels))
        self.conv_norm_out = Norm(groups, channels[-1], 1e-6)
        self.conv_out = conv3(channels[-1], 3)

    def forward(self, x):
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(self.conv_norm_out(x))


def patchify(z):
    b, c, h, w = z.shape
    return z.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, c * 4, h // 2, w // 2)


def unpatchify(z):
    b, c, h, w = z.shape
    return z.reshape(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, h * 2, w * 2)


class Autoencoder(nn.Module):
    def __init__(self, channels=VAE["channels"], layers=VAE["layers"], groups=VAE["groups"], latent=VAE["latent"]):
        super().__init__()
        self.encoder, self.decoder = Encoder(channels, layers, groups, latent), Decoder(channels, layers, groups, latent)
        self.quant_conv, self.post_quant_conv = Conv(2 * latent, 2 * latent, 1), Conv(latent, latent, 1)
        self.bn = nn.BatchNorm2d(4 * latent, eps=BATCH_NORM_EPS, momentum=0.1, affine=False)

    def moments(self, x):
        mean, logvar = self.quant_conv(self.encoder(x)).float().chunk(2, 1)
        return mean, logvar

    def decode_raw(self, z):
        return self.decoder(self.post_quant_conv(z))

    def _scale(self):
        return self.bn.running_mean.view(1, -1, 1, 1), torch.sqrt(self.bn.running_var + BATCH_NORM_EPS).view(1, -1, 1, 1)

    def latents(self, rgb, dtype):
        """rgb 0..1 -> tokens `[batch, h·w, 128]` f32, normalised: the transformer's input."""
        x = (rgb * 2 - 1).to(dtype)
        if x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        mean, std = self._scale()
        return ((patchify(self.moments(x)[0]) - mean) / std).flatten(2).transpose(1, 2)

    def pixels(self, tokens, h, w, dtype):
        """Tokens back to rgb 0..1; `h`, `w` in tokens."""
        mean, std = self._scale()
        z = unpatchify(tokens.float().transpose(1, 2).reshape(-1, 128, h, w) * std + mean).to(dtype)
        if z.is_cuda:
            z = z.contiguous(memory_format=torch.channels_last)
        return (self.decode_raw(z).float() / 2 + .5).clamp(0, 1)


def psnr(a, b):
    """Peak signal-to-noise ratio after 8-bit rounding, averaged over images."""
    a, b = ((t * 255).round() / 255 for t in (a, b))
    return (-10 * torch.log10((a - b).square().flatten(1).mean(1).clamp_min(1e-10))).mean().item()


def edges(x):
    return x[..., 1:, :] - x[..., :-1, :], x[..., :, 1:] - x[..., :, :-1]


def reconstruction_loss(out, x):
    """L1 with a squared term for flat areas, and gradients at three scales, which keep edges sharp without a learned metric."""
    loss = (out - x).abs().mean() + 2 * (out - x).square().mean()
    for _ in range(3):
        loss = loss + .25 * sum((a - b).abs().mean() for a, b in zip(edges(out), edges(x)))
        out, x = F.avg_pool2d(out, 2), F.avg_pool2d(x, 2)
    return loss


def spread_penalty(mean):
    """Distance of the latent channels from uncorrelated with mean 0 and variance 1: fixes the power that the noise competes with."""
    values = mean.permute(0, 2, 3, 1).flatten(0, 2)
    centre = values.mean(0)
    values = values - centre
    covariance = values.T @ values / len(values)
    return centre.square().mean() + (covariance - torch.eye(len(covariance), device=mean.device)).square().sum() / len(covariance)


def noised(z, most):
    """Adds noise to `z`, with a level between 0 and `most` per image."""
    level = torch.rand(len(z), 1, 1, 1, device=z.device) * most
    return z + level * torch.randn_like(z)


def train(model, draw, device, dtype, seconds, used, log, rate=1.5e-3, max_steps=10**9, sizes=((128, 128), (256, 32))):
    """Trains the autoencoder. `draw(size, count)` returns rgb 0..1; `used` of the `seconds` were spent before. Returns the averaged model, without statistics."""
    if device == "cuda":
        model = model.to(memory_format=torch.channels_last)
    average = copy.deepcopy(model).requires_grad_(False)
    params, averaged = list(model.parameters()), list(average.parameters())
    optimiser = torch.optim.AdamW(params, lr=rate, betas=(.9, .99), weight_decay=0.0, fused=device == "cuda")
    begin, step, seen = time.time(), 0, 0
    while step < max_steps:
        done = (used + time.time() - begin) / seconds
        if done >= 1:
            break
        size, count = sizes[1] if step % 4 == 3 or (done > .7 and step % 2) else sizes[0]
        with torch.no_grad():
            x = draw(size, count) * 2 - 1
            x = x.contiguous(memory_format=torch.channels_last) if device == "cuda" else x
        mean = model.moments(x.to(dtype))[0]
        spread = spread_penalty(mean)
        z = noised(mean, LATENT_NOISE)
        if step % 5 == 4:
            # A downscaled latent must decode to the downscaled image: keeps the latents smooth, which a flow learns faster.
            z, x = F.avg_pool2d(z, 2), F.avg_pool2d(x, 2)
        out = model.decode_raw(z.to(dtype)).float()
        loss = reconstruction_loss(out, x) + SPREAD_WEIGHT * spread
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 100) * (.5 * (1 + math.cos(math.pi * min(done, 1))) + .005)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(averaged, params, 1 - min(.998, (step + 1) / (step + 10)))
        step, seen = step + 1, seen + count
        if step % 500 == 0 or step == 20:
            log(f"vae step {step} loss {loss.item():.4f} spread {spread.item():.3f} size {size}, {seen / (time.time() - begin):.0f} images/s")
    log(f"vae done: {step} steps, {seen} images")
    fix_variance(average)
    return average


@torch.no_grad()
def fix_variance(model):
    """Sets the predicted variance, which the class has besides the mean, to a constant: the mean level of the training noise."""
    latent = model.post_quant_conv.weight.shape[0]
    model.quant_conv.weight[latent:] = 0
    model.quant_conv.bias[latent:] = 2 * math.log(LATENT_NOISE / 2)


def polish(model, draw, generated, device, dtype, seconds, log, rate=5e-4, max_steps=10**9, sizes=((128, 96), (256, 32))):
    """Trains only the decoder, on the fixed latents with a little noise, since generated latents are not exact, and with a critic. Changes `model`.

    `generated(count)` returns latents that the transformer made and the images they should be, for every third step.
    """
    for part in (model.decoder, model.post_quant_conv):
        part.requires_grad_(True)
    params = [p for p in model.parameters() if p.requires_grad]
    averaged = [p.detach().clone() for p in params]
    optimiser = torch.optim.AdamW(params, lr=rate, betas=(.9, .99), weight_decay=0.0, fused=device == "cuda")
    judge = critic.for_pixels(device)
    begin, step, told = time.time(), 0, torch.zeros((), device=device)
    while step < max_steps:
        done = (time.time() - begin) / seconds
        if done >= 1:
            break
        with torch.no_grad():
            if step % 3 == 2:
                z, x = generated(sizes[1][1])
            else:
                x = draw(*sizes[step % 3])
                like_input = (x * 2 - 1).to(dtype)
                z = noised(model.moments(like_input.contiguous(memory_format=torch.channels_last) if device == "cuda" else like_input)[0], POLISH_NOISE)
            x = x * 2 - 1
        out = model.decode_raw(z.to(dtype)).float()
        seen = out.detach().requires_grad_(True)
        loss = reconstruction_loss(seen, x)
        slope = torch.autograd.grad(loss, seen)[0]
        told += judge.learn(x, out)
        if done > POLISH_CRITIC_FROM:
            slope = critic.mixed(slope, judge.gradient(x, out), POLISH_CRITIC)
        out.backward(slope)
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50) * (.5 * (1 + math.cos(math.pi * min(done, 1))) + .005)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(averaged, params, 1 - min(.995, (step + 1) / (step + 10)))
        step += 1
        if step % 250 == 0 or step == 20:
            log(f"polish step {step} loss {loss.item():.4f}, critic right {told.item() / step:.2f}")
    with torch.no_grad():
        for p, a in zip(params, averaged):
            p.copy_(a)
    model.requires_grad_(False)
    log(f"polish done: {step} steps")


def recolour(model, draw, dtype, batches=24, size=256, count=16):
    """Folds an invertible 1×1 map of the latent channels into `quant_conv` and `post_quant_conv`; images don't change.

    As trained (uncorrelated), two thirds of the directions hardly affect the image, and a flow would waste capacity on predicting
    them. Here each direction gets the power that minimises the damage of noise: the square root of its image energy. A fixed rotation
    then spreads the directions over all channels, since the batch norm works per channel and would undo the choice.
    """
    mean = second = energy = 0.0
    for _ in range(batches):
        x = (draw(size, count) * 2 - 1).to(dtype)
        z = model.moments(x)[0].detach().requires_grad_(True)
        out = model.decode_raw(z.to(dtype)).float()
        # with random output gradients, the covariance of the input gradients is that of the decoder's Jacobian
        slope = torch.autograd.grad(out, z, torch.randn_like(out))[0]
        values, slope = (t.detach().double().permute(0, 2, 3, 1).flatten(0, 2).cpu() for t in (z, slope))
        mean, second = mean + values.mean(0) / batches, second + values.T @ values / len(values) / batches
        energy = energy + slope.T @ slope / len(slope) / batches
    variances, basis = torch.linalg.eigh(second - torch.outer(mean, mean))
    root, inverse = (basis @ torch.diag(variances ** power) @ basis.T for power in (.5, -.5))
    energies, directions = torch.linalg.eigh(root @ energy @ root)
    gains = energies.clamp_min(energies.max() * 1e-4) ** .25
    rotation = torch.linalg.qr(torch.randn(len(gains), len(gains), dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    fold(model, rotation @ torch.diag(gains) @ directions.T @ inverse, mean)


@torch.no_grad()
def fold(model, forward, mean):
    """Changes the latents to `forward · (z − mean)`, and makes the decoder undo it."""
    latent, device, quant, post = len(mean), model.quant_conv.weight.device, model.quant_conv, model.post_quant_conv
    backward = torch.linalg.inv(forward)
    matrix = lambda w: w[:, :, 0, 0].double().cpu()
    quant.bias[:latent] = (forward @ (quant.bias[:latent].double().cpu() - mean)).float().to(device)
    quant.weight[:latent] = (forward @ matrix(quant.weight[:latent]))[:, :, None, None].float().to(device)
    post.bias.add_((matrix(post.weight) @ mean).float().to(device))
    post.weight.copy_((matrix(post.weight) @ backward)[:, :, None, None].float())


@torch.no_grad()
def set_statistics(model, draw, dtype, batches=24, size=256, count=128):
    """Sets the batch-norm statistics from `batches` new batches of scenes."""
    total = square = 0.0
    for _ in range(batches):
        x = (draw(size, count) * 2 - 1).to(dtype)
        x = x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x
        z = patchify(model.moments(x)[0]).double()
        total, square = total + z.mean((0, 2, 3)), square + z.square().mean((0, 2, 3))
    mean = total / batches
    model.bn.running_mean.copy_(mean)
    model.bn.running_var.copy_(square / batches - mean.square())
    model.bn.num_batches_tracked.fill_(batches)

"""Computes every operation of `kiln_ops::Backend` on small inputs with torch, diffusers and transformers.

    python tools/golden/ops.py > crates/kiln-ops/tests/golden/torch.rs

The inputs come from `v`, which `crates/kiln-ops/tests/golden/main.rs` duplicates; they are multiples of 1/16 and thus
exact in bf16. Everything is computed in f64 where the libraries allow it, and printed as the nearest f32.
"""

import math
import textwrap

import diffusers
import torch
import torch.nn.functional as F
import transformers
from diffusers import Flux2KleinPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.models.downsampling import Downsample2D
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux2 import Flux2SwiGLU
from diffusers.models.upsampling import Upsample2D
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb


def v(seed, *shape):
    def at(i):
        h = (i * 2654435761 + seed * 2246822519) % 2**32
        h = (h ^ h >> 15) * 2654435769 % 2**32
        return ((h ^ h >> 13) % 61 - 30) / 16

    return torch.tensor([at(i) for i in range(math.prod(shape))], dtype=torch.float64).reshape(shape)


def put(name, t):
    values = ", ".join(str(x) for x in t.detach().to(torch.float32).flatten().numpy())
    lines = textwrap.wrap(values, 106, initial_indent="    ", subsequent_indent="    ")
    print(f"pub const {name.upper()}: &[f32] = &[", *lines, "];", sep="\n")


def chw(x):
    """`[h, w, c]` -> torch's `[c, h, w]`."""
    return x.permute(2, 0, 1)[None]


def hwc(x):
    return x[0].permute(1, 2, 0)


def linear():
    x, w, bias = v(1, 3, 5), v(2, 7, 5), v(3, 7)
    put("linear", F.linear(x, w, bias))
    put("linear_bf16", F.linear(x, w, bias).to(torch.bfloat16))
    w = w.clone()
    w[0:4] += 0.5 * v(5, 4, 2) @ v(4, 2, 5)
    w[3:7] += -1.5 * v(7, 4, 3) @ v(6, 3, 5)
    put("linear_deltas", F.linear(x, w))
    gate = torch.repeat_interleave(v(8, 2, 7), torch.tensor([2, 1]), dim=0)
    put("linear_gated_add", v(9, 3, 7) + gate * F.linear(x, v(2, 7, 5), bias))


def norms():
    x, eps = v(1, 3, 7), 1e-3
    put("rms_norm", F.rms_norm(x, (7,), v(2, 7), eps))
    scale, shift = (torch.repeat_interleave(v(s, 2, 7), torch.tensor([1, 2]), dim=0) for s in (3, 4))
    put("ada_layer_norm", F.layer_norm(x, (7,), eps=eps) * (1 + scale) + shift)
    image = v(5, 3, 2, 6)
    normed = F.group_norm(chw(image), 3, v(6, 6), v(7, 6), eps)
    put("group_norm", hwc(normed))
    put("group_norm_silu", hwc(F.silu(normed)))


def rope():
    tokens, heads, dim, eps = 3, 2, 8, 1e-6
    x, weight = v(1, tokens, heads, dim), v(2, dim)
    angles = v(3, tokens, dim // 2)
    cos, sin = angles.cos().float(), angles.sin().float()
    normed = F.rms_norm(x, (dim,), weight, eps)
    interleaved = tuple(t.repeat_interleave(2, dim=1) for t in (cos, sin))
    put("rope_adjacent", apply_rotary_emb(normed[None].float(), interleaved, sequence_dim=1))
    norm = Qwen3RMSNorm(dim, eps)
    norm.weight.data = weight.float()
    twice = tuple(torch.cat([t, t], dim=1)[None] for t in (cos, sin))
    put("rope_halves", apply_rotary_pos_emb(norm(x.float())[None], x.float()[None], *twice, unsqueeze_dim=2)[0])


def attention():
    def sdpa(queries, keys, heads, kv_heads, dim, mask=None, boost=1.0):
        q, k, vv = v(1, queries, heads, dim) * boost, v(2, keys, kv_heads, dim) * boost, v(3, keys, kv_heads, dim)
        q, k, vv = (t.transpose(0, 1)[None] for t in (q, k, vv))
        y = F.scaled_dot_product_attention(q, k, vv, attn_mask=mask, enable_gqa=True)
        return y[0].transpose(0, 1)

    put("attention", sdpa(3, 5, 2, 2, 4))
    put("attention_grouped", sdpa(2, 5, 4, 2, 2))
    put("attention_steep", sdpa(3, 5, 2, 2, 4, boost=32.0))
    causal = torch.tril(torch.ones(5, 5, dtype=torch.bool))
    causal[:, 3:] = False
    put("attention_causal", sdpa(5, 5, 2, 1, 2, causal))
    isolated = torch.ones(5, 5, dtype=torch.bool)
    isolated[1:3, :] = False
    isolated[1:3, 1:3] = True
    put("attention_isolated", sdpa(5, 5, 2, 1, 2, isolated))


def elementwise():
    x, y = v(1, 3, 6), v(2, 3, 6)
    put("swiglu", Flux2SwiGLU()(x))
    put("silu", F.silu(4 * x))
    put("relu", F.relu(x))
    put("soft_clamp", torch.tanh(4 * x / 3) * 3)
    put("lerp", torch.lerp(x, y, 0.3))
    mask = v(3, 3, 1)
    put("blend_rows", (1 - mask) * x + mask * y)
    put("affine", x * v(4, 6) + v(5, 6))
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.25])
    scheduler.set_begin_index(1)
    put("add_scaled", scheduler.step(y, scheduler.timesteps[1], x.float()).prev_sample)
    put("guide", y + 4 * (x - y))


def images():
    x = v(1, 4, 6, 3)
    put("space_to_depth", hwc(Flux2KleinPipeline._patchify_latents(chw(x).contiguous())))
    put("depth_to_space", hwc(Flux2KleinPipeline._unpatchify_latents(chw(v(2, 2, 3, 8)).contiguous())))
    x, bias = v(3, 5, 4, 2), v(5, 3)
    put("conv", hwc(F.conv2d(chw(x), v(4, 3, 2, 3, 3), bias, padding=1)))
    put("conv_point", hwc(F.conv2d(chw(x), v(4, 3, 2, 1, 1))))
    put("conv_tall", hwc(F.conv2d(chw(x), v(4, 3, 2, 3, 1), padding=(1, 0))))
    put("conv_residual", hwc(F.conv2d(chw(x), v(4, 3, 2, 3, 3), bias, padding=1)) + v(6, 5, 4, 3))
    down = Downsample2D(2, use_conv=True, out_channels=3, padding=0).double()
    up = Upsample2D(2, use_conv=True, out_channels=3).double()
    for module in (down, up):
        module.conv.weight.data, module.conv.bias.data = v(4, 3, 2, 3, 3), bias
    put("conv_down", hwc(down(chw(x))))
    put("conv_up", hwc(up(chw(v(3, 2, 3, 2)))))


print("//! Made by `python tools/golden/ops.py`; see there.")
print(f"//! torch {torch.__version__}, diffusers {diffusers.__version__}, transformers {transformers.__version__}.")
print()
for part in (linear, norms, rope, attention, elementwise, images):
    part()

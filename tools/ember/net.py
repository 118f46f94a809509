"""The klein transformer and the Qwen3 text encoder, with the parameter names of diffusers and transformers.

Block bodies are pure functions of tensors: the three of them are compiled once, for any batch and length, and shared by all blocks.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import TEXT_ENCODER, TEXT_STATES, TRANSFORMER

REFERENCE_TIME = 10  # first RoPE axis of reference k is 10 · (k + 1)


def linear(x, weight):
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x, weight):
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)


def layer_norm(x):
    y = x.float()
    y = y - y.mean(-1, keepdim=True)
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)


def rope_pairs(x, cos, sin):
    """RoPE on interleaved pairs; `x`: `[batch, tokens, heads, head_dim]`."""
    y = x.float()
    a, b = y.unflatten(-1, (-1, 2)).unbind(-1)
    return (y * cos[None, :, None] + torch.stack([-b, a], -1).flatten(-2) * sin[None, :, None]).to(x.dtype)


def rope_halves(x, cos, sin):
    """RoPE on split halves; `x`: `[batch, heads, tokens, head_dim]`."""
    y = x.float()
    a, b = y.chunk(2, -1)
    return (y * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


def modulate(x, shift, scale):
    return ((1 + scale) * layer_norm(x) + shift).to(x.dtype)


def attend(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def double_block(x, c, mod_x, mod_c, cos, sin, head_dim: int, q, k, v, out, cq, ck, cv, cout, nq, nk, ncq, nck, up, down, cup, cdown):
    sx = [t.float() for t in mod_x.unsqueeze(1).chunk(6, -1)]
    sc = [t.float() for t in mod_c.unsqueeze(1).chunk(6, -1)]
    heads = lambda t: [p.unflatten(-1, (-1, head_dim)) for p in t.chunk(3, -1)]
    xq, xk, xv = heads(linear(modulate(x, sx[0], sx[1]), torch.cat([q, k, v])))
    tq, tk, tv = heads(linear(modulate(c, sc[0], sc[1]), torch.cat([cq, ck, cv])))
    aq = torch.cat([rms_norm(tq, ncq), rms_norm(xq, nq)], 1)
    ak = torch.cat([rms_norm(tk, nck), rms_norm(xk, nk)], 1)
    o = attend(rope_pairs(aq, cos, sin), rope_pairs(ak, cos, sin), torch.cat([tv, xv], 1))
    text = c.shape[1]
    x = (x + sx[2] * linear(o[:, text:], out)).to(x.dtype)
    c = (c + sc[2] * linear(o[:, :text], cout)).to(c.dtype)
    x = (x + sx[5] * linear(swiglu(linear(modulate(x, sx[3], sx[4]), up)), down)).to(x.dtype)
    c = (c + sc[5] * linear(swiglu(linear(modulate(c, sc[3], sc[4]), cup)), cdown)).to(c.dtype)
    return x, c


def single_block(x, mod, cos, sin, head_dim: int, inward, outward, nq, nk):
    shift, scale, gate = (t.float() for t in mod.unsqueeze(1).chunk(3, -1))
    dim = x.shape[-1]
    y = linear(modulate(x, shift, scale), inward)
    q, k, v, mlp = y.split([dim, dim, dim, y.shape[-1] - 3 * dim], -1)
    q, k, v = (t.unflatten(-1, (-1, head_dim)) for t in (q, k, v))
    o = attend(rope_pairs(rms_norm(q, nq), cos, sin), rope_pairs(rms_norm(k, nk), cos, sin), v)
    return (x + gate * linear(torch.cat([o, swiglu(mlp)], -1), outward)).to(x.dtype)


def text_layer(x, mask, cos, sin, heads: int, kv_heads: int, head_dim: int, n1, wq, wk, wv, nq, nk, wo, n2, gate, up, down):
    h = linear(rms_norm(x, n1), torch.cat([wq, wk, wv]))
    q, k, v = h.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], -1)
    q = rope_halves(rms_norm(q.unflatten(-1, (heads, head_dim)), nq).transpose(1, 2), cos, sin)
    k = rope_halves(rms_norm(k.unflatten(-1, (kv_heads, head_dim)), nk).transpose(1, 2), cos, sin)
    v = v.unflatten(-1, (kv_heads, head_dim)).transpose(1, 2)
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
    x = x + linear(o, wo)
    return x + linear(swiglu(linear(rms_norm(x, n2), torch.cat([gate, up]))), down)


BODIES = {"double": double_block, "single": single_block, "text": text_layer}


def enable_compile():
    import torch.fx.experimental._config as shapes

    torch._dynamo.config.cache_size_limit = 64
    # equal sizes are chance: a batch of 64 images has nothing to do with 64 text tokens
    shapes.use_duck_shape = False
    for name in BODIES:
        BODIES[name] = torch.compile(BODIES[name])


def any_size(*tensors, axes=(0, 1)):
    """Tells the compiler that these axes vary, so that one kernel serves every batch and image size."""
    for t in tensors:
        for axis in axes:
            torch._dynamo.maybe_mark_dynamic(t, axis)


class Weight(nn.Module):
    """A linear layer without bias; `std` 0 starts it at zero."""

    def __init__(self, out, inner, std=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, inner) * (inner ** -.5 if std is None else std))


class Gain(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))


class Group(nn.Module):
    """Named sub-modules, for the checkpoint's dotted names."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


class DoubleBlock(nn.Module):
    def __init__(self, dim, head_dim):
        super().__init__()
        self.head_dim = head_dim
        square = {n: Weight(dim, dim) for n in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")}
        gains = {n: Gain(head_dim) for n in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")}
        self.attn = Group(**square, **gains, to_out=nn.ModuleList([Weight(dim, dim)]))
        self.ff = Group(linear_in=Weight(6 * dim, dim), linear_out=Weight(dim, 3 * dim))
        self.ff_context = Group(linear_in=Weight(6 * dim, dim), linear_out=Weight(dim, 3 * dim))

    def forward(self, x, c, mod_x, mod_c, cos, sin):
        a = self.attn
        order = (a.to_q, a.to_k, a.to_v, a.to_out[0], a.add_q_proj, a.add_k_proj, a.add_v_proj, a.to_add_out, a.norm_q, a.norm_k,
                 a.norm_added_q, a.norm_added_k, self.ff.linear_in, self.ff.linear_out, self.ff_context.linear_in, self.ff_context.linear_out)
        return BODIES["double"](x, c, mod_x, mod_c, cos, sin, self.head_dim, *(m.weight for m in order))


class SingleBlock(nn.Module):
    def __init__(self, dim, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.attn = Group(to_qkv_mlp_proj=Weight(9 * dim, dim), to_out=Weight(dim, 4 * dim), norm_q=Gain(head_dim), norm_k=Gain(head_dim))

    def forward(self, x, mod, cos, sin):
        a = self.attn
        return BODIES["single"](x, mod, cos, sin, self.head_dim, a.to_qkv_mlp_proj.weight, a.to_out.weight, a.norm_q.weight, a.norm_k.weight)


class Transformer(nn.Module):
    def __init__(self, heads, head_dim, double_blocks, single_blocks, joint_dim, in_channels):
        super().__init__()
        dim, self.head_dim = heads * head_dim, head_dim
        self.time_guidance_embed = Group(timestep_embedder=Group(linear_1=Weight(dim, 256), linear_2=Weight(dim, dim)))
        self.double_stream_modulation_img = Group(linear=Weight(6 * dim, dim, 0))
        self.double_stream_modulation_txt = Group(linear=Weight(6 * dim, dim, 0))
        self.single_stream_modulation = Group(linear=Weight(3 * dim, dim, 0))
        self.x_embedder, self.context_embedder = Weight(dim, in_channels), Weight(dim, joint_dim)
        self.transformer_blocks = nn.ModuleList(DoubleBlock(dim, head_dim) for _ in range(double_blocks))
        self.single_transformer_blocks = nn.ModuleList(SingleBlock(dim, head_dim) for _ in range(single_blocks))
        self.norm_out, self.proj_out = Group(linear=Weight(2 * dim, dim, 0)), Weight(in_channels, dim, 0)
        self.tables = {}

    def rope(self, text, h, w, references, device):
        """Returns cos, sin `[tokens, head_dim]` f32, from angles in f64; cached by shape."""
        key = (text, h, w, references)
        if key not in self.tables:
            grid = lambda t: torch.cartesian_prod(torch.tensor([t]), torch.arange(h), torch.arange(w), torch.arange(1))
            ids = [torch.cartesian_prod(*(torch.arange(1),) * 3, torch.arange(text)), grid(0)]
            ids = torch.cat(ids + [grid(REFERENCE_TIME * (k + 1)) for k in range(references)]).double()
            axis = self.head_dim // 4
            rate = 1.0 / 2000.0 ** (torch.arange(0, axis, 2, dtype=torch.float64) / axis)
            angle = torch.cat([torch.outer(ids[:, i], rate).repeat_interleave(2, 1) for i in range(4)], 1)
            self.tables[key] = angle.cos().float().to(device), angle.sin().float().to(device)
        return self.tables[key]

    def forward(self, x, context, t, h, w, references=0):
        """`x`: `[batch, h·w·(1 + references), 128]`, `context`: `[batch, text, joint]`, `t` in 0..1 -> velocity of the first h·w tokens."""
        dtype, text = context.dtype, context.shape[1]
        rate = torch.exp(-math.log(10000) * torch.arange(128, device=x.device, dtype=torch.float32) / 128)
        angle = (t.float() * 1000)[:, None] * rate[None]
        embed = self.time_guidance_embed.timestep_embedder
        e = linear(F.silu(linear(torch.cat([angle.cos(), angle.sin()], -1).to(dtype), embed.linear_1.weight)), embed.linear_2.weight)
        e = F.silu(e)
        mod_x, mod_c = (linear(e, m.linear.weight) for m in (self.double_stream_modulation_img, self.double_stream_modulation_txt))
        mod = linear(e, self.single_stream_modulation.linear.weight)
        cos, sin = self.rope(text, h, w, references, x.device)
        x, c = linear(x.to(dtype), self.x_embedder.weight), linear(context, self.context_embedder.weight)
        any_size(mod_x, mod_c, mod, cos, sin, axes=(0,))
        for block in self.transformer_blocks:
            any_size(x, c)
            x, c = block(x, c, mod_x, mod_c, cos, sin)
        x = torch.cat([c, x], 1)
        for block in self.single_transformer_blocks:
            any_size(x)
            x = block(x, mod, cos, sin)
        x = x[:, text:text + h * w]
        scale, shift = linear(e, self.norm_out.linear.weight).unsqueeze(1).float().chunk(2, -1)
        return linear(modulate(x, shift, scale), self.proj_out.weight)


class TextLayer(nn.Module):
    def __init__(self, dim, heads, kv_heads, head_dim, intermediate):
        super().__init__()
        self.shape = heads, kv_heads, head_dim
        self.self_attn = Group(
            q_proj=Weight(heads * head_dim, dim), k_proj=Weight(kv_heads * head_dim, dim), v_proj=Weight(kv_heads * head_dim, dim),
            o_proj=Weight(dim, heads * head_dim, 0), q_norm=Gain(head_dim), k_norm=Gain(head_dim))
        self.mlp = Group(gate_proj=Weight(intermediate, dim), up_proj=Weight(intermediate, dim), down_proj=Weight(dim, intermediate, 0))
        self.input_layernorm, self.post_attention_layernorm = Gain(dim), Gain(dim)

    def forward(self, x, mask, cos, sin):
        a, m = self.self_attn, self.mlp
        order = (self.input_layernorm, a.q_proj, a.k_proj, a.v_proj, a.q_norm, a.k_norm, a.o_proj,
                 self.post_attention_layernorm, m.gate_proj, m.up_proj, m.down_proj)
        return BODIES["text"](x, mask, cos, sin, *self.shape, *(p.weight for p in order))


class TextEncoder(nn.Module):
    def __init__(self, vocab, dim, heads, kv_heads, head_dim, intermediate, layers, pad):
        super().__init__()
        self.pad, self.head_dim = pad, head_dim
        self.model = Group(
            embed_tokens=Weight(vocab, dim, 1.0), norm=Gain(dim),
            layers=nn.ModuleList(TextLayer(dim, heads, kv_heads, head_dim, intermediate) for _ in range(layers)))
        self.model.norm.weight.requires_grad_(False)  # unused: the states are taken before it

    def forward(self, ids, dtype):
        """`ids`: `[batch, text]` -> the three states concatenated, `[batch, text, 3·dim]`."""
        length, device = ids.shape[1], ids.device
        x = F.embedding(ids, self.model.embed_tokens.weight).to(dtype)
        seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None] & (ids != self.pad)[:, None, :]
        mask = torch.zeros(len(ids), 1, length, length, device=device, dtype=dtype).masked_fill(~seen[:, None], float("-inf"))
        rate = 1.0 / 1e6 ** (torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim)
        angle = torch.outer(torch.arange(length, device=device).float(), rate).repeat(1, 2)
        cos, sin, states = angle.cos(), angle.sin(), []
        any_size(mask, axes=(0,))
        for k, layer in enumerate(self.model.layers):
            any_size(x, axes=(0,))
            x = layer(x, mask, cos, sin)
            if k + 1 in TEXT_STATES:
                states.append(x)
        return torch.cat(states, -1)


def build(pad, device, state=None):
    """Returns both networks; with the transformer's `state`, as deep as that is."""
    shape = dict(TRANSFORMER, single_blocks=depth(state)) if state else TRANSFORMER
    return Transformer(**shape).to(device), TextEncoder(**TEXT_ENCODER, pad=pad).to(device)


SINGLE = "single_transformer_blocks."


def depth(state):
    return 1 + max(int(name.split(".")[1]) for name in state if name.startswith(SINGLE))


def grow(state, blocks):
    """Returns the state of a transformer with `blocks` single blocks that computes the same: new blocks are copies, evenly between the old ones, that add nothing yet."""
    old = depth(state)
    out = {name: value for name, value in state.items() if not name.startswith(SINGLE)}
    origins = [k * old // blocks for k in range(blocks)]
    for k, origin in enumerate(origins):
        copied = k > 0 and origins[k - 1] == origin
        for name, value in state.items():
            if name.startswith(f"{SINGLE}{origin}."):
                out[f"{SINGLE}{k}." + name.split(".", 2)[2]] = torch.zeros_like(value) if copied and "to_out" in name else value.clone()
    return out


def parameters_for(*modules):
    """Returns (matrices inside blocks, for Muon; the embedding table; everything else, for AdamW)."""
    matrices, embedding, rest = [], [], []
    for module in modules:
        for name, p in module.named_parameters():
            if p.requires_grad:
                inside = p.ndim == 2 and ("transformer_blocks" in name or "model.layers" in name)
                (matrices if inside else embedding if "embed_tokens" in name else rest).append(p)
    return matrices, embedding, rest

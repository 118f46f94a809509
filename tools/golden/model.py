"""Creates the small random models of the golden set, in diffusers' folder layout.

    python tools/golden/model.py testdata/tokenizer testdata/tiny

    klein/                Flux2KleinPipeline, distilled; owns transformer, text_encoder, vae, scheduler
    klein-base/           the same components, not distilled (classifier-free guidance)
    klein-kv/             the same components, Flux2KleinKVPipeline
    klein-small-decoder/  owns vae (other channels in the decoder), the other components are klein's
    dev/                  owns transformer (two heads, guidance embedder); vae and scheduler are klein's, no text encoder
    lora/                 one update in four layouts

Each component is stored once. `assemble(tiny, tokenizer, out)` below completes the folders.
All weights are stored as bf16; the references are computed in f32 from exactly these values.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from transformers import Qwen3Config, Qwen3ForCausalLM

from common import BF16, bf16_exact, draw, save_tensors

TEXT_HIDDEN, TEXT_LAYERS = 16, 28  # state 27 must come before the last layer
KLEIN = dict(num_layers=1, num_single_layers=2, num_attention_heads=1, attention_head_dim=128,
             axes_dims_rope=(32, 32, 32, 32), joint_attention_dim=3 * TEXT_HIDDEN, guidance_embeds=False)  # fmt: skip
DEV = dict(num_layers=2, num_single_layers=1, num_attention_heads=2, attention_head_dim=32,
           axes_dims_rope=(8, 8, 8, 8), joint_attention_dim=60, guidance_embeds=True)  # fmt: skip
# GroupNorm has 32 groups, so 32 channels are the minimum. The second VAE's lists are not palindromes.
VAE = dict(block_out_channels=(32, 32, 32, 32), layers_per_block=2)
VAE_SMALL_DECODER = dict(
    block_out_channels=(32, 64, 32, 32), decoder_block_out_channels=(32, 32, 64, 32), layers_per_block=1
)
SCHEDULER = dict(
    num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
    base_image_seq_len=256, max_image_seq_len=4096, invert_sigmas=False, shift_terminal=None, use_karras_sigmas=False,
    use_exponential_sigmas=False, use_beta_sigmas=False, time_shift_type="exponential", stochastic_sampling=False,
)  # fmt: skip
RANK = 4
SHARED = {
    "klein": ["tokenizer"],
    "klein-base": ["transformer", "text_encoder", "vae", "scheduler", "tokenizer"],
    "klein-kv": ["transformer", "text_encoder", "vae", "scheduler", "tokenizer"],
    "klein-small-decoder": ["transformer", "text_encoder", "scheduler", "tokenizer"],
    "dev": ["vae", "scheduler"],
}


def assemble(tiny, tokenizer, out):
    """Completes the folders of `tiny` in `out`: components that a model does not own are klein's."""
    tiny, tokenizer, out = (Path(p).resolve() for p in (tiny, tokenizer, out))
    for model, parts in SHARED.items():
        (out / model).mkdir(parents=True, exist_ok=True)
        for own in (tiny / model).iterdir():
            link(own, out / model / own.name)
        for part in parts:
            link(tokenizer if part == "tokenizer" else tiny / "klein" / part, out / model / part)
    link(tiny / "lora", out / "lora")


def link(source, target):
    if not target.exists():
        os.symlink(source, target)


def fan_in(p, gain):
    """Mean and standard deviation of a linear or convolution weight."""
    return 0.0, gain / (p[0].numel() ** 0.5)


def transformer_rule(name, p):
    if p.ndim == 1:
        return 1.7, 0.3  # q/k norm scales well above 1, so that attention is not flat
    if "_modulation" in name:
        return fan_in(p, 1.3)
    if name.startswith("norm_out"):
        return fan_in(p, 0.4)
    if "embedder.linear" in name:
        return fan_in(p, 1.4)
    if any(s in name for s in ("to_out", "to_add_out", "linear_out")):
        return fan_in(p, 2.2)
    if name.startswith("context_embedder"):
        return fan_in(p, 0.35)
    if name.startswith("proj_out"):
        return fan_in(p, 0.6)  # guidance amplifies rounding errors, too: keep the velocity small
    return fan_in(p, 1.0)


def text_rule(name, p):
    if p.ndim == 1:
        return (1.2, 0.2) if "q_norm" in name or "k_norm" in name else (1.0, 0.15)
    if "embed_tokens" in name:
        return 0.0, 0.3
    return fan_in(p, 0.8 if "o_proj" in name or "down_proj" in name else 1.0)


def vae_rule(name, p):
    if "norm" in name:
        return (1.0, 0.1) if name.endswith("weight") else (0.0, 0.1)
    if name.endswith("bias"):
        return 0.0, 0.05
    if name == "encoder.conv_out.weight":
        return fan_in(p, 3.0)
    if name == "decoder.conv_out.weight" or "to_out" in name or "conv2" in name:
        return fan_in(p, 0.8)
    return fan_in(p, 1.2)


def fill(model, component, rule):
    for name, p in model.named_parameters():
        mean, std = rule(name, p)
        p.copy_(bf16_exact(mean + std * draw(f"{component}/{name}", p.shape)))


def make_transformer(out, component, config):
    m = Flux2Transformer2DModel(
        patch_size=1, in_channels=128, timestep_guidance_channels=256, mlp_ratio=3.0, rope_theta=2000, eps=1e-6, **config
    )
    fill(m, component, transformer_rule)
    m.to(BF16).save_pretrained(out)


def make_text_encoder(out):
    c = Qwen3Config(
        vocab_size=448, hidden_size=TEXT_HIDDEN, intermediate_size=48, num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_act="silu", max_position_embeddings=40960,
        rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=False, attention_dropout=0.0, use_cache=True,
        use_sliding_window=False, max_window_layers=TEXT_LAYERS, bos_token_id=416, eos_token_id=418, rope_theta=1000000,
    )  # fmt: skip
    m = Qwen3ForCausalLM(c)
    fill(m, "text_encoder", text_rule)
    m.to(BF16).save_pretrained(out, max_shard_size="200KB")  # sharded, like the real one
    # The config in the flat style of the published Qwen3 repositories.
    config = json.loads((out / "config.json").read_text())
    new_style = ("rope_parameters", "layer_types", "dtype", "transformers_version", "pad_token_id")
    flat = {k: v for k, v in config.items() if k not in new_style}
    flat |= dict(rope_theta=1000000, rope_scaling=None, sliding_window=None, torch_dtype="bfloat16",
                 transformers_version="4.57.1", bos_token_id=416, eos_token_id=418)  # fmt: skip
    (out / "config.json").write_text(json.dumps(dict(sorted(flat.items())), indent=2) + "\n")
    (out / "generation_config.json").unlink(missing_ok=True)


def make_vae(out, component, config):
    m = AutoencoderKLFlux2(latent_channels=32, norm_num_groups=32, **config)
    fill(m, component, vae_rule)
    m.bn.running_mean.copy_(bf16_exact(0.5 * draw(f"{component}/bn.running_mean", (128,))))
    m.bn.running_var.copy_(bf16_exact(3.1 * torch.exp(0.35 * draw(f"{component}/bn.running_var", (128,)))))
    m.bn.num_batches_tracked.fill_(123456)  # stays an i64 scalar in the file
    m.to(BF16).save_pretrained(out)


def model_index(pipeline, text=True, **extra):
    d = {"_class_name": pipeline, "_diffusers_version": "0.37.0", **extra}
    d["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    d["text_encoder"] = ["transformers", "Qwen3ForCausalLM"] if text else [None, None]
    d["tokenizer"] = ["transformers", "Qwen2TokenizerFast"] if text else [None, None]
    d["transformer"] = ["diffusers", "Flux2Transformer2DModel"]
    d["vae"] = ["diffusers", "AutoencoderKLFlux2"]
    return json.dumps(d, indent=2) + "\n"


def lora_factors(dim):
    """Low-rank factors by BFL module name. q, k and v share the down matrix, so that every layout can hold them."""
    shapes = {}
    for i in range(KLEIN["num_layers"]):
        for s in ("img", "txt"):
            block = f"double_blocks.{i}.{s}"
            shapes |= {f"{block}_attn.qkv": (dim, 3 * dim), f"{block}_attn.proj": (dim, dim),
                       f"{block}_mlp.0": (dim, 6 * dim), f"{block}_mlp.2": (3 * dim, dim)}  # fmt: skip
    for i in range(KLEIN["num_single_layers"]):
        block = f"single_blocks.{i}"
        shapes |= {f"{block}.linear1": (dim, 9 * dim), f"{block}.linear2": (4 * dim, dim)}
    return {
        k: ((draw(f"lora/{k}/A", (RANK, i)) / i**0.5).to(BF16), (0.35 * draw(f"lora/{k}/B", (o, RANK))).to(BF16))
        for k, (i, o) in shapes.items()
    }


def diffusers_modules(key, up):
    """The diffusers modules that a BFL module corresponds to, each with its rows of the up matrix."""
    kind, i, rest = key.split(".", 2)
    if kind == "single_blocks":
        name = {"linear1": "to_qkv_mlp_proj", "linear2": "to_out"}[rest]
        return [(f"single_transformer_blocks.{i}.attn.{name}", up)]
    text, module = rest.startswith("txt_"), rest[4:]
    if module == "attn.qkv":
        names = ("add_q_proj", "add_k_proj", "add_v_proj") if text else ("to_q", "to_k", "to_v")
        return [(f"transformer_blocks.{i}.attn.{n}", part) for n, part in zip(names, up.chunk(3))]
    names = {"attn.proj": ("attn.to_out.0", "attn.to_add_out"), "mlp.0": ("ff.linear_in", "ff_context.linear_in"),
             "mlp.2": ("ff.linear_out", "ff_context.linear_out")}  # fmt: skip
    return [(f"transformer_blocks.{i}.{names[module][text]}", up)]


def make_lora(out):
    out.mkdir(parents=True, exist_ok=True)
    factors = lora_factors(KLEIN["num_attention_heads"] * KLEIN["attention_head_dim"])
    pt = {"format": "pt"}
    peft = {}
    for key, (down, up) in factors.items():
        for name, rows in diffusers_modules(key, up):
            peft[f"transformer.{name}.lora_A.weight"] = down
            peft[f"transformer.{name}.lora_B.weight"] = rows
    save_tensors(peft, out / "lora_diffusers.safetensors", pt)
    targets = sorted({k[len("transformer.") :].rsplit(".lora_", 1)[0] for k in peft})
    config = dict(r=RANK, lora_alpha=2 * RANK, target_modules=targets, lora_bias=False, use_rslora=False, use_dora=False,
                  alpha_pattern={}, rank_pattern={}, lora_dropout=0.0, bias="none", init_lora_weights=True)  # fmt: skip
    metadata = json.dumps({f"transformer.{k}": v for k, v in config.items()}, sort_keys=True)
    save_tensors(peft, out / "lora_diffusers_alpha8.safetensors", pt | {"lora_adapter_metadata": metadata})

    bfl, kohya = {}, {}
    for key, (down, up) in factors.items():
        bfl |= {f"diffusion_model.{key}.lora_A.weight": down, f"diffusion_model.{key}.lora_B.weight": up}
        name = "lora_unet_" + key.replace(".", "_")
        kohya |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up,
                  f"{name}.alpha": torch.tensor(2.0 * RANK, dtype=BF16)}  # fmt: skip
    save_tensors(bfl, out / "lora_bfl.safetensors", pt)
    save_tensors(kohya, out / "lora_kohya_alpha8.safetensors", pt | dict(ss_network_dim=str(RANK), ss_network_alpha="8"))


def main(tokenizer, out):
    shutil.rmtree(out, ignore_errors=True)
    klein = out / "klein"
    make_transformer(klein / "transformer", "transformer", KLEIN)
    make_text_encoder(klein / "text_encoder")
    make_vae(klein / "vae", "vae", VAE)
    FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_pretrained(klein / "scheduler")
    make_vae(out / "klein-small-decoder" / "vae", "vae_small_decoder", VAE_SMALL_DECODER)
    make_transformer(out / "dev" / "transformer", "dev_transformer", DEV)
    for model in ("klein-base", "klein-kv"):
        (out / model).mkdir()
    for model, text in {
        "klein": model_index("Flux2KleinPipeline", is_distilled=True),
        "klein-small-decoder": model_index("Flux2KleinPipeline", is_distilled=True),
        "klein-base": model_index("Flux2KleinPipeline", is_distilled=False),
        "klein-kv": model_index("Flux2KleinKVPipeline"),
        "dev": model_index("Flux2Pipeline", text=False),
    }.items():
        (out / model / "model_index.json").write_text(text)
    make_lora(out / "lora")
    for f in out.rglob("*"):
        if f.is_file():
            f.chmod(0o644)
            print(f.stat().st_size, f.relative_to(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

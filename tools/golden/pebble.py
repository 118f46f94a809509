"""Describes a model of Pebble, the family for the tests: `pebble.py ../../testdata/tiny/pebble`.

Nothing but Python is needed: weights are drawn from the recipe when a test needs them.
"""

import json
import pathlib
import sys
import zlib

DIM, HEAD, MLP, LATENT, TEXT, TIME = 32, 16, 64, 8, 32, 32
WIDTH, GROUPS = 8, 4

CONFIGS = {
    "model_index.json": {"_class_name": "PebblePipeline"},
    "transformer/config.json": {
        "_class_name": "PebbleTransformer", "in_channels": LATENT, "num_layers": 0, "num_single_layers": 2,
        "attention_head_dim": HEAD, "num_attention_heads": DIM // HEAD, "joint_attention_dim": TEXT,
        "timestep_guidance_channels": TIME, "mlp_ratio": MLP / DIM, "axes_dims_rope": [4, 4, 4, 4],
    },
    "text_encoder/config.json": {
        "model_type": "pebble_text", "hidden_size": TEXT, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "vocab_size": 448,
    },
    "vae/config.json": {
        "block_out_channels": [WIDTH] * 4, "layers_per_block": 1, "latent_channels": LATENT,
        "norm_num_groups": GROUPS, "patch_size": [1, 1],
    },
}


def transformer():
    yield "stem.weight", [DIM, LATENT]
    yield "words.weight", [DIM, TEXT]
    yield "clock.first.weight", [DIM, TIME]
    yield "clock.second.weight", [DIM, DIM]
    yield "sway.weight", [3 * DIM, DIM]
    for i in range(2):
        yield f"grains.{i}.in.weight", [3 * DIM + 2 * MLP, DIM]
        yield f"grains.{i}.out.weight", [DIM, DIM + MLP]
        yield f"grains.{i}.query_norm.scale", [HEAD]
        yield f"grains.{i}.key_norm.scale", [HEAD]
    yield "finish.norm.weight", [2 * DIM, DIM]
    yield "finish.out.weight", [LATENT, DIM]


def text_encoder():
    yield "model.embed_tokens.weight", [448, TEXT]
    yield "model.norm.weight", [TEXT]
    for i in range(3):
        layer = f"model.layers.{i}."
        for norm, size in [("input_layernorm", TEXT), ("post_attention_layernorm", TEXT),
                           ("self_attn.q_norm", 8), ("self_attn.k_norm", 8)]:
            yield f"{layer}{norm}.weight", [size]
        for name, rows, columns in [("self_attn.q_proj", 32, TEXT), ("self_attn.k_proj", 16, TEXT),
                                    ("self_attn.v_proj", 16, TEXT), ("self_attn.o_proj", TEXT, 32),
                                    ("mlp.gate_proj", 48, TEXT), ("mlp.up_proj", 48, TEXT),
                                    ("mlp.down_proj", TEXT, 48)]:
            yield f"{layer}{name}.weight", [rows, columns]


def biased(name, shape):
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def resnet(name):
    for i in (1, 2):
        yield from biased(f"{name}.norm{i}", [WIDTH])
        yield from biased(f"{name}.conv{i}", [WIDTH, WIDTH, 3, 3])


def vae():
    for half, inputs, outputs, blocks, sampler, resnets in [
        ("encoder", 3, 2 * LATENT, "down_blocks", "downsamplers", 1),
        ("decoder", LATENT, 3, "up_blocks", "upsamplers", 2),
    ]:
        yield from biased(f"{half}.conv_in", [WIDTH, inputs, 3, 3])
        yield from biased(f"{half}.conv_norm_out", [WIDTH])
        yield from biased(f"{half}.conv_out", [outputs, WIDTH, 3, 3])
        for i in range(2):
            yield from resnet(f"{half}.mid_block.resnets.{i}")
        attention = f"{half}.mid_block.attentions.0"
        yield from biased(f"{attention}.group_norm", [WIDTH])
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            yield from biased(f"{attention}.{name}", [WIDTH, WIDTH])
        for i in range(4):
            for j in range(resnets):
                yield from resnet(f"{half}.{blocks}.{i}.resnets.{j}")
            if i < 3:
                yield from biased(f"{half}.{blocks}.{i}.{sampler}.0.conv", [WIDTH, WIDTH, 3, 3])
    yield from biased("quant_conv", [2 * LATENT, 2 * LATENT, 1, 1])
    yield from biased("post_quant_conv", [LATENT, LATENT, 1, 1])
    yield "bn.running_mean", [LATENT]
    yield "bn.running_var", [LATENT]


def described(name, shape):
    is_scale = len(shape) == 1 and not name.endswith(("bias", "running_mean"))
    inputs = 1
    for side in shape[1:]:
        inputs *= side
    std = 0.1 if len(shape) == 1 else inputs**-0.5
    return {"name": name, "shape": shape, "mean": float(is_scale), "std": round(std, 6), "seed": zlib.crc32(name.encode())}


folder = pathlib.Path(sys.argv[1])
for name, config in CONFIGS.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(config, indent=2) + "\n")
recipe = []
for component, tensors in [("text_encoder", text_encoder()), ("transformer", transformer()), ("vae", vae())]:
    lines = ",\n".join("  " + json.dumps(described(name, shape)) for name, shape in tensors)
    recipe.append(f' "{component}": {{"tensors": [\n{lines}\n ]}}')
(folder / "recipe.json").write_text("{\n" + ",\n".join(recipe) + "\n}\n")

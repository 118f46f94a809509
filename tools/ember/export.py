"""Checkpoints of a run to diffusers folders (bf16 weights, f32 batch-norm statistics).

    export.py RUN DATA OUT --model student     -> Ember, four steps, distilled
    export.py RUN DATA OUT --model base        -> Ember base, 20 steps or more with guidance
"""

import argparse
import json
import os
import shutil

import torch

from config import PAD_TOKEN, SPECIAL_TOKENS, TEXT_ENCODER, TEXT_TOKENS, TRANSFORMER, VAE, VOCAB

VERSION = "0.37.0"
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)


def transformer_config():
    t = TRANSFORMER
    return {
        "_class_name": "Flux2Transformer2DModel", "_diffusers_version": VERSION, "attention_head_dim": t["head_dim"],
        "axes_dims_rope": [32, 32, 32, 32], "eps": 1e-6, "guidance_embeds": False, "in_channels": t["in_channels"],
        "joint_attention_dim": t["joint_dim"], "mlp_ratio": 3.0, "num_attention_heads": t["heads"], "num_layers": t["double_blocks"],
        "num_single_layers": t["single_blocks"], "out_channels": None, "patch_size": 1, "rope_theta": 2000, "timestep_guidance_channels": 256,
    }


def text_encoder_config():
    t = TEXT_ENCODER
    return {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "dtype": "bfloat16",
        "eos_token_id": None, "head_dim": t["head_dim"], "hidden_act": "silu", "hidden_size": t["dim"], "initializer_range": 0.02,
        "intermediate_size": t["intermediate"], "max_position_embeddings": 32768, "max_window_layers": t["layers"] + 1, "model_type": "qwen3",
        "num_attention_heads": t["heads"], "num_hidden_layers": t["layers"] + 1, "num_key_value_heads": t["kv_heads"], "pad_token_id": None,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None, "sliding_window": None, "tie_word_embeddings": True,
        "use_cache": True, "use_sliding_window": False, "vocab_size": VOCAB,
    }


def vae_config():
    return {
        "_class_name": "AutoencoderKLFlux2", "_diffusers_version": VERSION, "act_fn": "silu", "batch_norm_eps": 1e-4, "batch_norm_momentum": 0.1,
        "block_out_channels": list(VAE["channels"]), "down_block_types": ["DownEncoderBlock2D"] * 4, "in_channels": 3,
        "latent_channels": VAE["latent"], "layers_per_block": VAE["layers"], "mid_block_add_attention": True, "norm_num_groups": VAE["groups"],
        "out_channels": 3, "patch_size": [2, 2], "sample_size": 512, "up_block_types": ["UpDecoderBlock2D"] * 4,
        "use_post_quant_conv": True, "use_quant_conv": True,
    }


def scheduler_config():
    return {
        "_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": VERSION, "base_image_seq_len": 256, "base_shift": 0.5,
        "invert_sigmas": False, "max_image_seq_len": 4096, "max_shift": 1.15, "num_train_timesteps": 1000, "shift": 3.0, "shift_terminal": None,
        "stochastic_sampling": False, "time_shift_type": "exponential", "use_beta_sigmas": False, "use_dynamic_shifting": True,
        "use_exponential_sigmas": False, "use_karras_sigmas": False,
    }


def model_index(distilled):
    return {
        "_class_name": "Flux2KleinPipeline", "_diffusers_version": VERSION, "is_distilled": distilled,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"], "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"], "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    }


def tokenizer_config():
    token = lambda k, text: {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": k < 3}
    first = VOCAB - len(SPECIAL_TOKENS)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": TEXT_TOKENS, "pad_token": PAD_TOKEN, "eos_token": SPECIAL_TOKENS[2],
        "padding_side": "right", "chat_template": TEMPLATE, "added_tokens_decoder": {str(first + k): token(k, s) for k, s in enumerate(SPECIAL_TOKENS)},
    }


def with_last_layer(state):
    """Adds a 28th layer that is the identity: transformers applies the final norm to the last state, so state 27 must not be the last."""
    first = "model.layers.0."
    last = f"model.layers.{TEXT_ENCODER['layers']}."
    extra = {last + n[len(first):]: torch.ones_like(v) if v.ndim == 1 else torch.zeros_like(v) for n, v in state.items() if n.startswith(first)}
    return {**state, **extra}


def write_json(value, *path):
    os.makedirs(os.path.join(*path[:-1]), exist_ok=True)
    with open(os.path.join(*path), "w") as file:
        json.dump(value, file, indent=2)


def write_folder(out, tokenizer, distilled, transformer, text_encoder, vae):
    """Writes the folder. `transformer`, `text_encoder`, `vae`: state dicts, written with their dtypes."""
    from safetensors.torch import save_file

    write_json(model_index(distilled), out, "model_index.json")
    for part, config, stem, state in (
        ("transformer", transformer_config(), "diffusion_pytorch_model", transformer),
        ("text_encoder", text_encoder_config(), "model", with_last_layer(text_encoder)),
        ("vae", vae_config(), "diffusion_pytorch_model", vae),
    ):
        write_json(config, out, part, "config.json")
        save_file({n: v.contiguous() for n, v in state.items()}, os.path.join(out, part, stem + ".safetensors"), {"format": "pt"})
    write_json(scheduler_config(), out, "scheduler", "scheduler_config.json")
    write_json(tokenizer_config(), out, "tokenizer", "tokenizer_config.json")
    shutil.copy(tokenizer, os.path.join(out, "tokenizer", "tokenizer.json"))


def main():
    from session import load_parts

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("data")
    parser.add_argument("out")
    parser.add_argument("--model", choices=("student", "base"), default="student")
    args = parser.parse_args()
    half = lambda state: {n: v.to(torch.bfloat16) if v.is_floating_point() and not n.startswith("bn.") else v for n, v in state.items()}
    states = [half(load_parts(args.run, stem)) for stem in (args.model, "text", "vae")]
    # a run that began with a packed model has that model's tokenizer
    own = os.path.join(args.run, "tokenizer.json")
    words = own if os.path.exists(own) else os.path.join(args.data, "tokenizer.json")
    write_folder(args.out, words, args.model == "student", *states)


if __name__ == "__main__":
    main()

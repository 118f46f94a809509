"""Configurations of the published models, and random weights that are fast to create."""

import torch

KLEIN = dict(attention_head_dim=128, in_channels=128, guidance_embeds=False)
TRANSFORMERS = {
    "4b": dict(KLEIN, num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680),
    "9b": dict(KLEIN, num_layers=8, num_single_layers=24, num_attention_heads=32, joint_attention_dim=12288),
    "dev": dict(
        KLEIN, num_layers=8, num_single_layers=48, num_attention_heads=48, joint_attention_dim=15360, guidance_embeds=True,
    ),
    "tiny": dict(KLEIN, num_layers=1, num_single_layers=2, num_attention_heads=1, joint_attention_dim=48),
}
QWEN3 = dict(
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
)
MISTRAL = dict(
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=32768,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=131072,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=1e9,
    sliding_window=None,
)
TEXT_ENCODERS = {
    "4b": dict(QWEN3, hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "9b": dict(QWEN3, hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
    "tiny": dict(
        QWEN3, hidden_size=16, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=448, tie_word_embeddings=True,
    ),
}
VAES = {
    "4b": dict(block_out_channels=(128, 256, 512, 512)),
    "9b": dict(block_out_channels=(128, 256, 512, 512)),
    "dev": dict(block_out_channels=(128, 256, 512, 512)),
    "tiny": dict(block_out_channels=(32, 32, 32, 32)),
}


def transformer(size):
    from diffusers import Flux2Transformer2DModel

    with torch.device("meta"):
        return Flux2Transformer2DModel(**TRANSFORMERS[size])


def text_encoder(size):
    from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        if size == "dev":
            return MistralForCausalLM(MistralConfig(**MISTRAL))
        return Qwen3ForCausalLM(Qwen3Config(**TEXT_ENCODERS[size]))


def vae(size):
    from diffusers import AutoencoderKLFlux2

    with torch.device("meta"):
        return AutoencoderKLFlux2(**VAES[size])


PATTERN = 1 << 19


def pattern():
    """Random values that all matrices repeat: 8 GB of distinct random numbers would take longer than the measurement."""
    return (torch.randn(PATTERN, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()


def materialise(model, device="cpu"):
    """Allocates a model from the meta device and fills it, in bf16."""
    model = model.to(torch.bfloat16).to_empty(device=device).eval()
    values = pattern().to(device)
    with torch.no_grad():
        for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
            if not tensor.is_floating_point():
                tensor.zero_()
            elif tensor.dim() < 2:
                tensor.fill_(1.0 if name.endswith(("weight", "running_var")) else 0.0)
            else:
                flat = tensor.view(-1)
                whole = flat.numel() // PATTERN * PATTERN
                flat[:whole].view(-1, PATTERN).copy_(values.expand(whole // PATTERN, PATTERN))
                flat[whole:].copy_(values[: flat.numel() - whole])
    return model

"""Sizes of the three networks, and the constants that every checkpoint shares.

The classes are klein's: Flux2Transformer2DModel, Qwen3ForCausalLM, AutoencoderKLFlux2. Only the widths and depths are small.
"""

STYLES = ("3d", "flat")
TEXT_TOKENS = 64
DEFAULT_SIZE = 256
VOCAB = 4096

TRANSFORMER = dict(heads=3, head_dim=128, double_blocks=1, single_blocks=9, joint_dim=384, in_channels=128)
TEXT_ENCODER = dict(vocab=VOCAB, dim=128, heads=4, kv_heads=2, head_dim=32, intermediate=256, layers=27)
TEXT_STATES = (9, 18, 27)
VAE = dict(channels=(32, 64, 96, 128), layers=1, groups=8, latent=32)

# The pipeline's prompt template (Qwen3's chat template with thinking switched off).
TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
PAD_TOKEN = SPECIAL_TOKENS[0]

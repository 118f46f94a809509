"""The phases of an image as diffusers and transformers run them, on synthetic weights in bf16.

Each function returns a module, its entry point and a caller: `call(entry)` runs the phase, as does `call(torch.compile(entry))`.
"""

import torch

import models

REAL_TOKENS = 64


def step(args, device):
    model = models.materialise(models.transformer(args.model), device)
    config = model.config
    width, height = args.size
    rows, columns = height // 16, width // 16

    def grid(t):
        return torch.cartesian_prod(torch.tensor([t]), torch.arange(rows), torch.arange(columns), torch.arange(1))

    # Reference tokens follow the image's, with other time coordinates.
    ids = torch.cat([grid(0)] + [grid(10 * (i + 1)) for i in range(getattr(args, "refs", 0))])
    words = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(args.tokens))
    inputs = dict(
        hidden_states=torch.randn(1, ids.shape[0], config.in_channels, device=device).bfloat16(),
        encoder_hidden_states=torch.randn(1, args.tokens, config.joint_attention_dim, device=device).bfloat16(),
        timestep=torch.tensor([0.7], device=device).bfloat16(),
        img_ids=ids[None].to(device),
        txt_ids=words[None].to(device),
        guidance=torch.tensor([4.0], device=device).bfloat16() if config.guidance_embeds else None,
        return_dict=False,
    )
    return model, model, lambda entry: entry(**inputs)


def language_model(args, device):
    """Returns the language model and the ids of a prompt."""
    model = models.materialise(models.text_encoder(args.model), device)
    # The rotary frequencies are a computed buffer, not a loaded one.
    rotary = model.model.rotary_emb
    if hasattr(rotary, "rope_init_fn"):
        rotary.inv_freq = rotary.rope_init_fn(model.config, device)[0]
    return model, torch.arange(args.tokens, device=device)[None] * 7919 % model.config.vocab_size


def text(args, device):
    # As in diffusers' pipeline: all layers and the head, with the hidden states stored.
    model, ids = language_model(args, device)
    mask = (torch.arange(args.tokens, device=device) < REAL_TOKENS).long()[None]
    inputs = dict(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    return model, model, lambda entry: entry(**inputs)


def token(args, device):
    """One token of a rewritten prompt, after a prompt of `args.tokens` in the key/value cache."""
    model, ids = language_model(args, device)
    cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

    def run(entry):
        cache.crop(args.tokens)
        return entry(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)

    return model, model, run


def decode(args, device):
    model = models.materialise(models.vae(args.model), device).to(memory_format=torch.channels_last)
    width, height = args.size
    latent = torch.randn(1, model.config.latent_channels, height // 8, width // 8, device=device).bfloat16()
    latent = latent.to(memory_format=torch.channels_last)
    return model, model.decode, lambda entry: entry(latent, return_dict=False)


ALL = {"step": step, "text": text, "token": token, "decode": decode}


def arguments(parser, size, repeat):
    """Adds the arguments that all peers share."""
    parser.add_argument("phase", choices=list(ALL))
    parser.add_argument("--model", choices=sorted(models.TRANSFORMERS), default="4b")
    parser.add_argument("--size", type=lambda s: tuple(map(int, s.split("x"))), default=size)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=repeat)

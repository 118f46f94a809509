"""Times one phase with PyTorch, diffusers and transformers in bf16 on the CPU; prints JSON."""

import argparse
import json
import time

import torch

import models

REAL_TOKENS = 64


def step(args):
    model = models.materialise(models.transformer(args.model))
    config = model.config
    width, height = args.size
    rows, columns = height // 16, width // 16
    grid = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns), torch.arange(1))
    words = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(args.tokens))
    inputs = dict(
        hidden_states=torch.randn(1, rows * columns, config.in_channels).bfloat16(),
        encoder_hidden_states=torch.randn(1, args.tokens, config.joint_attention_dim).bfloat16(),
        timestep=torch.tensor([0.7]).bfloat16(),
        img_ids=grid[None],
        txt_ids=words[None],
        guidance=None,
        return_dict=False,
    )
    return lambda: model(**inputs)


def text(args):
    # As diffusers' pipeline runs it: all layers and the head, the hidden states kept.
    model = models.materialise(models.text_encoder(args.model))
    # The rotary frequencies are a buffer that is computed, not loaded.
    rotary = model.model.rotary_emb
    frequencies, _ = rotary.rope_init_fn(model.config, "cpu") if hasattr(rotary, "rope_init_fn") else (None, None)
    if frequencies is not None:
        rotary.inv_freq = frequencies
    ids = torch.arange(args.tokens)[None] * 7919 % model.config.vocab_size
    mask = (torch.arange(args.tokens) < REAL_TOKENS).long()[None]
    return lambda: model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)


def decode(args):
    model = models.materialise(models.vae(args.model)).to(memory_format=torch.channels_last)
    width, height = args.size
    latent = torch.randn(1, model.config.latent_channels, height // 8, width // 8).bfloat16()
    latent = latent.to(memory_format=torch.channels_last)
    return lambda: model.decode(latent, return_dict=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=["step", "text", "decode"])
    parser.add_argument("--model", choices=sorted(models.TRANSFORMERS), default="4b")
    parser.add_argument("--size", type=lambda s: tuple(map(int, s.split("x"))), default=(512, 512))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    run = {"step": step, "text": text, "decode": decode}[args.phase](args)
    seconds = []
    with torch.inference_mode():
        run()
        for _ in range(args.repeat):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "seconds": seconds}))


main()

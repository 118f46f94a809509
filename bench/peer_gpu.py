"""Times phases with PyTorch, diffusers and transformers in bf16 on a GPU, eager and compiled; prints a line of JSON each.

Several of these may compile at once: with --together FOLDER and --parties N, nobody is timed before N have compiled, and then
one at a time.
"""

import argparse
import contextlib
import fcntl
import json
import pathlib
import time

import torch

import models

REAL_TOKENS = 64
CUDA = "cuda"


def step(args):
    model = models.materialise(models.transformer(args.model), CUDA)
    config = model.config
    width, height = args.size
    rows, columns = height // 16, width // 16

    def grid(t):
        return torch.cartesian_prod(torch.tensor([t]), torch.arange(rows), torch.arange(columns), torch.arange(1))

    # References lie behind the picture, at other times.
    ids = torch.cat([grid(0)] + [grid(10 * (i + 1)) for i in range(args.refs)])
    words = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(args.tokens))
    inputs = dict(
        hidden_states=torch.randn(1, ids.shape[0], config.in_channels, device=CUDA).bfloat16(),
        encoder_hidden_states=torch.randn(1, args.tokens, config.joint_attention_dim, device=CUDA).bfloat16(),
        timestep=torch.tensor([0.7], device=CUDA).bfloat16(),
        img_ids=ids[None].to(CUDA),
        txt_ids=words[None].to(CUDA),
        guidance=None,
        return_dict=False,
    )
    compiled = torch.compile(model)
    return lambda: model(**inputs), lambda: compiled(**inputs)


def text(args):
    # As diffusers' pipeline runs it: all layers and the head, the hidden states kept.
    model = models.materialise(models.text_encoder(args.model), CUDA)
    rotary = model.model.rotary_emb
    if hasattr(rotary, "rope_init_fn"):
        rotary.inv_freq = rotary.rope_init_fn(model.config, CUDA)[0]
    ids = torch.arange(args.tokens, device=CUDA)[None] * 7919 % model.config.vocab_size
    mask = (torch.arange(args.tokens, device=CUDA) < REAL_TOKENS).long()[None]
    return (lambda: model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)), None


def decode(args):
    model = models.materialise(models.vae(args.model), CUDA).to(memory_format=torch.channels_last)
    width, height = args.size
    latent = torch.randn(1, model.config.latent_channels, height // 8, width // 8, device=CUDA).bfloat16()
    latent = latent.to(memory_format=torch.channels_last)
    compiled = torch.compile(model.decode)
    return lambda: model.decode(latent, return_dict=False), lambda: compiled(latent, return_dict=False)


@contextlib.contextmanager
def alone(args, name):
    if not args.together:
        yield
        return
    folder = pathlib.Path(args.together)
    (folder / f"ready {name}").touch()
    deadline = time.monotonic() + args.patience
    while len(list(folder.glob("ready *"))) < args.parties and time.monotonic() < deadline:
        time.sleep(0.2)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def first_run(run):
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(run, repeat):
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    times.sort()
    return dict(median=times[len(times) // 2], best=times[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=["step", "text", "decode"])
    parser.add_argument("--model", choices=sorted(models.TRANSFORMERS), default="4b")
    parser.add_argument("--size", type=lambda s: tuple(map(int, s.split("x"))), default=(1024, 1024))
    parser.add_argument("--refs", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--together", metavar="FOLDER")
    parser.add_argument("--parties", type=int, default=1)
    parser.add_argument("--patience", type=float, default=150)
    args = parser.parse_args()
    torch.manual_seed(0)
    # What a user of diffusers is told to do before anything else.
    torch.backends.cudnn.benchmark = True
    name = f"{args.phase} {args.model} {args.size[0]}x{args.size[1]} refs {args.refs}"
    with torch.inference_mode():
        eager, compiled = {"step": step, "text": text, "decode": decode}[args.phase](args)
        kinds = [(kind, run) for kind, run in [("eager", eager), ("compiled", compiled)] if run]
        first = {kind: first_run(run) for kind, run in kinds}
        with alone(args, name):
            for kind, run in kinds:
                result = dict(first=first[kind], **measure(run, args.repeat))
                print(json.dumps(dict(name=name, kind=kind, torch=torch.__version__, **result)), flush=True)


main()

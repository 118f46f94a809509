"""Dumps of training: diffusers' transformer with PEFT's adapters, in f32.

    python tools/golden/train.py testdata/train

Each case has a random transformer, an adapter and some examples. Everything that goes in is drawn from names (`common.draw`),
so that only results are stored: `CASE.safetensors` has the loss and the gradient of every adapter tensor before the first step,
and the tensors after `steps` steps of torch's AdamW, each step with its own noise. `cases.json` describes the
cases, and how far torch's own bf16 is off.
"""

import math
import sys
from pathlib import Path

import torch
from diffusers import Flux2Transformer2DModel
from peft import LoKrConfig, LoraConfig, inject_adapter_in_model
from torch.nn.functional import mse_loss

from common import bf16_exact, draw, save_json, save_tensors, versions

torch.set_grad_enabled(True)

KLEIN = dict(num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=8, axes_dims_rope=[2, 2, 2, 2],
             in_channels=8, joint_attention_dim=12, guidance_embeds=False)  # fmt: skip
DEV = dict(num_layers=1, num_single_layers=3, num_attention_heads=1, attention_head_dim=16, axes_dims_rope=[4, 4, 4, 4],
           in_channels=12, joint_attention_dim=10, guidance_embeds=True)  # fmt: skip
# An example: text tokens, height, width, and height and width of each reference.
ONE = [[5, 3, 4, []]]
EDIT = [[4, 2, 3, [[2, 2], [3, 1]]]]
BATCH = [[5, 3, 4, []], [3, 2, 5, [[2, 3]]]]
CASES = {
    "klein_lora": dict(config=KLEIN, kind="lora", rank=2, alpha=3.0, examples=ONE),
    "klein_lora_batch": dict(config=KLEIN, kind="lora", rank=2, alpha=2.0, examples=BATCH, max_grad_norm=0.5),
    "klein_lora_style": dict(config=KLEIN, kind="lora", rank=3, alpha=3.0, examples=EDIT, targets="transformer_blocks."),
    "klein_lora_single": dict(config=KLEIN, kind="lora", rank=2, alpha=2.0, examples=ONE,
                              targets="single_transformer_blocks.1.attn.to_out"),
    "klein_dora": dict(config=KLEIN, kind="dora", rank=2, alpha=2.0, examples=EDIT),
    "klein_lokr": dict(config=KLEIN, kind="lokr", rank=2, alpha=2.0, examples=BATCH),
    "dev_lora": dict(config=DEV, kind="lora", rank=3, alpha=1.5, examples=EDIT),
    "dev_dora_batch": dict(config=DEV, kind="dora", rank=2, alpha=4.0, examples=BATCH),
    "dev_lokr_factor": dict(config=DEV, kind="lokr", rank=1, alpha=1.0, examples=ONE, factor=4),
}  # fmt: skip
STEPS, LR, DECAY = 20, 1e-3, 0.01


def make_transformer(case, config):
    model = Flux2Transformer2DModel(
        patch_size=1, timestep_guidance_channels=256, mlp_ratio=3.0, rope_theta=2000, eps=1e-6, **config
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            z = draw(f"{case}/{name}", p.shape)
            p.copy_(bf16_exact(1.2 + 0.3 * z if p.ndim == 1 else z * (1.0 / math.sqrt(p.shape[1]))))
    return model


def block_layers(model, prefix):
    """The names of linear layers inside of blocks that start with `prefix`."""
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    inside = [n for n in linear if n.startswith(("transformer_blocks.", "single_transformer_blocks."))]
    return [n for n in inside if n.startswith(prefix)]


def add_adapter(case, model, spec):
    targets = block_layers(model, spec.get("targets", ""))
    common = dict(r=spec["rank"], target_modules=targets)
    if spec["kind"] == "lokr":
        config = LoKrConfig(alpha=spec["alpha"], decompose_factor=spec.get("factor", -1), **common)
    else:
        config = LoraConfig(lora_alpha=spec["alpha"], use_dora=spec["kind"] == "dora", **common)
    model = inject_adapter_in_model(config, model)
    params = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name or "lokr_" in name)
            if p.requires_grad:
                short = name.replace(".default", "")
                # Magnitudes are used as PEFT sets them, under the name that its files have.
                if "magnitude" in name:
                    short = short.removesuffix(".weight")
                    p.mul_(1.0 + 0.1 * draw(f"{case}/{short}", p.shape))
                else:
                    p.copy_(0.3 * draw(f"{case}/{short}", p.shape))
                params[short] = p
    return model, params


def ids(text, height, width, references):
    grid = lambda t, h, w: [[t, y, x, 0] for y in range(h) for x in range(w)]  # noqa: E731
    image = grid(0, height, width)
    for i, (h, w) in enumerate(references):
        image += grid(10 * (i + 1), h, w)
    return torch.tensor(image), torch.tensor([[0, 0, 0, i] for i in range(text)])


def loss_of(case, model, spec, step):
    """The mean squared error over all image tokens of the batch. Examples have different sizes: they run one by one."""
    config = spec["config"]
    channels, predictions, targets = config["in_channels"], [], []
    for i, (text, height, width, references) in enumerate(spec["examples"]):
        latents = draw(f"{case}/latents{i}", (height * width, channels))
        states = draw(f"{case}/text{i}", (text, config["joint_attention_dim"]))
        noise = draw(f"{case}/noise{i}/{step}", latents.shape)
        sigma = ((7 * step + 3 * i) % 10 + 0.5) / 10
        refs = [draw(f"{case}/reference{i}/{j}", (h * w, channels)) for j, (h, w) in enumerate(references)]
        sigma = torch.tensor(sigma, dtype=torch.float32)
        noised = (1 - sigma) * latents + sigma * noise
        img_ids, txt_ids = ids(text, height, width, references)
        dtype = model.dtype
        out = model(
            hidden_states=torch.cat([noised, *refs])[None].to(dtype), encoder_hidden_states=states[None].to(dtype), timestep=sigma[None],
            img_ids=img_ids, txt_ids=txt_ids, guidance=torch.ones(1) if config["guidance_embeds"] else None,
            return_dict=False,
        )[0]  # fmt: skip
        predictions.append(out[0, : height * width].float())
        targets.append(noise - latents)
    return mse_loss(torch.cat(predictions), torch.cat(targets))


def run(case, spec, out):
    model, params = add_adapter(case, make_transformer(case, spec["config"]), spec)
    tensors = {}
    if spec["kind"] == "dora":
        tensors |= {f"start.{k}": v.clone() for k, v in params.items() if "magnitude" in k}
    optimizer = torch.optim.AdamW(params.values(), lr=LR, weight_decay=DECAY, foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(case, model, spec, step)
        loss.backward()
        if step == 0:
            tensors["loss"] = loss.detach().reshape(1)
            tensors |= {f"grad.{k}": p.grad.clone() for k, p in params.items()}
        if "max_grad_norm" in spec:
            torch.nn.utils.clip_grad_norm_(params.values(), spec["max_grad_norm"])
        optimizer.step()
    tensors["last_loss"] = loss.detach().reshape(1)
    tensors |= {f"after.{k}": p for k, p in params.items()}
    save_tensors(tensors, out / f"{case}.safetensors")
    distances = bf16_distances(case, spec, tensors)
    print(case, tensors["loss"].item(), loss.item(), distances)
    return distances


def bf16_distances(case, spec, tensors):
    """How far torch's own loss and gradients are off from f32 with a model in bf16 and adapters in f32, under autocast."""
    model, params = add_adapter(case, make_transformer(case, spec["config"]), spec)
    trained = {id(p) for p in params.values()}
    for p in model.parameters():
        if id(p) not in trained:
            p.data = p.data.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(case, model, spec, 0)
    loss.float().backward()
    errors = [(p.grad.float() - tensors[f"grad.{name}"]).square().sum() for name, p in params.items()]
    squares = [tensors[f"grad.{name}"].square().sum() for name in params]
    gradient = (sum(errors) / sum(squares)).sqrt().item()
    return dict(loss=abs(loss.item() / tensors["loss"].item() - 1), gradient=gradient)


def main(out):
    out.mkdir(parents=True, exist_ok=True)
    cases = {case: dict(spec, bf16=run(case, spec, out)) for case, spec in CASES.items()}
    head = dict(command="python tools/golden/train.py testdata/train", versions=versions(), tolerance=1e-5,
                why="f32 in both; relative L2 of each tensor against its group's", steps=STEPS, lr=LR, weight_decay=DECAY)  # fmt: skip
    save_json({**head, "cases": cases}, out / "cases.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

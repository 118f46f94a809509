"""Times a training step of a LoRA in Kiln and in PyTorch (diffusers' transformer, PEFT, AdamW), in turns.

    python bench/train_speed.py --kiln target/release/kiln [--size 512] [--dtype f32] [--rank 16] [--rounds 3]

Without `--model` the transformer is a random klein with 2 double and 4 single blocks of width 1536; with it, a folder of
diffusers that `kiln train` takes, such as one of tools/ember/unpack.py. Both sides take one example of the same size with 64
text tokens, keep all activations, and train all layers of the blocks. Needs torch, diffusers, transformers and peft.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from diffusers import Flux2Transformer2DModel
from peft import LoraConfig, inject_adapter_in_model
from PIL import Image

CONFIG = dict(patch_size=1, in_channels=128, num_layers=2, num_single_layers=4, attention_head_dim=128, num_attention_heads=12,
              joint_attention_dim=384, timestep_guidance_channels=256, mlp_ratio=3.0, axes_dims_rope=[32, 32, 32, 32],
              rope_theta=2000, eps=1e-6, guidance_embeds=False)  # fmt: skip
TEXT = 64


def random_model(folder, ember):
    """A folder with a random transformer between Ember's own text encoder and autoencoder."""
    shutil.copytree(ember, folder)
    shutil.rmtree(folder / "transformer")
    torch.manual_seed(0)
    Flux2Transformer2DModel(**CONFIG).save_pretrained(folder / "transformer")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"is_distilled": False}))
    return folder


def kiln_seconds(args, model, work):
    """The median of the steps' seconds in the log, without the first two."""
    command = [args.kiln, "train", work / "images", "-m", model, "-o", work / "lora.safetensors", "--overwrite", "-q",
               "--resolution", args.size, "--dtype", args.dtype, "--rank", args.rank, "--steps", args.steps + 2,
               "--checkpointing", "off", "--cache-dir", work / "cache", "--caption-dropout", 0, "--distilled-anyway"]
    command += ["--threads", args.threads] if args.threads else []
    subprocess.run([str(part) for part in command], check=True)
    lines = (work / "lora.train/log.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["seconds"] for line in lines[2:])


class Peer:
    """The same step in PyTorch."""

    def __init__(self, args, model):
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
        self.net = Flux2Transformer2DModel.from_pretrained(model / "transformer", torch_dtype=dtype)
        self.net.requires_grad_(False)
        linear = [n for n, m in self.net.named_modules() if isinstance(m, torch.nn.Linear) and "transformer_blocks." in n]
        inject_adapter_in_model(LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=linear), self.net)
        self.trained = [p for p in self.net.parameters() if p.requires_grad]
        for p in self.trained:
            p.data = p.data.float()
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
        side = args.size // 16
        self.image = torch.randn(1, side * side, 128)
        self.text = torch.randn(1, TEXT, self.net.config.joint_attention_dim, dtype=dtype)
        self.ids = torch.cartesian_prod(torch.arange(1), torch.arange(side), torch.arange(side), torch.arange(1))
        self.text_ids = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(TEXT))
        self.dtype = dtype

    def step(self):
        noise, sigma = torch.randn_like(self.image), torch.sigmoid(torch.randn(1))
        noised = (1 - sigma) * self.image + sigma * noise
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype != torch.float32):
            out = self.net(hidden_states=noised.to(self.dtype), encoder_hidden_states=self.text, timestep=sigma,
                           img_ids=self.ids, txt_ids=self.text_ids, return_dict=False)[0]  # fmt: skip
        loss = (out.float() - (noise - self.image)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, steps):
        times = []
        for _ in range(steps + 2):
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--ember", type=Path, help="a folder of tools/ember/unpack.py, for the random model")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "images").mkdir()
        Image.effect_noise((args.size, args.size), 60).convert("RGB").save(work / "images/a.png")
        (work / "images/a.txt").write_text("a fox")
        model = args.model or random_model(work / "model", args.ember)
        peer = Peer(args, model)
        for _ in range(args.rounds):
            kiln, other = kiln_seconds(args, model, work), peer.seconds(args.steps)
            print(f"kiln {kiln:.3f} s  torch {other:.3f} s  ratio {other / kiln:.2f}", flush=True)


main()

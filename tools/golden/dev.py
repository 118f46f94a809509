"""Describes the small random dev model, and cuts the dumps of diffusers' Flux2Pipeline on it to what the tests need.

    python tools/golden/dev.py MODEL DUMPS testdata/dev

MODEL is the model's folder in diffusers' layout, DUMPS the folder of the dumps. Every tensor of the model is
`mean + std * randn(seed)`, rounded to bf16, so that `recipe.json` with these numbers is all that has to be stored: Kiln
draws the same values. `sha256` is that of all bytes in the order of the list. Needs torch, to compare the model's tensors
with the recipe.
"""

import hashlib
import json
import shutil
import sys
import zlib
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

CASES = ["t2i_guidance4", "t2i_seq64", "t2i_long_prompt", "t2i_empty_prompt", "edit_2ref"]
INPUTS = ["ref_a_80x70.png", "ref_b_64x112.png"]
CONFIGS = ["model_index.json", "transformer/config.json", "text_encoder/config.json", "vae/config.json",
           "scheduler/scheduler_config.json"]  # fmt: skip
# Two tables of half rows, each with its number of rows; row i of the tensor is row i modulo these.
TABLES = (521, 509)


def seed(tag):
    return zlib.crc32(tag.encode())


def draw(seed, shape):
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def linear(shape, gain):
    return 0.0, gain / (torch.Size(shape[1:]).numel() ** 0.5)


def text_rule(name, shape):
    if len(shape) == 1:
        return 1.0, 0.15
    gains = {"q_proj": 1.5, "k_proj": 1.5, "o_proj": 0.9, "down_proj": 0.7, "patch_conv": 1.2}
    return linear(shape, next((gain for part, gain in gains.items() if part in name), 1.0))


def transformer_rule(name, shape):
    if len(shape) == 1:
        return 1.7, 0.3
    if "_modulation" in name:
        return linear(shape, 1.3)
    if name.startswith("norm_out"):
        return linear(shape, 0.4)
    if "embedder.linear" in name:
        return linear(shape, 1.4)
    if any(part in name for part in ("to_out", "to_add_out", "linear_out")):
        return linear(shape, 2.2)
    return linear(shape, 0.35 if name.startswith("context_embedder") else 1.0)


def vae_rule(name, shape):
    if "norm" in name:
        return (1.0, 0.1) if name.endswith("weight") else (0.0, 0.1)
    if name.endswith("bias"):
        return 0.0, 0.05
    if name == "encoder.conv_out.weight":
        return linear(shape, 3.0)
    small = name == "decoder.conv_out.weight" or "to_out" in name or "conv2" in name
    return linear(shape, 0.8 if small else 1.2)


RULES = {"text_encoder": ("dev/text_encoder", text_rule), "transformer": ("dev/transformer", transformer_rule),
         "vae": ("vae", vae_rule)}  # fmt: skip


def describe(component, name, tensor):
    tag, rule = RULES[component]
    entry = {"name": name, "shape": list(tensor.shape)}
    if name.startswith("bn."):
        return entry | {"values": tensor.float().tolist()}
    for part, std, top in (("embed_tokens", 0.35, 1.0), ("lm_head", 0.9, 2.5)):
        if name.endswith(part + ".weight"):
            tables = [{"rows": rows, "seed": seed(f"{tag}/{part}/table{rows}")} for rows in TABLES]
            entry |= {"std": std, "top": top, "tables": tables}
            end = {"row": 2, "std": 2.5 * 0.9, "seed": seed(f"{tag}/lm_head/eos")}
            return entry | ({"end": end} if part == "lm_head" else {})
    mean, std = rule(name, tensor.shape)
    return entry | {"mean": mean, "std": std, "seed": seed(f"{tag}/{name}")}


def make(entry):
    """The tensor that an entry of the recipe describes."""
    shape, std = entry["shape"], entry.get("std")
    if "values" in entry:
        return torch.tensor(entry["values"]).to(torch.bfloat16)
    if "tables" not in entry:
        return (entry["mean"] + std * draw(entry["seed"], shape)).to(torch.bfloat16)
    halves = []
    for table in entry["tables"]:
        rows, top = table["rows"], entry["top"]
        t = (std * draw(table["seed"], (rows, shape[1] // 2))).clamp(-top, top)
        largest = t.abs().argmax(1, keepdim=True)
        t = t.scatter(1, largest, t.gather(1, largest).sign() * top).to(torch.bfloat16)
        halves.append(t[torch.arange(shape[0]) % rows])
    t = torch.cat(halves, 1)
    if end := entry.get("end"):
        t[end["row"]] = (end["std"] * draw(end["seed"], (shape[1],))).to(torch.bfloat16)
    return t


def tensors(folder):
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():
                yield name, f.get_tensor(name)


def recipe(model):
    components = {}
    for component in RULES:
        entries, digest = [], hashlib.sha256()
        for name, tensor in sorted(tensors(model / component)):
            if name == "bn.num_batches_tracked":
                continue
            entry = describe(component, name, tensor)
            assert torch.equal(make(entry), tensor), name
            digest.update(tensor.contiguous().view(torch.int16).numpy().tobytes())
            entries.append(entry)
        components[component] = {"sha256": digest.hexdigest(), "tensors": entries}
    return components


def cut_prompts(dumps, out, names):
    """Ids and embeddings of these prompts, the latter without the rows of the padding but the last, and the first prompt's states."""
    info = json.loads((dumps / "prompts.json").read_text())
    kept = {}
    with safe_open(dumps / "prompts.safetensors", "pt") as f:
        for name in names:
            rows = min(info["prompts"][name]["n_tokens"] + 1, 512)
            kept[f"{name}.prompt_embeds"] = f.get_tensor(f"{name}.prompt_embeds")[-rows:].contiguous()
            kept[f"{name}.input_ids"] = f.get_tensor(f"{name}.input_ids")
        for states in ("hidden_states_real_rows", "hidden_states_pad_row"):
            kept[f"P0.{states}"] = f.get_tensor(f"P0.{states}")
    save_file(kept, out / "prompts.safetensors")
    prompts = {name: {key: info["prompts"][name][key] for key in ("prompt", "n_tokens")} for name in names}
    info = {"versions": info["versions"], "prompts": prompts}
    (out / "prompts.json").write_text(json.dumps(info, indent=1, ensure_ascii=False) + "\n")


def main():
    model, dumps, out = map(Path, sys.argv[1:4])
    shutil.rmtree(out, ignore_errors=True)
    tiny, reference = out / "tiny/dev", out / "reference"
    reference.mkdir(parents=True)
    for config in CONFIGS:
        (tiny / config).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model / config, tiny / config)
    lines = []
    for component, description in recipe(model).items():
        entries = ",\n  ".join(json.dumps(entry) for entry in description["tensors"])
        lines.append(f' "{component}": {{"sha256": "{description["sha256"]}", "tensors": [\n  {entries}\n ]}}')
    (tiny / "recipe.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for case in CASES:
        info = json.loads((dumps / f"{case}.json").read_text())
        info.pop("tensors")
        (reference / f"{case}.json").write_text(json.dumps(info, indent=1) + "\n")
        shutil.copyfile(dumps / f"{case}.safetensors", reference / f"{case}.safetensors")
        for image in info["images"]:
            shutil.copyfile(dumps / image, reference / image)
    for image in INPUTS:
        shutil.copyfile(dumps / image, reference / image)
    cut_prompts(dumps, reference, ["P0", "P1", "P3", "TYPED", "EMPTY", "LONG"])
    for file in out.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)


main()

"""Quantizes the weights to int8 with one scale per output row, and writes the single file that ships.

`pack.py FOLDER OUT` reads a diffusers folder (see `export.py`) and writes tensors `transformer.…`, `text_encoder.…`, `vae.…`.
A matrix or kernel is I8 with `<name>_scale` F32 `[rows]`, value = int8 · scale. Vectors stay F32, the listed layers BF16.
The configurations, the tokenizer and a short model card are stored in the header.
"""

import argparse
import json
import os

import torch

from config import TEXT_ENCODER

# Layers whose rounding error reaches every pixel stay in 16 bits, which costs little.
SIXTEEN_BIT = {
    "transformer": ("x_embedder.", "proj_out.", "time_guidance_embed.", "norm_out."),
    "text_encoder": (),
    "vae": ("encoder.conv_in.", "decoder.conv_out.", "quant_conv.", "post_quant_conv.", "encoder.conv_out.", "decoder.conv_in."),
}
CLIPS = (1.0, .98, .96, .94, .92, .9, .87, .84, .8)


def quantize(weight):
    """Returns (int8 of `weight`'s shape, f32 scale `[rows]`); each row is clipped where its squared error is smallest."""
    rows = weight.float().reshape(len(weight), -1)
    top = rows.abs().amax(1).clamp_min(1e-12)
    best, best_error = top / 127, None
    for clip in CLIPS:
        scale = top * clip / 127
        error = ((rows / scale[:, None]).round().clamp(-127, 127) * scale[:, None] - rows).square().sum(1)
        if best_error is None:
            best_error = error
        else:
            best = torch.where(error < best_error, scale, best)
            best_error = torch.minimum(error, best_error)
    return (rows / best[:, None]).round().clamp(-127, 127).to(torch.int8).reshape(weight.shape), best


def dequantize(values, scale):
    return values.float() * scale.float().view(-1, *(1,) * (values.ndim - 1))


def packed(part, state):
    """Returns name -> tensor as it ships."""
    out = {}
    for name, value in state.items():
        if not value.is_floating_point():
            out[name] = value
        elif value.ndim < 2:
            out[name] = value.float()
        elif name.startswith(SIXTEEN_BIT[part]):
            out[name] = value.to(torch.bfloat16)
        else:
            out[name], out[name + "_scale"] = quantize(value)
    return out


def unpacked(tensors):
    """Reverses `packed`: returns f32 tensors."""
    out = {}
    for name, value in tensors.items():
        if name.endswith("_scale") and name[:-6] in tensors and tensors[name[:-6]].dtype == torch.int8:
            continue
        out[name] = dequantize(value, tensors[name + "_scale"]) if value.dtype == torch.int8 else value.float() if value.is_floating_point() else value
    return out


def quantized_state(part, state):
    """Returns a network's state after packing and unpacking, for measuring the loss."""
    return unpacked(packed(part, state))


def read_packed(path, part):
    """Returns the f32 tensors of one part ("transformer", "text_encoder", "vae") of a packed file, as a network loads them."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return unpacked({name[len(part) + 1:]: file.get_tensor(name) for name in file.keys() if name.startswith(part + ".")})


def read_delta(parent, path):
    """Returns the f32 tensors of the transformer that `delta.py` wrote as a difference from the packed file `parent`."""
    import delta

    types = {"uint32": torch.float32, "uint16": torch.bfloat16, "int8": torch.int8}
    arrays = delta.rebuild(parent, path)
    return unpacked({name: torch.from_numpy(value).view(types[str(value.dtype)]) for name, value in arrays.items()})


METADATA = (
    "model_index.json", "transformer/config.json", "text_encoder/config.json", "vae/config.json", "scheduler/scheduler_config.json",
    "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json",
)


def main():
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--card", required=True, help="file with a short model card")
    parser.add_argument("--vae", metavar="FILE", help="packed file whose autoencoder is kept byte for byte")
    parser.add_argument("--steps", type=int, help="default number of steps, if not the variant's")
    parser.add_argument("--guidance", type=float, help="default guidance, if not the variant's")
    args = parser.parse_args()
    tensors, files = {}, {"transformer": "diffusion_pytorch_model", "text_encoder": "model", "vae": "diffusion_pytorch_model"}
    for part, stem in files.items():
        state = load_file(os.path.join(args.folder, part, stem + ".safetensors"))
        if part == "text_encoder":  # the last layer and the final norm are never used
            state = {n: v for n, v in state.items() if not n.startswith(f"model.layers.{TEXT_ENCODER['layers']}.")}
        tensors.update({f"{part}.{name}": value for name, value in packed(part, state).items()})
    if args.vae:
        with safe_open(args.vae, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys() if name.startswith("vae.")})
    metadata = {"format": "pt", "kiln.default_size": "256"}
    metadata.update({f"kiln.default_{name}": str(value) for name in ("steps", "guidance") if (value := getattr(args, name)) is not None})
    for name in METADATA:
        with open(os.path.join(args.folder, name)) as file:
            metadata[name] = json.dumps(json.load(file), ensure_ascii=False, separators=(",", ":"))
    with open(args.card) as file:
        metadata["model_card"] = file.read()
    save_file(tensors, args.out, metadata)
    print(f"{args.out}: {len(tensors)} tensors, {os.path.getsize(args.out):,} bytes")


if __name__ == "__main__":
    main()

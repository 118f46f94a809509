"""Writes a diffusers folder of a published model's size with random weights, for peers that read only files.

    python make_model.py OUT [--model 4b]        (16 GB for 4b)
    python make_model.py OUT --sparse            (zeros in sparse files, to measure startup time)
"""

import argparse
import json
import pathlib

import models

NAMES = {"torch.bfloat16": "BF16", "torch.int64": "I64"}


def write(path, model, values):
    """Writes a safetensors file as a stream, without holding the model in memory."""
    header, offset, plan = {}, 0, []
    tied = {"lm_head.weight"} if getattr(model.config, "tie_word_embeddings", False) else set()
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        integer = not tensor.is_floating_point()
        size = tensor.numel() * (8 if integer else 2)
        header[name] = {
            "dtype": "I64" if integer else "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        plan.append((name, tensor.dim(), size, integer))
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    one = b"\x80\x3f"
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        if values is None:
            out.truncate(8 + len(text) + offset)
            return
        for name, dimensions, size, integer in plan:
            if integer:
                out.write(bytes(size))
            elif dimensions < 2:
                ones = name.endswith(("weight", "running_var"))
                out.write(one * (size // 2) if ones else bytes(size))
            else:
                for start in range(0, size, len(values)):
                    out.write(values[: min(len(values), size - start)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--model", choices=sorted(models.TRANSFORMERS), default="4b")
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--part", action="append", help="only this component: transformer, text_encoder or vae; repeatable")
    args = parser.parse_args()
    values = None if args.sparse else models.pattern().view(dtype=__import__("torch").uint8).numpy().tobytes()
    parts = {
        "transformer": (models.transformer, "diffusion_pytorch_model.safetensors"),
        "text_encoder": (models.text_encoder, "model.safetensors"),
        "vae": (models.vae, "diffusion_pytorch_model.safetensors"),
    }
    for part, (make, name) in parts.items():
        if args.part and part not in args.part:
            continue
        model = make(args.model)
        folder = args.out / part
        folder.mkdir(parents=True, exist_ok=True)
        config = model.config.to_dict() if hasattr(model.config, "to_dict") else dict(model.config)
        (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
        write(folder / name, model, values)
    index = {"_class_name": "Flux2KleinPipeline", "is_distilled": True}
    (args.out / "model_index.json").write_text(json.dumps(index))


main()

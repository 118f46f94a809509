"""Mixes the weights of a run with those it started from, and packs the result: `blend.py START RUN SHARE OUT --card FILE`.

START is a packed model, RUN the folder of `run.py --start START`, SHARE the run's part of each weight (1: the run alone). Encoder, configurations and tokenizer
are START's; the decoder is the run's if that has polished it. `--stem` names other weights of the run than the student's: "base" or "soft" (before the critic).
"""

import argparse
import json

import export
import net
from pack import packed, read_packed


def main():
    from safetensors import safe_open
    from safetensors.torch import save_file

    from session import load_parts

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start")
    parser.add_argument("run")
    parser.add_argument("share", type=float)
    parser.add_argument("out")
    parser.add_argument("--stem", default="student")
    parser.add_argument("--card", required=True, help="file with a short model card")
    args = parser.parse_args()
    with safe_open(args.start, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys() if name.startswith("vae.")}
    with open(args.card) as file:
        metadata["model_card"] = file.read()
    decoder = load_parts(args.run, "vae") or {}
    tensors.update({f"vae.{name}": value for name, value in packed("vae", {n: v for n, v in decoder.items() if n.startswith(("decoder.", "post_quant_conv."))}).items()})
    metadata["transformer/config.json"] = json.dumps(export.transformer_config(), separators=(",", ":"))
    if args.stem == "base":
        metadata.update({"model_index.json": json.dumps(export.model_index(False)), "kiln.default_steps": "24", "kiln.default_guidance": "2"})
    for part, stem in (("transformer", args.stem), ("text_encoder", "text")):
        old, new = read_packed(args.start, part), load_parts(args.run, stem)
        if part == "transformer":
            old = net.grow(old, net.depth(new))
        mixed = {name: args.share * new[name] + (1 - args.share) * value for name, value in old.items()}
        tensors.update({f"{part}.{name}": value for name, value in packed(part, mixed).items()})
    save_file(tensors, args.out, metadata)


if __name__ == "__main__":
    main()

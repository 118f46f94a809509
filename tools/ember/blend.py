"""Mixes the weights of a run with those it started from, and packs the result: `blend.py START RUN SHARE OUT --card FILE`.

START is a packed model, RUN the folder of `run.py --start START`, SHARE the run's part of each weight. Between the two, the new sizes and scenes stay and the
outlines at the default size become START's again. Autoencoder, configurations and tokenizer are START's.
"""

import argparse

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
    parser.add_argument("--card", required=True, help="file with a short model card")
    args = parser.parse_args()
    with safe_open(args.start, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys() if name.startswith("vae.")}
    with open(args.card) as file:
        metadata["model_card"] = file.read()
    for part, stem in (("transformer", "student"), ("text_encoder", "text")):
        old, new = read_packed(args.start, part), load_parts(args.run, stem)
        mixed = {name: args.share * new[name] + (1 - args.share) * value for name, value in old.items()}
        tensors.update({f"{part}.{name}": value for name, value in packed(part, mixed).items()})
    save_file(tensors, args.out, metadata)


if __name__ == "__main__":
    main()

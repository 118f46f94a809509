"""Unpacks the shipped file to a diffusers folder: `unpack.py ember.safetensors OUT`. Weights in f32, exactly the values that Kiln computes with."""

import argparse
import json
import os

from safetensors import safe_open
from safetensors.torch import save_file

from export import with_last_layer, write_json
from pack import METADATA, unpacked

STEMS = {"transformer": "diffusion_pytorch_model", "text_encoder": "model", "vae": "diffusion_pytorch_model"}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("out")
    args = parser.parse_args()
    with safe_open(args.file, "pt") as file:
        metadata = file.metadata()
        tensors = unpacked({name: file.get_tensor(name) for name in file.keys()})
    for name in METADATA:
        write_json(json.loads(metadata[name]), args.out, *name.split("/"))
    for part, stem in STEMS.items():
        state = {n[len(part) + 1:]: v.contiguous() for n, v in tensors.items() if n.startswith(part + ".")}
        save_file(with_last_layer(state) if part == "text_encoder" else state, os.path.join(args.out, part, stem + ".safetensors"), {"format": "pt"})


if __name__ == "__main__":
    main()

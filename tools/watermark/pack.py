"""Packs a checkpoint as the engine reads it, in f16.   pack.py FILE.pt FILE.safetensors"""

import json
import struct
import sys

import torch


def main(checkpoint, out):
    states = torch.load(checkpoint, map_location="cpu")
    tensors = {f"{half}.{name}": tensor.half() for half in states for name, tensor in states[half].items()}
    header, end, data = {}, 0, []
    for name in sorted(tensors):
        data.append(tensors[name].contiguous().numpy().tobytes())
        offsets = [end, end + len(data[-1])]
        header[name] = {"dtype": "F16", "shape": list(tensors[name].shape), "data_offsets": offsets}
        end = offsets[1]
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(out, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + b"".join(data))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Writes a packed model as its difference from another one: Ember base from Ember.

    python delta.py ember.safetensors ember-base.safetensors delta.safetensors [card.txt]

Only the transformer is stored, which `kiln-weights/src/delta.rs` rebuilds to the bit; text encoder, tokenizer and autoencoder
are those of the first model. card.txt is the text that `kiln info` shows. Needs numpy.
"""
import hashlib
import json
import struct
import sys
import zlib

import numpy as np

DTYPES = {"I8": np.int8, "F32": np.uint32, "BF16": np.uint16}
PREFIX = "transformer."
# The rest of the metadata is the parent's.
OWN = ("model_index.json", "kiln.")


def read(path):
    """Entries, metadata and the bytes of a safetensors file."""
    data = open(path, "rb").read()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    return header, header.pop("__metadata__"), data[8 + length:], hashlib.sha256(data).hexdigest()


def tensor(model, name):
    entry = model[0][name]
    return np.frombuffer(model[2][slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])


def scaled(parent, child, name):
    """The parent's matrix in the child's scale, as the decoder computes it: in f32, ties to even."""
    was, now = (tensor(model, f"{name}_scale").view(np.float32).reshape(-1, 1) for model in (parent, child))
    return np.clip(np.round(tensor(parent, name).astype(np.float32) * (was / now)), -127, 127).astype(np.int8)


def difference(parent, child, name):
    """The bytes that turn the parent's tensor into the child's."""
    new, old = tensor(child, name), tensor(parent, name)
    assert new.shape == old.shape and new.dtype == old.dtype, name
    if new.dtype == np.int8:
        return (new - scaled(parent, child, name)).astype(np.int8).tobytes()
    width = new.dtype.itemsize
    return (new - old).reshape(-1).view(np.uint8).reshape(-1, width).T.tobytes()


def rebuild(parent, delta):
    """Reverses `main`: returns name -> array of the child's transformer, without the prefix."""
    parent, (header, metadata, data, _) = read(parent), read(delta)
    stream = np.frombuffer(zlib.decompress(data[slice(*header["difference"]["data_offsets"])]), np.uint8)
    names = sorted(name for name in parent[0] if name.startswith(PREFIX))
    out, at = {}, 0
    for name in sorted(names, key=lambda name: parent[0][name]["dtype"] == "I8"):
        old = tensor(parent, name)
        part, at = stream[at:at + old.nbytes], at + old.nbytes
        if old.dtype == np.int8:
            ratio = tensor(parent, f"{name}_scale").view(np.float32) / out[f"{name}_scale"].view(np.float32)
            scaled = np.clip(np.round(old.astype(np.float32) * ratio.reshape(-1, 1)), -127, 127).astype(np.int8)
            out[name] = scaled + part.view(np.int8).reshape(old.shape)
        else:
            planes = np.ascontiguousarray(part.reshape(old.dtype.itemsize, -1).T)
            out[name] = old + planes.view(old.dtype).reshape(old.shape)
    result = hashlib.sha256(b"".join(out[name].tobytes() for name in names)).hexdigest()
    assert result == json.loads(metadata["kiln.delta"])["result"], "another parent"
    return {name[len(PREFIX):]: value for name, value in out.items()}


def main(parent, child, out, card=None):
    parent, child = read(parent), read(child)
    names = sorted(name for name in child[0] if name.startswith(PREFIX))
    assert names == sorted(name for name in parent[0] if name.startswith(PREFIX)), "other tensors"
    ordered = sorted(names, key=lambda name: child[0][name]["dtype"] == "I8")
    packer = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_FILTERED)
    stream = b"".join(packer.compress(difference(parent, child, name)) for name in ordered) + packer.flush()
    result = hashlib.sha256(b"".join(tensor(child, name).tobytes() for name in names)).hexdigest()
    metadata = {k: v for k, v in child[1].items() if k.startswith(OWN) and parent[1].get(k) != v}
    if card:
        metadata["model_card"] = open(card, encoding="utf-8").read()
    metadata["kiln.delta"] = json.dumps({"parent": parent[3], "result": result})
    header = {"__metadata__": metadata,
              "difference": {"dtype": "U8", "shape": [len(stream)], "data_offsets": [0, len(stream)]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(out, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + stream)
    print(f"{out}: {8 + len(text) + len(stream)} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])

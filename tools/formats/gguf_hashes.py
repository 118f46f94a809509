"""Prints hashes of 64 pseudo-random blocks of each type, dequantized by the `gguf` package.

    pip install gguf && python tools/formats/gguf_hashes.py

The output is the table in crates/kiln-tensor/tests/gguf_blocks.rs, which generates the same blocks (with gguf 0.19.0).
"""

import gguf
import numpy as np
from gguf.quants import dequantize

# Offsets of a block's f16 scales. Their exponents are kept below the largest, so that no value is infinite.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_NL": [0], "IQ4_XS": [0],
}
BLOCKS = 64


def noise(count):
    state, out = 1, bytearray()
    for _ in range(count):
        state = (state * 1664525 + 1013904223) % 2**32
        out.append(state >> 24)
    return out


def fnv(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h


for name, scales in SCALES.items():
    kind = gguf.GGMLQuantizationType[name]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    data = noise(BLOCKS * size)
    for block in range(BLOCKS):
        for scale in scales:
            data[block * size + scale + 1] &= 0xBB
    blocks = np.frombuffer(bytes(data), dtype=np.uint8).reshape(BLOCKS, size)
    decoded = np.ascontiguousarray(dequantize(blocks, kind), dtype="<f4")
    assert decoded.size == BLOCKS * values and np.isfinite(decoded).all()
    decoded += 0.0  # turns -0.0 into 0.0
    rust = {"IQ4_NL": "Iq4Nl", "IQ4_XS": "Iq4Xs"}.get(name, name.replace("_K", "K"))
    print(f'    (Format::{rust}, &{scales}, {fnv(decoded.tobytes()):#018x}),')

"""Prints the squared errors of ggml's own quantizers, for crates/kiln-tests/tests/weights/gguf_errors.rs.

    pip install gguf pywhispercpp && python tools/formats/ggml_errors.py LIBGGML

LIBGGML is ggml's library, `libggml-base.so` beside that package (the numbers in the test are of ggml 0.13.1). The values are those that the test draws, and a matrix of Ember's.
"""

import ctypes
import json
import math
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize

ROWS, COLS = 128, 1024
EMBER = Path(__file__).parents[2] / "assets/ember/ember.safetensors"
MATRIX = "transformer.single_transformer_blocks.0.attn.to_out.weight"
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def uniform():
    state = 1
    while True:
        state = (state * 1664525 + 1013904223) % 2**32
        yield ((state >> 8) + 0.5) / 2**24


def normal(u):
    return math.sqrt(-2 * math.log(next(u))) * math.cos(2 * math.pi * next(u))


def laplacian(u):
    x = next(u) - 0.5
    return math.copysign(-math.log(1 - 2 * abs(x)), x)


def draw(distribution):
    u = uniform()
    return np.array([0.02 * distribution(u) for _ in range(ROWS * COLS)], dtype=np.float32).reshape(ROWS, COLS)


def ember():
    with open(EMBER, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header, start = json.loads(file.read(size)), 8 + size

        def read(name, dtype):
            entry = header[name]
            file.seek(start + entry["data_offsets"][0])
            data = file.read(entry["data_offsets"][1] - entry["data_offsets"][0])
            return np.frombuffer(data, dtype=dtype).reshape(entry["shape"])

        values = read(MATRIX, np.int8).astype(np.float32) * read(MATRIX + "_scale", "<f4")[:, None]
        # Kiln has them in bf16.
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


ggml = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_LOCAL)
ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + 3 * [ctypes.c_int64] + [ctypes.c_void_p]
matrices = [draw(normal), draw(laplacian), ember()]
for name in TYPES:
    kind = gguf.GGMLQuantizationType[name]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    errors = []
    for x in matrices:
        out = np.zeros((x.shape[0], x.shape[1] // values * size), dtype=np.uint8)
        ggml.ggml_quantize_chunk(kind, x.ctypes.data, out.ctypes.data, 0, *x.shape, None)
        difference = dequantize(out, kind).astype(np.float64) - x
        errors.append((difference**2).sum())
    print(f'    (Format::{name.replace("_K", "K")}, [{", ".join(f"{e:.9e}" for e in errors)}]),')

"""Dumps draws of torch's CUDA generator, for the tests of `kiln_tensor::rng::TorchCuda`.

    python tools/golden/cuda_rng.py testdata/rng/torch_cuda.safetensors

Needs a CUDA device and torch; nothing else (the file is written without the safetensors package).
The header's metadata holds the device's layout (multiprocessors, threads per multiprocessor), the
versions, the generator's offset before and after every draw, and whether the low-precision draws are the rounded f32
draws. Long draws are stored as a head, a tail and a strided sample (`.head`, `.tail`, `.every1021`).
"""

import json
import struct
import sys
from pathlib import Path

import torch

SEEDS = [0, 42, 2**32 + 5, 2**63 - 1]
SIZES = [1, 3, 16, 1000, 128 * 4 * 4, 128 * 32 * 32 * 9, 128 * 64 * 64, 128 * 128 * 128]
WHOLE = 2048  # draws up to this length are stored completely
STRIDE = 1021  # a prime, so that the sample covers every thread residue
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def raw(t):
    """Returns the little-endian bytes of a tensor."""
    return bytes(t.detach().cpu().contiguous().flatten().view(torch.uint8).tolist())


def write_safetensors(path, tensors, metadata):
    header, data = {"__metadata__": {k: str(v) for k, v in metadata.items()}}, b""
    for name, t in tensors.items():
        piece = raw(t)
        header[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(piece)]}
        data += piece
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def generator(seed):
    return torch.Generator("cuda").manual_seed(seed)


def offset(g):
    return g.get_offset() if hasattr(g, "get_offset") else None


class Dump:
    def __init__(self):
        self.tensors, self.draws = {}, []

    def keep(self, name, t):
        t = t.flatten().cpu()
        if t.numel() <= WHOLE:
            self.tensors[name] = t
        else:
            self.tensors[name + ".head"] = t[:WHOLE].clone()
            self.tensors[name + ".tail"] = t[-WHOLE:].clone()
            self.tensors[name + ".every1021"] = t[::STRIDE].clone()

    def draw(self, name, g, n, seed, dtype=torch.float32, keep=True):
        before = offset(g)
        t = torch.randn(n, device="cuda", generator=g, dtype=dtype)
        self.draws.append(
            dict(name=name, seed=seed, n=n, dtype=NAMES[dtype], offset_before=before, offset_after=offset(g))
        )
        if keep:
            self.keep(name, t)
        return t


def main(path):
    dump, checks = Dump(), {}
    for seed in SEEDS:
        for n in SIZES:
            f32 = dump.draw(f"f32.seed{seed}.n{n}", generator(seed), n, seed, keep=seed == 42 or n <= WHOLE)
            for dtype in (torch.bfloat16, torch.float16):
                name = f"{NAMES[dtype].lower()}.seed{seed}.n{n}"
                low = dump.draw(name, generator(seed), n, seed, dtype, keep=n <= 16 and seed == 42)
                checks[f"{name} equals the rounded f32 draw"] = bool((low == f32.to(dtype)).all())
    # Consecutive draws from one generator: the offset must advance with the layout.
    g = generator(7)
    for i, n in enumerate([3, 1000, 128 * 4 * 4, 1, 128 * 128 * 128, 16, 20]):
        dump.draw(f"sequence.seed7.{i}.n{n}", g, n, 7)
    # The uniform draw shows Philox's integers without the normal transform.
    for seed in SEEDS:
        dump.tensors[f"uniform.seed{seed}.n64"] = torch.rand(64, device="cuda", generator=generator(seed)).cpu()

    p = torch.cuda.get_device_properties(0)
    metadata = dict(
        command="python tools/golden/cuda_rng.py testdata/rng/torch_cuda.safetensors",
        torch=torch.__version__, cuda=torch.version.cuda, device=p.name,
        multiprocessors=p.multi_processor_count,
        threads_per_multiprocessor=p.max_threads_per_multi_processor,
        draws=json.dumps(dump.draws), checks=json.dumps(checks),
        tolerance="1.5e-6 absolute: measured at most 1.2e-6; the device's sine and cosine are up to 3.4e-7 off the true "
        "ones, times the radius",
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, dump.tensors, metadata)
    print(json.dumps({k: v for k, v in metadata.items() if k not in ("draws", "checks")}, indent=1))
    print("low-precision draws that are NOT the rounded f32 draw:", [k for k, v in checks.items() if not v] or "none")
    print(path, Path(path).stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "testdata/rng/torch_cuda.safetensors")
